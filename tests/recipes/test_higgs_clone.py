"""The Higgs recipe with two real ranks, compared with plain PyTorch in one process."""

import functools
import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import higgs_clone
from common.ds_config import resolve_ds
from common.plan import Plan
from helpers import support
from helpers.higgs_support import SMALL, WEIGHTS, assets, for_the_library, logits_of, make_clips, weighted
from helpers.rank_server import Runs
from models.higgs.weights import load_higgs

pytestmark = pytest.mark.distributed

# At this rate float noise stays under 1e-6 in every weight: Adam divides it by gradients as small as 1e-8.
PATH = {"preset": "audio_path", "weight_decay": 0.0, "lr": 5e-5}
LEARNING = {**SMALL, "lora_rank": 16, "io": "lora", "steps": 16, "micro_tokens": 1600, "accumulation": 1, "lr": 5e-3}
# Dropout, average and accumulation are state that a resume could lose; 64 clips are an epoch of 6 steps.
LONG = {"steps": 8, "save_every": 4, "lora_dropout": 0.1, "ema": 0.9, "eval_data": ""}
LORA2 = pytest.param("lora2", marks=pytest.mark.quick)
AUGMENTED = {"reference_dropout": 0.3, "steps": 8}  # into the second epoch
RESUMED = {
    "resume_lora3": {"ds": "ds_configs/zero3.json"},
    "resume_bf16": {"ds": "ds_configs/zero2.json", "precision": "bf16"},
    "resume_augmented": {"ds": "ds_configs/zero2.json", **AUGMENTED},
    "resume_path2": {"ds": "ds_configs/zero2.json", "preset": "audio_path"},
    "resume_path3": {"ds": "ds_configs/zero3.json", "preset": "audio_path"},
}
ZERO = {2: "ds_configs/zero2.json", 3: "ds_configs/zero3.json"}


