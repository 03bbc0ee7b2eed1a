"""Samples become audio and scores in one process beside the training, data/watch.py, which loads codec and models once.

With --best-by loss no rank waits for it: the scores are for the log, and are noted at the next evaluation. With another
--best-by the evaluation waits for its scores, so a checkpoint has its score when it is written. Imports nothing heavy:
a recipe reads its flags before it loads torch.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from common.codec import place_of_codec
from common.config import RunConfig, flag
from common.errors import UserError
from common.runtime import cores_per_rank, gather_lists, on_main, on_main_for_long, say

WATCHER = Path(__file__).resolve().parents[2] / "data" / "watch.py"
# Priority below the training's of what decodes and scores samples. At the lowest one (19) it would hardly ever run on a
# machine that others keep busy too, and the end of a run waits for it.
NICE = 10
TIE = 1e-9  # weight of the loss: of two checkpoints with equal scores, the one with the lower loss is better


@dataclass
class SpeechFlags(RunConfig):
    best_by: Literal["loss", "wer", "similarity", "dnsmos", "stop", "duration"] = flag(
        "loss",
        "what selects the best checkpoint: the loss, or its samples' wer, similarity, dnsmos (needs the flag of that"
        " name), stop (how many end by themselves) or duration (closest to the expected length)",
        group="output",
    )
    similarity: str = flag(
        "",
        "score speaker similarity of samples: resemblyzer, or a folder with an x-vector model; empty = off",
        group="output",
        may_change=True,
    )
    wer: str = flag(
        "",
        "score word error rate of samples: pocketsphinx (English), pocketsphinx:GRAMMAR.jsgf, or a folder with a speech"
        " recogniser; empty = off",
        group="output",
        may_change=True,
    )
    dnsmos: bool = flag(
        False, "score predicted quality of samples (package speechmos)", group="output", may_change=True
    )


@dataclass
class MusicFlags(RunConfig):
    best_by: Literal["loss", "frechet", "caption", "stop", "duration"] = flag(
        "loss",
        "what selects the best checkpoint: the loss, or its samples' frechet (distance to the recordings), caption"
        " (agreement; both need --embedder), stop (how many end by themselves) or duration (as long as the recording)",
        group="output",
    )
    embedder: str = flag(
        "",
        "score samples: folder with an audio embedding model such as CLAP; empty = off",
        group="output",
        may_change=True,
    )


def measures_of(config: RunConfig) -> list[str]:
    """The flags of data/watch.py that measure what this config asks for."""
    words = []
    for name in ("similarity", "wer", "embedder"):
        words += [f"--{name}", getattr(config, name)] if getattr(config, name, "") else []
    return words + (["--dnsmos"] if getattr(config, "dnsmos", False) else [])


def demo_measures(config: RunConfig, grammar: Path | None = None) -> dict[str, str]:
    """Flags that score a demo's samples with the packages of requirements-scoring.txt, as far as they are there, and
    that select the best by them: the loss is lowest long before the new voice reads best.

    `grammar`: of what is said, for the word error rate, which then decides; without it, speaker similarity does."""
    has = {name for name in ("pocketsphinx", "resemblyzer", "webrtcvad") if find_spec(name)}
    if len(has) < 3:
        say("note: word error rate and speaker similarity need pip install --no-deps -r requirements-scoring.txt")
    wer = f"pocketsphinx:{grammar}" if grammar and "pocketsphinx" in has else ""
    similarity = "resemblyzer" if {"resemblyzer", "webrtcvad"} <= has else ""
    measures = {"wer": config.wer or wer, "similarity": config.similarity or similarity}
    best_by = "wer" if grammar else "similarity"
    by_score = config.best_by == "loss" and config.samples and measures[best_by]
    return measures | ({"best_by": best_by} if by_score else {})


def best_score(metrics: dict, best_by: str) -> float | None:
    """The score by --best-by, of which the lowest is best; None without a finite value."""
    cost = {
        "loss": lambda: metrics["loss"],
        "wer": lambda: metrics["wer"],
        "frechet": lambda: metrics["frechet"],
        "similarity": lambda: -metrics["similarity"],
        "dnsmos": lambda: -metrics["dnsmos"],
        "caption": lambda: -metrics["caption"],
        "stop": lambda: -metrics["stop_rate"],
        "duration": lambda: abs(math.log(max(metrics["duration_ratio"], 1e-3))),
    }
    try:
        score = cost[best_by]() + (TIE * metrics["loss"] if best_by != "loss" else 0.0)
    except KeyError:  # not measured
        return None
    return score if math.isfinite(score) else None


class SampleScores:
    """Has the samples of a run decoded and scored; every rank calls every method. Does nothing without samples."""

    def __init__(self, run, clips, references: tuple[str, ...]):
        """`clips`: of the evaluation, or None; `references`: folders below samples/ to compare voices with."""
        from common.samples import choose_prompts

        config = run.config
        self.run, self.folder = run, run.folder / "scores"
        self.names = [prompt["name"] for prompt in choose_prompts(clips)] if clips else []
        self.decide = config.best_by != "loss"
        needed = {"wer": "--wer", "similarity": "--similarity", "dnsmos": "--dnsmos"}
        needed |= {"frechet": "--embedder", "caption": "--embedder"}
        if config.best_by in needed and needed[config.best_by] not in measures_of(config):
            raise UserError(f"--best-by {config.best_by} needs {needed[config.best_by]}, which measures it.")
        if self.decide and not self.names:
            raise UserError(f"--best-by {config.best_by} needs samples: give --eval-data, and --samples above 0.")
        self.watcher, self.waiting = None, []  # on the main rank: the process, and the folders that it has not scored
        if not self.names:
            return
        command = [sys.executable, WATCHER, run.folder, *measures_of(config)]
        command += [word for name in references for word in ("--references", f"samples/{name}")]
        codec = place_of_codec(clips.tokens.info)
        command += ["--codec-weights", codec] if codec else []
        on_main_for_long(lambda tick: self._start(command, tick), run.process)  # its models may take minutes to load

    def of_step(self, step: int, files: list[Path]) -> dict[str, float]:
        """Mean scores of the samples that the ranks have written for this step. Only --best-by other than loss waits
        for them; else there are none yet."""
        if not self.names:
            return {}
        written = gather_lists([file.stem for file in files], self.run.process)

        def score(tick) -> None:
            self._send_backlog()
            self._send(f"step-{step:08d}", sorted(written))
            self._note(tick, wait=self.decide)

        on_main_for_long(score, self.run.process)
        if not self.decide or sorted(written) != sorted(self.names):  # some rank has said why it has none
            return {}
        scores = on_main(lambda: self.run.events("scores").get(step, {}), self.run.process)
        return {name: value for name, value in scores.items() if name not in ("event", "step")}

    def finish(self) -> None:
        """Waits until all samples are decoded and scored, or the watcher has died."""
        if not self.names:
            return

        def end(tick) -> None:
            self._send_backlog()
            self._note(tick, wait=True)
            self.watcher.communicate()  # closes its input, with which it ends

        on_main_for_long(end, self.run.process)

    # ---- on the main rank --------------------------------------------------------------------------------------

    def _start(self, command: list, tick) -> None:
        """Starts the watcher. It ends with its input, so with this process, however that ends."""
        run, noted = self.run, self.run.events("scores")
        self.backlog = ["recorded", "original"]  # what a model can at best be expected to score
        for folder in sorted((run.folder / "samples").glob("step-*")):
            step = int(folder.name.removeprefix("step-"))
            if not run.checkpoint or step > run.start_step:  # will be taken again
                shutil.rmtree(folder)
            elif step not in noted:
                self.backlog.append(folder.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        # The GPUs belong to training, and so do the cores, unless it waits.
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(cores_per_rank() if self.decide else 1)}
        with open(self.folder / "watch.log", "a") as log:
            self.watcher = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, text=True, bufsize=1
            )
        if not self.decide:
            os.setpriority(os.PRIO_PROCESS, self.watcher.pid, min(19, os.nice(0) + NICE))
        if not measures_of(run.config):  # that samples cannot be decoded does not end a run
            return
        while not (self.folder / "ready").exists():
            if self.watcher.poll() is not None:
                lines = (self.folder / "watch.log").read_text(encoding="utf-8").strip().splitlines()
                raise UserError(f"samples cannot be scored: {''.join(lines[-1:]).removeprefix('error: ')}")
            tick()
            time.sleep(0.05)

    def _send_backlog(self) -> None:
        for folder in self.backlog:
            there = [name for name in self.names if (self.run.folder / "samples" / folder / f"{name}.json").exists()]
            self._send(folder, there)
        self.backlog = []

    def _send(self, folder: str, names: list[str]) -> None:
        """Asks for the scores of this folder of samples."""
        if names:
            self._file(folder).unlink(missing_ok=True)
            self.waiting.append(folder)
            with contextlib.suppress(BrokenPipeError):  # it has died, which _note says
                print(folder, *names, file=self.watcher.stdin)

    def _file(self, folder: str) -> Path:
        return self.folder / f"{folder}.json"

    def _note(self, tick, wait: bool) -> None:
        """Logs the scores that have arrived; `wait`: all of them, as long as the watcher lives."""
        while True:
            alive = self.watcher.poll() is None
            for folder in [folder for folder in self.waiting if self._file(folder).exists()]:
                self.waiting.remove(folder)
                self._log(folder, json.loads(self._file(folder).read_text(encoding="utf-8"))["means"])
            if not alive and self.waiting:
                left = ", ".join(self.waiting)
                say(f"warning: no scores for {left}: data/watch.py has ended, see {self.folder / 'watch.log'}")
                self.waiting = []
            if not (wait and self.waiting):
                return
            tick()
            time.sleep(0.05)

    def _log(self, folder: str, means: dict[str, float]) -> None:
        if not means:
            return
        run, words = self.run, "  ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        if folder.startswith("step-"):
            step = int(folder.removeprefix("step-"))
            run.tracker.event("scores", step, **means)
            say(f"samples of step {step}: {words}")
        elif folder not in run.events("ceiling", key="of"):
            run.tracker.event("ceiling", 0, of=folder, **means)
            say(f"ceiling, {'recordings' if folder == 'original' else 'resynthesised by the codec'}: {words}")
