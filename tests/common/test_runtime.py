"""How a process ends, and the port, device, cores and memory it takes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from common import runtime
from common.errors import UserError
from common.runtime import (
    ALLOCATOR,
    OLD_ALLOCATOR,
    _agree_on_free_port,
    _free_port,
    cgroup_room,
    cores_per_rank,
    device_number,
    free_memory,
    let_segments_grow,
    redact,
)
from helpers import support

HEAD = """
import sys
from common.errors import UserError
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
    note = tmp_path / "port"
    note.write_text("1")
    os.utime(note, (time.time() - 1000,) * 2)
    found = []
    waiting = threading.Thread(target=lambda: found.append(_agree_on_free_port(1, 2, note)))
    waiting.start()
    time.sleep(0.2)
    assert not found
    port = _agree_on_free_port(0, 2, note)
    waiting.join(60)
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
if sys.argv[1] == "shell":  # launch.sh starts the ranks itself
    subprocess.Popen([sys.executable, __file__, "rank"]).wait()
elif sys.argv[1] == "runner":
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


def test_a_rank_notices_that_launch_sh_is_gone(tmp_path):
    script = tmp_path / "family.py"
    script.write_text(ORPHAN)
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    shell = subprocess.Popen([sys.executable, script, "shell", "launch.sh"], env=env, stdout=subprocess.PIPE, text=True)
    assert shell.stdout.readline() == "not yet\n"
    shell.kill()
    assert shell.stdout.readline() == "noticed\n"
    shell.wait()


def test_a_process_without_a_sign_of_life_prints_its_stack_and_ends(tmp_path):
    body = "from types import SimpleNamespace as N; from common import runtime; import time\n"
    work = "def main(config):\n    stuck()\n"
    stuck = "def stuck(): time.sleep(600)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{body}{stuck}{work}runtime.run_main(main, N(hang_timeout=3))"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Timeout (0:00:03" in done.stderr and "in stuck" in done.stderr


def test_each_sign_of_life_starts_the_time_anew(monkeypatch):
    started = []
    monkeypatch.setattr(runtime.faulthandler, "dump_traceback_later", lambda seconds, **how: started.append(seconds))
    monkeypatch.setattr(runtime, "_hang_timeout", 3.0)
    for _ in range(4):
        runtime.still_alive()
    monkeypatch.setattr(runtime, "_hang_timeout", 0)
    runtime.still_alive()
    assert started == [3.0] * 4, "and none without --hang-timeout"


# ---- long work on one rank ---------------------------------------------------------------------------------------


class Meeting:
    """A broadcast from the first of some threads to all of them: what from_main is among ranks."""

    def __init__(self, ranks):
        self.here, self.count, self.value = threading.Barrier(ranks), 0, None

    def from_main(self, value, process):
        if process.is_main:
            self.value, self.count = value, self.count + 1
        self.here.wait(10)
        told = self.value
        self.here.wait(10)
        return told


@pytest.mark.parametrize("mistake", [None, "the data is damaged."])
def test_ranks_that_wait_for_long_work_hear_from_it(monkeypatch, mistake):
    meeting, signs, raised = Meeting(3), [], []
    monkeypatch.setattr(runtime, "from_main", meeting.from_main)
    monkeypatch.setattr(runtime, "SIGN_OF_LIFE_SECONDS", 0.0)
    monkeypatch.setattr(runtime, "still_alive", lambda: signs.append(threading.current_thread().name))

    def work(tick):
        for _ in range(4):
            tick()
        if mistake:
            raise UserError(mistake)

    def rank(number):
        try:
            runtime.on_main_for_long(work, runtime.Process(number, 3, "cpu"))
        except UserError as error:
            raised.append(str(error))

    ranks = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert meeting.count == 5 and sorted(signs) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    assert raised == [mistake] * 3 if mistake else not raised


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_hardly_spin_unless_the_user_says_otherwise(environment, expected):
    probe = "import sys, os, common.runtime; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    env = {"PYTHONPATH": ":".join(sys.path)} | environment
    done = subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True, text=True)
    assert done.stdout == f"False {expected}\n", "OpenMP reads it when torch is loaded"


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (support.ROOT / "finetune").glob("*.py")))
def test_recipes_import_the_runtime_before_torch(recipe):
    lines = (support.ROOT / "finetune" / f"{recipe}.py").read_text().splitlines()
    first = [
        next(i for i, line in enumerate(lines) if line.startswith(words))
        for words in ("from common.runtime", "import torch")
    ]
    assert first[0] < first[1]


# ---- GPUs, cores and memory of this rank -------------------------------------------------------------------------


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 1, 0), (3, 1, 0), (3, 8, 3), (0, 8, 0)])
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_sees(local_rank, visible, number):
    assert device_number(local_rank, visible) == number


def test_a_rank_without_a_gpu_is_refused():
    with pytest.raises(UserError, match="rank 4 of this machine has no GPU: 4 are visible; start fewer ranks"):
        device_number(4, 4)


