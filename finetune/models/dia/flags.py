"""The flags that both Dia recipes have. Imports nothing heavy: a recipe reads its flags before it loads torch."""

from dataclasses import dataclass
from typing import Literal

from common import attention, compiling
from common.config import flag
from common.sample_scores import SpeechFlags

# How the authors' release generates by default: for `speak` and for the samples of a run, so that both sound alike.
GUIDANCE, TEMPERATURE, TOP_P, TOP_K = 3.0, 1.8, 0.9, 45


@dataclass
class DiaFlags(SpeechFlags):
    revision: str = flag("", "branch, tag or commit of --model on the hub; empty = the newest", group="run")
    attn: attention.Attention = flag("auto", attention.HELP, group="run", may_change=True)
    compile: bool = flag(False, compiling.HELP, group="run", may_change=True)
    text_mode: Literal["speech", "tags"] = flag("speech", "texts are transcripts, or comma-separated tags (music)")
    tag_dropout: float = flag(0.1, "tags: probability of dropping each tag", low=0, high=1)
    tag_limit: int = flag(0, "tags: keep at most this many; 0 = all", low=0)
    tag_map: str = flag("", "JSON file that maps tags to control bytes whose embeddings are trained; empty = none")
    allow_empty_text: bool = flag(False, "train on clips that have no text")
    over_long_text: Literal["error", "drop"] = flag(
        "error", "what to do with texts over the model's limit; they are never cut"
    )
    max_seconds: float = flag(0.0, "longest clip in seconds; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop", "crop"] = flag(
        "error", "what to do with longer clips; crop needs --text-mode tags"
    )
    text_dropout: float = flag(
        0.15, "fraction of samples trained without text, which classifier-free guidance needs", low=0, high=1
    )
    qk_lr: float = flag(
        1.0,
        "learning rate of query and key projections, relative to --lr; in Dia's unscaled attention their updates have"
        " 11 times the effect",
        group="schedule",
        low=0.01,
        high=1,
    )
    voice_prompt: float = flag(
        0.0,
        "voice cloning: fraction of the clips that follow another clip by the same speaker, which is only context",
        low=0,
        high=1,
    )
    voice_prompt_seconds: float = flag(10.0, "longest clip used as that context, in seconds", low=0.1)
    channel_weights: Literal["equal", "first4x"] = flag(
        "equal", "loss weights of the codebooks; first4x: 4 for the first, 1 for the others"
    )
    eos_weight: float = flag(1.0, "loss weight of the end-of-speech token", low=0)
    min_eos_recall: float = flag(
        0.0, "a checkpoint that predicts a smaller fraction of clip ends than this is never the best", low=0, high=1
    )
    sample_frames: int = flag(
        0, "longest sample in codec frames; 0 = 1.5 x the longest evaluation clip", low=0, may_change=True
    )
    sample_greedy: bool = flag(
        False, "samples: take the most likely codes, without guidance, instead of sampling", may_change=True
    )
    sample_guidance: float = flag(
        GUIDANCE, "samples: scale of classifier-free guidance; 1 = off", low=1, may_change=True
    )
    sample_temperature: float = flag(TEMPERATURE, "samples: temperature, at least 1", low=1, may_change=True)
    sample_top_p: float = flag(TOP_P, "samples: nucleus sampling; 1 = off", low=0.01, high=1, may_change=True)
    sample_top_k: int = flag(TOP_K, "samples: draw from the k most likely codes", low=1, may_change=True)
