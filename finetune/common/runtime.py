"""Ranks, device, printing, signals and the end of a process. Imports torch only where it is needed."""

import contextlib
import faulthandler
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from common.config import EXIT_STOPPED, EXIT_USER_ERROR, UserError

DEFAULT_PORT = "29500"


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: object  # torch.device
    resident: int = 0  # bytes that this process took before it had a model

    @property
    def first(self) -> bool:
        return self.rank == 0


def say(*words) -> None:
    """Prints on the first rank only, at once."""
    if os.environ.get("RANK", "0") == "0":
        _print(" ".join(map(str, words)), sys.stdout)


def _print(text: str, stream) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed does not end the run
        print(redact(text), file=stream, flush=True)


def redact(text: str) -> str:
    """The text without the values of this process's secrets, such as HF_TOKEN or WANDB_API_KEY."""
    for name, value in os.environ.items():
        if re.search(r"TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD", name) and len(value) >= 8:
            text = text.replace(value, f"<{name}>")
    return text


# ---- signals ---------------------------------------------------------------------------------------------------

_stop_wanted = False  # no threading.Event: its lock would wait for itself when a signal interrupts a handler
_launchers = []  # DeepSpeed's launcher and runner, and launch.sh, when they started this process


def catch_signals() -> None:
    """SIGTERM, SIGUSR1 or SIGINT asks for a stop; the loop saves at the next step that all ranks agree on."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: request_stop())
    if b"deepspeed.launcher.launch" in _proc(os.getppid(), "cmdline"):
        _launchers[:] = _ancestors(3 if "AUDIO_FINETUNE_OUTCOME" in os.environ else 2)


def request_stop() -> None:
    global _stop_wanted
    _stop_wanted = True


def stop_requested() -> bool:
    """Also when a launcher is gone: most signals kill them without a word to the ranks."""
    return _stop_wanted or (bool(_launchers) and _launchers != _ancestors(len(_launchers)))


def _ancestors(generations: int) -> list[int]:
    """Parent, grandparent, ..."""
    found = [os.getppid()]
    while len(found) < generations:
        facts = _proc(found[-1], "stat").rpartition(b")")[2].split()
        found.append(int(facts[1]) if facts else 0)
    return found


def _proc(pid: int | str, name: str) -> bytes:
    """A file of /proc; empty if the process has ended, or on macOS."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def bar_codecs() -> None:
    """A training process never loads a codec or a resampler; importing one fails from here on.

    transformers would import torchaudio and librosa by itself, which takes seconds a rank.
    """
    for name in ("dac", "audiotools", "torchaudio", "librosa"):
        sys.modules[name] = None


class Stopped(Exception):
    """A signal ended the run early with everything saved."""


