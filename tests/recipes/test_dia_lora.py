"""The Dia LoRA recipe with two real ranks, compared with plain PyTorch in one process."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import dia_lora
from common.ds_config import resolve_ds
from common.tokens import TokenDataset
from helpers import support
from helpers.dia_plain import train_plain
from helpers.dia_support import SMALL, poison_letter_q, stereo_tokens
from helpers.rank_server import Runs
from models.dia.data import Clips
from models.dia.layout import layout_of
from models.dia.weights import EMBED, HEAD, load_dia, widen

pytestmark = pytest.mark.distributed

ZERO2 = pytest.param("zero2", marks=pytest.mark.quick)
LEARNING = {
    **SMALL,
    "lora_groups": ["attn_mlp", "head"],
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "steps": 16,
    "micro_tokens": 900,
}
STEREO = {**SMALL, "channels": 18, "micro_tokens": 900}
LEARNING |= {"accumulation": 1, "lr": 5e-3}


@pytest.fixture(scope="module")
def runs(demo, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    poisoned = poison_letter_q(demo / "dia", folder / "poisoned-dia")
    q_clip = dataset_with_one_q(demo, folder / "q-tokens")
    configs = {
        "zero0": {**SMALL, "ds": support.stage_file(folder, 0)},
        "zero2": {**SMALL, "ds": "ds_configs/zero2.json"},
        "buckets": {**SMALL, "ds": support.stage_file(folder, 2, reduce_bucket_size=10_000)},
        "zero3": {**SMALL, "ds": "ds_configs/zero3.json"},
        "zero2_offload": {**SMALL, "ds": "ds_configs/zero2_offload.json"},
        "zero3_offload": {**SMALL, "ds": "ds_configs/zero3_offload.json"},
        "checkpointing": {**SMALL, "ds": "ds_configs/zero2.json", "gradient_checkpointing": True},
        "head": {**SMALL, "ds": "ds_configs/zero3.json", "lora_groups": ["attn", "head"]},
        "ema2": {**SMALL, "ds": "ds_configs/zero2.json", "ema": 0.9},
        "ema3": {**SMALL, "ds": "ds_configs/zero3.json", "ema": 0.9},
        "bf16": {**LEARNING, "ds": "ds_configs/zero2.json", "precision": "bf16"},
        "adamw8bit": {**LEARNING, "ds": "ds_configs/zero2.json", "optimizer": "adamw8bit"},
        "4bit": {**LEARNING, "ds": "ds_configs/zero2.json", "quantize": "4bit"},
        "8bit": {**LEARNING, "ds": "ds_configs/zero2.json", "quantize": "8bit"},
    }
    stereo = {"data": str(stereo_tokens(demo, folder / "stereo-tokens", codec=False))}
    stereo |= {
        "eval_data": stereo["data"],
        "allow_overlap": True,
        "samples": 3,
        "ds": "ds_configs/zero3.json",
    }
    configs["stereo"] = STEREO | stereo
    poison = {"text_dropout": 0.0, "data": str(q_clip), "model": str(poisoned)}
    configs |= {f"nan{stage}": {**SMALL, **poison, "ds": support.stage_file(folder, stage)} for stage in (0, 2, 3)}
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}
    configs = {name: assets | config for name, config in configs.items()}
    return Runs(two_ranks, "dia_lora", folder, configs, after="helpers.dia_support:probe")


def dataset_with_one_q(demo, target):
    tokens = TokenDataset(str(demo / "tokens/train"))
    clips = [{"id": tokens.id(i), "text": tokens.text(i), "codes": tokens.codes(i)} for i in range(24)]
    clips[5]["text"] = "[S1] q"
    return support.write_tokens(target, clips)


def adapter(run) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "adapter_model.safetensors")


# ---- equality with one process ---------------------------------------------------------------------------------


def config_for(demo, ds, **changes) -> dia_lora.Config:
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train")}
    return replace(dia_lora.Config(**SMALL, **assets), ds=str(ds), **changes)


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    """The same training in one process with torch's own AdamW, clipping and cross-entropy: weights and averages."""
    config = config_for(demo, support.stage_file(tmp_path_factory.mktemp("plain"), 0))
    model = dia_lora.build_model(config, resolve_ds(config.ds, config, 1), {})
    clips = Clips(TokenDataset(config.data), layout_of(model.get_base_model().config), config, {}, train=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, averaged, losses = train_plain(model, clips, config, [{"params": trained, "weight_decay": 0.0}])
    weights, averaged = (
        {name.replace(".default", ""): value for name, value in values.items()} for values in (weights, averaged)
    )
    return weights, averaged, losses


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    assert set(found) == set(expected) and len(found) > 0
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= tolerance, worst
    assert any(float(value.abs().max()) > 1e-3 for name, value in found.items() if "lora_B" in name)


@pytest.mark.parametrize("run", ["zero0", ZERO2, "buckets", "zero3", "checkpointing", "zero2_offload", "zero3_offload"])
def test_two_ranks_equal_one_process(runs, plain, run):
    weights, _, losses = plain
    assert_same(adapter(runs / run), weights, tolerance=1e-6)
    logged = [record["loss"] for record in support.step_records(runs / run)]
    assert logged == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("run", ["ema2", "ema3"])
def test_exported_average_equals_one_process(runs, plain, run):
    assert_same(adapter(runs / run), plain[1], tolerance=1e-6)


@pytest.mark.parametrize("run", [ZERO2, "ema2", "ema3"])
def test_evaluation_is_the_exported_models_on_any_number_of_ranks(runs, demo, run):
    config = config_for(demo, "ds_configs/zero2.json")
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_dia(config.model, torch.float32), str(runs / run / "export")).eval()
    layout = layout_of(model.get_base_model().config)
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout, config, {}, train=False)
    total, count = 0.0, 0
    for i in range(len(clips)):
        batch = clips.batch([i])
        labels = batch.pop("labels").transpose(1, 2).flatten(0, 1)
        batch.pop("ids")
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    logged = [record for record in support.metrics(runs / run) if record.get("event") == "eval"]
    assert [record["step"] for record in logged] == [0, 5]
    assert logged[-1]["loss"] == pytest.approx(total / count, abs=1e-6)


