"""The run folder: config.json, metrics, checkpoints, the best checkpoint; and the demo assets."""

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

import torch

from common import checkpoint
from common.checkpoint import write_json
from common.config import RunConfig
from common.ds_config import stage_of
from common.errors import EXIT_STOPPED, UserError
from common.metrics import Meter, Totals, Tracker
from common.optim import warmup_steps
from common.runtime import (
    Process,
    Stopped,
    barrier,
    from_main,
    gather_lists,
    memory_gb,
    on_main,
    redact,
    report_outcome,
    say,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_SKIPS = 3  # steps in a row that are not finite, after which the run ends
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "bitsandbytes")


class Run:
    """A run folder with its record and its checkpoints. Constructing it loads no weights.

    `checkpoint`: what --resume chose, None for a fresh start; `start_step`: optimizer steps that it has taken;
    `best`: step and score of the best checkpoint so far.
    """

    def __init__(
        self,
        recipe: str,
        config: RunConfig,
        ds: dict,
        process: Process,
        fingerprint: dict,
        steps: int,
        codec: dict | None = None,
    ):
        """`fingerprint`: what the numbers of the run depend on besides the flags; they may not change on resume.

        `codec`: the one that made the training data (codec.py), for the export and for speaking.
        """
        self.config, self.process = config, process
        self.folder = run_folder(config, recipe, process)
        self.identity = identity(config, stage_of(ds), process, fingerprint)
        self.skips, self.best = 0, None
        self.pending = None  # the checkpoint that is being written
        self.sharded = stage_of(ds) == 3  # under ZeRO-3 every rank must run the model equally often
        self.checkpoint = checkpoint.choose(config.resume, self.checkpoints, process, config.force_resume)
        self.start_step = 0
        if self.checkpoint:
            state = checkpoint.read_state(self.checkpoint, self.identity, config.force_resume)
            checkpoint.warn_of_another_run(state, self.identity)
            self.start_step, self.best = state["step"], state["best"]
            if process.device.type == "cpu" and state["threads"] != torch.get_num_threads():
                say(f"warning: resuming with {torch.get_num_threads()} threads per rank instead of {state['threads']}:"
                    " sums are added in another order, so losses may differ in their last digits")  # fmt: skip
        on_main(lambda: lock(self.folder), process)  # from here on the folder exists
        warmup = warmup_steps(config.warmup, steps)
        if warmup > 0.3 * steps:
            say(f"warning: the warm-up takes {warmup} of {steps} steps")
        self.tracker = Tracker(self.folder, process, config, steps, self.start_step, warmup)
        self.tracker.forget_after(self.start_step if self.checkpoint else -1)
        if process.is_main:
            facts = {"identity": self.identity, "ranks": process.world, "codec": codec}
            write_config(self.folder, recipe, config, ds, facts)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def load(self, engine, ema) -> dict:
        """Restores weights, optimizer states and EMA from `checkpoint`; returns the loop_state it was saved with.

        `engine`: one engine, or a dict of several by name, which are saved and restored together.
        """
        state = checkpoint.load(self.checkpoint, engine, ema, self.process, self.identity, self.config.force_resume)
        self.tracker.event("resume", self.start_step, checkpoint=str(self.checkpoint))
        say(f"resuming after step {self.start_step} from {self.checkpoint}")
        return state["loop_state"]

    def log(
        self, step: int, meter: Meter, totals: Totals, step_weight: float, positions: int, lr: float, grad_norm, **more
    ) -> None:
        """Records one applied step, numbered from 1. `positions`: those that hold a clip, without padding.

        The loss is what was optimised: the loss sum of all ranks and micro-batches over the target weight of the step.
        """
        self.skips = 0
        seconds = time.monotonic() - meter.began
        record = {
            "loss": totals.loss_sum / step_weight,
            "lr": lr,
            "grad_norm": grad_norm,
            **more,
            "tokens": positions,
            "padding": 1 - positions / totals.padded,
            "tokens_per_s": positions / seconds,
            "data_wait_s": meter.waited,
            "step_s": seconds,
            **memory_gb(self.process),
        }
        self.tracker.step(step, record | {f"loss_{name}": float(mean) for name, mean in totals.parts.items()})

    def skip(self, step: int, meter: Meter, micro_batches: list[dict]) -> None:
        """Records a step that was applied on no rank, because it was not finite on some rank. Too many in a row end
        the run.

        `micro_batches`: of all ranks; they are written to skipped/, so that the step can be repeated.
        """
        ids = gather_lists(meter.non_finite_ids(), self.process)
        ids = ids or [name for batch in micro_batches for name in batch["ids"]]
        self.tracker.event("skip", step, ids=ids)
        if self.process.is_main:
            self._write_skipped(step, micro_batches)
        say(f"warning: step {step} skipped, loss or gradient not finite; clips: {', '.join(ids[:20])}")
        self.skips += 1
        if self.skips >= MAX_SKIPS:
            self.wait_for_checkpoint()
            raise UserError(
                f"{self.skips} steps in a row were not finite, last with clips {', '.join(ids[:5])};"
                f" the checkpoints in {self.checkpoints} are from before."
            )

    def _write_skipped(self, step: int, micro_batches: list[dict]) -> None:
        path = self.folder / "skipped" / f"step-{step:08d}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
            torch.save({"step": step, "micro_batches": micro_batches}, path)
        except OSError as error:
            say(f"warning: {path} could not be written: {error.strerror}")

    def is_best(self, step: int, score: float | None) -> bool:
        """Whether this evaluation is the best so far: lower is better, None never is. Remembers it if so.

        Save a checkpoint whenever it is: `load_best` needs it.
        """
        if score is None or (self.best and score >= self.best["score"]):
            return False
        self.best = {"step": step, "score": score}
        return True

    def save(
        self,
        engine,
        ema,
        step: int,
        score: float | None = None,
        loop_state: dict | None = None,
        rank_state: dict | None = None,
    ) -> None:
        """Starts writing a checkpoint in the background, once the one before is on disk.

        `loop_state`: JSON that `load` gives back; `rank_state`: tensors that only this rank holds.
        """
        began = time.monotonic()
        self.wait_for_checkpoint()
        state = {"step": step, "identity": self.identity, "best": self.best, "loop_state": loop_state or {}}
        state |= {"threads": torch.get_num_threads()}
        self.pending = checkpoint.save(
            self.checkpoints,
            engine,
            state,
            ema,
            self.process,
            self.config.keep,
            score,
            rank_state,
            background=True,
        )
        self.tracker.event("checkpoint", step, path=str(self.pending.path), stall_s=time.monotonic() - began)

    def wait_for_checkpoint(self) -> None:
        if self.pending:
            self.pending.wait()
        self.pending = None

    def load_best(self, engine, ema, step: int) -> dict:
        """Restores the best checkpoint for the export, and returns which it is and why: {"step", "score", "why"}.

        `step`: the last one, which stays loaded if it is the best or if no evaluation gave a score.
        """
        self.wait_for_checkpoint()
        if not self.best or self.best["step"] == step:
            return chosen_facts(step, self.best and self.best["score"], self.config)
        path = self.checkpoints / f"step-{self.best['step']:08d}"
        checkpoint.load(path, engine, ema, self.process, self.identity, self.config.force_resume)
        say(f"the best checkpoint is step {self.best['step']}, with a score of {self.best['score']:.4f}")
        return chosen_facts(self.best["step"], self.best["score"], self.config)

    def first_eval(self) -> dict:
        """The evaluation before the first step and its samples' scores, which later ones are compared with; the same on
        every rank. They are read from metrics.jsonl."""
        return on_main(lambda: self.events("scores").get(0, {}) | self.events("eval").get(0, {}), self.process)

    def events(self, name: str, key: str = "step") -> dict:
        """The events of this name in metrics.jsonl, by step or by another of their values. For the main rank."""
        lines = self.tracker.path.read_text(encoding="utf-8").splitlines() if self.tracker.path.exists() else []
        return {record[key]: record for record in map(json.loads, lines) if record.get("event") == name}

    def stop(self, step: int) -> None:
        """Ends a run after a signal, once it is saved."""
        self.wait_for_checkpoint()
        self.tracker.event("preempted", step)
        say(f"stopped by a signal after step {step}; run the same command with --out {self.folder} to continue")
        report_outcome(EXIT_STOPPED)
        barrier(
            self.process
        )  # srun kills all ranks at the first non-zero exit: the main rank must have reported by then
        raise Stopped

    def finish(self, steps: int) -> None:
        self.wait_for_checkpoint()
        self.tracker.event("done", steps)
        self.tracker.close()
        unlock(self.folder)


