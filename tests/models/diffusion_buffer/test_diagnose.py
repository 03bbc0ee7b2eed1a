"""The diagnosis of the Diffusion Buffer: it finds nothing wrong where nothing is, and sees what is."""

import math

import numpy as np
import pytest
import torch

import diffusion_buffer as recipe
from common.config import UserError
from helpers import support
from helpers.diffusion_buffer_support import pair
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


@pytest.mark.parametrize("name", [n for n in diagnose.CHECKS if n not in ("repeatable", "silence", "speed")])
def test_what_the_diagnosis_checks_holds(name):
    fine, numbers = diagnose.CHECKS[name](SPEC)
    assert fine, numbers


def test_the_diagnosis_sees_a_wrong_sigma(monkeypatch):
    right = signal.sigma
    monkeypatch.setattr(signal, "sigma", lambda spec, t: right(spec, t) * math.sqrt(spec.sde_c))  # g = c k^t
    assert not diagnose.check_sigma(SPEC)[0] and not diagnose.check_forward_process(SPEC)[0]


def test_the_diagnosis_finds_nothing_wrong(tmp_path, capsys):
    noisy, clean = ((np.clip(side, -1, 1) * 32767).astype(np.int16) for side in pair(0.6))
    data = support.write_pairs(tmp_path / "pairs", [{"id": "clip", "noisy": noisy, "clean": clean}])
    diagnose.diagnose(recipe.Config(**FLAGS, data=str(data)), None)
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("PASS") + printed.count("WARN  speed") == 19, printed
    assert "sigma 0.0490" in printed and "1 s is 251 frames" in printed


def test_a_failed_check_is_named(monkeypatch, capsys):
    monkeypatch.setattr(
        diagnose, "CHECKS", {"noise": lambda spec: (False, "E|z|^2 = 2"), "oracle": lambda spec: (True, "")}
    )
    with pytest.raises(UserError, match="some checks failed: noise."):
        diagnose.diagnose(recipe.Config(**FLAGS), None)
    assert "FAIL  noise: E|z|^2 = 2" in capsys.readouterr().out
