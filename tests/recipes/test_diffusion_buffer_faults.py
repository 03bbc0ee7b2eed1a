"""The Diffusion Buffer killed and stopped, and started again: the result is the uninterrupted run's, bit for bit."""

import json
import shutil
import signal
import time

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
    start_and_halt,
)

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SCRIPT = support.ROOT / "finetune" / "diffusion_buffer.py"
# Average, tracked levels, accumulation and a plateau are on: each of them is state that a resume could lose.
SPEC = '{"width": 8, "frames": 16, "buffer": 6, "level": "track"}'
JOB = (
    "--micro-batch 2 --accumulation 2 --steps 9 --lr 1e-3 --ema 0.9 --precision fp32 --hold-out dov "
    "--eval-every 3 --save-every 3 --samples 0 --best-by lsd --schedule plateau"
).split()


def job(run, pairs) -> list[str]:
    return [
        "--ds",
        str(support.ROOT / "ds_configs/zero2.json"),
        "--data",
        str(pairs),
        *JOB,
        "--spec",
        SPEC,
        "--out",
        str(run),
    ]


def run_ranks(run, pairs):
    return support.run_recipe(*job(run, pairs), recipe="diffusion_buffer")


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
    timed = {"step_s", "data_wait_s", "tokens_per_s", "rss_gb"}
    last = [folder / "checkpoints" / "step-00000009" for folder in (run, whole)]
    states = [json.loads((path / "trainer_state.json").read_text()) for path in last]
    assert all(states[0][name] == states[1][name] for name in ("loop_state", "best")) and states[0]["best"] is not None
    history = [
        [
            {k: v for k, v in r.items() if k not in timed}
            for r in support.metrics(folder)
            if r.get("event") in (None, "eval", "latency", "done")
        ]
        for folder in (run, whole)
    ]
    assert history[0] == history[1]
    mine, expected = (load_file(folder / "export" / "model.safetensors") for folder in (run, whole))
    assert set(mine) == set(expected) and all(torch.equal(mine[name], expected[name]) for name in expected)
    final = [checkpoint.masters(path) for path in last]
    assert final[0].keys() == final[1].keys() and all(torch.equal(final[0][n], final[1][n]) for n in final[0])


@pytest.mark.quick
def test_killed_in_a_step_and_again_while_saving_it_ends_as_if_never_killed(whole, pairs, tmp_path):
    run = tmp_path / "run"
    kill_all(start_and_halt(SCRIPT, job(run, pairs), run, step=4, saved=3), run)
    outputs = kill_all_while_saving(SCRIPT, job(run, pairs), run, 6)
    assert f"resuming after step 3 from {run}/checkpoints/step-00000003" in outputs[0]
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 3 " in outputs[0], "half a checkpoint is none"
    assert_same_run(run, whole)


def test_a_signal_stops_all_ranks_at_one_step_another_shows_where_they_are(whole, pairs, tmp_path):
    run = tmp_path / "run"
    ranks = start_and_halt(SCRIPT, job(run, pairs), run, step=2)
    stacks = run / "stacks-00001.txt"
    ranks[1].send_signal(signal.SIGUSR2)
    while "diffusion_buffer.py" not in (stacks.read_text() if stacks.exists() else ""):
        assert ranks[1].poll() is None
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGTERM)
    codes, outputs = support.finish(ranks)
    assert codes == [75, 75], outputs[0][-3000:]
    assert_no_orphans(run)
    (stopped,) = [r["step"] for r in support.metrics(run) if r.get("event") == "preempted"]
    assert 2 < stopped < 9
    codes, outputs = run_ranks(run, pairs)
    assert codes == [0, 0] and f"resuming after step {stopped}" in outputs[0], outputs[0][-3000:]
    assert_same_run(run, whole)


def test_a_kill_at_any_point_of_a_save_leaves_the_last_whole_checkpoint(whole, tmp_path):
    assert_half_a_save_is_never_chosen(whole, tmp_path)


@pytest.mark.parametrize(
    ("split", "world"), [(["--micro-batch", "1", "--accumulation", "4"], 2), (["--micro-batch", "4"], 1)]
)
def test_another_diffusion_is_refused_and_another_split_is_not(whole, pairs, tmp_path, split, world):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    words = job(run, pairs)
    codes, outputs = support.run_recipe(
        *words, "--spec", SPEC.replace("}", ', "sde_c": 0.52}'), world=1, recipe="diffusion_buffer"
    )
    assert codes == [2] and "belongs to another run (spec: " in outputs[0]
    # the checkpoint of step 6 with the same crops in other micro-batches or ranks: the same losses to rounding
    shutil.rmtree(run / "checkpoints" / "step-00000009")
    entries = checkpoint.read_index(run / "checkpoints")
    checkpoint.write_json(run / "checkpoints" / "index.json", {"checkpoints": [e for e in entries if e["step"] < 9]})
    codes, outputs = support.run_recipe(*words, *split, world=world, recipe="diffusion_buffer")
    assert not any(codes) and "resuming after step 6" in outputs[0], outputs[0][-3000:]
    losses = [[r["loss"] for r in support.step_records(folder)] for folder in (run, whole)]
    assert losses[0][:6] == losses[1][:6] and losses[0][6:] == pytest.approx(losses[1][6:], abs=1e-6)
