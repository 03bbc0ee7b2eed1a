"""Waves to compressed spectra and back, the BBED diffusion, and loudness normalisation: what must match a checkpoint.

N sounds, F frequency bins, K frames of which the last B are the buffer. t: a frame's diffusion time, 0 clean, 1 noisy.
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from common.errors import UserError
from common.keyed_random import generator
from models.diffusion_buffer.network import MULTIPLES, groups_of

RATE = 16000
POWER, FACTOR = 0.5, 0.15  # compression: a bin v becomes FACTOR |v|^POWER with the phase of v
# Level tracking: the loudness that speech is scaled to, below which a frame is a pause, and the averaging time
TARGET_RMS, PAUSE_RMS, AVERAGING_SECONDS = 0.05, 1e-3, 2.0


@dataclass(frozen=True)
class Spec:
    """The settings that give a network's numbers their meaning; saved with the weights and checked on loading."""

    network: str = "ncsnpp"  # or ncsnpp_large, block_causal
    width: int = 96  # channels at the first scale
    block: int = 32  # block_causal: frames per block, 32 or 16
    n_fft: int = 510  # STFT window in samples
    hop: int = 256  # samples between frames
    frames: int = 128  # K, that the network sees; rounded up to a multiple that it accepts
    buffer: int = 20  # B, the last of them, which are being denoised
    sde_c: float = 0.08  # c and k in the diffusion's g(t)^2 = c k^2t
    sde_k: float = 2.6
    t_eps: float = 0.03  # smallest diffusion time
    t_max: float = 0.999  # largest in training
    reverse_start: float = 0.8  # diffusion time of the newest frame of a stream
    loss: str = "dp"  # predicts clean speech, at any delay; dsm or dsm_unweighted: the score
    output_scale: str = "none"  # what the network's output is divided by: none, sigma or time
    context_time: float = 0.0  # diffusion time of the frames before the buffer; official weights with time have 1
    level: str = "none"  # track: causal loudness normalisation
    phase: str = "start"  # of a bin, counted from the window's start or middle
    stream: str = "own"  # official: until the buffer is full the context is empty, then (dp) it is estimated again

    @property
    def bins(self) -> int:
        return self.n_fft // 2 + 1

    @property
    def predicts_clean(self) -> bool:
        return self.loss == "dp"

    def latency(self, delay: int) -> int:
        """Longest time in samples from a sample's arrival to its enhanced value. `delay`: in frames."""
        return self.n_fft + (delay - 1) * self.hop


SPEC_NAMES = tuple(item.name for item in dataclasses.fields(Spec))
SPECS = {  # what --spec NAME means
    "ncsnpp": Spec(),  # the first paper's network; it predicts clean speech, as the second paper's
    "ncsnpp_dsm": Spec(loss="dsm", output_scale="sigma"),  # the first paper: denoising score matching
    "ncsnpp_large": Spec(network="ncsnpp_large", width=128),  # the official trainer's default size
    "block_causal": Spec(network="block_causal", width=128, phase="middle"),  # the second paper
    "demo": Spec(width=8, frames=16, buffer=8, t_max=0.8),  # learns the synthetic noise in a minute
}
CHOICES = {
    "network": ("ncsnpp", "ncsnpp_large", "block_causal"),
    "block": (16, 32),
    "loss": ("dp", "dsm", "dsm_unweighted"),
    "output_scale": ("none", "sigma", "time"),
    "level": ("none", "track"),
    "phase": ("start", "middle"),
    "stream": ("own", "official"),
}


