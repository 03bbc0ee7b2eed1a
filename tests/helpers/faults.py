"""What the fault tests of several recipes share: killing ranks at a bad moment, looking for what is left of them."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from common import checkpoint
from common.runtime import Process
from helpers import support
from helpers.support import Rank


def processes_of(run: Path) -> list[int]:
    """Processes whose command line names this run folder: ranks, what they forked, and data/watch.py."""
    found = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


def assert_no_orphans(run: Path, seconds: float = 120) -> None:
    deadline = time.time() + seconds
    while left := processes_of(run):
        assert time.time() < deadline, left
        time.sleep(0.2)


def job_processes(run: Path) -> dict[str, int]:
    """The processes of a job through launch.sh or `deepspeed`, by what they are; its command lines name the run."""
    found = {}
    for pid in processes_of(run):
        words = command_line(pid).decode().split("\0")
        local = [word for word in words if word.startswith("--local_rank=")]
        if "deepspeed.launcher.launch" in words:
            found["launcher"] = pid
        elif local:
            name = f"rank {local[0].partition('=')[2]}"
            found[name] = min(pid, found.get(name, pid))  # a worker that it forked is younger
        elif any(word.endswith("/deepspeed") for word in words[:2]):  # a zombie's command line is empty
            found["runner"] = pid
    return found


def wait_for_checkpoint(run: Path, step: int, timeout: float = 600) -> None:
    """Returns as soon as a checkpoint of this step or a later one is listed: they are written in the background."""
    index, deadline = run / "checkpoints" / "index.json", time.time() + timeout
    while time.time() < deadline:
        if index.exists() and any(entry["step"] >= step for entry in json.loads(index.read_text())["checkpoints"]):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run} has no checkpoint of step {step}")


def start_and_halt(script: Path, arguments: list, run: Path, step: int, saved: int = 0, world: int = 2) -> list[Rank]:
    """Starts ranks, of which the last does nothing more after it has logged this step, until it is asked to stop.
    Returns when they are there and have saved step `saved`: however busy the machine is, they go no further before a
    signal comes."""
    more = support.patched("common.metrics=helpers.halts:after_step")
    ranks = support.start_ranks(script, arguments, world, **more, HALT_AFTER=str(step))
    support.wait_for_step(run, step)
    if saved:
        wait_for_checkpoint(run, saved)
    return ranks


def kill_all(ranks: list[Rank], run: Path) -> list[str]:
    """kill -9 of every rank; returns what they had printed."""
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    _, outputs = support.finish(ranks, timeout=300)
    assert_no_orphans(run)
    return outputs


def kill_one(ranks: list[Rank], run: Path) -> None:
    """kill -9 of rank 1; rank 0 loses its peer in a collective and ends by itself."""
    ranks[1].kill()
    codes, outputs = support.finish(ranks, timeout=120)
    assert codes[0] not in (0, 75) and codes[1] == -signal.SIGKILL, outputs[0][-2000:]
    assert_no_orphans(run)


def kill_all_while_saving(script: Path, arguments: list, run: Path, step: int, timeout: float = 600) -> list[str]:
    """Starts the ranks, which halt with the first file of this step's checkpoint, and kills them there (kill -9)."""
    draft = run / "checkpoints" / f".step-{step:08d}.tmp"
    more = support.patched("torch=helpers.halts:while_saving")
    ranks = support.start_ranks(script, arguments, **more, HALT_IN=draft.name)
    deadline = time.time() + timeout
    while not any(draft.rglob("*.pt")):
        assert time.time() < deadline and all(rank.poll() is None for rank in ranks)
        time.sleep(0.02)
    return kill_all(ranks, run)


def assert_half_a_save_is_never_chosen(whole: Path, scratch: Path) -> None:
    """Files of a save appear one after another; whatever of them is there, it is not chosen before its index entry."""
    folder = scratch / "checkpoints"
    shutil.copytree(whole / "checkpoints", folder)
    entries = checkpoint.read_index(folder)
    newest, older = entries[-1]["name"], entries[-2]["name"]
    checkpoint.write_json(folder / "index.json", {"checkpoints": entries[:-1]})
    os.rename(folder / newest, folder / f".{newest}.tmp")
    files = sorted(path for path in (folder / f".{newest}.tmp").rglob("*") if path.is_file())
    assert len(files) > 4
    one = Process(0, 1, torch.device("cpu"))
    for file in reversed(files):
        assert checkpoint.choose("auto", folder, one) == folder / older
        file.unlink()
    assert checkpoint.choose("auto", folder, one) == folder / older


def assert_same_run(run, whole, artifact="adapter_model.safetensors") -> None:
    """Equal losses, evaluations and exported weights, bit for bit."""
    fields = {"step", "event", "epoch", "loss", "lr", "grad_norm", "tokens"}
    fields |= {"text_gap", "eos_loss", "gap", "end_loss", "stop_rate", "caption_gain", "text_drift"}
    history = [
        [
            {name: value for name, value in r.items() if name in fields}
            for r in support.metrics(folder)
            if r.get("event") in (None, "eval", "done")
        ]
        for folder in (run, whole)
    ]
    assert history[0] == history[1]
    mine, expected = (load_file(folder / "export" / artifact) for folder in (run, whole))
    assert set(mine) == set(expected)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)
