"""The CMGAN recipe with two real ranks, compared with plain PyTorch in one process."""

import contextlib
import math

import numpy as np
import pytest
import torch
from pesq import pesq
from safetensors.torch import load_file

import cmgan
from common.ds_config import resolve_ds
from common.keyed_random import torch_seed
from common.pairs import PairDataset
from common.plan import Plan
from common.runtime import Process
from helpers import support
from helpers.cmgan_support import SMALL
from helpers.rank_server import Runs
from models.cmgan import signal
from models.cmgan.enhance import enhance
from models.cmgan.network import StepBatchNorm

pytestmark = pytest.mark.distributed

ONE = Process(0, 1, torch.device("cpu"))


PLAN = Plan(np.full(48, 8000), 8000, 0)  # of the three voices that are trained on


@pytest.fixture(scope="module")
def datasets(pairs, tmp_path_factory):
    """train, eval (two files of another voice), and silent: train, of which the first rank gets only silent pairs."""
    source = PairDataset(str(pairs), 16000)
    rows = [{"id": source.id(i), "noisy": source.noisy(i), "clean": source.clean(i)} for i in range(len(source))]
    train = [row for row in rows if not row["id"].startswith("dov")]
    folder = tmp_path_factory.mktemp("datasets")
    support.write_pairs(folder / "train", train)
    support.write_pairs(folder / "eval", [row for row in rows if row["id"].startswith("dov")][:2])
    for number in range(0, 12, 2):
        for place in PLAN.micro_batch(number)[1]:
            train[place] = train[place] | {side: np.zeros(9000, dtype=np.int16) for side in ("noisy", "clean")}
    support.write_pairs(folder / "silent", train)
    return folder