@pytest.fixture(scope="module")
def runs(higgs_demo, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {
        "lora2": {"ds": ZERO[2]},
        "lora3": {"ds": ZERO[3]},
        "path2": {"ds": ZERO[2], **PATH},
        "path3": {"ds": ZERO[3], **PATH},
        "packed": {"ds": ZERO[2], "packing": True},
        "checkpointing3": {"ds": ZERO[3], "gradient_checkpointing": True},
        "ema3": {"ds": ZERO[3], "ema": 0.9},
        "augmented": {"ds": ZERO[2], **AUGMENTED, "data": weighted(higgs_demo, folder / "weighted")},
        "io_lora2": {"ds": ZERO[2], "io": "lora"},
        "io_train3": {"ds": ZERO[3], "io": "train"},
        "all2": {"ds": ZERO[2], "preset": "all", "text_loss": 0.2},
        "full3": {"ds": ZERO[3], "preset": "full", "samples": 3},
        "bf16": {**LEARNING, "ds": ZERO[2], "precision": "bf16"},
        "adamw8bit": {**LEARNING, "ds": ZERO[2], "optimizer": "adamw8bit"},
        "4bit": {**LEARNING, "ds": ZERO[2], "quantize": "4bit", "io": "none"},
        "8bit": {**LEARNING, "ds": ZERO[2], "quantize": "8bit", "io": "none"},
    }
    base = {**SMALL, **assets(higgs_demo)}
    configs = {name: base | config for name, config in configs.items()}
    for stage, ds in ZERO.items():
        arguments = {"model": str(higgs_demo / "model"), "ds": ds}
        configs[f"text_only{stage}"] = ("helpers.higgs_support:text_only_rank", arguments)

    def from_the_middle(name: str) -> dict:
        target = str(folder / f"{name}-resumed")
        arguments = {"source": str(runs / name), "target": target, "name": "step-00000004"}
        two_ranks.call("helpers.higgs_support:start_from", **arguments)
        return configs[name]

    for name, changes in RESUMED.items():  # a whole run, and one that resumes in its middle
        configs[name] = base | LONG | changes
        configs[f"{name}-resumed"] = functools.partial(from_the_middle, name)
    runs = Runs(two_ranks, "higgs_clone", folder, configs, after="helpers.higgs_support:probe")
    return runs


def exported(run) -> dict[str, torch.Tensor]:
    name = "adapter_model.safetensors" if (run / "export/adapter_config.json").exists() else "model.safetensors"
    return load_file(run / "export" / name)


# ---- equality with one process -----------------------------------------------------------------------------------


def config_for(demo, **changes) -> higgs_clone.Config:
    return replace(higgs_clone.Config(**SMALL, **assets(demo)), **changes)


def train_plainly(demo, weights_of=lambda name: 1.0, **changes):
    """The same training in one process with torch's own AdamW, clipping, cross-entropy and the model's own forward."""
    config = config_for(demo, **changes)
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1))
    model.train()
    clips = make_clips(demo, config.data, reference_dropout=config.reference_dropout)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    averaged = {name: p.detach().clone() for name, p in weights.items()}
    losses = []
    for step in range(config.steps):
        total, count = 0.0, 0
        for number in range(4 * step, 4 * step + 4):  # 2 ranks x 2 accumulation steps
            epoch, rows = plan.micro_batch(number)
            batch = clips.batch(rows, epoch)
            labels, mask = batch["audio_labels"], batch["audio_input_ids_mask"]
            logits = model(**for_the_library(batch), use_cache=False).logits.unflatten(-1, (8, 1026))
            ids = batch["input_ids"]
            at = (ids == clips.layout.audio) | (ids == clips.layout.delay)
            placed = torch.full((*ids.shape, 8), -100)
            placed[at] = labels[mask]
            picked = F.cross_entropy(logits[:, :-1].flatten(0, 2), placed[:, 1:].flatten(), reduction="none")
            share = torch.tensor([weights_of(name) for name in batch["ids"]])
            total = total + (picked.view(len(share), -1).sum(1) * share).sum()
            count += float(((placed != -100).sum((1, 2)) * share).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        progress = (step - 2) / (config.steps - 3)
        rate = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = config.lr * rate
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in weights.items():
            averaged[name].mul_(decay).add_(p.detach(), alpha=1 - decay)
        losses.append(total.item() / count)

    def clean(values):
        return {name.replace(".default", ""): value.detach().clone() for name, value in values.items()}

    return clean(weights), clean(averaged), losses


@pytest.fixture(scope="module")
def plain(higgs_demo):
    return {"lora": train_plainly(higgs_demo), "path": train_plainly(higgs_demo, **PATH)}


def assert_same(found: dict, expected: dict, tolerance: float = 1e-6) -> None:
    assert set(expected) <= set(found) and len(expected) > 10
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= tolerance, worst


@pytest.mark.parametrize("run", [LORA2, "lora3", "path2", "path3", "packed", "checkpointing3"])
def test_two_ranks_equal_one_process(runs, plain, run):
    weights, _, losses = plain["path" if run.startswith("path") else "lora"]
    found = exported(runs / run)
    assert_same(found, weights)
    logged = [record["loss"] for record in support.step_records(runs / run)]
    assert logged == pytest.approx(losses, abs=1e-5)
    if not run.startswith("path"):
        assert set(found) == set(weights)
        assert any(float(value.abs().max()) > 1e-3 for name, value in found.items() if "lora_B" in name)


def test_dropout_and_weights_on_two_ranks_equal_one_process(runs, higgs_demo):
    run = runs / "augmented"
    weights_of = lambda name: WEIGHTS[name.split("_")[0]]  # noqa: E731
    weights, _, losses = train_plainly(higgs_demo, weights_of, **AUGMENTED)
    assert_same(exported(run), weights)
    assert [record["loss"] for record in support.step_records(run)] == pytest.approx(losses, abs=1e-5)


def test_exported_average_equals_one_process(runs, plain):
    assert_same(exported(runs / "ema3"), plain["lora"][1])


def test_adapters_of_zero_2_and_3_are_the_same_and_not_empty(runs):
    two, three = exported(runs / "lora2"), exported(runs / "lora3")
    assert set(two) == set(three) and all(value.numel() for value in three.values())
    assert all(torch.allclose(two[name], three[name], atol=1e-6, rtol=0) for name in two)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_without_audio_equals_one_process(runs, higgs_demo, stage):
    config = higgs_clone.Config(model="x", preset="audio_path+attn", lr=5e-5)
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32)
    higgs_clone.unfreeze(model, higgs_clone.FULL_PRESETS[config.preset], False)
    clips = make_clips(higgs_demo)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in weights.items() if p.dim() > 1 and "embed" not in name]
    others = [p for p in weights.values() if not any(p is m for m in matrices)]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": config.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        batch = clips.batch([step, step + 1])
        named = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask", "audio_labels")
        (model(**{name: batch[name] for name in named}).loss / 8).backward()  # built in: a sum over codebooks
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = load_file(runs / f"text_only{stage}" / "weights.safetensors")
    assert_same(found, {name: p.detach() for name, p in weights.items()})


