"""What recipes that train on noisy/clean pairs share: their flags, and what happens if a micro-batch does not fit.

Imports nothing heavy.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from common.config import RunConfig, flag
from common.errors import UserError


@dataclass
class PairConfig(RunConfig):
    without: ClassVar[tuple[str, ...]] = (
        "micro_tokens",
        "optimizer",
        "eval_split",
        "eval_split_by",
    )
    model_needs_data: ClassVar[bool] = False  # --data alone trains from scratch
    needs_pesq: ClassVar[bool] = True

    model: str = flag("", "pretrained weights to fine-tune; empty = train from scratch", group="run")
    # Data is recognised by its content, so the folders may move.
    data: str = flag(
        "", "training data: noisy/clean pairs (data/pairs.py); empty = the demo pairs", group="run", may_change=True
    )
    eval_data: str = flag(
        "", "pairs to evaluate on, to select the best checkpoint; empty = those of --hold-out", group="run",
        may_change=True,
    )  # fmt: skip
    test_data: str = flag("", "pairs to measure the exported model on, once, at the end", group="run", may_change=True)

    micro_batch: int = flag(4, "crops per micro-batch on each rank", group="schedule", low=1)
    samples: int = flag(
        4, "evaluation files to enhance at every evaluation; 0 = none", group="output", low=0, may_change=True
    )

    seconds: float = flag(2.0, "length of a training crop in seconds", low=0.25)
    hold_out: list[str] = flag([], "id prefixes to exclude from training, and to evaluate on without --eval-data")


@contextmanager
def naming_micro_batch(config: PairConfig):
    """Inside, running out of memory is one sentence that names --micro-batch. All crops have one length, so the first
    step already tells whether a micro-batch fits."""
    from common.memory import out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error)
        if not message:
            raise
        if config.micro_batch > 1:
            advice = f"use --micro-batch {config.micro_batch // 2}, with more --accumulation for the same step"
        else:
            advice = "use shorter crops or a smaller model"
        found = f"a micro-batch of {config.micro_batch} does not fit into memory ({message})"
        raise UserError(f"{found}: {advice}.") from None
