"""DeepSpeed wiring: a module that returns the loss, the engine, and what differs between ZeRO stages.

DeepSpeed is imported where it is used: common/single_process.py runs the same recipes without it.
"""

import functools
import importlib
import math
import re
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from common.contracts import LossOutput
from common.ds_config import fit_buckets, stage_of
from common.errors import UserError
from common.hub import on_paper
from common.memory import count_parameters, peak_memory, saved_bytes, try_in_memory
from common.one_piece import OnePiece, reduces_in_one_piece, weights_by_broadcast
from common.runtime import Process, say
from common.zero3 import (
    SmallWeights,
    gathered_whole,
    joined,
    keeps_small_weights,
    quicken_cpu,
    quicken_hooks,
    quicken_linear,
    suited_to_device,
)

_hf_ds_config = None  # transformers holds only a weak reference to it


def build_sharded(ds: dict) -> None:
    """Call before from_pretrained: under ZeRO-3 each rank then loads its shard of every weight, never a whole model."""
    from transformers.integrations import HfDeepSpeedConfig

    global _hf_ds_config
    _hf_ds_config = HfDeepSpeedConfig(suited_to_device(ds)) if stage_of(ds) == 3 and not on_paper() else None


@contextmanager
def gathered(module: nn.Module | list[nn.Parameter], write: bool = False):
    """Inside, these parameters are whole on every rank. `write`: what the main rank changes in them is kept."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    parameters = [p for p in parameters if hasattr(p, "ds_id")]  # those that ZeRO-3 shards
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
        yield


def shard(module: nn.Module, ds: dict) -> nn.Module:
    """Under ZeRO-3, shards parameters that were made outside from_pretrained, with the main rank's values."""
    if stage_of(ds) == 3 and not on_paper():
        import deepspeed

        deepspeed.zero.Init(module=module, config_dict_or_path=suited_to_device(ds))
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


def start_engine(model: nn.Module, loss_fn, optimizer, ds: dict, whole: Iterable[nn.Module] = ()):
    """The DeepSpeed engine. `loss_fn(model, batch)` returns a LossOutput. `whole`: modules that ZeRO-3 gathers as one,
    see common/zero3.py."""
    import deepspeed

    postpone_muon()
    trained = count_parameters(model)[1]
    ds = suited_to_device(fit_buckets(ds, trained))
    if stage_of(ds) == 3:
        quicken_linear()
        quicken_cpu()
    with gathered_whole(whole) if stage_of(ds) == 3 else nullcontext():
        engine, *_ = deepspeed.initialize(model=LossModule(model, loss_fn), optimizer=optimizer, config=ds)
    if stage_of(ds) == 3:
        quicken_hooks(engine.module)
        engine.optimizer.flatten = joined
        if keeps_small_weights(ds):
            SmallWeights(engine)
    if reduces_in_one_piece(ds, trained) and not any(hasattr(p, "use_muon") for p in model.parameters()):
        OnePiece(engine)
    return engine


def postpone_muon() -> None:
    """ZeRO imports DeepSpeed's Muon to ask whether that is the optimizer, and its functions are decorated with
    torch.compile, which imports all of the compiler: 1.4 s of processor time on every rank. After this they are
    decorated when they are first called. A recipe that builds a Muon has imported it by now: nothing changes for it."""
    name = "deepspeed.runtime.zero.muon.original_muon"
    if name in sys.modules:
        return
    from deepspeed.runtime import compiler

    def at_first_call(function):
        compiled = functools.cache(lambda: torch.compile(function))
        return functools.wraps(function)(lambda *args, **options: compiled()(*args, **options))

    own, compiler.compile = compiler.compile, lambda: at_first_call
    try:
        importlib.import_module(name)
    finally:
        compiler.compile = own


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


def backward(engine, loss_sum: torch.Tensor, step_weight: float, world: int) -> None:
    """Backward pass of one micro-batch's share of the step's loss."""
    loss = share_of_step(loss_sum, step_weight, world)
    engine.backward(loss, scale_wrt_gas=False)


