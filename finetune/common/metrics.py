"""What a run records: metrics.jsonl (the source of truth), trackers (the same values), a bar or a line per step."""

import dataclasses
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common.boards import Boards
from common.config import RunConfig
from common.contracts import LossOutput
from common.runtime import Process, all_sum, print_above, redact, say, stop_requested


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every `every` steps happens after this one; 0 = never."""
    return every > 0 and step % every == 0


@dataclass
class Totals:
    """One optimizer step, summed over all ranks; the same on every rank."""

    loss_sum: float
    parts: dict[str, float]  # means, by name
    padded: int  # positions, padding included
    stop: bool  # some rank received a signal


class Meter:
    """Collects one optimizer step on this rank. Nothing waits for the device before `reduce`."""

    def __init__(self):
        self.began, self.waited = time.monotonic(), 0.0
        self.losses, self.ids, self.parts, self.names, self.padded = [], [], 0, (), 0

    @contextmanager
    def waiting(self):
        """Counts the time spent inside as waiting for data."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def add(self, batch: dict, output: LossOutput) -> None:
        """One micro-batch."""
        self.losses.append(output.loss_sum.detach())
        self.ids.append(batch["ids"])
        self.padded += batch["positions"]
        if output.parts:
            self.names = tuple(output.parts)
            self.parts = self.parts + _double(torch.stack(list(output.parts.values())))

    def reduce(self, process: Process) -> Totals:
        """The only reduction of a step: losses, padding, and whether any rank received a signal."""
        loss_sum = float(_double(torch.stack(self.losses)).sum())
        parts = self.parts.flatten().tolist() if self.names else []
        *sums, loss_sum, padded, stop = all_sum([*parts, loss_sum, self.padded, float(stop_requested())], process)
        means = {name: sums[2 * i] / sums[2 * i + 1] for i, name in enumerate(self.names) if sums[2 * i + 1]}
        return Totals(float(loss_sum), means, int(padded), stop > 0)

    def non_finite_ids(self) -> list[str]:
        """Clips of this rank's micro-batches whose loss is not finite."""
        finite = torch.stack(self.losses).isfinite().tolist()
        return [name for names, fine in zip(self.ids, finite, strict=True) if not fine for name in names]


class Tracker:
    """Writes on the main rank only; every method may be called on all ranks."""

    def __init__(self, folder: Path, process: Process, config: RunConfig, steps: int, start: int = 0, warmup: int = 0):
        """`warmup` steps lead up to the learning rate --lr: the console line says so, so that a warm-up value is not
        mistaken for the peak. `start`: the step that the run resumes after."""
        self.process, self.config, self.steps, self.warmup = process, config, steps, warmup
        self.path = folder / "metrics.jsonl"
        self.started = self.first_step = None
        self.boards = self.bar = None
        if process.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            self.boards = Boards(config.tracker, folder, start, dataclasses.asdict(config))
            if sys.stdout.isatty():
                self.bar = tqdm(total=steps, initial=start, dynamic_ncols=True, file=sys.stdout, unit="step")
                print_above(self.bar)

    def forget_after(self, step: int) -> None:
        """Drops what a killed process logged after the checkpoint that the run resumes from."""
        if self.process.is_main and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            draft = self.path.with_suffix(".tmp")
            draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(draft, self.path)

    def event(self, name: str, step: int, **values) -> None:
        self._write({"event": name, "step": step, **values})
        self._plot(f"{name}/", step, values)
        if self.boards:
            self.boards.add_sounds()

    def step(self, step: int, values: dict) -> None:
        """One optimizer step, numbered from 1."""
        self._write({"step": step, **values})
        self._plot("train/", step, values)
        if self.first_step is None:
            self.started, self.first_step = time.monotonic(), step
            left = "?"
        else:
            seconds_per_step = (time.monotonic() - self.started) / (step - self.first_step)
            left = _clock(seconds_per_step * (self.steps - step))
        if self.bar is None and step % self.config.log_every and step not in (self.first_step, self.steps):
            return
        memory = values.get("vram_gb", values.get("rss_gb"))
        wait = 100 * values["data_wait_s"] / max(values["step_s"], 1e-9)
        warm = f" (warm-up {step}/{self.warmup}, peak {self.config.lr:.1e})" if step < self.warmup else ""
        summary = (
            f"loss {values['loss']:.4f}  lr {values['lr']:.2e}{warm}  norm {values['grad_norm']:.3f}"
            f"  {values['tokens_per_s']:>7.0f} tok/s  pad {100 * values['padding']:.1f}%  wait {wait:.1f}%"
            f"  {memory:.2f} GB"
        )
        if self.bar is None:
            say(f"step {step:>6}/{self.steps}  {summary}  left {left}")
        else:
            self.bar.set_postfix_str(summary, refresh=False)
            self.bar.update(step - self.bar.n)

    def close(self) -> None:
        if self.boards:
            self.boards.close()
        if self.bar is not None:
            print_above(None)
            self.bar.close()

    def _write(self, record: dict) -> None:
        if self.process.is_main:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(redact(json.dumps(record)) + "\n")

    def _plot(self, prefix: str, step: int, values: dict) -> None:
        if self.boards:
            self.boards.log({prefix + name: value for name, value in values.items()}, step)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "mps" else tensor.double()  # MPS has no float64


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a kill cut short


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
