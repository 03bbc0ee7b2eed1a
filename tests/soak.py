"""Kills a small run again and again and starts it again: every run must end as one that nobody touched, bit for bit.

    python tests/soak.py --cycles 200 [--seed 0]

A cycle is one fault: SIGKILL or a polite signal to a rank, to both at once, in a step or while a checkpoint is
written; every tenth goes through launch.sh, where it also hits DeepSpeed's runner and launcher. The ranks of the other
cycles are forked from this process, which has imported everything: the real recipe, processes and signals, without
ten seconds of imports a cycle. The summary counts runs, faults, divergences, cycles that got stuck, disk, and how
long the end of a job took at most.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from helpers import faults, support  # noqa: E402

STEPS, SAVE_EVERY = 50, 5
JOB = (
    f"--lora-groups attn --lora-rank 4 --lora-dropout 0.1 --precision fp32 --lr 3e-3 --warmup 2 --steps {STEPS}"
    f" --micro-tokens 400 --ema 0.9 --samples 0 --eval-every 25 --save-every {SAVE_EVERY}"
).split()
KINDS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
STUCK = 120  # seconds without a word
SAVE_SECONDS = 0.1  # of a save of this run, writing, checksums, rename and retention together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher-every", type=int, default=10, help="0 = never; default: %(default)s")
    args = parser.parse_args()
    os.environ |= support.CPU
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        found = soak(scratch, args.cycles, random.Random(args.seed), args.launcher_every)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(found))
    return 1 if found["divergences"] or found["stuck"] or not found["bounded"] else 0


def soak(scratch: Path, cycles: int, draw: random.Random, launcher_every: int) -> dict:
    expected = result_of(run_whole(scratch / "whole"))
    found = {"cycles": cycles, "runs": 0, "divergences": 0, "stuck": 0, "bounded": True, "largest_mb": 0.0}
    found["slowest_end_s"] = 0.0  # from a fault until no process is left
    faults, began, number = collections.Counter(), time.monotonic(), 0
    limit = 2.5 * size_of(scratch / "whole")  # bytes: a checkpoint is written beside the two that are kept
    while sum(faults.values()) < cycles:
        run, over = scratch / f"run-{number}", False
        number += 1
        while not over:
            enough = sum(faults.values()) >= cycles
            by_launcher = launcher_every and sum(faults.values()) % launcher_every == launcher_every - 1
            job = (Launched if by_launcher and not enough else Forked)(run)
            fault = "" if enough else strike(job, run, draw)
            struck = time.monotonic()
            codes = job.end(STUCK)
            if codes is None:
                found["stuck"] += 1
                print(f"stuck after {fault} in {run}", flush=True)
            if fault:
                faults[fault] += 1
                found["slowest_end_s"] = max(found["slowest_end_s"], round(time.monotonic() - struck, 1))
            over = (run / "metrics.jsonl").exists() and any(r.get("event") == "done" for r in support.metrics(run))
            if not over and not fault and codes is not None and any(codes):
                raise RuntimeError(f"{run} failed without a fault: {codes}\n{job.output()[-3000:]}")
            size = size_of(run)
            found["largest_mb"] = max(found["largest_mb"], round(size / 1e6, 2))
            found["bounded"] &= size <= limit and kept_two(run)
            if sum(faults.values()) % 10 == 0 and fault:
                print(
                    f"{sum(faults.values())} faults, {found['runs']} runs, {time.monotonic() - began:.0f} s", flush=True
                )
        found["runs"] += 1
        if result_of(run) != expected:
            found["divergences"] += 1
            print(f"{run} diverged", flush=True)
        else:
            shutil.rmtree(run)
    return found | {"seconds": round(time.monotonic() - began), "faults": dict(faults)}


def strike(job, run: Path, draw: random.Random) -> str:
    """Waits for a random moment of the running job and hits it; what was done, or "" if it was over before."""
    kind = draw.choice(list(KINDS) + ["kill"] * 3)  # mostly without a warning
    victim = draw.choice(job.victims)
    if draw.random() < 0.4:  # while a checkpoint is written
        moment, delay = "save", draw.random() * SAVE_SECONDS
        reached = job.wait_until(lambda: is_saving(run, job.began))
    else:
        moment, delay = "step", draw.random() * 2.5
        reached = job.wait_until(lambda: (run / "metrics.jsonl").exists())
    if not reached:
        return ""
    time.sleep(delay)
    return f"{kind} {victim} {moment}" if job.hit(victim, KINDS[kind]) else ""


def is_saving(run: Path, since: float) -> bool:
    """A draft of a checkpoint is there that is no remainder of an earlier kill."""
    try:
        return any(draft.stat().st_mtime > since for draft in (run / "checkpoints").glob(".step-*.tmp"))
    except FileNotFoundError:  # it was renamed meanwhile
        return False


class Forked:
    """Two ranks, forked; this process is their launcher: when one dies, it ends the other as DeepSpeed's would."""

    victims = ("rank 0", "rank 1", "all ranks")

    def __init__(self, run: Path):
        self.log, self.began = Path(f"{run}.log"), time.time()
        port = support.free_port()
        self.pids = [self._fork(rank, run, port) for rank in range(2)]
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
        words = ["--ds", str(ROOT / "ds_configs/zero2.json"), *JOB, "--out", str(run)]
        run_main(dia_lora.main, parse_args(dia_lora.Config, "", words, demo=dia_lora.DEMO))

    def _poll(self) -> None:
        for pid in set(self.pids) - set(self.codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[pid] = os.waitstatus_to_exitcode(status)

    def wait_until(self, true) -> bool:
        while not true():
            self._poll()
            if self.codes:
                return False
            time.sleep(0.002)
        return True

    def hit(self, victim: str, number: int) -> bool:
        self._poll()
        chosen = self.pids if victim == "all ranks" else [self.pids[int(victim[-1])]]
        chosen = [pid for pid in chosen if pid not in self.codes]
        for pid in chosen:
            os.kill(pid, number)
        return bool(chosen)

    def end(self, seconds: float) -> list[int] | None:
        """Exit codes; None if they had to be ended."""
        failed = None
        while len(self.codes) < 2:
            self._poll()
            now, deadline = time.time(), last_word(self.log) + seconds
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
    """The same through launch.sh, DeepSpeed's runner and its launcher."""

    victims = ("rank 1", "launcher", "runner", "launch.sh")

    def __init__(self, run: Path):
        self.run, self.log, self.began = run, Path(f"{run}.log"), time.time()
        words = [ROOT / "launch.sh", "dia_lora", "--ds", ROOT / "ds_configs/zero2.json", *JOB, "--out", run]
        environment = support.environment(AUDIO_FINETUNE_ENV=str(Path(support.PYTHON).parents[1]))
        with open(self.log, "a") as stream:
            self.shell = subprocess.Popen(list(map(str, words)), env=environment, stdout=stream, stderr=stream)

    def wait_until(self, true) -> bool:
        while not true():
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
            if time.time() > last_word(self.log) + seconds:
                self.shell.kill()
                for pid in faults.job_processes(self.run).values():
                    os.kill(pid, signal.SIGKILL)
                return None
            time.sleep(0.05)
        return [self.shell.returncode]

    def output(self) -> str:
        return self.log.read_text()


def last_word(log: Path) -> float:
    return log.stat().st_mtime if log.exists() else time.time()


def run_whole(run: Path) -> Path:
    from demo import ensure_demo

    ensure_demo(ROOT / "runs" / "demo-assets")
    import dia_lora  # noqa: F401  once, before the forks

    job = Forked(run)
    if codes := [code for code in job.end(STUCK) or [1] if code]:
        raise RuntimeError(f"the uninterrupted run failed: {codes}\n{job.output()[-3000:]}")
    return run


def result_of(run: Path) -> tuple:
    """Every loss that was logged, and the exported weights."""
    losses = [record["loss"] for record in support.step_records(run)]
    return losses, hashlib.sha256((run / "export" / "adapter_model.safetensors").read_bytes()).hexdigest()


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
