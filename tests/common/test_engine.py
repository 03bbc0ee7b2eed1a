"""The DeepSpeed engine with one rank against a plain PyTorch loop. More ranks: tests/recipes/test_dia_lora.py."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from common.config import RunConfig
from common.contracts import LossOutput
from common.ds_config import resolve_ds
from common.engine import (
    Ema,
    backward,
    full_gradient,
    full_weights,
    squared_norms,
    start_engine,
    take_step,
    trainable,
)
from common.one_piece import OnePiece, reduces_in_one_piece
from common.optim import build_optimizer, parameter_groups, set_learning_rate
from helpers import support

pytestmark = pytest.mark.usefixtures("ranks")


STEP = """
import sys, torch
from common.config import RunConfig
from common.contracts import LossOutput
from common.ds_config import resolve_ds
from common.engine import backward, start_engine, take_step
from common.optim import build_optimizer, parameter_groups
from common.runtime import init_process

init_process()
config = RunConfig(model="m", data="d", precision="fp32", ds=sys.argv[1])
model, ds = torch.nn.Linear(4, 4), resolve_ds(config.ds, config, 1)
optimizer = build_optimizer(parameter_groups(model, 0.1, ()), config, ds)
engine = start_engine(model, lambda model, batch: LossOutput(model(batch).square().sum(), {}), optimizer, ds)
backward(engine, engine(torch.ones(2, 4)).loss_sum, 8, 1)
assert take_step(engine)[0]
assert "torch._inductor.compile_fx" not in sys.modules

# It is there when it is wanted.
compiled = []
torch.compile = lambda function: compiled.append(function.__name__) or function
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
assert issubclass(muon_optimizer.MuonWithAuxAdam, original_muon.MuonWithAuxAdam)
original_muon.zeropower_via_newtonschulz5(torch.eye(2), 1), original_muon.zeropower_via_newtonschulz5(torch.eye(2), 1)
assert compiled == ["zeropower_via_newtonschulz5"], compiled
"""


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_step_does_not_import_the_compilers_backend(tmp_path, stage):
    environment = support.environment(PYTHONPATH=":".join(sys.path))
    command = [sys.executable, "-c", STEP, support.stage_file(tmp_path, stage)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


# ZeRO-2 in one piece, and as DeepSpeed does it: the gradients of 67 parameters do not fit into a bucket of 40.
BUCKETS = {"stage": 2, "reduce_bucket_size": 40}
STAGES = [0, 1, 2, pytest.param(BUCKETS, id="2-in-buckets"), 3]


def build(tmp_path, stage, config=CONFIG, net=None):
    file = support.stage_file(tmp_path, **(stage if isinstance(stage, dict) else {"stage": stage}))
    net, ds = net or network(), resolve_ds(file, config, 1)
    optimizer = build_optimizer(parameter_groups(net, config.weight_decay, ("bias",)), config, ds)
    return start_engine(net, loss_fn, optimizer, ds)


def squares_of(engine, known):
    return squared_norms(engine, {"biases": "bias"}, world=1) if known else None


def engine_step(engine, step):
    """Two micro-batches of unequal size, normalised by the whole step."""
    backward(engine, engine(batch(2 * step, 3)).loss_sum, 10.0, 1)
    engine.step()
    backward(engine, engine(batch(2 * step + 1, 7)).loss_sum, 10.0, 1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_equal_a_plain_loop_over_the_whole_batch(tmp_path, stage, known):
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
            for name, grad in ((name, full_gradient(p)) for name, p in trainable(engine).items()):
                assert torch.allclose(grad, net.get_parameter(name).grad, atol=1e-6), name
        lr = 1e-2 / (step + 1)
        set_learning_rate(engine, lr)
        for group in plain.param_groups:
            group["lr"] = lr
        applied, norm = take_step(engine, squares=squares_of(engine, known))
        assert applied and norm == pytest.approx(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)), rel=1e-5)
        plain.step()
    for name, weight in full_weights(engine).items():
        assert torch.allclose(weight, net.get_parameter(name), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("stage", STAGES)
def test_norms_per_group_are_those_of_a_plain_loop(tmp_path, stage):
    net = network()
    for number, rows in ((0, 3), (1, 7)):
        ((net(batch(number, rows)[0]) - batch(number, rows)[1]).square().sum() / 10).backward()
    engine = build(tmp_path, stage)
    engine_step(engine, 0)
    squares = squared_norms(engine, {"biases": r"\.?bias$", "none": "nothing"}, world=1)
    of = {"biases": [], "other": []}
    for name, parameter in net.named_parameters():
        of["biases" if "bias" in name else "other"].append(parameter.grad)
    expected = {name: float(nn.utils.get_total_norm(grads)) ** 2 for name, grads in of.items()} | {"none": 0.0}
    assert {name: float(square) for name, square in squares.items()} == pytest.approx(expected, rel=1e-5)
    applied, norm = take_step(engine)
    assert applied and sum(map(float, squares.values())) == pytest.approx(norm**2, rel=1e-5)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_whole(tmp_path, stage, value, known):
    engine = build(tmp_path, stage)
    engine_step(engine, 0)
    take_step(engine)
    before = full_weights(engine)
    backward(engine, engine(batch(5, 3)).loss_sum, 10.0, 1)
    engine.step()
    x, y = batch(6, 7)
    y[0, 0] = value
    backward(engine, engine((x, y)).loss_sum, 10.0, 1)
    assert take_step(engine, squares=squares_of(engine, known))[0] is False
    assert all(torch.equal(w, before[name]) for name, w in full_weights(engine).items())
    engine_step(engine, 1)
    assert take_step(engine)[0] is True
    assert all(w.isfinite().all() and not torch.equal(w, before[name]) for name, w in full_weights(engine).items())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_over_the_norm_is_skipped_whole_and_tells_its_norm(tmp_path, stage, known):
    net = network()
    ((net(batch(0, 3)[0]) - batch(0, 3)[1]).square().sum() / 10).backward()
    ((net(batch(1, 7)[0]) - batch(1, 7)[1]).square().sum() / 10).backward()
    norm = pytest.approx(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])), rel=1e-5)
    engine = build(tmp_path, stage)
    before = full_weights(engine)
    engine_step(engine, 0)
    assert take_step(engine, 0.99 * norm.expected, squares_of(engine, known)) == (False, norm)
    assert all(torch.equal(w, before[name]) for name, w in full_weights(engine).items())
    engine_step(engine, 0)
    assert take_step(engine, 1.01 * norm.expected, squares_of(engine, known)) == (True, norm)
    assert all(not torch.equal(w, before[name]) for name, w in full_weights(engine).items())
    x, y = batch(6, 7)
    y[0, 0] = float("nan")
    for _ in range(2):
        backward(engine, engine((x, y)).loss_sum, 10.0, 1)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    applied, norm = take_step(engine, 100.0, squares_of(engine, known))
    assert not applied and not math.isfinite(norm), "what is not finite is no spike"


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
            backward(engine, engine((name, x)).loss_sum, 10.0, 1)
            (net((name, x)).square().sum() / 10).backward()
            if i == 0:
                engine.step()
        for name, parameter in trainable(engine).items():
            expected, found = net.get_parameter(name).grad, full_gradient(parameter)
            expected = torch.zeros_like(parameter) if expected is None else expected
            found = torch.zeros_like(parameter) if found is None else found
            assert torch.allclose(found, expected, atol=1e-6), name
        set_learning_rate(engine, 0.0)
        assert take_step(engine)[0]


@pytest.mark.parametrize(("stage", "muon", "expected"), [(2, False, True), (2, True, False), (BUCKETS, False, False)])
def test_deepspeed_reduces_what_does_not_fit_into_one_piece(tmp_path, stage, muon, expected):
    """DeepSpeed's Muon, of which such parameters are, works on the gradients while they are reduced."""
    net = network()
    if muon:
        net[0].weight.use_muon = True
    engine = build(tmp_path, stage, net=net)
    assert isinstance(getattr(engine.backward, "__self__", None), OnePiece) == expected


