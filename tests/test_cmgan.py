"""The CMGAN recipe with two real ranks, compared with plain PyTorch in one process."""

import json
import math

import numpy as np
import pytest
import support
import torch
from pesq import pesq
from safetensors.torch import load_file
from torch.nn import functional as F

import cmgan
from common.ds_config import resolve_ds
from common.keyed import key64
from common.pairs import PairDataset
from common.plan import Plan
from common.runtime import Ranks
from models.cmgan import StepBatchNorm
from models.cmgan_enhance import enhance

pytestmark = pytest.mark.distributed

SMALL = {
    "channels": 8,
    "disc_channels": 4,
    "seconds": 0.5,
    "micro_batch": 1,
    "accumulation": 2,
    "steps": 3,
    "lr": 5e-4,
    "warmup": 2.0,
    "ema": 0.0,
    "hold_out": ["dov"],
    "eval_files": 2,
    "eval_every": 0,
    "save_every": 0,
    "samples": 0,
    "probe": 8,
    "gradient_checkpointing": False,
}
ONE = Ranks(0, 1, torch.device("cpu"))


def stage_file(folder, stage: int) -> str:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return str(path)


@pytest.fixture(scope="module")
def half_silent(pairs, tmp_path_factory):
    """Pairs of which one rank only ever gets silent ones, at seed 0 and one crop a micro-batch."""
    source = PairDataset(str(pairs), 16000)
    rows = [{"id": source.id(i), "noisy": source.noisy(i), "clean": source.clean(i)} for i in range(len(source))]
    kept = [i for i, row in enumerate(rows) if not row["id"].startswith("dov")]
    plan = Plan(np.full(len(kept), 8000), 8000, 0)
    for number in range(0, 12, 2):  # what the first of two ranks gets
        for place in plan.micro_batch(number)[1]:
            rows[kept[place]] |= {side: np.zeros(9000, dtype=np.int16) for side in ("noisy", "clean")}
    return support.write_pairs(tmp_path_factory.mktemp("silent") / "pairs", rows)


@pytest.fixture(scope="module")
def runs(pairs, half_silent, tmp_path_factory):
    """All two-rank runs of this file, trained by one pair of processes; name -> run folder."""
    folder = tmp_path_factory.mktemp("runs")
    name = PairDataset(str(pairs), 16000).id(plan_of(pairs).micro_batch(1)[1][0])
    configs = {
        "zero0": {"ds": stage_file(folder, 0)},
        "zero1": {"ds": stage_file(folder, 1), "noisy_term": True, "replay": 2},
        "zero2": {"ds": "ds_configs/zero2.json", "ema": 0.9, "eval_every": 2},
        "checkpointing": {"ds": "ds_configs/zero2.json", "gradient_checkpointing": True, "steps": 2},
        "bf16": {"ds": "ds_configs/zero2.json", "precision": "bf16", "steps": 2},
        "silent": {"ds": stage_file(folder, 1), "data": str(half_silent), "max_pesq_invalid": 1.0},
    }
    jobs = [{"config": {**SMALL, "data": str(pairs), **c, "out": str(folder / n)}} for n, c in configs.items()]
    nan = {**SMALL, "data": str(pairs), "ds": "ds_configs/zero2.json", "out": str(folder / "nan")}
    jobs.append({"config": nan, "nan": name})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = support.ROOT / "tests" / "run_many_cmgan.py"
    codes, outputs = support.finish(support.start_ranks(script, [folder / "jobs.json"]), timeout=600)
    assert codes == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    return folder


def networks(run, rank=0) -> dict:
    return torch.load(run / f"networks-{rank}.pt", weights_only=True)


# ---- the same training, written out --------------------------------------------------------------------------------


def plan_of(pairs) -> Plan:
    count = sum(not PairDataset(str(pairs), 16000).id(i).startswith("dov") for i in range(56))
    return Plan(np.full(count, 8000), 8000, 0)


def compress(wave):
    bins = torch.stft(wave, 400, 100, window=torch.hamming_window(400), return_complex=True)
    return bins * (bins.abs().square() + 1e-12) ** -0.35  # (B, F, T)


