"""The gate that a run passes in its first optimizer steps: what is meant to train has a gradient, and moves."""

from common.config import UserError
from common.engine import full_gradients, full_weights
from common.lora import dead_matrices

PATIENCE = 3  # a step whose texts are all left out gives some encoder matrices no gradient, rightly


class Gate:
    """Closed until every LoRA matrix has had a gradient and has moved; never opened, it ends the run."""

    def __init__(self, closed: bool):
        self.steps_left, self.dead = PATIENCE if closed else 0, None

    def before_step(self, engine) -> None:
        """Between the last backward and the step. Every rank must call it."""
        if self.steps_left:
            dead = set(dead_matrices(full_gradients(engine)))
            self.dead = dead if self.dead is None else self.dead & dead

    def after_step(self, engine) -> None:
        """After an applied step. Every rank must call it."""
        if not self.steps_left:
            return
        self.steps_left -= 1
        if self.dead and not self.steps_left:
            raise UserError(
                f"{len(self.dead)} LoRA matrices got no gradient in the first {PATIENCE} steps, such as"
                f" {min(self.dead)}: they would train nothing."
            )
        if not self.dead:
            self.steps_left = 0
            still = dead_matrices(full_weights(engine))  # every lora_B starts at 0
            if still:
                raise UserError(f"{len(still)} LoRA matrices did not move at the first step, such as {still[0]}.")
