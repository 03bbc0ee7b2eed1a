"""Noisy/clean pairs as data/pairs.py writes them, and the crops of them that a model trains on."""

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from common.arrow import ArrowDataset, int16_lists
from common.errors import UserError
from common.holdout import refuse_overlap
from common.keyed_random import uniform
from common.runtime import Process, on_main_for_long, say

DRAWS = 8  # how often a crop's position is drawn at most, until the crop holds speech
SPEECH_SECONDS = 0.3  # speech that a crop should hold, or half of the crop if that is less
SPEECH_FLOOR_DB = -40.0  # a frame this far below the clip's loudest frame is silence
FRAME_SECONDS = 0.01


class PairDataset(ArrowDataset):
    """Pairs of equal length. `samples[i]` is the length; `noisy(i)` and `clean(i)` are int16 views, not copies."""

    kind, maker = "dataset of noisy/clean pairs", "data/pairs.py"
    facts = ("sample_rate",)
    columns = ("id", "noisy", "clean", "samples")
    flat = ("noisy", "clean")

    def __init__(self, folder: str, sample_rate: int):
        super().__init__(folder)
        if self.info["sample_rate"] != sample_rate:
            raise UserError(
                f"{folder}: dataset.json says sample_rate = {self.info['sample_rate']} but the model needs"
                f" {sample_rate}; run data/pairs.py with --sample-rate {sample_rate}."
            )
        self.rate = sample_rate
        self.samples = self._columns["samples"].to_numpy()
        self._sides = {side: int16_lists(self.table, side, self.samples, self, f"{side} samples") for side in self.flat}

    @property
    def lengths(self) -> np.ndarray:
        return self.samples

    def sound(self, i: int) -> np.ndarray:
        return self.clean(i)  # the same speech with other noise is no new speech

    def noisy(self, i: int) -> np.ndarray:
        return self._sides["noisy"][int(i)].values.to_numpy()

    def clean(self, i: int) -> np.ndarray:
        return self._sides["clean"][int(i)].values.to_numpy()

    def check_rows(self, tick) -> None:
        """Looks for empty clips."""
        if (self.samples <= 0).any():
            raise UserError(f"{self.folder}: clip {self.id(int(np.argmin(self.samples)))!r} is empty.")

    def rows_starting(self, prefixes: list[str]) -> np.ndarray:
        """Rows whose id starts with one of `prefixes`; VoiceBank's ids start with the speaker."""
        found = np.zeros(len(self), dtype=bool)
        for prefix in prefixes:
            found |= pc.starts_with(self._columns["id"], prefix).to_numpy()
        return np.flatnonzero(found)

    def names(self, rows: np.ndarray) -> Iterator[str]:
        """The ids of these rows, without holding a Python string for each of millions."""
        for first in range(0, len(rows), 10_000):
            yield from self._columns["id"].take(rows[first : first + 10_000]).to_pylist()

    def crop(self, i: int, length: int, *key) -> tuple[np.ndarray, np.ndarray, int]:
        """Noisy and clean (length,) int16 at a position chosen by the key, and how often it was drawn again.

        A clip that is too short is repeated, never padded with silence.
        """
        noisy, clean = self.noisy(i), self.clean(i)
        if len(clean) <= length:
            repeated = np.arange(length) % len(clean)
            return noisy[repeated], clean[repeated], 0
        start, draw = self.crop_start(i, length, *key)
        return noisy[start : start + length], clean[start : start + length], draw

    def crop_start(self, i: int, length: int, *key) -> tuple[int, int]:
        """The first sample of a crop, and how often it was drawn again.

        A position with hardly any speech is drawn again: PESQ is undefined there, so a discriminator has nothing to
        learn.
        """
        clean = self.clean(i)
        active = speech_frames(clean, self.rate)
        frame = int(FRAME_SECONDS * self.rate)
        wanted = min(SPEECH_SECONDS, length / self.rate / 2, active.sum() * FRAME_SECONDS)
        for draw in range(DRAWS):
            start = int(uniform(*key, draw, "crop") * (len(clean) - length + 1))
            inside = active[start // frame : (start + length) // frame]
            if inside.sum() * FRAME_SECONDS >= wanted:
                break
        return start, draw


def speech_frames(wave: np.ndarray, rate: int) -> np.ndarray:
    """Which frames of 10 ms are less than 40 dB below the loudest one."""
    frame = int(FRAME_SECONDS * rate)
    whole = wave[: len(wave) // frame * frame].astype(np.float32).reshape(-1, frame)
    power = np.square(whole).mean(1)
    return power > max(power.max(initial=0.0), 1e-9) * 10 ** (SPEECH_FLOOR_DB / 10)


class Crops:
    """A training set (common/contracts.py): keyed crops of `seconds` from some rows of a dataset, each of weight 1."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, seconds: float, seed: int):
        self.pairs, self.rows, self.seed = pairs, rows, seed
        self.length = int(seconds * pairs.rate)
        self.lengths = np.full(len(rows), self.length)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, indices) -> list[str]:
        return [self.pairs.id(self.rows[i]) for i in indices]

    def batch(self, indices, epoch: int = 0) -> dict:
        """Noisy and clean (B, length) float tensors in -1..1; a crop depends only on seed, epoch and id.

        "redraws" counts the positions that were drawn again because they held too little speech.
        """
        import torch

        ids = self.ids(indices)
        crops = [
            self.pairs.crop(self.rows[i], self.length, self.seed, epoch, name)
            for i, name in zip(indices, ids, strict=True)
        ]
        noisy, clean = (torch.from_numpy(np.stack([c[s] for c in crops]).astype(np.float32) / 32768) for s in (0, 1))
        redraws = sum(crop[2] for crop in crops)
        return {"noisy": noisy, "clean": clean, "ids": ids, "positions": noisy.numel(), "redraws": redraws}

    def target_weight(self, indices, epoch: int = 0) -> float:
        return float(len(indices))

    def fingerprint(self) -> dict:
        return {"data": self.pairs.fingerprint()}


# ---- training and evaluation data --------------------------------------------------------------------------------


def open_pairs(path: str, rate: int, process: Process) -> PairDataset:
    """A dataset of pairs, which the main rank has checked for damage."""
    pairs = PairDataset(path, rate)
    on_main_for_long(pairs.verify, process)
    return pairs


def split_pairs(config, rate: int, process: Process) -> tuple[PairDataset, np.ndarray, PairDataset | None, np.ndarray]:
    """The pairs and rows to train on, and the pairs and rows to evaluate on (None and no rows if there are none).

    Evaluation uses --eval-data, or else the clips of --data that --hold-out names. Neither is trained on.
    """
    pairs = open_pairs(config.data, rate, process)
    held_out = pairs.rows_starting(config.hold_out) if config.hold_out else np.array([], dtype=np.int64)
    if config.hold_out and not len(held_out):
        raise UserError(f"--hold-out {' '.join(config.hold_out)}: no id in {config.data} starts with it.")
    train_rows = np.setdiff1d(np.arange(len(pairs)), held_out)
    if not len(train_rows):
        raise UserError(f"--hold-out {' '.join(config.hold_out)} leaves nothing in {config.data} to train on.")
    eval_pairs, eval_rows = (pairs if len(held_out) else None), held_out
    if config.eval_data:
        eval_pairs = open_pairs(config.eval_data, rate, process)
        eval_rows = np.arange(len(eval_pairs))
        both = set(map(_speaker, pairs.names(train_rows))) & set(map(_speaker, eval_pairs.names(eval_rows)))
        if both:
            say(f"warning: {len(both)} speakers are in --data and in --eval-data, such as {min(both)}")
    if eval_pairs:
        refuse_overlap(pairs, train_rows, eval_pairs, eval_rows, config, process)
    return pairs, train_rows, eval_pairs, eval_rows


def _speaker(name: str) -> str:
    """VoiceBank's p286_001 is spoken by p286."""
    return name.rsplit("/", 1)[-1].split("_")[0]
