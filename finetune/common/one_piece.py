"""ZeRO-2's gradients, reduced once per optimizer step and in one piece.

DeepSpeed reduces after every micro-batch, and copies each gradient by itself into a bucket, out of it and into this
rank's shard. So it can send one bucket while it fills the next, and no rank holds all gradients. If they all fit into
one bucket, neither is gained. Then autograd adds the micro-batches up as in plain PyTorch, and DeepSpeed's step gets
the reduced sums.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from common.ds_config import fits_one_bucket, offloads_optimizer, stage_of

# Sections of the JSON that DeepSpeed obeys in its own forward and backward pass.
OWN_PASSES = ("torch_autocast", "wall_clock_breakdown", "flops_profiler")


def reduces_in_one_piece(ds: dict, trained: int) -> bool:
    """Whether a model with so many trained parameters is reduced this way."""
    suits = stage_of(ds) == 2 and not offloads_optimizer(ds) and not any(ds.get(name) for name in OWN_PASSES)
    return suits and fits_one_bucket(ds, trained)


class OnePiece:
    """Replaces the forward and backward pass of a DeepSpeed engine."""

    def __init__(self, engine):
        self.engine, self.optimizer = engine, engine.optimizer
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        for hook in self.optimizer._grad_acc_hooks:
            hook.remove()
        self.groups = [Group(self.optimizer, number) for number in range(len(self.optimizer.bit16_groups))]
        engine.forward, engine.backward = engine.module.__call__, self.backward

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = False) -> None:
        loss.backward()
        last = self.engine.is_gradient_accumulation_boundary()
        if last or self.optimizer.dtype != self.optimizer.gradient_accumulation_dtype:
            for group in self.groups:
                group.collect(keep_sum=not last)
        if last:
            for number, group in enumerate(self.groups):
                self.optimizer.averaged_gradients[number] = group.reduce(self.rank, self.world)


class Group:
    """The gradients of one of the optimizer's parameter groups, in the order in which DeepSpeed flattens weights."""

    def __init__(self, optimizer, number: int):
        self.optimizer, self.parameters = optimizer, optimizer.round_robin_bit16_groups[number]
        self.flat = torch.zeros_like(optimizer.bit16_groups_flat[number])
        self.sum = None  # of earlier micro-batches, where autograd does not add them up in fp32
        self.shard = optimizer._build_compact_grad_partition_buffer(number)
        offsets = optimizer.round_robin_bit16_offsets[number]
        self.places = [
            self.flat.narrow(0, offset, p.numel()).view_as(p)
            for p, offset in zip(self.parameters, offsets, strict=True)
        ]

    def collect(self, keep_sum: bool) -> None:
        """Moves the gradients from the parameters to `flat`; with `keep_sum` on to `sum`."""
        pairs = list(zip(self.parameters, self.places, strict=True))
        found = [(place, p.grad) for p, place in pairs if p.grad is not None]
        if len(found) < len(pairs):  # this micro-batch does not depend on some
            self.flat.zero_()
        if found:
            torch._foreach_copy_(*map(list, zip(*found, strict=True)))
        for parameter in self.parameters:
            parameter.grad = None
        if keep_sum and self.sum is None:
            self.sum = self.flat.to(self.optimizer.gradient_accumulation_dtype)
        elif self.sum is not None:
            self.sum.add_(self.flat)

    def reduce(self, rank: int, world: int):
        """This rank's shard of the mean over all ranks, as DeepSpeed's step wants it."""
        # Sums are sent in fp32: once, instead of every micro-batch in bf16.
        total = self.flat.to(self.optimizer.communication_data_type) if self.sum is None else self.sum
        self.sum = None
        if world > 1:
            dist.all_reduce(total)
        own = self.shard.flat_partition
        own.copy_(total.narrow(0, rank * len(own), len(own))).div_(world)
        return self.shard


@contextmanager
def weights_by_broadcast(optimizer):
    """Inside, the step of ZeRO-2 on CPUs sends new weights by broadcasts: gloo's all_gather takes four times as long,
    because it copies them before and after."""
    from deepspeed.runtime.zero import stage_1_and_2

    def send(groups_flat, partitioned_param_groups, dp_process_group, **_) -> None:
        parts = [part for group in partitioned_param_groups for part in enumerate(group)]
        for work in [dist.broadcast(part, rank, async_op=True) for rank, part in parts]:
            work.wait()

    if not hasattr(optimizer, "bit16_groups_flat") or optimizer.bit16_groups_flat[0].device.type != "cpu":
        yield
        return
    own, stage_1_and_2.all_gather_dp_groups = stage_1_and_2.all_gather_dp_groups, send
    try:
        yield
    finally:
        stage_1_and_2.all_gather_dp_groups = own
