"""The full-weight Dia recipe with two real ranks, compared with plain PyTorch in one process."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import DiaForConditionalGeneration

import dia_full
from common import checkpoint
from common.ds_config import resolve_ds
from common.tokens import TokenDataset
from helpers import support
from helpers.dia_plain import train_plain
from helpers.dia_support import stereo_tokens
from helpers.faults import assert_same_run, kill_one, start_and_halt
from helpers.rank_server import Runs
from models.dia import weights as dia_weights
from models.dia.data import Clips
from models.dia.layout import layout_of

pytestmark = pytest.mark.distributed

# At this rate float noise stays under 1e-6 in all of 1.3 M weights: Adam divides it by gradients as small as 1e-8.
SMALL = {
    "precision": "fp32",
    "lr": 3e-5,
    "warmup": 2.0,
    "steps": 5,
    "micro_tokens": 400,
    "accumulation": 2,
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
}
ZERO3 = pytest.param("zero3", marks=pytest.mark.quick)
TAGS = pytest.param("tags", marks=pytest.mark.quick)
LEARNING = {**SMALL, "steps": 14, "micro_tokens": 900, "accumulation": 1, "lr": 3e-3, "warmup": 3.0}
# AdamW's first step moves every weight that has a gradient by the rate itself.
ONE_STEP = {
    **SMALL,
    "lr": 5e-4,
    "steps": 1,
    "warmup": 0.0,
    "weight_decay": 0.0,
    "text_dropout": 0.0,
}
ELASTIC = {**SMALL, "steps": 6, "save_every": 2, "keep": 5, "ema": 0.9}


@pytest.fixture(scope="module")
def runs(demo, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    stereo = stereo_tokens(demo, folder / "stereo-tokens")
    tags = folder / "tags.json"
    tags.write_text(json.dumps({"[xx]": 4}))
    zero = {name: f"ds_configs/{name}.json" for name in ("zero2", "zero3", "zero2_offload", "zero3_offload")}
    configs = {
        **{name: {**SMALL, "ds": file} for name, file in zero.items()},
        "checkpointing": {**SMALL, "ds": zero["zero3"], "gradient_checkpointing": True},
        "ema3": {**SMALL, "ds": zero["zero3"], "ema": 0.9},
        "bf16": {**LEARNING, "ds": zero["zero2"], "precision": "bf16"},
        "bf16_zero3": {**LEARNING, "ds": zero["zero3"], "precision": "bf16"},
        "adamw8bit": {**LEARNING, "ds": zero["zero2"], "optimizer": "adamw8bit"},
        "adamw8bit_zero3": {**LEARNING, "ds": zero["zero3"], "optimizer": "adamw8bit", "min_eos_recall": 1.0},
        "frozen": {**ONE_STEP, "ds": zero["zero2"], "freeze": ["embeddings", "first:1"]},
        "frozen3": {**ONE_STEP, "ds": zero["zero3"], "freeze": ["encoder"]},
        "tags": {**LEARNING, "ds": zero["zero3"], "tag_map": str(tags)},
        "stereo": {**LEARNING, "ds": zero["zero3"], "channels": 18, "data": str(stereo), "eval_data": str(stereo)},
        "elastic2": {**ELASTIC, "ds": zero["zero2"]},
        "elastic3": {**ELASTIC, "ds": zero["zero3"]},
    }
    configs["stereo"] |= {"allow_overlap": True, "samples": 1, "micro_tokens": 1800}
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}
    configs = {name: assets | config for name, config in configs.items()}
    return Runs(two_ranks, "dia_full", folder, configs, after="helpers.dia_support:probe")


def exported(run) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


# ---- equality with one process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    """The same training in one process with torch's own AdamW, clipping and cross-entropy: weights and averages."""
    file = tmp_path_factory.mktemp("plain") / "zero0.json"
    file.write_text('{"zero_optimization": {"stage": 0}}')
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train")}
    config = replace(dia_full.Config(**SMALL, **assets), ds=str(file))
    model = DiaForConditionalGeneration.from_pretrained(demo / "dia").train()
    clips = Clips(TokenDataset(config.data), layout_of(model.config), config, {}, train=True)
    decays = [p for name, p in model.named_parameters() if re.search(r"_proj\.weight|logits_dense", name)]
    others = [p for name, p in model.named_parameters() if not re.search(r"_proj\.weight|logits_dense", name)]
    groups = [{"params": decays, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return train_plain(model, clips, config, groups)


def difference(found: dict, expected: dict) -> float:
    assert set(found) == set(expected) and len(found) > 40
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("run", ["zero2", ZERO3, "zero2_offload", "zero3_offload", "checkpointing"])
def test_two_ranks_equal_one_process(runs, plain, demo, run):
    weights, _, losses = plain
    assert difference(exported(runs / run), weights) <= 1e-6
    assert difference(weights, load_file(demo / "dia" / "model.safetensors")) > 5e-5, "nothing was trained"
    logged = [record["loss"] for record in support.step_records(runs / run)]
    assert np.abs(np.array(logged) - losses).max() <= 1e-5


def test_the_exported_average_equals_one_process(runs, plain):
    assert difference(exported(runs / "ema3"), plain[1]) <= 1e-6


@pytest.mark.parametrize("run", ["zero2", ZERO3, "zero3_offload", "bf16_zero3"])
def test_the_export_loads_with_plain_transformers_and_gives_the_engines_logits(runs, demo, run):
    model = DiaForConditionalGeneration.from_pretrained(runs / run / "export").eval()
    assert model.dtype == torch.float32
    config = dia_full.Config(text_dropout=0.0)
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout_of(model.config), config, {}, train=False)
    batch = {k: v for k, v in clips.batch([0, 1]).items() if k not in ("ids", "labels", "positions")}
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits.numpy()
    difference = np.abs(logits - np.load(runs / run / "probe.npz")["logits"]).max()
    assert difference <= (0.3 if "bf16" in run else 1e-4)  # the engine computes in bf16; the export has its masters


@pytest.mark.parametrize("run", ["bf16", "bf16_zero3", "adamw8bit", "adamw8bit_zero3", TAGS, "stereo"])
def test_it_learns(runs, run):
    losses = [record["loss"] for record in support.step_records(runs / run)]
    assert np.isfinite(losses).all() and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3


def test_the_untouched_base_is_evaluated_first(runs):
    events = [record for record in support.metrics(runs / "zero2") if record.get("event") == "eval"]
    assert [event["step"] for event in events] == [0, 5]
    base = [record for record in support.metrics(runs / "zero3") if record.get("event") == "eval"][0]
    assert events[0]["loss"] == pytest.approx(base["loss"], abs=1e-5)


def test_a_model_that_does_not_stop_is_never_the_best(runs):
    """--min-eos-recall 1: after 14 steps not every end is found, so its checkpoint has no score."""
    (entry,) = checkpoint.read_index(runs / "adamw8bit_zero3" / "checkpoints")
    assert entry["score"] is None
    (entry,) = checkpoint.read_index(runs / "adamw8bit" / "checkpoints")
    assert entry["score"] == pytest.approx(support.metrics(runs / "adamw8bit")[-3]["loss"])


# ---- what moves, and how far -----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["frozen", "frozen3"])
def test_parameters_move_unless_freeze_says_otherwise(runs, demo, run):
    """One AdamW step moves a weight by the learning rate."""
    rate, before, after = 5e-4, load_file(demo / "dia" / "model.safetensors"), exported(runs / run)
    frozen = {
        "frozen": r"model\.(encoder\.embedding|decoder\.embeddings|(encoder|decoder)\.layers\.0)\.",
        "frozen3": r"model\.encoder\.",
    }[run]
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    for name, far in moved.items():
        if re.match(frozen, name):
            assert far == 0, name
        else:
            assert far == pytest.approx(rate, rel=2e-2), name
    assert sum(far == 0 for far in moved.values()) >= 15


def test_a_tag_map_travels_with_the_model_even_under_zero3(runs):
    assert json.loads((runs / "tags" / "export" / "tag_map.json").read_text()) == {"[xx]": 4}


# ---- stereo ----------------------------------------------------------------------------------------------------


def test_a_mono_checkpoint_trained_on_stereo_is_a_stereo_model_that_speaks_with_two_channels(runs, demo):
    config = json.loads((runs / "stereo" / "export" / "config.json").read_text())
    assert config["decoder_config"]["num_channels"] == 18 and len(config["delay_pattern"]) == 18
    assert DiaForConditionalGeneration.from_pretrained(runs / "stereo" / "export").num_channels == 18
    wavs = sorted((runs / "stereo" / "samples").glob("step-*/*.wav"))
    assert len(wavs) == 2 and wavs[0].parent.name == "step-00000000"  # before and after training
    for wav in wavs:
        audio, _ = soundfile.read(wav)
        assert audio.ndim == 2 and audio.shape[1] == 2 and len(audio) > 0
    assert "stereo: 9 channels widened to 18" in (runs / "stereo" / "printed.log").read_text()


def test_widening_under_zero3_starts_from_the_same_model(runs, demo):
    """The loss before training, of two ranks that widened a sharded model, is that of one process that did not."""
    model = DiaForConditionalGeneration.from_pretrained(demo / "dia").eval()
    dia_weights.widen(model, {"zero_optimization": {"stage": 0}})
    config = dia_full.Config(text_dropout=0.0)
    clips = Clips(TokenDataset(str(runs / "stereo-tokens")), layout_of(model.config), config, {}, train=False)
    batch = clips.batch(range(len(clips)))
    labels = batch.pop("labels").transpose(1, 2).flatten(0, 1)
    batch.pop("ids"), batch.pop("positions")
    with torch.no_grad():
        loss = F.cross_entropy(model(**batch, use_cache=False).logits.flatten(0, 1), labels.flatten())
    first = next(record for record in support.metrics(runs / "stereo") if record.get("event") == "eval")
    assert first["loss"] == pytest.approx(float(loss), abs=1e-4)


# ---- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_is_exported_and_averaged_without_ranks(runs, stage, tmp_path):
    run = runs / f"elastic{stage}"
    steps = [run / "checkpoints" / f"step-{step:08d}" for step in (2, 4, 6)]
    dia_weights.average([steps[-1]], tmp_path / "last")
    ds = json.loads((run / "config.json").read_text())
    assert ds["config"]["ema"] == 0.9, "the export is the average, the checkpoint's masters are not"
    singles = []
    for i, step in enumerate(steps):
        dia_weights.average([step], tmp_path / str(i))
        singles.append(load_file(tmp_path / str(i) / "model.safetensors"))
    dia_weights.average(steps, tmp_path / "mean")
    mean = {name: sum(single[name].double() for single in singles).div(3).float() for name in singles[0]}
    assert difference(load_file(tmp_path / "mean" / "model.safetensors"), mean) <= 1e-6
    assert difference(singles[2], singles[0]) > 2e-5


def test_the_last_checkpoint_holds_what_was_exported(runs, tmp_path):
    run = runs / "zero3"
    dia_weights.average([run / "checkpoints" / "step-00000005"], tmp_path / "out")
    assert difference(load_file(tmp_path / "out" / "model.safetensors"), exported(run)) == 0


@pytest.fixture(scope="module")
def elastic(runs, one_rank_alone):
    """elastic(name): a run that resumes with other ranks or another stage in the middle of another run."""

    def config(source, run, step, ds, **changes):
        resume = str(source / run / "checkpoints" / f"step-{step:08d}")
        return {**runs.configs["elastic2"], "ds": f"ds_configs/{ds}.json", "resume": resume, **changes}

    alone = {  # 2 ranks -> 1 rank
        "two-to-one-z2": lambda: config(runs, "elastic2", 2, "zero2", accumulation=4),
        "two-to-one-z3": lambda: config(runs, "elastic3", 2, "zero3", accumulation=4),
    }
    alone = Runs(one_rank_alone, "dia_full", runs.folder, alone)
    back = {  # 1 rank -> 2 ranks, and from stage to stage
        "one-to-two-z2": lambda: config(alone, "two-to-one-z2", 4, "zero2"),
        "one-to-two-z3": lambda: config(alone, "two-to-one-z3", 4, "zero3"),
        "z2-to-z3": lambda: config(runs, "elastic2", 4, "zero3"),
        "z3-to-z2-offload": lambda: config(runs, "elastic3", 4, "zero2_offload"),
    }
    back = Runs(runs.server, "dia_full", runs.folder, back)
    return lambda name: (alone if name in alone.configs else back) / name


@pytest.mark.parametrize(
    ("run", "first"),
    [("two-to-one-z2", 3), ("two-to-one-z3", 3), ("one-to-two-z2", 5), ("one-to-two-z3", 5), ("z2-to-z3", 5)]
    + [("z3-to-z2-offload", 5)],
)
def test_a_run_goes_on_with_other_ranks_or_another_stage(runs, elastic, run, first):
    """On the same loss curve, to the same averaged weights, with the rates and decays of every group."""
    whole = {record["step"]: record["loss"] for record in support.step_records(runs / "elastic2")}
    records = support.step_records(elastic(run))
    assert [record["step"] for record in records] == list(range(first, 7))
    assert max(abs(record["loss"] - whole[record["step"]]) for record in records) <= 1e-5
    assert difference(exported(elastic(run)), exported(runs / "elastic2")) <= 1e-6
    assert not list(runs.folder.glob("*/checkpoints/.*")), "the converted checkpoint is cleaned up"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--accumulation", "3"], "ranks x --accumulation was 4 and is 3"),
        (["--accumulation", "4", "--lr", "1e-4"], "lr: 3e-05 then, 0.0001 now"),
    ],
)
def test_another_step_size_or_setting_is_refused(runs, demo, change, sentence):
    flags = [word for key, value in ELASTIC.items() for word in (f"--{key.replace('_', '-')}", value)]
    assets = ["--model", demo / "dia", "--data", demo / "tokens/train"]
    resume = ["--resume", runs / "elastic2" / "checkpoints" / "step-00000002", "--out", runs / "refused"]
    codes, outputs = support.run_recipe(*flags, *assets, *resume, *change, world=1, recipe="dia_full")
    assert codes == [2] and sentence in outputs[0]
    assert not (runs / "refused").exists()


