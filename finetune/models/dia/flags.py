"""The flags that both Dia recipes have. Imports nothing heavy: a recipe reads its flags before it loads torch."""

from dataclasses import dataclass
from typing import Literal

from common import attention, compiling
from common.config import flag
from common.sample_scores import SpeechFlags


@dataclass
class DiaFlags(SpeechFlags):
    revision: str = flag("", "branch, tag or commit of --model on the hub; empty = the newest", group="run")
    attn: attention.Attention = flag("auto", attention.HELP, group="run", may_change=True)
    compile: bool = flag(False, compiling.HELP, group="run", may_change=True)
    text_mode: Literal["speech", "tags"] = flag("speech", "texts are transcripts, or comma-separated tags (music)")
    tag_dropout: float = flag(0.1, "tags: probability of dropping each tag", low=0, high=1)
    tag_map: str = flag("", "JSON file that maps tags to control bytes whose embeddings are trained; empty = none")
    max_seconds: float = flag(0.0, "longest clip in seconds; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop", "crop"] = flag(
        "error",
        "what to do with longer clips, and with texts over the model's limit, which are never cut; crop (of the sound)"
        " needs --text-mode tags",
    )
    text_dropout: float = flag(
        0.15, "fraction of samples trained without text, which classifier-free guidance needs", low=0, high=1
    )
    channel_weights: Literal["equal", "first4x"] = flag(
        "equal", "loss weights of the codebooks; first4x: 4 for the first, 1 for the others"
    )
    eos_weight: float = flag(1.0, "loss weight of the end-of-speech token", low=0)
    min_eos_recall: float = flag(
        0.0, "a checkpoint that predicts a smaller fraction of clip ends than this is never the best", low=0, high=1
    )
