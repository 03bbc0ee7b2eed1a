"""data/demos/pairs.py: the same clips with little and with much noise."""

import datasets
import numpy as np
import pytest


@pytest.fixture(scope="module")
def demo_pairs(pairs):
    """name -> {id: row} of both datasets of the demo."""
    folders = {name: pairs.parent / name for name in ("mild", "strong")}
    return {
        name: {row["id"]: row for row in datasets.load_from_disk(str(folder)).with_format("numpy")}
        for name, folder in folders.items()
    }


def test_both_have_the_same_clips(demo_pairs):
    counts = {"ada": 16, "ben": 16, "cleo": 16, "dov": 8}
    ids = {f"{voice}_{number:03d}" for voice, count in counts.items() for number in range(count)}
    assert demo_pairs["mild"].keys() == demo_pairs["strong"].keys() == ids


@pytest.mark.parametrize("name, low, high", [("mild", 15, 35), ("strong", 0, 10)])
def test_snr(demo_pairs, name, low, high):
    snr = []
    for row in demo_pairs[name].values():
        clean, noise = row["clean"].astype(float), row["noisy"].astype(float) - row["clean"]
        snr.append(10 * np.log10((clean**2).sum() / (noise**2).sum()))
    assert low - 0.1 < min(snr) < max(snr) < high + 0.1 and np.ptp(snr) > (high - low) / 2


def test_noise_differs_only_in_level(demo_pairs):
    for id, mild in demo_pairs["mild"].items():
        noises = [row["noisy"].astype(float) - row["clean"] for row in (mild, demo_pairs["strong"][id])]
        assert np.corrcoef(*noises)[0, 1] > 0.99


def test_the_evaluation_voice_has_a_noise_of_its_own(demo_pairs, pairs):
    """By the slope of its spectrum: power falls with the square root of the frequency, in no other noise."""
    slopes = {"dov": [], "others": []}
    for id, row in demo_pairs["strong"].items():
        noise = row["noisy"].astype(float) - row["clean"]
        power = np.abs(np.fft.rfft(noise)) ** 2
        frequency = np.fft.rfftfreq(len(noise), 1 / 16000)
        bands = [power[(frequency >= low) & (frequency < 2 * low)].mean() for low in (200, 400, 800, 1600, 3200)]
        slope = -np.polyfit(np.log(2.0 ** np.arange(5)), np.log(bands), 1)[0]
        slopes["dov" if id.startswith("dov") else "others"].append(slope)
    assert np.allclose(slopes["dov"], 0.5, atol=0.2)
    assert np.min(np.abs(np.array(slopes["others"]) - 0.5)) > 0.25
