"""The diagnosis of the Diffusion Buffer: it finds nothing wrong where nothing is, and sees what is."""

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import cmgan
import diffusion_buffer as recipe
from common.errors import UserError
from common.runtime import Process
from helpers import support
from helpers.diffusion_buffer_support import pair
from infer import diagnose as infer_diagnose
from models.diffusion_buffer import diagnose, signal
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.weights import load_network, spec_of, write_export

HERE = Process(0, 1, torch.device("cpu"))
SPEC = {"width": 8, "n_fft": 126, "hop": 64, "frames": 16, "buffer": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    noisy, clean = ((np.clip(side, -1, 1) * 32767).astype(np.int16) for side in pair(0.6))
    folder = tmp_path_factory.mktemp("data") / "pairs"
    return str(support.write_pairs(folder, [{"id": "clip", "noisy": noisy, "clean": clean}]))


class Answer(torch.nn.Module):
    """Stands in for a trained network: `answer(x, y)` is its estimate."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.weight = answer, torch.nn.Parameter(torch.ones(3))

    def embed(self, t):
        return []

    def forward(self, x, y, times, scale):
        return self.answer(x, y)


def say_verdicts(capsys) -> dict[str, str]:
    return {line[6:].split(":")[0]: line[:4] for line in capsys.readouterr().out.splitlines() if line[4:6] == "  "}


def test_the_diagnosis_finds_nothing_wrong(data, capsys):
    diagnose.diagnose(recipe.Config(spec=json.dumps(SPEC), data=data), recipe.compute_loss, HERE)
    verdicts = say_verdicts(capsys)
    assert set(verdicts) == {"settings", "data", "speed", "memory"}
    assert "FAIL" not in verdicts.values() and verdicts["data"] == verdicts["memory"] == "PASS"


@pytest.mark.parametrize(
    ("answer", "weight", "expected"),
    [
        (lambda x, y: y, 1.0, {"weights": "PASS", "output": "WARN"}),  # it changes nothing
        (lambda x, y: y * (y.abs() > 0.12), 1.0, {"weights": "PASS", "output": "PASS"}),  # soft bins are noise
        (lambda x, y: y / 0, float("nan"), {"weights": "FAIL", "output": "FAIL"}),
    ],
)
def test_a_trained_network_is_heard_on_the_evaluation_data(data, answer, weight, expected, capsys, monkeypatch):
    for name in ("check_memory", "check_speed"):
        monkeypatch.setattr(diagnose, name, lambda *_: (True, ""))
    monkeypatch.setattr(diagnose, "Traced", lambda network, spec, device: network)
    network = Answer(answer)
    network.weight.data.fill_(weight)
    monkeypatch.setattr(diagnose, "load_network", lambda *_: (network, signal.build_spec(SPEC)))
    config = recipe.Config(model="there", eval_data=data)
    with pytest.raises(UserError) if "FAIL" in expected.values() else contextlib.nullcontext():
        diagnose.diagnose(config, recipe.compute_loss, HERE)
    verdicts = say_verdicts(capsys)
    assert {name: verdicts[name] for name in expected} == expected, verdicts
    assert verdicts["evaluation data"] == "PASS"


def test_speed_is_that_of_the_run_s_own_network_with_its_slowest_frames():
    class Slow(Answer):
        def forward(self, x, y, times, scale):
            frames.append(x.shape)
            time.sleep(0.03 if len(frames) % 50 == 0 else 0)  # 2 % of them
            return y

    frames, spec = [], signal.Spec(width=24, n_fft=126, hop=64, frames=16, buffer=8)
    before, diagnose.Traced = diagnose.Traced, lambda network, spec, device: network
    try:
        fine, numbers = diagnose.check_speed(spec, Slow(None), HERE)
    finally:
        diagnose.Traced = before
    assert len(frames) >= 3 + diagnose.SPEED_FRAMES and fine is None  # 30 ms are more than a hop of 4 ms
    middle, slow = (float(numbers.split(word)[1].split()[0].rstrip(",")) for word in ("factor ", "frames below "))
    assert "width 24" in numbers and slow > 7 and middle < slow / 2, numbers


def test_a_step_that_does_not_fit_names_the_flag(capsys):
    def too_large(model, batch, spec):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="memory"):
        diagnose.diagnose(recipe.Config(spec=json.dumps(SPEC), micro_batch=2), too_large, HERE)
    assert say_verdicts(capsys)["memory"] == "FAIL"


# ---- whose settings are checked --------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What infer/diagnose.py hands to the checks, which do not run: asked(words) -> the recipe's config."""
    from common import runs, runtime
    from models.cmgan import diagnose as cmgan_diagnose

    seen = []
    monkeypatch.setattr(infer_diagnose, "Scorer", lambda: None)
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
    facts = {"recipe": recipe_name, "training_config": flags}
    if recipe_name == "cmgan":
        (folder / "export" / "config.json").write_text(json.dumps(facts))
    else:
        spec = spec_of(recipe.Config(**flags))
        write_export(folder / "export", build_network(spec.network, spec.width, spec.block), spec, facts)
    return folder


OWN = {
    "diffusion_buffer": {
        "spec": '{"width": 8, "buffer": 7, "frames": 24, "n_fft": 254, "hop": 128, "sde_c": 0.51, "loss": "dsm"}',
    },
    "cmgan": {"channels": 12, "seconds": 1.5, "w_gan": 0.07, "precision": "bf16", "hold_out": ["p286"]},
}  # fmt: skip


@pytest.mark.parametrize("recipe_name", OWN)
def test_a_run_is_checked_with_its_own_settings(recipe_name, asked, tmp_path):
    """Neither with those of the embedded demo nor with the recipe's defaults."""
    used = OWN[recipe_name] | {"data": "pairs/mine", "eval_data": "pairs/held-out"}
    run = write_run(tmp_path / "run", recipe_name, used)
    for words in (("--run", run), ("--model", run / "export")):
        config = asked(*words)
        assert {name: getattr(config, name) for name in used} == used
        assert config.model == str(words[1])
    config = asked("--run", run, "--eval-data", "pairs/other", "--micro-batch", 9)
    assert (config.eval_data, config.data, config.micro_batch) == ("pairs/other", "pairs/mine", 9)


@pytest.mark.parametrize(("name", "module"), [("diffusion_buffer", recipe), ("cmgan", cmgan)])
def test_a_recipe_without_a_run_is_checked_with_its_flags_not_with_the_demos(name, module, asked):
    for given in ({}, {"micro_batch": 3, "data": "mine"}):
        words = [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", value)]
        config, defaults = asked("--recipe", name, *words), module.Config(**given)
        changed = {field for field in vars(defaults) if getattr(config, field) != getattr(defaults, field)}
        assert changed <= {"eval_data"}
        demo_only = {field for field, value in module.DEMO.items() if getattr(defaults, field) != value}
        assert demo_only and not any(getattr(config, field) == module.DEMO[field] for field in demo_only)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere", "--recipe", "diffusion_buffer"], "nowhere does not exist"),
        (["--model", "broken"], "broken is neither an export folder nor a checkpoint file"),
        (["--model", "run/export", "--spec", '{"sde_c": 0.08}'], r"sde_c 0.08 \(it has 0.51\)"),
        (["--recipe", "diffusion_buffer", "--spce", "demo"], "unknown flag --spce; did you mean --spec"),
        (["--recipe", "diffusion_buffer", "--micro-batch", "0"], "--micro-batch 0 is out of range"),
        (["--recipe", "diffusion_buffer", "--spec", '{"buffer": 200}'], "buffer 200 does not fit into 128 frames"),
    ],
)
def test_a_model_that_is_not_opened_and_flags_that_do_not_fit_are_errors(words, message, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", "diffusion_buffer", OWN["diffusion_buffer"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"recipe": "diffusion_buffer"}')
    with pytest.raises(UserError, match=message):
        config = asked(*words)
        load_network(config.model, config.spec) if config.model else spec_of(config)  # what the diagnosis begins with
