"""Runs the benchmarks that have targets, and prints one table: ours, peer, limit, ratio, target.

    ./launch.sh bench             all of them
    ./launch.sh bench reader      some of them
    ./launch.sh bench --list

Each benchmark is a process of its own; a table of its own comes first. Exit code 1 if a benchmark failed; a missed
target is only marked, because another machine may have other ratios.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from helpers import bench_rows  # noqa: E402

# Name: its command, with flags that keep it short.
BENCHMARKS = {
    "reader": ["bench_data_reader.py"],
    "checkpoint": ["bench_checkpoint.py", "--millions", "20"],
    "loss": ["bench_loss.py"],
    "step": ["bench_step.py"],
    # A record takes 0.3 % of a step: more rounds than a step needs, so that noise does not decide.
    "logging": ["bench_step.py", "--side", "zero2", "--side", "no_tracker", "--rounds", "40"],
    # All sides at once would need more than 24 GB.
    "step_large": ["bench_step.py", "--size", "large"],
    "trainer_large": ["bench_step.py", "--size", "large", "--side", "zero2", "--side", "hf"],
    "zero3_large": ["bench_step.py", "--size", "large", "--side", "zero2", "--side", "zero3"],
    "first_step": ["bench_first_step.py"],
    "recompute": ["bench_recompute.py"],
    "batches": ["bench_batches.py"],
    "size": ["bench_dia_size.py", "--size", "small", *(f"--case={case}" for case in ("lora", "full"))],
    "encode": ["bench_data_encode.py", "--full"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *BENCHMARKS], help="default: all")
    parser.add_argument("--list", action="store_true", help="print their names and commands, and exit")
    args = parser.parse_args()
    if args.list:
        for name, command in BENCHMARKS.items():
            print(f"{name:12} python tests/bench/{' '.join(command)}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory(prefix="bench-rows-") as folder:
        rows = Path(folder) / "rows.jsonl"
        for name in args.names or BENCHMARKS:
            script, *flags = BENCHMARKS[name]
            print(f"---- {name}: python tests/bench/{' '.join(BENCHMARKS[name])}", flush=True)
            environment = os.environ | {"BENCH_ROWS": str(rows), "OMP_NUM_THREADS": "1"}
            if subprocess.run([sys.executable, HERE / script, *flags], env=environment).returncode:
                failed.append(name)
        print(f"\n{bench_rows.table(bench_rows.read(rows))}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
