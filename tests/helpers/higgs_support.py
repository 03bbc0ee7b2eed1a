"""What the tests of Higgs Audio v2 share."""

import dataclasses
import functools

from common.tokens import TokenDataset
from higgs_clone import Config
from models.higgs.data import VoiceClips
from models.higgs.layout import layout_of
from models.higgs.text import Chat

SMALL = {
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "precision": "fp32",
    "lr": 5e-4,
    "warmup": 2.0,
    "steps": 5,
    "micro_tokens": 800,
    "accumulation": 2,
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
    "max_start_loss": 0.0,
}


def assets(demo) -> dict:
    tokens = {"data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}
    return {"model": str(demo / "model"), **tokens}


@functools.cache
def tokenizer_of(demo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo / "model"), local_files_only=True)


FACTS = {"codec": "higgs", "channels": 8, "codebooks": 8, "sample_rate": 24000, "hop": 960}
WEIGHTS = {"ada": 2.0, "ben": 0.5, "cleo": 1.0, "dov": 0.25}


def weighted(demo, folder) -> str:
    """The demo's training clips with a loss weight per speaker."""
    from helpers.support import write_tokens

    source = TokenDataset(str(demo / "tokens/train"))
    clips = [{"id": source.id(i), "text": source.text(i), "codes": source.codes(i)} for i in range(len(source))]
    columns = {name: source.column(name).to_pylist() for name in ("ref", "speaker", "split")}
    columns["weight"] = [WEIGHTS[speaker] for speaker in columns["speaker"]]
    return str(write_tokens(folder, clips, columns=columns, **FACTS))


def dialogues(demo, folder, *rows: tuple[str, ...]) -> str:
    """A dataset of (id, text, ref, ref1, ...) with the demo's codes of that id; an empty text is the demo's own."""
    from helpers.support import write_tokens

    source = TokenDataset(str(demo / "tokens/train"))
    at = {source.id(i): i for i in range(len(source))}
    clips = [{"id": id, "text": text or source.text(at[id]), "codes": source.codes(at[id])} for id, text, *_ in rows]
    names = ("ref", "ref1", "ref2", "ref3")[: len(rows[0]) - 2]
    columns = {name: [row[2 + n] for row in rows] for n, name in enumerate(names)}
    return str(write_tokens(folder, clips, columns=columns, **FACTS))


def make_clips(demo, folder=None, train=True, max_positions=None, **flags) -> VoiceClips:
    """The demo's clips, or a dataset's, with these flags."""
    from transformers import HiggsAudioV2Config

    config = HiggsAudioV2Config.from_pretrained(str(demo / "model"))
    tokenizer = tokenizer_of(demo)
    tokens = TokenDataset(str(folder or demo / "tokens" / ("train" if train else "eval")))
    settings = Config(**flags)
    layout = layout_of(config, tokenizer)
    if max_positions:
        layout = dataclasses.replace(layout, max_positions=max_positions)
    return VoiceClips(tokens, layout, Chat(tokenizer), settings, train)


def logits_of(model, config, indices=(0, 1)):
    """Logits of the first evaluation clips, from the model's own forward."""
    from pathlib import Path

    clips = make_clips(Path(config.model).parent, config.eval_data, train=False)
    return model(**for_the_library(clips.batch(list(indices))), use_cache=False).logits


def for_the_library(batch: dict, *labels: str) -> dict:
    """What the library's own forward takes of a batch; `labels`: also these."""
    named = ("input_ids", "attention_mask", "position_ids", "audio_input_ids", "audio_input_ids_mask", *labels)
    return {name: batch[name] for name in named if name in batch}


def text_only_rank(process, scorer, model: str, ds: str, out: str) -> None:
    """Three optimizer steps in which the second rank has a chat without any audio."""
    import json
    from pathlib import Path

    from safetensors.torch import save_file

    from common import engine, optim
    from common.ds_config import resolve_ds
    from higgs_clone import build_model, compute_loss

    config = Config(model=model, data="x", ds=ds, preset="audio_path+attn", precision="fp32", lr=5e-5)
    resolved = resolve_ds(ds, config, process.world)
    trained = build_model(config, resolved)
    clips = make_clips(Path(model).parent)
    loss_fn = functools.partial(compute_loss, clips=clips)
    groups = optim.parameter_groups(trained, config.weight_decay, no_decay=("embed", "norm"))
    ds_engine = engine.start_engine(trained, loss_fn, optim.build_optimizer(groups, config, resolved), resolved)
    losses = []
    for step in range(3):
        batch = text_only(clips) if process.rank else clips.batch([step, step + 1])
        output = ds_engine(batch)
        engine.backward(ds_engine, output.loss_sum, clips.target_weight([step, step + 1]), process.world, last=True)
        engine.take_step(ds_engine)
        losses.append(float(stats_of(output)[0].sum()))
    weights = engine.full_weights(ds_engine.module.model)
    if process.is_main:
        Path(out).mkdir()
        save_file(weights, f"{out}/weights.safetensors")
        Path(out, "losses.json").write_text(json.dumps(losses))


def stats_of(output):
    """What the loss consists of, as one tensor: sums and counts, per codebook and for the text."""
    import torch

    return torch.stack([sums for name, sums in output.parts.items() if name != "end"], dim=1)


def text_only(clips) -> dict:
    from models.higgs.layout import build_row

    [ids] = clips.chat.ids([clips.chat.prompt("bada gumi.", None, None, answer=False)])
    return clips.collate([build_row("text only", ids, [], clips.layout, answer=False)])


def start_from(process, scorer, source: str, target: str, name: str) -> None:
    """A run folder that holds only this checkpoint of another run."""
    import json
    import shutil
    from pathlib import Path

    from common.runtime import on_main

    def copy() -> None:
        shutil.copytree(Path(source, "checkpoints", name), Path(target, "checkpoints", name))
        entries = json.loads(Path(source, "checkpoints/index.json").read_text())["checkpoints"]
        kept = [entry for entry in entries if entry["name"] == name]
        Path(target, "checkpoints/index.json").write_text(json.dumps({"checkpoints": kept}))

    on_main(copy, process)


def probe(engine, config, process) -> None:
    """RUN/probe.npz and RUN/modules.json: see dia_support.write_probe; of a whole model also RUN/greedy.npy, what it
    says to the first evaluation clip."""
    from pathlib import Path

    import numpy as np
    import torch

    from helpers.dia_support import write_probe
    from models.higgs.generate import speak

    model = engine.module.model.eval()
    with torch.no_grad():
        write_probe(logits_of(model, config), config, process)
    if config.preset == "full":
        clips = make_clips(Path(config.model).parent, config.eval_data, train=False)
        [said] = speak(model, clips.rows([0], answer=False), clips.layout, 12, 0, process.device, greedy=True)
        if process.is_main:
            np.save(Path(config.out) / "greedy.npy", said.codes)
