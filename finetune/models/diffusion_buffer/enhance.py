"""Online enhancement: samples in, samples out, one network call per frame.

The last B frames of the buffer are at rising diffusion times; each new frame moves them one place to the left and one
step closer to clean speech. The output depends only on the samples, not on how they are split into chunks.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common.enhance_folder import enhance_files
from common.errors import UserError
from common.keyed_random import generator
from common.runtime import say
from models.diffusion_buffer import signal
from models.diffusion_buffer.signal import RATE, Spec
from models.diffusion_buffer.weights import load_network

# Frames whose noise is drawn at once. A GPU waits for every copy; on a CPU, drawing ahead makes a live stream stutter.
NOISE_ON_CPU, NOISE_ON_GPU = 1, 64


class Buffer:
    """The frames of N sounds that are being denoised. `network(x, y, times, scales)` as in network.py.

    `temperature` scales the noise of the stream; 0 = none. The noise depends on seed and frame, not on the sound.
    """

    def __init__(self, network, spec: Spec, sounds: int = 1, seed: int = 0, temperature: float = 1.0, device="cpu"):
        self.network, self.spec, self.seed, self.temperature = network, spec, seed, temperature
        self.device = torch.device(device)
        t = signal.inference_times(spec)
        before = np.concatenate([[0.0], t[:-1]])
        self.t, self.t_before = self._row(t), self._row(before)
        self.step, self.g = self._row(t - before), self._row(signal.g(spec, t))
        self.sigma, self.sigma_before = self._row(signal.sigma(spec, t)), self._row(signal.sigma(spec, before))
        self.noise_mask = torch.ones(spec.buffer, device=device)
        self.noise_mask[0] = 0  # the oldest frame's step ends at t = 0, where there is no noise
        with torch.no_grad():
            self.times = network.embed(signal.frame_times(spec, self.t[None]))
        self.scales = signal.output_scales(spec, self.t[None], self.sigma[None])
        self.count = 0
        # As if silence had passed through: each place holds the noise of the time that it would have arrived at.
        start = self._draw("stream", -1)[:, 1:] * self.sigma_before
        context = torch.zeros(spec.bins, spec.frames - spec.buffer, device=device) + 0j
        self.x = torch.cat([context, start], dim=1).repeat(sounds, 1, 1)
        self.y = torch.zeros_like(self.x)

    def _row(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)

    def _draw(self, purpose: str, first: int, frames: int = 1) -> torch.Tensor:
        """(frames x F, 1 + B) noise of these frames: first a frame's own, then that of the steps of the buffer."""
        shape = self.spec.bins, 1 + self.spec.buffer
        draws = (generator(self.seed, frame, purpose) for frame in range(first, first + frames))
        noise = np.concatenate([signal.complex_noise(draw, *shape) for draw in draws])
        return torch.from_numpy(noise * np.float32(self.temperature)).to(self.device)

    def _noise(self) -> torch.Tensor:
        """(F, 1 + B) noise of the next frame, drawn for some frames ahead."""
        ahead = NOISE_ON_CPU if self.device.type == "cpu" else NOISE_ON_GPU
        if self.count % ahead == 0:
            self.drawn = self._draw("stream", self.count, ahead).split(self.spec.bins)
        return self.drawn[self.count % ahead]

    def keep(self, sounds: int) -> None:
        """Goes on with the first `sounds` sounds alone."""
        self.x, self.y = self.x[:sounds], self.y[:sounds]

    def _cleared(self, x: torch.Tensor) -> torch.Tensor:
        """The official stream, until the buffer is full: only the frames that have come are kept. Nothing is before the
        buffer, and places without a frame hold fresh noise."""
        come, size = self.count + 1, self.spec.buffer
        before = torch.zeros_like(x[..., :-size])
        empty = (self._draw("start", self.count)[:, 1:] * self.sigma)[:, : size - come].expand(len(x), -1, -1)
        return torch.cat([before, empty, x[..., -come:]], dim=-1)

    def push(self, frames: torch.Tensor) -> torch.Tensor:
        """Takes frame n of every sound (N, F); returns (N, F, B), in which place -d is an estimate of frame n - d + 1.

        With DP every place is an estimate of clean speech, with DSM only the oldest.
        """
        size, z = self.spec.buffer, self._noise()
        newest = frames + self.sigma[-1] * z[:, 0]
        self.x = torch.cat([self.x[..., 1:], newest[..., None]], dim=-1)
        self.y = torch.cat([self.y[..., 1:], frames[..., None]], dim=-1)
        official = self.spec.stream == "official"
        if official and self.count < size:
            self.x = self._cleared(self.x)
        output = self.network(self.x, self.y, self.times, self.scales)
        out, y, x = (side[..., -size:] for side in (output, self.y, self.x))
        context = (output if official and self.spec.predicts_clean else self.x)[..., :-size]
        z = z[:, 1:] * self.noise_mask
        if self.spec.predicts_clean:
            moved = (1 - self.t_before) * out + self.t_before * y + self.sigma_before * z
        else:  # one Euler step of the reverse SDE: backwards in time, so the drift is subtracted
            drift = (y - x) / (1 - self.t) - self.g.square() * out
            out = moved = x - drift * self.step + self.g * self.step.sqrt() * z
        self.x = torch.cat([context, moved], dim=-1)
        self.count += 1
        return out


