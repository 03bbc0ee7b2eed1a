"""Kill the Higgs recipe, also while it saves, and start it again: the result is the uninterrupted run's, bitwise."""

import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from helpers import faults, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# Dropout, average, evaluation and samples are on: each of them is state that a resume could lose.
JOB = (
    "--preset attn+audio --lora-rank 4 --lora-dropout 0.1 --io none --precision fp32 --lr 3e-3 --warmup 2 --steps 24 "
    "--micro-tokens 900 --accumulation 2 --ema 0.9 --samples 1 --sample-frames 6 --eval-every 8 --save-every 8"
).split()


def job(run) -> list[str]:
    return ["--ds", str(support.ROOT / "ds_configs/zero2.json"), *JOB, "--out", str(run)]


@pytest.fixture(scope="module")
def whole(higgs_demo, tmp_path_factory):
    """The same run, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = support.run_recipe(*job(run), recipe="higgs_clone")
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def assert_same_run(run, whole) -> None:
    fields = ("step", "event", "epoch", "loss", "lr", "grad_norm", "tokens", "gap", "end_loss", "stop_rate")
    kinds = (None, "eval", "done")
    history = [
        [{k: r[k] for k in fields if k in r} for r in support.metrics(folder) if r.get("event") in kinds]
        for folder in (run, whole)
    ]
    assert history[0] == history[1]
    mine, expected = (load_file(folder / "export" / "adapter_model.safetensors") for folder in (run, whole))
    assert set(mine) == set(expected)
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def deepspeed(run) -> subprocess.Popen:
    return subprocess.Popen(
        ["deepspeed", "--num_accelerators", "2", "--master_port", support.free_port()]
        + [str(support.ROOT / "finetune" / "higgs_clone.py"), *job(run)],
        env=support.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.quick
def test_killed_in_a_step_and_again_while_saving_it_ends_as_if_never_killed(whole, tmp_path):
    run = tmp_path / "run"
    started = deepspeed(run)
    support.wait_for_step(run, 11)
    faults.wait_for_checkpoint(run, 8)
    killed = time.time()
    os.kill(faults.job_processes(run)["rank 1"], signal.SIGKILL)
    output, _ = started.communicate(timeout=60)
    assert started.returncode != 0, output[-2000:]
    assert time.time() - killed < 15
    faults.assert_no_orphans(run)

    draft = run / "checkpoints" / ".step-00000016.tmp"
    started = deepspeed(run)
    deadline = time.time() + 120
    while not (draft.is_dir() and list(draft.rglob("*.pt"))):  # the first shard is being written
        assert time.time() < deadline and started.poll() is None
        time.sleep(0.002)
    for name, pid in faults.job_processes(run).items():
        if name.startswith("rank"):
            os.kill(pid, signal.SIGKILL)
    output, _ = started.communicate(timeout=60)
    assert "resuming after step 8" in output
    faults.assert_no_orphans(run)

    codes, outputs = support.run_recipe(*job(run), recipe="higgs_clone")
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 8" in outputs[0] or "resuming after step 16" in outputs[0]
    assert_same_run(run, whole)
    shutil.rmtree(run)
