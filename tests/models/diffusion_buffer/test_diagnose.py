"""The diagnosis of the Diffusion Buffer: it finds nothing wrong where nothing is, and sees what is."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cmgan
import diffusion_buffer as recipe
from common.config import UserError
from helpers import support
from helpers.diffusion_buffer_support import pair
from infer import diagnose as infer_diagnose
from models.diffusion_buffer import diagnose, signal
from models.diffusion_buffer.signal import Spec

SPEC = Spec(width=8, n_fft=126, hop=64, frames=16, buffer=8)
FLAGS = {"width": 8, "n_fft": 126, "hop": 64, "frames": 16, "buffer": 8}


@pytest.fixture(autouse=True)
def threads():
    """The diagnosis limits its process to one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in diagnose.CHECKS if name not in ("silence", "speed")])
def test_what_the_diagnosis_checks_holds(name):
    fine, numbers = diagnose.CHECKS[name](SPEC)
    assert fine, numbers


@pytest.mark.parametrize("name", [name for name in diagnose.LOSS_CHECKS if name != "repeatable"])
def test_what_the_diagnosis_checks_of_the_loss_holds(name):
    fine, numbers = diagnose.LOSS_CHECKS[name](SPEC, recipe.compute_loss)
    assert fine, numbers


def test_the_diagnosis_checks_the_loss_that_it_is_given():
    def without_nan(model, batch, spec):
        output = recipe.compute_loss(model, batch, spec)
        return output._replace(loss_sum=output.loss_sum.nan_to_num())

    assert not diagnose.check_nan(SPEC, without_nan)[0]


def test_the_diagnosis_sees_a_wrong_sigma(monkeypatch):
    right = signal.sigma
    monkeypatch.setattr(signal, "sigma", lambda spec, t: right(spec, t) * math.sqrt(spec.sde_c))  # g = c k^t
    assert not diagnose.check_sigma(SPEC)[0] and not diagnose.check_forward_process(SPEC)[0]


def test_the_diagnosis_finds_nothing_wrong(tmp_path, capsys):
    noisy, clean = ((np.clip(side, -1, 1) * 32767).astype(np.int16) for side in pair(0.6))
    data = support.write_pairs(tmp_path / "pairs", [{"id": "clip", "noisy": noisy, "clean": clean}])
    diagnose.diagnose(recipe.Config(**FLAGS, data=str(data)), recipe.compute_loss)
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("PASS") + printed.count("WARN  speed") == 19, printed
    assert "sigma 0.0490" in printed and "1 s is 251 frames" in printed


# ---- whose settings are checked --------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What infer/diagnose.py hands to the checks, which do not run: asked(words) -> the recipe's config."""
    from common import runs, runtime
    from models.cmgan import diagnose as cmgan_diagnose

    seen = []
    monkeypatch.setattr(infer_diagnose, "Scorer", lambda workers: None)
    monkeypatch.setattr(runtime, "init_process", lambda: None)
    monkeypatch.setattr(runs, "demo_assets", lambda process, name: Path("demo") / name)
    monkeypatch.setattr(diagnose, "diagnose", lambda config, *_: seen.append(config))
    monkeypatch.setattr(cmgan_diagnose, "diagnose", lambda model, config, *_: seen.append(config))

    def ask(*words):
        infer_diagnose.check(infer_diagnose.parse_args(list(map(str, words))))
        return seen.pop()

    return ask


def write_run(folder: Path, recipe_name: str, flags: dict) -> Path:
    (folder / "export").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    (folder / "config.json").write_text(json.dumps({"recipe": recipe_name, "config": flags}))
    (folder / "export" / "config.json").write_text(json.dumps({"recipe": recipe_name, "training_config": flags}))
    return folder


OWN = {
    "diffusion_buffer": {"buffer": 7, "frames": 24, "n_fft": 254, "hop": 128, "sde_c": 0.51, "loss": "dsm"},
    "cmgan": {"channels": 12, "seconds": 1.5, "w_mag": 0.7, "precision": "bf16", "hold_out": ["p286"]},
}


@pytest.mark.parametrize("recipe_name", OWN)
def test_a_run_is_checked_with_its_own_settings(recipe_name, asked, tmp_path):
    """Neither with those of the embedded demo nor with the recipe's defaults."""
    used = OWN[recipe_name] | {"data": "pairs/mine", "eval_data": "pairs/held-out"}
    run = write_run(tmp_path / "run", recipe_name, used)
    for words in (("--run", run), ("--model", run / "export")):
        config = asked(*words)
        assert {name: getattr(config, name) for name in used} == used
        assert config.model == str(words[1])
    config = asked("--run", run, "--eval-data", "pairs/other")
    assert config.eval_data == "pairs/other" and config.data == (
        "pairs/other" if recipe_name == "diffusion_buffer" else "pairs/mine"
    )


@pytest.mark.parametrize(("name", "module"), [("diffusion_buffer", recipe), ("cmgan", cmgan)])
def test_a_recipe_without_a_run_is_checked_with_its_defaults_not_with_the_demos(name, module, asked):
    config, defaults = asked("--recipe", name), module.Config()
    changed = {field for field in vars(defaults) if getattr(config, field) != getattr(defaults, field)}
    assert changed <= {"eval_data"}
    demo_only = {field for field, value in module.DEMO.items() if getattr(defaults, field) != value}
    assert demo_only and not any(getattr(config, field) == module.DEMO[field] for field in demo_only)


def test_every_check_gets_the_settings_of_the_flags(monkeypatch):
    seen = []
    checks = {name: lambda spec: seen.append(spec) or (True, "") for name in ("one", "two")}
    monkeypatch.setattr(diagnose, "CHECKS", checks)
    monkeypatch.setattr(diagnose, "LOSS_CHECKS", {})
    diagnose.diagnose(recipe.Config(**FLAGS | OWN["diffusion_buffer"]), None)
    assert seen == [signal.spec_of(recipe.Config(**FLAGS | OWN["diffusion_buffer"]))] * 2
    assert (seen[0].buffer, seen[0].sde_c, seen[0].loss, seen[0].width) == (7, 0.51, "dsm", 8)


def test_a_failed_check_is_named(monkeypatch, capsys):
    monkeypatch.setattr(diagnose, "LOSS_CHECKS", {})
    monkeypatch.setattr(
        diagnose, "CHECKS", {"noise": lambda spec: (False, "E|z|^2 = 2"), "oracle": lambda spec: (True, "")}
    )
    with pytest.raises(UserError, match="some checks failed: noise."):
        diagnose.diagnose(recipe.Config(**FLAGS), recipe.compute_loss)
    assert "FAIL  noise: E|z|^2 = 2" in capsys.readouterr().out