def build_spec(settings: dict) -> Spec:
    """A checked spec; what `settings` leaves open is as published for the network. Refuses every value that would
    otherwise show up later as NaN or a wrong shape."""
    unknown = sorted(set(settings) - set(SPEC_NAMES))
    if unknown:
        raise UserError(f"--spec: {unknown[0]} is no setting; there are {', '.join(SPEC_NAMES)}.")
    for name, choices in CHOICES.items():
        if name in settings and settings[name] not in choices:
            raise UserError(f"--spec: {name} {settings[name]} is not one of {', '.join(map(str, choices))}.")
    published = SPECS[settings.get("network", "ncsnpp")]
    numbers = {name: value for name, value in settings.items() if name not in CHOICES}
    for name, value in numbers.items():
        whole = isinstance(getattr(published, name), int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"--spec: {name} {value!r} is not a {'whole ' if whole else ''}number.")
    if settings.get("loss", "dp") != "dp":
        settings = {"output_scale": "sigma"} | settings
    spec = dataclasses.replace(published, **settings)
    bins_multiple, frames_multiple = MULTIPLES[spec.network]
    asked, spec = spec.frames, dataclasses.replace(spec, frames=-(-spec.frames // frames_multiple) * frames_multiple)
    channels = [spec.width * factor for factor in ((1, 2, 4) if spec.network == "block_causal" else (1, 2, 3, 4))]
    if spec.width < 8 or spec.width % 8 or any(size % groups_of(size) for size in channels):
        raise UserError(f"--spec: width {spec.width} does not fit the group norms: use 8, 16, 24, 32, 64, 96 or 128.")
    if spec.n_fft < 30 or spec.bins % bins_multiple or spec.n_fft % 2:
        fitting = 2 * (max(1, round(spec.bins / bins_multiple)) * bins_multiple - 1)
        raise UserError(
            f"--spec: n_fft {spec.n_fft} gives {spec.bins} bins; {spec.network} needs a multiple of {bins_multiple},"
            f" such as n_fft {fitting}."
        )
    if not spec.n_fft / 4 <= spec.hop <= spec.n_fft / 2 + 1:
        raise UserError(f"--spec: hop {spec.hop} is not between a quarter and a half of n_fft {spec.n_fft}.")
    if not 2 <= spec.buffer <= asked:
        raise UserError(f"--spec: buffer {spec.buffer} does not fit into {asked} frames: use 2 to {asked}.")
    if not 0 < spec.t_eps < spec.t_max < 1 or not spec.t_eps < spec.reverse_start < 1:
        raise UserError(
            f"--spec: t_eps {spec.t_eps:g}, t_max {spec.t_max:g}, reverse_start {spec.reverse_start:g} are out of"
            " order: they need 0 < t_eps < t_max < 1 and t_eps < reverse_start < 1."
        )
    if spec.sde_c <= 0 or spec.sde_k <= 1:
        raise UserError(f"--spec: sde_c {spec.sde_c:g} must be above 0 and sde_k {spec.sde_k:g} above 1.")
    if sigma(spec, spec.t_eps) < 1e-3:
        found = f"{sigma(spec, spec.t_eps):.1e}"
        raise UserError(f"--spec: sigma at t_eps {spec.t_eps:g} is {found}, below 1e-3: raise t_eps.")
    return spec


# ---- spectra ---------------------------------------------------------------------------------------------------


def window(spec: Spec, device=None) -> torch.Tensor:
    """(n_fft,) periodic Hann window."""
    return torch.hann_window(spec.n_fft, device=device)


def frame_count(samples: int, hop: int) -> int:
    """Number of frames whose centre lies within a sound of so many samples."""
    return 1 + samples // hop


def compress(bins: torch.Tensor) -> torch.Tensor:
    return bins * (FACTOR * bins.abs().clamp(min=1e-20) ** (POWER - 1))


def expand(bins: torch.Tensor) -> torch.Tensor:
    """The inverse of `compress`: (|v| / FACTOR)^2 with the phase of v."""
    return bins * bins.abs() / FACTOR**2


def spectra(waves: torch.Tensor, spec: Spec) -> torch.Tensor:
    """(N, (K - 1) hop + n_fft) samples -> (N, F, K) compressed. No padding: the waves hold all samples."""
    bins = torch.stft(waves, spec.n_fft, spec.hop, window=window(spec, waves.device), center=False, return_complex=True)
    return compress(bins) * phase_signs(spec, waves.device)[:, None]


def phase_signs(spec: Spec, device=None) -> torch.Tensor:
    """(F,) signs that move the reference of a bin's phase from the window's start to its middle, and back.

    With the phase counted from the window's start, the sign of any sound alternates from bin to bin. The first layer of
    block_causal is a low-pass over the bins, which then lets only 3 % of the speech through. With the phase counted
    from the middle, neighbouring bins agree.
    """
    signs = torch.ones(spec.bins, device=device)
    if spec.phase == "middle":
        signs[1::2] = -1
    return signs


def analyse(samples: torch.Tensor, spec: Spec) -> torch.Tensor:
    """One frame of a stream: (..., n_fft) samples -> (..., F) compressed."""
    return compress(torch.fft.rfft(samples * window(spec, samples.device))) * phase_signs(spec, samples.device)


def whole_spectrum(wave: torch.Tensor, spec: Spec, frames: int) -> torch.Tensor:
    """(L,) samples -> (F, frames) compressed, as a stream sees them: with silence before and after."""
    before = spec.n_fft // 2
    length = (frames - 1) * spec.hop + spec.n_fft
    return spectra(torch.nn.functional.pad(wave, (before, length - before - len(wave)))[None], spec)[0]


# ---- BBED ------------------------------------------------------------------------------------------------------


def sigma(spec: Spec, t) -> np.ndarray:
    """Standard deviation of the forward process, in float64: fp32 has too few digits near t = 0. Its square is

    c (1-t) [k^2t - 1 + t + 2 k^2 ln k (1-t) (Ei(2(t-1) ln k) - Ei(-2 ln k))]
    """
    from scipy.special import expi

    t, c, k = np.asarray(t, dtype=np.float64), spec.sde_c, spec.sde_k
    log = math.log(k)
    tail = 2 * k**2 * log * (1 - t) * (expi(2 * (t - 1) * log) - expi(-2 * log))
    return np.sqrt(np.maximum(c * (1 - t) * (k ** (2 * t) - 1 + t + tail), 0.0))


def g(spec: Spec, t) -> np.ndarray:
    """Diffusion coefficient: its square is c k^2t."""
    return math.sqrt(spec.sde_c) * spec.sde_k ** np.asarray(t, dtype=np.float64)


def complex_noise(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Complex Gaussian noise with E|z|^2 = 1."""
    real_imag = draw.standard_normal((2, *shape), dtype=np.float32) * np.float32(math.sqrt(0.5))
    return real_imag[0] + 1j * real_imag[1]


def diffuse(clean: torch.Tensor, noisy: torch.Tensor, t: torch.Tensor, sigmas: torch.Tensor, z: torch.Tensor):
    """(N, F, B) frames of the forward process: (1 - t) clean + t noisy + sigma z. t and sigmas are (N, B)."""
    t, sigmas = t[:, None], sigmas[:, None]
    return (1 - t) * clean + t * noisy + sigmas * z


def inference_times(spec: Spec) -> np.ndarray:
    """(B,) ascending diffusion times of a stream's buffer."""
    return np.linspace(spec.t_eps, spec.reverse_start, spec.buffer)


def training_times(spec: Spec, *key) -> np.ndarray:
    """(B,) ascending diffusion times: t_eps, and one in each cell around the other times of a stream, so that a place
    in the buffer is never asked about at a time that it was not trained at."""
    grid = inference_times(spec)
    cell = grid[1] - grid[0]
    shifts = (generator(*key, "times").random(spec.buffer - 1) - 0.5) * cell
    return np.concatenate([[spec.t_eps], np.minimum(grid[1:] + shifts, spec.t_max)])


def frame_times(spec: Spec, t: torch.Tensor) -> torch.Tensor:
    """(N, B) times of the buffer -> (N, K) times of all frames: the context has context_time."""
    context = torch.full((len(t), spec.frames - t.shape[1]), spec.context_time, device=t.device, dtype=t.dtype)
    return torch.cat([context, t], dim=1)


def output_scales(spec: Spec, t: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """(N, K) numbers that the network's output is divided by."""
    inside = {"none": torch.ones_like(t), "sigma": sigmas, "time": t}[spec.output_scale]
    return torch.cat([torch.ones(len(t), spec.frames - t.shape[1], device=t.device, dtype=t.dtype), inside], dim=1)


# ---- loudness --------------------------------------------------------------------------------------------------


class LoudnessTracker:
    """Level tracking, which is causal loudness normalisation: a factor for each frame from the frames up to it.

    Training and streaming share it."""

    def __init__(self, spec: Spec):
        self.decay = math.exp(-spec.hop / RATE / AVERAGING_SECONDS)
        self.window_energy = float(window(spec).square().sum())
        self.power_sum = self.weight_sum = 0.0

    def push(self, frame: torch.Tensor) -> float:
        """(F,) compressed -> its factor, 1 until the first sound. Pauses do not count."""
        power = float(expand(frame).abs().square().mean()) / self.window_energy  # mean square of the samples
        if power > PAUSE_RMS**2:
            self.power_sum = self.decay * self.power_sum + power
            self.weight_sum = self.decay * self.weight_sum + 1
        return (TARGET_RMS / math.sqrt(self.power_sum / self.weight_sum)) ** POWER if self.weight_sum else 1.0


def frame_powers(wave: torch.Tensor, frames: int, spec: Spec) -> np.ndarray:
    """(frames,) mean squares of the samples in the first frames of a recording, as the tracker takes them."""
    bins = expand(whole_spectrum(wave, spec, frames))
    return (bins.abs().square().mean(0) / window(spec).square().sum()).numpy()


def loudness_factors(powers: np.ndarray, spec: Spec) -> np.ndarray:
    """(frames,) the tracker's factors for the frames of a recording with these powers."""
    loud, decay = powers > PAUSE_RMS**2, math.exp(-spec.hop / RATE / AVERAGING_SECONDS)

    def decaying_sums(values: list[float]) -> np.ndarray:
        return np.array(list(accumulate(values, lambda total, value: decay * total + value)))

    power_sums, weight_sums = decaying_sums(powers[loud].tolist()), decaying_sums([1.0] * loud.sum())
    factors = (TARGET_RMS / np.sqrt(power_sums / weight_sums)) ** POWER
    return np.concatenate([[1.0], factors])[np.cumsum(loud)].astype(np.float32)  # a pause has that of the sound before
