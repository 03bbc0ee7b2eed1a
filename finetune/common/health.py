"""The gate that a run passes at its first optimizer step: what is meant to train has a gradient, and moves."""

from common.config import UserError
from common.engine import full_gradients, full_weights
from common.lora import dead_matrices


def check_gradients(engine) -> None:
    """Between the first backward and its step: a LoRA matrix without a gradient would train nothing, silently."""
    dead = dead_matrices(full_gradients(engine))
    if dead:
        raise UserError(f"{len(dead)} LoRA matrices got no gradient at the first step, such as {dead[0]}.")


def check_movement(engine) -> None:
    """After the first applied step: every lora_B starts at 0, so one that is still 0 was not updated."""
    still = dead_matrices(full_weights(engine))
    if still:
        raise UserError(f"{len(still)} LoRA matrices did not move at the first step, such as {still[0]}.")
