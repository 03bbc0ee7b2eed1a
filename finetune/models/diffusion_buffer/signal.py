"""Waves to compressed spectra and back, the BBED diffusion, and the losses of the Diffusion Buffer.

N sounds, F bins, K frames of which the last B are the buffer, t a frame's diffusion time: 0 is clean, 1 is noisy.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch

from common import keyed_random as keyed
from common.config import UserError
from models.diffusion_buffer.network import WIDTHS, BlockCausal, NCSNpp, groups_of

RATE = 16000
POWER, FACTOR = 0.5, 0.15  # v -> FACTOR |v|^POWER with v's phase
QUARTERS = ("t1", "t2", "t3", "t4")
LEVEL_RMS, QUIET_RMS = 0.05, 1e-3  # --level track: what speech is brought to; what counts as a pause
LEVEL_SECONDS = 2.0  # it forgets


@dataclass(frozen=True)
class Spec:
    """All that decides what a network's numbers mean; it is saved with the weights, and never mixed."""

    network: str = "ncsnpp"
    width: int = 96
    block: int = 32
    n_fft: int = 510
    hop: int = 256
    frames: int = 128  # K
    buffer: int = 20  # B
    sde_c: float = 0.08
    sde_k: float = 2.6
    t_eps: float = 0.03
    t_max: float = 0.999
    reverse_start: float = 0.8
    loss: str = "dp"
    output_scale: str = "none"
    context_time: float = 0.0
    level: str = "none"
    phase: str = "start"

    @property
    def bins(self) -> int:
        return self.n_fft // 2 + 1

    @property
    def predicts_clean(self) -> bool:
        return self.loss == "dp"

    def latency(self, delay: int) -> int:
        """Samples between a sample's arrival and its enhanced value, at worst."""
        return self.n_fft + (delay - 1) * self.hop


SPEC_FLAGS = tuple(item.name for item in dataclasses.fields(Spec))