def take_step(engine, max_norm: float = math.inf, squares: dict[str, torch.Tensor] | None = None) -> tuple[bool, float]:
    """The optimizer step: whether it was applied, and the gradient norm before clipping.

    It is applied on every rank or on none: gradients must be finite, and their norm no larger than `max_norm`.
    `squares`: what `squared_norms` returned for these gradients, if it was called.
    """
    if engine.zero_optimization_stage() == 0:
        # Stage 0 has no overflow check. Gradients are already averaged, so all ranks see the same norm.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm) and norm <= max_norm:
            engine.step()
            return True, norm
        engine.zero_grad()  # skipped: what engine.step() counts is counted, weights and optimizer stay as they are
        engine.micro_steps += 1
        engine.global_steps += 1
        return False, norm
    spikes = []
    with _own_norm(engine.optimizer, max_norm, squares, spikes), weights_by_broadcast(engine.optimizer):
        engine.step()
    applied = engine.was_step_applied()
    norm = engine.get_global_grad_norm() if applied else next(iter(spikes), None)
    return applied, float("nan") if norm is None else float(norm)


@contextmanager
def _own_norm(optimizer, max_norm: float, squares: dict[str, torch.Tensor] | None, norms: list):
    """Inside, a ZeRO optimizer takes a gradient norm above `max_norm` for an overflow and skips the step. The norms
    are left in `norms`. With `squares` it does not compute them itself, for which it copies all gradients to fp64."""
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        squares = None  # they are on the host, where NCCL cannot sum them
    if max_norm == math.inf and not squares:
        yield
        return
    name = "scaled_global_norm" if hasattr(optimizer, "scaled_global_norm") else "_get_norm_groups"  # ZeRO 1 and 2, 3
    compute = getattr(optimizer, name)

    def from_squares():
        total = torch.stack(list(squares.values())).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return [total.sqrt()] if name == "_get_norm_groups" else total.sqrt()

    def guarded():
        result = from_squares() if squares else compute()
        parts = result if isinstance(result, list) else [result]  # one norm per group in ZeRO-3
        stacked = torch.stack([torch.as_tensor(part, dtype=torch.float32) for part in parts])
        # DeepSpeed reports a norm that is not finite as -1. All on the device: nothing waits for it here.
        norm = torch.where((stacked < 0).any(), float("nan"), stacked.norm())
        norms.append(norm)
        spike = torch.where(norm > max_norm, float("nan"), 0.0)
        return [part + spike for part in parts] if isinstance(result, list) else result + spike

    setattr(optimizer, name, guarded)
    try:
        yield
    finally:
        delattr(optimizer, name)


def squared_norms(engine, patterns: dict[str, str], world: int) -> dict[str, torch.Tensor]:
    """This rank's share of the squared gradient norm of each group of parameters, between the last backward and the
    step; summed over all ranks they are the norms. `patterns`: group -> pattern in the names of its parameters.

    Every parameter counts in the first group that it matches, or in "other". Nothing waits for the device.
    """
    groups: dict[str, list[torch.Tensor]] = {}
    for name, gradient in _local_gradients(engine).items():
        group = next((group for group, pattern in patterns.items() if re.search(pattern, name)), "other")
        groups.setdefault(group, []).append(gradient)
    share = 1 / world if engine.zero_optimization_stage() == 0 else 1.0  # in ZeRO-0 every rank holds all of them
    norms = {name: torch.stack(torch._foreach_norm(gradients, 2, torch.float32)) for name, gradients in groups.items()}
    zero = next(iter(norms.values())).new_zeros(()) if norms else torch.zeros(())
    names = [*patterns, "other"]  # the same on every rank, whatever its shard holds
    return {name: norms[name].square().sum() * share if name in norms else zero for name in names}


def _local_gradients(engine) -> dict[str, torch.Tensor]:
    """This rank's shards of the averaged gradients by name, without those that it holds no part of."""
    stage, optimizer, shards = engine.zero_optimization_stage(), engine.optimizer, {}
    if stage == 3 and not optimizer.offload_optimizer:
        lists = ((group, optimizer.averaged_gradients[i]) for i, group in enumerate(optimizer.fp16_groups))
        shards = {id(p): shard for group, gradients in lists for p, shard in zip(group, gradients, strict=True)}

    def shard_of(parameter: nn.Parameter) -> torch.Tensor | None:
        if stage == 0:
            return parameter.grad
        if stage == 3 and optimizer.offload_optimizer:
            from deepspeed.utils import safe_get_local_grad

            return safe_get_local_grad(parameter)
        if stage == 3:
            return shards.get(id(parameter))
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        shard, address = mapping.get_lp_grad_fragment(parameter._index_in_param_group), mapping.lp_fragment_address
        # ZeRO-1 may keep the whole gradient, of which only this part is this rank's.
        whole = shard.numel() == parameter.numel()
        return shard.flatten().narrow(0, address.start, address.numel) if whole else shard

    found = {name: shard_of(parameter) for name, parameter in trainable(engine).items()}
    return {name: shard for name, shard in found.items() if shard is not None}


