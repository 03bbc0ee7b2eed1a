"""How a process ends, and the port it takes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from common.runtime import _agree_on_free_port, _free_port

HEAD = """
import sys
from common.config import UserError
from common.runtime import Stopped, catch_signals, run_main, stop_requested
def main(config):
"""


def end_of(body, tmp_path, **env):
    """Exit code, output and what launch.sh would read, of a process that runs `body` as its recipe."""
    marker = tmp_path / "outcome"
    env = {"PYTHONPATH": ":".join(sys.path), "AUDIO_FINETUNE_OUTCOME": str(marker)} | env
    done = subprocess.run(
        [sys.executable, "-c", HEAD + f"    {body}\nrun_main(main, 'config')"], env=env, capture_output=True, text=True
    )
    return done, marker.read_text().strip() if marker.exists() else None


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("assert config == 'config'", 0, ""),
        ("raise Stopped('saved at 5')", 75, "saved at 5"),
        ("raise UserError('--lr is wrong.')", 2, "error: --lr is wrong."),
        ("raise ValueError('ours')", 1, "Traceback"),
        ("sys.exit(0)", 1, "SystemExit"),
    ],
)
def test_every_end_has_its_exit_code(body, code, words, tmp_path):
    done, outcome = end_of(body, tmp_path)
    assert (done.returncode, outcome) == (code, str(code)) and words in done.stdout + done.stderr
    if code == 2:
        assert done.stderr == words + "\n", "a user's mistake is one line, without a traceback"


def test_other_ranks_leave_no_outcome_and_speak_later(tmp_path):
    began = time.monotonic()
    done, outcome = end_of("raise UserError('x')", tmp_path, RANK="1")
    assert (done.returncode, outcome) == (2, None) and time.monotonic() - began > 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_a_wish_not_an_end(number, tmp_path):
    kill = f"import os; os.kill(os.getpid(), {int(number)})"
    body = f"catch_signals(); {kill}; assert stop_requested(); raise Stopped('in order')"
    done, outcome = end_of(body, tmp_path)
    assert done.returncode == 75 and outcome == "75"


def test_a_busy_port_is_replaced_by_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = str(taken.getsockname()[1])
        found = _free_port(busy)
        assert found != busy
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(found)))
    assert _free_port(busy) == busy


def test_ranks_of_a_job_agree_on_the_port_through_a_note(tmp_path):
    note = tmp_path / "port"
    port = _agree_on_free_port(0, 2, note)
    assert _agree_on_free_port(1, 2, note) == port
    assert [path.name for path in tmp_path.iterdir()] == ["port"], "no draft is left"


def test_an_old_note_of_another_job_is_not_taken(tmp_path):
    import threading

    note = tmp_path / "port"
    note.write_text("1")
    os.utime(note, (time.time() - 1000,) * 2)
    found = []
    waiting = threading.Thread(target=lambda: found.append(_agree_on_free_port(1, 2, note)))
    waiting.start()
    time.sleep(0.2)
    assert not found
    port = _agree_on_free_port(0, 2, note)
    waiting.join(5)
    assert found == [port]


def test_a_childs_peak_is_not_its_parents():
    """What pytest, or the launcher, once held is no part of a rank's memory; getrusage says it is."""
    child = "from common.runtime import resident_bytes as r; print(r('VmHWM') >> 20, r('VmRSS') >> 20)"
    ballast = bytearray(os.urandom(1 << 20) * 600)
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", child], env=env, capture_output=True, text=True)
    peak, now = map(int, done.stdout.split())
    assert len(ballast) >> 20 == 600 and 0 < now <= peak < 200
