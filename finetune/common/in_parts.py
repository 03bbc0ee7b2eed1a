"""Out of memory at any step: the micro-batch is computed in parts, on every rank alike, and the training goes on.

A backward pass of DeepSpeed's engine cannot be repeated: it has already added and sent what it had computed, and the
other ranks wait for the rest. So each rank first computes its gradients alone. If one of them runs out of memory, all
try again with smaller parts; in the end the engine gets the gradients in one piece.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from common.contracts import LossOutput
from common.engine import share_of_step
from common.errors import UserError
from common.memory import try_in_memory
from common.runtime import Process, any_rank, say


def backward(
    engine, batch: dict, compute: Callable, step_weight: float, parts: int, process: Process
) -> tuple[LossOutput, int]:
    """Forward and backward pass of a micro-batch; returns its output and the number of parts that fit into memory.

    `compute(part)`: the LossOutput of some of the batch's sounds; not by the engine, but by its module. `parts`: how
    many to begin with, as the last call returned. In the output, `extra` is the list of what the parts have.
    """

    def outputs(parts: int) -> Iterator[LossOutput]:
        return map(compute, split(batch, parts))

    return _until_it_fits(engine, outputs, len(batch["ids"]), step_weight, parts, process)


def backward_whole(
    engine, compute: Callable, sounds: int, step_weight: float, parts: int, process: Process
) -> tuple[LossOutput, int]:
    """The same for a network whose sounds depend on each other, and which saves memory in a way of its own.

    `compute(parts)`: the LossOutput of the whole micro-batch of `sounds` sounds, computed in this many parts.
    """
    output, parts = _until_it_fits(engine, lambda parts: [compute(parts)], sounds, step_weight, parts, process)
    return output._replace(extra=output.extra[0]), parts


def _until_it_fits(engine, outputs: Callable, sounds: int, step_weight, parts, process) -> tuple[LossOutput, int]:
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    while True:
        work = functools.partial(_gradients, outputs, parts, parameters, step_weight, process.world)
        result, problem = try_in_memory(work)
        if not any_rank(problem is not None, process):
            break
        result = None
        if any_rank(problem is not None and parts >= sounds, process):
            raise UserError(
                "a micro-batch does not fit into memory, not even in parts of one crop"
                f"{f' ({problem})' if problem else ''}: use a smaller model, shorter crops or more memory."
            )
        parts *= 2
        say(f"warning: a micro-batch of {sounds} runs out of memory; from here on it is computed in {parts}"
            " parts, which adds up to the same gradient")  # fmt: skip
    output, gradients = result
    _hand_over(engine, parameters, gradients)
    return output, parts


def split(batch: dict, parts: int) -> Iterator[dict]:
    """The batch in parts: what has a row per sound is cut, everything else is in each of them."""
    size = len(batch["ids"])
    bounds = [size * i // parts for i in range(parts + 1)]
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        if low < high:
            rows = {name: value[low:high] for name, value in batch.items() if _has_rows(value, size)}
            yield batch | rows


def _has_rows(value, size: int) -> bool:
    return (torch.is_tensor(value) and value.dim() > 0 or isinstance(value, list)) and len(value) == size


def _gradients(outputs, parts, parameters, step_weight, world) -> tuple[LossOutput, list]:
    """The output and this rank's gradients of the micro-batch, added up over outputs(parts); no collectives."""
    done, total = [], None
    for output in outputs(parts):
        loss = share_of_step(output.loss_sum, step_weight, world)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        done.append(output._replace(loss_sum=output.loss_sum.detach()))
        if total is None:
            total = list(gradients)
        else:
            total = [a if b is None else b if a is None else a.add_(b) for a, b in zip(total, gradients, strict=True)]
    merged = {name: sum(output.parts[name] for output in done) for name in done[0].parts}
    extra = [output.extra for output in done]
    return LossOutput(sum(output.loss_sum for output in done), merged, extra), total


class _Gradients(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx, gradients: list[torch.Tensor], *parameters):
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, factor):
        return None, *torch._foreach_mul(ctx.gradients, factor)


def _hand_over(engine, parameters: list, gradients: list) -> None:
    """A backward pass of the engine that ends with these gradients."""
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):
        engine.optimizer.clear_backward_seen_flag()  # as DeepSpeed's forward does, which was not called
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    known = _Gradients.apply([g for _, g in pairs], *(p for p, _ in pairs))
    engine.backward(known, scale_wrt_gas=False)
