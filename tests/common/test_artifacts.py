"""Which recipe made something, and with which flags."""

import json
from dataclasses import dataclass

import pytest

from common.artifacts import build_config, find_recipe, read_record, trained_flags
from common.config import RunConfig, flag
from common.errors import UserError

RECIPES = ("cmgan", "diffusion_buffer")


@pytest.fixture
def run(tmp_path):
    """A run folder with a checkpoint and an export, and a file of weights that belongs to nothing."""
    folder = tmp_path / "runs" / "one"
    for place in ("checkpoints/step-00000002", "export"):
        (folder / place).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"recipe": "cmgan", "config": {"lr": 1e-3}}))
    (folder / "export" / "config.json").write_text(json.dumps({"model_type": "cmgan", "training_config": {"lr": 2e-3}}))
    (folder / "export" / "generator.pt").touch()
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "ckpt").touch()
    return folder


@pytest.mark.parametrize(
    ("place", "lr"),
    [("", 1e-3), ("checkpoints/step-00000002", 1e-3), ("export", 2e-3), ("export/generator.pt", 2e-3)],
)
def test_runs_checkpoints_exports_and_their_files_know_their_recipe_and_flags(run, place, lr):
    assert find_recipe(run / place, None, RECIPES) == "cmgan"
    assert trained_flags(read_record(run / place)) == {"lr": lr}


def test_a_bare_file_needs_the_recipes_name(run):
    bare = run.parents[1] / "deep" / "deeper" / "ckpt"
    assert find_recipe(bare, "cmgan", RECIPES) == "cmgan" and trained_flags(read_record(bare)) == {}
    with pytest.raises(UserError, match="name its recipe with --recipe cmgan or diffusion_buffer"):
        find_recipe(bare, None, RECIPES)


def test_what_contradicts_or_is_damaged_is_refused(run):
    with pytest.raises(UserError, match="was made by cmgan, not by --recipe diffusion_buffer"):
        find_recipe(run, "diffusion_buffer", RECIPES)
    with pytest.raises(UserError, match="this command takes models of diffusion_buffer"):
        find_recipe(run, None, ("diffusion_buffer",))
    with pytest.raises(UserError, match="does not exist"):
        find_recipe(run / "other", None, RECIPES)
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json cannot be read"):
        find_recipe(run, None, RECIPES)


@dataclass
class Config(RunConfig):
    width: int = flag(8, "a number")


def test_flags_that_no_longer_exist_are_ignored_and_changes_win():
    config = build_config(Config, {"width": 4, "lr": 1e-3, "clip": 1.0}, lr=2e-3)
    assert (config.width, config.lr) == (4, 2e-3)
