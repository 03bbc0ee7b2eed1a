"""Read the content of a clip, samples or codes: decode, check, mix to mono and resample, here and nowhere else."""

import io
import math
import struct

import numpy as np
import soundfile

SILENCE_RMS = 1e-3  # -60 dBFS


class Reject(Exception):
    """This clip cannot be used; the message becomes its reason in rejects.jsonl."""


def read_samples(data: bytes, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    """(channels, n) float32 samples from `start` to `end` seconds, and the sample rate."""
    if not data:
        raise Reject("empty file")
    refuse_truncated_wav(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = file.samplerate
            first = round((start or 0) * rate)
            last = file.frames if end is None else min(round(end * rate), file.frames)
            if not file.frames:
                raise Reject("no samples: 0.00 s long")
            if first >= last:
                raise Reject(f"no samples between start {start} and end {end} ({file.frames / rate:.2f} s long)")
            file.seek(first)
            wave = file.read(last - first, dtype="float32", always_2d=True).T
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise Reject(f"unreadable audio: {str(error).split(': ')[-1].strip()}") from None
    if wave.shape[1] < last - first:
        raise Reject(f"truncated: {wave.shape[1]} of {last - first} samples")
    return wave, rate


def refuse_truncated_wav(data: bytes) -> None:
    """libsndfile reads a truncated wav as if it were complete, so compare its length with its header."""
    if data[:4] == b"RIFF" and len(data) >= 8:
        size = struct.unpack("<I", data[4:8])[0]
        # Streaming writers leave 0 or 0xFFFFFFFF, because they do not know the size.
        if 0 < size < 0xFFFFFFF0 and len(data) < size + 8:
            raise Reject(f"truncated wav: {len(data)} of {size + 8} bytes")


def prepare(
    wave: np.ndarray,
    rate: int,
    target_rate: int,
    stereo: bool = False,
    min_seconds: float = 0.0,
    max_seconds: float = math.inf,
):
    """(1, n) float32 tensor at the target rate, mixed to mono; with `stereo`, as many channels as the source."""
    import torch
    import torchaudio.functional

    channels, samples = wave.shape
    if channels > 2:
        raise Reject(f"{channels} channels; at most 2 are supported")
    if not np.isfinite(wave).all():
        raise Reject("NaN or infinite samples")
    if samples < min_seconds * rate:
        raise Reject(f"too short: {samples / rate:.3f} s, minimum {min_seconds} s")
    if samples > max_seconds * rate:
        raise Reject(f"too long: {samples / rate:.1f} s, maximum {max_seconds:g} s")
    if np.sqrt(np.mean(np.square(wave, dtype=np.float64))) < SILENCE_RMS:
        raise Reject("silence: level below -60 dBFS")
    if not stereo:
        wave = wave.mean(axis=0, keepdims=True)
    return torchaudio.functional.resample(torch.from_numpy(np.ascontiguousarray(wave)), rate, target_rate)


def set_loudness(samples, rate: int, target: float):
    """(channels, n) samples at `target` LUFS (ITU-R BS.1770), or as near to it as their peak of 1 allows."""
    import torch
    import torchaudio.functional

    least = round(0.4 * rate)  # one block of the measurement; a shorter clip is measured with silence after it
    heard = torch.nn.functional.pad(samples, (0, max(0, least - samples.shape[-1])))
    loudness = float(torchaudio.functional.loudness(heard, rate))
    if not np.isfinite(loudness):  # every block is below the gate
        raise Reject("too quiet to measure its loudness")
    return samples * min(10 ** ((target - loudness) / 20), 1 / float(samples.abs().max()))


def bandwidth(wave: np.ndarray, rate: int) -> float:
    """The highest frequency in Hz with sound in it. An upsampled or telephone recording has none far below rate / 2.

    Its limit is 80 dB under the loudest frequency, on average over the clip: microphones and rooms are noisier than
    that, the rounding of 16-bit samples and the stopband of a resampler are not.
    """
    size = 1024
    mono = np.pad(wave.mean(axis=0), (0, max(0, size - wave.shape[1])))
    windows = mono[: len(mono) // size * size].reshape(-1, size) * np.hanning(size)
    power = np.square(np.abs(np.fft.rfft(windows))).mean(axis=0)
    return float(np.flatnonzero(power > 1e-8 * power.max()).max(initial=0) * rate / size)


def read_codes(data: bytes, codebooks: int, codebook_size: int, stereo: bool, name: str = "") -> np.ndarray:
    """(T, C) int16 codes from an .npy file of (C, T); also of (T, C), or flat, frame by frame, with a warning.

    Nothing is unpickled. Nothing is clamped: a code out of range means damage, which clamping would hide.
    """
    if data[:6] != b"\x93NUMPY":
        raise Reject("not an .npy file" if data else "empty file")
    try:
        codes = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise Reject(f"unreadable .npy: {error}") from None
    if codes.dtype.kind not in "iu":
        raise Reject(f"codes are {codes.dtype}, not integers")
    while codes.ndim > 2 and codes.shape[0] == 1:  # a plain squeeze would also remove T = 1
        codes = codes[0]
    counts = (codebooks, 2 * codebooks)
    if codes.ndim == 1 and len(codes) % codebooks == 0:
        print(f"warning: {name} is flat, read frame by frame, {codebooks} codes each", flush=True)
        codes = codes.reshape(-1, codebooks)
    elif codes.ndim == 2:
        if codes.shape[0] in counts:
            codes = codes.T
        elif codes.shape[1] in counts:
            print(f"warning: {name} has shape {codes.shape}, read as (frames, codebooks)", flush=True)
    if codes.ndim != 2 or codes.shape[1] not in counts:
        raise Reject(f"codes of shape {codes.shape} do not match {codebooks} codebooks")
    if not stereo and codes.shape[1] != codebooks:
        raise Reject(f"{codes.shape[1]} channels are stereo codes: add --stereo")
    if stereo and codes.shape[1] == codebooks:
        codes = np.concatenate([codes, codes], axis=1)
    if not len(codes):
        raise Reject("no frames")
    if codes.min() < 0 or codes.max() >= codebook_size:
        bad = codes.min() if codes.min() < 0 else codes.max()
        raise Reject(f"code {bad} is outside 0..{codebook_size - 1}")
    return np.ascontiguousarray(codes, dtype=np.int16)
