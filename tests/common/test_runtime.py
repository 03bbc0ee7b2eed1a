"""How a process ends, and the port it takes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from common.runtime import _agree_on_free_port, _free_port, redact

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
        ("raise Stopped", 75, ""),
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
    body = f"catch_signals(); {kill}; assert stop_requested(); raise Stopped"
    done, outcome = end_of(body, tmp_path)
    assert done.returncode == 75 and outcome == "75"


def test_two_jobs_that_start_together_do_not_get_the_same_port():
    """The system gives each a port of its own; both would have found DeepSpeed's default port free."""
    ports = {_free_port() for _ in range(20)}
    assert len(ports) > 10 and "29500" not in ports
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(port)))


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


# ---- secrets, orphans, hangs -----------------------------------------------------------------------------------


def test_only_secrets_are_replaced(monkeypatch):
    for name, value in (
        ("HF_TOKEN", "hf_abcdefgh"),
        ("WANDB_API_KEY", "0123456789"),
        ("SHORT_TOKEN", "x"),
        ("A", "visible1"),
    ):
        monkeypatch.setenv(name, value)
    assert redact("x hf_abcdefgh-0123456789 visible1") == "x <HF_TOKEN>-<WANDB_API_KEY> visible1"


ORPHAN = """
import os, subprocess, sys, time
if sys.argv[1] == "runner":
    launcher = subprocess.Popen([sys.executable, __file__, "launcher", "deepspeed.launcher.launch"])
    print(launcher.pid, flush=True)
    launcher.wait()
elif sys.argv[1] == "launcher":
    subprocess.Popen([sys.executable, __file__, "rank"]).wait()
else:
    from common.runtime import catch_signals, stop_requested
    catch_signals()
    print("not yet" if not stop_requested() else "too early", flush=True)
    while not stop_requested():
        time.sleep(0.02)
    print("noticed", flush=True)
"""


@pytest.mark.parametrize("victim", ["runner", "launcher"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_rank_notices_that_its_launcher_or_runner_is_gone(tmp_path, victim, number):
    script = tmp_path / "family.py"
    script.write_text(ORPHAN)
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    runner = subprocess.Popen([sys.executable, script, "runner"], env=env, stdout=subprocess.PIPE, text=True)
    launcher = int(runner.stdout.readline())
    assert runner.stdout.readline() == "not yet\n"
    os.kill(runner.pid if victim == "runner" else launcher, number)
    assert runner.stdout.readline() == "noticed\n"
    runner.wait()


def test_a_process_without_a_sign_of_life_prints_its_stack_and_ends(tmp_path):
    body = "from types import SimpleNamespace as N; from common import runtime; import time\n"
    work = "def main(config):\n    for _ in range(6): time.sleep(0.5); runtime.still_alive()\n    stuck()\n"
    stuck = "def stuck(): time.sleep(60)\n"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{body}{stuck}{work}runtime.run_main(main, N(hang_timeout=1.5))"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Timeout (0:00:01.5" in done.stderr and "in stuck" in done.stderr
    assert 4 < time.monotonic() - began < 30, "each sign of life starts the time anew"
