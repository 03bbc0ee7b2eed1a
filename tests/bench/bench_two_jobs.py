"""Two jobs that share a machine: how much a second job slows the first, and whether waiting ranks spin.

    python tests/bench/bench_two_jobs.py [--steps 40] [--ranks 2]

A job alone, then two at the same time, each the tiny Dia of the demo. On 2 cores the fair limit is twice the time per
step. Processor time per step tells spinning from waiting: a rank that waits properly uses no more of it in company, and
it does not depend on what else the machine does. Environment variables are the caller's; a plain shell has none set.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "data")]
WARM_UP = 5  # steps that are not counted
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2, help="per job; with 1, each job has a thread per core")
    args = parser.parse_args()
    from demo import ensure_demo

    from helpers import support

    ensure_demo(support.DIA)
    print(f"{os.cpu_count()} cores, jobs of {args.ranks} ranks, {args.steps} steps after {WARM_UP}\n")
    print("| | steps/s | processor ms per step and rank | of which system | switches per step: voluntary | forced |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        alone = measure(1, args, Path(scratch))
        together = measure(2, args, Path(scratch))
    for name, jobs in (("alone", alone), ("first of two", together[:1]), ("second of two", together[1:])):
        job = jobs[0]
        print(f"| {name} | {job['steps_per_s']:.2f} | {job['user'] + job['system']:.0f} | {job['system']:.0f} |"
              f" {job['voluntary']:.0f} | {job['forced']:.0f} |")  # fmt: skip
    slowest = min(job["steps_per_s"] for job in together)
    used = max(job["user"] + job["system"] for job in together) / (alone[0]["user"] + alone[0]["system"])
    print(f"\nslowdown {alone[0]['steps_per_s'] / slowest:.2f} x (fair: 2), processor time per step {used:.2f} x")


def measure(count: int, args, scratch: Path) -> list[dict]:
    """Starts this many jobs at once, and counts over the steps that all of them have in common."""
    from helpers import support

    steps, world = args.steps, args.ranks
    runs = [scratch / f"{count}-{number}" for number in range(count)]
    words = (
        f"--steps {2 * steps + 400} --samples 0 --eval-every 0 --save-every 0 --no-export".split() + support.TINY_DIA
    )
    environment = {name: value for name, value in os.environ.items() if name not in support.CPU}
    jobs = []
    for run in runs:
        port = support.free_port()
        for rank in range(world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": port}
            env = environment | {"DS_ACCELERATOR": "cpu"} | {name: str(value) for name, value in place.items()}
            command = [sys.executable, ROOT / "finetune" / "dia_lora.py", *words, "--out", run]
            with open(f"{run}-{rank}.log", "w") as log:
                jobs.append(subprocess.Popen(list(map(str, command)), env=env, cwd=ROOT, stdout=log, stderr=log))
    try:
        wait(runs, jobs, [WARM_UP] * count)
        first, before = [last_step(run) for run in runs], [usage(job.pid) for job in jobs]
        began = time.monotonic()
        wait(runs, jobs, [step + steps for step in first])
        seconds, after = time.monotonic() - began, [usage(job.pid) for job in jobs]
        done = [last_step(run) - step for run, step in zip(runs, first, strict=True)]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    results = []
    for number, run_steps in enumerate(done):
        ranks = range(world * number, world * (number + 1))
        per_step = {name: sum(after[r][name] - before[r][name] for r in ranks) / world / run_steps for name in after[0]}
        results.append(per_step | {"steps_per_s": run_steps / seconds})
    return results


def last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum('"event"' not in line for line in lines if line.endswith("}"))  # the last may be half written


def wait(runs: list[Path], jobs: list, targets: list[int]) -> None:
    while any(last_step(run) < target for run, target in zip(runs, targets, strict=True)):
        ended = [job for job in jobs if job.poll() is not None]
        if ended:
            sys.exit(f"a rank ended with code {ended[0].returncode}; see the logs beside {runs[0]}")
        time.sleep(0.2)


def usage(pid: int) -> dict[str, float]:
    """Processor milliseconds and context switches of a process and all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    counts = {"user": 1000 * int(fields[11]) / TICKS, "system": 1000 * int(fields[12]) / TICKS}
    counts |= {"voluntary": 0, "forced": 0}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                counts["voluntary"] += int(line.split()[1])
            if line.startswith("nonvoluntary_ctxt_switches"):
                counts["forced"] += int(line.split()[1])
    return counts


if __name__ == "__main__":
    main()