@pytest.mark.parametrize(
    ("cores", "environment", "share"),
    [
        (32, {"WORLD_SIZE": "8"}, 4),
        (32, {"WORLD_SIZE": "64", "LOCAL_SIZE": "8"}, 4),  # 8 machines
        (2, {"WORLD_SIZE": "8"}, 1),
        (4, {"WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "32"}, 4),  # SLURM has bound each task to 4 of the job's cores
        (32, {"WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "32"}, 4),  # all tasks share the job's cores
        (64, {"WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "32"}, 4),  # without a cgroup more are visible than the job has
    ],
)
def test_the_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch, cores, environment, share):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert cores_per_rank() == share


START = """
import os
import torch
import deepspeed
from common import runtime
from deepspeed.accelerator import get_accelerator
accelerator, seen = get_accelerator(), []
accelerator.device_name = lambda number=None: "cuda" if number is None else f"cuda:{number}"
accelerator.device_count = lambda: 1
accelerator.set_device = seen.append
deepspeed.init_distributed = lambda **_: seen.append(os.environ["LOCAL_RANK"])
process = runtime.init_process()
print(seen, process.local_rank, process.device, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


def test_a_rank_that_sees_one_gpu_tells_deepspeed_and_takes_its_share_of_the_cores():
    """Before DeepSpeed joins the ranks: it takes the device's number from LOCAL_RANK."""
    place = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_SIZE": "4", "MASTER_PORT": "1"}
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu", **place}
    done = subprocess.run([sys.executable, "-c", START], env=env, capture_output=True, text=True)
    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert done.stdout.endswith(f"[0, '0'] 3 cuda:0 {share} {share}\n"), done.stdout + done.stderr


def test_the_users_number_of_threads_is_kept(ranks):
    import torch

    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1, "the tests set it"


V2 = {"max": "memory.max", "used": "memory.current"}
V1 = {"max": "memory.limit_in_bytes", "used": "memory.usage_in_bytes"}


def write_group(folder, names, limit, used, stat=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["max"]).write_text(f"{limit}\n")
    (folder / names["used"]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_a_cgroup_and_all_its_parents_limit_the_memory(tmp_path):
    write_group(tmp_path / "slurm" / "job" / "step", V2, "max", 300)
    write_group(tmp_path / "slurm" / "job", V2, 1000, 900, "anon 100\ninactive_file 250\nactive_file 7\n")
    write_group(tmp_path / "slurm", V2, 5000, 1000)
    assert cgroup_room("0::/slurm/job/step\n", tmp_path) == 1000 - 900 + 250
    assert cgroup_room("0::/slurm\n", tmp_path) == 4000
    assert cgroup_room("0::/\n", tmp_path) == float("inf")


def test_the_older_cgroups_and_containers_limit_it_too(tmp_path):
    write_group(tmp_path / "memory" / "job", V1, 800, 500, "inactive_file 1\ntotal_inactive_file 100\n")
    write_group(tmp_path / "memory", V1, 9223372036854771712, 10**9)
    text = "5:cpu:/job\n4:memory:/job\n0::/\n"
    assert cgroup_room(text, tmp_path) == 400
    write_group(tmp_path / "memory", V1, 700, 600)
    assert cgroup_room("4:hugetlb,memory:/docker/not/here\n", tmp_path) == 100, "a container sees only its own top"


def test_the_smaller_of_machine_and_cgroup_is_free(monkeypatch):
    files = {("", "meminfo"): b"MemTotal: 9 kB\nMemAvailable:       8 kB\n", ("self", "cgroup"): b"0::/x\n"}
    monkeypatch.setattr(runtime, "_proc", lambda pid, name: files[pid, name])
    for room, free in ((5000, 5000), (9000, 8192), (float("inf"), 8192)):
        monkeypatch.setattr(runtime, "cgroup_room", lambda text, room=room: room if text == "0::/x\n" else None)
        assert free_memory() == free


# ---- the CUDA allocator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, ALLOCATOR, *OLD_ALLOCATOR])
def test_cuda_segments_may_grow_unless_the_user_has_set_the_allocator(own, monkeypatch):
    monkeypatch.setattr(os, "environ", {own: "max_split_size_mb:64"} if own else {})
    let_segments_grow()
    assert os.environ.get(ALLOCATOR) == {None: "expandable_segments:True", ALLOCATOR: "max_split_size_mb:64"}.get(own)


@pytest.mark.long
def test_torch_reads_the_allocators_setting_under_that_name_and_only_then():
    """In the pinned torch, at the first use of the allocator: setting it after `import torch` is early enough."""
    body = "import torch; from common.runtime import let_segments_grow as grow; grow()"
    body += "; print(torch._C._accelerator_getAllocatorSettings())"
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "expandable_segments:True", done.stderr


@pytest.mark.long
def test_bf16_on_a_cpu_does_without_amx():
    """Some virtual machines advertise AMX where it does not work, and a bf16 product kills the process."""
    body = (
        "from common import runtime; import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a).sum());"
        "torch.nn.functional.conv2d(torch.ones(4, 64, 32, 32), torch.ones(64, 64, 3, 3))"  # oneDNN on any processor
    )
    env = support.environment(PYTHONPATH=str(support.ROOT / "finetune"), ONEDNN_VERBOSE="1")
    env.pop("ONEDNN_MAX_CPU_ISA", None)
    done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "tensor(262144." in done.stdout, done
    assert "oneDNN v" in done.stdout and "AMX" not in done.stdout
