"""What a pitch tracker hears in the music of the Llama MoT demo, and whether it is what the caption names."""

import sys
from pathlib import Path

import numpy as np
import torch

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "data"))

from demos.mot import MELODIES, REGISTERS, TEMPOS

WINDOW = 0.02  # seconds
LOWEST, HIGHEST = 150, 1300  # Hz
SHORTEST = 3  # windows; anything shorter is the change from one tone to the next
HALF_STEP = 50  # Hz; neighbouring tones of the demo's scale are 100 Hz apart


def track(wave: np.ndarray, rate: int) -> np.ndarray:
    """Pitch in Hz of each window, by autocorrelation; nan where there is none."""
    size = int(WINDOW * rate)
    shortest, longest = int(rate / HIGHEST), int(rate / LOWEST) + 1
    lags, pitches = np.arange(longest + 2), []
    for frame in wave[: len(wave) // size * size].reshape(-1, size):
        frame = frame - frame.mean()
        power = np.concatenate([[0.0], np.cumsum(frame**2)])
        both = np.sqrt(power[size - lags] * (power[size] - power[lags])) + 1e-9  # of the parts that overlap
        correlation = np.fft.irfft(np.abs(np.fft.rfft(frame, 2 * size)) ** 2)[: len(lags)] / both
        middle = correlation[1:-1]
        peaks = 1 + np.flatnonzero((middle >= correlation[:-2]) & (middle >= correlation[2:]))
        peaks = peaks[(peaks >= shortest) & (peaks <= longest)]
        if power[size] / size < 1e-5 or not len(peaks) or correlation[peaks].max() < 0.6:
            pitches.append(np.nan)
            continue
        # Multiples of the period correlate as well: the shortest is the period.
        lag = int(peaks[correlation[peaks] >= 0.93 * correlation[peaks].max()][0])
        left, top, right = correlation[lag - 1 : lag + 2]
        pitches.append(rate / (lag + (left - right) / (2 * (left - 2 * top + right) + 1e-12)))
    return np.array(pitches)


def tones(wave: np.ndarray, rate: int) -> list[tuple[float, float]]:
    """Pitch in Hz and length in seconds of each tone."""
    groups: list[list[float]] = []
    for pitch in track(wave, rate):
        if groups and abs(pitch - np.median(groups[-1])) < HALF_STEP:
            groups[-1].append(pitch)
        else:
            groups.append([pitch])
    found = [(float(np.median(group)), len(group) * WINDOW) for group in groups]
    return [(pitch, length) for pitch, length in found if length > (SHORTEST - 0.5) * WINDOW and not np.isnan(pitch)]


def named(caption: str) -> tuple[list[int], float]:
    """The pitches in Hz that a caption names, and the seconds per tone."""
    [melody] = [steps for words, steps in MELODIES.items() if words in caption]
    [register] = [lowest for word, lowest in REGISTERS.items() if f"the {word} register" in caption]
    [frames] = [frames for word, frames in TEMPOS.items() if word in caption]
    return [50 * (register + 2 * step) for step in melody], frames * 0.02


def follows(wave: np.ndarray, rate: int, caption: str) -> dict[str, bool]:
    """Whether the tones are those of the caption, one by one and no others, and last as long."""
    pitches, seconds = named(caption)
    heard = tones(wave, rate)
    melody = len(heard) == len(pitches) and all(
        abs(tone - pitch) < HALF_STEP for (tone, _), pitch in zip(heard, pitches, strict=True)
    )
    # The two tempos are 0.06 s apart.
    tempo = bool(heard and abs(np.median([length for _, length in heard]) - seconds) < 0.03)
    return {"melody": melody, "tempo": tempo}


@torch.no_grad()
def decode(codes_tc: np.ndarray, codec) -> np.ndarray:
    """Decoded by transformers alone; `codec`: an EncodecModel."""
    codes = torch.from_numpy(codes_tc.astype(np.int64)).T[None, None]
    return codec.decode(codes, [None]).audio_values[0, 0].numpy()


def load_codec(demo: Path):
    from transformers import EncodecModel

    return EncodecModel.from_pretrained(demo / "codec", dtype=torch.float32).eval()
