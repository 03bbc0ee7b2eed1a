"""Kill it, stop it, start it again: the result of Llama MoT is the uninterrupted run's, bit for bit."""

import shutil

import pytest

from helpers import faults, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

# 112 clips in micro-batches of 5 to 7: the 15 steps cross epochs, and dropout, average and evaluation are state.
JOB = (
    "--untie all --layout flat --precision fp32 --lr 3e-3 --warmup 2 --steps 15 --micro-tokens 900 --ema 0.9 "
    "--samples 0 --text-dropout 0.3 --eval-every 5 --save-every 5"
).split()


SCRIPT = support.ROOT / "finetune" / "llama_mot.py"


def job(run, ds) -> list[str]:
    return ["--ds", str(support.ROOT / "ds_configs" / f"{ds}.json"), *JOB, "--out", str(run)]


def start(run, ds):
    return support.start_ranks(SCRIPT, job(run, ds))


@pytest.fixture(scope="module")
def whole(demo_mot, tmp_path_factory):
    """whole(ds) -> the same run, never interrupted."""
    made = {}

    def run(ds):
        if ds not in made:
            made[ds] = tmp_path_factory.mktemp("whole") / ds
            codes, outputs = support.finish(start(made[ds], ds))
            assert codes == [0, 0], outputs[0][-3000:]
        return made[ds]

    return run


@pytest.mark.quick
def test_kill_9_of_a_rank_ends_the_other_and_a_resume_equals_never_killed(whole, tmp_path):
    expected, run = whole("zero2"), tmp_path / "run"
    faults.kill_one(faults.start_and_halt(SCRIPT, job(run, "zero2"), run, step=7, saved=5), run)
    codes, outputs = support.finish(start(run, "zero2"))
    assert codes == [0, 0], outputs[0][-3000:]
    assert f"resuming after step 5 from {run}/checkpoints/step-00000005" in outputs[0]
    faults.assert_same_run(run, expected)


def test_kill_9_of_all_ranks_of_zero3_and_a_half_written_checkpoint_is_never_taken(whole, tmp_path):
    """As a kill while it is written leaves it: a folder under its temporary name, or one that index.json lacks."""
    expected, run = whole("zero3"), tmp_path / "run"
    faults.kill_all(faults.start_and_halt(SCRIPT, job(run, "zero3"), run, step=11, saved=10), run)
    folder = run / "checkpoints"
    half = folder / ".step-00000015.tmp"
    shutil.copytree(folder / "step-00000010", half, dirs_exist_ok=True)
    (half / "manifest.json").unlink()
    shutil.copytree(folder / "step-00000005", folder / "step-00000012")
    codes, outputs = support.finish(start(run, "zero3"))
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 10" in outputs[0]
    faults.assert_same_run(run, expected)
