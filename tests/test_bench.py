"""./launch.sh bench: its rows and its command line. The benchmarks themselves are run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.run import Row, reached, read, table

from helpers import support

RUN = support.ROOT / "tests" / "bench" / "run.py"


@pytest.mark.parametrize(
    ("ratio", "target", "verdict"),
    [(1.03, "<= 1.03", True), (1.04, "<= 1.03", False), (20, ">= 20", True), (19.9, ">= 20", False), (0, "== 0", True)],
)
def test_a_target_is_a_bound(ratio, target, verdict):
    assert reached(Row("S1", "step", "1 s", ratio, target)) is verdict


def test_rows_of_other_processes_become_one_table_in_the_order_of_the_targets(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for number, ratio in (("S9", 3.0), ("S2", 1.01)):
        code = f"from run import Row, report; report(Row('{number}', 'x', '1 s', {ratio}, '>= 1.08'))"
        environment = support.environment(BENCH_ROWS=str(rows), PYTHONPATH=str(RUN.parent))
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    lines = table(read(rows)).splitlines()[2:]
    assert lines == ["| S2 | x | 1 s |  | 1.01 | >= 1.08 | missed |", "| S9 | x | 1 s |  | 3 | >= 1.08 |  |"]


def test_every_benchmark_of_the_list_is_there_and_has_these_flags():
    listed = subprocess.run([sys.executable, RUN, "--list"], capture_output=True, text=True, check=True).stdout
    scripts = set()
    for line in listed.splitlines():
        _, _, script, *flags = line.split()
        text = Path(support.ROOT, script).read_text()
        assert "report(" in text and all(f'"{flag}"' in text for flag in flags if flag.startswith("--"))
        scripts.add(Path(support.ROOT, script))
    assert scripts == set(RUN.parent.glob("bench_*.py"))


def test_a_name_that_is_not_in_the_list_is_refused():
    done = subprocess.run([sys.executable, RUN, "nosuch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nosuch" in done.stderr and "Traceback" not in done.stderr
