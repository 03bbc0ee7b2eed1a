"""The rows of the table that ./launch.sh bench prints."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    number: str  # of the target: P1, P2, ...
    what: str
    ours: str  # measured, with its unit
    ratio: float  # what the target is about
    target: str  # "<= 1.03", ">= 20" or "== 0"
    peer: str = ""  # what others' way took
    limit: str = ""  # what no code could beat


def reached(row: Row) -> bool:
    sign, bound = row.target.split()
    return {"<=": row.ratio <= float(bound), ">=": row.ratio >= float(bound), "==": row.ratio == float(bound)}[sign]


def report(row: Row) -> None:
    """Prints a row, and hands it to tests/bench/run.py if that started this process."""
    verdict = "reached" if reached(row) else "MISSED"
    print(f"{row.number} {row.what}: {row.ratio:.3g}; target {row.target} {verdict}", flush=True)
    if rows := os.environ.get("BENCH_ROWS"):
        with open(rows, "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[Row]) -> str:
    lines = ["| | what | ours | peer | limit | ratio | target | |", "|---|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (int("".join(filter(str.isdigit, row.number)) or 0), row.number)):
        cells = [row.number, row.what, row.ours, row.peer, row.limit, f"{row.ratio:.3g}", row.target]
        lines.append(f"| {' | '.join(cells)} | {'' if reached(row) else 'missed'} |")
    return "\n".join(lines)
