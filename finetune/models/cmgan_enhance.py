"""A whole recording through CMGAN, and its measures. Long ones go in overlapping windows that fade into each other."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from common.config import UserError
from common.pairs import PairDataset
from common.runs import gather_names
from common.runtime import Ranks, say
from common.scorer import Scorer
from models import cmgan_signal as signal

FADE = signal.RATE  # one second: normalisation and attention see their window only, and a hard seam is heard
SHORTEST = signal.N_FFT  # samples; the reflection at the edges needs half of it


def windows(length: int, window: int) -> list[int]:
    """Where the windows start: evenly spread, neighbours overlapping by a fade or more."""
    if length <= window:
        return [0]
    count = math.ceil((length - FADE) / (window - FADE))
    return [round(k * (length - window) / (count - 1)) for k in range(count)]


@torch.no_grad()
def enhance_blocks(model, read: Callable, length: int, scale: float, window: int, device) -> Iterator[np.ndarray]:
    """The enhanced samples in order; `read(start, count)` gives noisy ones, `scale` is the whole recording's."""
    starts = windows(length, window)
    fade_in = 0.5 - 0.5 * np.cos(np.pi * (np.arange(FADE) + 0.5) / FADE)
    tail = None
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        count = min(window, length)
        noisy = torch.as_tensor(read(start, count), dtype=torch.float32, device=device) * scale
        padded = torch.nn.functional.pad(noisy, (0, max(0, SHORTEST - count)))
        estimate = model(signal.spectrum(padded[None]))
        wave = signal.wave_of(estimate, len(padded))[0, :count].cpu().numpy() / scale
        if tail is not None:
            wave[:FADE] = fade_in * wave[:FADE] + (1 - fade_in) * tail
        if following is None:
            yield wave
        else:
            overlap = following - start
            yield wave[:overlap]
            tail = wave[overlap : overlap + FADE].copy()


def scale_of(power: float) -> float:
    """The factor that gives a recording of this mean square unit power."""
    return 1.0 if power < signal.SILENT else power**-0.5


def enhance(model, noisy: np.ndarray, window: int, device) -> np.ndarray:
    """(L,) float samples -> (L,), normalised by the whole recording."""
    scale = scale_of(float(np.square(noisy, dtype=np.float64).mean()))
    blocks = enhance_blocks(model, lambda start, count: noisy[start : start + count], len(noisy), scale, window, device)
    return np.concatenate(list(blocks))


# ---- measuring -------------------------------------------------------------------------------------------------


def sounds(pairs: PairDataset, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean as float32 in -1..1."""
    return tuple(side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))


@torch.no_grad()
def measure_files(
    model, discriminator, pairs: PairDataset, rows, weights: list[float], window: int, scorer: Scorer, ranks: Ranks
) -> list[dict]:
    """Every measure and loss term of every file, once, in order, the same on every rank.

    The losses are of the wave that is heard, so that windows and overlap are part of them.
    """
    model.eval()
    discriminator.eval()
    mine = []
    for place in range(ranks.rank, len(rows), ranks.world):
        noisy, clean = sounds(pairs, rows[place])
        wave = enhance(model, noisy, window, ranks.device)
        pair = signal.normalise(*(torch.from_numpy(side)[None].to(ranks.device) for side in (noisy, clean)))
        heard = torch.from_numpy(wave)[None].to(ranks.device) * pair.scale[:, None]
        estimate = signal.Estimate(signal.spectrum(heard), heard, pair, signal.spectrum(pair.clean))
        terms = signal.generator_terms(estimate, discriminator)[:, 0].tolist()
        row = {"place": place, "id": pairs.id(rows[place]), "samples": len(clean)}
        row |= {f"loss_{name}": term for name, term in zip(signal.TERMS, terms, strict=True)}
        row["loss"] = sum(weight * term for weight, term in zip(weights, terms, strict=True))
        mine.append((row, scorer.measure(clean, wave)))
    model.train()
    discriminator.train()
    rows_here = [row | score.result() for row, score in mine]
    return sorted(gather_names(rows_here, ranks), key=lambda row: row["place"])


def measure_noisy(pairs: PairDataset, rows, scorer: Scorer, ranks: Ranks) -> dict[str, float]:
    """The measures of doing nothing."""
    waiting = []
    for place in range(ranks.rank, len(rows), ranks.world):
        noisy, clean = sounds(pairs, rows[place])
        waiting.append((place, scorer.measure(clean, noisy)))
    rows_here = [{"place": place, **score.result()} for place, score in waiting]
    return means(sorted(gather_names(rows_here, ranks), key=lambda row: row["place"]))


def means(rows: list[dict]) -> dict[str, float]:
    """Mean over the files of every number that is defined; NaN where none is."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    found = {name: np.array([row[name] for row in rows]) for name in names}
    return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in found.items()}


def write_table(path: Path, rows: list[dict]) -> None:
    """One row a file."""
    names = [name for name in rows[0] if name != "place"]
    lines = [",".join(names)] + [",".join(_cell(row[name]) for name in names) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(path)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


# ---- files -----------------------------------------------------------------------------------------------------


def enhance_folder(model, source: Path, out: Path, window: int, device) -> None:
    """Every .wav and .flac below `source` to the same name below `out`, as 32-bit float that cannot clip."""
    import soundfile

    if not source.is_dir():
        raise UserError(f"--enhance {source} is not a folder.")
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".wav", ".flac"))
    if not files:
        raise UserError(f"--enhance {source} holds no .wav or .flac file.")
    if source.resolve() == out.resolve():
        raise UserError("--enhance and --out are the same folder: the recordings would be overwritten.")
    model.eval()
    for path in files:
        target = (out / path.relative_to(source)).with_suffix(".wav")
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.tmp")
        try:
            with soundfile.SoundFile(path) as recording:
                if recording.samplerate != signal.RATE or recording.channels != 1:
                    raise UserError(
                        f"--enhance {path} has {recording.samplerate} Hz and {recording.channels} channel(s);"
                        f" CMGAN takes {signal.RATE} Hz mono: convert it first."
                    )
                length, over = recording.frames, 0
                if not length:
                    raise UserError(f"--enhance {path} is empty.")
                blocks = recording.blocks(blocksize=signal.RATE * 60, dtype="float64")
                scale = scale_of(sum(float(np.square(block).sum()) for block in blocks) / length)

                def read(start: int, count: int, recording=recording) -> np.ndarray:
                    recording.seek(start)
                    return recording.read(count, dtype="float32")

                with soundfile.SoundFile(draft, "w", signal.RATE, 1, subtype="FLOAT", format="WAV") as written:
                    for block in enhance_blocks(model, read, length, scale, window, device):
                        over += int((np.abs(block) > 1).sum())
                        written.write(block)
            draft.replace(target)
        except soundfile.LibsndfileError as error:
            raise UserError(f"--enhance {path} cannot be read: {error}") from None
        finally:
            draft.unlink(missing_ok=True)
        say(f"{target}  {length / signal.RATE:.1f} s" + (f", {over} samples beyond full scale" if over else ""))
