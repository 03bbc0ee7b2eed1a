"""The run folder and what identifies a run."""

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from common.config import RunConfig
from common.errors import UserError
from common.runs import empty_folder, identity, make_writable, replace_folder, run_folder, write_config


@pytest.mark.parametrize(
    "field", ["lr", "seed", "accumulation", "micro_tokens", "precision", "max_grad_norm", "steps", "warmup"]
)
def test_what_changes_the_numbers_changes_the_identity(field, one_rank):
    other = {"precision": "fp32"}.get(field, 7)
    one, two = (identity(RunConfig(**flags), 2, one_rank, "abc") for flags in ({}, {field: other}))
    assert [name for name in one if one[name] != two[name]] == [field]


@pytest.mark.parametrize("field", ["out", "save_every", "keep", "ds"])
def test_what_does_not_may_change(field, one_rank):
    assert identity(RunConfig(**{field: 7}), 2, one_rank, "a") == identity(RunConfig(), 2, one_rank, "a")


def test_stage_ranks_and_data_are_part_of_it(one_rank):
    facts = identity(RunConfig(), 3, one_rank, {"data": "abc"})
    assert (facts["zero_stage"], facts["ranks"], facts["fingerprint"]) == (3, 1, {"data": "abc"})
    assert json.loads(json.dumps(facts)) == facts, "it is compared after a way through JSON"


def test_config_json_holds_what_a_repetition_needs(tmp_path):
    write_config(tmp_path / "run", "dia_lora", RunConfig(seed=5), {"zero_optimization": {"stage": 2}}, {"ranks": 2})
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["config"] == dataclasses.asdict(RunConfig(seed=5)) and written["ranks"] == 2
    assert {"torch", "deepspeed", "transformers", "peft"} <= set(written["versions"])
    assert len(written["git_commit"]) in (7, 40) and [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]


def write_checkpoint(run: Path, **state) -> None:
    """A checkpoint without weights, with this trainer state."""
    text = json.dumps({"step": 2, "best": None, "loop_state": {}, "threads": 1} | state)
    folder = run / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"trainer_state.json": digest}))


def test_a_forced_resume_warns_once(tmp_path, one_rank, capsys):
    from types import SimpleNamespace

    from common.runs import Run

    ds, config = {"zero_optimization": {"stage": 2}}, RunConfig(out=str(tmp_path), lr=1e-3, force_resume=True)
    write_checkpoint(tmp_path, identity=identity(dataclasses.replace(config, lr=2e-3), 2, one_rank, {"optimizer": {}}))
    run = Run("dia_lora", config, ds, one_rank, {"optimizer": {}}, steps=4)
    assert run.load({}, SimpleNamespace(decay=0)) == {}
    warning = "warning: --force-resume uses the checkpoint of another run (lr: 0.002 then, 0.001 now)"
    assert capsys.readouterr().out.count(warning) == 1


def test_a_run_that_resumes_with_other_threads_says_so(tmp_path, one_rank, capsys):
    """Bit equality holds between runs with the same number of threads: another number is another order of sums."""
    from common.runs import Run

    ds, config = {"zero_optimization": {"stage": 2}}, RunConfig(out=str(tmp_path))
    first = Run("dia_lora", config, ds, one_rank, {"optimizer": {}}, steps=4)
    assert json.loads((tmp_path / "config.json").read_text())["threads"] == torch.get_num_threads()
    for threads, said in ((7, True), (torch.get_num_threads(), False)):
        write_checkpoint(tmp_path, identity=first.identity, threads=threads)
        capsys.readouterr()
        assert Run("dia_lora", config, ds, one_rank, {"optimizer": {}}, steps=4).start_step == 2
        assert (f"{torch.get_num_threads()} threads per rank instead of 7" in capsys.readouterr().out) == said


def test_skipped_steps_are_kept_and_three_in_a_row_end_the_run(tmp_path, one_rank):
    from common.metrics import Meter
    from common.runs import Run

    batches = [{"ids": [name], "positions": 1, "input_ids": torch.arange(3)} for name in "ab"]
    ds, config = {"zero_optimization": {"stage": 2}}, RunConfig(out=str(tmp_path))
    run = Run("dia_lora", config, ds, one_rank, {"optimizer": {}}, steps=4)
    meter = Meter()
    meter.losses, meter.ids = [torch.tensor(float("nan"))], [["a"]]
    run.skip(1, meter, batches)
    run.skip(2, meter, batches)
    with pytest.raises(UserError, match="3 steps in a row"):
        run.skip(3, meter, batches)
    written = torch.load(tmp_path / "skipped" / "step-00000002.pt", weights_only=True)
    assert written["step"] == 2 and [batch["ids"] for batch in written["micro_batches"]] == [["a"], ["b"]]


def test_the_run_folder_is_out_or_named_after_recipe_and_time(one_rank):
    assert str(run_folder(RunConfig(out="a/b"), "dia_lora", one_rank)) == "a/b"
    assert str(run_folder(RunConfig(), "dia_lora", one_rank)).startswith("runs/dia_lora-20")


def test_a_folder_that_cannot_be_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--out .*file/run cannot be created \(Not a directory\)"):
        make_writable(tmp_path / "file" / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_folder_on_a_read_only_disk_is_a_sentence(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k,ro", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(UserError, match=f"--out {tmp_path} is not writable"):
            make_writable(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_folder_is_replaced_whole(tmp_path):
    draft, final = tmp_path / ".export.tmp", tmp_path / "export"
    for round_ in ("one", "two"):
        empty_folder(draft)
        (draft / round_).write_text("x")
        replace_folder(draft, final)
        assert [p.name for p in final.iterdir()] == [round_]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