def plain_training(data, noisy_term=False, replay=0):
    """Both networks with torch's own optimizers, one sound after another, in one process."""
    config = cmgan.Config(**SMALL, data=str(data))
    g, d = cmgan.build_model(config, resolve_ds("ds_configs/zero2.json", config, 1))
    crops, _, _ = cmgan.build_data(config, ONE)
    plan = Plan(np.full(len(crops), crops.length), crops.length, 0)
    g.train(), d.train()
    optimizers = {}
    for net, rate in ((g, 1), (d, 2)):
        decayed = [p for n, p in net.named_parameters() if p.ndim >= 2 and "rel_pos" not in n]
        others = [p for n, p in net.named_parameters() if p.ndim < 2 or "rel_pos" in n]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizers[net] = (torch.optim.AdamW(groups, betas=(0.9, 0.999)), rate)
    past, history = [], []
    for step in range(config.steps):
        seen, total = [], 0.0
        for slot in range(4):  # 2 ranks x 2 accumulation steps
            epoch, chosen = plan.micro_batch(4 * step + slot)
            batch = crops.batch(chosen, epoch)
            noisy, clean = batch["noisy"], batch["clean"]
            power = float(noisy.square().mean())
            c = power**-0.5 if power > 1e-8 else 1.0
            noisy, clean = noisy * c, clean * c
            torch.manual_seed(key64(0, step, slot, "dropout") % 2**63)
            spec = compress(noisy)
            out = g(torch.stack([spec.real, spec.imag], 1).transpose(2, 3))
            made = torch.complex(out[:, 0], out[:, 1]).transpose(1, 2)
            target = compress(clean)
            full = made * (made.abs().square() + 1e-12) ** ((1 / 0.3 - 1) / 2)
            wave = torch.istft(full, 400, 100, window=torch.hamming_window(400), length=8000)
            size, target_size = (made.abs().square() + 1e-12).sqrt(), (target.abs().square() + 1e-12).sqrt()
            loss = 0.1 * (F.mse_loss(made.real, target.real) + F.mse_loss(made.imag, target.imag))
            loss = loss + 0.9 * F.mse_loss(size, target_size) + 0.2 * (wave - clean).abs().mean()
            loss = loss + 0.05 * (d(target_size[:, None], size[:, None]) - 1).square().mean()
            (loss / 4).backward()
            total += loss.item() / 4
            seen.append((target_size[:, None].detach(), size[:, None].detach(), score(clean, wave)))
            if noisy_term:
                other = (spec.abs().square() + 1e-12).sqrt()[:, None]
                seen[-1] += (other, score(clean, noisy))
            if replay:
                known = [item for item in past if item[0] > step - 1 - replay and item[1] == slot]
                if known:
                    from common.keyed import uniform

                    seen[-1] += (known[int(uniform(0, step, slot, "replay") * len(known))][2],)
                past.append((step, slot, (*resounded(clean, wave), seen[-1][2])))
        for layer in (m for m in g.modules() if isinstance(m, StepBatchNorm)):
            mean, var = layer.seen / 4
            layer.running_mean.mul_(0.9).add_(0.1 * mean)
            layer.running_var.mul_(0.9).add_(0.1 * var)
            layer.num_batches_tracked += 1
            del layer.seen, layer.batches
        lr = config.lr * min(1.0, (step + 1) / 2)
        update(*optimizers[g], g, lr)
        d.zero_grad()
        recalled = [item[5] for item in seen if len(item) > 5]
        valid = max(1, sum(x is not None for x in [s[2] for s in seen] + [r[2] for r in recalled]))
        valid_noisy = max(1, sum(len(s) > 4 and s[4] is not None for s in seen))
        for slot, (target_size, size, label, *more) in enumerate(seen):
            torch.manual_seed(key64(0, step, slot, "dropout of d") % 2**63)
            loss = (d(target_size, target_size) - 1).square().sum() / 4
            fake = (d(target_size, size) - (label or 0.0)).square().sum() / valid
            loss = loss + fake * (label is not None)
            if noisy_term:
                loss = loss + (d(target_size, more[0]) - (more[1] or 0.0)).square().sum() / valid_noisy
            if len(more) > 2:
                old_target, old, old_label = more[2]
                loss = loss + (d(old_target, old) - old_label).square().sum() / valid
            loss.backward()
        update(*optimizers[d], d, lr)
        d.iterate()
        history.append(total)
    return g, d, history


def resounded(clean, wave):
    return [(compress(x.detach()).abs().square() + 1e-12).sqrt()[:, None] for x in (clean, wave)]


def score(clean, wave):
    try:
        value = pesq(16000, clean[0].numpy(), wave[0].detach().numpy(), "wb")
    except Exception:
        return None
    return min(1.0, max(0.0, (value - 1) / 3.5))


def update(optimizer, ratio, net, lr):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    for group in optimizer.param_groups:
        group["lr"] = lr * ratio
    optimizer.step()
    optimizer.zero_grad()


def assert_same(found: dict, nets, tolerance=1e-6) -> None:
    for name, net in zip(("g", "d"), nets, strict=True):
        expected = net.state_dict()
        assert set(found[name]) == set(expected)
        worst = {k: float((found[name][k].double() - expected[k].double()).abs().max()) for k in expected}
        place = max(worst, key=worst.get)
        assert worst[place] <= tolerance, (name, place, worst[place])


@pytest.fixture(scope="module")
def plain(pairs):
    return plain_training(pairs)


def test_two_ranks_equal_one_process_in_both_networks(runs, plain):
    assert_same(networks(runs / "zero0"), plain[:2])
    logged = [record["loss"] for record in support.step_records(runs / "zero0")]
    assert logged == pytest.approx(plain[2], abs=1e-6)


def test_zero2_equals_zero0_and_the_average_is_exported_not_trained_with(runs, plain):
    assert_same(networks(runs / "zero2"), plain[:2])
    exported = load_file(runs / "zero2" / "export" / "generator.safetensors")
    trained = networks(runs / "zero2")["g"]
    assert max(float((exported[k] - trained[k]).abs().max()) for k in trained if "weight" in k) > 1e-5


