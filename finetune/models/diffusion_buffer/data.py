"""What a training step sees of a recording: K frames that end anywhere in it, with silence before its start."""

import dataclasses

import numpy as np
import torch

from common.errors import UserError
from common.keyed_random import generator, uniform
from common.pairs import PairDataset
from models.diffusion_buffer import signal
from models.diffusion_buffer.signal import Spec

MAX_CONTEXT_MIX = 0.5  # --context-noise: at most this share of the recording's noise is in the context
CONTEXT_NOISE_RMS = 0.02  # and this much random noise; clean speech has about 0.1


class Clips:
    """The rows to train on. A crop depends only on seed, epoch and id, never on the rank or batch that it is in."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, spec: Spec, config):
        self.pairs, self.rows, self.spec, self.config = pairs, rows, spec, config
        self.lengths = np.ones(len(rows), dtype=np.int64)  # all crops are equally long, so the plan counts crops
        self.frame_powers: dict[int, np.ndarray] = {}  # of the clips that --level track has seen
        check_lengths(pairs, rows, spec, config.pad_short)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, indices) -> list[str]:
        return [self.pairs.id(self.rows[i]) for i in indices]

    def batch(self, crops: list[tuple[int, int]], buffer: int = 0) -> dict:
        """`crops`: (epoch, index) of each crop. `buffer`: frames in the buffer; 0 = the spec's.

        N crops, L samples, F bins, K frames, B frames in the buffer:
          noisy, clean (N, L); t, sigma (N, B) diffusion times and their standard deviations; z (N, F, B) noise
          loudness (N, K)         with --level track: factors of the frames
          context_mix (N,), context_noise (N, F, K - B)      with --context-noise: what corrupts the context
          z_own (N, F, B)         with --context-own: noise of the buffer that the context comes from
        """
        names = self.ids(index for _, index in crops)
        spec = dataclasses.replace(self.spec, buffer=buffer or self.spec.buffer)
        items = [self.item(self.rows[i], epoch, name, spec) for (epoch, i), name in zip(crops, names, strict=True)]
        batch = {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}
        return batch | {"ids": names, "positions": len(items) * self.spec.frames}

    def last_frame(self, row: int, key: tuple) -> int:
        """The last frame of a crop, counted from the first frame of its clip."""
        return int(uniform(*key, "place") * signal.frame_count(int(self.pairs.samples[row]), self.spec.hop))

    def gain(self, key: tuple) -> float:
        """The random gain of a crop in dB."""
        return self.config.gain_low + uniform(*key, "gain") * (self.config.gain_high - self.config.gain_low)

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
        return min(self.spec.frames, 1 + self.last_frame(row, (self.config.seed, epoch, self.pairs.id(row))))

    def fingerprint(self) -> dict:
        return {"data": self.pairs.fingerprint(), "rows": len(self)}

    def item(self, row: int, epoch: int, name: str, spec: Spec) -> dict[str, np.ndarray]:
        """One crop, as `batch` describes it."""
        key = (self.config.seed, epoch, name)
        t = signal.training_times(spec, self.config.times, *key)
        draw = generator(*key, "noise")
        last = self.last_frame(row, key)
        item = {
            "t": t.astype(np.float32),
            "sigma": signal.sigma(spec, t).astype(np.float32),
            "z": signal.complex_noise(draw, spec.bins, spec.buffer),
        }
        gain = np.float32(10 ** (self.gain(key) / 20) / 32768)
        for side in ("noisy", "clean"):
            item[side] = cut(getattr(self.pairs, side)(row), last, spec) * gain
        if spec.level == "track":
            heard = signal.loudness_factors(self.powers(row)[: last + 1] * np.square(32768 * gain), spec)
            silence = np.ones(spec.frames, dtype=np.float32)
            item["loudness"] = np.concatenate([silence, heard])[-spec.frames :]
        if self.config.context_noise:
            corrupted = uniform(*key, "dirty") < self.config.context_noise
            item["context_mix"] = np.float32(corrupted * MAX_CONTEXT_MIX * uniform(*key, "mix"))
            noise = signal.complex_noise(draw, spec.bins, spec.frames - spec.buffer)
            item["context_noise"] = noise * np.float32(CONTEXT_NOISE_RMS * corrupted)
        if self.config.context_own:
            item["z_own"] = signal.complex_noise(draw, spec.bins, spec.buffer)
        return item


def buffer_size(step: int, spec: Spec, config) -> int:
    """Frames in the buffer of an optimizer step; drawn per step, because all ranks must have the same."""
    low = config.buffer_low or spec.buffer
    return low + int(uniform(config.seed, step, "buffer") * (spec.buffer - low + 1))


def cut(samples: np.ndarray, last: int, spec: Spec) -> np.ndarray:
    """The samples of the K frames up to frame `last`, zeros outside of the recording."""
    start = (last - spec.frames + 1) * spec.hop - spec.n_fft // 2
    length = (spec.frames - 1) * spec.hop + spec.n_fft
    wave = np.zeros(length, dtype=np.float32)
    low, high = max(start, 0), min(start + length, len(samples))
    wave[low - start : high - start] = samples[low:high]
    return wave


def check_lengths(pairs: PairDataset, rows: np.ndarray, spec: Spec, pad_short: bool) -> None:
    """Refuses clips that are too short for a frame, or without --pad-short for a buffer."""
    shortest = rows[int(np.argmin(pairs.samples[rows]))]
    samples = int(pairs.samples[shortest])
    clip = f"clip {pairs.id(shortest)!r} of {pairs.folder} has {samples} samples"
    if samples <= spec.n_fft // 2:
        raise UserError(f"{clip}, less than half a window (--n-fft {spec.n_fft}, --hop {spec.hop}): leave it out.")
    frames = signal.frame_count(samples, spec.hop)
    if frames < spec.buffer and not pad_short:
        raise UserError(
            f"{clip}, {frames} frames of --hop {spec.hop}, and --buffer is {spec.buffer}: lower --buffer, leave the"
            " clip out, or pad it with silence with --pad-short."
        )
