"""Scores of generated samples, measured beside the training: no rank waits for them.

The ranks write the codes of their samples; data/watch.py, one low-priority process, makes them audible and scores them.
The scores are collected at the next evaluation. Until then a checkpoint whose score depends on them is kept, and marked
"unscored" in index.json. Everything is on disk, so a run that was killed finds its scores, or has them made, when it
resumes. Imports nothing heavy: a recipe reads its flags before it loads torch.
"""

import ctypes
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
from common.runtime import on_main, on_main_for_long, say

WATCHER = Path(__file__).resolve().parents[2] / "data" / "watch.py"
# Priority below the training's of what decodes and scores samples. At the lowest one (19) it would hardly ever run on a
# machine that others keep busy too, and the end of a run waits for it.
NICE = 10
PATIENCE = 1800.0  # seconds without a new score after which the end of a run waits no longer
INCOMPLETE = 60.0  # seconds within which the samples of all ranks must be visible at the end of a run
BEHIND = 4  # evaluations without scores that are worth a warning
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


def asked(config: RunConfig) -> bool:
    """Whether samples are scored, and so decoded by data/watch.py."""
    return config.samples > 0 and (config.best_by != "loss" or bool(measures_of(config)))


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
    """The scores of a run's samples. Does nothing unless the flags ask for scores; every rank calls every method."""

    def __init__(self, run, clips, references: tuple[str, ...], score_of, decide: bool):
        """`clips`: of the evaluation, or None; `references`: folders below samples/ to compare voices with.

        `decide`: the best checkpoint depends on the scores. `score_of(metrics, base, config)` then returns a
        checkpoint's score from the metrics of its evaluation and samples, and from those of the untrained base.
        """
        from common.samples import choose_prompts

        config = run.config
        names = [prompt["name"] for prompt in choose_prompts(clips)] if clips else []
        needed = {"wer": "--wer", "similarity": "--similarity", "dnsmos": "--dnsmos"}
        needed |= {"frechet": "--embedder", "caption": "--embedder"}
        if config.best_by in needed and needed[config.best_by] not in measures_of(config):
            raise UserError(f"--best-by {config.best_by} needs {needed[config.best_by]}, which measures it.")
        if config.best_by != "loss" and not names:
            raise UserError(f"--best-by {config.best_by} needs samples: give --eval-data, and --samples above 0.")
        self.run, self.score_of, self.folder = run, score_of, run.folder / "scores"
        self.active = bool(names) and asked(config)
        self.decide = self.active and decide
        self.names, self.watcher, self.expected, self.seen_ceilings = names, None, [], set()
        if not self.active:
            return
        command = [sys.executable, WATCHER, run.folder, *measures_of(config), "--names", *names]
        command += [word for name in references for word in ("--references", f"samples/{name}")]
        codec = place_of_codec(clips.tokens.info)
        command += ["--codec-weights", codec] if codec else []
        on_main_for_long(lambda tick: self._start(command, tick), run.process)  # its models may take minutes to load
        run.at_end.append(self.close)
        for step, value in on_main(self._scored, run.process) if self.decide else []:
            run.is_best(step, value)  # those that came after the checkpoint was saved

    def _scored(self) -> list:
        """The scores in index.json."""
        from common.checkpoint import read_index

        return [(entry["step"], entry["score"]) for entry in read_index(self.run.checkpoints)]

    def _start(self, command: list, tick) -> None:
        """Starts the watcher and waits until it has loaded its models."""
        run = self.run
        noted = run.events("scores")
        for folder in sorted((run.folder / "samples").glob("step-*")):
            step = int(folder.name.removeprefix("step-"))
            if not run.checkpoint or step > run.start_step:  # will be taken again
                shutil.rmtree(folder)
                self._file(step).unlink(missing_ok=True)
            elif step not in noted:
                self.expected.append(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def lower() -> None:
            os.nice(NICE)
            if prctl:
                prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: it ends with the run, however that ends

        with open(self.folder / "watch.log", "a") as log:
            # The GPUs belong to training, and so do the cores.
            env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            self.watcher = subprocess.Popen(command, stdout=log, stderr=log, env=env, preexec_fn=lower)
        while not (self.folder / "ready").exists():
            if self.watcher.poll() is not None:
                lines = (self.folder / "watch.log").read_text(encoding="utf-8").strip().splitlines()
                raise UserError(f"samples cannot be scored: {''.join(lines[-1:]).removeprefix('error: ')}")
            tick()
            time.sleep(0.05)

    def expect(self, step: int, evaluated: bool) -> None:
        """The samples of this step are taken. If they decide, the checkpoint saved next waits for its score."""
        if self.active:
            self.expected.append(step)
        if self.decide and evaluated and step:
            self.run.unscored = step

    def collect(self, last: bool = False) -> None:
        """Records the scores that have arrived; `last`: all of them, for which it waits."""
        if not self.active:
            return
        if last:
            on_main_for_long(self._wait, self.run.process)
        for step, means, decided, value in on_main(lambda: self._arrived(last), self.run.process):
            if means:
                self.run.tracker.event("scores", step, **means)
                say(f"samples of step {step}: " + "  ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
            if decided:
                self.run.set_score(step, value)
        if last:
            self._compare()

    def close(self) -> None:
        if self.watcher and self.watcher.poll() is None:
            self.watcher.terminate()
            self.watcher.wait()

    # ---- on the main rank --------------------------------------------------------------------------------------

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.json"

    def _wait(self, tick) -> None:
        waiting, changed = len(self.expected) + 1, time.monotonic()
        while waiting and self.watcher.poll() is None:
            left = [step for step in self.expected if not self._file(step).exists()]
            if len(left) < waiting:
                waiting, changed = len(left), time.monotonic()
            patience = PATIENCE if all(map(self._complete, left)) else INCOMPLETE
            if time.monotonic() - changed > patience:
                return
            tick()
            time.sleep(0.05)

    def _complete(self, step: int) -> bool:
        folder = self.run.folder / "samples" / f"step-{step:08d}"
        return all((folder / f"{name}.json").exists() for name in self.names)

    def _arrived(self, last: bool) -> list[tuple[int, dict, bool, float | None]]:
        """(step, mean scores, whether a checkpoint waits for its score, that score)."""
        from common.checkpoint import read_index

        self._note_ceilings()
        gone = self.watcher.poll() is not None
        if len(self.expected) >= BEHIND:
            say(f"warning: {len(self.expected)} sets of samples are not scored yet; their checkpoints are kept")
        arrived = [step for step in self.expected if last or gone or self._file(step).exists()]
        if not arrived:
            return []
        news, evals, scores = [], self.run.events("eval"), self.run.events("scores")
        waiting = {entry["step"] for entry in read_index(self.run.checkpoints) if entry.get("unscored")}
        if self.run.pending and self.run.unscored:
            waiting.add(self.run.unscored)  # being written
        for step in arrived:
            file = self._file(step)
            self.expected.remove(step)
            means = json.loads(file.read_text(encoding="utf-8"))["means"] if file.exists() else {}
            scores[step] = means
            value, decided = None, self.decide and step in waiting
            if not means:
                say(f"warning: the samples of step {step} have no scores; see {self.folder / 'watch.log'}")
            elif decided and step in evals:
                base = evals.get(0, {}) | scores.get(0, {})
                value = self.score_of(evals[step] | means, base, self.run.config)
            news.append((step, means, decided, value))
        return news

    def _note_ceilings(self) -> None:
        """What recordings and their codec resynthesis score, once per run."""
        for name in ("original", "recorded"):
            file = self.folder / f"{name}.json"
            if name not in self.seen_ceilings and file.exists():
                self.seen_ceilings.add(name)
                means = json.loads(file.read_text(encoding="utf-8"))["means"]
                if means and name not in self.run.events("ceiling", key="of"):
                    self.run.tracker.event("ceiling", 0, of=name, **means)
                    words = "  ".join(f"{key} {mean:.4f}" for key, mean in means.items())
                    say(f"ceiling, {'recordings' if name == 'original' else 'resynthesised by the codec'}: {words}")

    def _compare(self) -> None:
        """Warns if the measures disagree about the best step."""
        if not self.run.process.is_main:
            return
        evals, scores = self.run.events("eval"), self.run.events("scores")
        rows = {step: evals[step] | scores[step] for step in evals if step and step in scores}
        chosen, best = self.run.config.best_by, {}
        for name in ("loss", chosen, *sorted(measured(self.run.config))):
            costs = {step: best_score(row, name) for step, row in rows.items()}
            costs = {step: cost for step, cost in costs.items() if cost is not None}
            if costs:
                best[name] = min(costs, key=costs.get)
        if len(set(best.values())) > 1:
            listed = ", ".join(f"{name} step {step}" for name, step in best.items())
            message = f"loss and samples disagree about the best checkpoint ({listed}); --best-by {chosen} decides"
            self.run.tracker.event("alarm", self.run.best["step"] if self.run.best else 0, message=message)
            say(f"warning: {message}")


def measured(config: RunConfig) -> set[str]:
    """The values of --best-by that a model measures."""
    names = {word.removeprefix("--") for word in measures_of(config) if word.startswith("--")}
    return names | ({"frechet", "caption"} if "embedder" in names else set())
