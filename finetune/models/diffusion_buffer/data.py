"""What a training step sees of a recording: K frames that end anywhere in it, silence before its start."""

import dataclasses
import math

import numpy as np
import torch

from common import keyed_random as keyed
from common.config import UserError
from common.pairs import PairDataset
from models.diffusion_buffer import signal
from models.diffusion_buffer.signal import Spec

MOST_NOISE = 0.5  # of the context, where it is corrupted
DIRT = 0.02  # rms of what is added to it; clean speech has about 0.1


class Windows:
    """The rows that are trained on. A batch depends on seed, epoch and ids alone, never on who asks for it."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, spec: Spec, config):
        self.pairs, self.rows, self.spec, self.config = pairs, rows, spec, config
        check_lengths(pairs, rows, spec, config.pad_short)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, chosen) -> list[str]:
        return [self.pairs.id(self.rows[i]) for i in chosen]

    def batch(self, chosen: list[tuple[int, int]], size: int = 0) -> dict:
        """`chosen`: epoch and clip of each crop. `size`: frames of the buffer, where it is not the spec's."""
        names = self.ids(clip for _, clip in chosen)
        spec = dataclasses.replace(self.spec, buffer=size or self.spec.buffer)
        items = [self.item(self.rows[i], epoch, name, spec) for (epoch, i), name in zip(chosen, names, strict=True)]
        batch = {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}
        return batch | {"ids": names, "positions": len(items) * self.spec.frames}

    def last_frame(self, row: int, key: tuple) -> int:
        """Of a crop, counted from its clip's first."""
        return int(keyed.uniform(*key, "place") * signal.frame_count(int(self.pairs.samples[row]), self.spec.hop))

    def heard(self, epoch: int, i: int) -> int:
        """Frames of a crop that are not the silence before its clip."""
        row = self.rows[i]
        return min(self.spec.frames, 1 + self.last_frame(row, (self.config.seed, epoch, self.pairs.id(row))))

    def item(self, row: int, epoch: int, name: str, spec: Spec) -> dict[str, np.ndarray]:
        key = (self.config.seed, epoch, name)
        t = signal.training_times(spec, self.config.times, *key)
        draw = keyed.generator(*key, "noise")
        decibels = self.config.gain_low + keyed.uniform(*key, "gain") * (self.config.gain_high - self.config.gain_low)
        last = self.last_frame(row, key)
        item = {
            "t": t.astype(np.float32),
            "sigma": signal.sigma(spec, t).astype(np.float32),
            "z": signal.complex_noise(draw, spec.bins, spec.buffer),
        }
        gain = np.float32(10 ** (decibels / 20) / 32768)
        for side in ("noisy", "clean"):
            item[side] = cut(getattr(self.pairs, side)(row), last, spec) * gain
        if spec.level == "track":
            item["scale"] = signal.frame_scales(torch.from_numpy(self.pairs.noisy(row) * gain), last, spec)
        if self.config.context_noise:
            dirty = keyed.uniform(*key, "dirty") < self.config.context_noise
            item["mix"] = np.float32(dirty * MOST_NOISE * keyed.uniform(*key, "mix"))
            dirt = signal.complex_noise(draw, spec.bins, spec.frames - spec.buffer)
            item["dirt"] = dirt * np.float32(DIRT * dirty)
        if self.config.context_own:
            item["z_own"] = signal.complex_noise(draw, spec.bins, spec.buffer)
        return item


def buffer_size(step: int, spec: Spec, config) -> int:
    """Frames of the buffer in an optimizer step; drawn by the step, since all ranks must have the same."""
    low = config.buffer_low or spec.buffer
    return low + int(keyed.uniform(config.seed, step, "buffer") * (spec.buffer - low + 1))


def cut(samples: np.ndarray, last: int, spec: Spec) -> np.ndarray:
    """The samples of K frames up to frame `last`, zeros where there are none."""
    start = (last - spec.frames + 1) * spec.hop - spec.n_fft // 2
    length = (spec.frames - 1) * spec.hop + spec.n_fft
    found = np.zeros(length, dtype=np.float32)
    low, high = max(start, 0), min(start + length, len(samples))
    found[low - start : high - start] = samples[low:high]
    return found


def check_lengths(pairs: PairDataset, rows: np.ndarray, spec: Spec, pad_short: bool) -> None:
    shortest = rows[int(np.argmin(pairs.samples[rows]))]
    samples = int(pairs.samples[shortest])
    what = f"clip {pairs.id(shortest)!r} of {pairs.folder} has {samples} samples"
    if samples <= spec.n_fft // 2:
        raise UserError(f"{what}, less than half a window (--n-fft {spec.n_fft}, --hop {spec.hop}): leave it out.")
    frames = signal.frame_count(samples, spec.hop)
    if frames < spec.buffer and not pad_short:
        raise UserError(
            f"{what}, {frames} frames of --hop {spec.hop}, and --buffer is {spec.buffer}: lower --buffer, leave the"
            " clip out, or put silence before it with --pad-short."
        )


def snr_db(noisy: np.ndarray, clean: np.ndarray) -> float:
    noise = float(np.square(noisy - clean, dtype=np.float64).sum())
    speech = float(np.square(clean, dtype=np.float64).sum())
    return 10 * math.log10(max(speech, 1e-12) / max(noise, 1e-12))
