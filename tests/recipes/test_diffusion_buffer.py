"""The Diffusion Buffer recipe with two real ranks, compared with plain PyTorch in one process."""

import json
import math
import shutil

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import diffusion_buffer as recipe
from common import speech_metrics
from common.pairs import PairDataset
from common.plan import Plan
from helpers import support
from helpers.diffusion_buffer_support import pair
from helpers.rank_server import Runs
from models.diffusion_buffer.data import Clips
from models.diffusion_buffer.enhance import enhance
from models.diffusion_buffer.weights import load_network

pytestmark = pytest.mark.distributed
ZERO2 = pytest.param("zero2", marks=pytest.mark.quick)

# At this rate float noise stays under 1e-6 in all weights: Adam divides it by gradients that start near 1e-10.
SPEC = {"width": 8, "n_fft": 126, "hop": 64, "frames": 16, "buffer": 4}
SMALL = {
    "spec": json.dumps(SPEC),
    "micro_batch": 2,
    "accumulation": 2,
    "steps": 4,
    "lr": 2e-5,
    "warmup": 2.0,
    "ema": 0.9,
    "precision": "fp32",
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
    "best_by": "si_sdr",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Seven short pairs of speech-like sound and noise, the last to be held out."""
    rows = []
    for number in range(7):
        noisy, clean = pair(0.65 - 0.04 * number, 3.0 + number)
        name = f"held_{number}" if number == 6 else f"clip_{number}"
        rows.append({"id": name, "noisy": int16(noisy), "clean": int16(clean)})
    return support.write_pairs(tmp_path_factory.mktemp("data") / "pairs", rows)


def int16(wave):
    return (np.clip(wave, -1, 1) * 32767).astype(np.int16)


@pytest.fixture(scope="module")
def runs(data, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    zero2 = {"ds": "ds_configs/zero2.json"}
    causal = SPEC | {"network": "block_causal", "block": 16}
    evaluated = {**zero2, "hold_out": ["held"]}
    jobs = {
        "zero0": {"config": {"ds": support.stage_file(folder, 0)}},
        "zero1": {"config": {"ds": support.stage_file(folder, 1)}},
        "zero2": {"config": evaluated | {"samples": 1}},
        "split": {"config": {**evaluated, "micro_batch": 4, "accumulation": 1}},
        "ones": {"config": {**evaluated, "micro_batch": 1, "accumulation": 4}},
        "dsm": {"config": {**zero2, "spec": json.dumps(SPEC | {"loss": "dsm"}), "steps": 2}},
        "causal": {"config": {**zero2, "spec": json.dumps(causal), "steps": 2}},
        "bf16": {"config": {**zero2, "precision": "bf16", "steps": 3}},
        "full": {"config": {**zero2, "steps": 3}},
        "nan": {"config": {**zero2, "micro_batch": 1, "accumulation": 1}, "nan": "clip_2"},
        "again": {"config": evaluated | {"samples": 1}},
        "plateau": {
            "config": {**evaluated, "steps": 8, "schedule": "plateau", "eval_every": 1},
            "scores": [3.0, 3.5, 3.0, 3.5, 1.0, 1.5, None, 1.0],
        },
        "dry": {"config": {**zero2, "dry_run": True}},
    }
    configs = {}
    for name, job in jobs.items():
        configs[name] = {**SMALL, "data": str(data), **job.pop("config"), "_options": job}
        if name in ("zero0", "zero1"):
            configs[name] |= {"hold_out": ["held"]}
    here = "helpers.diffusion_buffer_support"
    return Runs(
        two_ranks, "diffusion_buffer", folder, configs, around=f"{here}:disturbed", after=f"{here}:save_network"
    )


def network_of(run, rank=0) -> dict[str, torch.Tensor]:
    return torch.load(run / f"network-{rank}.pt", weights_only=True)


# ---- equality with one process ---------------------------------------------------------------------------------


def spectrum(wave, n_fft, hop):
    bins = torch.stft(wave, n_fft, hop, window=torch.hann_window(n_fft), center=False, return_complex=True)
    return 0.15 * bins.abs().clamp(min=1e-20) ** -0.5 * bins


def dp_loss(network, batch):
    """|x0 - S|^2 summed over the last frames of 16, written out."""
    clean, noisy = (spectrum(batch[side], 126, 64) for side in ("clean", "noisy"))
    t, z, first = batch["t"][:, None], batch["z"], 16 - batch["t"].shape[1]
    buffer = (1 - t) * clean[..., first:] + t * noisy[..., first:] + batch["sigma"][:, None] * z
    context = clean[..., :first]
    x = torch.cat([context, buffer], dim=-1)
    times = torch.cat([torch.zeros(len(x), first), batch["t"]], dim=1)
    out = network(x, noisy, network.embed(times), torch.ones(1, 16))[..., first:]
    return (out - clean[..., first:]).abs().square().sum()


@pytest.fixture(scope="module")
def plain(data):
    return train_plainly(data)


def train_plainly(data):
    """The same training in one process with torch's own AdamW: weights, their average, losses, norms."""
    config = recipe.Config(**SMALL, data=str(data))
    network, spec = recipe.build_model(config, {"zero_optimization": {"stage": 0}})
    pairs = PairDataset(str(data), 16000)
    clips = Clips(pairs, np.arange(6), spec, config.seed)
    plan = Plan(np.ones(6, dtype=np.int64), 1, config.seed)
    weights = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    averaged, losses, norms = [p.detach().clone() for p in weights], [], []
    for step in range(4):
        chosen = [plan.micro_batch(number) for number in range(8 * step, 8 * step + 8)]
        batch = clips.batch([(epoch, int(clip[0])) for epoch, clip in chosen])
        loss = dp_loss(network, batch) / (8 * 64 * 4)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, 1.0)))
        rate = 2e-5 * (step + 1) / 2 if step < 2 else 2e-5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2))))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + step) / (10 + step))
        for mean, p in zip(averaged, weights, strict=True):
            mean.mul_(decay).add_(p.detach(), alpha=1 - decay)
        losses.append(float(loss.detach()))
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    return network.state_dict(), dict(zip(names, averaged, strict=True)), losses, norms


