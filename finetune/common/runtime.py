"""This process among the ranks: device, printing, signals, small collectives, exit. Imports torch only where needed."""

import contextlib
import errno
import faulthandler
import logging
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

from common.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError, disk_error

DEFAULT_PORT = "29500"

# OpenMP's threads spin for milliseconds while they wait for each other, which takes the core that another job needs:
# two jobs with 2 threads each on 2 cores took 8 x as long. 1000 rounds are microseconds. Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Some virtual machines advertise AMX but not its tiles (CPUID leaf 1D): there oneDNN dies of an illegal instruction in
# the first bf16 product. ONEDNN_MAX_CPU_ISA=DEFAULT brings it back. oneDNN reads this at its first operation.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# On CPUs with bf16 instructions bitsandbytes warns that a package for generating from 4-bit weights is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_bar = None  # the progress bar on the terminal; see print_above


@dataclass(frozen=True)
class Process:
    """This process as one of `world` ranks."""

    rank: int
    world: int
    device: object  # torch.device
    local_rank: int = 0  # number of this rank on its machine

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size() -> int:
    """Number of ranks that the launcher started; known before anything heavy is imported."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(*words) -> None:
    """Prints on the main rank only, unbuffered."""
    if os.environ.get("RANK", "0") == "0":
        _print(" ".join(map(str, words)), sys.stdout)


def print_above(bar) -> None:
    """From here on lines are printed above this progress bar (tqdm), which stays the last line; None ends that."""
    global _bar
    _bar = bar


def _print(text: str, stream) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed does not end the run
        if _bar is None:
            print(redact(text), file=stream, flush=True)
        else:
            _bar.write(redact(text), file=stream)


def redact(text: str) -> str:
    """The text without the values of this process's secrets, such as HF_TOKEN or WANDB_API_KEY."""
    for name, value in os.environ.items():
        if value in text and len(value) >= 8 and re.search(r"TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD", name):
            text = text.replace(value, f"<{name}>")
    return text


# ---- signals ---------------------------------------------------------------------------------------------------

_stop_wanted = False  # not a threading.Event: its lock would deadlock when a signal interrupts a handler
_launchers = []  # launch.sh, or DeepSpeed's launcher and runner, when they started this process


def catch_signals() -> None:
    """SIGTERM, SIGUSR1 and SIGINT request a stop; the loop saves at the next step, on all ranks alike."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: request_stop())
    parent = _proc(os.getppid(), "cmdline")
    if b"deepspeed.launcher.launch" in parent:
        _launchers[:] = _ancestors(2)
    elif b"launch.sh" in parent:
        _launchers[:] = _ancestors(1)


def request_stop() -> None:
    global _stop_wanted
    _stop_wanted = True


def stop_requested() -> bool:
    """True after a signal, or when a launcher has died: most signals kill a launcher without reaching the ranks."""
    return _stop_wanted or (bool(_launchers) and _launchers != _ancestors(len(_launchers)))


def _ancestors(generations: int) -> list[int]:
    """Process ids of parent, grandparent, ..."""
    pids = [os.getppid()]
    while len(pids) < generations:
        stat = _proc(pids[-1], "stat").rpartition(b")")[2].split()
        pids.append(int(stat[1]) if stat else 0)
    return pids


def _proc(pid: int | str, name: str) -> bytes:
    """The content of a file in /proc; empty if the process has ended, and on macOS."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def forbid_codec_imports() -> None:
    """Makes importing a codec or a resampler fail: this process needs none, whatever it does.

    transformers would import torchaudio and librosa by itself, which costs seconds on every rank.
    """
    for name in ("dac", "audiotools", "torchaudio", "librosa"):
        sys.modules[name] = None


class Stopped(Exception):
    """Raised to end a run early, after a signal, with everything saved."""


