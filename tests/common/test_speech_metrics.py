"""Speech metrics against slow, literal computations of their definitions."""

import math

import numpy as np
import pytest
from scipy.linalg import solve_toeplitz, toeplitz

from common import speech_metrics as speech
from helpers.support import voice as sounds


def literal_frames(wave, count):
    window = [0.5 * (1 - math.cos(2 * math.pi * n / 481)) for n in range(1, 481)]
    return [wave[120 * i : 120 * i + 480] * window for i in range(count)]


def literal_llr(clean, estimate):
    values = []
    count = int((len(clean) - 480) / 120)
    for c, e in zip(literal_frames(clean, count), literal_frames(estimate, count), strict=True):
        lags = [np.array([np.dot(x[: 480 - k], x[k:]) for k in range(17)]) for x in (c, e)]
        models = [np.concatenate([[1], -solve_toeplitz(r[:16], r[1:])]) for r in lags]
        matrix = toeplitz(lags[0])
        values.append(math.log((models[1] @ matrix @ models[1]) / (models[0] @ matrix @ models[0])))
    return np.mean(sorted(values)[: round(0.95 * len(values))])


def literal_wss(clean, estimate):
    values = []
    count = int(len(clean) / 120 - 4)
    for frames in zip(literal_frames(clean, count), literal_frames(estimate, count), strict=True):
        slopes, weights = [], []
        for frame in frames:
            power = np.abs(np.fft.fft(frame / 32768, 1024)) ** 2
            energy = []
            for centre, width in zip(speech.CENTRES, speech.WIDTHS, strict=True):
                total, f0, bw = 0.0, math.floor(centre / 8000 * 512), width / 8000 * 512
                for j in range(512):
                    gain = math.exp(-11 * ((j - f0) / bw) ** 2 + math.log(70 / width))
                    total += power[j] * gain if gain > math.exp(-30 / 4.606) else 0.0
                energy.append(10 * math.log10(max(total, 1e-10)))
            slope = [energy[i + 1] - energy[i] for i in range(24)]
            weight = []
            for i in range(24):
                n = i
                if slope[i] > 0:
                    while n < 24 and slope[n] > 0:
                        n += 1
                    peak = energy[n - 1]
                else:
                    while n >= 0 and slope[n] <= 0:
                        n -= 1
                    peak = energy[n + 1]
                weight.append(20 / (20 + max(energy) - energy[i]) * 1 / (1 + peak - energy[i]))
            slopes.append(slope)
            weights.append(weight)
        w = [(a + b) / 2 for a, b in zip(*weights, strict=True)]
        values.append(sum(k * (a - b) ** 2 for k, a, b in zip(w, *slopes, strict=True)) / sum(w))
    return np.mean(sorted(values)[: round(0.95 * len(values))])


def literal_ssnr(clean, estimate):
    count = int(len(clean) / 120 - 4)
    frames = zip(literal_frames(clean, count), literal_frames(estimate, count), strict=True)
    return np.mean([min(35, max(-10, 10 * math.log10((c @ c) / ((c - e) @ (c - e))))) for c, e in frames])


def test_composites_equal_the_literal_definitions():
    clean, estimate = sounds(0.5)
    pesq = 2.5
    big = clean * 32768, estimate * 32768
    llr, wss, ssnr = literal_llr(*big), literal_wss(*big), literal_ssnr(*big)
    assert wss > 1 and llr > 0.05
    found = speech.composites(clean, estimate, pesq)
    assert speech.llr(*big) == pytest.approx(llr, rel=1e-6)
    assert speech.wss(*big) == pytest.approx(wss, rel=1e-6)
    assert found["ssnr"] == pytest.approx(ssnr, rel=1e-6)
    opinions = [3.093 - 1.029 * llr + 0.603 * pesq - 0.009 * wss, 1.634 + 0.478 * pesq - 0.007 * wss + 0.063 * ssnr]
    opinions.append(1.594 + 0.805 * pesq - 0.512 * llr - 0.007 * wss)
    expected = [min(5, max(1, value)) for value in opinions]
    assert [found[name] for name in ("csig", "cbak", "covl")] == pytest.approx(expected, rel=1e-6)


def test_the_composites_are_of_int16_samples():
    """On -1..1 the energy floor cuts real sound and every opinion comes out better than it is."""
    clean, estimate = sounds(0.5, noise=1e-3)
    assert speech.wss(clean, estimate) < 0.9 * speech.wss(clean * 32768, estimate * 32768)


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
    assert {*speech.HIGHER_IS_BETTER, "gain"} == set(found) and all(math.isfinite(v) for v in found.values())
    better = speech.measure(clean, 0.9 * clean + 0.1 * estimate)
    assert all(better[name] > found[name] for name in speech.HIGHER_IS_BETTER)
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
