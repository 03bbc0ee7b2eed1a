"""Parameter groups and the learning-rate curve."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.config import RunConfig
from common.errors import UserError
from common.optim import (
    build_optimizer,
    describe_optimizer,
    learning_rate,
    optimizer_state,
    parameter_groups,
    set_learning_rate,
    warmup_steps,
)

NO_OFFLOAD = {"zero_optimization": {"stage": 2}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_groups_partition_the_trainable_parameters():
    model = Model()
    groups = {group["name"]: group for group in parameter_groups(model, 0.1, ("lora_", "embed"))}
    found = [id(p) for group in groups.values() for p in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in model.parameters() if p.requires_grad}
    assert [id(p) for p in groups["decay"]["params"]] == [id(model.proj.weight)]
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)


def test_an_empty_group_is_left_out():
    (group,) = parameter_groups(Model(), 0.1, ("embed", "proj", "lora_"))
    assert group["name"] == "no_decay"


def test_a_scaled_rate_moves_a_parameter_that_much_less():
    """AdamW's first step moves a weight by lr x sign(gradient), whatever the gradient's size."""
    model, config = Model(), RunConfig(lr=1e-2)
    groups = parameter_groups(model, 0.0, (), lambda name: 0.25 if "embed" in name else 1.0)
    optimizer = build_optimizer(groups, config, NO_OFFLOAD)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    set_learning_rate(SimpleNamespace(optimizer=optimizer), 1e-2)
    optimizer.step()
    for name, p in model.named_parameters():
        moved = 0.0 if "frozen" in name else 0.25e-2 if "embed" in name else 1e-2
        assert torch.allclose(before[name] - p, torch.tensor(moved), rtol=1e-3, atol=0), name


def test_decay_shrinks_what_it_should_and_nothing_else():
    """With zero gradients AdamW moves a weight by decay alone: w (1 - lr decay)."""
    model, config = Model(), RunConfig(lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(parameter_groups(model, 0.1, ("lora_", "embed", "norm")), config, NO_OFFLOAD)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 1e-2 * 0.1 if name == "proj.weight" else 1
        assert torch.allclose(p, before[name] * factor, rtol=1e-6, atol=0), name


def test_adamw_equals_the_textbook_update():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer([{"params": [weight], "weight_decay": 0.1}], RunConfig(lr=1e-3), NO_OFFLOAD)
    value, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, grads in enumerate([[0.5, -1.0], [0.1, 2.0], [-0.3, 0.0]], start=1):
        weight.grad = torch.tensor(grads)
        optimizer.step()
        for i, g in enumerate(grads):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.95 * v[i] + 0.05 * g * g
            update = (m[i] / (1 - 0.9**step)) / (math.sqrt(v[i] / (1 - 0.95**step)) + 1e-8)
            value[i] = value[i] * (1 - 1e-3 * 0.1) - 1e-3 * update
    assert weight.tolist() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [(0.03, 1000, 30), (0.03, 10, 1), (0, 10, 0), (1, 10, 1), (20, 100, 20), (50, 10, 10)],
)
def test_warmup_is_a_share_below_one_and_steps_from_one_on(warmup, steps, expected):
    assert warmup_steps(warmup, steps) == expected


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 0.03), (100, 10), (100, 0), (12, 0.5)])
def test_the_curve_rises_to_the_peak_and_falls_to_the_minimum(steps, warmup):
    config = RunConfig(lr=2e-4, warmup=warmup)
    warm = warmup_steps(warmup, steps)
    curve = [learning_rate(step, steps, config) for step in range(steps)]
    assert curve[0] == pytest.approx(2e-4 / max(warm, 1))
    assert max(curve) == pytest.approx(2e-4) and curve[max(warm - 1, 0)] == pytest.approx(2e-4)
    assert curve[-1] == pytest.approx(2e-5)
    assert all(a < b for a, b in zip(curve[: warm - 1], curve[1:warm], strict=False))
    assert all(a > b for a, b in zip(curve[warm:-1], curve[warm + 1 :], strict=True))
    middle = warm + (steps - 1 - warm) / 2
    if middle.is_integer():
        assert curve[int(middle)] == pytest.approx((2e-4 + 2e-5) / 2)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.03), (1, 0), (2, 1), (3, 3)])
def test_very_short_runs_have_a_learning_rate(steps, warmup):
    config = RunConfig(lr=2e-4, warmup=warmup)
    assert all(0 < learning_rate(step, steps, config) <= 2e-4 for step in range(steps))


# ---- questions to any optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: __import__("bitsandbytes").optim.AdamW8bit(p), {"state1", "state2"}),
        (lambda p: __import__("bitsandbytes").optim.PagedAdamW8bit(p), {"state1", "state2"}),
    ],
)
def test_any_optimizer_says_what_it_keeps_per_weight_and_is_left_as_it_was(build, names):
    weight = nn.Parameter(torch.randn(64, 64))
    asked, untouched = build([weight]), build([nn.Parameter(weight.detach().clone())])
    assert set(optimizer_state(asked)) == names
    assert not asked.state and asked.param_groups[0]["params"][0] is weight
    for optimizer in (asked, untouched):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(64, 64)
        optimizer.step()
    assert torch.equal(*(o.param_groups[0]["params"][0] for o in (asked, untouched)))


def test_a_description_tells_what_the_states_mean():
    def described(optimizer_class, **settings):
        return describe_optimizer(optimizer_class([nn.Parameter(torch.randn(4, 4))], lr=1e-3, **settings))

    adam = described(torch.optim.AdamW, betas=(0.9, 0.95))
    assert adam == described(torch.optim.AdamW, betas=(0.9, 0.95), fused=True), "an implementation is no setting"
    assert adam != described(torch.optim.AdamW, betas=(0.9, 0.99))
    assert adam != described(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.5)
    assert adam != described(torch.optim.SGD, momentum=0.9)


def test_a_group_without_a_scale_gets_the_learning_rate_itself():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    set_learning_rate(SimpleNamespace(optimizer=optimizer), 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(("name", "paged"), [("adamw8bit", False), ("paged_adamw8bit", True)])
def test_8_bit_states_are_paged_if_asked_and_cannot_be_offloaded(name, paged, monkeypatch):
    groups, config = parameter_groups(Model(), 0.0, ()), RunConfig(optimizer=name, lr=3e-4)
    optimizer = build_optimizer(groups, config, NO_OFFLOAD)
    assert optimizer.is_paged is paged and optimizer.args.optim_bits == 8
    assert all((group["lr"], group["betas"]) == (3e-4, (0.9, 0.95)) for group in optimizer.param_groups)
    with pytest.raises(UserError, match=f"--optimizer {name} does not"):
        build_optimizer(groups, config, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=f"--optimizer {name} needs bitsandbytes"):
        build_optimizer(groups, config, NO_OFFLOAD)
