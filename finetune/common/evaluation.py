"""The skeleton of a teacher-forced evaluation: the same numbers for any number of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from common.plan import Plan
from common.runtime import Process, all_sum


def evaluation_rows(lengths: np.ndarray, micro_tokens: int, process: Process) -> Iterator[tuple[np.ndarray, bool]]:
    """This rank's share of the clips, one micro-batch of indices at a time, and whether it counts.

    Under ZeRO-3 every rank must run the model equally often: a rank that has no batch left repeats the first one, which
    does not count.
    """
    plan = Plan(lengths, micro_tokens, seed=0, jitter=0)
    for first in range(0, plan.per_epoch, process.world):
        number = first + process.rank
        counts = number < plan.per_epoch
        yield plan.micro_batch(number if counts else 0)[1], counts


@contextmanager
def evaluating(model):
    """Inside, the model is in eval mode and no gradients are recorded."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Sums:
    """Named sums over batches and ranks. Reducing sums, not means, makes the result independent of batch sizes."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, counts: bool, **values) -> None:
        """Adds numbers or tensors to the sums of these names; zeros if the batch does not count."""
        for name, value in values.items():
            value = torch.as_tensor(value).detach().cpu().double()
            value = value if counts else torch.zeros_like(value)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduce(self, process: Process) -> dict[str, np.ndarray]:
        """The sums over all ranks; every rank must have added the same names."""
        flat = torch.cat([value.flatten() for value in self.sums.values()])
        total, sums, start = all_sum(flat, process), {}, 0
        for name, value in self.sums.items():
            sums[name] = total[start : start + value.numel()].reshape(value.shape)
            start += value.numel()
        return sums
