"""CMGAN killed and stopped, and started again: both networks end as if nothing had happened, bit for bit."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from common import checkpoint
from helpers import support
from helpers.faults import (
    assert_half_a_save_is_never_chosen,
    assert_no_orphans,
    kill_all,
    kill_all_while_saving,
    processes_of,
    start_and_halt,
)

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SCRIPT = support.ROOT / "finetune" / "cmgan.py"
# Dropout, average, gate, evaluation: each is state that a resume could lose.
JOB = (
    "--channels 4 --seconds 0.3 --micro-batch 1 --steps 8 --lr 1e-3 --ema 0.9 --hold-out dov --eval-every 4 "
    "--save-every 2 --samples 0 --gan-gate on --noisy-term on --no-gradient-checkpointing"
).split()


def job(run, pairs) -> list[str]:
    return ["--ds", str(support.ROOT / "ds_configs/zero2.json"), "--data", str(pairs), *JOB, "--out", str(run)]


def run_ranks(run, pairs):
    return support.run_recipe(*job(run, pairs), recipe="cmgan")


@pytest.fixture(scope="module", autouse=True)
def small_probe():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in support.patched("models.cmgan.watch=helpers.cmgan_support:small_probe").items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def pairs(pairs, tmp_path_factory):
    return support.cut_pairs(pairs, tmp_path_factory.mktemp("cut") / "pairs", held_out=1)


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    """The same run, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def assert_same_run(run, whole) -> None:
    timed = {"step_s", "data_wait_s", "tokens_per_s", "rss_gb", "pesq_wait_s", "stall_s", "path", "checkpoint"}
    history = [
        [{k: v for k, v in r.items() if k not in timed} for r in support.metrics(folder) if kept(r)]
        for folder in (run, whole)
    ]
    assert history[0] == history[1]
    for name in ("generator", "discriminator"):
        mine, expected = (load_file(folder / "export" / f"{name}.safetensors") for folder in (run, whole))
        assert set(mine) == set(expected) and all(torch.equal(mine[key], expected[key]) for key in expected)
    final = [folder / "checkpoints" / "step-00000008" for folder in (run, whole)]
    checkpoint.allow_list()
    for name in ("g", "d"):
        mine, expected = (
            torch.load(path / name / "mp_rank_00_model_states.pt", weights_only=True)["module"] for path in final
        )
        assert all(torch.equal(mine[key], expected[key]) for key in expected)
    states = [json.loads((path / "trainer_state.json").read_text())["loop_state"] for path in final]
    assert states[0] == states[1] and states[0]["gan_ramp"]["level"] > 0 and states[0]["labels"] == 16


def kept(record) -> bool:
    return record.get("event") in (None, "eval", "alarm", "gan_gate", "done")


@pytest.mark.quick
def test_killed_in_a_step_and_again_while_saving_it_ends_as_if_never_killed(whole, pairs, tmp_path):
    run = tmp_path / "run"
    ranks = start_and_halt(SCRIPT, job(run, pairs), run, step=5, saved=4)
    assert len(processes_of(run)) >= 4  # two ranks, each with a scorer
    kill_all(ranks, run)
    outputs = kill_all_while_saving(SCRIPT, job(run, pairs), run, 8)
    assert f"resuming after step 4 from {run}/checkpoints/step-00000004" in outputs[0]
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 6 " in outputs[0], "half a checkpoint is none"
    assert_same_run(run, whole)


def test_sigterm_to_one_rank_saves_both_networks_and_resumes(whole, pairs, tmp_path):
    run = tmp_path / "run"
    ranks = start_and_halt(SCRIPT, job(run, pairs), run, step=6)
    ranks[1].send_signal(signal.SIGTERM)
    codes, outputs = support.finish(ranks)
    assert codes == [75, 75], outputs[0][-3000:]
    assert_no_orphans(run)
    (stopped,) = [r["step"] for r in support.metrics(run) if r.get("event") == "preempted"]
    assert 6 < stopped < 8 and {"g", "d"} <= {
        path.name for path in (run / "checkpoints" / f"step-{stopped:08d}").iterdir()
    }
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0], outputs[0][-3000:]
    assert f"resuming after step {stopped}" in outputs[0]
    assert_same_run(run, whole)


def test_a_kill_at_any_point_of_a_save_leaves_the_last_whole_checkpoint(whole, tmp_path):
    assert_half_a_save_is_never_chosen(whole, tmp_path)


def test_another_number_of_ranks_goes_on_with_the_same_samples(whole, pairs, tmp_path):
    """2 ranks -> 1 rank with twice the accumulation -> 2 ranks: weights, average, moments and running statistics."""
    run = tmp_path / "run"
    kill_all(start_and_halt(SCRIPT, job(run, pairs), run, step=3, saved=2), run)
    alone = start_and_halt(SCRIPT, [*job(run, pairs), "--accumulation", "2"], run, step=7, saved=6, world=1)
    kill_all(alone, run)
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0] and "ranks: 1 then, 2 now" in outputs[0], outputs[0][-3000:]
    resumed = [r["step"] for r in support.metrics(run) if r.get("event") == "resume"]
    assert resumed == [2, 6]
    for key in ("loss", "loss_d", "grad_norm", "grad_norm_d"):
        mine, expected = ([r[key] for r in support.step_records(folder)] for folder in (run, whole))
        assert mine == pytest.approx(expected, abs=1e-5), key
    for name in ("generator", "discriminator"):
        mine, expected = (load_file(folder / "export" / f"{name}.safetensors") for folder in (run, whole))
        worst = {key: float((mine[key] - expected[key]).abs().max()) for key in expected}
        assert max(worst.values()) <= 1e-5, max(worst, key=worst.get)


def test_another_setting_of_the_networks_is_refused(whole, pairs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    words = job(run, pairs)
    words[words.index("--channels") + 1] = "8"
    codes, outputs = support.finish(support.start_ranks(SCRIPT, words, world=1))
    assert codes == [2] and "belongs to another run" in outputs[0] and "channels: 4 then, 8 now" in outputs[0]