def run_main(main, config, *more) -> None:
    """Runs main(config, *more) and exits: 0 finished, 75 stopped by a signal and saved, 2 user error, 1 any other."""
    global _hang_timeout
    _hang_timeout = getattr(config, "hang_timeout", 0)
    still_alive()
    try:
        main(config, *more)
        code = 0
    except Stopped:
        code = EXIT_STOPPED
    except UserError as error:
        # All ranks usually find the same mistake. The main rank reports it at once; the others wait, and report it
        # only if the launcher has not ended them by then.
        first = os.environ.get("RANK", "0") == "0"
        quiet_until = time.monotonic() + (0 if first else 5)
        while time.monotonic() < quiet_until and not stop_requested():
            time.sleep(0.1)
        if first or not stop_requested():
            _print(f"error: {error}", sys.stderr)
        code = EXIT_USER_ERROR
    except OSError as error:
        # A file that should be there but is not may also be our own mistake.
        sentence = None if error.errno in (errno.ENOENT, errno.EEXIST) else disk_error(error)
        _print(f"error: {sentence}" if sentence else traceback.format_exc(), sys.stderr)
        code = EXIT_USER_ERROR if sentence else 1
    except BaseException as error:
        if type(error).__name__ == "ValidationError" and "DeepSpeed" in str(error):  # pydantic's: a key of --ds
            reason = " ".join(str(error).split("For further")[0].split())
            _print(f"error: DeepSpeed refuses the file of --ds: {reason}", sys.stderr)
            code = EXIT_USER_ERROR
        else:
            _print(traceback.format_exc(), sys.stderr)
            code = 1
    faulthandler.cancel_dump_traceback_later()
    report_outcome(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a rank that failed must not wait at interpreter exit for peers that are stuck in a collective.
    os._exit(code)


_hang_timeout = 0.0


def still_alive() -> None:
    """Restarts the --hang-timeout clock. When it runs out, all stacks are printed and the process exits; this happens
    in C, because a rank that waits for a stalled peer may hold the GIL."""
    if _hang_timeout:
        faulthandler.dump_traceback_later(_hang_timeout, exit=True, file=sys.__stderr__)


def report_outcome(code: int) -> None:
    """Tells launch.sh how the run ended: DeepSpeed's runner exits with 0 even after some deaths of its ranks."""
    marker = os.environ.get("AUDIO_FINETUNE_OUTCOME")
    if marker and os.environ.get("RANK", "0") == "0":
        Path(marker).write_text(f"{code}\n")


# ---- ranks -----------------------------------------------------------------------------------------------------


ALLOCATOR = "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # its names in older versions of torch


def let_segments_grow() -> None:
    """Makes CUDA memory less fragmented, since every micro-batch has another shape; a user's own setting stays.

    torch reads it at the first allocation on a GPU, so call it before that.
    """
    if not any(name in os.environ for name in (ALLOCATOR, *OLD_ALLOCATOR)):
        os.environ[ALLOCATOR] = "expandable_segments:True"


def init_process(timeout_minutes: float = 30) -> Process:
    """Joins the process group that the launcher set up; started with plain `python`, this is the only rank."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # DeepSpeed checkpoints are pickles
    let_segments_grow()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    # DeepSpeed compiles its operators with the first ninja in PATH. One of another version than the environment's own
    # considers the compiled operators stale and rebuilds them, which takes a minute each time.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    note = Path(tempfile.gettempdir()) / f"audio-finetune-port-{os.getuid()}-{os.getppid()}"
    if os.environ["MASTER_PORT"] == DEFAULT_PORT and ranks_here() == world:
        os.environ["MASTER_PORT"] = _agree_on_free_port(rank, world, note)

    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    deepspeed.utils.logger.setLevel("WARNING")
    accelerator = get_accelerator()
    number = local_rank
    if accelerator.device_name() == "cuda":
        number = device_number(local_rank, accelerator.device_count())
        os.environ["LOCAL_RANK"] = str(number)  # where DeepSpeed looks for the number of the device
    if accelerator.device_name() != "cpu":
        accelerator.set_device(number)
    if "OMP_NUM_THREADS" not in os.environ:
        # If every rank starts one thread per core, they fight for the cores: 2 ranks on 2 cores ran at half speed.
        torch.set_num_threads(cores_per_rank())
        # An optimizer on the CPU (offload) is compiled against an OpenMP of its own, which is loaded later.
        os.environ["OMP_NUM_THREADS"] = str(cores_per_rank())
        os.environ.setdefault("RAYON_NUM_THREADS", str(cores_per_rank()))  # of the tokenizers
    # On a CPU DeepSpeed would compile its shared-memory collective, which only tensor-parallel inference uses. It needs
    # a C++ compiler, takes a minute once, and leaves 66 MB per rank in /dev/shm after every run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(timeout=timedelta(minutes=timeout_minutes), verbose=False)
    if rank == 0:
        note.unlink(missing_ok=True)
    return Process(rank, world, torch.device(accelerator.device_name(number)), local_rank)


def ranks_here() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_SIZE", world_size()))


def device_number(local_rank: int, visible: int) -> int:
    """Which of the visible GPUs a rank takes. With --gpus-per-task=1 SLURM shows each task its own GPU as number 0."""
    if visible > 1 and local_rank >= visible:
        raise UserError(f"rank {local_rank} of this machine has no GPU: {visible} are visible; start fewer ranks.")
    return 0 if visible == 1 else local_rank


def cores_per_rank() -> int:
    """This rank's share of the cores, at least 1."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # SLURM may bind each task to cores of its own: then those that this process may use are already its share.
    of_the_job = int(os.environ.get("SLURM_CPUS_ON_NODE", mine))
    return max(1, min(mine, of_the_job // ranks_here()))


def _agree_on_free_port(rank: int, world: int, note: Path) -> str:
    """DeepSpeed gives every job on a host port 29500. Ranks of one job share a parent, so they agree through a file."""
    if rank == 0:
        port = _free_port()
        if world == 1:
            return port
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(port)
        draft.replace(note)
        return port
    started = time.time()
    while not (note.exists() and note.stat().st_mtime > started - 300):
        if time.time() - started > 300:
            raise UserError(f"rank 0 did not publish the port it chose (no file {note}).")
        time.sleep(0.05)
    return note.read_text()


def _free_port() -> str:
    """Chosen by the system: of two jobs that start together, both would find DeepSpeed's default port free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def all_sum(values, process: Process):
    """Sum of a small float64 vector over all ranks, as a numpy array. Every rank must call it."""
    import torch
    import torch.distributed as dist

    vector = torch.as_tensor(values, dtype=torch.float64).clone()
    if process.world > 1:
        vector = vector.to(process.device)
        dist.all_reduce(vector)
    still_alive()
    return vector.cpu().numpy()


def barrier(process: Process) -> None:
    """Waits until every rank is here."""
    all_sum([0.0], process)


def any_rank(condition: bool, process: Process) -> bool:
    """Whether the condition holds on at least one rank. Every rank must call it."""
    return bool(all_sum([float(condition)], process)[0])


def from_main(value, process: Process):
    """The main rank's Python value, on every rank."""
    import torch.distributed as dist

    box = [value]
    if process.world > 1:
        dist.broadcast_object_list(box, src=0, device=process.device)
    return box[0]


def gather_lists(items: list, process: Process) -> list:
    """The items of all ranks, in rank order, on every rank."""
    if process.world == 1:
        return items
    import torch.distributed as dist

    boxes = [None] * process.world
    dist.all_gather_object(boxes, items)
    return [item for box in boxes for item in box]


def on_main(work, process: Process):
    """Calls `work()` on the main rank only and returns its result on every rank; a UserError is raised on all."""
    result, mistake = None, None
    if process.is_main:
        try:
            result = work()
        except UserError as error:
            mistake = str(error)
    result, mistake = from_main((result, mistake), process)
    if mistake:
        raise UserError(mistake)
    return result


SIGN_OF_LIFE_SECONDS = 20.0


def on_main_for_long(work, process: Process) -> None:
    """Calls `work(tick)` on the main rank only; a UserError is raised on all. `work` calls tick() every few seconds, so
    that neither --hang-timeout nor the time limit of a collective ends the ranks that wait for it."""
    last_sign = time.monotonic()

    def tick() -> None:
        nonlocal last_sign
        still_alive()
        if time.monotonic() - last_sign > SIGN_OF_LIFE_SECONDS:
            last_sign = time.monotonic()
            from_main("not yet", process)

    answer = None
    if process.is_main:
        try:
            work(tick)
        except UserError as error:
            answer = str(error)
    while (told := from_main(answer, process)) == "not yet":
        still_alive()
    if told:
        raise UserError(told)


def memory_gb(process: Process) -> dict:
    """Peak memory of this process: on the GPU, or resident memory on a CPU machine."""
    if process.device.type == "mps":
        import torch

        return {"vram_gb": round(torch.mps.driver_allocated_memory() / 2**30, 3)}
    if process.device.type == "cuda":
        import torch

        return {"vram_gb": round(torch.cuda.max_memory_allocated() / 2**30, 3)}
    if process.device.type != "cpu":
        from deepspeed.accelerator import get_accelerator

        return {"vram_gb": round(get_accelerator().max_memory_allocated() / 2**30, 3)}
    return {"rss_gb": round(resident_bytes("VmHWM") / 2**30, 3)}


def free_memory() -> float:
    """Bytes of host memory that are available without swapping, to this machine and to this job's cgroup."""
    line = re.search(rb"^MemAvailable:\s+(\d+) kB", _proc("", "meminfo"), re.M)
    return min(int(line[1]) * 1024 if line else float("inf"), cgroup_room(_proc("self", "cgroup").decode()))


def cgroup_room(cgroups: str, root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that the memory limits of these control groups (lines of /proc/self/cgroup) and of their parents leave."""
    room = float("inf")
    for line in cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            top, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:  # in a container the path may be the host's; then only the top exists here
                allowed, used = int((group / limit).read_text()), int((group / usage).read_text())
                # File cache counts as used but is given back.
                cache = re.findall(r"^(?:total_)?inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
            except (OSError, ValueError):  # ValueError: "max"
                continue
            room = min(room, allowed - used + int(cache[-1] if cache else 0))
    return room


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: peak so far. Not getrusage: there a child inherits its parent's peak."""
    line = re.search(rf"^{field}:\s+(\d+) kB".encode(), _proc("self", "status"), re.M)
    if not line:  # macOS, where ru_maxrss is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(line[1]) * 1024
