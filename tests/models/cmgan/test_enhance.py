"""Whole recordings: windows without seams, the right length and level, bounded memory."""

import math
import sys
import types

import numpy as np
import pytest
import soundfile
import torch

from common import enhance_folder as enhance_files
from common.enhance_folder import Source
from common.errors import UserError
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
        (lambda folder: soundfile.write(folder / "x.wav", np.zeros(0), 16000), "x.wav has no samples"),
        (lambda folder: soundfile.write(folder / "x.wav", NOT_FINITE, 16000, subtype="FLOAT"), "are not finite"),
        (
            lambda folder: [soundfile.write(folder / f"x{end}", np.zeros(900), 16000) for end in (".wav", ".flac")],
            "x.flac and .*x.wav would both become .*x.wav",
        ),
        (lambda folder: (folder / "x.wav").write_bytes(b"no sound"), "cannot be read"),
        (lambda folder: None, "is neither a recording nor a folder of them"),
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


# ---- people's files --------------------------------------------------------------------------------------------


def tone(rate: int, hertz: float, seconds: float = 1.5) -> np.ndarray:
    return 0.2 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def enhanced(source, out, model=None, **how) -> np.ndarray:
    """The only result, (samples, channels)."""
    enhance_folder(model or Pass(), Source(source, **how), out, 32_000, "cpu")
    (path,) = [out] if out.is_file() else out.rglob("*.wav")
    return soundfile.read(path, always_2d=True)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000])
