"""The flags of recipes that train on noisy/clean pairs. Imports nothing heavy."""

from dataclasses import dataclass
from typing import ClassVar

from common.config import RunConfig, flag


@dataclass
class PairConfig(RunConfig):
    without: ClassVar[tuple[str, ...]] = ("micro_tokens", "optimizer", "fit", "eval_split", "eval_split_by")
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

    micro_batch: int = flag(
        4, "crops per micro-batch on each rank; computed in parts if it runs out of memory", group="schedule", low=1
    )
    tf32: bool = flag(False, "faster, less exact matrix products in fp32 on an NVIDIA GPU (TF32)", group="optimizer")
    samples: int = flag(
        4, "evaluation files to enhance each time samples are made; 0 = none", group="output", low=0, may_change=True
    )
    eval_files: int = flag(
        0, "evaluate only this many files, evenly spread over the evaluation data; 0 = all", group="output", low=0
    )

    seconds: float = flag(2.0, "length of a training crop in seconds", low=0.25)
    hold_out: list[str] = flag([], "id prefixes to exclude from training, and to evaluate on without --eval-data")
    pesq_workers: int = flag(
        0, "PESQ processes per rank; 0 = this rank's share of the CPU cores", low=0, may_change=True
    )