@pytest.mark.quick
def test_kill_9_of_a_rank_then_resume_equals_never_killed(demo, tmp_path):
    job = "--precision fp32 --lr 3e-3 --warmup 2 --steps 8 --micro-tokens 400 --ema 0.9 --samples 0 --eval-every 4"
    job = [*job.split(), "--save-every", "4", "--freeze", "first:1", "--ds", "ds_configs/zero3.json", *support.TINY_DIA]
    recipe = support.ROOT / "finetune" / "dia_full.py"
    whole, run = tmp_path / "whole", tmp_path / "run"
    codes, outputs = support.finish(support.start_ranks(recipe, [*job, "--out", whole]))
    assert codes == [0, 0], outputs[0][-3000:]
    kill_one(start_and_halt(recipe, [*job, "--out", run], run, step=6, saved=4), run)
    codes, outputs = support.finish(support.start_ranks(recipe, [*job, "--out", run]))
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 4 from" in outputs[0]
    assert_same_run(run, whole, "model.safetensors")


def test_a_dry_run_measures_its_memory_and_leaves_nothing(tmp_path):
    words = ["--dry-run", "--ds", "ds_configs/zero3.json", "--out", tmp_path / "run"]
    codes, outputs = support.run_recipe(*words, recipe="dia_full")
    assert codes == [0, 0], outputs[0][-3000:]
    assert 0 < float(re.search(r"peak memory per rank: (\S+) GB", outputs[0])[1]) < 8
    assert not (tmp_path / "run").exists()


# ---- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"freeze": ["encodr"]}, "--freeze encodr: write encoder, embeddings or first:K"),
        ({"freeze": ["first:3"]}, "--freeze first:3: the decoder has 2 layers"),
        ({"freeze": ["encoder", "embeddings", "first:2"], "tag_map": "tags"}, "--tag-map trains the byte embedding"),
        ({"channels": 12}, "--channels 12"),
    ],
)
def test_mistakes_are_one_sentence(demo, tmp_path, one_process, change, sentence):
    from common.errors import UserError

    if "tag_map" in change:
        change = change | {"tag_map": str(tmp_path / "tags.json")}
        (tmp_path / "tags.json").write_text(json.dumps({"[xx]": 4}))
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "out": str(tmp_path / "run")}
    config = replace(dia_full.Config(**{**SMALL, "steps": 1}, **assets), **change)
    with pytest.raises(UserError) as error:
        dia_full.train(config, one_process, resolve_ds(config.ds, config, 1))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def one_process():
    from common.runtime import Process

    return Process(0, 1, torch.device("cpu"))