def run_main(main, config) -> None:
    """Runs a recipe's main and ends the process with the documented exit code.

    0 finished, 75 stopped by a signal with everything saved, 2 a user's mistake, 1 anything else.
    """
    global _hang_timeout
    _hang_timeout = getattr(config, "hang_timeout", 0)
    still_alive()
    try:
        main(config)
        code = 0
    except Stopped:
        code = EXIT_STOPPED
    except UserError as error:
        # All ranks usually find the same mistake: the first speaks at once, the others only if the launcher does
        # not end them meanwhile.
        first = os.environ.get("RANK", "0") == "0"
        quiet_until = time.monotonic() + (0 if first else 5)
        while time.monotonic() < quiet_until and not stop_requested():
            time.sleep(0.1)
        if first or not stop_requested():
            _print(f"error: {error}", sys.stderr)
        code = EXIT_USER_ERROR
    except BaseException:
        _print(traceback.format_exc(), sys.stderr)
        code = 1
    faulthandler.cancel_dump_traceback_later()
    report_outcome(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a rank that failed must not wait at interpreter exit for peers stuck in a collective.
    os._exit(code)


_hang_timeout = 0.0


def still_alive() -> None:
    """Starts the time of --hang-timeout anew. When it runs out, the stacks of all threads are printed and the process
    ends: from C, since a rank that waits for a stalled one may hold Python's lock."""
    if _hang_timeout:
        faulthandler.dump_traceback_later(_hang_timeout, exit=True, file=sys.__stderr__)


def report_outcome(code: int) -> None:
    """Tells launch.sh how it ended: DeepSpeed's own runner exits 0 after some deaths."""
    marker = os.environ.get("AUDIO_FINETUNE_OUTCOME")
    if marker and os.environ.get("RANK", "0") == "0":
        Path(marker).write_text(f"{code}\n")


# ---- ranks -----------------------------------------------------------------------------------------------------


def start_ranks(timeout_minutes: float = 30) -> Ranks:
    """Joins the process group that the launcher described; a plain `python` start is one rank."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # DeepSpeed's checkpoints are pickles
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    ranks_here = int(os.environ.get("LOCAL_SIZE", world))
    # DeepSpeed compiles its operators with the ninja it finds in PATH. Another version than the environment's own
    # takes the finished ones for stale and compiles them again, a minute each time.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    note = Path(tempfile.gettempdir()) / f"audio-finetune-port-{os.getuid()}-{os.getppid()}"
    if os.environ["MASTER_PORT"] == DEFAULT_PORT and ranks_here == world:
        os.environ["MASTER_PORT"] = _agree_on_free_port(rank, world, note)

    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        # Ranks that each start a thread a core fight for the cores: 2 ranks on 2 cores ran at half speed.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    deepspeed.init_distributed(timeout=timedelta(minutes=timeout_minutes), verbose=False)
    if rank == 0:
        note.unlink(missing_ok=True)
    if world > 1:
        torch.distributed.barrier()
        _drop_buffer_name(rank)
    return Ranks(rank, world, torch.device(accelerator.device_name(local_rank)), resident_bytes("VmRSS"))


def _drop_buffer_name(rank: int) -> None:
    """DeepSpeed's CPU collectives leave 66 MB a rank in /dev/shm after every run. Once all ranks have mapped the
    buffer its name can go: the memory then goes with the last process, however that one ends."""
    job = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{job}_{rank}").unlink(missing_ok=True)


def _agree_on_free_port(rank: int, world: int, note: Path) -> str:
    """DeepSpeed gives every job of a host port 29500. The ranks of a job share a parent, so they meet in a file."""
    if rank == 0:
        port = _free_port(DEFAULT_PORT)
        if world == 1:
            return port
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(port)
        draft.replace(note)
        return port
    started = time.time()
    while not (note.exists() and note.stat().st_mtime > started - 300):
        if time.time() - started > 300:
            raise UserError(f"the first rank did not say which port it took (no file {note}).")
        time.sleep(0.05)
    return note.read_text()


def _free_port(wanted: str) -> str:
    for port in (int(wanted), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return str(probe.getsockname()[1])
            except OSError:
                continue
    raise UserError("no free port on this machine.")


def all_sum(values, ranks: Ranks):
    """Sum over all ranks of a small float64 vector; returns a numpy array."""
    import torch
    import torch.distributed as dist

    vector = torch.as_tensor(values, dtype=torch.float64).clone()
    if ranks.world > 1:
        vector = vector.to(ranks.device)
        dist.all_reduce(vector)
    still_alive()
    return vector.cpu().numpy()


def from_first(value, ranks: Ranks):
    """The first rank's Python value on every rank."""
    import torch.distributed as dist

    box = [value]
    if ranks.world > 1:
        dist.broadcast_object_list(box, src=0, device=ranks.device)
    return box[0]


def gather_names(names: list, ranks: Ranks) -> list:
    """The names of all ranks, on every rank."""
    if ranks.world == 1:
        return names
    import torch.distributed as dist

    boxes = [None] * ranks.world
    dist.all_gather_object(boxes, names)
    return [name for box in boxes for name in box]


def on_first(work, ranks: Ranks):
    """What `work()` returns on the first rank, on every rank; a mistake it finds is raised on all of them."""
    found, mistake = None, None
    if ranks.first:
        try:
            found = work()
        except UserError as error:
            mistake = str(error)
    found, mistake = from_first((found, mistake), ranks)
    if mistake:
        raise UserError(mistake)
    return found


def memory_gb(ranks: Ranks) -> dict:
    """Peak memory of this process: on the card, or resident on a CPU machine."""
    if ranks.device.type == "mps":
        import torch

        return {"vram_gb": round(torch.mps.driver_allocated_memory() / 2**30, 3)}
    if ranks.device.type == "cuda":
        import torch

        return {"vram_gb": round(torch.cuda.max_memory_allocated() / 2**30, 3)}
    if ranks.device.type != "cpu":
        from deepspeed.accelerator import get_accelerator

        return {"vram_gb": round(get_accelerator().max_memory_allocated() / 2**30, 3)}
    return {"rss_gb": round(resident_bytes("VmHWM") / 2**30, 3)}


def free_memory() -> float:
    """Bytes that this machine can still give without swapping."""
    found = re.search(rb"^MemAvailable:\s+(\d+) kB", _proc("", "meminfo"), re.M)
    return int(found[1]) * 1024 if found else float("inf")


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: at most so far. getrusage would not do: a child begins with its parent's peak as its own."""
    found = re.search(rf"^{field}:\s+(\d+) kB".encode(), _proc("self", "status"), re.M)
    if not found:  # macOS, where ru_maxrss counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(found[1]) * 1024
