"""Ranks that are started once and train many configurations: importing the libraries costs 10 s per start.

A test asks for a run when it needs it (`Runs`), so one failure fails only the tests that use it. A job that fails, or a
rank that dies, ends the group; the next job starts a new one.

    rank_server.py        one rank; reads one job per line from stdin and answers each with a file
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tests") not in sys.path:
    sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "tests")]

from helpers import support  # noqa: E402

MOST_GB = 20.0  # of a rank, before its group is started again
SCORED = ("cmgan", "diffusion_buffer")  # their train() takes the PESQ processes too


# ---- in the tests ----------------------------------------------------------------------------------------------


class RankServer:
    """A group of `world` ranks, started with the first job."""

    def __init__(self, world: int):
        self.world, self.ranks, self.jobs = world, [], 0

    def call(self, function: str, timeout: float = 600, **arguments) -> None:
        """Calls "module:function"(process, scorer, **arguments) on every rank; raises with the log if one fails."""
        if any(memory_gb(rank.pid) > MOST_GB for rank in self.ranks):
            self.close()  # earlier engines are not freed whole, and what is larger than the machine cannot fork
        if not self.ranks:
            self._start()
        self.jobs += 1
        sizes = [log.stat().st_size for log in self.logs]
        line = json.dumps({"number": self.jobs, "function": function, "arguments": arguments})
        for rank in self.ranks:
            print(line, file=rank.stdin, flush=True)
        answers = [self.folder / f"{self.jobs}-{rank}.json" for rank in range(self.world)]
        deadline = time.monotonic() + timeout
        while not all(answer.exists() for answer in answers):
            dead = [rank.poll() for rank in self.ranks if rank.poll() is not None]
            failed = [answer for answer in answers if answer.exists() and json.loads(answer.read_text())]
            if dead or failed or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        errors = [json.loads(answer.read_text()) if answer.exists() else "no answer" for answer in answers]
        if any(errors):
            shown = ""
            for rank, (error, log, size) in enumerate(zip(errors, self.logs, sizes, strict=True)):
                shown += f"rank {rank}: {error}\n{log.read_bytes()[size:].decode(errors='replace')[-3000:]}\n"
            self.close()
            raise AssertionError(f"{function} {arguments} failed\n{shown}")
        (self.folder / "last.log").write_bytes(self.logs[0].read_bytes()[sizes[0] :])

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rank-server-"))
        self.logs = [self.folder / f"rank-{rank}.log" for rank in range(self.world)]
        port = support.free_port()
        for rank, log in enumerate(self.logs):
            env = support.rank_environment(rank, self.world, port) | {"RANK_SERVER_FOLDER": str(self.folder)}
            started = support.Rank(Path(__file__), [], env, stdin=subprocess.PIPE)
            log.symlink_to(started.output)
            self.ranks.append(started)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        self.ranks = []


def memory_gb(pid: int) -> float:
    """Address space of a process; much of it is buckets that DeepSpeed reserved and never touched."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmSize:")) / 2**20


class Runs:
    """Runs of one recipe, trained when a test first asks for them: `runs / name` is the folder of a finished run."""

    def __init__(self, server: RankServer, recipe: str, folder: Path, configs: dict[str, dict], **options):
        """`options`: further arguments of `train` below, the same for all configs; a config may have its own under
        the key "_options". A config can be a function, so that it may depend on other runs, or
        ("module:function", {...}) to call in the ranks instead of training."""
        self.server, self.recipe, self.folder, self.configs, self.options = server, recipe, folder, configs, options
        self.failed = {}

    def __truediv__(self, name: str) -> Path:
        run = self.folder / name
        if name in self.failed:
            raise AssertionError(f"the run {name!r} failed before: {self.failed[name]}")
        if name in self.configs and not (run / ".trained").exists():
            try:
                self._make(self.configs[name], run)
            except AssertionError as error:
                self.failed[name] = str(error)
                raise
            run.mkdir(exist_ok=True)  # a dry run makes none
            (run / "printed.log").write_bytes((self.server.folder / "last.log").read_bytes())
            (run / ".trained").touch()
        return run

    def _make(self, config, run: Path) -> None:
        config = config() if callable(config) else config
        if isinstance(config, tuple):
            function, arguments = config
            self.server.call(function, out=str(run), **arguments)
            return
        config = config | {"out": str(run)}
        options = self.options | config.pop("_options", {})
        self.server.call("helpers.rank_server:train", recipe=self.recipe, config=config, **options)


# ---- in the ranks ----------------------------------------------------------------------------------------------


def resolve(name: str):
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def train(process, scorer, recipe: str, config: dict, around: str | None = None, after: str | None = None, **arguments):
    """One run. `around`: "module:context manager"(recipe module, process, **arguments) to train in; `after`:
    "module:function"(engine, config, process) to call with the trained engine."""
    module = importlib.import_module(recipe)
    from common.ds_config import resolve_ds

    config = module.Config(**{"export_check": False} | config)  # it starts a process; test_export_check.py asks for it
    more = [scorer] if recipe in SCORED else []
    with resolve(around)(module, process, **arguments) if around else contextlib.nullcontext():
        engine = module.train(config, process, resolve_ds(config.ds, config, process.world), *more)
    if after:
        resolve(after)(engine, config, process)


def main() -> None:
    from common.runtime import forbid_codec_imports

    forbid_codec_imports()
    from common.scorer import Scorer

    scorer = Scorer(1)  # forked before torch is imported
    from common.runtime import init_process

    process = init_process(timeout_minutes=9)  # samples are decoded at the lowest priority, behind other tests
    folder = Path(os.environ["RANK_SERVER_FOLDER"])
    for line in sys.stdin:
        job, error = json.loads(line), ""
        try:
            resolve(job["function"])(process, scorer, **job["arguments"])
        except BaseException:
            error = traceback.format_exc()
        draft = folder / f".{job['number']}-{process.rank}.tmp"
        draft.write_text(json.dumps(error))
        draft.replace(folder / f"{job['number']}-{process.rank}.json")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)