def test_any_rate_and_two_channels_come_back_as_they_were(tmp_path, rate):
    """A model that changes nothing: up to 7 kHz the result is the recording, sample by sample, channel by channel."""
    left, right = tone(rate, 440) + tone(rate, 0.4 * min(rate, 16000)), tone(rate, 1000)
    wave = np.stack([left, right], axis=1)
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "a.flac", wave, rate, subtype="PCM_24")
    found, found_rate = enhanced(tmp_path / "in", tmp_path / "out")
    assert found_rate == rate and found.shape == wave.shape
    inside = slice(rate // 10, -rate // 10)  # the recording starts and ends with a step, which has no band limit
    assert np.abs(found - wave)[inside].max() < 2e-4


def test_above_8_khz_the_recording_is_cut_or_kept(tmp_path):
    rate = 48000
    low, high = tone(rate, 900), tone(rate, 11_000)
    soundfile.write(tmp_path / "a.wav", low + high, rate, subtype="FLOAT")

    class Nothing(Pass):
        def forward(self, spec):
            return 0 * spec

    inside = slice(rate // 5, -rate // 5)
    for model, how, expected in (
        (Pass(), "cut", low),
        (Pass(), "keep", low + high),
        (Nothing(), "cut", 0 * low),
        (Nothing(), "keep", high),  # the model has removed all that it heard
    ):
        found, _ = enhanced(tmp_path / "a.wav", tmp_path / "out.wav", model, high_band=how)
        assert np.abs(found[:, 0] - expected)[inside].max() < 3e-4, how
    whole, _ = enhanced(tmp_path / "a.wav", tmp_path / "out.wav", high_band="keep")
    assert np.abs(whole[:, 0] - low - high).max() < 1e-3  # the edges too


@pytest.mark.parametrize(("rate", "new_rate"), [(44100, 16000), (16000, 44100), (48000, 16000), (16000, 8000)])
def test_resampling_in_blocks_is_resampling_the_whole(rate, new_rate, monkeypatch):
    from scipy.signal import resample_poly

    wave = np.random.default_rng(0).normal(size=3 * rate + 77).astype(np.float32)
    monkeypatch.setattr(enhance_files, "BLOCK_SECONDS", 1)
    blocks = list(enhance_files.resampled(lambda start, count: wave[start : start + count], len(wave), rate, new_rate))
    common = math.gcd(rate, new_rate)
    taps = enhance_files.low_pass(new_rate // common, rate // common)
    whole = resample_poly(wave, new_rate // common, rate // common, window=taps)
    joined = np.concatenate(blocks)
    assert len(blocks) == 4 and len(joined) == len(whole) == math.ceil(len(wave) * new_rate / rate)
    assert np.abs(joined - whole).max() < 1e-5


def test_one_file_of_another_container_and_what_a_folder_leaves_out(tmp_path, capsys):
    wave = tone(22050, 500)
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "a.ogg", wave, 22050)
    soundfile.write(tmp_path / "in" / "b.mp3", np.stack([wave, wave], axis=1), 22050)
    (tmp_path / "in" / "c.m4a").write_bytes(b"not for libsndfile")
    (tmp_path / "in" / ".hidden.wav").write_bytes(b"")
    enhance_folder(Pass(), Source(tmp_path / "in"), tmp_path / "out", 32_000, "cpu")
    printed = capsys.readouterr().out
    assert "left out, because libsndfile cannot read them: 1, such as" in printed and "c.m4a" in printed
    assert "22050 Hz, 2 channels, nothing above 8 kHz" in printed
    for name, channels in (("a", 1), ("b", 2)):
        info = soundfile.info(tmp_path / "out" / f"{name}.wav")
        assert (info.samplerate, info.channels, info.subtype) == (22050, channels, "FLOAT")
    enhance_folder(Pass(), Source(tmp_path / "in" / "a.ogg"), tmp_path / "one" / "x.wav", 32_000, "cpu")
    enhance_folder(Pass(), Source(tmp_path / "in" / "a.ogg"), tmp_path / "one", 32_000, "cpu")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["a.wav", "x.wav"]
    with pytest.raises(UserError, match="would overwrite the recording"):
        enhance_folder(Pass(), Source(tmp_path / "one" / "a.wav"), tmp_path / "one", 32_000, "cpu")


def test_one_bad_file_is_found_before_the_first_is_enhanced(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(16000, 500), 16000)
    (tmp_path / "b.wav").write_bytes(b"no sound")
    model = Pass()
    with pytest.raises(UserError, match="b.wav cannot be read"):
        enhance_folder(model, tmp_path, tmp_path / "out", 32_000, "cpu")
    assert not model.frames and not (tmp_path / "out").exists()


def test_the_bar_counts_the_seconds_of_all_files(tmp_path, monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for number in range(2):
        soundfile.write(tmp_path / f"{number}.wav", np.stack([tone(8000, 500)] * 2, axis=1), 8000)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    enhance_folder(Pass(), tmp_path, tmp_path / "out", 32_000, "cpu")
    assert "100%" in terminal.getvalue() and "3 of 3 s" in terminal.getvalue()


def test_quality_without_a_reference_is_predicted_before_and_after(tmp_path, monkeypatch, capsys):
    """speechmos is replaced: it says how loud a sound is. The model here halves it."""

    class Half(Pass):
        def forward(self, spec):
            return 0.5**0.3 * spec

    def run(wave, sr):
        assert sr == 16000
        return {"ovrl_mos": 10 * np.abs(wave).max(), "p808_mos": 20 * np.abs(wave).max()}

    package = types.ModuleType("speechmos")
    package.dnsmos = types.SimpleNamespace(run=run)
    for name, level in (("a", 1.0), ("b", 0.5)):
        soundfile.write(tmp_path / f"{name}.wav", level * tone(16000, 500), 16000, subtype="FLOAT")
    how = Source(tmp_path, dnsmos=True)
    monkeypatch.setitem(sys.modules, "speechmos", None)
    with pytest.raises(UserError, match="--dnsmos needs the package speechmos"):
        enhance_folder(Half(), how, tmp_path / "out", 32_000, "cpu")
    monkeypatch.setitem(sys.modules, "speechmos", package)
    enhance_folder(Half(), how, tmp_path / "out", 32_000, "cpu")
    first, second, mean = capsys.readouterr().out.splitlines()
    assert "a.wav  1.5 s, DNSMOS 2.00 -> 1.0" in first and "P.808 4.00 -> 2.0" in first
    assert "b.wav  1.5 s, DNSMOS 1.00 -> 0.5" in second
    assert mean.startswith("mean of 2 recordings: DNSMOS 1.50 -> 0.7")


# ---- as published ----------------------------------------------------------------------------------------------


def published(model, noisy: np.ndarray) -> np.ndarray:
    """The published evaluation, step by step: the end is padded with the start, the spectrum is powered, and back."""
    noisy = torch.from_numpy(noisy)[None]
    c = torch.sqrt(noisy.size(-1) / torch.sum(noisy**2.0, dim=-1))
    noisy, length = noisy * c, noisy.size(-1)
    noisy = torch.cat([noisy, noisy[:, : math.ceil(length / 100) * 100 - length]], dim=-1)
    bins = torch.stft(noisy, 400, 100, window=torch.hamming_window(400), onesided=True, return_complex=True)
    compressed = torch.polar(bins.abs() ** 0.3, bins.angle())
    with torch.no_grad():
        out = model(torch.stack([compressed.real, compressed.imag], 1).transpose(2, 3)).transpose(2, 3)
    out = torch.complex(out[:, 0], out[:, 1])
    back = torch.polar(out.abs() ** (1 / 0.3), out.angle())
    wave = torch.istft(back, 400, 100, window=torch.hamming_window(400), onesided=True) / c
    return wave.flatten()[:length].numpy()


@pytest.mark.parametrize("length", [16_000, 16_001, 16_050, 16_099])
def test_the_output_is_the_published_one_up_to_its_last_sample(length):
    torch.manual_seed(0)
    model = TSCNet(4).eval()
    noisy = np.random.default_rng(1).normal(scale=0.05, size=length).astype(np.float32)
    expected = published(model, noisy)
    assert np.abs(expected).max() > 0.01
    assert np.abs(enhance(model, noisy, 32_000, "cpu") - expected).max() < 1e-5
    unpadded = enhance(model, noisy, 32_000, "cpu", padding=False)
    assert (np.abs(unpadded - expected).max() < 1e-5) == (length == 16_000)