def worst(found, expected) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("run", ["zero0", "zero1", ZERO2, "split", "ones"])
def test_two_ranks_equal_one_process_however_the_crops_are_split(runs, plain, run):
    weights, averaged, losses, norms = plain
    for rank in (0, 1):
        found = network_of(runs / run, rank)
        assert set(found) == set(weights) and worst(found, weights) <= 1e-6
    assert worst(load_file(runs / run / "export" / "model.safetensors"), averaged) <= 1e-6
    records = support.step_records(runs / run)
    assert [record["loss"] for record in records] == pytest.approx(losses, abs=1e-6)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-4)
    start, _ = recipe.build_model(recipe.Config(**SMALL), {"zero_optimization": {"stage": 0}})
    assert worst(start.state_dict(), weights) > 2e-5  # more than a step's rate: it has moved


def test_the_same_run_twice_is_the_same(runs):
    records = [support.step_records(runs / name) for name in ("zero2", "again")]
    assert [r["loss"] for r in records[0]] == [r["loss"] for r in records[1]]
    assert len({r["loss"] for r in records[0]}) == 4  # other crops and noise in each step
    evals = [[r for r in support.metrics(runs / n) if r.get("event") == "eval"] for n in ("zero2", "again")]
    assert str(evals[0]) == str(evals[1]) and len(evals[0]) == 2 and math.isfinite(evals[0][1]["si_sdr"])
    a, b = network_of(runs / "zero2"), network_of(runs / "again", 1)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_plateau_of_the_chosen_metric_lowers_the_rate(runs):
    """Scores 3, 3.5 3 3.5 | 1, 1.5 none 1 |: after three that are not better, half of the rate."""
    rates = [record["lr"] for record in support.step_records(runs / "plateau")]
    assert rates == pytest.approx([1e-5, 2e-5, 2e-5, 2e-5, 1e-5, 1e-5, 1e-5, 1e-5])
    exported = json.loads((runs / "plateau" / "export" / "config.json").read_text())
    assert (
        exported["checkpoint"] == {"step": 5, "score": 1.0, "why": "the best by si_sdr"}
        and exported["recipe"] == "diffusion_buffer"
    )


@pytest.mark.quick
def test_a_record_says_what_the_diffusion_did(runs):
    for record in support.step_records(runs / "zero2"):
        assert np.mean([record[f"loss_t{i}"] for i in (1, 2, 3, 4)]) == pytest.approx(record["loss"], rel=1e-6)
        assert 0.02 < record["sigma_min"] < record["sigma_max"] < 0.2118
        assert all(math.isfinite(record[name]) for name in ("out_rms", "out_max", "grad_norm", "lr"))
        assert 0 <= record["padding"] < 1 and record["tokens"] == round(16 * 8 * (1 - record["padding"]))


