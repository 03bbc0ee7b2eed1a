"""Whole recordings through CMGAN. Long ones go in overlapping windows that fade into each other."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from common.enhance_folder import Source, enhance_files
from models.cmgan import signal
from models.cmgan.weights import load_networks

FADE = signal.RATE  # one second: normalisation and attention only see their window, and a hard seam is audible
SHORTEST = signal.N_FFT  # samples; the reflection at the edges needs half of it


def windows(length: int, window: int) -> list[int]:
    """Where the windows start: evenly spread, neighbours overlapping by at least one fade."""
    if length <= window:
        return [0]
    count = math.ceil((length - FADE) / (window - FADE))
    return [round(k * (length - window) / (count - 1)) for k in range(count)]


@torch.no_grad()
def enhance_blocks(
    model, read: Callable, length: int, scale: float, window: int, device, padding: bool = True
) -> Iterator[np.ndarray]:
    """Yields the enhanced samples in order. `read(start, count)` returns noisy ones; `scale` normalises them to the
    unit power of the whole recording.

    `padding`: to whole hops with the recording's own start, as in the published evaluation; without it the last hop,
    which no whole window covers, differs from the published output.
    """
    starts = windows(length, window)
    fade_in = 0.5 - 0.5 * np.cos(np.pi * (np.arange(FADE) + 0.5) / FADE)
    tail = None
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        count = min(window, length)
        noisy = torch.as_tensor(read(start, count), dtype=torch.float32, device=device) * scale
        padded = torch.cat([noisy, noisy[: -count % signal.HOP]]) if padding else noisy
        padded = torch.nn.functional.pad(padded, (0, max(0, SHORTEST - len(padded))))
        estimate = model(signal.spectrum(padded[None]))
        wave = signal.wave_of(estimate, len(padded))[0, :count].cpu().numpy() / scale
        if tail is not None:
            wave[:FADE] = fade_in * wave[:FADE] + (1 - fade_in) * tail
        if following is None:
            yield wave
        else:
            hop = following - start
            yield wave[:hop]
            tail = wave[hop : hop + FADE].copy()


def scale_of(power: float) -> float:
    """The factor that gives a recording with this mean square unit power."""
    return 1.0 if power < signal.SILENT else power**-0.5


def enhance(model, noisy: np.ndarray, window: int, device, padding: bool = True) -> np.ndarray:
    """(L,) float samples -> (L,), normalised by the power of the whole recording."""
    scale = scale_of(float(np.square(noisy, dtype=np.float64).mean()))

    def read(start: int, count: int) -> np.ndarray:
        return noisy[start : start + count]

    blocks = enhance_blocks(model, read, len(noisy), scale, window, device, padding)
    return np.concatenate(list(blocks))


# ---- files -----------------------------------------------------------------------------------------------------


def enhance_folder(model, source: Source | Path, out: Path, window: int, device, padding: bool = True) -> None:
    """Enhances every recording of `source`, of any length, in bounded memory."""

    def enhance_one(recording, power: float, write: Callable) -> str:
        def read(start: int, count: int) -> np.ndarray:
            recording.seek(start)
            return recording.read(count, dtype="float32")

        over = 0
        for block in enhance_blocks(model, read, recording.frames, scale_of(power), window, device, padding):
            over += int((np.abs(block) > 1).sum())
            write(block)
        return f", {over} samples beyond full scale" if over else ""

    model.eval()
    enhance_files(source, out, signal.RATE, enhance_one)


def enhance_run(model: str, source: Source | Path, out: Path, window_seconds: float, no_padding: bool) -> None:
    """Enhances recordings with the generator at `model`: a run, an export, a checkpoint or a file of weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, _ = load_networks(model)
    enhance_folder(generator.to(device), source, out, int(window_seconds * signal.RATE), device, not no_padding)
