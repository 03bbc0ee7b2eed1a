"""The report's samples: one card per text or file, with every version of it to hear and to look at."""

import base64
import functools
import io
import json
from pathlib import Path

import numpy as np

from common.report_words import facts_in_words

CARDS = 12  # per page
COLUMNS = 300  # of a spectrogram
TOP_HERTZ = 10_000
FLOOR_DB = -75  # below the loudest spot
# Folders below samples/ and what they are called; the steps of the run stand between them.
BEFORE = {
    "noisy": "noisy input",
    "reference": "reference voice",
    "original": "recording",
    "recorded": "recording via codec",
}
AFTER = {"clean": "clean recording"}


def sample_cards(run: Path, shown_step: int | None) -> tuple[list[dict], int]:
    """The cards of a run's samples, and how many there are on disk. Of its steps, a card has the base and
    `shown_step`, or the last one if that has no samples."""
    samples = _read_samples(run / "samples")
    cards = []
    for name in list(samples)[:CARDS]:
        versions = samples[name]
        tuned = sorted(folder for folder in versions if _step(folder))
        if f"step-{shown_step or 0:08d}" in tuned:
            tuned = [f"step-{shown_step:08d}"]
        places = [*BEFORE, "step-00000000", *tuned[-1:], *AFTER]
        card = {
            "name": name,
            "text": next((facts["text"] for facts in versions.values() if facts.get("text")), name),
            "sounds": [
                _version(run / "samples" / folder / f"{name}.wav", versions[folder])
                for folder in places
                if folder in versions
            ],
        }
        share_time(card)
        cards.append(card)
    return cards, len(samples)


def compared_cards(runs: dict[str, tuple[Path, int | None]]) -> list[dict]:
    """One card per text, with its recording and the tuned sample of every run that has one."""
    merged = {}
    for label, (run, shown_step) in runs.items():
        for card in sample_cards(run, shown_step)[0]:
            target = merged.setdefault((card["name"], card["text"]), card | {"sounds": []})
            known = [sound["label"] for sound in target["sounds"]]
            for sound in card["sounds"]:
                if sound["kind"] == "tuned":
                    target["sounds"].append(sound | {"label": f"{label}: {sound['label']}"})
                elif sound["label"] not in known:
                    target["sounds"].append(sound)
    for card in merged.values():
        share_time(card)
    return list(merged.values())[:CARDS]


def share_time(card: dict) -> None:
    """Makes the pictures of a card as wide as their sounds are long."""
    longest = max((sound["heard"]["seconds"] for sound in card["sounds"] if sound["heard"]), default=0.0)
    for sound in card["sounds"]:
        if sound["heard"]:
            sound["width"] = round(100 * sound["heard"]["seconds"] / longest, 2)


def _read_samples(folder: Path) -> dict[str, dict[str, dict]]:
    """Name of a sample -> folder -> facts, for all that can be read: a run may be writing."""
    samples = {}
    for path in sorted(folder.glob("*/*.json")):
        stage = path.parent.name
        if stage not in BEFORE | AFTER and _step(stage) is None:
            continue
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict):
            samples.setdefault(path.stem, {})[stage] = facts
    return dict(sorted(samples.items()))


def _step(folder: str) -> int | None:
    name, _, number = folder.partition("step-")
    return int(number) if not name and number.isdigit() else None


def _version(path: Path, facts: dict) -> dict:
    folder = path.parent.name
    step = _step(folder)
    if step is None:
        label, kind = (BEFORE | AFTER)[folder], "given"
    elif step == 0:
        label, kind = "base, before training", "base"
    else:
        label, kind = f"tuned, step {step:,}", "tuned"
    # The clean recording was measured against itself, which tells nothing.
    words = [] if folder == "clean" else facts_in_words(facts)
    return {"label": label, "kind": kind, "facts": words, "heard": load_sound(path)}


def load_sound(path: Path) -> dict | None:
    """What the page needs to play and to draw a .wav file; None if there is nothing to hear."""
    try:
        status = path.stat()
        return _load_sound(path, status.st_mtime_ns, status.st_size)
    except (OSError, RuntimeError):  # soundfile's own error is a RuntimeError
        return None


@functools.lru_cache(maxsize=256)  # `watch` builds the page many times
def _load_sound(path: Path, changed: int, size: int) -> dict | None:
    import soundfile

    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    if not len(wave):
        return None
    wave = np.nan_to_num(wave)
    flac = io.BytesIO()  # half the size of 16-bit WAV and just as exact
    soundfile.write(flac, wave, rate, format="FLAC", subtype="PCM_16")
    return {
        "seconds": len(wave) / rate,
        "audio": data_uri(flac.getvalue(), "audio/flac"),
        "picture": data_uri(spectrogram(wave.mean(axis=1), rate), "image/png"),
    }


def spectrogram(mono: np.ndarray, rate: int) -> bytes:
    """A small PNG with low frequencies at the bottom."""
    from matplotlib.image import imsave

    window = 2 ** round(np.log2(0.032 * rate))
    padded = np.pad(mono, window // 2)
    starts = np.linspace(0, len(padded) - window, COLUMNS).astype(int)
    frames = np.stack([padded[start : start + window] for start in starts]) * np.hanning(window)
    power = np.abs(np.fft.rfft(frames)) ** 2
    level = 10 * np.log10(np.maximum(power[:, : TOP_HERTZ * window // rate], 1e-10)).T
    file = io.BytesIO()
    loudest = level.max()
    imsave(file, level, cmap="magma", origin="lower", format="png", vmin=loudest + FLOOR_DB, vmax=loudest)
    return file.getvalue()


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
