"""Metrics and facts in words, for the report: what a number is called, and which way is better."""

import math
from typing import NamedTuple


class Measure(NamedTuple):
    label: str
    better: str = ""  # "low", "high" or, if there is no such direction, ""
    unit: str = ""  # "%": the value is a fraction
    note: str = ""


MEASURES = {
    "loss": Measure("evaluation loss", "low", note="on clips that were not trained on"),
    "accuracy": Measure("code accuracy", "high", "%", "codes whose most likely value is right"),
    "accuracy_first": Measure("first codebook accuracy", "high", "%"),
    "text_gap": Measure("text gap", "high", note="increase in loss with the wrong text; near 0, the text is ignored"),
    "text_gap_onsets": Measure("text gap at onsets", "high", note="the text gap of the codes where sounds begin"),
    "gap": Measure("voice gap", "high", note="increase in loss with another voice; near 0, the reference is ignored"),
    "eos_recall": Measure("ends predicted", "high", "%", "low: speech that never stops"),
    "stop_rate": Measure("samples that stop", "high", "%"),
    "duration_ratio": Measure("relative length", note="1 is as long as expected"),
    "kbps": Measure("compressed bit rate", "low", "kbit/s", "of the codes, if compressed with this model"),
    "caption_gain": Measure(
        "caption gain", "high", note="increase in loss with a wrong caption; near 0, it is ignored"
    ),
    "caption_gain_onsets": Measure(
        "caption gain at onsets", "high", note="the caption gain of the codes where sounds change"
    ),
    "wer": Measure("word error rate", "low", "%"),
    "similarity": Measure("speaker similarity", "high"),
    "dnsmos": Measure("DNSMOS", "high", note="predicted listening score, 1 to 5"),
    "frechet": Measure("Fréchet distance", "low"),
    "caption": Measure("caption agreement", "high"),
    "pesq": Measure("PESQ", "high", note="speech quality, 1 to 4.6"),
    "stoi": Measure("STOI", "high", note="intelligibility, up to 1"),
    "estoi": Measure("ESTOI", "high", note="intelligibility, up to 1"),
    "si_sdr": Measure("SI-SDR", "high", "dB", "signal to distortion, whatever the level"),
}

# What the top of the page shows and what is drawn, in this order.
HEADLINES = (
    "wer similarity dnsmos frechet caption pesq si_sdr stoi estoi loss text_gap_onsets eos_recall stop_rate"
    " duration_ratio text_gap gap caption_gain_onsets caption_gain accuracy accuracy_first kbps"
).split()


def measure_of(name: str) -> Measure:
    return MEASURES.get(name) or Measure(name.replace("_", " "))


def number(value: float, unit: str = "", sign: bool = False) -> str:
    """Four significant digits, or as many as a reader needs."""
    plus = "+" if sign else ""
    if not math.isfinite(value):
        return "not finite"
    if unit == "%":
        return f"{100 * value:{plus}.1f} %"
    size = abs(value)
    if size >= 10000:
        digits = ",.0f"
    elif 0 < size < 0.001:
        digits = ".3g"
    else:
        digits = ".4g"
    return f"{value:{plus}{digits}} {unit}".rstrip()


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# ---- facts about one sample --------------------------------------------------------------------------------------

# How a fact is written; other numbers and words are shown with their name.
PHRASES = {
    "ended": lambda value: "stops by itself" if value else "does not stop: cut off at the limit",
    "said": lambda value: f"says: {value}",
    "seconds": lambda value: f"{value:.2f} s long",
    "duration_ratio": lambda value: f"{value:.2f} times the expected length",
    "repeats": lambda value: f"{value:.0%} of its frames repeat the previous one",
    "codes_as_recorded": lambda value: f"{value:.0%} of its codes match the recording",
    "silent": lambda value: f"{value:.0%} silence",
    "clipped": lambda value: f"{value:.1%} clipped" if value else "",
    "bad_ids": lambda value: f"{value:g} invalid codes" if value else "",
}
PHRASES["ended_by_eos"] = PHRASES["ended"]
# What a listener has no use for, or what stands elsewhere on the card.
HIDDEN = {"name", "text", "index", "seconds_per_byte", "recorded_seconds_per_byte", "longest_silence", "seed"}
HIDDEN |= {"distinct_codes"}


def facts_in_words(facts: dict) -> list[str]:
    """Short phrases about a sample from the .json file next to it."""
    phrases = [_phrase(name, value) for name, value in facts.items() if name not in HIDDEN and value not in (None, "")]
    return [phrase for phrase in phrases if phrase]


def _phrase(name: str, value) -> str:
    is_number = isinstance(value, (int, float))
    if name in PHRASES and (is_number or name == "said"):
        return PHRASES[name](value)
    if isinstance(value, bool) or not is_number:
        return f"{name.replace('_', ' ')}: {value}"
    measure = measure_of(name)
    return f"{measure.label} {number(value, measure.unit)}"
