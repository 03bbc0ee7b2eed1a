"""Measures of speech quality against a clean recording, as numpy functions of float samples at 16 kHz.

Nothing here imports torch: the processes that compute PESQ during training stay small.
PESQ and STOI come from packages; LLR, WSS, segmental SNR and the composites CSIG, CBAK and COVL follow Hu and Loizou.
"""

import numpy as np

RATE = 16000
FRAME, SHIFT = 480, 120  # 30 ms every 7.5 ms
LPC_ORDER = 16
KEPT = 0.95  # LLR and WSS ignore the worst 5 % of the frames
INT16 = 32768.0  # composites are defined on int16 samples: on -1..1 the energy floor of WSS would cut off real sound

# Critical bands of WSS: centres and bandwidths in Hz
CENTRES = np.array(
    [50, 120, 190, 260, 330, 400, 470, 540, 617.372, 703.378, 798.717, 904.128, 1020.38, 1148.30, 1288.72, 1442.54]
    + [1610.70, 1794.16, 1993.93, 2211.08, 2446.71, 2701.97, 2978.04, 3276.17, 3597.63]
)
WIDTHS = np.array(
    [70.0] * 7
    + [77.3724, 86.0056, 95.3398, 105.411, 116.256, 127.914, 140.423, 153.823, 168.154, 183.457, 199.776, 217.153]
    + [235.631, 255.255, 276.072, 298.126, 321.465, 346.136]
)
WSS_FFT = 1024

HIGHER_IS_BETTER = ("pesq", "csig", "cbak", "covl", "ssnr", "stoi", "estoi", "si_sdr")


def pesq_wb(clean: np.ndarray, estimate: np.ndarray) -> tuple[float, str]:
    """Wide-band PESQ and "", or NaN and the reason why there is none; never a made-up value."""
    from pesq import pesq

    if not np.isfinite(estimate).all():
        return float("nan"), "NotFinite"
    try:
        return float(pesq(RATE, clean, estimate, "wb")), ""
    except Exception as error:  # silence, too short, and whatever else the reference code refuses
        return float("nan"), type(error).__name__


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


def _best_frames(values: np.ndarray) -> float:
    return float(np.sort(values)[: round(KEPT * len(values))].mean())


def _lpc(autocorrelation: np.ndarray) -> np.ndarray:
    """(n, order + 1) autocorrelations -> prediction polynomials 1, -a1, -a2, ..., all frames at once (Levinson)."""
    n, size = autocorrelation.shape
    polynomial = np.zeros((n, size))
    polynomial[:, 0] = 1
    error = autocorrelation[:, 0].copy()
    for i in range(1, size):
        reflection = (polynomial[:, :i] * autocorrelation[:, i:0:-1]).sum(1) / error
        polynomial[:, 1 : i + 1] -= reflection[:, None] * polynomial[:, i - 1 :: -1][:, :i]
        error = error * (1 - reflection**2)
    return polynomial


def llr(clean: np.ndarray, estimate: np.ndarray) -> float:
    """Log-likelihood ratio of the two vocal-tract models."""
    count = int((len(clean) - FRAME) / SHIFT)
    eps = np.finfo(float).eps  # a frame of digital silence has no model
    models, correlations = [], []
    for wave in (clean, estimate):
        frames = _frames(wave + eps, count)
        lags = np.stack([(frames[:, : FRAME - k] * frames[:, k:]).sum(1) for k in range(LPC_ORDER + 1)], axis=1)
        correlations.append(lags)
        models.append(_lpc(lags))
    place = np.arange(LPC_ORDER + 1)
    toeplitz = correlations[0][:, np.abs(place[:, None] - place)]
    ratio = np.einsum("ni,nij,nj->n", models[1], toeplitz, models[1])
    ratio /= np.einsum("ni,nij,nj->n", models[0], toeplitz, models[0])
    return _best_frames(np.log(ratio))


def _band_filters() -> np.ndarray:
    """(25, 512) Gaussian critical-band filters."""
    bins = WSS_FFT // 2
    hz_per_bin = RATE / 2 / bins
    centre, width = np.floor(CENTRES / hz_per_bin), WIDTHS / hz_per_bin
    distance = (np.arange(bins) - centre[:, None]) / width[:, None]
    filters = np.exp(-11 * distance**2 + np.log(WIDTHS.min() / WIDTHS)[:, None])
    return filters * (filters > np.exp(-30 / (2 * 2.303)))


def _slopes(wave: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, 24) slopes between neighbouring bands in dB, and the weight of each."""
    spectrum = np.square(np.abs(np.fft.rfft(_frames(wave, count) / INT16, WSS_FFT)))[:, :-1]
    energy = 10 * np.log10(np.maximum(spectrum @ _band_filters().T, 1e-10))
    slope = np.diff(energy, axis=1)
    bands = slope.shape[1]
    peak = np.empty_like(slope)  # energy of the nearest peak, uphill to the right or to the left
    for i in range(bands):
        right = np.full(len(slope), bands)
        for n in range(bands - 1, i - 1, -1):
            right = np.where(slope[:, n] > 0, right, n)
        left = np.full(len(slope), -1)
        for n in range(i + 1):
            left = np.where(slope[:, n] <= 0, left, n)
        top = np.where(slope[:, i] > 0, right - 1, left + 1)
        peak[:, i] = np.take_along_axis(energy, top[:, None], 1)[:, 0]
    loudest = energy.max(1, keepdims=True)
    weight = 20 / (20 + loudest - energy[:, :-1]) * (1 / (1 + peak - energy[:, :-1]))
    return slope, weight


def wss(clean: np.ndarray, estimate: np.ndarray) -> float:
    """Weighted spectral slope distance between int16 signals."""
    count = int(len(clean) / SHIFT - FRAME / SHIFT)
    (slope_c, weight_c), (slope_e, weight_e) = _slopes(clean, count), _slopes(estimate, count)
    weight = (weight_c + weight_e) / 2
    return _best_frames((weight * np.square(slope_c - slope_e)).sum(1) / weight.sum(1))


def composites(clean: np.ndarray, estimate: np.ndarray, pesq: float) -> dict[str, float]:
    """CSIG (signal), CBAK (background), COVL (overall), each 1 to 5, and the segmental SNR. Samples in -1..1."""
    clean, estimate = clean * INT16, estimate * INT16
    tract, slope, snr = llr(clean, estimate), wss(clean, estimate), ssnr(clean, estimate)
    opinions = {
        "csig": 3.093 - 1.029 * tract + 0.603 * pesq - 0.009 * slope,
        "cbak": 1.634 + 0.478 * pesq - 0.007 * slope + 0.063 * snr,
        "covl": 1.594 + 0.805 * pesq - 0.512 * tract - 0.007 * slope,
    }
    return {name: float(np.clip(value, 1, 5)) for name, value in opinions.items()} | {"ssnr": snr}


def measure(clean: np.ndarray, estimate: np.ndarray) -> dict[str, float]:
    """All measures of one sound; NaN where a measure is undefined, such as PESQ of silence."""
    clean, estimate = clean.astype(np.float64), estimate.astype(np.float64)
    score, _ = pesq_wb(clean, estimate)
    long_enough = len(clean) >= 2 * FRAME + 1
    nothing = dict.fromkeys(("csig", "cbak", "covl", "ssnr"), float("nan"))
    return {
        "pesq": score,
        **(composites(clean, estimate, score) if long_enough else nothing),
        "stoi": stoi(clean, estimate),
        "estoi": stoi(clean, estimate, extended=True),
        "si_sdr": si_sdr(clean, estimate),
        "gain": gain(clean, estimate),
    }
