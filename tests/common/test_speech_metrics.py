"""Speech metrics against slow, literal computations of their definitions."""

import math

import numpy as np
import pytest

from common import speech_metrics as speech
from helpers.support import voice as sounds


def literal_frames(wave, count):
    window = [0.5 * (1 - math.cos(2 * math.pi * n / 481)) for n in range(1, 481)]
    return [wave[120 * i : 120 * i + 480] * window for i in range(count)]


def literal_ssnr(clean, estimate):
    count = int(len(clean) / 120 - 4)
    frames = zip(literal_frames(clean, count), literal_frames(estimate, count), strict=True)
    return np.mean([min(35, max(-10, 10 * math.log10((c @ c) / ((c - e) @ (c - e))))) for c, e in frames])


def test_segmental_snr_equals_the_literal_definition():
    clean, estimate = sounds(0.5)
    assert speech.ssnr(clean, estimate) == pytest.approx(literal_ssnr(clean, estimate), rel=1e-6)


def test_si_sdr_and_gain():
    clean, estimate = sounds()
    centred = clean - clean.mean(), estimate - estimate.mean()
    target = (centred[1] @ centred[0]) / (centred[0] @ centred[0]) * centred[0]
    expected = 10 * math.log10((target**2).sum() / ((centred[1] - target) ** 2).sum())
    assert speech.si_sdr(clean, estimate) == pytest.approx(expected)
    assert speech.si_sdr(clean, 0.4 * estimate + 0.1) == pytest.approx(expected)
    assert speech.gain(clean, 0.4 * clean) == pytest.approx(0.4)
    assert math.isnan(speech.gain(0 * clean, clean)) and math.isnan(speech.si_sdr(0 * clean, clean))


def test_pesq_and_stoi_are_the_packages():
    from pesq import pesq
    from pystoi import stoi

    clean, estimate = sounds(2.0)
    assert speech.pesq_wb(clean, estimate) == (pesq(16000, clean, estimate, "wb"), "")
    assert speech.pesq_wb(clean, clean)[0] == pytest.approx(4.644, abs=1e-3)
    assert speech.stoi(clean, estimate) == stoi(clean, estimate, 16000)
    extended = [speech.stoi(clean, estimate, extended=True) for _ in range(5)]
    assert extended[0] == pytest.approx(stoi(clean, estimate, 16000, extended=True), abs=1e-12)
    assert len(set(extended)) == 1  # the package's own are not the same twice


@pytest.mark.parametrize(
    ("clean", "estimate", "reason"),
    [
        (np.zeros(16000), np.ones(16000), "NoUtterancesError"),
        (sounds()[0][:3000], sounds()[1][:3000], "BufferTooShortError"),
        (sounds()[0], np.full(16000, np.nan), "NotFinite"),
    ],
)
def test_no_pesq_is_a_reason_and_never_a_number(clean, estimate, reason):
    value, why = speech.pesq_wb(clean, estimate)
    assert math.isnan(value) and why == reason


def test_all_measures_of_a_sound_and_of_silence():
    clean, estimate = sounds(1.0)
    found = speech.measure(clean.astype(np.float32), estimate.astype(np.float32))
    assert set(found) == {"pesq", "ssnr", "stoi", "estoi", "si_sdr", "gain"}
    assert all(math.isfinite(value) for value in found.values())
    better = speech.measure(clean, 0.9 * clean + 0.1 * estimate)
    assert all(better[name] > found[name] for name in found if name != "gain")
    assert math.isnan(speech.measure(np.zeros(16000), estimate)["pesq"])


def test_sdr_counts_the_level_and_lsd_is_in_decibels():
    rng = np.random.default_rng(0)
    clean = rng.standard_normal(16000).astype(np.float32)
    noise = rng.standard_normal(16000).astype(np.float32)
    assert speech.sdr(clean, clean + 0.1 * noise) == pytest.approx(20, abs=0.2)
    assert speech.sdr(clean, 0.5 * clean) == pytest.approx(10 * np.log10(4))  # SI-SDR would not mind
    assert np.isnan(speech.sdr(np.zeros(100), clean[:100])) and np.isnan(speech.sdr(clean, clean * np.nan))
    assert speech.lsd(clean, clean) == 0 and speech.lsd(clean, 0.1 * clean) == pytest.approx(20, abs=0.01)
    assert np.isnan(speech.lsd(clean[:100], clean[:100]))
