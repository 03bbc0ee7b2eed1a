"""Kill it, stop it, start it again: the result is the uninterrupted run's, bit for bit."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common import checkpoint
from helpers import faults, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# Dropout, average and evaluation are on: each of them is state that a resume could lose.
JOB = (
    "--lora-groups attn --lora-rank 4 --lora-dropout 0.1 --precision fp32 --lr 3e-3 --warmup 2 --steps 40 "
    "--micro-tokens 400 --ema 0.9 --samples 0 --eval-every 10 --save-every 10"
).split()


def job(run, ds="ds_configs/zero2.json") -> list[str]:
    return ["--ds", str(support.ROOT / ds), *support.TINY_DIA, *JOB, "--out", str(run)]


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """The same run, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def deepspeed(words) -> subprocess.Popen:
    return subprocess.Popen(
        # Started in the background, a shell ignores SIGINT and so would everything below it.
        ["env", "--default-signal=INT", "deepspeed", "--num_accelerators", "2", "--master_port", support.free_port()]
        + [str(support.ROOT / "finetune" / "dia_lora.py"), *words],
        env=support.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch_sh(words) -> subprocess.Popen:
    return subprocess.Popen(
        ["env", "--default-signal=INT", support.ROOT / "launch.sh", "dia_lora", *words],
        env=support.environment(AUDIO_FINETUNE_ENV=support.VENV),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("start", [pytest.param(launch_sh, marks=pytest.mark.quick), deepspeed])
def test_kill_9_of_a_rank_then_resume_equals_never_killed(whole, tmp_path, start):
    run = tmp_path / "run"
    started = start(job(run))
    support.wait_for_step(run, 14)
    faults.wait_for_checkpoint(run, 10)
    os.kill(faults.job_processes(run)["rank 1"], signal.SIGKILL)
    output, _ = started.communicate(timeout=300)
    assert started.returncode != 0, output[-2000:]
    faults.assert_no_orphans(run)
    saved = checkpoint.read_index(run / "checkpoints")[-1]["step"]  # 10, or later if this process had to wait
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0], outputs[0][-3000:]
    assert f"resuming after step {saved} from {run}/checkpoints/step-{saved:08d}" in outputs[0]
    faults.assert_same_run(run, whole)


def test_a_run_that_gets_every_signal_everywhere_ends_as_if_it_got_none(demo, tmp_path):
    """Each stops all ranks at the same step with a checkpoint of it, code 75 and no process left; the next start goes
    on from there. DeepSpeed's own runner and launcher (of the command `deepspeed`) die of most of them without a word
    to the ranks, and have codes of their own."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    words = "--steps 260 --save-every 40 --eval-every 130".split()  # far more than are trained before the last signal
    codes, outputs = support.run_recipe(*job(whole), *words)
    assert codes == [0, 0], outputs[0][-3000:]
    stopped = 0
    for target in ("launch.sh", "runner", "launcher", "rank 0", "rank 1"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            if target == "rank 0" and number != signal.SIGINT:
                continue  # as rank 1
            by_deepspeed = target in ("runner", "launcher")
            flags = [*job(run), *words]
            started = deepspeed(flags) if by_deepspeed else launch_sh(flags)
            support.wait_for_step(run, stopped + 1)
            pid = {"launch.sh": started.pid, **faults.job_processes(run)}[target]
            os.kill(pid, number)
            if target == "launch.sh":
                time.sleep(0.1)
                os.kill(pid, number)  # an impatient user
            output, _ = started.communicate(timeout=300)
            assert by_deepspeed or started.returncode == 75, f"{target} {number!r}:\n{output[-3000:]}"
            faults.assert_no_orphans(run)
            last = support.metrics(run)[-1]
            assert last["event"] == "preempted" and last["step"] > stopped, f"{target} {number!r}: {last}"
            stopped = last["step"]
            assert checkpoint.read_index(run / "checkpoints")[-1]["step"] == stopped
    codes, outputs = support.run_recipe(*job(run), *words)
    assert codes == [0, 0] and f"resuming after step {stopped}" in outputs[0], outputs[0][-3000:]
    faults.assert_same_run(run, whole)


def test_a_killed_launch_sh_leaves_no_job_and_a_second_run_in_the_folder_is_refused(demo, tmp_path):
    run = tmp_path / "run"
    words = [*job(run), "--steps", "5000", "--save-every", "5000", "--eval-every", "0"]
    started = launch_sh(words)
    support.wait_for_step(run, 2)
    codes, [output] = support.run_recipe(*words, world=1)
    assert codes == [2] and f"--out {run} is in use by a run that has not ended" in output
    os.kill(started.pid, signal.SIGKILL)
    faults.assert_no_orphans(run)
    last = support.metrics(run)[-1]
    assert last["event"] == "preempted" and last["step"] > 2
    assert checkpoint.read_index(run / "checkpoints")[-1]["step"] == last["step"]


def test_a_closed_terminal_stops_the_run_in_order(demo, tmp_path):
    """SIGHUP, and nothing can be printed any more."""
    run = tmp_path / "run"
    master, terminal = os.openpty()
    environment = support.environment(AUDIO_FINETUNE_ENV=support.VENV)
    started = subprocess.Popen(
        # Below nohup it would be deaf to it.
        ["env", "--default-signal=HUP", support.ROOT / "launch.sh", "dia_lora", *job(run), "--steps", "5000"]
        + ["--save-every", "5000"],
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    support.wait_for_step(run, 2)
    os.close(master)
    started.send_signal(signal.SIGHUP)
    assert started.wait(timeout=300) == 75
    faults.assert_no_orphans(run)
    assert support.metrics(run)[-1]["event"] == "preempted"


def drain(master: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(master, 4096):
            pass


def test_a_stalled_rank_ends_the_job_with_the_stacks_of_all(demo, tmp_path):
    run = tmp_path / "run"
    words = [*job(run), "--hang-timeout", "20", "--steps", "5000", "--save-every", "0", "--eval-every", "0"]
    ranks = support.start_ranks(support.ROOT / "finetune" / "dia_lora.py", words)
    support.wait_for_step(run, 3)
    ranks[1].send_signal(signal.SIGSTOP)
    output, _ = ranks[0].communicate(timeout=180)  # not the 30 minutes of the collectives
    ranks[1].send_signal(signal.SIGCONT)
    late, _ = ranks[1].communicate(timeout=120)
    # The stalled rank may notice first that its peer is gone, or that its own time is up.
    ends = (("Timeout (0:00:20)!",), ("Timeout (0:00:20)!", "Connection closed by peer"))
    for rank, text, reasons in zip(ranks, (output, late), ends, strict=True):
        assert rank.returncode == 1 and any(reason in text for reason in reasons), text[-2000:]
        assert re.search(r'File ".*/dia_lora.py", line \d+,? in train', text), text[-2000:]


def test_another_number_of_ranks_goes_on_with_the_same_samples(whole, tmp_path):
    """2 ranks -> 1 rank with twice the accumulation -> 2 ranks."""
    run = tmp_path / "run"
    script = support.ROOT / "finetune" / "dia_lora.py"
    faults.kill_all(faults.start_and_halt(script, job(run), run, step=11, saved=10), run)
    words = [*job(run), "--accumulation", "2"]
    [alone] = faults.start_and_halt(script, words, run, step=21, saved=20, world=1)
    alone.send_signal(signal.SIGTERM)
    _, [output] = support.finish([alone])
    assert "ranks: 2 then, 1 now" in output and alone.returncode == 75, output[-3000:]
    codes, outputs = support.run_recipe(*job(run))
    assert codes == [0, 0] and "ranks: 1 then, 2 now" in outputs[0], outputs[0][-3000:]
    mine, expected = ([r["loss"] for r in support.step_records(folder)] for folder in (run, whole))
    assert np.allclose(mine, expected, atol=1e-5)
    mine, expected = (load_file(folder / "export" / "adapter_model.safetensors") for folder in (run, whole))
    assert all(torch.allclose(mine[name], expected[name], atol=1e-5) for name in expected)


def test_secrets_are_nowhere_in_what_a_run_leaves(demo, tmp_path):
    """In the environment and, by a user's mistake, in a path; a mistake is reported without it as well."""
    secret = "hf_" + "Zq7" * 9
    (tmp_path / secret).mkdir()
    (tmp_path / secret / "tags.json").write_text("{}")
    words = [*job(tmp_path / "run"), "--steps", "2", "--save-every", "1", "--tag-map"]
    os.environ["HF_TOKEN"] = secret
    try:
        codes, [output] = support.run_recipe(*words, tmp_path / secret / "tags.json", world=1)
        assert codes == [0], output[-3000:]
        again, [error] = support.run_recipe(*words, tmp_path / secret / "none.json", world=1)
        assert again == [2] and "<HF_TOKEN>/none.json" in error
    finally:
        del os.environ["HF_TOKEN"]
    assert secret not in output + error
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert b"<HF_TOKEN>/tags.json" in (tmp_path / "run" / "config.json").read_bytes()
