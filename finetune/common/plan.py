"""The batch plan: computed from the lengths alone, the same on every rank, never communicated.

Clips are sorted by length with a keyed jitter and cut into micro-batches under a budget of padded positions; the
micro-batches are shuffled (keyed) and dealt to the ranks. Every epoch has the same number of micro-batches, so a
micro-batch is identified by its running number alone. Resuming needs only that number, and any ranks x accumulation
with the same product trains the same global batches.
"""

from functools import lru_cache

import numpy as np

from common import keyed_random as keyed
from common.errors import UserError

JITTER = 0.03  # relative; clips whose lengths differ by less may swap places from epoch to epoch


class Plan:
    def __init__(self, lengths: np.ndarray, budget: int, seed: int, jitter: float = JITTER):
        """`lengths`: positions per clip; `budget`: maximum padded positions per micro-batch."""
        if not len(lengths):
            raise UserError("the dataset has no clip to train on.")
        if lengths.max() > budget:
            raise UserError(
                f"--micro-tokens {budget} is below the longest clip ({lengths.max()} positions): raise it, or use"
                " shorter clips."
            )
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seed = seed
        self.jitter = jitter
        self.edges = _edges(self.lengths, budget, jitter)
        self.per_epoch = len(self.edges) - 1
        # Each rank walks through an epoch in order; a step that spans two epochs needs both.
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        draw = keyed.generator(self.seed, epoch, "order")
        key = draw.random(len(self.lengths))
        key *= self.jitter  # in place: for 7 million clips every copy is 56 MB
        key += 1
        key *= self.lengths
        return _order(key), draw.permutation(self.per_epoch)

    def micro_batch(self, number: int) -> tuple[int, np.ndarray]:
        """Epoch and clip indices of micro-batch `number`, counted from the start of training."""
        epoch, place = divmod(number, self.per_epoch)
        clips, shuffled = self._order(epoch)
        slot = shuffled[place]
        return epoch, clips[self.edges[slot] : self.edges[slot + 1]]

    def longest(self) -> np.ndarray:
        """The micro-batch that takes the most memory: the one with the most padded positions, of equals the longest
        clips. The last one may hold a single clip that was left over."""
        order = np.argsort(self.lengths, kind="stable")
        padded = np.diff(self.edges) * self.lengths[order[self.edges[1:] - 1]]
        slot = len(padded) - 1 - np.argmax(padded[::-1])
        return order[self.edges[slot] : self.edges[slot + 1]]

    def steps(self, epochs: float, micro_batches_per_step: int) -> int:
        """Optimizer steps for this many epochs."""
        return max(1, int(np.ceil(epochs * self.per_epoch / micro_batches_per_step)))

    def padding(self, epoch: int = 0) -> float:
        """Fraction of the positions that are padding."""
        clips, _ = self._order(epoch)
        longest = np.maximum.reduceat(self.lengths[clips], self.edges[:-1])
        return 1 - self.lengths.sum() / (np.diff(self.edges) * longest).sum()


def _order(key: np.ndarray) -> np.ndarray:
    """What a stable argsort gives. The quick one takes half the time for millions of clips, and orders equal keys
    differently on different processors, where ranks must agree; jittered keys are hardly ever equal."""
    order = np.argsort(key)
    ordered = key[order]
    return np.argsort(key, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def _edges(lengths: np.ndarray, budget: int, jitter: float) -> np.ndarray:
    """Where to cut the sorted clips. The k-th clip of a jittered order is at most (1 + jitter) x the k-th length,
    so cutting by that bound keeps every epoch's micro-batches within the budget, and their number constant."""
    counts = np.bincount(lengths)
    values = np.flatnonzero(counts)
    bounds = np.minimum(np.floor(values * (1 + jitter)).astype(np.int64), values[-1])
    edges, start, end_before = [np.zeros(1, dtype=np.int64)], 0, 0
    # One length at a time, not one micro-batch: there may be millions of clips, but only thousands of lengths.
    for bound, end in zip(bounds.tolist(), np.cumsum(counts[values]).tolist(), strict=True):
        size = max(1, budget // bound)  # clips in a micro-batch whose longest has this length
        if start + size < end_before:  # none of them fits to the shorter ones
            edges.append(np.array([end_before]))
            start = end_before
        edges.append(np.arange(start + size, end + 1, size))
        start, end_before = int(edges[-1][-1]) if len(edges[-1]) else start, end
    return np.concatenate([*edges, [end_before]] if start < end_before else edges)
