"""The diagnosis of the Diffusion Buffer: it finds nothing wrong where nothing is, and sees what is."""

import contextlib
import json
import math
import os
import subprocess
import sys
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
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import write_export

SPEC = Spec(width=8, n_fft=126, hop=64, frames=16, buffer=8)
HERE = Process(0, 1, torch.device("cpu"))
FLAGS = {"width": 8, "n_fft": 126, "hop": 64, "frames": 16, "buffer": 8}


@pytest.fixture(autouse=True)
def threads():
    """The diagnosis limits its process to one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in diagnose.CHECKS if name != "silence"])
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


def test_the_diagnosis_finds_nothing_wrong(data, capsys, monkeypatch):
    monkeypatch.setattr(diagnose, "check_memory", lambda *_: (True, ""))
    diagnose.diagnose(recipe.Config(**FLAGS, data=data), recipe.compute_loss, HERE)
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("PASS") + printed.count("WARN  speed") == 20, printed
    assert "sigma 0.0490" in printed and "1 s is 251 frames" in printed and "width 8 on" in printed


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
    monkeypatch.setattr(diagnose, "CHECKS", {})
    monkeypatch.setattr(diagnose, "LOSS_CHECKS", {})
    monkeypatch.setattr(diagnose, "Traced", lambda network, spec, device: network)
    network = Answer(answer)
    network.weight.data.fill_(weight)
    config = recipe.Config(**FLAGS, model="there", eval_data=data)
    with pytest.raises(UserError) if "FAIL" in expected.values() else contextlib.nullcontext():
        diagnose.diagnose(config, recipe.compute_loss, HERE, network)
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
    assert len(frames) == 3 + diagnose.SPEED_FRAMES and fine is None  # 30 ms are more than a hop of 4 ms
    middle, slow = (float(numbers.split(word)[1].split()[0].rstrip(",")) for word in ("factor ", "frames below "))
    assert "width 24" in numbers and slow > 7 and middle < slow / 2, numbers


MEMORY = """
import sys
sys.path[:0] = ["finetune", "tests"]
import diffusion_buffer as recipe, torch
from common import engine, runtime
from models.diffusion_buffer import diagnose, signal
from models.diffusion_buffer.network import build_network
process = runtime.init_process()
done = []
def seen(module, name):
    function = getattr(module, name)
    setattr(module, name, lambda *a, **k: done.append(name) or function(*a, **k))
seen(engine, "take_step"), seen(diagnose.Ema, "update"), seen(diagnose, "enhance_at")
config = recipe.Config(width=16, frames=64, buffer=8, micro_batch=int(sys.argv[1]), precision="fp32")
spec = signal.spec_of(config)
network = build_network(spec.network, spec.width, spec.block)
before = [p.clone() for p in network.parameters()]
print(diagnose.check_memory(spec, network, config, recipe.compute_loss, process)[1])
print(done, all(torch.equal(a, b) for a, b in zip(before, network.parameters())))
"""


@pytest.mark.long
def test_memory_is_that_of_the_micro_batch_with_all_states():
    """In fresh processes: memory that one has had before would not be new."""
    peaks, predictions = [], []
    for crops in (1, 9):
        words = [sys.executable, "-c", MEMORY, str(crops)]
        done = subprocess.run(
            words, cwd=support.ROOT, capture_output=True, text=True, env=dict(os.environ) | support.CPU
        )
        *_, numbers, steps = done.stdout.splitlines()
        assert steps == "['take_step', 'update', 'enhance_at'] True", done.stdout + done.stderr
        assert f"--micro-batch {crops} with optimizer states and EMA" in numbers
        peaks.append(float(numbers.split(" s and ")[1].split()[0]))
        predictions.append(float(numbers.split("scratch memory: ")[1].split(")")[0]))
    grown, predicted = peaks[1] - peaks[0], predictions[1] - predictions[0]
    # The prediction counts tensors; the allocator and oneDNN's scratch memory come on top.
    assert predicted > 0.2 and 0.8 * predicted < grown < 2.5 * predicted, (peaks, predictions)


@pytest.mark.long
def test_a_step_that_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(diagnose, "free_memory", lambda: 2**20)
    monkeypatch.setattr(diagnose.engine, "start_engine", None)
    config = recipe.Config(**FLAGS, micro_batch=2)
    network = diagnose.build_network("ncsnpp", 8, 32)
    fine, numbers = diagnose.check_memory(SPEC, network, config, recipe.compute_loss, HERE)
    assert fine is False and "--micro-batch 2 needs about" in numbers and "0.00 GB are free" in numbers


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
    monkeypatch.setattr(diagnose, "diagnose", lambda config, _, __, network: seen.append((config, network)))
    monkeypatch.setattr(cmgan_diagnose, "diagnose", lambda model, config, *_: seen.append((config, None)))

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
        spec = signal.spec_of(recipe.Config(**flags))
        write_export(folder / "export", build_network(spec.network, spec.width, spec.block), spec, facts)
    return folder


OWN = {
    "diffusion_buffer": {
        "width": 8, "buffer": 7, "frames": 24, "n_fft": 254, "hop": 128, "sde_c": 0.51, "loss": "dsm",
    },
    "cmgan": {"channels": 12, "seconds": 1.5, "w_mag": 0.7, "precision": "bf16", "hold_out": ["p286"]},
}  # fmt: skip


@pytest.mark.parametrize("recipe_name", OWN)
def test_a_run_is_checked_with_its_own_settings(recipe_name, asked, tmp_path):
    """Neither with those of the embedded demo nor with the recipe's defaults."""
    used = OWN[recipe_name] | {"data": "pairs/mine", "eval_data": "pairs/held-out"}
    run = write_run(tmp_path / "run", recipe_name, used)
    for words in (("--run", run), ("--model", run / "export")):
        config, network = asked(*words)
        assert {name: getattr(config, name) for name in used} == used
        assert config.model == str(words[1]) and (network is None) == (recipe_name == "cmgan")
    config, _ = asked("--run", run, "--eval-data", "pairs/other", "--micro-batch", 9)
    assert (config.eval_data, config.data, config.micro_batch) == ("pairs/other", "pairs/mine", 9)