def chosen_facts(step: int, score: float | None, config: RunConfig) -> dict:
    """What an export says about its checkpoint; `score` None: no evaluation gave one, so it is the last."""
    best_by = getattr(config, "best_by", "loss")
    why = "the last: no evaluation gave a score" if score is None else f"the best by {best_by}"
    return {"step": step, "score": score, "why": why}


# ---- the folder ------------------------------------------------------------------------------------------------


def run_folder(config: RunConfig, recipe: str, process: Process) -> Path:
    """--out, or a folder named after the recipe and the time; the same on every rank."""
    name = config.out or str(Path("runs") / time.strftime(f"{recipe}-%Y%m%d-%H%M%S"))
    return Path(from_main(name, process))


def make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be created ({error.strerror}).") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out {folder} is not writable.")


_locks = {}


def lock(folder: Path) -> None:
    """Reserves the folder for this process as long as it lives."""
    make_writable(folder)
    if folder.resolve() in _locks:  # opening the file again and closing it would release the lock
        return
    _locks[folder.resolve()] = file = open(folder / ".lock", "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is in use by a run that has not ended; wait for it.") from None
    except OSError:  # a file system without locks
        pass


def unlock(folder: Path) -> None:
    if file := _locks.pop(folder.resolve(), None):
        file.close()