@pytest.fixture(scope="module")
def runs(datasets, two_ranks, tmp_path_factory):
    """runs / name: the folder of a two-rank run, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    name = PairDataset(str(datasets / "train"), 16000).id(PLAN.micro_batch(1)[1][0])
    configs = {
        "zero0": {"ds": support.stage_file(folder, 0)},
        "zero1": {"ds": support.stage_file(folder, 1), "noisy_term": "on"},
        "zero2": {"ds": "ds_configs/zero2.json", "ema": 0.9, "eval_every": 2, "eval_data": str(datasets / "eval")},
        "checkpointing": {"ds": "ds_configs/zero2.json", "gradient_checkpointing": True, "steps": 2},
        "bf16": {"ds": "ds_configs/zero2.json", "precision": "bf16", "steps": 2},
        "silent": {"ds": support.stage_file(folder, 1), "data": str(datasets / "silent")},
    }
    configs["nan"] = {"ds": "ds_configs/zero2.json", "_options": {"nan": name}}
    configs = {name: {**SMALL, "data": str(datasets / "train"), **config} for name, config in configs.items()}
    return Runs(two_ranks, "cmgan", folder, configs, around="helpers.cmgan_support:watched")


def networks(run, rank=0) -> dict:
    return torch.load(run / f"networks-{rank}.pt", weights_only=True)


# ---- the same training, written out --------------------------------------------------------------------------------


def plain_training(data, noisy_term=False):
    """Both networks with torch's own optimizers, one sound after another, in one process.

    Spectra and terms are the recipe's (tests/models/cmgan/test_signal.py has them against formulas): another rounding
    of a gradient of 1e-9 would be a whole step of Adam. For the same reason sums are formed in the ranks' order.
    """
    config = cmgan.Config(**SMALL, data=str(data))
    g, d = cmgan.build_model(config, resolve_ds("ds_configs/zero2.json", config, 1))
    crops, _, _ = cmgan.build_data(config, ONE)
    plan = Plan(np.full(len(crops), crops.length), crops.length, 0)
    optimizers = {}
    for net, ratio in ((g, 1), (d, 2)):
        decayed = [p for n, p in net.named_parameters() if p.ndim >= 2 and "rel_pos" not in n]
        others = [p for n, p in net.named_parameters() if p.ndim < 2 or "rel_pos" in n]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizers[net] = torch.optim.AdamW(groups, betas=(0.9, 0.999)), ratio
    history = []
    for step in range(config.steps):
        seen, total, lr = {}, 0.0, config.lr * min(1.0, (step + 1) / 2)
        norms = {m: torch.zeros(2, m.num_features) for m in g.modules() if isinstance(m, StepBatchNorm)}
        with gradients_of_ranks(g) as keep:
            for slot in (0, 2, 1, 3):  # the first rank's two micro-batches, then the second's
                epoch, chosen = plan.micro_batch(4 * step + slot)
                batch = crops.batch(chosen, epoch)
                pair = signal.normalise(batch["noisy"], batch["clean"])
                silent = not batch["noisy"].any()
                hiss = torch.randn(1, crops.length, generator=torch.Generator().manual_seed(0))
                torch.manual_seed(torch_seed(0, step, slot, "dropout"))
                made = signal.estimate(g(signal.spectrum(hiss if silent else pair.noisy)), pair)
                for layer, mean_var in norms.items():
                    mean_var += layer.latest
                terms = torch.stack(list(cmgan.loss_terms(made, d).values()))
                loss = (terms * torch.tensor([0.1, 0.9, 0.2, 0.05])[:, None]).sum()
                loss = 0 * loss if silent else loss
                (loss / 4).backward()
                keep(slot)
                total += loss.item() / 4
                clean, wave = pair.clean, made.wave.detach()
                sizes = [signal.magnitude(x.detach()) for x in (made.clean_spec, made.spec)]
                fakes = [(*sizes, score(clean, wave))]
                if noisy_term:
                    fakes.append((sizes[0], signal.magnitude(signal.spectrum(pair.noisy)), score(clean, pair.noisy)))
                seen[slot] = fakes
        for layer, (mean, var) in norms.items():
            layer.running_mean.lerp_(mean / 4, 0.1)
            layer.running_var.lerp_(var / 4, 0.1)
            layer.num_batches_tracked += 1
        update(*optimizers[g], g, lr)
        d.zero_grad()
        counts = [sum(f[k][2] is not None for f in seen.values()) for k in range(1 + noisy_term)]
        with gradients_of_ranks(d) as keep:
            for slot in (0, 2, 1, 3):
                torch.manual_seed(torch_seed(0, step, slot, "dropout of d"))
                fakes = seen[slot]
                loss = (d(fakes[0][0], fakes[0][0]) - 1).square().sum() / 4
                for (clean, other, label), count in zip(fakes, counts, strict=True):
                    opinion = d(clean, other)  # also without a label: dropout draws on
                    if label is not None:
                        loss = loss + (opinion - label).square().sum() / count
                loss.backward()
                keep(slot)
        update(*optimizers[d], d, lr)
        d.iterate()
        history.append(total)
    return g, d, history


@contextlib.contextmanager
def gradients_of_ranks(net):
    """Gradients of the even and of the odd slots, each summed, then added."""
    first = {}

    def keep(slot):
        if slot == 2:
            first.update({p: p.grad for p in net.parameters()})
            for p in net.parameters():
                p.grad = None

    yield keep
    for p in net.parameters():
        p.grad = p.grad + first[p]


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
def plain(datasets):
    return plain_training(datasets / "train")


@pytest.mark.quick
def test_two_ranks_equal_one_process_in_both_networks(runs, plain):
    assert_same(networks(runs / "zero0"), plain[:2])
    logged = [record["loss"] for record in support.step_records(runs / "zero0")]
    assert logged == pytest.approx(plain[2], abs=1e-6)


def test_zero2_equals_zero0_and_the_average_is_exported_not_trained_with(runs, plain):
    assert_same(networks(runs / "zero2"), plain[:2])
    exported = load_file(runs / "zero2" / "export" / "generator.safetensors")
    trained = networks(runs / "zero2")["g"]
    assert max(float((exported[k] - trained[k]).abs().max()) for k in trained if "weight" in k) > 1e-5


def test_the_noisy_term_equals_one_process(runs, datasets):
    assert_same(networks(runs / "zero1"), plain_training(datasets / "train", noisy_term=True)[:2])


def test_activation_checkpointing_changes_nothing(runs):
    first = [record["loss"] for record in support.step_records(runs / "checkpointing")]
    assert first == pytest.approx([r["loss"] for r in support.step_records(runs / "zero0")][:2], abs=1e-6)


def test_bf16_conformers_train_close_to_fp32(runs):
    low, exact = ([r["loss"] for r in support.step_records(runs / name)] for name in ("bf16", "zero0"))
    assert low == pytest.approx(exact[:2], rel=0.02) and low != exact[:2]


def test_a_rank_with_only_silent_crops_neither_hangs_nor_differs_from_one_process(runs, datasets):
    records = support.step_records(runs / "silent")
    assert [r["pesq_missing"] for r in records] == [2, 2, 2]  # of 4 sounds a step, those of the first rank
    assert [r["silent"] for r in records] == [2, 2, 2] and all(r["grad_norm"] < 100 for r in records)
    assert all(math.isfinite(r["loss_d"]) for r in records)
    assert_same(networks(runs / "silent"), plain_training(datasets / "silent")[:2])
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


def test_evaluation_is_of_the_exported_model_on_whole_files(runs, datasets):
    """Of the averaged weights, every file once, the whole of it: no crop, random or not."""
    from models.cmgan.weights import load_networks

    model, _ = load_networks(str(runs / "zero2" / "export"))
    data = PairDataset(str(datasets / "eval"), 16000)
    rows = [0, 1]
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
    wanted = {"pesq", "stoi", "si_sdr", "ssnr", "gain", "gain_error", "pesq_invalid", "loss"}
    wanted |= {"d_pearson", "d_spearman", "d_mae", "d_clean", "d_std", "label_std", "pesq_raw", "noisy_pesq"}
    wanted |= {f"{kind}_{term}" for kind in ("share", "grad_share", "loss") for term in ("ri", "mag", "time", "gan")}
    assert all(wanted <= set(record) for record in evals)
    for record in evals:
        for kind in ("share", "grad_share"):
            assert sum(record[f"{kind}_{term}"] for term in ("ri", "mag", "time", "gan")) == pytest.approx(1)
    page = (runs / "zero2" / "report.html").read_text()
    assert "d_pearson" in page and "grad_share_gan" in page
    fields = {
        "lr",
        "lr_d",
        "grad_norm",
        "grad_norm_d",
        "loss_d",
        "gan_level",
        "redraws",
        "silent",
        "pesq_wait_s",
        "step_s",
    }
    assert all(fields <= set(record) for record in support.step_records(runs / "zero2"))


def test_learning_rates_in_the_log_are_the_schedules(runs):
    for record in support.step_records(runs / "zero2"):
        expected = SMALL["lr"] * min(1.0, record["step"] / 2)
        assert record["lr"] == pytest.approx(expected) and record["lr_d"] == pytest.approx(2 * expected)
