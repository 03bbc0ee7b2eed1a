"""Kill the Higgs recipe, also while it saves, and start it again: the result is the uninterrupted run's, bitwise."""

import json
import shutil

import pytest

from helpers import faults, support

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SCRIPT = support.ROOT / "finetune" / "higgs_clone.py"
# Dropout, average, evaluation and samples are on: each of them is state that a resume could lose.
JOB = (
    "--preset attn+audio --lora-rank 4 --lora-dropout 0.1 --io none --precision fp32 --lr 3e-3 --warmup 2 --steps 12 "
    "--micro-tokens 900 --accumulation 2 --ema 0.9 --samples 1 --eval-every 6 --save-every 4 "
    "--max-start-loss 0"
).split()


@pytest.fixture(scope="module")
def job(higgs_demo, tmp_path_factory):
    """job(run) -> its flags. The samples' codec is nowhere, so no process decodes them, which would take longest."""
    data = tmp_path_factory.mktemp("data") / "tokens"
    shutil.copytree(higgs_demo / "tokens/eval", data)
    facts = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(facts | {"weights": None}))
    words = ["--ds", str(support.ROOT / "ds_configs/zero2.json"), *JOB, "--model", str(higgs_demo / "model")]
    words += ["--data", str(higgs_demo / "tokens/train"), "--eval-data", str(data)]
    return lambda run: [*words, "--out", str(run)]


@pytest.mark.quick
def test_killed_in_a_step_and_again_while_saving_it_ends_as_if_never_killed(job, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    codes, outputs = support.finish(support.start_ranks(SCRIPT, job(whole)))
    assert codes == [0, 0], outputs[0][-3000:]
    assert sorted(path.name for path in (whole / "samples").glob("step-*")) == [f"step-{n:08d}" for n in (0, 6, 12)]
    faults.kill_one(faults.start_and_halt(SCRIPT, job(run), run, step=5, saved=4), run)
    outputs = faults.kill_all_while_saving(SCRIPT, job(run), run, 8)
    assert "resuming after step 4" in outputs[0]
    codes, outputs = support.finish(support.start_ranks(SCRIPT, job(run)))
    assert codes == [0, 0], outputs[0][-3000:]
    assert "resuming after step 6 " in outputs[0], "half a checkpoint is none; step 6 was the best"
    faults.assert_same_run(run, whole)
