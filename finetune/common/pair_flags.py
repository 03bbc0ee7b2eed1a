"""The flags of recipes that train on noisy/clean pairs. Imports nothing heavy."""

from dataclasses import dataclass
from typing import ClassVar

from common.config import RunConfig, flag


@dataclass
class PairConfig(RunConfig):
    without: ClassVar[tuple[str, ...]] = ("micro_tokens",)
    model_with_data: ClassVar[bool] = False

    model: str = flag("", "weights to go on from; empty = start from nothing", group="run")
    data: str = flag("", "dataset of data/pairs.py; empty = the demo's", group="run")
    eval_data: str = flag("", "pairs to choose the best by; empty = those of --hold-out", group="run")
    test_data: str = flag("", "pairs to measure the best model on, once, at the end", group="run", free=True)
    enhance: str = flag("", "folder of .wav and .flac to enhance into --out with --model", group="run", free=True)

    micro_batch: int = flag(4, "crops a rank and micro-batch", group="schedule", low=1)
    samples: int = flag(4, "files of the evaluation data to write at each sampling; 0 = none", group="output", low=0)
    eval_files: int = flag(0, "evaluate on this many files, evenly spread; 0 = all", group="output", low=0)

    seconds: float = flag(2.0, "length of a crop", low=0.25)
    hold_out: list[str] = flag([], "ids that start so are not trained on; without --eval-data they choose the best")
    pesq_workers: int = flag(0, "PESQ processes a rank; 0 = its share of the cores", low=0, free=True)
