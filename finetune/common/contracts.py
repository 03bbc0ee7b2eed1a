"""What a recipe, its training set and its loss promise each other. docs/add_a_recipe.md walks through them.

Everything is counted in *positions* (a place in the padded sequence: a decoder position, a frame, a sample) and
*target weight* (the sum of the loss weights of what is predicted). Both are known from lengths alone, so every rank can
plan all micro-batches of an optimizer step without communicating.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch


class LossOutput(NamedTuple):
    """What compute_loss(model, batch, ...) returns."""

    # Scalar with a gradient: the SUM of the weighted losses of this micro-batch, not their mean. The loop divides it by
    # the target weight of the whole optimizer step (all ranks, all micro-batches), and logs that quotient as `loss`.
    loss_sum: torch.Tensor
    # Logged besides as loss_NAME = sum / count over the step. Detached tensors of shape (2,): a sum and its count.
    parts: dict[str, torch.Tensor]
    # Anything else that the loop wants back from the forward pass, detached.
    extra: object = None


class TrainingSet(Protocol):
    """The clips of a dataset as one recipe sees them; `index` counts the clips that are trained on."""

    lengths: np.ndarray  # (clips,) int64: positions per clip, before padding; what the batch plan is made from

    def __len__(self) -> int: ...

    def ids(self, indices) -> list[str]:
        """The ids of these clips, as error messages and the log name them."""

    def batch(self, indices, epoch: int = 0) -> dict:
        """These clips as one padded micro-batch, on the CPU. Random choices are keyed by (seed, epoch, id).

        Tensors go to the model; besides them every batch has
          "ids": list[str], one per clip, and
          "positions": int, the number of padded positions.
        """

    def target_weight(self, indices, epoch: int = 0) -> float:
        """Sum of the loss weights of all targets of these clips: what loss_sum is divided by. Needs no batch."""

    def fingerprint(self) -> dict:
        """Identifies the content; a run only resumes on data with the same fingerprint."""
