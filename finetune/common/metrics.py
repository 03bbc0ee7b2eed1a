"""What a run writes down: metrics.jsonl (the record), TensorBoard (the same values) and one line a step."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.runtime import Ranks, all_sum, redact, say, stop_requested


def due(every: int, done: int) -> bool:
    """Whether something that happens every so many steps happens after this one; 0 = never."""
    return every > 0 and done % every == 0


@dataclass
class Totals:
    """One optimizer step, summed over all ranks; the same on every rank."""

    losses: np.ndarray  # a codebook
    counts: np.ndarray
    padded: int
    stop: bool  # a signal came somewhere


class Meter:
    """What one optimizer step adds up on this rank; nothing waits for the device before `reduce`."""

    def __init__(self):
        self.began, self.waited = time.monotonic(), 0.0
        self.losses, self.ids, self.stats, self.padded = [], [], 0, 0

    def next(self, feed):
        asked = time.monotonic()
        batch = next(feed)
        self.waited += time.monotonic() - asked
        return batch

    def add(self, batch: dict, loss_sum: torch.Tensor, stats: torch.Tensor) -> None:
        """`stats`: loss sums and target counts, (2, codebooks)."""
        self.losses.append(loss_sum.detach())
        self.ids.append(batch["ids"])
        self.stats = self.stats + (stats if stats.device.type == "mps" else stats.double())  # MPS has no float64
        self.padded += batch["positions"]

    def reduce(self, ranks: Ranks) -> Totals:
        """The one reduction of a step: statistics, and whether any rank saw a signal."""
        sums = all_sum([*self.stats.flatten().cpu(), self.padded, float(stop_requested())], ranks)
        losses, counts = sums[:-2].reshape(2, -1)
        return Totals(losses, counts, int(sums[-2]), sums[-1] > 0)

    def broken_ids(self) -> list[str]:
        """Clips of this rank's micro-batches whose loss is not finite."""
        finite = torch.stack(self.losses).isfinite().tolist()
        return [name for names, fine in zip(self.ids, finite, strict=True) if not fine for name in names]


class Tracker:
    """Writes on the first rank only; every method may be called on all ranks."""

    def __init__(self, folder: Path, ranks: Ranks, steps: int, start: int = 0, warmup: int = 0, peak: float = 0.0):
        """`warmup` steps lead up to the learning rate `peak`: the progress line says so, lest it be taken for one."""
        self.ranks, self.steps, self.warmup, self.peak = ranks, steps, warmup, peak
        self.path = folder / "metrics.jsonl"
        self.started = self.first_step = None
        self.board = None
        if ranks.first:
            from torch.utils.tensorboard import SummaryWriter

            folder.mkdir(parents=True, exist_ok=True)
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def forget_after(self, step: int) -> None:
        """Drops what a killed process logged after the checkpoint that the run now goes on from."""
        if self.ranks.first and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            draft = self.path.with_suffix(".tmp")
            draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(draft, self.path)

    def event(self, name: str, step: int, **values) -> None:
        self._write({"event": name, "step": step, **values})
        self._plot(f"{name}/", step, values)

    def step(self, step: int, values: dict) -> None:
        """One optimizer step, numbered from 1."""
        self._write({"step": step, **values})
        self._plot("train/", step, values)
        if self.first_step is None:
            self.started, self.first_step = time.monotonic(), step
            left = "?"
        else:
            pace = (time.monotonic() - self.started) / (step - self.first_step)
            left = _clock(pace * (self.steps - step))
        memory = values.get("vram_gb", values.get("rss_gb"))
        wait = 100 * values["data_wait_s"] / max(values["step_s"], 1e-9)
        warm = f" (warm-up {step}/{self.warmup}, peak {self.peak:.1e})" if step < self.warmup else ""
        say(
            f"step {step:>6}/{self.steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}{warm}"
            f"  norm {values['grad_norm']:.3f}  {values['tokens_per_s']:>7.0f} tok/s"
            f"  pad {100 * values['padding']:.1f}%  wait {wait:.1f}%  {memory:.2f} GB  left {left}"
        )

    def close(self) -> None:
        if self.board:
            self.board.close()

    def _write(self, record: dict) -> None:
        if self.ranks.first:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(redact(json.dumps(record)) + "\n")

    def _plot(self, prefix: str, step: int, values: dict) -> None:
        if self.board:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self.board.add_scalar(prefix + name, value, step)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a kill cut short


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
