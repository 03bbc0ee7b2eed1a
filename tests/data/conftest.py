"""Fixtures for the tests of data/: a tiny codec, wav files, and commands run in this process."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.errors import run_command
from helpers import process_state


@pytest.fixture(scope="session")
def dac(tmp_path_factory) -> Path:
    """A tiny random DAC with the real architecture."""
    from demos import dia

    folder = tmp_path_factory.mktemp("codec") / "dac"
    dia.save_codec(folder)
    return folder


@pytest.fixture
def script(monkeypatch, capsys):
    """script("encode", ...) -> (exit code, stdout, stderr), without the seconds it takes to start a new Python."""

    def call(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        with process_state.restored(), pytest.raises(SystemExit) as stop:
            run_command(importlib.import_module(name).main)
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


def make_wave(seconds: float = 0.6, rate: int = 44100, channels: int = 1, seed: int = 0) -> np.ndarray:
    """(n, channels) float32 noise in -0.5..0.5; each seed gives different codes."""
    rng = np.random.default_rng(seed)
    return rng.uniform(-0.5, 0.5, (round(seconds * rate), channels)).astype(np.float32)


@pytest.fixture
def clip():
    """clip(path, text, ...) writes a wav, and a .txt unless text is None; returns the samples."""

    def write(path: Path, text: str | None = "[S1] bada.", rate: int = 44100, **kwargs) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = make_wave(rate=rate, **kwargs)
        soundfile.write(path, wave, rate, subtype="FLOAT")
        if text is not None:
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
        return wave

    return write


@pytest.fixture
def voices(tmp_path, higgs_demo):
    """Names of recordings from the Higgs demo, copied to tmp_path."""
    for file in (higgs_demo / "audio/eval").glob("*.wav"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return sorted(path.name for path in tmp_path.glob("*.wav"))
