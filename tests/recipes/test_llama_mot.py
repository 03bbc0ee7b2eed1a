"""The Llama MoT recipe with two real ranks, compared with plain PyTorch in one process."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import llama_mot
from common.plan import Plan
from common.tokens import TokenDataset
from helpers import mot_ranks, support
from helpers.mot_support import SMALL, assets, build, quantised_llama, reference_loss
from helpers.rank_server import Runs
from models.mot.build import calibrate, choose_parts
from models.mot.data import Clips, Tokenizer
from models.mot.evaluate import baselines
from models.mot.weights import load_adapter

pytestmark = pytest.mark.distributed

LEARNING = {**SMALL, "lr": 5e-3, "copied_lr": 1.0, "max_grad_norm": 1.0, "steps": 20, "micro_tokens": 1400}
LEARNING["accumulation"] = 1
ZERO2 = pytest.param("zero2", marks=pytest.mark.quick)
UNEVEN = {  # stage, what is untied, whether activations are recomputed
    f"zero{stage}-{untie}{'-recompute' * recompute}": (stage, untie, recompute)
    for stage in (1, 2, 3)
    for untie, recompute in (("ffn", False), ("all", True))
}


@pytest.fixture(scope="module")
def runs(demo_mot, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    zero2, zero3 = "ds_configs/zero2.json", "ds_configs/zero3.json"
    configs = {
        "zero0": {**SMALL, "ds": support.stage_file(folder, 0)},
        "zero2": {**SMALL, "ds": zero2},
        "zero3": {**SMALL, "ds": zero3},
        "zero3_offload": {**SMALL, "ds": "ds_configs/zero3_offload.json"},
        "checkpointing": {**SMALL, "ds": zero3, "gradient_checkpointing": True},
        "delay": {**SMALL, "ds": zero2, "layout": "delay", "experts": "llama"},
        "parts": {**SMALL, "ds": zero3, "untie": "ffn", "train_parts": ["proj_only"]},
        "ema": {**SMALL, "ds": zero3, "ema": 0.9},
        "learning": {**LEARNING, "ds": zero2},
        "bf16": {**LEARNING, "ds": zero2, "precision": "bf16"},
        "4bit": {**SMALL, "ds": zero2, "quantize": "4bit"},
        "8bit": {**LEARNING, "ds": zero2, "quantize": "8bit", "precision": "bf16"},
    }
    configs = {name: {**assets(demo_mot), **config} for name, config in configs.items()}
    for name, (stage, untie, recompute) in UNEVEN.items():
        ds = support.stage_file(folder, stage)
        arguments = {"demo": str(demo_mot), "ds": ds, "untie": untie, "recompute": recompute}
        configs[name] = ("helpers.mot_ranks:uneven", arguments)
    return Runs(two_ranks, "llama_mot", folder, configs, after="helpers.mot_ranks:write_modules")


def adapter(run) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "adapter_model.safetensors")


def evals(run) -> list[dict]:
    return [record for record in support.metrics(run) if record.get("event") == "eval"]


# ---- equality with one process ---------------------------------------------------------------------------------


def train_plainly(demo, **changes):
    """The same training in one process: both experts and a mask, torch's cross-entropy, AdamW and clipping."""
    config = replace(llama_mot.Config(**SMALL, **assets(demo)), **changes)
    kind = config.experts
    llama = quantised_llama(demo, config.quantize)
    model = build(demo, kind, config.untie, llama=llama, seed=config.seed, order=config.layout)
    tokenizer = Tokenizer(config.model)
    clips = Clips(TokenDataset(config.data), model.layout, tokenizer, config, train=True)
    calibrate(model, clips.batch([0]))
    choose_parts(model, config.train_parts)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    groups = []
    for name, p in model.adapter().items():
        decay = 0.1 if p.ndim == 2 and "embed" not in name else 0.0
        copied = any(part in name for part in ("fc1", "fc2", "norm", "attn", "gate_proj", "up_proj", "down_proj"))
        if p.requires_grad:
            groups.append({"params": [p], "weight_decay": decay, "scale": 0.5 if copied else 1.0})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    trained = [p for group in groups for p in group["params"]]
    losses, norms = [], []
    for step in range(config.steps):
        total, count = 0.0, 0
        for number in range(4 * step, 4 * step + 4):  # 2 ranks x 2 accumulation steps
            epoch, chosen = plan.micro_batch(number)
            batch = clips.batch(chosen, epoch)
            total = total + reference_loss(model, batch)
            count += int((batch["labels"] != -100).sum())
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.1)))
        progress = (step - 2) / (config.steps - 3)
        rate = 5e-4 * ((step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return {name: p.detach() for name, p in model.adapter().items()}, losses, norms


@pytest.fixture(scope="module")
def plain(demo_mot):
    return train_plainly(demo_mot)


def assert_same(found: dict, expected: dict) -> None:
    """1e-6, but for single entries whose gradient is at the level of rounding: Adam divides by just that."""
    assert set(found) == set(expected) and len(found) > 0
    for name, value in expected.items():
        off = (found[name] - value).abs()
        assert float(off.max()) <= 2e-5 and int((off > 1e-6).sum()) <= max(3, 1e-4 * off.numel()), (name, off.max())


def assert_same_run(run, reference) -> None:
    weights, losses, norms = reference
    records = support.step_records(run)
    assert [record["loss"] for record in records] == pytest.approx(losses, abs=2e-6)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 0.1, "clipping has to be active"
    assert_same(adapter(run), weights)


@pytest.mark.parametrize("run", ["zero0", ZERO2, "zero3", "zero3_offload", "checkpointing"])
def test_two_ranks_equal_one_process(runs, plain, run):
    assert_same_run(runs / run, plain)


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        ("delay", {"layout": "delay", "experts": "llama"}),
        ("parts", {"untie": "ffn", "train_parts": ["proj_only"]}),
        ("4bit", {"quantize": "4bit"}),
    ],
)
def test_variants_equal_one_process(runs, demo_mot, run, changes):
    assert_same_run(runs / run, train_plainly(demo_mot, **changes))


