"""The report's samples: one card per text or file, with every version of it to hear and to look at."""

import base64
import functools
import io
import json
from pathlib import Path

import numpy as np

from common.report_words import facts_in_words

CARDS = 12  # per page
EARLIER = 4  # steps between the base and the one that is shown
COLUMNS, ROWS = 300, 72  # pixels of a spectrogram
FLOOR_DB = -75  # below the loudest spot
# Folders below samples/, in the order of a card; steps are between them.
BEFORE = {
    "noisy": "noisy input",
    "reference": "reference voice",
    "original": "recording",
    "recorded": "recording, through the codec",
}
AFTER = {"clean": "clean recording"}


def sample_cards(run: Path, shown_step: int | None) -> tuple[list[dict], int]:
    """The cards of a run's samples, and how many there are on disk. `shown_step`: of the exported checkpoint."""
    versions = _versions(run / "samples")
    cards = []
    for name in list(versions)[:CARDS]:
        steps = sorted(folder for folder in versions[name] if _step(folder) is not None)
        after = [folder for folder in steps if _step(folder) > 0]
        tuned = next((folder for folder in after if _step(folder) == shown_step), after[-1] if after else None)
        places = [*BEFORE, *[folder for folder in steps if _step(folder) == 0], tuned, *AFTER]
        others = [folder for folder in after if folder != tuned]
        kept = [others[i] for i in np.unique(np.linspace(0, len(others) - 1, EARLIER, dtype=int))] if others else []
        mine = [folder for folder in versions[name] if folder in {*places, *kept}]
        noisy = versions[name].get("noisy")
        sounds = {
            folder: _version(run / "samples" / folder / f"{name}.wav", versions[name][folder], noisy) for folder in mine
        }
        share_axes(list(sounds.values()))
        text = next((facts["text"] for facts in versions[name].values() if facts.get("text")), name)
        cards.append(
            {
                "name": name,
                "text": text,
                "sounds": [sounds[folder] for folder in places if folder in sounds],
                "earlier": [sounds[folder] for folder in kept],
                "left_out": len(others) - len(kept),
            }
        )
    return cards, len(versions)


def compared_cards(runs: dict[str, tuple[Path, int | None]]) -> list[dict]:
    """One card per text, with its recording and the tuned sample of every run that has one."""
    merged = {}
    for label, (run, shown_step) in runs.items():
        for card in sample_cards(run, shown_step)[0]:
            target = merged.setdefault(
                (card["name"], card["text"]), card | {"sounds": [], "earlier": [], "left_out": 0}
            )
            for sound in card["sounds"]:
                if sound["kind"] == "tuned":
                    target["sounds"].append(sound | {"label": f"{label}, {sound['label'].removeprefix('tuned, ')}"})
                elif sound["label"] not in [other["label"] for other in target["sounds"]]:
                    target["sounds"].append(sound)
    for card in merged.values():
        share_axes(card["sounds"])
    return list(merged.values())[:CARDS]


def share_axes(versions: list[dict]) -> None:
    """Gives the pictures of a card one scale of time and of level, so that both can be compared."""
    sounds = [version["heard"] for version in versions if version["heard"]]
    longest = max((sound["seconds"] for sound in sounds), default=0.0)
    loudest = max((sound["peak"] for sound in sounds), default=0.0)
    for sound in sounds:
        sound |= {"width": round(100 * sound["seconds"] / longest, 2), "height": round(max(loudest, 0.02), 4)}


