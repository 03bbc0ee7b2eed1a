"""What a micro-batch of each real model asks of a GPU, counted without one: host waits, kernels, saved bytes (S3, S4).

    python tests/bench/bench_counts.py                  all models, about two minutes and 2 GB
    python tests/bench/bench_counts.py dia_full         some of them

Each recipe's own compute_loss, forward and backward, on tests/helpers/fake_device.py with the configuration of the real
checkpoint, in bf16 (the enhancers in fp32); no large weight is ever allocated. "plain" is the forward and backward pass
of transformers (and PEFT) on the same model and clips, with the loss of transformers.

Waits: how often the host waits for the device. Kernels: operations other than views. Bytes: saved for the backward
pass, per padded position.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
import torch  # noqa: E402
from run import Row, report  # noqa: E402

from helpers import cmgan_support, diffusion_buffer_support, fake_device, support  # noqa: E402

DS = {"zero_optimization": {"stage": 2}}


@dataclass
class Case:
    """What is measured. Both build everything anew, because a run replaces the weights for good."""

    ours: Callable[[], tuple]  # -> model, batch, loss_fn(model, batch)
    plain: Callable[[], tuple] | None = None


def on_meta(make, *args):
    """A model in bf16 that has shapes only."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return make(*args)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- Dia 1.6B ----------------------------------------------------------------------------------------------------


def dia_case(recipe: str, **flags) -> Case:
    """Clips of 20 and 15 s, texts of 300 and 225 bytes."""
    import importlib

    from transformers import DiaConfig, DiaForConditionalGeneration

    from common.lora import base_model
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    recipe = importlib.import_module(recipe)

    def build():
        config = recipe.Config(data="x", **flags)
        with mock.patch.object(
            recipe, "load_dia", lambda *args, **more: on_meta(DiaForConditionalGeneration, DiaConfig())
        ):
            model = recipe.build_model(config, DS, {}).train()
        draw = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            clips = [
                {"id": str(n), "text": "[S1] " + "a" * (n * 15 - 1), "codes": draw.integers(0, 1024, (n * 86, 9))}
                for n in (20, 15)
            ]
            tokens = TokenDataset(str(support.write_tokens(Path(folder, "tokens"), clips)))
            clips = Clips(tokens, layout_of(base_model(model).config), config, {}, train=True)
            batch = clips.batch([0, 1])
        return model, batch, functools.partial(recipe.compute_loss, clips=clips)

    def plain():
        model, batch, _ = build()
        is_padding = batch["decoder_input_ids"] == base_model(model).config.decoder_config.pad_token_id
        batch["decoder_attention_mask"] = (~is_padding.all(-1)).long()

        def loss(model, batch):
            names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
            labels = batch["labels"].transpose(1, 2).flatten(0, 1)
            return model(**{name: batch[name] for name in names}, labels=labels, use_cache=False).loss

        return model, batch, loss

    return Case(build, plain)


# ---- Higgs 3B base -----------------------------------------------------------------------------------------------


def higgs_case(**flags) -> Case:
    """Clips of 20 and 15 s, each with another one of 8 s as its reference; the demo's tokenizer."""
    from demo import ensure_demo
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    import higgs_clone
    from helpers import higgs_support

    demo = ensure_demo(ROOT / "runs" / "demo-assets-higgs", "higgs")
    ids = HiggsAudioV2Config.from_pretrained(str(demo / "model"))
    names = ("audio_token_id", "audio_bos_token_id", "audio_delay_token_id", "pad_token_id")
    real = HiggsAudioV2Config(codebook_size=1026, **{name: getattr(ids, name) for name in names})

    def build():
        config = higgs_clone.Config(data="x", **flags)
        make = functools.partial(on_meta, HiggsAudioV2ForConditionalGeneration, real)
        with mock.patch.object(higgs_clone, "load_higgs", lambda *args, **more: make()):
            model = higgs_clone.build_model(config, DS).train()
        draw = np.random.default_rng(0)
        seconds = {"long": 20, "short": 15, "reference": 8}
        rows = [
            {"id": name, "text": "bada gumi " * n, "codes": draw.integers(0, 1024, (25 * n, 8))}
            for name, n in seconds.items()
        ]
        facts = {"codec": "higgs", "channels": 8, "codebooks": 8, "sample_rate": 24000, "hop": 960}
        with tempfile.TemporaryDirectory() as folder:
            refs = {"ref": ["reference", "reference", ""]}
            tokens = support.write_tokens(Path(folder, "tokens"), rows, columns=refs, codebook_size=1024, **facts)
            clips = higgs_support.make_clips(demo, tokens, **flags)
            batch = clips.batch([0, 1])
        return model, batch, functools.partial(higgs_clone.compute_loss, clips=clips)

    def plain():
        model, batch, _ = build()
        names = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask", "audio_labels")
        return model, batch, lambda model, batch: model(**{n: batch[n] for n in names}, use_cache=False).loss

    return Case(build, plain)