@pytest.mark.parametrize("case", UNEVEN)
def test_ranks_with_uneven_modality_equal_the_masked_reference(runs, demo_mot, case):
    ours = [load_file(runs / case / f"{rank}.safetensors") for rank in (0, 1)]
    assert [float(weights.pop("stale")) for weights in ours] == [0.0, 0.0]
    assert all(torch.equal(ours[0][name], ours[1][name]) for name in ours[0])
    model = build(demo_mot, untie="all" if "all" in case else "ffn", seed=0)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.1 if p.ndim == 2 and "embed" not in name else 0.0}
            for name, p in model.adapter().items()
        ],
        lr=5e-4,
        betas=(0.9, 0.95),
    )
    for step in range(mot_ranks.UNEVEN_STEPS):
        batches = [mot_ranks.uneven_batch(model, step, rank) for rank in (0, 1)]
        assert (mot_ranks.targets(batches[1]) == 0) == (step < 2)
        (sum(reference_loss(model, b) for b in batches) / sum(map(mot_ranks.targets, batches))).backward()
        torch.nn.utils.clip_grad_norm_(model.adapter().values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(ours[0], {name: p.detach() for name, p in model.adapter().items()})


# ---- what comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [ZERO2, "zero3", "delay", "parts", "ema"])
def test_adapter_reloads_without_musicgen_and_reproduces_the_evaluation(runs, demo_mot, run, monkeypatch):
    monkeypatch.setattr("models.mot.build.Donor", None)
    config = llama_mot.Config(**json.loads((runs / run / "config.json").read_text())["config"])
    model, description = load_adapter(runs / run / "export", None, torch.float32)
    tokenizer = Tokenizer(config.model)
    clips = Clips(TokenDataset(config.eval_data), model.layout, tokenizer, config, train=False)
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(len(clips)):
            batch = clips.batch([i])
            total += float(reference_loss(model, batch))
            count += int((batch["labels"] != -100).sum())
    records = evals(runs / run)
    assert [record["step"] for record in records] == [0, 4]
    assert records[-1]["loss"] == pytest.approx(total / count, abs=2e-6)
    assert description["recipe"] == "llama_mot" and description["special_ids"]["audio_bos"] == model.layout.bos
    assert description["checkpoint"] == {"step": 4, "score": records[-1]["loss"], "why": "the best by loss"}


@pytest.mark.parametrize("run", ["zero0", ZERO2, "zero3", "zero3_offload", "delay", "bf16", "4bit", "8bit"])
def test_no_text_logit_changes_during_training(runs, run):
    assert [record["text_drift"] for record in evals(runs / run)] == [0.0, 0.0]


@pytest.mark.parametrize("run", [pytest.param("learning", marks=pytest.mark.quick), "bf16", "8bit"])
def test_it_learns_and_the_first_loss_is_ln_classes(runs, run):
    losses = [record["loss"] for record in support.step_records(runs / run)]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.05)
    assert np.mean(losses[-3:]) < losses[0] - 0.7
    assert all(value.isfinite().all() for value in adapter(runs / run).values())


