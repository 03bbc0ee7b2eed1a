"""Processes without ten seconds of imports: forked from one that has imported the libraries.

The recipe, its processes, its signals and its files are real; only the imports are shared. `start` runs a rank,
`command` is the command line for any script of finetune/ or data/, and `environment_folder` makes an environment whose
`python` runs them this way, for launch.sh. launch.sh and `deepspeed` with the ordinary Python have tests of their own.

    warm_ranks.py PART SOCKET PADDING    for the scripts of one PART, finetune or data, forks one process per line on
                                         stdin, and prints its process id; and one per connection to SOCKET
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("dia_lora", "dia_full", "higgs_clone", "llama_mot", "diffusion_buffer", "cmgan")
IMPORTS = {  # data/ needs the codecs, which a recipe may not import
    "finetune": (*RECIPES, "deepspeed", "peft", "torch.utils.tensorboard", "matplotlib.pyplot")
    + ("scipy.signal", "pesq", "pystoi"),  # what the enhancers measure with
    "data": ("encode", "torchaudio", "datasets")
    + tuple(f"transformers.models.{c}.modeling_{c}" for c in ("dac", "encodec", "higgs_audio_v2_tokenizer")),
}
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
_servers = {}


def server(environment: dict, part: str = "finetune") -> subprocess.Popen:
    """The process that forks, started when it is first needed; `place` is its socket."""
    if part not in _servers or _servers[part].poll() is not None:
        place = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
        _servers[part] = subprocess.Popen(
            [sys.executable, __file__, part, place, "-" * LONGEST_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        _servers[part].place = place
        atexit.register(_servers[part].kill)
        assert _servers[part].stdout.readline() == "ready\n"
    return _servers[part]


def command(environment: dict, python: str = sys.executable, part: str = "finetune") -> list[str]:
    """What to write before a script of this part instead of `python`."""
    client = Path(__file__).with_name("warm_client.py")
    return [sys.executable, "-I", "-S", str(client), str(server(environment, part).place), python]


def environment_folder(folder: Path, environment: dict) -> Path:
    """Makes a folder for AUDIO_FINETUNE_ENV whose `python` forks, or is the ordinary one for anything else than our
    scripts."""
    (folder / "bin").mkdir(parents=True)
    python, cases = folder / "bin" / "python", ""
    for part, folders in {"finetune": ("finetune", "finetune/infer"), "data": ("data",)}.items():
        scripts = "|".join(f"{name}|*/{name}" for name in folders)  # whole names: a clone may be called audio-finetune
        cases += f'{scripts}) exec {" ".join(command(environment, str(python), part))} "$@" ;;\n'
    python.write_text(f'#!/bin/sh\ncase "${{1%/*}}" in\n{cases}esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def start(script: Path, arguments: list[str], environment: dict, stdin: Path | str = "/dev/null") -> WarmRank:
    """Runs `python script arguments`, forked."""
    forks = server(environment)
    folder = Path(tempfile.mkdtemp(prefix="warm-rank-"))
    command = [str(script), *map(str, arguments)]
    job = {"command": command, "environment": environment, "folder": str(folder), "stdin": str(stdin)}
    print(json.dumps(job), file=forks.stdin, flush=True)
    STARTED.append(WarmRank(int(forks.stdout.readline()), folder))
    return STARTED[-1]


# ---- in the process that forks ---------------------------------------------------------------------------------


def run(job: dict) -> None:
    """In a forked process: becomes `python command`, after a call of WARM_RANK_FIRST="module:function" if that is in
    its environment. `streams` of the job: its standard input, output and error, or else there are files for them."""
    if streams := job.get("streams"):
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.executable = job["python"]
    else:
        stream = os.open(Path(job["folder"], "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1), os.dup2(stream, 2)
        os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    set_command_line([sys.executable, *job["command"]])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job.get("cwd", ROOT))
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


def reap(folders: dict[int, str], clients: dict[int, socket.socket]) -> None:
    """Tells the exit codes of the processes that have ended."""
    while folders or clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        if client := clients.pop(pid, None):
            with contextlib.suppress(OSError), client:  # it may be gone
                client.sendall(f"{code}\n".encode())
            continue
        folder = Path(folders.pop(pid))
        (folder / ".status").write_text(str(code))
        (folder / ".status").rename(folder / "status")


def fork_for(client: socket.socket) -> int:
    """Forks what a warm client asks for."""
    message, streams, *_ = socket.recv_fds(client, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += client.recv(1 << 20)
    pid = fork(json.loads(message) | {"streams": streams})
    for stream in streams:
        os.close(stream)
    client.sendall(f"{pid}\n".encode())
    return pid


def main() -> None:
    part, place, _ = sys.argv[1:]
    sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "data"), str(ROOT / "tests")]
    if part == "finetune":
        from common.runtime import forbid_codec_imports

        forbid_codec_imports()
    for module in IMPORTS[part]:
        importlib.import_module(module)
    gc.freeze()  # collections in the forked processes leave the shared pages alone
    folders, clients, waiting = {}, {}, b""
    door = socket.socket(socket.AF_UNIX)
    door.bind(place)
    door.listen()
    print("ready", flush=True)
    while True:
        reap(folders, clients)
        ready = select.select([0, door, *clients.values()], [], [], 0.02)[0]
        for pid in [pid for pid, client in clients.items() if client in ready]:  # it says nothing: it was killed
            os.kill(pid, signal.SIGKILL)
        if door in ready:
            client, _ = door.accept()
            clients[fork_for(client)] = client
        if 0 not in ready:
            continue
        if not (read := os.read(0, 65536)):
            break
        *lines, waiting = (waiting + read).split(b"\n")
        for line in lines:
            job = json.loads(line)
            pid = fork(job)
            folders[pid] = job["folder"]
            print(pid, flush=True)
    for pid in (*folders, *clients):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