@pytest.mark.parametrize("name", ["torch_autocast", "wall_clock_breakdown", "flops_profiler"])
def test_deepspeeds_own_passes_are_taken_if_the_json_asks_for_what_they_do(name):
    ds = {"zero_optimization": {"stage": 2}}
    assert reduces_in_one_piece(ds, trained=67)
    assert not reduces_in_one_piece(ds | {name: True}, trained=67)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_is_the_textbook_one_and_only_borrowed(tmp_path, stage):
    engine = build(tmp_path, stage)
    ema = Ema(engine, 0.9)
    expected = full_weights(engine)
    for step in range(5):
        engine_step(engine, step)
        take_step(engine)
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * w for name, w in full_weights(engine).items()}
    own = full_weights(engine)
    x, y = batch(9, 4)
    own_loss = float(engine((x, y)).loss_sum)
    with ema.applied():
        for name, weight in full_weights(engine).items():
            assert torch.allclose(weight, expected[name], atol=1e-6)
        net = network()
        net.load_state_dict(expected)
        assert float(engine((x, y)).loss_sum) == pytest.approx(float(loss_sum(net, (x, y))), rel=1e-5)
    assert all(torch.equal(w, own[name]) for name, w in full_weights(engine).items())
    assert float(engine((x, y)).loss_sum) == own_loss


def test_the_step_divides_once_for_all_ranks():
    """DeepSpeed averages the gradients over the ranks. An infinite loss must not be trained on, even where its gradient
    is finite."""

    class Recorder:
        def backward(self, loss, scale_wrt_gas):
            assert not scale_wrt_gas
            loss.backward()

    weight = torch.ones(1, requires_grad=True)
    backward(Recorder(), 3 * weight.sum(), step_weight=10.0, world=4)
    assert float(weight.grad) == pytest.approx(3 * 4 / 10)
    backward(Recorder(), 3 * weight.sum() + float("inf"), step_weight=10.0, world=4)
    assert bool(weight.grad.isnan())
