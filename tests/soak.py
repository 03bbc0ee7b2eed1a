"""Kills or stops a small run again and again and resumes it: each run must end bit for bit as if never interrupted.

    python tests/soak.py --cycles 200 [--seed 0]

A cycle is one fault: SIGKILL or a polite signal (TERM, USR1, INT) to one rank or to both, while the job starts, trains
or writes a checkpoint. Every tenth cycle goes through launch.sh, which is a victim too.
The ranks of the other cycles are forked from this process, which has imported everything: the real recipe, processes
and signals without ten seconds of imports per cycle.

After a polite signal the exit code must be 75. The last line is a JSON summary: runs, faults, divergences, wrong exit
codes, cycles that got stuck, disk usage, and the longest time from a fault to the end of its job. If anything is wrong,
the folders are kept, and of a run that diverged the first step and tensor that differ are printed.
"""

import argparse
import collections
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from helpers import support  # noqa: E402

# torch reads OMP_NUM_THREADS when it is imported. Forked ranks must compute with as many threads as those of launch.sh:
# another number changes the order of sums.
os.environ |= support.CPU
from helpers import faults  # noqa: E402

STEPS, SAVE_EVERY = 50, 5
JOB = (
    f"--lora-groups attn --lora-rank 4 --lora-dropout 0.1 --precision fp32 --lr 3e-3 --warmup 2 --steps {STEPS}"
    f" --micro-tokens 400 --ema 0.9 --samples 0 --eval-every 25 --save-every {SAVE_EVERY}"
).split() + support.TINY_DIA
POLITE = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "int": signal.SIGINT}
SIGNALS = {"kill": signal.SIGKILL, **POLITE}
STOPPED = 75  # exit code of a run that a signal has stopped
STUCK = 120  # seconds without output
# Seconds within which a fault is drawn, from the start of the job, of its training, or of a save. A save takes about
# 0.1 s: writing, checksums, rename and retention together.
MOMENTS = {"start": 2.5, "training": 1.5, "save": 0.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher-every", type=int, default=10, help="0 = never; default: %(default)s")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"run folders in {scratch}", flush=True)
    summary = soak(scratch, args.cycles, random.Random(args.seed), args.launcher_every)
    wrong = summary["divergences"] or summary["wrong_exit_codes"] or summary["stuck"] or not summary["bounded"]
    if not wrong:
        shutil.rmtree(scratch)
    print(json.dumps(summary))
    return 1 if wrong else 0


def soak(scratch: Path, cycles: int, draw: random.Random, launcher_every: int) -> dict:
    whole = run_whole(scratch / "whole")
    summary = {"cycles": cycles, "runs": 0, "divergences": 0, "wrong_exit_codes": 0, "stuck": 0, "bounded": True}
    summary |= {"largest_mb": 0.0, "slowest_end_s": 0.0}  # from a fault until no process is left
    struck, began = collections.Counter(), time.monotonic()
    limit = 2.5 * size_of(whole)  # bytes: a checkpoint is written beside the two that are kept
    for number in itertools.count():
        if struck.total() >= cycles:
            break
        run, over = scratch / f"run-{number}", False
        while not over:
            enough = struck.total() >= cycles  # this run only has to finish
            by_launcher = launcher_every and struck.total() % launcher_every == launcher_every - 1
            job = (Launched if by_launcher and not enough else Forked)(run)
            fault = None if enough else strike(job, run, draw)
            hit = time.monotonic()
            codes = job.end(STUCK)
            over = any(record.get("event") == "done" for record in support.metrics(run))
            if codes is None:
                summary["stuck"] += 1
                print(f"stuck after {fault and fault.name} in {run}", flush=True)
            elif fault and fault.must_stop and not over and set(codes) != {STOPPED}:
                summary["wrong_exit_codes"] += 1
                print(f"exit codes {codes} instead of {STOPPED} after {fault.name} in {run}, see {job.log}", flush=True)
            elif not fault and not over and any(codes):
                raise RuntimeError(f"{run} failed without a fault: {codes}\n{job.output()[-3000:]}")
            if fault:
                struck[fault.name] += 1
                summary["slowest_end_s"] = max(summary["slowest_end_s"], round(time.monotonic() - hit, 1))
                if struck.total() % 10 == 0:
                    seconds = time.monotonic() - began
                    print(f"{struck.total()} faults, {summary['runs']} runs, {seconds:.0f} s", flush=True)
            size = size_of(run)
            summary["largest_mb"] = max(summary["largest_mb"], round(size / 1e6, 2))
            summary["bounded"] &= size <= limit and kept_two(run)
        summary["runs"] += 1
        if differences := compare(run, whole):
            summary["divergences"] += 1
            print(f"{run} diverged: {'; '.join(differences)}", flush=True)
        else:
            shutil.rmtree(run)
    return summary | {"seconds": round(time.monotonic() - began), "faults": dict(struck)}


@dataclass
class Fault:
    """What was done to a job. `must_stop`: it was a polite signal, and all ranks of the job listened to signals."""

    name: str
    must_stop: bool


def strike(job, run: Path, draw: random.Random) -> Fault | None:
    """Waits for a random moment of the running job and hits it; None if the job ended before."""
    kind = draw.choice([*POLITE, *["kill"] * 3])
    victim = draw.choice(job.victims)
    [moment] = draw.choices(list(MOMENTS), weights=[0.2, 0.4, 0.4])
    delay = draw.random() * MOMENTS[moment]
    reached = {
        "start": lambda: True,
        "training": lambda: is_training(run, job.began),
        "save": lambda: is_saving(run, job.began),
    }[moment]
    if not job.wait_until(reached):
        return None
    time.sleep(delay)
    listening = job.always_listens or is_training(run, job.began)
    if not job.hit(victim, SIGNALS[kind]):
        return None
    return Fault(f"{kind} {victim} {moment}", must_stop=kind in POLITE and listening)


def is_training(run: Path, since: float) -> bool:
    """The job that started at `since` has opened the run's record, so all its ranks have installed their handlers."""
    try:
        return (run / "metrics.jsonl").stat().st_mtime > since
    except FileNotFoundError:
        return False


def is_saving(run: Path, since: float) -> bool:
    """A checkpoint is being written now: its draft was not left by an earlier kill."""
    try:
        return any(draft.stat().st_mtime > since for draft in (run / "checkpoints").glob(".step-*.tmp"))
    except FileNotFoundError:  # it was renamed meanwhile
        return False


class Forked:
    """Two forked ranks. This process is their launcher: when one dies, it kills the other, as DeepSpeed's would."""

    victims = ("rank 0", "rank 1", "all ranks")
    always_listens = True

    def __init__(self, run: Path):
        self.log, self.began = Path(f"{run}.log"), time.time()
        port = support.free_port()
        # A signal that comes before a rank has installed its handlers waits until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, POLITE.values())
        self.pids = [self._fork(rank, run, port) for rank in range(2)]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE.values())
        self.codes = {}

    def _fork(self, rank: int, run: Path, port: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        stream = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1), os.dup2(stream, 2)
        import dia_lora
        from common.config import parse_args
        from common.runtime import catch_signals, run_main

        catch_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE.values())
        words = ["--ds", str(ROOT / "ds_configs/zero2.json"), *JOB, "--out", str(run)]
        run_main(dia_lora.main, parse_args(dia_lora.Config, "", words))

    def _poll(self) -> None:
        for pid in set(self.pids) - set(self.codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[pid] = os.waitstatus_to_exitcode(status)

    def wait_until(self, condition) -> bool:
        """Whether the condition came true while the job was running."""
        while not condition():
            self._poll()
            if self.codes:
                return False
            time.sleep(0.002)
        return True

    def hit(self, victim: str, number: int) -> bool:
        self._poll()
        pids = self.pids if victim == "all ranks" else [self.pids[int(victim[-1])]]
        pids = [pid for pid in pids if pid not in self.codes]
        for pid in pids:
            os.kill(pid, number)
        return bool(pids)

    def end(self, seconds: float) -> list[int] | None:
        """Waits for the exit codes; None if the ranks were silent for so many seconds and had to be killed."""
        failed = None
        while len(self.codes) < 2:
            self._poll()
            now, deadline = time.time(), last_output(self.log) + seconds
            if failed is None and any(self.codes.values()):
                failed = now
            if now > deadline or (failed and now > failed + 5):
                for pid in set(self.pids) - set(self.codes):
                    os.kill(pid, signal.SIGKILL)
                if now > deadline:
                    return None
            time.sleep(0.005)
        return list(self.codes.values())

    def output(self) -> str:
        return self.log.read_text()


class Launched:
    """The same through launch.sh."""

    victims = ("rank 1", "launch.sh")
    always_listens = False  # a signal that comes while launch.sh or a rank starts just ends it

    def __init__(self, run: Path):
        self.run, self.log, self.began = run, Path(f"{run}.log"), time.time()
        # A shell in the background ignores SIGINT, and so would launch.sh.
        words = ["env", "--default-signal=INT", ROOT / "launch.sh", "dia_lora"]
        words += ["--ds", ROOT / "ds_configs/zero2.json", *JOB, "--out", run]
        environment = support.environment(AUDIO_FINETUNE_ENV=support.VENV)
        with open(self.log, "a") as stream:
            self.shell = subprocess.Popen(list(map(str, words)), env=environment, stdout=stream, stderr=stream)

    def wait_until(self, condition) -> bool:
        while not condition():
            if self.shell.poll() is not None:
                return False
            time.sleep(0.005)
        return True

    def hit(self, victim: str, number: int) -> bool:
        pids = faults.job_processes(self.run) | {"launch.sh": self.shell.pid}
        if victim not in pids or self.shell.poll() is not None:
            return False
        os.kill(pids[victim], number)
        return True

    def end(self, seconds: float) -> list[int] | None:
        while self.shell.poll() is None or faults.job_processes(self.run):  # which may outlive a killed launch.sh
            if time.time() > last_output(self.log) + seconds:
                self.shell.kill()
                for pid in faults.job_processes(self.run).values():
                    os.kill(pid, signal.SIGKILL)
                return None
            time.sleep(0.05)
        return [self.shell.returncode]

    def output(self) -> str:
        return self.log.read_text()


def last_output(log: Path) -> float:
    return log.stat().st_mtime if log.exists() else time.time()


def run_whole(run: Path) -> Path:
    """Trains without interruption; returns the run folder."""
    from demo import ensure_demo

    ensure_demo(support.DIA)
    import torch

    import dia_lora  # noqa: F401  once, before the forks

    assert torch.get_num_threads() == int(support.CPU["OMP_NUM_THREADS"])
    job = Forked(run)
    if codes := [code for code in job.end(STUCK) or [1] if code]:
        raise RuntimeError(f"the uninterrupted run failed: {codes}\n{job.output()[-3000:]}")
    return run


def compare(run: Path, whole: Path) -> list[str]:
    """The first logged step and the first exported tensor that differ between two runs; empty if they are equal."""
    differences = []
    losses, expected = ([(r["step"], r["loss"]) for r in support.step_records(folder)] for folder in (run, whole))
    for found, wanted in itertools.zip_longest(losses, expected):
        if found != wanted:
            differences.append(f"(step, loss) {found} instead of {wanted}")
            break
    adapters = [folder / "export" / "adapter_model.safetensors" for folder in (run, whole)]
    if adapters[0].read_bytes() != adapters[1].read_bytes():
        differences.append(compare_tensors(*adapters))
    return differences


def compare_tensors(file: Path, expected_file: Path) -> str:
    import torch
    from safetensors.torch import load_file

    tensors, expected = load_file(file), load_file(expected_file)
    if set(tensors) != set(expected):
        return f"the adapters hold other tensors, such as {min(set(tensors) ^ set(expected))}"
    for name, wanted in sorted(expected.items()):
        if not torch.equal(tensors[name], wanted):
            return f"tensor {name} differs by up to {float((tensors[name] - wanted).abs().max()):.3g}"
    return "the adapter files differ, but no tensor does"


def size_of(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) if run.exists() else 0


def kept_two(run: Path) -> bool:
    """Never fewer than two checkpoints once two were written."""
    written = {record["step"] for record in support.metrics(run) if record.get("event") == "checkpoint"}
    index = run / "checkpoints" / "index.json"
    listed = len(json.loads(index.read_text())["checkpoints"]) if index.exists() else 0
    return listed >= min(2, len(written) - 1)  # the last one may have been hit


if __name__ == "__main__":
    sys.exit(main())