def spec_of(config) -> Spec:
    """The flags as a spec, checked: every number that would only show up as a NaN or a wrong shape later."""
    values = {name: getattr(config, name) for name in SPEC_FLAGS}
    values["width"] = config.width or WIDTHS[config.network]
    if config.output_scale == "auto":
        values["output_scale"] = "none" if config.loss == "dp" else "sigma"
    if config.phase == "auto":
        values["phase"] = "start" if config.network == "ncsnpp" else "middle"
    bins_by, frames_by = (NCSNpp if config.network == "ncsnpp" else BlockCausal).multiple_of
    values["frames"] = -(-config.frames // frames_by) * frames_by
    spec = Spec(**values)
    channels = [spec.width * factor for factor in ((1, 2, 3, 4) if spec.network == "ncsnpp" else (1, 2, 4))]
    if spec.width % 8 or any(size % groups_of(size) for size in channels):
        raise UserError(f"--width {spec.width} is refused: it takes 8, 16, 24, 32, 64, 96, 128 or their like.")
    if spec.bins % bins_by or spec.n_fft % 2:
        raise UserError(
            f"--n-fft {spec.n_fft} gives {spec.bins} bins; --network {spec.network} needs a multiple of {bins_by},"
            f" such as --n-fft {2 * (max(1, round(spec.bins / bins_by)) * bins_by - 1)}."
        )
    if not spec.n_fft / 4 <= spec.hop <= spec.n_fft / 2 + 1:
        raise UserError(f"--hop {spec.hop} is not between a quarter and a half of --n-fft {spec.n_fft}.")
    if not 2 <= spec.buffer <= config.frames:
        raise UserError(
            f"--buffer {spec.buffer} does not fit into --frames {config.frames} (of --hop {spec.hop} samples each):"
            " it takes 2 up to all of them."
        )
    if not 0 < spec.t_eps < spec.t_max < 1 or not spec.t_eps < spec.reverse_start < 1:
        raise UserError(
            f"--t-eps {spec.t_eps:g}, --t-max {spec.t_max:g}, --reverse-start {spec.reverse_start:g} are refused: they"
            " need 0 < t-eps < t-max < 1 and t-eps < reverse-start < 1."
        )
    if spec.sde_c <= 0 or spec.sde_k <= 1:
        raise UserError(f"--sde-c {spec.sde_c:g} must be above 0 and --sde-k {spec.sde_k:g} above 1.")
    if config.gain_low > config.gain_high:
        raise UserError(f"--gain-low {config.gain_low:g} is above --gain-high {config.gain_high:g}.")
    if config.context_own and config.loss != "dp":
        raise UserError(f"--context-own takes estimates of clean speech, which --loss {config.loss} does not make.")
    if config.buffer_low and not 4 <= config.buffer_low <= spec.buffer:
        raise UserError(f"--buffer-low {config.buffer_low} is not between 4 and --buffer {spec.buffer}.")
    if sigma(spec, spec.t_eps) < 1e-3:
        raise UserError(f"sigma at --t-eps {spec.t_eps:g} is {sigma(spec, spec.t_eps):.1e}, below 1e-3: raise --t-eps.")
    return spec


# ---- spectra ---------------------------------------------------------------------------------------------------


def window(spec: Spec, device=None) -> torch.Tensor:
    return torch.hann_window(spec.n_fft, device=device)


def frame_count(samples: int, hop: int) -> int:
    """Frames whose middle lies in a sound."""
    return 1 + samples // hop


def compress(bins: torch.Tensor) -> torch.Tensor:
    return bins * (FACTOR * bins.abs().clamp(min=1e-20) ** (POWER - 1))


def expand(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `compress`: (|v| / FACTOR)^2 with v's phase."""
    return values * values.abs() / FACTOR**2


def spectra(waves: torch.Tensor, spec: Spec) -> torch.Tensor:
    """(N, (K - 1) hop + n_fft) samples -> (N, F, K) compressed; no padding: the samples around are in the waves."""
    bins = torch.stft(waves, spec.n_fft, spec.hop, window=window(spec, waves.device), center=False, return_complex=True)
    return compress(bins) * turned(spec, waves.device)[:, None]


def turned(spec: Spec, device=None) -> torch.Tensor:
    """(F,) signs that turn a bin's phase from the window's start to --phase, and back.

    Counted from its start, every sound of a window changes its sign from bin to bin: where a network's first step is
    a low-pass over the bins, as block_causal's is, 3 % of the speech pass it. From the middle, neighbours agree.
    """
    signs = torch.ones(spec.bins, device=device)
    if spec.phase == "middle":
        signs[1::2] = -1
    return signs


def analyse(samples: torch.Tensor, spec: Spec) -> torch.Tensor:
    """One of the frames of a stream: (n_fft,) samples -> (F,)."""
    return compress(torch.fft.rfft(samples * window(spec, samples.device))) * turned(spec, samples.device)


def whole_spectrum(wave: torch.Tensor, spec: Spec, frames: int) -> torch.Tensor:
    """(L,) -> (F, frames) as a stream sees it: silence before and after."""
    before = spec.n_fft // 2
    length = (frames - 1) * spec.hop + spec.n_fft
    return spectra(torch.nn.functional.pad(wave, (before, length - before - len(wave)))[None], spec)[0]


# ---- BBED ------------------------------------------------------------------------------------------------------


def sigma(spec: Spec, t) -> np.ndarray:
    """Standard deviation of the forward process, in float64: single precision loses it near t = 0.

    c (1-t) [k^2t - 1 + t + 2 k^2 ln k (1-t) (Ei(2(t-1) ln k) - Ei(-2 ln k))]
    """
    from scipy.special import expi

    t, c, k = np.asarray(t, dtype=np.float64), spec.sde_c, spec.sde_k
    log = math.log(k)
    tail = 2 * k**2 * log * (1 - t) * (expi(2 * (t - 1) * log) - expi(-2 * log))
    return np.sqrt(np.maximum(c * (1 - t) * (k ** (2 * t) - 1 + t + tail), 0.0))


def g(spec: Spec, t) -> np.ndarray:
    """Strength of the diffusion: its square is c k^2t."""
    return math.sqrt(spec.sde_c) * spec.sde_k ** np.asarray(t, dtype=np.float64)


def complex_noise(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """E|z|^2 = 1: half in each part."""
    parts = draw.standard_normal((2, *shape), dtype=np.float32) * np.float32(math.sqrt(0.5))
    return parts[0] + 1j * parts[1]


def inference_times(spec: Spec) -> np.ndarray:
    return np.linspace(spec.t_eps, spec.reverse_start, spec.buffer)


def training_times(spec: Spec, how: str, *key) -> np.ndarray:
    """(B,) ascending, the first t_eps.

    jitter: one in each cell around the stream's times; random: sorted uniform ones up to t_max; grid: always the same.
    """
    if how == "grid":
        return np.linspace(spec.t_eps, spec.t_max, spec.buffer)
    grid = inference_times(spec)
    draw = keyed.generator(*key, "times").random(spec.buffer - 1)
    if how == "random":
        return np.concatenate([[spec.t_eps], np.sort(spec.t_eps + draw * (spec.t_max - spec.t_eps))])
    cell = grid[1] - grid[0]
    return np.concatenate([[spec.t_eps], np.minimum(grid[1:] + (draw - 0.5) * cell, spec.t_max)])


def all_times(spec: Spec, t: torch.Tensor) -> torch.Tensor:
    """(N, B) -> (N, K): the context has a time of its own."""
    context = torch.full((len(t), spec.frames - t.shape[1]), spec.context_time, device=t.device, dtype=t.dtype)
    return torch.cat([context, t], dim=1)


def output_scales(spec: Spec, t: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """(N, K): what the network's output is divided by."""
    inside = {"none": torch.ones_like(t), "sigma": sigmas, "time": t}[spec.output_scale]
    return torch.cat([torch.ones(len(t), spec.frames - t.shape[1], device=t.device, dtype=t.dtype), inside], dim=1)


# ---- level -----------------------------------------------------------------------------------------------------


class Level:
    """--level track: what each frame is multiplied by, known from the frames up to it. Training and stream share it."""

    def __init__(self, spec: Spec):
        self.keep = math.exp(-spec.hop / RATE / LEVEL_SECONDS)
        self.window = float(window(spec).square().sum())
        self.power = self.weight = 0.0

    def push(self, frame: torch.Tensor) -> float:
        """(F,) compressed -> its factor, 1 until a sound has been heard. Pauses are left out of the mean."""
        power = float(expand(frame).abs().square().mean()) / self.window  # of the samples below the window
        if power > QUIET_RMS**2:
            self.power = self.keep * self.power + power
            self.weight = self.keep * self.weight + 1
        return (LEVEL_RMS / math.sqrt(self.power / self.weight)) ** POWER if self.weight else 1.0


def frame_scales(wave: torch.Tensor, last: int, spec: Spec) -> np.ndarray:
    """(K,) factors of the frames up to frame `last` of a recording, as a stream of it would have them."""
    level, spectrum = Level(spec), whole_spectrum(wave, spec, last + 1)
    found = [level.push(frame) for frame in spectrum.T]
    return np.array(([1.0] * spec.frames + found)[-spec.frames :], dtype=np.float32)


# ---- batch to loss ---------------------------------------------------------------------------------------------


@torch.no_grad()
def own_context(network, clean: torch.Tensor, noisy: torch.Tensor, batch: dict, inputs: tuple) -> torch.Tensor:
    """The context as a stream has it: what the network says of its newest B frames, seen B frames earlier."""
    size = batch["t"].shape[1]
    first = clean.shape[-1] - size
    clean, noisy = (torch.cat([torch.zeros_like(s[..., :size]), s[..., :first]], dim=-1) for s in (clean, noisy))
    at, noise = batch["t"][:, None], batch["sigma"][:, None] * batch["z_own"]
    buffer = (1 - at) * clean[..., first:] + at * noisy[..., first:] + noise
    x = torch.cat([clean[..., :first], buffer], dim=-1)
    out = network(x, noisy, *inputs)[..., first:]
    return torch.cat([clean[..., :first], out], dim=-1)[..., size:]


def batch_to_loss(network, batch: dict, spec: Spec):
    """Loss sum over the target bins, its parts by quarter of the times (2, 4), and what to watch; all in fp32.

    The last B frames hold mean (1-t) S + t Y plus noise, those before clean speech. DP: the network says the clean
    frames. DSM: it says the score, weighted by sigma^2, so that nothing is divided by a small sigma.
    """
    with torch.autocast(batch["noisy"].device.type, enabled=False):
        clean, noisy = spectra(batch["clean"], spec), spectra(batch["noisy"], spec)
        assert clean.shape == noisy.shape and clean.shape[1:] == (spec.bins, spec.frames), (clean.shape, noisy.shape)
        t, sigmas, z = batch["t"], batch["sigma"], batch["z"]
        at, std, first = t[:, None, :], sigmas[:, None, :], spec.frames - t.shape[1]
        if "scale" in batch:
            clean, noisy = (side * batch["scale"][:, None, :] for side in (clean, noisy))
        context, target, y = clean[..., :first], clean[..., first:], noisy[..., first:]
        if "mix" in batch:  # the stream's context is not clean, it is the model's own output
            context = context + batch["mix"][:, None, None] * (noisy - clean)[..., :first] + batch["dirt"]
        x = torch.cat([context, (1 - at) * target + at * y + std * z], dim=-1)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=batch["autocast"]):
        inputs = network.embed(all_times(spec, t)), output_scales(spec, t, sigmas)
        if batch.get("own"):
            x = torch.cat([own_context(network, clean, noisy, batch, inputs), x[..., first:]], dim=-1)
        out = network(x, noisy, *inputs)
    with torch.autocast(x.device.type, enabled=False):
        out = out[..., first:]
        if spec.predicts_clean:
            error = out - target
        elif spec.loss == "dsm":
            error = std * out + z
        else:
            error = out + z / std
        squares = torch.view_as_real(error).square().sum(-1).sum(1)  # (N, B)
    quarters = torch.tensor_split(squares.sum(0), len(QUARTERS))
    counts = [float(len(part) * len(squares) * spec.bins) for part in quarters]
    stats = torch.stack([torch.stack([p.sum() for p in quarters]).detach(), torch.tensor(counts, device=x.device)])
    size = out.detach().abs()
    watch = {"out_rms": size.square().mean().sqrt(), "out_max": size.max()}
    return squares.sum(), stats, watch