def test_evaluation_is_the_exported_models_on_any_number_of_ranks(runs, higgs_demo):
    from peft import PeftModel

    from common.runtime import Process
    from models.higgs.evaluate import token_metrics

    for run in ("lora2", "ema3"):
        base = load_higgs(str(higgs_demo / "model"), "", torch.float32)
        model = PeftModel.from_pretrained(base, str(runs / run / "export")).eval()
        alone = Process(0, 1, torch.device("cpu"))
        clips = make_clips(higgs_demo, train=False, micro_tokens=300)
        values = token_metrics(model, clips, alone)
        logged = [record for record in support.metrics(runs / run) if record.get("event") == "eval"]
        assert [record["step"] for record in logged] == [0, 5]
        assert {name: logged[-1][name] for name in values} == pytest.approx(values, abs=2e-6)


@pytest.mark.fault
@pytest.mark.parametrize("run", RESUMED)
def test_a_run_that_goes_on_from_its_middle_ends_bitwise_the_same(runs, run):
    whole, resumed = exported(runs / run), exported(runs / f"{run}-resumed")
    assert set(whole) == set(resumed) and all(torch.equal(whole[name], resumed[name]) for name in whole)
    records = [support.step_records(runs / name)[-4:] for name in (run, f"{run}-resumed")]
    kept = [[(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in part] for part in records]
    assert kept[0] == kept[1] and len(kept[0]) == 4
    events = [r["event"] for r in support.metrics(runs / f"{run}-resumed") if "event" in r]
    assert events[0] == "resume"


# ---- what is trained, what comes out -----------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("preset", "io", "modules"),
    [("attn", "none", 8), ("attn+audio", "none", 14), ("all", "none", 17), ("attn", "lora", 10)],
)
def test_a_lora_preset_trains_its_modules_and_nothing_of_the_base(higgs_demo, preset, io, modules):
    """Two layers: 4 attention, 3 audio and 3 text matrices each; the last layer's text path is idle."""
    config = config_for(higgs_demo, preset=preset, io=io)
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained) and len(trained) == 2 * modules
    assert not any("layers.1.mlp." in name for name in trained)


@pytest.mark.quick
@pytest.mark.parametrize(("preset", "count"), [("audio_path", 12), ("audio_path+attn", 20), ("full", 27)])
def test_a_full_preset_trains_exactly_its_parameters(higgs_demo, preset, count):
    config = config_for(higgs_demo, preset=preset)
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == count and "model.embed_tokens.weight" not in trained
    assert "model.embed_audio_tokens.embed_audio_tokens.weight" in trained and "audio_lm_head.weight" in trained


@pytest.mark.parametrize("run", [LORA2, "lora3", "io_lora2", "io_train3", "all2"])
def test_adapter_loads_with_plain_peft_and_gives_the_engines_logits(runs, higgs_demo, run):
    from peft import PeftModel
    from transformers import HiggsAudioV2ForConditionalGeneration

    base = HiggsAudioV2ForConditionalGeneration.from_pretrained(str(higgs_demo / "model"))
    model = PeftModel.from_pretrained(base, str(runs / run / "export")).eval()
    with torch.no_grad():
        logits = logits_of(model, config_for(higgs_demo)).numpy()
        with model.disable_adapter():
            untouched = logits_of(model, config_for(higgs_demo)).numpy()
    engine = np.load(runs / run / "probe.npz")["logits"]
    assert np.abs(logits - engine).max() <= 1e-5 and np.abs(untouched - engine).max() > 1e-3


