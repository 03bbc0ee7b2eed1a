"""The flags that both Dia recipes have. Imports nothing heavy: a recipe reads its flags before it loads torch."""

from dataclasses import dataclass
from typing import Literal

from common.config import RunConfig, flag


@dataclass
class DiaFlags(RunConfig):
    text_mode: Literal["speech", "tags"] = flag("speech", "texts are transcripts, or comma-separated tags (music)")
    tag_dropout: float = flag(0.1, "tags: probability of dropping each tag", low=0, high=1)
    tag_limit: int = flag(0, "tags: keep at most this many; 0 = all", low=0)
    tag_map: str = flag("", "JSON file of tags that become one trained control byte each; empty = none")
    allow_empty_text: bool = flag(False, "train on clips that have no text")
    over_long_text: Literal["error", "drop"] = flag("error", "texts longer than the model's limit; they are never cut")
    max_seconds: float = flag(0.0, "train on at most this many seconds of a clip; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop", "crop"] = flag("error", "clips longer than that; crop only for tag prompts")
    text_dropout: float = flag(
        0.15, "fraction of samples trained without text, which classifier-free guidance needs", low=0, high=1
    )
    channel_weights: Literal["equal", "first4x"] = flag("equal", "loss weights of the codebooks")
    eos_weight: float = flag(1.0, "loss weight of the end-of-speech token", low=0)
    min_eos_recall: float = flag(
        0.0, "never select a checkpoint as best that predicts fewer of the ends than this", low=0, high=1
    )
    sample_frames: int = flag(
        0, "longest sample in codec frames; 0 = 1.5 x the longest evaluation clip", low=0, may_change=True
    )