# ---- Llama with experts ------------------------------------------------------------------------------------------

ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Width, layers, feed-forward, heads, K and V heads, size of a head, tied tables; MusicGen's width and feed-forward.
LLAMAS = {
    "1b": ((2048, 16, 8192, 32, 8, 64, True), (1024, 4096)),  # Llama-3.2-1B, MusicGen-small
    "8b": ((4096, 32, 14336, 32, 8, 128, False), (2048, 8192)),  # Llama-3.1-8B, MusicGen-large
}


def llama_case(size: str, untie: str = "ffn") -> Case:
    """Clips of 10 and 8 s with captions of 60 and 40 tokens. Plain is the same Llama trained whole, with the music ids
    as further rows of its tables."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import llama_mot
    from helpers import mot_support
    from models.mot.build import choose_parts
    from models.mot.layout import Layout
    from models.mot.network import AudioLayer, Expert, MoTLlama

    (width, layers, ffn, heads, kv_heads, head_dim, tied), (donor_width, donor_ffn) = LLAMAS[size]

    def llama(vocab: int):
        config = LlamaConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=131072,
            tie_word_embeddings=tied,
            rope_parameters=ROPE,
        )
        return on_meta(LlamaForCausalLM, config)

    def build():
        base = llama(128256).requires_grad_(False)
        expert = Expert("musicgen", donor_width, donor_ffn)
        music = [on_meta(AudioLayer, base.config, expert, untie) for _ in range(layers)]
        model = on_meta(MoTLlama, base, Layout(128256), expert, untie, music).train()
        choose_parts(model, ["all"])
        texts = [np.arange(1, n + 1) for n in (60, 40)]
        batch = mot_support.batch_of(model, [500, 400], texts) | {"codebook_weights": torch.ones(4)}
        return model, batch, llama_mot.compute_loss

    def plain():
        model, batch, _ = build()
        rows = model.layout.rows

        def loss(model, batch):
            labels = batch["labels"].amax(-1)  # one codebook per position in the flat layout
            ids = batch["input_ids"][..., 0]
            return model(ids, attention_mask=batch["mask"], labels=labels, use_cache=False).loss

        return llama(128256 + rows).train(), batch, loss

    return Case(build, plain)


# ---- enhancers -------------------------------------------------------------------------------------------------


def cmgan_case() -> Case:
    """The generator as published, 4 crops of 2 s."""
    return Case(lambda: cmgan_support.generator_step(64))


def discriminator_case() -> Case:
    """The discriminator as published on the same crops."""
    return Case(lambda: cmgan_support.discriminator_step(16))


def buffer_case(network: str) -> Case:
    """A network as published, 4 crops of 128 frames."""
    return Case(lambda: diffusion_buffer_support.training_step(network, 0))


ROWS: dict[str, Callable[[], Case]] = {
    "dia_lora": lambda: dia_case("dia_lora"),
    "dia_full": lambda: dia_case("dia_full"),
    "higgs_clone": higgs_case,
    "higgs_clone full": lambda: higgs_case(preset="full", lr=1e-5),
    "llama_mot 1B": lambda: llama_case("1b"),
    "llama_mot 1B untie all": lambda: llama_case("1b", "all"),
    "llama_mot 8B": lambda: llama_case("8b"),
    "cmgan": cmgan_case,
    "cmgan discriminator": discriminator_case,
    "diffusion_buffer ncsnpp": lambda: buffer_case("ncsnpp"),
    "diffusion_buffer block_causal": lambda: buffer_case("block_causal"),
}


# ---- the rows ----------------------------------------------------------------------------------------------------


def measure(name: str, case: Case) -> None:
    def run(parts: tuple) -> tuple[fake_device.Counts, int]:
        model, batch, loss = parts
        return fake_device.run(loss, model, batch), batch["positions"]

    ours, positions = run(case.ours())
    waits, kernels = ours.syncs.total(), ours.launches
    plain = run(case.plain())[0] if case.plain else None
    others = f"{plain.syncs.total()} (plain)" if plain else ""
    report(Row("S3", f"{name}: host waits per micro-batch", str(waits), waits, "== 0", others))
    assert not any(call.dense for call in ours.attention), f"{name}: attention has a mask for every pair of positions"
    if not plain:
        print(f"{name}: {kernels:,} kernels")
        return
    report(Row("S4", f"{name}: kernels", f"{kernels:,}", kernels / plain.launches, "<= 1.05", f"{plain.launches:,}"))
    kb = [f"{counts.saved_bytes / 1000 / positions:,.0f} kB" for counts in (ours, plain)]
    ratio = ours.saved_bytes / plain.saved_bytes
    report(Row("S4", f"{name}: saved for the backward pass, per position", kb[0], ratio, "<= 1.05", kb[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all without")
    args = parser.parse_args()
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row {', '.join(unknown)}")
    for name in args.rows or ROWS:
        measure(name, ROWS[name]())


if __name__ == "__main__":
    main()
