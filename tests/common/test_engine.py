"""The DeepSpeed engine with one rank against a plain PyTorch loop. More ranks: tests/recipes/test_dia_lora.py."""

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from common.config import RunConfig
from common.contracts import LossOutput
from common.ds_config import resolve_ds
from common.ema import Ema, check_version
from common.engine import (
    backward,
    full_gradient,
    full_weights,
    start_engine,
    take_step,
    trainable,
)
from common.optim import build_optimizer, parameter_groups, set_learning_rate
from helpers import support

pytestmark = pytest.mark.usefixtures("ranks", "restored")


def test_operators_are_compiled_with_the_environments_own_ninja():
    """Two versions that take turns compile everything again, a minute each time."""
    assert Path(shutil.which("ninja")).parent == Path(sys.executable).parent


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_sum(net, batch):
    return (net(batch[0]) - batch[1]).square().sum()


def loss_fn(net, batch):
    return LossOutput(loss_sum(net, batch), {})


def batch(seed, rows):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=draw), torch.randn(rows, 3, generator=draw)


CONFIG = RunConfig(precision="fp32", lr=1e-2, max_grad_norm=0.5, accumulation=2, weight_decay=0.1)


# The gradients of 67 parameters fit into one bucket, or do not.
BUCKETS = {"stage": 2, "reduce_bucket_size": 40}
STAGES = [0, 1, 2, pytest.param(BUCKETS, id="2-in-buckets"), 3]


def build(tmp_path, stage, config=CONFIG, net=None):
    file = support.stage_file(tmp_path, **(stage if isinstance(stage, dict) else {"stage": stage}))
    net, ds = net or network(), resolve_ds(file, config, 1)
    optimizer = build_optimizer(parameter_groups(net, config.weight_decay, ("bias",)), config, ds)
    return start_engine(net, loss_fn, optimizer, ds)


def weights_of(engine):
    return full_weights(engine.module.model)


def engine_step(engine, step):
    """Two micro-batches of unequal size, normalised by the whole step."""
    backward(engine, engine(batch(2 * step, 3)).loss_sum, 10.0, 1, last=False)
    backward(engine, engine(batch(2 * step + 1, 7)).loss_sum, 10.0, 1, last=True)


@pytest.mark.parametrize("stage", STAGES)
def test_steps_equal_a_plain_loop_over_the_whole_batch(tmp_path, stage):
    engine = build(tmp_path, stage)
    net = network()
    decay = [{"params": [p for n, p in net.named_parameters() if ("bias" in n) == b], "weight_decay": d}
             for b, d in ((False, 0.1), (True, 0.0))]  # fmt: skip
    plain = torch.optim.AdamW(decay, lr=1e-2, betas=(0.9, 0.95))
    for step in range(4):
        engine_step(engine, step)
        x, y = (torch.cat(pair) for pair in zip(batch(2 * step, 3), batch(2 * step + 1, 7), strict=True))
        plain.zero_grad()
        ((net(x) - y).square().sum() / 10).backward()
        if step == 0:
            for name, grad in ((name, full_gradient(p)) for name, p in trainable(engine.module.model).items()):
                assert torch.allclose(grad, net.get_parameter(name).grad, atol=1e-6), name
        lr = 1e-2 / (step + 1)
        set_learning_rate(engine, lr)
        for group in plain.param_groups:
            group["lr"] = lr
        applied, norm = take_step(engine)
        assert applied and norm == pytest.approx(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)), rel=1e-5)
        plain.step()
    for name, weight in weights_of(engine).items():
        assert torch.allclose(weight, net.get_parameter(name), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_whole(tmp_path, stage, value):
    engine = build(tmp_path, stage)
    engine_step(engine, 0)
    take_step(engine)
    before = weights_of(engine)
    backward(engine, engine(batch(5, 3)).loss_sum, 10.0, 1, last=False)
    x, y = batch(6, 7)
    y[0, 0] = value
    backward(engine, engine((x, y)).loss_sum, 10.0, 1, last=True)
    assert take_step(engine)[0] is False
    assert all(torch.equal(w, before[name]) for name, w in weights_of(engine).items())
    engine_step(engine, 1)
    assert take_step(engine)[0] is True
    assert all(w.isfinite().all() and not torch.equal(w, before[name]) for name, w in weights_of(engine).items())


class Branches(nn.Module):
    """Each micro-batch uses one of two layers: "first" or "second"."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, batch):
        name, x = batch
        return self.get_submodule(name)(x)


@pytest.mark.parametrize("names", ["first first", "first second", "second first"])
@pytest.mark.parametrize("stage", [0, 2])
def test_layers_that_only_one_micro_batch_uses_are_trained_by_that_one(tmp_path, stage, names):
    """And nothing of an earlier step is left where a step has no gradient."""
    x = batch(0, 3)[0]
    net, names = Branches(), names.split()
    engine = build(tmp_path, stage, net=Branches())
    engine.module.loss_fn = lambda net, batch: LossOutput(net(batch).square().sum(), {})
    for names_of_step in (["first", "second"], names):
        net.zero_grad()
        for i, name in enumerate(names_of_step):
            backward(engine, engine((name, x)).loss_sum, 10.0, 1, last=i == 1)
            (net((name, x)).square().sum() / 10).backward()
        for name, parameter in trainable(engine.module.model).items():
            expected, found = net.get_parameter(name).grad, full_gradient(parameter)
            expected = torch.zeros_like(parameter) if expected is None else expected
            found = torch.zeros_like(parameter) if found is None else found
            assert torch.allclose(found, expected, atol=1e-6), name
        set_learning_rate(engine, 0.0)
        assert take_step(engine)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_is_the_textbook_one_and_only_borrowed(tmp_path, stage):
    engine = build(tmp_path, stage)
    ema = Ema(engine, 0.9)
    expected = weights_of(engine)
    for step in range(5):
        engine_step(engine, step)
        take_step(engine)
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * w for name, w in weights_of(engine).items()}
    own = weights_of(engine)
    x, y = batch(9, 4)
    own_loss = float(engine((x, y)).loss_sum)
    with ema.applied():
        for name, weight in weights_of(engine).items():
            assert torch.allclose(weight, expected[name], atol=1e-6)
        net = network()
        net.load_state_dict(expected)
        assert float(engine((x, y)).loss_sum) == pytest.approx(float(loss_sum(net, (x, y))), rel=1e-5)
    assert all(torch.equal(w, own[name]) for name, w in weights_of(engine).items())
    assert float(engine((x, y)).loss_sum) == own_loss


def test_the_step_divides_once_for_all_ranks():
    """DeepSpeed averages the gradients over the ranks. An infinite loss must not be trained on, even where its gradient
    is finite."""

    class Recorder:
        def set_gradient_accumulation_boundary(self, last):
            self.last = last

        def backward(self, loss, scale_wrt_gas):
            assert not scale_wrt_gas
            loss.backward()

    weight = torch.ones(1, requires_grad=True)
    backward(Recorder(), 3 * weight.sum(), step_weight=10.0, world=4, last=True)
    assert float(weight.grad) == pytest.approx(3 * 4 / 10)
    backward(Recorder(), 3 * weight.sum() + float("inf"), step_weight=10.0, world=4, last=True)
    assert bool(weight.grad.isnan())


def test_another_deepspeed_than_the_one_that_was_read_is_a_warning(monkeypatch, capsys):
    check_version()
    assert capsys.readouterr().out == "", "the pinned version is the one"
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.20.0")
    check_version()
    assert "0.20.0" in capsys.readouterr().out
