"""Noisy/clean pairs as data/pairs.py writes them, and the crops that a training sees of them."""

import numpy as np

from common import keyed_random as keyed
from common.arrow import ArrowDataset, flat_views
from common.config import UserError
from common.runtime import Ranks, on_first, say

DRAWS = 8  # of a crop's place, until it holds speech
SPEECH_SECONDS = 0.3  # that a crop should hold, or half of it if it is shorter than twice that
SPEECH_FLOOR_DB = -40.0  # below the clip's loudest frame, a frame is silence
FRAME_SECONDS = 0.01


class PairDataset(ArrowDataset):
    """Pairs of equal length. `samples[i]` is the length; `noisy(i)`, `clean(i)` are int16 views, nothing is copied."""

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
        self._sides = {
            side: flat_views(self.table.column(side), self.samples, self, f"{side} samples") for side in self.flat
        }

    def _view(self, side: str, i: int) -> np.ndarray:
        values, chunk, start = self._sides[side]
        return values[chunk[i]][start[i] : start[i] + self.samples[i]]

    def noisy(self, i: int) -> np.ndarray:
        return self._view("noisy", i)

    def clean(self, i: int) -> np.ndarray:
        return self._view("clean", i)

    def verify(self) -> None:
        """Reads everything once: checksums, duplicate ids, empty clips."""
        self.verify_files()
        if (self.samples <= 0).any():
            raise UserError(f"{self.folder}: clip {self.id(int(np.argmin(self.samples)))!r} is empty.")

    def rows_starting(self, prefixes: list[str]) -> np.ndarray:
        """Rows whose id starts with one of `prefixes`, as VoiceBank's ids start with the speaker."""
        return np.array([i for i in range(len(self)) if self.id(i).startswith(tuple(prefixes))], dtype=np.int64)

    def rows_named(self, name: str) -> np.ndarray:
        """The row of this id, as an array."""
        rows = [i for i in range(len(self)) if self.id(i) == name]
        if not rows:
            raise UserError(f"{self.folder} has no clip {name!r}; its first is {self.id(0)!r}.")
        return np.array(rows, dtype=np.int64)

    def crop(self, i: int, length: int, *key) -> tuple[np.ndarray, np.ndarray, int]:
        """Noisy and clean (length,) int16 at a place that the key decides, and how often it was drawn again.

        A clip that is too short goes round, so that it is never padded with silence. A place with hardly any speech is
        drawn again: PESQ has no value there, and a discriminator nothing to learn.
        """
        noisy, clean = self.noisy(i), self.clean(i)
        if len(clean) <= length:
            place = np.arange(length) % len(clean)
            return noisy[place], clean[place], 0
        active = speech_frames(clean, self.rate)
        frame = int(FRAME_SECONDS * self.rate)
        wanted = min(SPEECH_SECONDS, length / self.rate / 2, active.sum() * FRAME_SECONDS)
        for draw in range(DRAWS):
            start = int(keyed.uniform(*key, draw, "crop") * (len(clean) - length + 1))
            inside = active[start // frame : (start + length) // frame]
            if inside.sum() * FRAME_SECONDS >= wanted:
                break
        return noisy[start : start + length], clean[start : start + length], draw


def speech_frames(wave: np.ndarray, rate: int) -> np.ndarray:
    """Which frames of 10 ms are louder than the loudest one less 40 dB."""
    frame = int(FRAME_SECONDS * rate)
    whole = wave[: len(wave) // frame * frame].astype(np.float32).reshape(-1, frame)
    power = np.square(whole).mean(1)
    return power > max(power.max(initial=0.0), 1e-9) * 10 ** (SPEECH_FLOOR_DB / 10)


class Crops:
    """The rows of a dataset that are trained on, as batches of keyed crops of `seconds`."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, seconds: float, seed: int):
        self.pairs, self.rows, self.seed = pairs, rows, seed
        self.length = int(seconds * pairs.rate)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, chosen) -> list[str]:
        return [self.pairs.id(self.rows[i]) for i in chosen]

    def batch(self, chosen, epoch: int = 0) -> dict:
        """Noisy and clean (B, length) float tensors in -1..1; a crop depends on seed, epoch and id alone."""
        import torch

        ids = self.ids(chosen)
        crops = [
            self.pairs.crop(self.rows[i], self.length, self.seed, epoch, name)
            for i, name in zip(chosen, ids, strict=True)
        ]
        noisy, clean = (torch.from_numpy(np.stack([c[s] for c in crops]).astype(np.float32) / 32768) for s in (0, 1))
        redraws = sum(crop[2] for crop in crops)
        return {"noisy": noisy, "clean": clean, "ids": ids, "positions": noisy.numel(), "redraws": redraws}


# ---- what is trained on, what is held out ------------------------------------------------------------------------


def open_pairs(path: str, rate: int, verify: bool, ranks: Ranks) -> PairDataset:
    """A dataset of pairs; `verify`: checked for damage by the first rank."""
    pairs = PairDataset(path, rate)
    if verify:
        on_first(pairs.verify, ranks)
    return pairs


def split_pairs(config, rate: int, ranks: Ranks) -> tuple[Crops, PairDataset | None, np.ndarray]:
    """The crops to train on, and the pairs and rows to evaluate on.

    Those are --eval-data, or else the ids of --data that --hold-out names, which are not trained on in either case.
    """
    pairs = open_pairs(config.data, rate, config.verify_data, ranks)
    held = pairs.rows_starting(config.hold_out) if config.hold_out else np.array([], dtype=np.int64)
    if config.hold_out and not len(held):
        raise UserError(f"--hold-out {' '.join(config.hold_out)}: no id in {config.data} starts so.")
    kept = np.setdiff1d(np.arange(len(pairs)), held)
    if not len(kept):
        raise UserError(f"--hold-out {' '.join(config.hold_out)} leaves nothing of {config.data} to train on.")
    chosen = pairs if len(held) else None
    if config.eval_data:
        chosen = open_pairs(config.eval_data, rate, config.verify_data, ranks)
        held = np.arange(len(chosen))
        trained = {pairs.id(i) for i in kept}
        twice = [chosen.id(i) for i in held if chosen.id(i) in trained]
        if twice:
            raise UserError(f"--eval-data {config.eval_data} holds {len(twice)} ids of --data, such as {twice[0]}.")
        both = {_speaker(name) for name in trained} & {_speaker(chosen.id(i)) for i in held}
        if both:
            say(f"warning: {len(both)} speakers are in --data and in --eval-data, such as {min(both)}")
    if 0 < config.eval_files < len(held):
        held = held[np.linspace(0, len(held) - 1, config.eval_files).round().astype(int)]
    return Crops(pairs, kept, config.seconds, config.seed), chosen, held


def _speaker(name: str) -> str:
    """VoiceBank's p286_001 is of speaker p286."""
    return name.rsplit("/", 1)[-1].split("_")[0]
