"""A check in the first optimizer steps: everything that is meant to train has a gradient, and LoRA matrices move."""

import torch

from common.engine import full_gradient, full_weights, trainable
from common.errors import UserError

PATIENCE = 3  # steps; one in which all texts are dropped rightly leaves some encoder matrices without a gradient


class GradientCheck:
    """Raises if some parameter still has no gradient after the first PATIENCE steps; off once all have had one."""

    def __init__(self, active: bool):
        self.steps_left, self.dead = PATIENCE if active else 0, None

    def before_step(self, engine) -> None:
        """Between the last backward and the step. Every rank must call it."""
        if self.steps_left:
            dead = set(dead_parameters(engine))
            self.dead = dead if self.dead is None else self.dead & dead

    def after_step(self, engine) -> None:
        """After an applied step. Every rank must call it."""
        if not self.steps_left:
            return
        self.steps_left -= 1
        if self.dead and not self.steps_left:
            raise UserError(
                f"{len(self.dead)} trained parameters got no gradient in the first {PATIENCE} steps, such as"
                f" {min(self.dead)}: they would learn nothing."
            )
        if not self.dead:
            self.steps_left = 0
            weights = full_weights(engine.module.model) if any(map(is_lora_b, trainable(engine.module.model))) else {}
            unmoved = [name for name, value in weights.items() if is_lora_b(name) and not value.any()]  # B starts at 0
            if unmoved:
                raise UserError(f"{len(unmoved)} LoRA matrices did not move at the first step, such as {unmoved[0]}.")


def is_lora_b(name: str) -> bool:
    return ".lora_B." in name


def dead_parameters(engine) -> list[str]:
    """Names of the parameters that must have a gradient and have none, or only zeros.

    With LoRA these are the lora_B matrices, and modules that are trained whole besides: B starts at 0, so every lora_A
    has a gradient of exactly 0 at the first step, and a trained embedding row has none until its tag occurs. NaN is not
    zero: such a step is skipped and reported elsewhere.
    """
    parameters = trainable(engine.module.model)
    names = [name for name in parameters if is_lora_b(name) or ".modules_to_save." in name] or list(parameters)
    dead = []
    for name in names:
        gradient = full_gradient(parameters[name])
        if gradient is None or not bool(gradient.any()):
            dead.append(name)
    return dead


def refuse_state(model) -> None:
    """Refuses a module that keeps a tensor with its graph across steps, such as a key cache: the second backward would
    run through the first step's graph, or, if detached, past it."""
    for name, module in model.named_modules():
        kept = vars(module) | vars(module).get("_buffers", {})
        for key, value in kept.items():
            if torch.is_tensor(value) and value.grad_fn is not None:
                raise RuntimeError(f"{name or type(module).__name__}.{key} keeps its graph after the step")