@pytest.mark.quick
def test_the_evaluation_is_the_exported_stream(runs, data):
    (last,) = [r for r in support.metrics(runs / "zero2") if r.get("event") == "eval" and r["step"] == 4]
    network, spec = load_network(str(runs / "zero2" / "export"))
    pairs = PairDataset(str(data), 16000)
    noisy, clean = (side(6).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))
    made = enhance(network.eval(), noisy, spec)
    assert last["si_sdr"] == pytest.approx(speech_metrics.measure(clean, made)["si_sdr"], abs=1e-4)
    assert last["sdr"] == pytest.approx(10 * math.log10((clean**2).sum() / ((made - clean) ** 2).sum()), abs=1e-3)
    assert {"pesq", "estoi", "lsd", "si_sdr_gain", "si_sdr_gain_5_10dB", "noisy_pesq"} <= set(last)
    (bins,) = [r for r in support.metrics(runs / "zero2") if r.get("event") == "by_snr" and r["step"] == 4]
    assert bins["files_5_10dB"] == 1 and bins["si_sdr_gain_5_10dB"] == last["si_sdr_gain"]
    for name in ("pesq", "estoi", "si_sdr", "sdr", "lsd"):
        assert bins[f"{name}_5_10dB"] == pytest.approx(last[name], abs=0, nan_ok=True)  # too short for ESTOI
    (curve,) = [r for r in support.metrics(runs / "zero2") if r.get("event") == "latency" and r["step"] == 4]
    assert {"si_sdr_d1", "si_sdr_d2", "si_sdr_d4", "pesq_d4"} <= set(curve)
    assert curve["si_sdr_d4"] == last["si_sdr"]
    assert (runs / "zero2" / "figures" / "quality-latency.png").stat().st_size > 5000
    assert "quality-latency" in (runs / "zero2" / "report.html").read_text()
    assert soundfile.info(runs / "zero2" / "samples" / "step-00000004" / "file-0000.wav").frames == len(clean)


@pytest.mark.quick
def test_a_checkpoint_is_opened_as_the_export_of_its_step(runs, tmp_path):
    exported, spec = load_network(str(runs / "zero2" / "export"))
    shutil.copytree(runs / "zero2", tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    for place in (runs / "zero2" / "checkpoints" / "step-00000004", tmp_path / "run"):  # a run that has not finished
        network, found = load_network(str(place))
        assert found == spec and worst(network.state_dict(), exported.state_dict()) == 0
    raw = network_of(runs / "zero2")
    assert worst(raw, exported.state_dict()) > 0  # the average, not what was trained last


def test_other_networks_and_losses_train_too(runs):
    for name in ("dsm", "causal", "bf16"):
        records = support.step_records(runs / name)
        assert len(records) >= 2 and all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in records)
    assert support.step_records(runs / "dsm")[0]["loss"] == pytest.approx(1.0, abs=0.1)


def test_bf16_is_only_in_the_network(runs):
    half, full = ([r["loss"] for r in support.step_records(runs / name)] for name in ("bf16", "full"))
    assert half == pytest.approx(full, rel=0.05) and half != full
    assert all(value.dtype == torch.float32 for value in network_of(runs / "bf16").values())


def test_a_clip_that_is_not_finite_is_named_and_skipped_on_all_ranks(runs):
    skips = [r for r in support.metrics(runs / "nan") if r.get("event") == "skip"]
    assert skips and all(r["ids"] == ["clip_2"] for r in skips)
    assert len(skips) + len(support.step_records(runs / "nan")) == 4
    a, b = network_of(runs / "nan"), network_of(runs / "nan", 1)
    assert all(torch.equal(a[name], b[name]) and bool(a[name].isfinite().all()) for name in a)


def test_a_dry_run_takes_one_step_and_writes_no_run(runs):
    lines = (runs / "dry" / "printed.log").read_text().splitlines()
    assert len([line for line in lines if line.startswith("dry run: ")]) == 1
    (line,) = [line for line in lines if line.startswith("peak memory per rank: ")]
    assert 0 < float(line.split(": ")[1].split()[0]) < 4
    assert not (runs / "dry" / "metrics.jsonl").exists()


# ---- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spec", '{"width": 8, "buffer": 500}'], "buffer 500 does not fit into 128 frames"),
        (["--spec", '{"t_eps": 0}'], "t_eps 0"),
        (["--spec", "nowhere"], "--spec nowhere is neither one of ncsnpp"),
        (["--ds", "ds_configs/zero3.json"], "need no sharding, use zero2.json"),
        (["--model", "somewhere"], "--model without --data"),
        (["--schedule", "plateau"], "--schedule plateau needs evaluations"),
    ],
)
def test_mistakes_end_with_exit_code_2(data, tmp_path, words, message):
    settings = ["--data", str(data), "--out", str(tmp_path / "run")]
    if "--model" in words:
        settings = settings[2:]
    codes, outputs = support.run_recipe(*settings, *words, world=1, recipe="diffusion_buffer")
    assert codes == [2] and message in outputs[0], outputs[0][-2000:]
