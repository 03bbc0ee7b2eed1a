"""DeepSpeed wiring: one wrapper module, one engine, and the few things that differ between ZeRO stages.

DeepSpeed is imported where it is used: common/single_process.py runs the same recipes without it.
"""

from contextlib import contextmanager

import torch
from torch import nn

from common.config import RunConfig, UserError
from common.ds_config import offloads_optimizer, stage_of
from common.memory import saved_bytes
from common.optim import build_optimizer, parameter_groups
from common.runtime import Ranks, memory_gb, say


def build_sharded(ds: dict) -> None:
    """Under ZeRO-3, from_pretrained then hands each rank its share of every weight instead of a whole model."""
    from transformers.integrations import HfDeepSpeedConfig

    build_sharded.alive = HfDeepSpeedConfig(ds) if stage_of(ds) == 3 else None  # transformers keeps a weak reference


@contextmanager
def gathered(module: nn.Module | list[nn.Parameter], write: bool = False):
    """Inside, these parameters are whole, on every rank; `write`: what the first rank changes in them stays."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    parameters = [p for p in parameters if hasattr(p, "ds_id")]  # those that ZeRO-3 shards
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
        yield


def shard(module: nn.Module, ds: dict) -> nn.Module:
    """Under ZeRO-3, leaves each rank its share of parameters made outside from_pretrained, with the first rank's
    values."""
    if stage_of(ds) == 3:
        import deepspeed

        deepspeed.zero.Init(module=module, config_dict_or_path=ds)
    return module


class LossModule(nn.Module):
    """What DeepSpeed wraps: a batch goes in, the loss comes out, and the head is inside so that ZeRO's hooks fire."""

    def __init__(self, model: nn.Module, compute_loss):
        super().__init__()
        self.model = model
        self.compute_loss = compute_loss

    def forward(self, batch):
        return self.compute_loss(self.model, batch)


def start_engine(
    model: nn.Module,
    compute_loss,
    config: RunConfig,
    ds: dict,
    no_decay: tuple[str, ...],
    rate_scale=None,
    betas: tuple[float, float] = (0.9, 0.95),
):
    """The DeepSpeed engine over the model's trainable parameters; see `optim.parameter_groups`."""
    import deepspeed

    groups = parameter_groups(model, config.weight_decay, no_decay, rate_scale)
    optimizer = build_optimizer(groups, config, offloads_optimizer(ds), betas)
    engine, *_ = deepspeed.initialize(model=LossModule(model, compute_loss), optimizer=optimizer, config=ds)
    return engine


def set_learning_rate(engine, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def backward(engine, loss_sum: torch.Tensor, step_weight: float, world: int) -> None:
    """Adds this micro-batch's share of the step's mean loss: its sum over the step's planned target weight.

    DeepSpeed averages over the ranks, so the share is multiplied by their number. A loss that is not finite makes
    its own gradient NaN, so that the optimizer's check skips the step on every rank alike.
    """
    if not loss_sum.requires_grad:
        raise UserError("the loss has no gradient: nothing that is trained takes part in it.")
    loss = loss_sum * (world / step_weight)
    loss = loss * (1 + (loss - loss).detach())
    engine.backward(loss, scale_wrt_gas=False)


def take_step(engine) -> tuple[bool, float]:
    """The optimizer step; returns whether it was applied (all gradients finite) and the norm before clipping."""
    if engine.zero_optimization_stage() == 0:
        # Plain optimizers have no check of their own. Gradients are already averaged: all ranks see the same.
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        applied = norm < float("inf")
        if not applied:  # DeepSpeed still counts the step, but nothing is updated
            for parameter in parameters:
                parameter.grad.zero_()
            engine.optimizer.step = lambda: None
        engine.step()
        if not applied:
            del engine.optimizer.step
        return applied, norm
    engine.step()
    norm = engine.get_global_grad_norm()
    applied = engine.was_step_applied()
    return applied, float(norm) if applied and norm is not None else float("nan")


def dry_run(engine, batch_of, longest, step_weight: float, needs: float, ranks: Ranks) -> None:
    """One optimizer step on the longest micro-batch, and the memory it took beside what was foretold.

    `batch_of`: from clips to a batch on the device; `needs`: bytes of `memory.say_needs`. Activations are counted
    for one clip, and multiplied.
    """
    needs += saved_bytes(lambda: engine(batch_of(longest[:1]))) * len(longest)
    batch = batch_of(longest)
    for _ in range(engine.gradient_accumulation_steps()):
        loss_sum, stats = engine(batch)
        backward(engine, loss_sum, step_weight, ranks.world)
        if engine.is_gradient_accumulation_boundary():
            take_step(engine)
        else:
            engine.step()
    peak = " ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(ranks).items())
    loss = float(stats[0].sum() / stats[1].sum())
    say(f"dry run: longest micro-batch {len(longest)} clips, {batch['positions']:,} positions, loss {loss:.4f}")
    say(f"memory a rank: predicted {needs / 2**30:.2f} GB, measured peak {peak}")


@contextmanager
def frozen(model: nn.Module):
    """Inside, a backward through the model leaves nothing in its own gradients."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


def trainable(engine) -> dict[str, nn.Parameter]:
    """Trainable parameters by their names in the recipe's model."""
    return {name: p for name, p in engine.module.model.named_parameters() if p.requires_grad}


def full_weights(engine, everything: bool = False, keep: bool = True) -> dict[str, torch.Tensor]:
    """The fp32 masters of all trainable parameters, and with `everything` the frozen ones too: whole, on the CPU.

    Every rank must call it. `keep` false: this rank only takes part, and holds one parameter at a time.
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


# ---- average of the weights ------------------------------------------------------------------------------------


def masters(engine, parameters: bool = False) -> list[torch.Tensor]:
    """This rank's share of the fp32 weights; as `parameters` they are the keys of the optimizer's state."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        found = engine.optimizer.fp32_partitioned_groups_flat
    elif stage in (1, 2):
        found = engine.optimizer.single_partition_of_fp32_groups
    else:
        found = trainable(engine).values()
    return list(found) if parameters else [t.data for t in found]


def masters_changed(engine) -> None:
    """Carries changed masters over to the weights that the model computes with."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        # Small parameters stay gathered on every rank: they are given up first, or the old values would stay.
        kept = optimizer.persistent_parameters
        if kept:
            kept[0].partition(kept)
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept:
            kept[0].all_gather(kept)
    elif stage in (1, 2):
        optimizer.update_lp_params()


class Average:
    """Exponential moving average of the fp32 masters, kept sharded like them: no communication, any stage."""

    def __init__(self, engine, decay: float):
        self.engine, self.decay = engine, decay
        self.shadow = [t.clone() for t in masters(engine)] if decay else []

    def update(self, step: int) -> None:
        if self.decay:
            # Early steps average over what there is, instead of holding on to the initial weights.
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.shadow, masters(self.engine), 1 - decay)

    @contextmanager
    def in_place(self):
        """Inside, the model computes with the averaged weights."""
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
