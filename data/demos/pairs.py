"""The demo of the speech enhancers: the Dia demo's voices with synthetic noise, made by data/pairs.py.

    python data/demo.py --out demo-pairs --model pairs

demo-pairs/audio/clean, audio/noise   the recordings that are mixed
demo-pairs/mild                       little noise (15 to 35 dB), for CMGAN: 48 clips of three voices with three noises,
                                      and 8 clips for evaluation, of another voice with another noise
demo-pairs/strong                     much noise (0 to 10 dB), for the Diffusion Buffer: the same clips and noises
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
from pairs import Settings, find_mixtures, pairs_key, write_pairs

from demos import dia

CLIPS_PER_VOICE = {"ada": 16, "ben": 16, "cleo": 16, "dov": 8}
NOISES = {"hiss": 0.0, "rumble": 1.5, "wind": 1.0}  # name -> slope: power falls with frequency ** slope
NEW_VOICE, NEW_NOISE = "dov", {"rain": 0.5}  # the recipes hold this voice out, and nothing else has this noise
SNR_DB = {
    "mild": (15.0, 35.0),  # the voices are so clean that PESQ is only 1.1 to 3 here
    "strong": (0.0, 10.0),  # the Diffusion Buffer is judged by decibels
}


def build_parts(folder: Path, final: Path) -> None:
    texts = dia.demo_texts()
    clean_folder, noise_folder = folder / "audio" / "clean", folder / "audio" / "noise"
    clean_folder.mkdir(parents=True)
    noise_folder.mkdir()
    for speaker, count in CLIPS_PER_VOICE.items():
        for number in range(count):
            path = clean_folder / f"{speaker}_{number:03d}.wav"
            soundfile.write(path, dia.speak(texts.pop(), speaker), dia.RATE, subtype="PCM_16")
    for number, (name, slope) in enumerate((NOISES | NEW_NOISE).items()):
        path = (folder / "audio" if name in NEW_NOISE else noise_folder) / f"{name}.wav"
        soundfile.write(path, make_noise(slope, number), dia.RATE, subtype="PCM_16")

    mixtures = find_mixtures(clean_folder, noise_folder, dia.SEED)
    new = {"other": folder / "audio" / "rain.wav"}
    mixtures = [replace(pair, **new) if pair.id.startswith(NEW_VOICE) else pair for pair in mixtures]
    for name, snr in SNR_DB.items():
        settings = Settings(sample_rate=16000, snr=snr, seed=dia.SEED, min_seconds=0.4)
        key = pairs_key(mixtures, settings)
        write_pairs(mixtures, settings, key, folder / "work", folder / name, workers=1)
    (folder / "work").rmdir()


def make_noise(slope: float, number: int, seconds: float = 5.0):
    """Gaussian noise whose spectrum falls with frequency, swelling once per second."""
    rng = np.random.default_rng([dia.SEED, number])
    count = int(seconds * dia.RATE)
    spectrum = np.fft.rfft(rng.standard_normal(count))
    spectrum *= np.maximum(np.fft.rfftfreq(count, 1 / dia.RATE), 50.0) ** (-slope / 2)
    wave = np.fft.irfft(spectrum, count) * (1 + 0.5 * np.sin(2 * np.pi * np.arange(count) / dia.RATE))
    return 0.3 * wave / np.abs(wave).max()
