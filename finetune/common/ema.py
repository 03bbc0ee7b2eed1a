"""The fp32 master weights of a ZeRO engine, and their moving average.

DeepSpeed has no public call for two things that an average needs: this rank's shard of the master weights under ZeRO-3
(`fp32_partitioned_groups_flat`), and computing with changed master weights in stages 1 and 2 (`update_lp_params`).
These two names are used here and nowhere else; they were read in version READ_IN.
"""

import importlib.metadata
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from common.runtime import say

READ_IN = "0.19.8"


def check_version() -> None:
    """Warns if DeepSpeed is another version than the one whose internals this file was written for."""
    installed = importlib.metadata.version("deepspeed")
    if installed != READ_IN:
        say(f"warning: DeepSpeed {installed} is installed; --ema, checkpoints and resuming on another number of ranks"
            f" rely on details of {READ_IN}")  # fmt: skip


def masters(engine) -> list[torch.Tensor]:
    """This rank's shard of the fp32 master weights, one flat tensor per parameter group; in ZeRO-0 all weights. They
    are the keys of the optimizer's state."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [shard for group in engine.optimizer.param_groups for shard in group["params"]]


def masters_changed(engine) -> None:
    """Copies changed master weights to the weights that the model computes with. Every rank must call it."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                value = safe_get_full_fp32_param(parameter)
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(value)
    elif stage in (1, 2):
        engine.optimizer.update_lp_params()


class Ema:
    """Exponential moving average of the fp32 master weights, sharded like them: updating it needs no communication."""

    def __init__(self, engine, decay: float):
        self.engine, self.decay = engine, decay
        self.shadow = [t.detach().clone() for t in masters(engine)] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.decay:
            # Early on, average over the few steps there are instead of holding on to the initial weights.
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.shadow, masters(self.engine), 1 - decay)

    @contextmanager
    def applied(self):
        """Inside, the model computes with the averaged weights; without an average nothing changes."""
        if self.decay:
            self._swap()
        try:
            yield
        finally:
            if self.decay:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for shadow, master in zip(self.shadow, masters(self.engine), strict=True):
            kept = master.clone()
            master.copy_(shadow)
            shadow.copy_(kept)
        masters_changed(self.engine)
