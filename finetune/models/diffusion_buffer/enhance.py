"""Online enhancement: samples in, samples out, one network call a frame.

The last B frames of the buffer are at rising diffusion times; each new frame moves them one place to the left and one
step closer to clean speech. What comes out depends on the samples alone, not on how they are handed over.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common import keyed_random as keyed
from common.config import UserError
from common.enhance_folder import enhance_files
from common.runtime import say
from models.diffusion_buffer import signal
from models.diffusion_buffer.signal import RATE, Spec


class Buffer:
    """The frames that are being denoised. `network(x, y, times, scales)` as in models/diffusion_buffer/network.py."""

    def __init__(
        self, network, spec: Spec, seed: int = 0, temperature: float = 1.0, refresh=False, redraw=False, device="cpu"
    ):
        """The official stream also replaces its context by what the network now thinks of it (`refresh`), and until
        the buffer is full draws its empty places anew for each frame (`redraw`)."""
        self.network, self.spec, self.seed, self.temperature, self.device = network, spec, seed, temperature, device
        self.refresh, self.redraw = refresh, redraw
        if refresh and not spec.predicts_clean:
            raise UserError(f"--refresh-context needs a model of clean speech, not of --loss {spec.loss}.")
        t = signal.inference_times(spec)
        before = np.concatenate([[0.0], t[:-1]])
        self.t, self.t_before = self._row(t), self._row(before)
        self.step, self.g = self._row(t - before), self._row(signal.g(spec, t))
        self.sigma, self.sigma_before = self._row(signal.sigma(spec, t)), self._row(signal.sigma(spec, before))
        self.quiet_first = torch.ones(spec.buffer, device=device)
        self.quiet_first[0] = 0  # its step ends at t = 0, where nothing is noisy
        with torch.no_grad():
            self.times = network.embed(signal.all_times(spec, self.t[None]))
        self.scales = signal.output_scales(spec, self.t[None], self.sigma[None])
        self.count = 0
        # As if silence had gone through it: each place is at the time that it would have been left at.
        start = self._noise(-1)[:, 1:] * self.sigma_before
        self.x = torch.cat([torch.zeros(spec.bins, spec.frames - spec.buffer, device=device) + 0j, start], dim=1)
        self.y = torch.zeros_like(self.x)
        self.level = signal.Level(spec) if spec.level == "track" else None
        self.levels = torch.ones(spec.buffer, device=device)

    def _row(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)

    def _noise(self, frame: int, purpose: str = "stream") -> torch.Tensor:
        """(F, 1 + B) for a frame: first its own, then that of the steps of the buffer."""
        draw = keyed.generator(self.seed, frame, purpose)
        noise = signal.complex_noise(draw, self.spec.bins, 1 + self.spec.buffer) * np.float32(self.temperature)
        return torch.from_numpy(noise).to(self.device)

    def push(self, frame: torch.Tensor) -> torch.Tensor:
        """Takes frame n (F,); returns (F, B), of which the place -d is an estimate of frame n - d + 1.

        With DP every place is an estimate of clean speech, with DSM only the oldest.
        """
        size, z = self.spec.buffer, self._noise(self.count)
        if self.level:
            scale = self.level.push(frame)
            frame, self.levels = frame * scale, torch.cat([self.levels[1:], self.levels.new_tensor([scale])])
        newest = frame + self.sigma[-1] * z[:, 0]
        self.x = torch.cat([self.x[:, 1:], newest[:, None]], dim=1)
        self.y = torch.cat([self.y[:, 1:], frame[:, None]], dim=1)
        empty = size - 1 - self.count
        if self.redraw and empty > 0:
            fresh = self._noise(self.count, "start")[:, :empty] * self.sigma[:empty]
            self.x = torch.cat([self.x[:, :-size], fresh, self.x[:, empty - size :]], dim=1)
        every = self.network(self.x[None], self.y[None], self.times, self.scales)[0]
        context, out = (every if self.refresh else self.x)[:, :-size], every[:, -size:]
        y, x = self.y[:, -size:], self.x[:, -size:]
        z = z[:, 1:] * self.quiet_first
        if self.spec.predicts_clean:
            moved = (1 - self.t_before) * out + self.t_before * y + self.sigma_before * z
        else:  # backwards in time: the drift is taken away
            drift = (y - x) / (1 - self.t) - self.g.square() * out
            out = moved = x - drift * self.step + self.g * self.step.sqrt() * z
        self.x = torch.cat([context, moved], dim=1)
        self.count += 1
        return out / self.levels if self.level else out


class Traced:
    """The network without Python between its layers: the same numbers, a third faster where layers are small."""

    def __init__(self, network, spec: Spec, device="cpu"):
        self.embed = network.embed
        buffer = Buffer(network, spec, device=device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = (buffer.x[None], buffer.y[None], buffer.times, buffer.scales)
            self.forward = torch.jit.trace(network, inputs, check_trace=False)

    def __call__(self, *inputs):
        return self.forward(*inputs)


class Overlap:
    """Frames back to samples: each frame finishes the `hop` samples that no later frame reaches."""

    def __init__(self, spec: Spec, device="cpu"):
        self.spec = spec
        shape = signal.window(spec, device)
        places = -(-spec.n_fft // spec.hop)
        squares = torch.nn.functional.pad(shape.square(), (0, places * spec.hop - spec.n_fft))
        total = squares.reshape(places, spec.hop).sum(0).repeat(places)[: spec.n_fft]
        self.shape = shape / total
        self.turned = signal.turned(spec, device)
        self.tail = torch.zeros(spec.n_fft, device=device)
        self.skip = spec.n_fft // 2  # what lies before the first sample

    def push(self, frame: torch.Tensor) -> torch.Tensor:
        """(F,) compressed -> the samples that are now final."""
        self.tail = self.tail + torch.fft.irfft(signal.expand(frame) * self.turned, self.spec.n_fft) * self.shape
        final = self.tail[: self.spec.hop]
        self.tail = torch.cat([self.tail[self.spec.hop :], torch.zeros(self.spec.hop, device=final.device)])
        cut = min(self.skip, len(final))
        self.skip -= cut
        return final[cut:]


class Stream:
    """`push(samples)` any number of times, then `flush()`: together as many samples as went in."""

    def __init__(self, network, spec: Spec, delay: int = 0, device="cpu", **options):
        """`options`: those of `Buffer`."""
        self.delay = checked_delay(spec, delay)
        self.spec, self.device = spec, device
        self.buffer = Buffer(network, spec, device=device, **options)
        self.overlap = Overlap(spec, device)
        self.waiting = torch.zeros(spec.n_fft // 2, device=device)
        self.taken = self.given = 0

    @torch.inference_mode()
    def push(self, samples: np.ndarray) -> np.ndarray:
        # A broken sample becomes a click; left alone it would be in every frame from then on.
        samples = np.nan_to_num(np.asarray(samples, dtype=np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        assert samples.ndim == 1, f"a stream takes one channel, not an array of shape {samples.shape}"
        self.taken += len(samples)
        return self._feed(torch.from_numpy(samples).to(self.device))

    @torch.inference_mode()
    def flush(self) -> np.ndarray:
        """What is still inside, after silence has pushed it out."""
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
            estimates = self.buffer.push(signal.analyse(self.waiting[: self.spec.n_fft], self.spec))
            self.waiting = self.waiting[self.spec.hop :]
            if self.buffer.count >= self.delay:
                final.append(self.overlap.push(estimates[:, -self.delay]))
        made = torch.cat(final).cpu().numpy() if final else np.zeros(0, dtype=np.float32)
        self.given += len(made)
        return made


def checked_delay(spec: Spec, delay: int) -> int:
    if not delay:
        return spec.buffer
    if delay > spec.buffer:
        raise UserError(f"--delay {delay} is more than the buffer's {spec.buffer} frames.")
    if delay < spec.buffer and not spec.predicts_clean:
        raise UserError(f"--delay {delay}: a model trained with --loss {spec.loss} has its only clean frame at"
                        f" --delay {spec.buffer}; --loss dp gives one at every delay.")  # fmt: skip
    return delay


def enhance(network, wave: np.ndarray, spec: Spec, **options) -> np.ndarray:
    """A whole recording through a stream."""
    stream = Stream(network, spec, **options)
    return np.concatenate([stream.push(wave), stream.flush()])


@torch.inference_mode()
def enhance_at(network, wave: np.ndarray, spec: Spec, delays: list[int], device="cpu", **options) -> list[np.ndarray]:
    """The recording as streams of several delays would give it, in one pass."""
    frames = -(-(len(wave) + spec.n_fft // 2) // spec.hop)
    noisy = torch.from_numpy(wave).to(device)
    padded = torch.nn.functional.pad(noisy, (spec.n_fft // 2, (frames + spec.buffer) * spec.hop + spec.n_fft))
    buffer = Buffer(network, spec, device=device, **options)
    outputs = {delay: (Overlap(spec, device), []) for delay in delays}
    for n in range(frames + max(delays) - 1):
        estimates = buffer.push(signal.analyse(padded[n * spec.hop : n * spec.hop + spec.n_fft], spec))
        for delay, (overlap, made) in outputs.items():
            if delay - 1 <= n < frames + delay - 1:
                made.append(overlap.push(estimates[:, -delay]))
    return [torch.cat(made)[: len(wave)].cpu().numpy() for _, made in outputs.values()]


def say_latency(spec: Spec, delay: int) -> None:
    window_ms, frames_ms = (1000 * count / RATE for count in (spec.latency(delay), delay * spec.hop))
    say(f"latency at --delay {delay}: {window_ms:.1f} ms with the window, {frames_ms:.1f} ms counting frames alone")


# ---- files -----------------------------------------------------------------------------------------------------


def enhance_folder(network, spec: Spec, source: Path, out: Path, delay: int, **options) -> None:
    """Every recording below `source`, as a stream."""
    say_latency(spec, checked_delay(spec, delay))

    def enhance_one(recording, power: float, write: Callable) -> str:
        stream, began = Stream(network, spec, delay, **options), time.monotonic()
        for block in recording.blocks(blocksize=RATE, dtype="float32"):
            write(stream.push(block))
        write(stream.flush())
        factor = (time.monotonic() - began) * RATE / recording.frames
        late = "  slower than it sounds: it would not keep up live" if factor >= 1 else ""
        return f", real-time factor {factor:.2f}{late}"

    enhance_files(source, out, RATE, enhance_one)
