"""The gradient check of the first steps: what must have a gradient, and the error of a run without one."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from common import gradient_check
from common.errors import UserError


@pytest.fixture(params=["lora", "full"])
def engine(request, monkeypatch):
    """An engine's face over a model after one backward in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if request.param == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))
    model(torch.randn(5, 4)).square().sum().backward()
    monkeypatch.setattr(gradient_check, "full_gradient", lambda parameter: parameter.grad)
    return SimpleNamespace(module=SimpleNamespace(model=model), zero_optimization_stage=lambda: 0)


def watched(engine) -> dict:
    """In a LoRA model no A has a gradient before B has moved: only B can tell."""
    named = {name: p for name, p in engine.module.model.named_parameters() if p.requires_grad}
    return {name: p for name, p in named.items() if "lora_B" in name} or named


def test_a_healthy_first_step_has_nothing_dead(engine):
    assert gradient_check.dead_parameters(engine) == []


@pytest.mark.parametrize("value", [None, 0.0])
def test_a_parameter_without_a_gradient_is_named(engine, value):
    name, parameter = list(watched(engine).items())[1]
    parameter.grad = None if value is None else torch.zeros_like(parameter)
    assert gradient_check.dead_parameters(engine) == [name]


def test_a_nan_is_not_dead(engine):
    next(iter(watched(engine).values())).grad.fill_(float("nan"))
    assert gradient_check.dead_parameters(engine) == []


def test_what_stays_dead_ends_the_run_after_three_steps_and_is_named(engine):
    name, parameter = list(watched(engine).items())[1]
    parameter.grad = None
    check = gradient_check.GradientCheck(active=True)
    for _ in range(2):
        check.before_step(engine)
        check.after_step(engine)
    check.before_step(engine)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        check.after_step(engine)


def test_a_lora_matrix_that_stays_zero_after_its_step_ends_the_run(engine):
    check = gradient_check.GradientCheck(active=True)
    check.before_step(engine)
    if any("lora_B" in name for name in watched(engine)):
        with pytest.raises(UserError, match="did not move"):
            check.after_step(engine)
    else:
        check.after_step(engine)
        assert check.steps_left == 0
