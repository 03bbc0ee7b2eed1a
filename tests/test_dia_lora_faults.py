"""Kill it, stop it, start it again: the result is the uninterrupted run's, bit for bit."""

import os
import signal
import subprocess
import time

import pytest
import support
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# Dropout, average and evaluation are on: each of them is state that a resume could lose.
JOB = (
    "--lora-groups attn --lora-rank 4 --lora-dropout 0.1 --precision fp32 --lr 3e-3 --warmup 2 --steps 40 "
    "--micro-tokens 400 --ema 0.9 --samples 0 --eval-every 10 --save-every 10"
).split()


def job(run, ds="ds_configs/zero2.json") -> list[str]:
    return ["--ds", str(support.ROOT / ds), *JOB, "--out", str(run)]


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """The same run, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def assert_same_run(run, whole, artifact="adapter_model.safetensors") -> None:
    fields = ("step", "event", "epoch", "loss", "lr", "grad_norm", "tokens", "text_gap", "eos_loss")
    history = [
        [
            {k: r[k] for k in fields if k in r}
            for r in support.metrics(folder)
            if r.get("event") in (None, "eval", "done")
        ]
        for folder in (run, whole)
    ]
    assert history[0] == history[1]
    mine, expected = (load_file(folder / "export" / artifact) for folder in (run, whole))
    assert set(mine) == set(expected)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def processes_of(run) -> list[str]:
    """Process ids whose command line names this run folder."""
    return subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True, check=False).stdout.split()


def rank_processes(run) -> list[int]:
    """The ranks themselves: `python -u .../dia_lora.py --local_rank=N`, not DeepSpeed's runner or launcher."""
    found = []
    for pid in processes_of(run):
        words = open(f"/proc/{pid}/cmdline").read().split("\0")
        if any(word.startswith("--local_rank=") for word in words) and "deepspeed.launcher.launch" not in words:
            found.append(int(pid))
    return found


def assert_no_orphans(run) -> None:
    deadline = time.time() + 35
    while processes_of(run):
        assert time.time() < deadline, processes_of(run)
        time.sleep(0.2)


def deepspeed(run) -> subprocess.Popen:
    return subprocess.Popen(
        ["deepspeed", "--num_accelerators", "2", "--master_port", support.free_port()]
        + [str(support.ROOT / "finetune" / "dia_lora.py"), *job(run)],
        env=support.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch_sh(run) -> subprocess.Popen:
    return subprocess.Popen(
        [support.ROOT / "launch.sh", "dia_lora", *job(run)],
        env=support.environment(AUDIO_FINETUNE_ENV=str(os.path.dirname(os.path.dirname(support.PYTHON)))),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_kill_9_of_a_rank_then_resume_equals_never_killed(whole, tmp_path):
    run = tmp_path / "run"
    started = deepspeed(run)
    support.wait_for_step(run, 14)
    killed = time.time()
    os.kill(rank_processes(run)[1], signal.SIGKILL)
    output, _ = started.communicate(timeout=60)
    assert started.returncode != 0, output[-2000:]
    assert time.time() - killed < 15
    assert_no_orphans(run)
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0], outputs[0][-3000:]
    assert f"going on after step 10 from {run}/checkpoints/step-00000010" in outputs[0]
    assert_same_run(run, whole)


def check_stop_and_resume(started, run, whole) -> None:
    output, _ = started.communicate(timeout=90)
    assert started.returncode == 75, output[-3000:]
    assert_no_orphans(run)
    stopped = [r["step"] for r in support.metrics(run) if r.get("event") == "preempted"]
    assert len(stopped) == 1 and stopped[0] < 40
    assert (run / "checkpoints" / f"step-{stopped[0]:08d}" / "manifest.json").exists()
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0], outputs[0][-3000:]
    assert f"going on after step {stopped[0]}" in outputs[0]
    assert_same_run(run, whole)


def test_sigterm_to_launch_sh_saves_on_all_ranks_and_resumes(whole, tmp_path):
    run = tmp_path / "run"
    started = launch_sh(run)
    support.wait_for_step(run, 3)
    started.send_signal(signal.SIGTERM)
    check_stop_and_resume(started, run, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_one_rank_stops_all_at_the_same_step_and_resumes(whole, tmp_path, number):
    run = tmp_path / "run"
    started = launch_sh(run)
    support.wait_for_step(run, 3)
    os.kill(rank_processes(run)[1], number)
    check_stop_and_resume(started, run, whole)