# ---- stereo -----------------------------------------------------------------------------------------------------


def test_a_stereo_adapter_under_zero3_equals_one_process_and_has_its_embedding_and_head(runs, demo):
    run, data = runs / "stereo", runs / "stereo-tokens"
    config = replace(dia_lora.Config(**STEREO), model=str(demo / "dia"), data=str(data))
    model = dia_lora.build_model(config, {"zero_optimization": {"stage": 0}}, {})
    clips = Clips(TokenDataset(config.data), layout_of(model.get_base_model().config), config, {}, train=True)
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    first = {}  # each element's first gradient

    def keep_first(name, p) -> None:
        first.setdefault(name, p.grad.abs())

    for name, p in trained.items():
        p.register_post_accumulate_grad_hook(functools.partial(keep_first, name))
    weights, _, losses = train_plain(model, clips, config, [{"params": list(trained.values()), "weight_decay": 0.0}])
    weights = {name.replace(".default", ""): value for name, value in weights.items()}
    # Adam's first update is lr g / (|g| + 1e-8): where g is about 1e-8, its rounding (1e-10; g is 2e-5 in the median)
    # moves a weight by 1e-6. In 1 of 600 elements it is below 1e-7; there plain float32 is 5e-6 off plain float64.
    rounded = {name: (value > 0) & (value < 1e-7) for name, value in first.items()}
    assert sum(int(chosen.sum()) for chosen in rounded.values()) < 0.005 * sum(p.numel() for p in trained.values())
    assert_same(adapter(run), weights, tolerance=5e-6)
    settled = {name: torch.where(rounded[name], weights[name], value) for name, value in adapter(run).items()}
    assert_same(settled, weights, tolerance=1e-6)
    assert [record["loss"] for record in support.step_records(run)] == pytest.approx(losses, abs=1e-6)
    assert len(list((run / "samples").glob("step-00000005/*.npy"))) == 3
    # Plain PEFT puts both tables in place of those of the widened base, which never had the new channels.
    from peft import PeftModel

    base = load_dia(config.model, torch.float32)
    widen(base, {"zero_optimization": {"stage": 0}})
    before = {name: base.get_parameter(name).detach().clone() for name in (EMBED, HEAD)}
    merged = PeftModel.from_pretrained(base, str(run / "export")).merge_and_unload()
    for name, table in before.items():
        found = merged.get_parameter(name).detach()
        assert torch.equal(found, adapter(run)[f"base_model.model.{name}"])
        half = len(found) // 2
        assert not torch.equal(found[:half], found[half:]) and torch.equal(table[:half], table[half:])
    batch = Clips(TokenDataset(config.data), layout_of(base.config), config, {}, train=False).batch([0, 1])
    batch = {name: value for name, value in batch.items() if name not in ("ids", "labels", "positions")}
    with torch.no_grad():
        logits = merged.eval()(**batch, use_cache=False).logits.numpy()
    assert np.abs(logits - np.load(run / "probe.npz")["logits"]).max() <= 1e-5


