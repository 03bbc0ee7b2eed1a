"""Runs the benchmarks and prints one table: ours, peer, ratio, target.

    ./launch.sh bench             all of them
    ./launch.sh bench step        some of them
    ./launch.sh bench --list

Each benchmark is a process of its own. Exit code 1 if one failed; a missed target is only marked, because another
machine may have other ratios.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = {  # name: its command
    "step": ["bench_step.py"],
    # All sides at once would need more than 24 GB.
    "step_large": ["bench_step.py", "--size", "large", "--side", "ours", "--side", "deepspeed", "--side", "ddp"],
    "trainer_large": ["bench_step.py", "--size", "large", "--side", "ours", "--side", "trainer"],
    "counts": ["bench_counts.py"],
    "batches": ["bench_batches.py"],
    "loss": ["bench_loss.py"],
    "data": ["bench_data.py"],
    "checkpoint": ["bench_checkpoint.py"],
}


@dataclass(frozen=True)
class Row:
    number: str  # S1, S2, ...
    what: str
    ours: str  # measured, with its unit
    ratio: float  # what the target is about
    target: str  # "<= 1.03", ">= 20", "== 0", or "" for none
    peer: str = ""  # others' way, or what no code could beat


def reached(row: Row) -> bool:
    if not row.target:
        return True
    sign, bound = row.target.split()
    return {"<=": row.ratio <= float(bound), ">=": row.ratio >= float(bound), "==": row.ratio == float(bound)}[sign]


def report(row: Row) -> None:
    """Prints a row, and hands it to main() if that started this process."""
    print(f"{row.number} {row.what}: {row.ratio:.3g}; target {row.target or 'none'}", flush=True)
    if rows := os.environ.get("BENCH_ROWS"):
        with open(rows, "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[Row]) -> str:
    lines = ["| | what | ours | peer or limit | ratio | target | |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row.number):
        cells = [row.number, row.what, row.ours, row.peer, f"{row.ratio:.3g}", row.target]
        lines.append(f"| {' | '.join(cells)} | {'' if reached(row) else 'missed'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *BENCHMARKS], help="default: all")
    parser.add_argument("--list", action="store_true", help="print their names and commands, and exit")
    args = parser.parse_args()
    if args.list:
        for name, command in BENCHMARKS.items():
            print(f"{name:14} python tests/bench/{' '.join(command)}")
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
        print(f"\n{table(read(rows))}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
