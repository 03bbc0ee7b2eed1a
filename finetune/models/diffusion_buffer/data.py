"""What a training step sees of a recording: K frames that end anywhere in it, with silence before its start."""

import numpy as np
import torch

from common.errors import UserError
from common.keyed_random import generator, uniform
from common.pairs import PairDataset
from models.diffusion_buffer import signal
from models.diffusion_buffer.signal import Spec

GAINS_DB = (-12.0, 6.0)  # bounds of the random gain of a crop


class Clips:
    """The rows to train on. A crop depends only on seed, epoch and id, never on the rank or batch that it is in."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, spec: Spec, seed: int):
        self.pairs, self.rows, self.spec, self.seed = pairs, rows, spec, seed
        self.lengths = np.ones(len(rows), dtype=np.int64)  # all crops are equally long, so the plan counts crops
        self.frame_powers: dict[int, np.ndarray] = {}  # of the clips that level tracking has seen
        check_lengths(pairs, rows, spec)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, indices) -> list[str]:
        return [self.pairs.id(self.rows[i]) for i in indices]

    def batch(self, crops: list[tuple[int, int]]) -> dict:
        """`crops`: (epoch, index) of each crop.

        N crops, L samples, F bins, K frames, B frames in the buffer:
          noisy, clean (N, L); t, sigma (N, B) diffusion times and their standard deviations; z (N, F, B) noise
          loudness (N, K)         with level tracking: factors of the frames
        """
        names = self.ids(index for _, index in crops)
        items = [self.item(self.rows[i], epoch, name) for (epoch, i), name in zip(crops, names, strict=True)]
        batch = {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}
        return batch | {"ids": names, "positions": len(items) * self.spec.frames}

    def last_frame(self, row: int, key: tuple) -> int:
        """The last frame of a crop, counted from the first frame of its clip."""
        return int(uniform(*key, "place") * signal.frame_count(int(self.pairs.samples[row]), self.spec.hop))

    def gain(self, key: tuple) -> float:
        """The random gain of a crop in dB."""
        low, high = GAINS_DB
        return low + uniform(*key, "gain") * (high - low)

    def powers(self, row: int) -> np.ndarray:
        """The powers of a clip's frames without a gain, 4 bytes each; computed once."""
        if row not in self.frame_powers:
            noisy = torch.from_numpy(self.pairs.noisy(row).astype(np.float32) / 32768)
            frames = signal.frame_count(len(noisy), self.spec.hop)
            self.frame_powers[row] = signal.frame_powers(noisy, frames, self.spec)
        return self.frame_powers[row]

    def real_frames(self, epoch: int, index: int) -> int:
        """Number of frames of a crop that are not the silence before its clip."""
        row = self.rows[index]
        return min(self.spec.frames, 1 + self.last_frame(row, (self.seed, epoch, self.pairs.id(row))))

    def fingerprint(self) -> dict:
        return {"data": self.pairs.fingerprint(), "rows": len(self)}

    def item(self, row: int, epoch: int, name: str) -> dict[str, np.ndarray]:
        """One crop, as `batch` describes it."""
        key, spec = (self.seed, epoch, name), self.spec
        t = signal.training_times(spec, *key)
        last = self.last_frame(row, key)
        item = {
            "t": t.astype(np.float32),
            "sigma": signal.sigma(spec, t).astype(np.float32),
            "z": signal.complex_noise(generator(*key, "noise"), spec.bins, spec.buffer),
        }
        gain = np.float32(10 ** (self.gain(key) / 20) / 32768)
        for side in ("noisy", "clean"):
            item[side] = cut(getattr(self.pairs, side)(row), last, spec) * gain
        if spec.level == "track":
            heard = signal.loudness_factors(self.powers(row)[: last + 1] * np.square(32768 * gain), spec)
            silence = np.ones(spec.frames, dtype=np.float32)
            item["loudness"] = np.concatenate([silence, heard])[-spec.frames :]
        return item


def cut(samples: np.ndarray, last: int, spec: Spec) -> np.ndarray:
    """The samples of the K frames up to frame `last`, zeros outside of the recording."""
    start = (last - spec.frames + 1) * spec.hop - spec.n_fft // 2
    length = (spec.frames - 1) * spec.hop + spec.n_fft
    wave = np.zeros(length, dtype=np.float32)
    low, high = max(start, 0), min(start + length, len(samples))
    wave[low - start : high - start] = samples[low:high]
    return wave


def check_lengths(pairs: PairDataset, rows: np.ndarray, spec: Spec) -> None:
    """Refuses clips that are too short for a frame or for a buffer."""
    shortest = rows[int(np.argmin(pairs.samples[rows]))]
    samples = int(pairs.samples[shortest])
    clip = f"clip {pairs.id(shortest)!r} of {pairs.folder} has {samples} samples"
    if samples <= spec.n_fft // 2:
        raise UserError(f"{clip}, less than half a window of {spec.n_fft}: leave it out.")
    frames = signal.frame_count(samples, spec.hop)
    if frames < spec.buffer:
        raise UserError(
            f"{clip}, {frames} frames of {spec.hop}, and the buffer has {spec.buffer}: leave the clip out, or choose a"
            " smaller buffer with --spec."
        )
