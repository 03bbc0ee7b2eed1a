"""DeepSpeed wiring: a module that returns the loss, the engine, and what differs between ZeRO stages."""

import math
import time
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

from common.contracts import LossOutput
from common.ds_config import fit_buckets, stage_of
from common.ema import check_version
from common.errors import UserError
from common.memory import count_parameters, peak_memory, try_in_memory
from common.runtime import Process, say

_hf_ds_config = None  # transformers holds only a weak reference to it


def build_sharded(ds: dict) -> None:
    """Call before from_pretrained: under ZeRO-3 each rank then loads its shard of every weight, never a whole model."""
    from transformers.integrations import HfDeepSpeedConfig

    global _hf_ds_config
    _hf_ds_config = HfDeepSpeedConfig(ds) if stage_of(ds) == 3 else None


@contextmanager
def gathered(module: nn.Module | list[nn.Parameter], write: bool = False):
    """Inside, these parameters are whole on every rank. `write`: what the main rank changes in them is kept."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    parameters = [p for p in parameters if hasattr(p, "ds_id")]  # those that ZeRO-3 shards
    if not parameters:
        yield
        return
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
        yield


def shard(module: nn.Module, ds: dict) -> nn.Module:
    """Under ZeRO-3, shards parameters that were made outside from_pretrained, with the main rank's values."""
    if stage_of(ds) == 3:
        deepspeed.zero.Init(module=module, config_dict_or_path=ds)
    return module


class LossModule(nn.Module):
    """What DeepSpeed wraps: batch in, LossOutput out. The loss is computed inside, so that ZeRO-3's hooks gather the
    head's weights around it."""

    def __init__(self, model: nn.Module, loss_fn):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch) -> LossOutput:
        return self.loss_fn(self.model, batch)


def start_engine(model: nn.Module, loss_fn, optimizer, ds: dict):
    """The DeepSpeed engine. `loss_fn(model, batch)` returns a LossOutput."""
    check_version()
    total, trained = count_parameters(model)
    ds = fit_buckets(ds, trained, get_accelerator().device_name())
    engine, *_ = deepspeed.initialize(model=LossModule(model, loss_fn), optimizer=optimizer, config=ds)
    say(f"parameters {total:,}, trained {trained:,}; ZeRO-{stage_of(ds)} on {engine.world_size} ranks")
    return engine


# ---- one optimizer step ----------------------------------------------------------------------------------------


def share_of_step(loss_sum: torch.Tensor, step_weight: float, world: int) -> torch.Tensor:
    """One micro-batch's share of the step's loss, which is its loss_sum / step_weight.

    `step_weight` is the target weight of the whole optimizer step: all ranks, all micro-batches. DeepSpeed averages
    gradients over the ranks, hence the factor `world`. A loss that is not finite makes its gradient NaN, so that the
    optimizer's overflow check skips the step on every rank alike.
    """
    if not loss_sum.requires_grad:
        raise UserError("the loss has no gradient: it does not depend on any trained parameter.")
    loss = loss_sum * (world / step_weight)
    loss = loss * (1 + (loss - loss).detach())  # inf - inf is NaN
    return loss


def backward(engine, loss_sum: torch.Tensor, step_weight: float, world: int, last: bool) -> None:
    """Backward pass of one micro-batch's share of the step's loss. `last`: of the step, so that `take_step` follows."""
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(share_of_step(loss_sum, step_weight, world), scale_wrt_gas=False)


def take_step(engine) -> tuple[bool, float]:
    """The optimizer step, after the last backward: whether it was applied, and the gradient norm before clipping.

    It is applied on every rank or on none: DeepSpeed skips it if any gradient is not finite.
    """
    if engine.zero_optimization_stage() == 0:
        # Stage 0 has no overflow check. Gradients are already averaged, so all ranks see the same norm.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            engine.step()
        else:
            engine.zero_grad()
        return math.isfinite(norm), norm
    engine.step()
    applied = engine.was_step_applied()
    return applied, float(engine.get_global_grad_norm()) if applied else float("nan")


def dry_run(engine, batch: dict, step_weight: float, process: Process) -> None:
    """--dry-run: one optimizer step of the largest micro-batch, its time and its peak memory."""
    engine.train()  # dropout, gradient checkpointing and compiled layers as in the training
    clips, began, accumulation = len(batch["ids"]), time.monotonic(), engine.gradient_accumulation_steps()
    for i in range(accumulation):
        output, problem = try_in_memory(lambda: engine(batch))
        if problem:
            raise UserError(f"the longest micro-batch, of {clips} clips, does not fit into memory ({problem}).")
        backward(engine, output.loss_sum, step_weight, process.world, last=i + 1 == accumulation)
    applied, norm = take_step(engine)
    loss = float(output.loss_sum.detach()) / step_weight
    say(f"dry run: longest micro-batch {clips} clips, {batch['positions']:,} positions; one step"
        f" {time.monotonic() - began:.1f} s, applied {applied}, loss {loss:.4f}, norm {norm:.3f}")  # fmt: skip
    say(f"peak memory per rank: {peak_memory(process)}")


# ---- weights ---------------------------------------------------------------------------------------------------


@contextmanager
def frozen(model: nn.Module):
    """Inside, a backward pass through the model leaves no gradients in its parameters."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def full_weights(model: nn.Module, everything: bool = False, keep: bool = True) -> dict[str, torch.Tensor]:
    """The fp32 master weights of all trainable parameters, whole, on the CPU; `everything`: of frozen ones too.

    Every rank must call it. `keep` False: this rank only takes part in gathering and holds one parameter at a time.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not everything:
            continue
        value = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is None:  # frozen, or in ZeRO-0, which has no other copy
            with gathered([parameter]):
                value = parameter.detach().clone()
        if keep:
            weights[name] = value.detach().float().cpu().clone()
    return weights


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The averaged gradient, whole; only between the last backward and the step. Every rank must call it."""
    return safe_get_full_grad(parameter)