def test_noisy_term_and_replay_equal_one_process(runs, pairs):
    assert_same(networks(runs / "zero1"), plain_training(pairs, noisy_term=True, replay=2)[:2])


def test_activation_checkpointing_changes_nothing(runs, pairs):
    first = [record["loss"] for record in support.step_records(runs / "checkpointing")]
    assert first == pytest.approx([r["loss"] for r in support.step_records(runs / "zero0")][:2], abs=1e-6)


def test_bf16_conformers_train_close_to_fp32(runs):
    low, exact = ([r["loss"] for r in support.step_records(runs / name)] for name in ("bf16", "zero0"))
    assert low == pytest.approx(exact[:2], rel=0.02) and low != exact[:2]


def test_a_rank_with_only_silent_crops_neither_hangs_nor_differs_from_one_process(runs, half_silent):
    records = support.step_records(runs / "silent")
    assert [r["pesq_missing"] for r in records] == [2, 2, 2]  # of 4 sounds a step, those of the first rank
    assert all(math.isfinite(r["loss_d"]) for r in records)
    assert_same(networks(runs / "silent"), plain_training(half_silent)[:2])
    missing = [r for r in support.metrics(runs / "silent") if r.get("event") == "pesq_missing"]
    assert len(missing) == 3 and all(len(r["ids"]) == 2 and "Error" in r["ids"][0] for r in missing)


@pytest.mark.parametrize("run", ["zero0", "zero1", "zero2", "silent", "nan"])
def test_both_ranks_hold_the_same_networks_buffers_included(runs, run):
    first, second = networks(runs / run, 0), networks(runs / run, 1)
    for name in ("g", "d"):
        assert all(torch.equal(first[name][k], second[name][k]) for k in first[name])


def test_a_nan_is_named_skipped_in_both_networks_and_leaves_no_trace(runs):
    records = support.metrics(runs / "nan")
    skips = [record for record in records if record.get("event") == "skip"]
    assert [record["step"] for record in skips] == [1] and len(skips[0]["ids"]) == 1
    nets = networks(runs / "nan")
    assert all(value.isfinite().all() for net in nets.values() for value in net.values())
    assert all(int(v) == SMALL["steps"] - 1 for k, v in nets["g"].items() if k.endswith("num_batches_tracked"))


# ---- evaluation --------------------------------------------------------------------------------------------------


def test_evaluation_is_of_the_exported_model_on_whole_files(runs, pairs):
    """Of the averaged weights, every file once, the whole of it: no crop, random or not."""
    from models.cmgan_files import load_networks

    model, _ = load_networks(str(runs / "zero2" / "export"))
    data = PairDataset(str(pairs), 16000)
    rows = data.rows_starting(["dov"])[[0, -1]]
    scores = []
    for row in rows:
        wave = enhance(model.eval(), data.noisy(row).astype(np.float32) / 32768, 10**6, "cpu")
        assert len(wave) == data.samples[row]
        scores.append(pesq(16000, data.clean(row).astype(np.float64) / 32768, wave.astype(np.float64), "wb"))
    evals = [record for record in support.metrics(runs / "zero2") if record.get("event") == "eval"]
    best = max(evals[1:], key=lambda record: record["pesq"])
    assert best["pesq"] == pytest.approx(np.mean(scores), abs=1e-4)
    table = (runs / "zero2" / "evaluations" / f"step-{best['step']:08d}.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == [data.id(row) for row in rows]


def test_diagnostics_are_in_every_evaluation_and_in_the_report(runs):
    evals = [record for record in support.metrics(runs / "zero2") if record.get("event") == "eval"]
    assert [record["step"] for record in evals] == [0, 2, 3]
    wanted = {"pesq", "stoi", "si_sdr", "ssnr", "csig", "cbak", "covl", "gain", "gain_error", "pesq_invalid", "loss"}
    wanted |= {"d_pearson", "d_spearman", "d_mae", "d_clean", "d_std", "label_std", "pesq_raw", "noisy_pesq"}
    wanted |= {f"{kind}_{term}" for kind in ("share", "grad_share", "loss") for term in ("ri", "mag", "time", "gan")}
    assert all(wanted <= set(record) for record in evals)
    for record in evals:
        for kind in ("share", "grad_share"):
            assert sum(record[f"{kind}_{term}"] for term in ("ri", "mag", "time", "gan")) == pytest.approx(1)
    page = (runs / "zero2" / "report.html").read_text()
    assert "d_pearson" in page and "grad_share_gan" in page
    fields = {"lr", "lr_d", "grad_norm", "grad_norm_d", "loss_d", "gan_level", "redraws", "pesq_wait_s", "step_s"}
    assert all(fields <= set(record) for record in support.step_records(runs / "zero2"))


def test_learning_rates_in_the_log_are_the_schedules(runs):
    for record in support.step_records(runs / "zero2"):
        expected = SMALL["lr"] * min(1.0, record["step"] / 2)
        assert record["lr"] == pytest.approx(expected) and record["lr_d"] == pytest.approx(2 * expected)
