"""Whole recordings: windows without seams, the right length and level, bounded memory."""

import numpy as np
import pytest
import soundfile
import torch

from common.config import UserError
from models.cmgan.enhance import FADE, enhance, enhance_folder, windows
from models.cmgan.network import TSCNet


class Pass(torch.nn.Module):
    """Gives back what it gets, and notes how much that was."""

    def __init__(self):
        super().__init__()
        self.frames = []

    def forward(self, spec):
        self.frames.append(spec.shape[2])
        return spec


@pytest.mark.parametrize("length", [100, 399, 16000, 31_999, 32_000, 32_001, 47_999, 90_123, 200_000])
def test_windows_fade_into_each_other_without_a_trace(length):
    wave = np.random.default_rng(length).normal(scale=0.05, size=length).astype(np.float32)
    model = Pass()
    out = enhance(model, wave, 32_000, "cpu")
    assert out.shape == wave.shape and np.abs(out - wave).max() < 1e-5
    assert max(model.frames) <= 321
    starts = windows(length, 32_000)
    assert all(b + FADE <= a + 32_000 for a, b in zip(starts, starts[1:], strict=False))
    assert starts[-1] + min(length, 32_000) == length


def test_a_seam_is_a_cross_fade():
    """A model that answers every window with its own level: the levels glide over one second."""

    class Levels(torch.nn.Module):
        count = 0

        def forward(self, spec):
            self.count += 1
            return spec * self.count**0.3

    wave = np.full(47_000, 0.1, dtype=np.float32) * np.sign(np.sin(np.arange(47_000) * 0.3 + 0.1))
    out = enhance(Levels(), wave, 32_000, "cpu") / wave
    start = windows(47_000, 32_000)[1]
    inside = out[start + 500 : start + FADE - 500]
    assert np.median(out[2000:start]) == pytest.approx(1, abs=0.02)
    assert np.median(out[start + FADE :]) == pytest.approx(2, abs=0.05)
    smooth = np.convolve(inside, np.ones(400) / 400, mode="valid")
    assert (np.diff(smooth[::400]) > 0).all()


def test_the_level_of_the_recording_does_not_matter_and_silence_stays_finite():
    torch.manual_seed(0)
    model = TSCNet(4).eval()
    wave = np.random.default_rng(0).normal(scale=0.05, size=8000).astype(np.float32)
    out = enhance(model, wave, 32_000, "cpu")
    assert np.allclose(enhance(model, 0.01 * wave, 32_000, "cpu"), 0.01 * out, atol=1e-6)
    assert np.isfinite(enhance(model, np.zeros(8000, np.float32), 32_000, "cpu")).all()


def test_a_folder_of_recordings(tmp_path, capsys):
    rng = np.random.default_rng(0)
    waves = {"a.wav": 50_000, "deep/b.flac": 16_000}
    for name, length in waves.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        waves[name] = rng.normal(scale=0.2, size=length)
        soundfile.write(tmp_path / "in" / name, waves[name], 16000)
    soundfile.write(tmp_path / "in" / "loud.wav", 1.5 * np.sign(np.sin(np.arange(9000))), 16000, subtype="FLOAT")
    model = Pass()
    enhance_folder(model, tmp_path / "in", tmp_path / "out", 32_000, "cpu")
    for name, wave in waves.items():
        found, rate = soundfile.read((tmp_path / "out" / name).with_suffix(".wav"))
        assert rate == 16000 and len(found) == len(wave) and np.abs(found - wave).max() < 1e-3
    loud, _ = soundfile.read(tmp_path / "out" / "loud.wav")
    assert np.abs(loud).max() == pytest.approx(1.5, abs=0.01)  # nothing is clipped
    printed = capsys.readouterr().out
    assert "samples beyond full scale" in printed and printed.count("s\n") == 2
    assert max(model.frames) <= 321 and not list(tmp_path.rglob(".*.tmp"))


NOT_FINITE = np.array([0.1] * 900 + [np.nan] + [0.1] * 900)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: soundfile.write(folder / "x.wav", np.zeros(900), 8000), "has 8000 Hz, 1 channel"),
        (lambda folder: soundfile.write(folder / "x.wav", np.zeros((900, 2)), 16000), "16000 Hz, 2 channel"),
        (lambda folder: soundfile.write(folder / "x.wav", np.zeros(0), 16000), "and 0 samples"),
        (lambda folder: soundfile.write(folder / "x.wav", NOT_FINITE, 16000, subtype="FLOAT"), "are not finite"),
        (
            lambda folder: [soundfile.write(folder / f"x{end}", np.zeros(900), 16000) for end in (".wav", ".flac")],
            "a .wav and a .flac of one name",
        ),
        (lambda folder: (folder / "x.wav").write_bytes(b"no sound"), "cannot be read"),
        (lambda folder: None, "is not a folder with .wav"),
    ],
)
def test_what_cannot_be_enhanced_is_named(make, sentence, tmp_path):
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    with pytest.raises(UserError, match=sentence):
        enhance_folder(Pass(), tmp_path / "in", tmp_path / "out", 32_000, "cpu")
    assert not list((tmp_path / "out").rglob("*")) if (tmp_path / "out").exists() else True
    with pytest.raises(UserError, match="same folder"):
        soundfile.write(tmp_path / "in" / "y.wav", np.zeros(900), 16000)
        enhance_folder(Pass(), tmp_path / "in", tmp_path / "in", 32_000, "cpu")
