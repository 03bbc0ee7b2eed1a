"""The commands of data/: --help is fast."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.stem for file in (ROOT / "data").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_help(name):
    command = [sys.executable, "-X", "importtime", ROOT / f"data/{name}.py", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & {"torch", "transformers"}
    assert f"python data/{name}.py" in done.stdout  # the docstring shows how to call it
