"""The run folder, and the demo assets that stand in for a model and data."""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import checkpoint
from common.checkpoint import write_json
from common.config import EXIT_STOPPED, RunConfig, UserError
from common.ds_config import stage_of
from common.metrics import Meter, Totals, Tracker
from common.optim import warmup_steps
from common.runtime import (
    Ranks,
    Stopped,
    all_sum,
    from_first,
    gather_names,
    memory_gb,
    on_first,
    redact,
    report_outcome,
    say,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "bitsandbytes")
# What may change between a run and its continuation without changing a single number of its training. The data are
# known by their content, so that they can move.
FREE_TO_CHANGE = set(
    "ds out resume force_resume dry_run verify_data save_every async_save keep eval_every sample_every samples".split()
    + "export max_skips hang_timeout data eval_data lr_floor_action".split()
)


def run_folder(config: RunConfig, recipe: str, ranks: Ranks) -> Path:
    """--out, or a folder named after the recipe and the time; the same on every rank."""
    name = config.out or str(Path("runs") / time.strftime(f"{recipe}-%Y%m%d-%H%M%S"))
    return Path(from_first(name, ranks))


def make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}).") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out {folder} cannot be written to.")


_locks = {}


def lock(folder: Path) -> None:
    """Makes the folder this process's own for as long as it lives."""
    make_writable(folder)
    if folder.resolve() in _locks:  # to open the file again and close it would undo the lock
        return
    _locks[folder.resolve()] = file = open(folder / ".lock", "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is being written to by a run that has not ended; wait for it.") from None
    except OSError:  # a file system without locks
        pass


def demo_assets(ranks: Ranks, model: str = "dia") -> Path:
    """The tiny model, codec and corpus of data/demo.py, made once by a process of its own."""
    folder = ROOT / "runs" / ("demo-assets" if model == "dia" else f"demo-assets-{model}")
    say("embedded demo: a tiny random model and a synthetic corpus; --model and --data name the real thing")

    def build() -> None:
        command = [sys.executable, ROOT / "data" / "demo.py", "--out", folder, "--model", model]
        if subprocess.run(command, check=False).returncode:
            raise UserError("data/demo.py could not make the demo assets; see its message above.")

    on_first(build, ranks)
    return folder


def identity(config: RunConfig, stage: int, ranks: Ranks, fingerprint: dict) -> dict:
    """Everything a checkpoint depends on: a run goes on only from a checkpoint with the same."""
    free = FREE_TO_CHANGE | {item.name for item in dataclasses.fields(config) if item.metadata["free"]}
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    fields |= {"zero_stage": stage, "ranks": ranks.world, "fingerprint": fingerprint}
    return json.loads(redact(json.dumps(fields)))  # as the checkpoint will hold it


