"""A short soak test; the long one is run by hand: python tests/soak.py --cycles 200."""

import json
import subprocess

import pytest

from helpers import support


@pytest.mark.distributed
@pytest.mark.fault
def test_twelve_faults_leave_every_run_as_if_nothing_had_happened(demo):
    done = subprocess.run(
        [support.PYTHON, support.ROOT / "tests" / "soak.py", "--cycles", "12"],
        env=support.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert sum(summary["faults"].values()) >= 12 and summary["runs"] >= 1
    assert (summary["divergences"], summary["stuck"], summary["bounded"]) == (0, 0, True)
    assert summary["wrong_exit_codes"] == 0
