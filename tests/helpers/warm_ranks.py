"""Ranks without ten seconds of imports: they are forked from a process that has imported everything a recipe needs.

The recipe, its processes, its signals and its files are real; only the imports are shared. launch.sh and `deepspeed`
start ranks the ordinary way, and have tests of their own.

    warm_ranks.py PADDING    forks one process per line on stdin, and prints its process id
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("dia_lora", "dia_full", "higgs_clone", "llama_mot", "diffusion_buffer", "cmgan")
LONGEST_COMMAND = 8000  # bytes of a command line, as `pgrep -f` sees it


# ---- in the tests ----------------------------------------------------------------------------------------------


class WarmRank:
    """A forked process, with the parts of subprocess.Popen that the tests use."""

    def __init__(self, pid: int, folder: Path):
        self.pid, self.folder, self.returncode = pid, folder, None

    def poll(self) -> int | None:
        status = self.folder / "status"
        if self.returncode is None and status.exists():
            self.returncode = int(status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return (self.folder / "output").read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


STARTED: list[WarmRank] = []  # by the test that runs now
_server = None


def start(script: Path, arguments: list[str], environment: dict, stdin: Path | str = "/dev/null") -> WarmRank:
    """Runs `python script arguments`, forked."""
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, __file__, "-" * LONGEST_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        atexit.register(_server.kill)
    folder = Path(tempfile.mkdtemp(prefix="warm-rank-"))
    command = [str(script), *map(str, arguments)]
    job = {"command": command, "environment": environment, "folder": str(folder), "stdin": str(stdin)}
    print(json.dumps(job), file=_server.stdin, flush=True)
    STARTED.append(WarmRank(int(_server.stdout.readline()), folder))
    return STARTED[-1]


# ---- in the process that forks ---------------------------------------------------------------------------------


def run(job: dict) -> None:
    """In a forked process: becomes `python command`, after a call of WARM_RANK_FIRST="module:function" if that is in
    its environment."""
    stream = os.open(Path(job["folder"], "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1), os.dup2(stream, 2)
    os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    set_command_line([sys.executable, *job["command"]])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(ROOT)
    sys.argv = job["command"]
    if not Path(sys.argv[0]).resolve().is_relative_to(ROOT):  # another copy of the house has modules of its own
        for name in [name for name in sys.modules if name.split(".")[0] in ("common", "models")]:
            del sys.modules[name]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    if first := os.environ.get("WARM_RANK_FIRST"):
        module, function = first.split(":")
        getattr(importlib.import_module(module), function)()
    runpy.run_path(sys.argv[0], run_name="__main__")


def set_command_line(words: list[str]) -> None:
    """Makes /proc/self/cmdline say this, for tests that look for the processes of a run."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    text = "\0".join(words).encode()[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, text, len(text))


def fork(job: dict) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        run(job)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reap(folders: dict[int, str]) -> None:
    """Writes the exit codes of the processes that have ended."""
    while folders:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        folder = Path(folders.pop(pid))
        (folder / ".status").write_text(str(os.waitstatus_to_exitcode(status)))
        (folder / ".status").rename(folder / "status")


def main() -> None:
    sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "data"), str(ROOT / "tests")]
    from common.runtime import forbid_codec_imports

    forbid_codec_imports()
    for module in (*RECIPES, "deepspeed", "peft"):
        importlib.import_module(module)
    gc.freeze()  # collections in the forked processes leave the shared pages alone
    folders, waiting = {}, b""
    while True:
        reap(folders)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        if not (read := os.read(0, 65536)):
            break
        *lines, waiting = (waiting + read).split(b"\n")
        for line in lines:
            job = json.loads(line)
            pid = fork(job)
            folders[pid] = job["folder"]
            print(pid, flush=True)
    for pid in folders:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