def write_config(folder: Path, recipe: str, config: RunConfig, ds: dict, facts: dict) -> None:
    """config.json: everything needed to repeat the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "recipe": recipe,
            "command": sys.argv,  # what was asked for; "config" is what the run takes
            "config": dataclasses.asdict(config),
            "ds_config": ds,
            **facts,
            "versions": {name: _version(name) for name in PACKAGES},
            "git_commit": _git_commit(),
        },
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Run:
    """A run folder with its record and its checkpoints; goes on from the newest one when --resume says so.

    `engine`: one, or a dict of several by name, which are saved and restored together. `found`: the checkpoint that
    the run goes on from; `extra`: what `save` was given beside the engines.
    """

    def __init__(
        self, recipe: str, config: RunConfig, ds: dict, ranks: Ranks, engine, average, fingerprint: dict, steps: int
    ):
        self.config, self.ranks, self.engine, self.average = config, ranks, engine, average
        self.folder = run_folder(config, recipe, ranks)
        self.identity = identity(config, stage_of(ds), ranks, fingerprint)
        self.start, self.skips, self.extra = 0, 0, {}
        self.pending = None  # the checkpoint that is being written
        self.found = found = checkpoint.choose(config.resume, self.checkpoints, ranks, config.force_resume)
        if found:
            state = checkpoint.load(found, engine, average, ranks, self.identity, config.force_resume)
            self.start, self.extra = state["step"], state.get("extra", {})
        on_first(lambda: lock(self.folder), ranks)
        warmup = warmup_steps(config.warmup, steps)
        if warmup > 0.3 * steps:
            say(f"warning: the warm-up takes {warmup} of {steps} steps")
        self.tracker = Tracker(self.folder, ranks, steps, self.start, warmup, config.lr)
        self.tracker.forget_after(self.start if found else -1)
        if found:
            self.tracker.event("resume", self.start, checkpoint=str(found))
            say(f"going on after step {self.start} from {found}")
        if ranks.first:
            write_config(self.folder, recipe, config, ds, {"identity": self.identity, "ranks": ranks.world})

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def log(self, step: int, meter: Meter, totals: Totals, positions: int, parts=None, **more) -> None:
        """The record of one applied step, numbered from 1; `positions`: those that hold a clip.

        The loss is the mean over codebooks, or with `parts`, the names of what adds up to it, the sum of their means.
        """
        self.skips = 0
        seconds = time.monotonic() - meter.began
        record = {
            "loss": (totals.losses / totals.counts).sum() if parts else totals.losses.sum() / totals.counts.sum(),
            **more,
            "tokens": positions,
            "padding": 1 - positions / totals.padded,
            "tokens_per_s": positions / seconds,
            "data_wait_s": meter.waited,
            "step_s": seconds,
            **memory_gb(self.ranks),
        }
        names = parts or [f"channel_{i}" for i in range(len(totals.losses))]
        means = totals.losses / totals.counts
        record |= {f"loss_{name}": float(loss) for name, loss in zip(names, means, strict=True)}
        self.tracker.step(step, record)

    def skip(self, step: int, meter: Meter, all_ids: list[str]) -> None:
        """A step that was not finite on some rank and so not applied on any; too many in a row end the run."""
        self.skips += 1
        names = gather_names(meter.broken_ids(), self.ranks) or all_ids
        self.tracker.event("skip", step, ids=names)
        say(f"warning: step {step} skipped, loss or gradient not finite; clips: {', '.join(names[:20])}")
        if self.skips >= self.config.max_skips:
            self.wait_for_checkpoint()
            raise UserError(
                f"{self.skips} steps in a row were not finite (--max-skips), last with clips {', '.join(names[:5])};"
                f" the checkpoints in {self.checkpoints} are from before."
            )

    def save(self, step: int, score: float | None, extra: dict | None = None, mine: dict | None = None) -> None:
        """A checkpoint in the background; the one before must be on disk first."""
        began, config = time.monotonic(), self.config
        self.wait_for_checkpoint()
        state = {"step": step, "identity": self.identity, "extra": extra or {}}
        self.pending = checkpoint.save(
            self.checkpoints, self.engine, state, self.average, self.ranks, config.keep, score, mine, config.async_save
        )
        self.tracker.event("checkpoint", step, path=str(self.pending.path), stall_s=time.monotonic() - began)

    def wait_for_checkpoint(self) -> None:
        if self.pending:
            self.pending.wait()
        self.pending = None

    def first_eval(self) -> dict:
        """The evaluation before the first step, which later ones are set against; of an earlier process after a
        resume. The same on every rank."""

        def read() -> dict:
            lines = self.tracker.path.read_text(encoding="utf-8").splitlines() if self.tracker.path.exists() else []
            found = [record for record in map(json.loads, lines) if record.get("event") == "eval"]
            return next((record for record in found if record["step"] == 0), {})

        return on_first(read, self.ranks)

    def stop(self, step: int) -> None:
        """Ends a run that a signal wants to end, after it was saved."""
        self.wait_for_checkpoint()
        self.tracker.event("preempted", step)
        say(f"stopped by a signal after step {step}; the same command with --out {self.folder} goes on")
        report_outcome(EXIT_STOPPED)
        all_sum([0.0], self.ranks)  # srun kills all at the first exit that is not 0: the first rank has spoken by now
        raise Stopped

    def finish(self, steps: int) -> None:
        self.wait_for_checkpoint()
        self.tracker.event("done", steps)
        self.tracker.close()


def fresh(folder: Path) -> None:
    """An empty folder under this name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def replace(draft: Path, final: Path) -> None:
    """Puts a finished folder in place of an older one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    draft.rename(final)
    shutil.rmtree(old, ignore_errors=True)