def identity(config: RunConfig, stage: int, process: Process, fingerprint: dict) -> dict:
    """Everything that the numbers of a run depend on: it only resumes from a checkpoint with the same identity."""
    may_change = {item.name for item in dataclasses.fields(config) if item.metadata["may_change"]}
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in may_change}
    flags |= {"zero_stage": stage, "ranks": process.world, "fingerprint": fingerprint}
    return json.loads(redact(json.dumps(flags)))  # as the checkpoint will hold it


def write_config(folder: Path, recipe: str, config: RunConfig, ds: dict, more: dict) -> None:
    """config.json: everything that is needed to repeat the run; --config takes it back."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "recipe": recipe,
            "command": sys.argv,  # what was asked for; "config" is what the run uses
            "config": dataclasses.asdict(config),
            "ds_config": ds,
            **more,
            "threads": torch.get_num_threads(),  # per rank; part of what makes CPU runs equal bit for bit
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


def empty_folder(folder: Path) -> None:
    """Makes an empty folder, deleting what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def replace_folder(draft: Path, final: Path) -> None:
    """Moves a finished folder into the place of an older one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    draft.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def demo_assets(process: Process, demo: str) -> Path:
    """The tiny model, codec and corpus that data/demos/<demo>.py makes, built once by a process of its own."""
    folder = ROOT / "runs" / f"demo-assets-{demo}"
    say("embedded demo: a tiny model and synthetic data; for the real thing use --model and --data")

    def build() -> None:
        command = [sys.executable, ROOT / "data" / "demo.py", "--out", folder, "--model", demo]
        if subprocess.run(command, check=False).returncode:
            raise UserError("data/demo.py could not build the demo assets; see its message above.")

    on_main(build, process)
    return folder
