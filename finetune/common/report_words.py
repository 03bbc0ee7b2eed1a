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
    "eos_loss": Measure("end token loss", "low"),
    "end_loss": Measure("end token loss", "low"),
    "eos_recall": Measure("ends predicted", "high", "%", "low: speech that never stops"),
    "eos_false_alarm": Measure("false ends", "low", "%", "high: speech that is cut off"),
    "stop_rate": Measure("samples that stop", "high", "%"),
    "duration_ratio": Measure("relative length", note="1 is as long as expected"),
    "bits_per_frame": Measure("bits per frame", "low"),
    "kbps": Measure("compressed bit rate", "low", "kbit/s", "of the codes, if compressed with this model"),
    "codec_kbps": Measure("codec bit rate", unit="kbit/s"),
    "caption_gain": Measure(
        "caption gain", "high", note="increase in loss with a wrong caption; near 0, it is ignored"
    ),
    "caption_gain_onsets": Measure(
        "caption gain at onsets", "high", note="the caption gain of the codes where sounds change"
    ),
    "caption_gain_none": Measure("gain over no caption", "high", note="increase in loss without a caption"),
    "text_drift": Measure("text logit drift", "low", note="largest change from the original Llama"),
    "wer": Measure("word error rate", "low", "%"),
    "cer": Measure("character error rate", "low", "%"),
    "similarity": Measure("speaker similarity", "high"),
    "dnsmos": Measure("DNSMOS", "high", note="predicted listening score, 1 to 5"),
    "frechet": Measure("Fréchet distance", "low"),
    "caption": Measure("caption agreement", "high"),
    "pesq": Measure("PESQ", "high", note="speech quality, 1 to 4.6"),
    "pesq_raw": Measure("PESQ without EMA", "high"),
    "stoi": Measure("STOI", "high", note="intelligibility, up to 1"),
    "estoi": Measure("ESTOI", "high", note="intelligibility, up to 1"),
    "si_sdr": Measure("SI-SDR", "high", "dB", "signal to distortion, whatever the level"),
    "si_sdr_gain": Measure("SI-SDR gain", "high", "dB", "over the noisy input"),
    "sdr": Measure("SDR", "high", "dB"),
    "ssnr": Measure("segmental SNR", "high", "dB"),
    "lsd": Measure("log-spectral distance", "low", "dB"),
    "gain": Measure("output level", note="1 is the level of the clean speech"),
    "gain_error": Measure("output level error", "low"),
    "pesq_invalid": Measure("missing PESQ labels", "low", "%"),
    "not_finite": Measure("non-finite outputs", "low"),
    "d_pearson": Measure("discriminator correlation", "high", note="of its predictions with PESQ"),
}

# What the top of the page shows, the first of these that were measured.
HEADLINES = (
    "wer similarity dnsmos pesq si_sdr stoi estoi loss text_gap_onsets eos_recall stop_rate duration_ratio text_gap gap"
    " caption_gain_onsets caption_gain accuracy accuracy_first kbps"
).split()


def measure_of(name: str) -> Measure:
    if name in MEASURES:
        return MEASURES[name]
    if name.startswith("noisy_") and name[6:] in MEASURES:
        return MEASURES[name[6:]]._replace(label=f"{MEASURES[name[6:]].label} of the noisy input", note="", better="")
    return Measure(name.replace("_", " "))


def number(value: float, unit: str = "", sign: bool = False) -> str:
    """Four significant digits, or as many as a reader needs."""
    plus = "+" if sign else ""
    if value is None or not math.isfinite(value):
        return "not finite" if value is not None else "none"
    if unit == "%":
        return f"{100 * value:{plus}.1f} %"
    size = abs(value)
    digits = f"{plus}.0f" if size >= 10000 else f"{plus}.3g" if 0 < size < 0.001 else f"{plus}.4g"
    return f"{value:{digits}} {unit}".rstrip()


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# ---- facts about one sample --------------------------------------------------------------------------------------

# Not shown: what a listener has no use for, or what stands elsewhere on the card.
HIDDEN = {"name", "text", "index", "seconds_per_byte", "recorded_seconds_per_byte", "longest_silence"}
HIDDEN |= {"seed", "distinct_codes"}


def facts_in_words(facts: dict, noisy: dict | None = None) -> list[str]:
    """Short phrases about a sample from the .json file next to it, with the change against the `noisy` input."""
    phrases = [
        phrase + _change(name, value, (noisy or {}).get(name))
        for name, value in facts.items()
        if name not in HIDDEN and (phrase := _phrase(name, value, facts))
    ]
    return [*phrases, "in brackets: against the noisy input"] if noisy else phrases


def _change(name: str, value, before) -> str:
    if name not in MEASURES or not MEASURES[name].better or not isinstance(before, (int, float)):
        return ""
    return f" ({value - before:+.3g})"


def _phrase(name: str, value, facts: dict) -> str:
    if name in ("ended", "ended_by_eos"):
        return "stops by itself" if value else "does not stop: cut off at the limit"
    if name == "said":
        return f"says: {value}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else f"{name.replace('_', ' ')}: {value}"
    if name == "seconds":
        return f"{value:.2f} s long"
    if name == "duration_ratio":
        return f"{value:.2f} times the expected length"
    if name == "repeats":
        return f"{100 * value:.0f} % of its frames repeat the previous one"
    if name == "codes_as_recorded":
        return f"{100 * value:.0f} % of its codes match the recording"
    if name == "silent":
        longest = facts.get("longest_silence")
        if value < 0.005:
            return "no silence"
        return f"{100 * value:.0f} % silence" + (f", up to {longest:.1f} s at once" if (longest or 0) >= 0.05 else "")
    if name == "clipped":
        return f"{100 * value:.1f} % clipped" if value >= 0.0005 else "no clipping"
    if name == "bad_ids":
        return f"{value:g} invalid codes" if value else ""
    measure = measure_of(name)
    return f"{measure.label} {number(value, measure.unit)}"
