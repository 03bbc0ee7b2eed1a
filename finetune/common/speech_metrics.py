"""Measures of speech quality against a clean recording, as numpy functions of float samples at 16 kHz.

Nothing here imports torch: the processes that compute PESQ during training stay small.
PESQ and STOI come from packages; the segmental SNR follows Hu and Loizou.
"""

from collections.abc import Callable

import numpy as np

from common.errors import UserError

RATE = 16000
FRAME, SHIFT = 480, 120  # of the segmental SNR: 30 ms every 7.5 ms


def pesq_wb(clean: np.ndarray, estimate: np.ndarray) -> tuple[float, str]:
    """Wide-band PESQ and "", or NaN and the reason why there is none; never a made-up value."""
    from pesq import pesq

    if not np.isfinite(estimate).all():
        return float("nan"), "NotFinite"
    try:
        return float(pesq(RATE, clean, estimate, "wb")), ""
    except Exception as error:  # silence, too short, and whatever else the reference code refuses
        return float("nan"), type(error).__name__


def load_dnsmos() -> Callable:
    """A function from samples to two opinions, 1 to 5, that DNSMOS predicts: overall (P.835), and P.808's."""
    try:
        from speechmos import dnsmos
    except ImportError:
        raise UserError("--dnsmos needs the package speechmos: pip install speechmos onnxruntime") from None

    def predict(wave: np.ndarray) -> tuple[float, float]:
        scores = dnsmos.run(wave.clip(-1, 1), sr=RATE)
        return float(scores["ovrl_mos"]), float(scores["p808_mos"])

    return predict


def stoi(clean: np.ndarray, estimate: np.ndarray, extended: bool = False) -> float:
    import warnings

    from pystoi import stoi as measure

    before = np.random.get_state()
    np.random.seed(0)  # extended STOI adds noise of 1e-16: without a seed an evaluation would not repeat exactly
    with warnings.catch_warnings():  # for a sound with too little speech it warns and returns 1e-5
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(clean, estimate, RATE, extended=extended))
        except RuntimeWarning:
            return float("nan")
        finally:
            np.random.set_state(before)


def si_sdr(clean: np.ndarray, estimate: np.ndarray) -> float:
    """Scale-invariant signal-to-distortion ratio in dB, means removed."""
    clean, estimate = clean - clean.mean(), estimate - estimate.mean()
    energy = np.dot(clean, clean)
    if energy == 0:
        return float("nan")
    target = np.dot(estimate, clean) / energy * clean
    noise = estimate - target
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.dot(target, target) / max(np.dot(noise, noise), 1e-20)))


def sdr(clean: np.ndarray, estimate: np.ndarray) -> float:
    """Signal-to-distortion ratio in dB, sensitive to the level. NaN for silence and for non-finite estimates."""
    clean, estimate = clean.astype(np.float64), estimate.astype(np.float64)
    speech, noise = np.dot(clean, clean), np.square(estimate - clean).sum()
    return float(10 * np.log10(speech / max(noise, 1e-20))) if speech and np.isfinite(noise) else float("nan")


def lsd(clean: np.ndarray, estimate: np.ndarray, size: int = 512, shift: int = 256) -> float:
    """Log-spectral distance in dB: root mean square over bins, mean over frames."""
    if len(clean) < size:
        return float("nan")
    window = np.hanning(size + 1)[:-1]
    logs = []
    for wave in (clean, estimate):
        frames = np.lib.stride_tricks.sliding_window_view(wave.astype(np.float64), size)[::shift] * window
        logs.append(10 * np.log10(np.square(np.abs(np.fft.rfft(frames))) + 1e-8))
    return float(np.sqrt(np.square(logs[0] - logs[1]).mean(1)).mean())


def gain(clean: np.ndarray, estimate: np.ndarray) -> float:
    """The level of the clean speech in the estimate; 1 is right. PESQ, STOI and SI-SDR do not depend on it."""
    energy = np.dot(clean, clean)
    return float(np.dot(estimate, clean) / energy) if energy else float("nan")


def _frames(wave: np.ndarray, count: int) -> np.ndarray:
    """(count, FRAME) windowed frames."""
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(1, FRAME + 1) / (FRAME + 1)))
    starts = SHIFT * np.arange(count)
    return wave[starts[:, None] + np.arange(FRAME)] * window


def ssnr(clean: np.ndarray, estimate: np.ndarray) -> float:
    """Segmental signal-to-noise ratio in dB, frames clipped to -10 .. 35."""
    count = int(len(clean) / SHIFT - FRAME / SHIFT)
    signal = np.square(_frames(clean, count)).sum(1)
    noise = np.square(_frames(clean, count) - _frames(estimate, count)).sum(1)
    eps = np.finfo(float).eps
    return float(np.clip(10 * np.log10(signal / (noise + eps) + eps), -10, 35).mean())


def measure(clean: np.ndarray, estimate: np.ndarray) -> dict[str, float]:
    """All measures of one sound; NaN where a measure is undefined, such as PESQ of silence."""
    clean, estimate = clean.astype(np.float64), estimate.astype(np.float64)
    score, _ = pesq_wb(clean, estimate)
    long_enough = len(clean) >= 2 * FRAME + 1
    return {
        "pesq": score,
        "ssnr": ssnr(clean, estimate) if long_enough else float("nan"),
        "stoi": stoi(clean, estimate),
        "estoi": stoi(clean, estimate, extended=True),
        "si_sdr": si_sdr(clean, estimate),
        "gain": gain(clean, estimate),
    }