# ---- what comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [ZERO2, "zero3", "zero3_offload", "head"])
def test_adapter_loads_with_plain_peft_and_gives_the_engines_logits(runs, demo, run):
    from peft import PeftModel
    from transformers import DiaForConditionalGeneration

    base = DiaForConditionalGeneration.from_pretrained(str(demo / "dia"))
    model = PeftModel.from_pretrained(base, str(runs / run / "export")).eval()
    config = config_for(demo, "ds_configs/zero2.json")
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout_of(base.config), config, {}, train=False)
    batch = clips.batch([0, 1])
    batch.pop("ids")
    batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits.numpy()
        with model.disable_adapter():
            untouched = model(**batch, use_cache=False).logits.numpy()
    engine = np.load(runs / run / "probe.npz")["logits"]
    assert np.abs(logits - engine).max() <= 1e-5
    assert np.abs(untouched - engine).max() > 1e-3


@pytest.mark.parametrize("run", ["bf16", "adamw8bit", "4bit", "8bit"])
def test_low_precision_trains(runs, run):
    losses = [record["loss"] for record in support.step_records(runs / run)]
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    assert all(torch.isfinite(value).all() for value in adapter(runs / run).values())


def test_adapter_of_a_4bit_base_reloads(runs, demo):
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    support.keep_4bit_weights_as_they_are()
    quantized = load_dia(
        str(demo / "dia"),
        torch.float32,
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["logits_dense"],
        ),
    )
    model = PeftModel.from_pretrained(quantized, str(runs / "4bit" / "export")).eval()
    config = config_for(demo, "ds_configs/zero2.json")
    layout = layout_of(model.get_base_model().config)
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout, config, {}, train=False)
    batch = clips.batch([0, 1])
    batch.pop("ids")
    batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits.float().numpy()
    assert np.abs(logits - np.load(runs / "4bit" / "probe.npz")["logits"]).max() <= 1e-4


@pytest.mark.quick
def test_training_never_imports_a_codec_or_a_resampler(runs):
    modules = set(json.loads((runs / "zero2" / "modules.json").read_text()))
    assert "torch" in modules
    assert not {m for m in modules if m.split(".")[0] in ("dac", "torchaudio", "audiotools", "librosa", "julius")}
    assert "transformers.models.dac.modeling_dac" not in modules


@pytest.mark.quick
def test_nothing_stays_in_shared_memory_however_the_ranks_end(runs):
    """The names of the ranks' buffers are gone while the ranks still run, so that not even kill -9 leaves them."""
    assert json.loads((runs / "zero2" / "buffers.json").read_text()) == []


def test_run_folder_is_complete(runs, demo):
    run = runs / "zero2"
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["lr"] == SMALL["lr"] and config["ds_config"]["zero_optimization"]["stage"] == 2
    assert config["identity"]["fingerprint"]["data"] == TokenDataset(str(demo / "tokens/train")).fingerprint()
    assert {"torch", "deepspeed", "peft"} <= set(config["versions"])
    fields = {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_s", "step_s", "rss_gb"}
    assert all(fields <= set(record) for record in support.step_records(run))
    assert [r["event"] for r in support.metrics(run) if "event" in r] == ["eval", "eval", "checkpoint", "done"]
    assert list((run / "tensorboard").glob("events*")) and (run / "report.html").stat().st_size > 10_000


# ---- non-finite steps ------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_nan_clip_is_named_and_its_step_skipped_on_every_rank(runs, stage):
    records = support.metrics(runs / f"nan{stage}")
    name = TokenDataset(str(runs / "q-tokens")).id(5)
    skips = [record for record in records if record.get("event") == "skip"]
    assert skips and all(name in record["ids"] for record in skips)
    assert len(skips) + len(support.step_records(runs / f"nan{stage}")) == SMALL["steps"]
    assert all(torch.isfinite(value).all() for value in adapter(runs / f"nan{stage}").values())
    assert skips == [r for r in support.metrics(runs / "nan2") if r.get("event") == "skip"]