class Traced:
    """The network without Python between its layers: the same numbers, a third faster where layers are small."""

    def __init__(self, network, spec: Spec, device="cpu"):
        self.embed = network.embed
        buffer = Buffer(network, spec, device=device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = (buffer.x, buffer.y, buffer.times, buffer.scales)
            self.forward = torch.jit.trace(network, inputs, check_trace=False)

    def __call__(self, *inputs):
        return self.forward(*inputs)


class OverlapAdd:
    """Frames back to samples: each frame completes the `hop` samples that no later frame overlaps."""

    def __init__(self, spec: Spec, device="cpu"):
        self.spec = spec
        window = signal.window(spec, device)
        overlaps = -(-spec.n_fft // spec.hop)
        squares = torch.nn.functional.pad(window.square(), (0, overlaps * spec.hop - spec.n_fft))
        total = squares.reshape(overlaps, spec.hop).sum(0).repeat(overlaps)[: spec.n_fft]
        self.window = window / total
        self.phase_signs = signal.phase_signs(spec, device)
        self.tail = torch.zeros(spec.n_fft, device=device)

    def push(self, frames: torch.Tensor) -> torch.Tensor:
        """(..., F) compressed -> (..., hop) samples that are now final, the first n_fft / 2 from before the start."""
        wave = torch.fft.irfft(signal.expand(frames) * self.phase_signs, self.spec.n_fft)
        tail = self.tail + wave * self.window
        self.tail = torch.nn.functional.pad(tail[..., self.spec.hop :], (0, self.spec.hop))
        return tail[..., : self.spec.hop]


class Stream:
    """`push(samples)` any number of times, then `flush()`: together as many samples as went in."""

    def __init__(self, network, spec: Spec, delay: int = 0, device="cpu", **options):
        """`delay`: frames until a frame is given out; 0 = the whole buffer. `options`: those of `Buffer`."""
        self.delay = checked_delay(spec, delay)
        self.spec, self.device = spec, device
        self.buffer = Buffer(network, spec, device=device, **options)
        self.overlap = OverlapAdd(spec, device)
        self.tracker = signal.LoudnessTracker(spec) if spec.level == "track" else None
        self.loudness = deque(maxlen=self.delay)  # factors of the newest frames
        self.waiting = torch.zeros(spec.n_fft // 2, device=device)
        self.early = spec.n_fft // 2  # samples from before the start that are still to come out
        self.taken = self.given = 0

    @torch.inference_mode()
    def push(self, samples: np.ndarray) -> np.ndarray:
        # A non-finite sample becomes a click; otherwise it would stay in every frame from then on.
        samples = np.nan_to_num(np.asarray(samples, dtype=np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        assert samples.ndim == 1, f"a stream takes one channel, not an array of shape {samples.shape}"
        self.taken += len(samples)
        return self._feed(torch.from_numpy(samples).to(self.device))

    @torch.inference_mode()
    def flush(self) -> np.ndarray:
        """The samples that are still inside, pushed out by silence."""
        rest = [np.zeros(0, dtype=np.float32)]
        while self.given < self.taken:
            missing = self.taken - self.given
            rest.append(self._feed(torch.zeros(self.spec.hop, device=self.device))[:missing])
            self.given = min(self.given, self.taken)
        return np.concatenate(rest)

    def _feed(self, samples: torch.Tensor) -> np.ndarray:
        self.waiting = torch.cat([self.waiting, samples])
        final = []
        while len(self.waiting) >= self.spec.n_fft:
            frame = signal.analyse(self.waiting[: self.spec.n_fft], self.spec)
            self.waiting = self.waiting[self.spec.hop :]
            if self.tracker:
                self.loudness.append(self.tracker.push(frame))
                frame = frame * self.loudness[-1]
            estimates = self.buffer.push(frame[None])[0]
            if self.buffer.count >= self.delay:
                estimate = estimates[:, -self.delay]
                final.append(self.overlap.push(estimate / self.loudness[0] if self.tracker else estimate))
        enhanced = torch.cat(final).cpu().numpy() if final else np.zeros(0, dtype=np.float32)
        early = min(self.early, len(enhanced))
        self.early -= early
        self.given += len(enhanced) - early
        return enhanced[early:]


def checked_delay(spec: Spec, delay: int) -> int:
    if not delay:
        return spec.buffer
    if delay > spec.buffer:
        raise UserError(f"--delay {delay} is more than the buffer's {spec.buffer} frames.")
    if delay < spec.buffer and not spec.predicts_clean:
        raise UserError(f"--delay {delay}: a model trained with loss {spec.loss} has its only clean frame at"
                        f" --delay {spec.buffer}; one trained with loss dp has one at every delay.")  # fmt: skip
    return delay


def enhance(network, wave: np.ndarray, spec: Spec, **options) -> np.ndarray:
    """A whole recording through a stream."""
    stream = Stream(network, spec, **options)
    return np.concatenate([stream.push(wave), stream.flush()])


@torch.inference_mode()
def enhance_at(
    network, waves: list[np.ndarray], spec: Spec, delays: list[int], device="cpu", **options
) -> list[list[np.ndarray]]:
    """Each recording as streams with these delays would enhance it. All recordings advance together, a frame at a time.

    N recordings, longest first, so that those that still go on are the first ones; D delays.
    """
    order = sorted(range(len(waves)), key=lambda i: -len(waves[i]))
    before, hop = spec.n_fft // 2, spec.hop
    frames = [-(-(len(waves[i]) + before) // hop) for i in order]
    steps = [count + max(delays) - 1 for count in frames]
    padded = torch.zeros(len(waves), (steps[0] - 1) * hop + spec.n_fft)
    for row, i in enumerate(order):
        padded[row, before : before + len(waves[i])] = torch.from_numpy(waves[i])
    noisy = signal.analyse(padded.to(device).unfold(1, spec.n_fft, hop), spec)  # (N, steps, F)
    places = torch.tensor([-delay for delay in delays], device=device)
    coming_out = torch.arange(steps[0], device=device)[:, None] + places + 1  # (steps, D) frames; negative: none yet
    if spec.level == "track":
        powers = [signal.frame_powers(torch.from_numpy(waves[i]), steps[0], spec) for i in order]
        loudness = torch.from_numpy(np.stack([signal.loudness_factors(part, spec) for part in powers])).to(device)
        noisy, loudness = noisy * loudness[..., None], loudness[:, coming_out.clamp(min=0)]

    buffer, overlap = Buffer(network, spec, len(waves), device=device, **options), OverlapAdd(spec, device)
    enhanced = torch.zeros(len(waves), len(delays), steps[0] * hop, device=device)
    for n in range(steps[0]):
        going_on = sum(n < count for count in steps)
        buffer.keep(going_on)
        overlap.tail = overlap.tail[:going_on] if n else overlap.tail
        estimates = buffer.push(noisy[:going_on, n])[..., places]
        if spec.level == "track":
            estimates = estimates / loudness[:going_on, n, None]
        estimates = torch.where(coming_out[n] >= 0, estimates, 0)
        enhanced[:going_on, :, n * hop : (n + 1) * hop] = overlap.push(estimates.transpose(1, 2))
    result, enhanced = [None] * len(waves), enhanced.cpu().numpy()
    for row, i in enumerate(order):
        starts = [before + (delay - 1) * hop for delay in delays]
        result[i] = [wave[start : start + len(waves[i])] for start, wave in zip(starts, enhanced[row], strict=True)]
    return result


def say_latency(spec: Spec, delay: int) -> None:
    window_ms, frames_ms = (1000 * count / RATE for count in (spec.latency(delay), delay * spec.hop))
    say(f"latency at --delay {delay}: {window_ms:.1f} ms with the window, {frames_ms:.1f} ms counting frames alone")


# ---- files -----------------------------------------------------------------------------------------------------


def enhance_run(model: str, source: Path, out: Path, spec: str, delay: int, temperature: float, seed: int) -> None:
    """Enhances a folder of recordings. `spec`: --spec; `delay`: 0 = the whole buffer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, spec = load_network(model, spec)
    network = Traced(network.to(device).eval(), spec, device)
    enhance_folder(network, spec, source, out, delay, temperature=temperature, seed=seed, device=device)


def enhance_folder(network, spec: Spec, source: Path, out: Path, delay: int, **options) -> None:
    """Every recording below `source`, each as a stream. `options`: those of `Buffer`."""
    say_latency(spec, checked_delay(spec, delay))

    def enhance_one(recording, power: float, write: Callable) -> str:
        stream, began = Stream(network, spec, delay, **options), time.monotonic()
        for block in recording.blocks(blocksize=RATE, dtype="float32"):
            write(stream.push(block))
        write(stream.flush())
        factor = (time.monotonic() - began) * RATE / recording.frames
        slow = ": slower than real time, it could not keep up with a live signal" if factor >= 1 else ""
        return f", real-time factor {factor:.2f}{slow}"

    enhance_files(source, out, RATE, enhance_one)
