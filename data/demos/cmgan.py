"""The demo pairs of the enhancers: the demo's voices with synthetic noise, through data/pairs.py.

demo-cmgan/audio/clean, audio/noise    what pairs.py is given
demo-cmgan/pairs                       48 clips of three voices, and 8 of a fourth to hold out
"""

from pathlib import Path

from demos import dia

VOICES_OF_SPLIT = {"ada": 16, "ben": 16, "cleo": 16, "dov": 8}
NOISES = {"hiss": 0.0, "rumble": 1.5, "wind": 1.0}  # name -> how fast the spectrum falls
SNR = (15.0, 35.0)  # the voices are so clean that PESQ is 1.1 to 3 here


def build_parts(folder: Path, final: Path, snr: tuple[float, float] = SNR) -> None:
    import soundfile

    texts = dia.demo_texts()
    for side in ("clean", "noise"):
        (folder / "audio" / side).mkdir(parents=True)
    for speaker, count in VOICES_OF_SPLIT.items():
        for number in range(count):
            path = folder / "audio" / "clean" / f"{speaker}_{number:03d}.wav"
            soundfile.write(path, dia.speak(texts.pop(), speaker), dia.RATE, subtype="PCM_16")
    for number, (name, slope) in enumerate(NOISES.items()):
        soundfile.write(folder / "audio" / "noise" / f"{name}.wav", noise(slope, number), dia.RATE, subtype="PCM_16")

    from pairs import Settings, find_mixtures, pairs_key, write_pairs

    settings = Settings(sample_rate=16000, snr=snr, seed=dia.SEED, min_seconds=0.4)
    mixtures = find_mixtures(folder / "audio" / "clean", folder / "audio" / "noise", dia.SEED)
    write_pairs(mixtures, settings, pairs_key(mixtures, settings), folder / "work", folder / "pairs", workers=1)


def noise(slope: float, number: int, seconds: float = 5.0):
    """Gaussian noise whose spectrum falls with frequency, swelling once a second."""
    import numpy as np

    rng = np.random.default_rng([dia.SEED, number])
    count = int(seconds * dia.RATE)
    spectrum = np.fft.rfft(rng.standard_normal(count))
    spectrum *= np.maximum(np.fft.rfftfreq(count, 1 / dia.RATE), 50.0) ** (-slope / 2)
    wave = np.fft.irfft(spectrum, count) * (1 + 0.5 * np.sin(2 * np.pi * np.arange(count) / dia.RATE))
    return 0.3 * wave / np.abs(wave).max()
