"""Two nodes: launch.sh as a batch script on a real SLURM, with a signal, a time limit and a dead node; and the plain
deepspeed command on two machines with their own addresses."""

import functools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from helpers import faults, slurm_cluster, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

JOB = (
    "--lora-groups attn --lora-rank 4 --lora-dropout 0.1 --precision fp32 --lr 3e-3 --warmup 2 --steps 60 "
    "--micro-tokens 400 --ema 0.9 --samples 0 --eval-every 0 --save-every 20"
).split() + support.TINY_DIA


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.reason_to_skip():
        pytest.skip(reason)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "c") as (env, nodes, start_node):
        yield env | {"AUDIO_FINETUNE_ENV": support.VENV}, nodes, start_node


@pytest.fixture
def env(cluster):
    return cluster[0]


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """The same job with two ranks, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = support.run_recipe("--ds", "ds_configs/zero2.json", *JOB, "--out", run)
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def submit(env, run, *options, stage=2, ranks=1) -> str:
    """Submits the job and returns its id; its output goes next to the run folder."""
    words = ["--nodes=2", f"--output={run.parent}/job.out", *options, "dia_lora"]
    words += ["--ds", str(support.ROOT / f"ds_configs/zero{stage}.json"), *JOB, "--out", str(run)]
    words += ["--ranks", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [support.ROOT / "launch.sh", "slurm", *words], env=env, cwd=run.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return re.match(r"job (\d+):", done.stdout)[1]


def wait_for(env, job: str, *states: str, seconds: float = 600) -> str:
    slurm_cluster.wait_until(lambda: slurm_cluster.state(env, job) in states, seconds)
    return slurm_cluster.state(env, job)


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def resume_at_once(env, job: str) -> None:
    """Shortens the two minutes that SLURM holds a requeued job back; started at once, its nodes would refuse it."""
    slurm_cluster.wait_until(lambda: "Restarts=1" in slurm_cluster.run(env, "scontrol", "show", "job", job), 240)
    wait_for(env, job, "PENDING")
    slurm_cluster.run(env, "scontrol", "update", f"JobId={job}", "StartTime=now+3", "TimeLimit=10")


def assert_same(run, whole) -> None:
    weights, expected = (load_file(folder / "export" / "adapter_model.safetensors") for folder in (run, whole))
    assert set(weights) == set(expected)
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) <= 1e-6
    assert any(torch.count_nonzero(value) for name, value in weights.items() if "lora_B" in name)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_nodes_equal_one(env, whole, tmp_path, stage):
    run = tmp_path / "run"
    job = submit(env, run, stage=stage)
    assert wait_for(env, job, *ENDED) == "COMPLETED", (tmp_path / "job.out").read_text()[-3000:]
    if stage == 2:
        assert_same(run, whole)
    losses = [[record["loss"] for record in support.step_records(folder)] for folder in (run, whole)]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= 1e-4
    nodes = slurm_cluster.run(env, "scontrol", "show", "job", job)
    assert "NodeList=n[1-2]" in nodes


def test_a_signal_saves_requeues_and_resumes(env, whole, tmp_path):
    """Two ranks on one node, on which the job owns one core."""
    run = tmp_path / "run"
    job = submit(env, run, "--nodes=1", ranks=2)
    support.wait_for_step(run, 5)
    slurm_cluster.run(env, "scancel", "--signal=USR1", job)
    resume_at_once(env, job)
    assert wait_for(env, job, *ENDED) == "COMPLETED", (tmp_path / "job.out").read_text()[-3000:]
    output = (tmp_path / "job.out").read_text()
    (stopped,) = (r["step"] for r in support.metrics(run) if r.get("event") == "preempted")
    assert 5 <= stopped < 60 and f"resuming after step {stopped}" in output and f"requeueing job {job}" in output
    assert_same(run, whole)


def test_the_signal_before_the_time_limit_requeues_and_resumes(env, whole, tmp_path):
    """The limit is two minutes, the signal comes one minute before. The ranks would finish earlier, so they are paused
    until then. (On a slow machine the signal comes while they start, and stops them at step 0.)"""
    run, output = tmp_path / "run", tmp_path / "job.out"
    job = submit(env, run, "--time=2", "--signal=B:USR1@60")
    asked = functools.partial(was_asked_to_stop, output)
    slurm_cluster.wait_until(lambda: support.has_reached(run, 5) or asked(), 180)
    ranks = [] if asked() else rank_processes(run)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    slurm_cluster.wait_until(asked, 120)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    resume_at_once(env, job)
    assert wait_for(env, job, *ENDED) == "COMPLETED", output.read_text()[-3000:]
    assert_same(run, whole)


def was_asked_to_stop(output: Path) -> bool:
    return output.exists() and "asking the ranks to save and stop" in output.read_text()


def rank_processes(run) -> list[int]:
    """Process ids in rank order, without the shell and srun, whose command lines name the run too."""
    pids = {}
    for pid in faults.processes_of(run):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(support.PYTHON.encode()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            pids[next(word for word in variables if word.startswith(b"SLURM_PROCID="))] = pid
    return [pids[key] for key in sorted(pids)]


def test_a_dead_rank_fails_the_job_and_leaves_no_process_behind(env, whole, tmp_path):
    run = tmp_path / "run"
    job = submit(env, run)
    support.wait_for_step(run, 22)
    faults.wait_for_checkpoint(run, 20)
    os.kill(rank_processes(run)[1], signal.SIGKILL)
    assert wait_for(env, job, *ENDED, seconds=300) == "FAILED"
    faults.assert_no_orphans(run)
    codes, outputs = support.run_recipe("--ds", "ds_configs/zero2.json", *JOB, "--out", run)
    assert codes == [0, 0] and "resuming after step" in outputs[0], outputs[0][-3000:]
    assert_same(run, whole)


def test_a_job_survives_the_death_of_its_second_node(cluster, whole, tmp_path):
    """Everything on that machine dies at once: SLURM's daemon, its parent process of the task, and the rank."""
    env, nodes, start_node = cluster
    run = tmp_path / "run"
    job = submit(env, run)
    support.wait_for_step(run, 22)
    faults.wait_for_checkpoint(run, 20)
    rank = rank_processes(run)[1]
    task_parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"slurmstepd" in Path(f"/proc/{task_parent}/cmdline").read_bytes()
    for pid in (nodes["n2"].pid, task_parent, rank):
        os.kill(pid, signal.SIGKILL)
    nodes["n2"].wait()
    ended = wait_for(env, job, "FAILED", "NODE_FAIL", "PENDING", seconds=300)
    faults.assert_no_orphans(run)
    nodes["n2"] = start_node("n2")
    slurm_cluster.wait_until(lambda: slurm_cluster.run(env, "sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 300)
    if ended == "PENDING":  # SLURM noticed the dead node before the other rank did, and requeued the job itself
        resume_at_once(env, job)
    else:
        job = submit(env, run)
    assert wait_for(env, job, *ENDED) == "COMPLETED", (tmp_path / "job.out").read_text()[-3000:]
    assert "resuming after step" in (tmp_path / "job.out").read_text()  # 20, or later on a busy machine
    assert_same(run, whole)


def test_a_mistake_in_the_command_is_not_requeued(env, tmp_path):
    run = tmp_path / "run"
    job = submit(env, run, "--time=5", stage=9)
    assert wait_for(env, job, *ENDED) == "FAILED"
    assert "ds_configs/zero9.json: no such file" in (tmp_path / "job.out").read_text()


def test_an_array_of_encode_jobs_gives_the_same_as_one_command(env, demo, tmp_path):
    """The last job merges the parts; nothing is encoded twice."""
    source, codec = demo / "audio" / "train.jsonl", demo / "codec"
    words = ["--codec", "dac", "--codec-weights", codec, "--format", "jsonl", "--source", source]
    words += ["--workers", "1", "--out"]
    command = [support.ROOT / "launch.sh", "slurm", "--array=0-1", "--ntasks=1", "encode", *words, tmp_path / "array"]
    done = subprocess.run(list(map(str, command)), env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    array, last = re.findall(r"^job (\d+)", done.stdout, re.M)
    states = {job: wait_for(env, job, *ENDED) for job in (array, last)}
    outputs = {path.name: path.read_text() for path in sorted(tmp_path.glob("slurm-*.out"))}
    assert set(states.values()) == {"COMPLETED"}, outputs
    assert [name for name in outputs if name.startswith(f"slurm-{array}_")] == [
        f"slurm-{array}_{i}.out" for i in (0, 1)
    ]
    alone = [support.PYTHON, support.ROOT / "data" / "encode.py", *words, tmp_path / "alone"]
    subprocess.run(list(map(str, alone)), env=support.environment(), check=True, capture_output=True)
    merged, expected = (load_from_disk(str(tmp_path / name)) for name in ("array", "alone"))
    assert merged.sort("id").to_list() == expected.sort("id").to_list() and len(merged) > 2


# ---- DeepSpeed's own command on two machines -------------------------------------------------------------------


@pytest.fixture
def two_machines():
    """Two network namespaces with a virtual cable between them: (name, address) of each."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    machines = [(f"af{os.getpid()}{end}", f"10.77.0.{number}") for number, end in enumerate("ab", start=1)]

    def ip(*words) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name, _ in machines:
            ip("netns", "add", name)
        (first, _), (second, _) = machines
        ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
        for name, address in machines:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for name, _ in machines:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_deepspeed_without_ssh_on_two_machines_equals_one(two_machines, whole, tmp_path):
    """The command from the README, once on each machine."""
    run, hosts = tmp_path / "run", tmp_path / "hosts"
    hosts.write_text("".join(f"{address} slots=1\n" for _, address in two_machines))
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "deepspeed", "--hostfile", hosts, "--no_ssh", "--node_rank", str(number)]
            + ["--master_addr", two_machines[0][1], "--master_port", "29500", support.ROOT / "finetune" / "dia_lora.py"]
            + ["--ds", support.ROOT / "ds_configs/zero2.json", *JOB, "--out", run],
            env=support.environment(GLOO_SOCKET_IFNAME="wire"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, (name, _) in enumerate(two_machines)
    ]
    codes, outputs = support.finish(started)
    assert codes == [0, 0], outputs[0][-3000:]
    assert_same(run, whole)
