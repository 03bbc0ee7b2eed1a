"""Kill the Higgs recipe, also while it saves, and start it again: the result is the uninterrupted run's, bitwise."""

import pytest

from helpers import faults, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SCRIPT = support.ROOT / "finetune" / "higgs_clone.py"
# Dropout, average, evaluation and samples are on: each of them is state that a resume could lose.
JOB = (
    "--preset attn+audio --lora-rank 4 --lora-dropout 0.1 --io none --precision fp32 --lr 3e-3 --warmup 2 --steps 24 "
    "--micro-tokens 900 --accumulation 2 --ema 0.9 --samples 1 --sample-frames 6 --eval-every 12 --save-every 8"
).split()


def job(run) -> list[str]:
    return ["--ds", str(support.ROOT / "ds_configs/zero2.json"), *JOB, "--out", str(run)]


@pytest.fixture(scope="module")
def whole(higgs_demo, tmp_path_factory):
    """The same run, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    codes, outputs = support.finish(start(run))
    assert codes == [0, 0], outputs[0][-3000:]
    return run


def start(run):
    return support.start_ranks(SCRIPT, job(run))


@pytest.mark.quick
def test_killed_in_a_step_and_again_while_saving_it_ends_as_if_never_killed(whole, tmp_path):
    run = tmp_path / "run"
    faults.kill_one(faults.start_and_halt(SCRIPT, job(run), run, step=11, saved=8), run)
    outputs = faults.kill_all_while_saving(SCRIPT, job(run), run, 16)
    assert "resuming after step 8" in outputs[0]
    codes, outputs = support.finish(start(run))
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 12 " in outputs[0], "half a checkpoint is none; step 12 was the best"
    faults.assert_same_run(run, whole)