@pytest.mark.parametrize(("name", "module"), [("diffusion_buffer", recipe), ("cmgan", cmgan)])
def test_a_recipe_without_a_run_is_checked_with_its_flags_not_with_the_demos(name, module, asked):
    for given in ({}, {"micro_batch": 3, "data": "mine"}):
        words = [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", value)]
        config, defaults = asked("--recipe", name, *words)[0], module.Config(**given)
        changed = {field for field in vars(defaults) if getattr(config, field) != getattr(defaults, field)}
        assert changed <= {"eval_data"}
        demo_only = {field for field, value in module.DEMO.items() if getattr(defaults, field) != value}
        assert demo_only and not any(getattr(config, field) == module.DEMO[field] for field in demo_only)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere", "--recipe", "diffusion_buffer"], "nowhere does not exist"),
        (["--model", "broken"], "broken is neither an export folder nor a checkpoint file"),
        (["--model", "run/export", "--sde-c", "0.08"], r"other settings: --sde-c 0.08 \(it has 0.51\)"),
        (["--recipe", "diffusion_buffer", "--bufer", "9"], "unknown flag --bufer; did you mean --buffer"),
        (["--recipe", "diffusion_buffer", "--micro-batch", "0"], "--micro-batch 0 is out of range"),
        (["--recipe", "diffusion_buffer", "--buffer", "200"], "--buffer 200 does not fit into --frames 128"),
    ],
)
def test_a_model_that_is_not_opened_and_flags_that_do_not_fit_are_errors(words, message, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", "diffusion_buffer", OWN["diffusion_buffer"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"recipe": "diffusion_buffer"}')
    with pytest.raises(UserError, match=message):
        config, network = asked(*words)
        signal.spec_of(config)  # what the diagnosis begins with


def test_every_check_gets_the_settings_of_the_flags(monkeypatch):
    seen = []
    checks = {name: lambda spec: seen.append(spec) or (True, "") for name in ("one", "two")}
    monkeypatch.setattr(diagnose, "CHECKS", checks)
    monkeypatch.setattr(diagnose, "LOSS_CHECKS", {})
    for name in ("check_memory", "check_speed"):
        monkeypatch.setattr(diagnose, name, lambda *_: (True, ""))
    diagnose.diagnose(recipe.Config(**FLAGS | OWN["diffusion_buffer"]), None, HERE)
    assert seen == [signal.spec_of(recipe.Config(**FLAGS | OWN["diffusion_buffer"]))] * 2
    assert (seen[0].buffer, seen[0].sde_c, seen[0].loss, seen[0].width) == (7, 0.51, "dsm", 8)


def test_a_failed_check_is_named(monkeypatch, capsys):
    monkeypatch.setattr(diagnose, "LOSS_CHECKS", {})
    for name in ("check_memory", "check_speed"):
        monkeypatch.setattr(diagnose, name, lambda *_: (True, ""))
    monkeypatch.setattr(
        diagnose, "CHECKS", {"noise": lambda spec: (False, "E|z|^2 = 2"), "oracle": lambda spec: (True, "")}
    )
    with pytest.raises(UserError, match="some checks failed: noise."):
        diagnose.diagnose(recipe.Config(**FLAGS), recipe.compute_loss, HERE)
    assert "FAIL  noise: E|z|^2 = 2" in capsys.readouterr().out
