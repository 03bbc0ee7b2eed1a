"""Reading a clip's samples: decoded, checked, mixed and resampled exactly once, here and nowhere later."""

import io
import struct
from pathlib import Path

import numpy as np

SILENCE_RMS = 1e-3  # -60 dBFS


class Reject(Exception):
    """This clip cannot be used; the message is the reason in rejects.jsonl."""


def read_samples(data: bytes, path: Path, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    """(channels, n) float32 and the sample rate."""
    import soundfile

    if not data:
        raise Reject("empty file")
    refuse_truncated_wav(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = file.samplerate
            first = round((start or 0) * rate)
            last = file.frames if end is None else min(round(end * rate), file.frames)
            if first >= last:
                raise Reject(
                    f"no samples between start {start} and end {end} ({file.frames / rate:.2f} s long)"
                )
            file.seek(first)
            wave = file.read(last - first, dtype="float32", always_2d=True).T
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise Reject(f"unreadable audio: {str(error).split(': ')[-1].strip()}") from None
    if wave.shape[1] < last - first:
        raise Reject(f"truncated: {wave.shape[1]} of {last - first} samples")
    return wave, rate


def refuse_truncated_wav(data: bytes) -> None:
    """libsndfile reads a cut wav as if it were whole; the header says how long it should be."""
    if data[:4] == b"RIFF" and len(data) >= 8:
        size = struct.unpack("<I", data[4:8])[0]
        # 0 and 0xFFFFFFFF are what streaming writers leave when they do not know the size.
        if 0 < size < 0xFFFFFFF0 and len(data) < size + 8:
            raise Reject(f"truncated wav: {len(data)} of {size + 8} bytes")


def prepare(wave: np.ndarray, rate: int, target_rate: int, stereo: bool, min_seconds: float):
    """(1, n) or, for a stereo job, (2, n) float32 tensor at the codec's rate."""
    import torch
    import torchaudio.functional

    channels, samples = wave.shape
    if channels > 2:
        raise Reject(f"{channels} channels; at most 2 are supported")
    if not np.isfinite(wave).all():
        raise Reject("NaN or infinite samples")
    if samples < min_seconds * rate:
        raise Reject(f"too short: {samples / rate:.3f} s, minimum {min_seconds} s")
    if np.sqrt(np.mean(np.square(wave, dtype=np.float64))) < SILENCE_RMS:
        raise Reject("silence: level below -60 dBFS")
    if not stereo:
        wave = wave.mean(axis=0, keepdims=True)
    return torchaudio.functional.resample(torch.from_numpy(np.ascontiguousarray(wave)), rate, target_rate)