def _versions(folder: Path) -> dict[str, dict[str, dict]]:
    """Name of a sample -> folder -> facts, for all that can be read: a run may be writing."""
    versions = {}
    for path in sorted(folder.glob("*/*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        known = path.parent.name in BEFORE or path.parent.name in AFTER or _step(path.parent.name) is not None
        if isinstance(facts, dict) and known:
            versions.setdefault(path.stem, {})[path.parent.name] = facts
    return dict(sorted(versions.items()))


def _step(folder: str) -> int | None:
    number = folder.removeprefix("step-")
    return int(number) if number != folder and number.isdigit() else None


def _label(folder: str) -> tuple[str, str]:
    """What a version is called, and its kind."""
    step = _step(folder)
    if step is None:
        return (BEFORE | AFTER)[folder], "given"
    return ("base, before training", "base") if step == 0 else (f"tuned, step {step:,}", "tuned")


def _version(path: Path, facts: dict, noisy: dict | None) -> dict:
    folder = path.parent.name
    label, kind = _label(folder)
    # The clean recording is measured against itself, which tells nothing.
    words = [] if folder == "clean" else facts_in_words(facts, noisy if _step(folder) is not None else None)
    sound = load_sound(path)
    if sound and "seconds" not in facts:
        words.insert(0, f"{sound['seconds']:.2f} s long")
    return {"label": label, "kind": kind, "facts": words, "heard": sound and dict(sound)}


# ---- one sound ---------------------------------------------------------------------------------------------------


def load_sound(path: Path) -> dict | None:
    """What the page needs to play and to draw a .wav file; None if there is nothing to hear."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _load_sound(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)  # `watch` builds the page many times
def _load_sound(path: Path, changed: int, size: int) -> dict | None:
    import soundfile

    try:
        wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
        if not len(wave):
            return None
        flac = io.BytesIO()
        # Half the size of 16-bit WAV and just as exact.
        soundfile.write(flac, np.nan_to_num(wave), rate, format="FLAC", subtype="PCM_16")
    except (OSError, RuntimeError):  # soundfile's own error is a RuntimeError
        return None
    mono = np.nan_to_num(wave.mean(axis=1))
    return {
        "seconds": len(mono) / rate,
        "peak": float(np.abs(mono).max()),
        "audio": data_uri(flac.getvalue(), "audio/flac"),
        "outline": outline(mono),
        "picture": data_uri(spectrogram(mono, rate), "image/png"),
    }


def outline(mono: np.ndarray, columns: int = COLUMNS) -> str:
    """An SVG path around the waveform, in a box from (0, -1) to (columns, 1)."""
    edges = np.linspace(0, len(mono), columns + 1).astype(int)
    pieces = [mono[start : max(end, start + 1)] for start, end in zip(edges[:-1], edges[1:], strict=True)]
    high = [f"{x} {-float(piece.max()):.3f}" for x, piece in enumerate(pieces)]
    low = [f"{x} {-float(piece.min()):.3f}" for x, piece in enumerate(pieces)]
    return f"M{' L'.join([*high, *reversed(low)])}Z"


def spectrogram(mono: np.ndarray, rate: int) -> bytes:
    """A small PNG, low frequencies at the bottom and stretched as the ear does (mel)."""
    from matplotlib import colormaps
    from PIL import Image

    window = 2 ** round(np.log2(max(64, 0.032 * rate)))
    padded = np.pad(mono, window // 2)
    starts = np.linspace(0, len(padded) - window, COLUMNS).astype(int)
    frames = np.stack([padded[start : start + window] for start in starts]) * np.hanning(window)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    mel = np.linspace(0, _mel(rate / 2), ROWS + 1)
    edges = np.searchsorted(np.fft.rfftfreq(window, 1 / rate), 700 * (10 ** (mel / 2595) - 1))
    bands = [power[:, low : max(high, low + 1)].mean(axis=1) for low, high in zip(edges[:-1], edges[1:], strict=True)]
    level = 10 * np.log10(np.maximum(np.stack(bands[::-1]), 1e-12))
    shade = np.clip(1 - (level - level.max()) / FLOOR_DB, 0, 1) if level.max() > -100 else np.zeros_like(level)
    image = Image.fromarray((shade * 63).astype(np.uint8), mode="P")
    image.putpalette(
        [round(255 * value) for colour in colormaps["magma"](np.linspace(0, 1, 64)) for value in colour[:3]]
    )
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _mel(hertz: float) -> float:
    return 2595 * np.log10(1 + hertz / 700)


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