def dry_run(engine, batch: dict, one_clip: dict, step_weight: float, predicted: float, process: Process) -> None:
    """--dry-run: one optimizer step on the largest micro-batch, and its memory next to the prediction.

    `one_clip`: the longest clip alone; its activations, times the number of clips, are added to the `predicted` bytes.
    """
    engine.train()  # dropout, gradient checkpointing and compiled layers as in the training
    clips = len(batch["ids"])
    predicted += saved_bytes(lambda: engine(one_clip)) * clips
    began = time.monotonic()
    for _ in range(engine.gradient_accumulation_steps()):
        output, problem = try_in_memory(lambda: engine(batch))
        if problem:
            raise UserError(f"the longest micro-batch, of {clips} clips, does not fit into memory ({problem}).")
        backward(engine, output.loss_sum, step_weight, process.world)
        if engine.is_gradient_accumulation_boundary():
            applied, norm = take_step(engine)
        else:
            engine.step()
    loss = float(output.loss_sum.detach()) / step_weight
    say(f"dry run: longest micro-batch {clips} clips, {batch['positions']:,} positions; one step"
        f" {time.monotonic() - began:.1f} s, applied {applied}, loss {loss:.4f}, norm {norm:.3f}")  # fmt: skip
    say(f"memory per rank: predicted {predicted / 2**30:.2f} GB, measured peak {peak_memory(process)}")


# ---- weights ---------------------------------------------------------------------------------------------------


@contextmanager
def frozen(model: nn.Module):
    """Inside, a backward pass through the model leaves no gradients in its parameters."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


def trainable(engine) -> dict[str, nn.Parameter]:
    """Trainable parameters by their names in the recipe's model, found once: every step asks for them, and walking
    through the modules of a large model takes milliseconds."""
    if "trainable_by_name" not in vars(engine):
        named = engine.module.model.named_parameters()
        engine.trainable_by_name = {name: p for name, p in named if p.requires_grad}
    return engine.trainable_by_name


def full_weights(engine, everything: bool = False, keep: bool = True) -> dict[str, torch.Tensor]:
    """The fp32 master weights of all trainable parameters, whole, on the CPU; `everything`: of frozen ones too.

    Every rank must call it. `keep` False: this rank only takes part in gathering and holds one parameter at a time.
    """
    stage, weights = engine.zero_optimization_stage(), {}
    for name, parameter in engine.module.model.named_parameters():
        if parameter.requires_grad and stage:
            from deepspeed.utils import safe_get_full_fp32_param

            value = safe_get_full_fp32_param(parameter)
        elif parameter.requires_grad or everything:
            with gathered([parameter]):
                value = parameter.detach().float().cpu().clone()
        else:
            continue
        if keep:
            weights[name] = value.detach().float().cpu().clone()
    return weights


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The averaged gradient, whole; only between the last backward and the step. Every rank must call it."""
    if parameter.grad is not None:
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def masters(engine, parameters: bool = False) -> list[torch.Tensor]:
    """This rank's shard of the fp32 master weights; as `parameters` they are the keys of the optimizer's state."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        shards = engine.optimizer.fp32_partitioned_groups_flat
    elif stage in (1, 2):
        shards = engine.optimizer.single_partition_of_fp32_groups
    else:
        shards = trainable(engine).values()
    return list(shards) if parameters else [t.data for t in shards]


def masters_changed(engine) -> None:
    """Copies changed master weights to the weights that the model computes with."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        # What is gathered now would keep its old values. Only small parameters stay gathered.
        kept = optimizer.persistent_parameters
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept:
            kept[0].all_gather(kept)
    elif stage in (1, 2):
        optimizer.update_lp_params()


class Ema:
    """Exponential moving average of the fp32 master weights, sharded like them: no communication in any ZeRO stage."""

    def __init__(self, engine, decay: float):
        self.engine, self.decay = engine, decay
        self.shadow = [t.clone() for t in masters(engine)] if decay else []

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

    def _swap(self) -> None:
        for shadow, master in zip(self.shadow, masters(self.engine), strict=True):
            kept = master.clone()
            master.copy_(shadow)
            shadow.copy_(kept)
        masters_changed(self.engine)