def test_a_trained_embedding_and_head_are_in_the_adapter_and_moved(runs, higgs_demo):
    found = exported(runs / "io_train3")
    base = load_file(higgs_demo / "model/model.safetensors")
    for name in ("model.embed_audio_tokens.embed_audio_tokens.weight", "audio_lm_head.weight"):
        [mine] = [value for key, value in found.items() if key.endswith(name)]
        assert mine.shape == base[name].shape and float((mine - base[name]).abs().max()) > 1e-4


@pytest.mark.parametrize("run", ["bf16", "adamw8bit", "4bit", "8bit"])
def test_low_precision_trains(runs, run):
    losses = [record["loss"] for record in support.step_records(runs / run)]
    assert np.mean(losses[-3:]) < losses[0] - 0.2
    assert all(torch.isfinite(value).all() for value in exported(runs / run).values())


def test_full_export_is_a_whole_folder_that_speaks_the_same_in_a_fresh_process(runs, higgs_demo):
    """Text head, template, processor and generation settings are in it; greedy codes are the engine's."""
    folder = runs / "full3" / "export"
    base, found = load_file(higgs_demo / "model/model.safetensors"), exported(runs / "full3")
    assert set(found) == set(base) and torch.equal(found["text_lm_head.weight"], base["text_lm_head.weight"])
    processor = (folder / "processor_config.json").read_bytes()
    assert processor == (higgs_demo / "model/processor_config.json").read_bytes()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["ras_win_len"], generation["ras_win_max_num_repeat"]) == (7, 2)
    here = {path.name for path in folder.iterdir()}
    assert {"chat_template.jinja", "tokenizer.json", "config.json", "training_config.json"} <= here
    private = sorted(path.name for path in folder.iterdir() if str(higgs_demo).encode() in path.read_bytes())
    # What was used, and the processor's own codec, which for a base from the hub is a hub id.
    assert private == ["codec.json", "processor_config.json", "training_config.json"]
    code = (
        "import sys, torch; sys.path[:0] = ['finetune', 'tests']\n"
        "from pathlib import Path\nfrom helpers.higgs_support import make_clips\n"
        "from models.higgs.generate import speak\n"
        "from transformers import HiggsAudioV2ForConditionalGeneration as Model\n"
        f"model = Model.from_pretrained({str(folder)!r}).eval()\n"
        f"clips = make_clips(Path({str(higgs_demo)!r}), train=False)\n"
        "[s] = speak(model, clips.rows([0], answer=False), clips.layout, 12, 0, greedy=True)\n"
        "print(s.codes.tolist())"
    )
    done = subprocess.run(
        [support.PYTHON, "-W", "ignore", "-c", code],
        env=support.environment(),
        cwd=support.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    spoken = np.array(json.loads(done.stdout.splitlines()[-1]))
    engine = np.load(runs / "full3" / "greedy.npy")
    assert np.array_equal(spoken, engine)


def test_run_folder_is_complete(runs):
    run = runs / "full3"
    fields = {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_s", "step_s", "rss_gb"}
    assert all(fields <= set(record) for record in support.step_records(run))
    evals = [record for record in support.metrics(run) if record.get("event") == "eval"]
    wanted = {"loss", "end_loss", "accuracy_first", "gap", "stop_rate", "duration_ratio", "loss_channel_7"}
    assert [e["step"] for e in evals] == [0, 5] and all(wanted <= set(e) for e in evals)
    samples = {path.name for path in (run / "samples").iterdir()}
    assert samples == {"original", "reference", "recorded", "step-00000000", "step-00000005"}
    for stage in samples:
        assert len(list((run / "samples" / stage).glob("*.json"))) == 3
    page = (run / "report.html").read_text()
    assert page.count("<audio") >= 9 and "after, step " in page
    modules = set(json.loads((run / "modules.json").read_text()))
    assert not {m for m in modules if m.split(".")[0] in ("dac", "torchaudio", "librosa", "resemblyzer")}
    assert not [m for m in modules if "higgs_audio_v2_tokenizer.modeling" in m]


def test_the_resolved_command_and_versions_are_recorded(runs):
    config = json.loads((runs / "lora2" / "config.json").read_text())
    assert config["config"]["preset"] == "attn+audio" and {"torch", "transformers", "peft"} <= set(config["versions"])
