"""The flags that both Dia recipes have. Imports nothing heavy: a recipe reads its flags before it loads torch."""

from dataclasses import dataclass
from typing import Literal

from common.config import RunConfig, flag


@dataclass
class DiaFlags(RunConfig):
    text_mode: Literal["speech", "tags"] = flag("speech", "a transcript, or comma-separated tags (music)")
    tag_dropout: float = flag(0.1, "tags: probability to drop each", low=0, high=1)
    tag_limit: int = flag(0, "tags: at most this many; 0 = all", low=0)
    tag_map: str = flag("", "JSON file of tags that become one trained control byte each; empty = none")
    allow_empty_text: bool = flag(False, "train on clips that have no text")
    over_long_text: Literal["error", "drop"] = flag("error", "texts over the model's limit; never cut")
    max_seconds: float = flag(0.0, "longest part of a clip to train on; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop", "crop"] = flag("error", "longer clips; crop only for tag prompts")
    uncond: float = flag(0.15, "share of samples without text, which guidance needs", low=0, high=1)
    uncond_scope: Literal["sample", "step"] = flag("sample", "decide a sample, or a whole step on all ranks")
    channel_weights: Literal["equal", "first4x"] = flag("equal", "loss weight of the codebooks")
    eos_weight: float = flag(1.0, "loss weight of the end token", low=0)
    min_eos_recall: float = flag(0.0, "a checkpoint that finds fewer of the ends is never the best", low=0, high=1)
    sample_frames: int = flag(0, "longest sample; 0 = 1.5 x the longest evaluation clip", low=0)