@pytest.mark.quick
def test_training_imports_no_codec_and_no_musicgen(runs):
    modules = set(json.loads((runs / "zero2" / "modules.json").read_text()))
    assert "transformers.models.llama.modeling_llama" in modules
    assert not {name for name in modules if ".musicgen" in name or ".encodec" in name}
    assert not {name for name in modules if name.split(".")[0] in ("dac", "torchaudio", "librosa")}


@pytest.mark.quick
def test_evaluation_says_what_the_caption_and_the_model_are_worth(runs, demo_mot):
    record = evals(runs / "zero2")[-1]
    assert record["codec_kbps"] == pytest.approx(2.2)
    nll = [record[f"loss_channel_{k}"] for k in range(4)]
    assert record["bits_per_frame"] == pytest.approx(sum(nll) / math.log(2))
    assert record["kbps"] == pytest.approx(50 * record["bits_per_frame"] / 1000)
    [known] = [r for r in support.metrics(runs / "zero2") if r.get("event") == "baselines"]
    assert known["bigram"] < known["unigram"] < known["uniform"] == pytest.approx(math.log(2048))
    assert record["caption_gain"] != 0 and record["caption_gain_none"] != 0


@pytest.mark.quick
def test_baselines_by_hand(demo_mot):
    config = llama_mot.Config(**assets(demo_mot))
    layout = build(demo_mot).layout
    tokenizer = Tokenizer(config.model)
    train, held = (Clips(TokenDataset(config.data), layout, tokenizer, config, t) for t in (True, False))
    found = baselines(train, held)
    seen = [train.tokens.codes(i) for i in train.kept]
    unigram, bigram, count = 0.0, 0.0, 0
    for k in range(4):
        ones, twos, before = {}, {}, {}
        for codes in seen:
            column = codes[:, k].tolist()
            for code in column:
                ones[code] = ones.get(code, 0) + 1
            for a, b in zip(column, column[1:], strict=False):
                twos[a, b] = twos.get((a, b), 0) + 1
                before[a] = before.get(a, 0) + 1
        total = sum(ones.values())
        for i in held.kept:
            column = held.tokens.codes(i)[:, k].tolist()
            for place, code in enumerate(column):
                chance = (ones.get(code, 0) + 1) / (total + 2048)
                unigram -= math.log(chance)
                if place:
                    last = column[place - 1]
                    chance = (twos.get((last, code), 0) + chance) / (before.get(last, 0) + 1)
                bigram -= math.log(chance)
                count += 1
    assert found["unigram"] == pytest.approx(unigram / count) and found["bigram"] == pytest.approx(bigram / count)
