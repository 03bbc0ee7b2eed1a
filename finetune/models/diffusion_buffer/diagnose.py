"""--doctor: what must hold before a training of the Diffusion Buffer can work, each with its numbers.

None of it needs a trained network: the stream is proven with an oracle, a network that knows the answer.
"""

import dataclasses
import faulthandler
import functools
import math
import os
import signal as signals
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import torch

from common import keyed_random as keyed
from common import speech_metrics as speech
from common.config import UserError
from common.pairs import PairDataset
from common.runtime import say
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Windows
from models.diffusion_buffer.data import check_lengths as check_clip_lengths
from models.diffusion_buffer.enhance import Buffer, Stream, Traced, enhance
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import RATE, Spec


class Oracle:
    """In the network's place: the exact score or clean frames of a known pair. `sign` -1 turns the score round."""

    def __init__(self, clean: np.ndarray, spec: Spec, sign: int = 1):
        self.spec, self.sign, self.count = spec, sign, 0
        frames = -(-len(clean) // spec.hop) + 3 * spec.buffer
        before = torch.zeros(spec.bins, spec.buffer - 1)
        self.clean = torch.cat([before + 0j, signal.whole_spectrum(torch.from_numpy(clean), spec, frames)], dim=1)
        t = signal.inference_times(spec)
        self.t = torch.from_numpy(t.astype(np.float32))
        self.variance = torch.from_numpy(np.square(signal.sigma(spec, t)).astype(np.float32))

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        size = self.spec.buffer
        clean = self.clean[:, self.count : self.count + size]
        self.count += 1
        if not self.spec.predicts_clean:
            mean = (1 - self.t) * clean + self.t * y[0, :, -size:]
            clean = -self.sign * (x[0, :, -size:] - mean) / self.variance
        return torch.cat([x[0, :, :-size], clean], dim=1)[None]


class Passing:
    """In the network's place: noisy frames as if they were clean."""

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        return y


def speechlike(seconds: float, seed: int = 0) -> np.ndarray:
    """Syllables of a buzzing voice with pauses, peak 0.5."""
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = 120 + 20 * np.sin(2 * np.pi * 1.3 * t + seed)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formant = 700 + 400 * np.sin(2 * np.pi * 2.1 * t)
    wave = sum(np.sin(n * phase) / (1 + ((n * pitch - formant) / 300) ** 2) for n in range(1, 30))
    wave = wave * np.maximum(0, np.sin(2 * np.pi * 2.5 * t)) ** 0.7
    return (0.5 * wave / np.abs(wave).max()).astype(np.float32)


def pair(seconds: float = 2.0, snr: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean, made here: the doctor needs no data."""
    clean = speechlike(seconds)
    noise = keyed.generator("doctor").standard_normal(len(clean)).astype(np.float32)
    noise *= math.sqrt(np.square(clean).mean() / 10 ** (snr / 10)) / noise.std()
    return clean + noise, clean


# ---- the checks: each returns whether it holds, and the numbers ----------------------------------------------------


def check_settings(spec: Spec):
    t = signal.inference_times(spec)
    rows = [
        f"t {a:.3f} sigma {s:.4f} g {b:.4f}"
        for a, s, b in zip(t, signal.sigma(spec, t), signal.g(spec, t), strict=True)
    ]
    frames = signal.frame_count(RATE, spec.hop)
    return True, (
        f"1 s is {frames} frames of {spec.bins} bins, the network sees {spec.frames}, the buffer is {spec.buffer};"
        f" {rows[0]} ... {rows[-1]}; dt {t[1] - t[0]:.4f}"
    )


def check_sigma(spec: Spec):
    """Closed form against the integral c (1-t)^2 int k^2s / (1-s)^2 ds, and g(0)^2 = c."""
    from scipy.integrate import quad

    worst = 0.0
    for t in (0.001, spec.t_eps, 0.25, 0.5, spec.reverse_start, spec.t_max):
        area, _ = quad(lambda s: spec.sde_k ** (2 * s) / (1 - s) ** 2, 0, t, epsabs=0, epsrel=1e-11)
        exact = math.sqrt(spec.sde_c * area) * (1 - t)
        worst = max(worst, abs(float(signal.sigma(spec, t)) / exact - 1))
    return worst < 1e-6 and abs(
        float(signal.g(spec, 0)) ** 2 - spec.sde_c
    ) < 1e-12, f"largest relative error {worst:.1e}"


def check_simulation(spec: Spec, paths: int = 20000, steps: int = 400):
    """Euler steps of the forward process from 1 towards -1 end with its mean and variance."""
    draw = keyed.generator("doctor", "simulation")
    end, x = 0.7, np.ones(paths)
    for t in np.arange(steps) * end / steps:
        step = end / steps
        x = x + (-1 - x) / (1 - t) * step + signal.g(spec, t) * math.sqrt(step) * draw.standard_normal(paths)
    mean, std = abs(x.mean() - (1 - 2 * end)), abs(x.std() / float(signal.sigma(spec, end)) - 1)
    return mean < 0.02 and std < 0.02, f"mean off by {mean:.4f}, deviation by {100 * std:.2f} %"


def check_noise(spec: Spec):
    power = float(np.square(np.abs(signal.complex_noise(keyed.generator("doctor", "z"), 100000))).mean())
    return abs(power - 1) < 0.02, f"E|z|^2 = {power:.4f}"


def check_oracle(spec: Spec):
    noisy, clean = pair()
    levels, size = {}, max(20, spec.buffer)  # with fewer steps the score's noise is left over
    for name, loss, sign in (("score", "dsm", 1), ("turned score", "dsm", -1), ("clean", "dp", 1)):
        known = dataclasses.replace(spec, loss=loss, buffer=size, frames=max(size, spec.frames), level="none")
        made = enhance(Oracle(clean, known, sign), noisy, known)
        levels[name] = speech.si_sdr(clean.astype(np.float64), made.astype(np.float64))
    fine = levels["score"] > 35 and levels["turned score"] < 0 and levels["clean"] > 60
    return fine, ", ".join(f"{name} {level:.1f} dB" for name, level in levels.items()) + " (noisy 5.0)"


def check_causality(spec: Spec):
    """No gradient from what a stream has given out to what it is given later."""
    torch.manual_seed(0)
    network = awake(build_network(spec.network, 8, spec.block))
    small = dataclasses.replace(spec, width=8)
    frames = torch.zeros(spec.bins, 3 * spec.buffer, dtype=torch.complex64).normal_().requires_grad_()
    buffer = Buffer(network, small)
    n = 2 * spec.buffer
    for i in range(n):
        out = buffer.push(frames[:, i])
    (slope,) = torch.autograd.grad(out[:, 0].abs().square().sum(), frames)
    before, after = (float(part.abs().sum()) for part in (slope[:, :n], slope[:, n:]))
    return after == 0 and before > 0, f"gradient to the past {before:.2e}, to the future {after:g}"


def awake(network):
    """Weights that are not nearly zero, so that everything has an influence."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5 * 0.5)
    return network


def check_chunks(spec: Spec):
    noisy, _ = pair(0.5)
    outputs = []
    for size in (1, 160, 1000, len(noisy)):
        stream = Stream(Passing(), dataclasses.replace(spec, loss="dp"))
        parts = [stream.push(noisy[i : i + size]) for i in range(0, len(noisy), size)]
        outputs.append(np.concatenate([*parts, stream.flush()]))
    same = all(np.array_equal(outputs[0], other) for other in outputs[1:])
    return same, f"1, 160, 1000 and {len(noisy)} samples at a time: {'equal bits' if same else 'different bits'}"


def check_latency(spec: Spec):
    found = {}
    for delay in (1, spec.buffer):
        found[delay] = measure_latency(dataclasses.replace(spec, loss="dp"), delay)
    fine = all(samples == spec.latency(delay) for delay, samples in found.items())
    return fine, ", ".join(f"delay {d}: {n} samples, {1000 * n / RATE:.1f} ms" for d, n in found.items())


def measure_latency(spec: Spec, delay: int) -> int:
    """Samples that go in until an impulse comes out, from the place in a hop where it takes longest."""
    stream = Stream(Passing(), spec, delay)
    place = (spec.buffer + 4) * spec.hop - spec.n_fft // 2
    given = 0
    for i in range(place + spec.n_fft + (delay + 2) * spec.hop):
        made = stream.push(np.array([float(i == place)]))
        loud = np.flatnonzero(np.abs(made) > 0.5)
        if len(loud):
            assert given + loud[0] == place, "the impulse came out elsewhere"
            return i + 1 - place
        given += len(made)
    raise AssertionError("the impulse never came out")


def check_lengths(spec: Spec):
    wrong = []
    for length in (15999, 16000, 16001, 16255, 16256, 16257):
        wave = speechlike(1.1)[:length]
        made = enhance(Passing(), wave, dataclasses.replace(spec, loss="dp"))
        if len(made) != length or np.abs(made - wave).max() > 1e-5:
            wrong.append(length)
    return not wrong, f"15999 to 16257 samples come back{' but not ' + str(wrong) if wrong else ''}"


def batch_of(spec: Spec, count: int, seconds: float = 2.0) -> dict:
    noisy, clean = pair(seconds)
    return windows_of(noisy, clean, spec).batch([(epoch, 0) for epoch in range(count)]) | {"autocast": False}


def windows_of(noisy: np.ndarray, clean: np.ndarray, spec: Spec) -> Windows:
    sides = [(np.clip(side, -1, 1) * 32767).astype(np.int16) for side in (noisy, clean)]
    pairs = SimpleNamespace(
        samples=np.array([len(clean)]),
        id=lambda i: "clip",
        noisy=lambda i: sides[0],
        clean=lambda i: sides[1],
        folder="-",
    )
    plain = {"gain_low": 0.0, "gain_high": 0.0, "context_noise": 0.0, "context_own": 0.0}
    config = SimpleNamespace(pad_short=True, seed=0, times="jitter", **plain)
    return Windows(pairs, np.array([0]), spec, config)


@torch.no_grad()
def check_untrained(spec: Spec):
    torch.manual_seed(0)
    spec = dataclasses.replace(spec, loss="dsm", output_scale="sigma", width=8)
    total, stats, _ = signal.batch_to_loss(build_network(spec.network, 8, spec.block), batch_of(spec, 4), spec)
    value = float(stats[0].sum() / stats[1].sum())
    return abs(value - 1) < 0.1, f"DSM loss {value:.3f}"


@torch.no_grad()
def check_bf16(spec: Spec):
    torch.manual_seed(0)
    small = dataclasses.replace(spec, width=8)
    network, batch = awake(build_network(spec.network, 8, spec.block)), batch_of(small, 2)
    full, half = (float(signal.batch_to_loss(network, batch | {"autocast": a}, small)[0]) for a in (False, True))
    return abs(half / full - 1) < 0.02, f"bf16 differs from fp32 by {100 * abs(half / full - 1):.3f} %"


@torch.no_grad()
def check_ranges(spec: Spec):
    """What a batch's sigmas, target scores and network outputs lie between."""
    torch.manual_seed(0)
    small = dataclasses.replace(spec, width=8)
    batch = batch_of(small, 4)
    _, _, watch = signal.batch_to_loss(build_network(spec.network, 8, spec.block), batch, small)
    sigmas, scores = batch["sigma"], (batch["z"] / batch["sigma"][:, None]).abs()
    numbers = (
        f"sigma {float(sigmas.min()):.4f} to {float(sigmas.max()):.4f}, |score| up to {float(scores.max()):.1f}"
        f" (rms {float(scores.square().mean().sqrt()):.1f}), output rms {float(watch['out_rms']):.1e}"
    )
    fine = bool(sigmas.min() >= 1e-3) and bool(scores.isfinite().all()) and math.isfinite(float(watch["out_max"]))
    return fine, numbers


def check_refusals(spec: Spec):
    """Settings and clips that would only show up as NaN or a wrong shape are refused."""
    taken = []
    for change in ({"buffer": spec.frames + 1}, {"t_eps": 0.0}, {"t_max": 1.0}, {"t_eps": 0.6, "t_max": 0.5}):
        try:
            signal.spec_of(SimpleNamespace(**dataclasses.asdict(spec) | {"buffer_low": 0, "context_own": 0} | change))
            taken.append(str(change))
        except UserError:
            pass
    for samples in (0, spec.n_fft // 4, spec.n_fft // 2):
        clip = np.zeros(samples, np.float32)
        try:
            windows_of(clip, clip, spec)
            taken.append(f"{samples} samples")
        except UserError:
            pass
    return (
        not taken,
        f"taken all the same: {', '.join(taken)}" if taken else "4 settings and 3 clips, as they should be",
    )


@torch.no_grad()
def check_not_a_number(spec: Spec):
    """One NaN in one clip of a batch makes the loss NaN, by which a step is skipped and its clips are named."""
    torch.manual_seed(0)
    small = dataclasses.replace(spec, width=8)
    network, batch = build_network(spec.network, 8, spec.block), batch_of(small, 2)
    before = float(signal.batch_to_loss(network, batch, small)[0])
    batch["noisy"][1, -spec.n_fft // 2] = float("nan")
    after = float(signal.batch_to_loss(network, batch, small)[0])
    return math.isfinite(before) and not math.isfinite(after), f"loss {before:.3g} without it, {after} with it"


def check_stacks(spec: Spec):
    """A rank that hangs can say where, by SIGUSR2."""
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.register(signals.SIGUSR2, stacks, all_threads=True)
        os.kill(os.getpid(), signals.SIGUSR2)
        faulthandler.unregister(signals.SIGUSR2)
        stacks.seek(0)
        lines = stacks.read().count("File ")
    return lines > 0, f"{lines} lines of stacks"


def check_silence(spec: Spec):
    torch.manual_seed(0)
    small = dataclasses.replace(spec, width=8)
    made = enhance(awake(build_network(spec.network, 8, spec.block)), np.zeros(3 * spec.n_fft, np.float32), small)
    return bool(np.isfinite(made).all()), f"silence gives finite samples, at most {np.abs(made).max():.1e}"


def check_repeats(spec: Spec):
    small = dataclasses.replace(spec, width=8)
    losses = [overfit(small, *pair(0.5), steps=2, crops=2)[1] for _ in range(2)]
    return losses[0] == losses[1], f"two runs of two steps: losses {losses[0]} and {losses[1]}"


def check_speed(spec: Spec):
    """Of the whole network on this machine. None: it works, but not live."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_network(spec.network, spec.width, spec.block).to(device).eval()
    stream, times = Stream(Traced(network, spec, device), spec, device=device), []
    stream.push(np.zeros(spec.n_fft, np.float32))
    while len(times) < 20 and sum(times) < 1:
        began = time.monotonic()
        stream.push(np.zeros(spec.hop, np.float32))
        times.append(time.monotonic() - began)
    factor = float(np.median(times)) / (spec.hop / RATE)
    where = "one core" if device.type == "cpu" else device.type
    return factor < 1 or None, f"{1000 * np.median(times):.1f} ms a frame on {where}, real-time factor {factor:.2f}"


def check_data(spec: Spec, config):
    """Every pair can be trained on: rate, equal lengths, long enough, not silent."""
    pairs = PairDataset(config.data, RATE)
    pairs.verify()
    check_clip_lengths(pairs, np.arange(len(pairs)), spec, config.pad_short)
    silent = [pairs.id(i) for i in range(len(pairs)) if not pairs.clean(i).any() or not pairs.noisy(i).any()]
    frames = [signal.frame_count(int(n), spec.hop) for n in (pairs.samples.min(), pairs.samples.max())]
    numbers = f"{len(pairs)} pairs of one channel, {frames[0]} to {frames[1]} frames"
    return not silent or None, numbers + (f"; silent: {', '.join(silent[:5])}" if silent else "")


CHECKS = {
    "settings": check_settings,
    "sigma": check_sigma,
    "forward process": check_simulation,
    "noise": check_noise,
    "oracle": check_oracle,
    "causality": check_causality,
    "chunks": check_chunks,
    "latency": check_latency,
    "lengths": check_lengths,
    "untrained loss": check_untrained,
    "bf16": check_bf16,
    "ranges": check_ranges,
    "refusals": check_refusals,
    "not a number": check_not_a_number,
    "silence": check_silence,
    "repeatable": check_repeats,
    "stacks": check_stacks,
    "speed": check_speed,
}


def diagnose(config, spec: Spec, scorer) -> None:
    """Prints a line a check: PASS, WARN or FAIL, and the numbers; a failure ends with exit code 2."""
    torch.set_num_threads(1)  # small networks: threads that wait for each other are what makes a busy machine slow
    checks = dict(CHECKS)
    if config.data:
        checks["data"] = functools.partial(check_data, config=config)
    if config.deep:
        checks["one clip by heart"] = check_overfit
    failed = []
    for name, check in checks.items():
        began = time.monotonic()
        try:
            fine, numbers = check(spec)
        except (UserError, AssertionError, ValueError, RuntimeError) as error:
            fine, numbers = False, str(error)
        word = {True: "PASS", False: "FAIL", None: "WARN"}[fine]
        say(f"{word}  {name}: {numbers}  [{time.monotonic() - began:.1f} s]")
        failed += [name] if word == "FAIL" else []
    if failed:
        raise UserError(f"the doctor found something wrong: {', '.join(failed)}.")


# ---- one clip by heart ---------------------------------------------------------------------------------------------


def overfit(
    spec: Spec, noisy: np.ndarray, clean: np.ndarray, steps: int, crops: int = 8, lr: float = 2e-3, watch=None
) -> tuple[torch.nn.Module, list[float]]:
    """A network of this spec that has learned one pair, and its losses. `watch(step, network)` after each step."""
    torch.manual_seed(0)
    network = build_network(spec.network, spec.width, spec.block).train()
    windows = windows_of(noisy, clean, spec)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        batch = windows.batch([(step * crops + i, 0) for i in range(crops)]) | {"autocast": False}
        total, stats, _ = signal.batch_to_loss(network, batch, spec)
        loss = total / float(stats[1].sum())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if watch:
            watch(step, network)
    return network, losses


def check_overfit(spec: Spec, steps: int = 600):
    """Of clean speech: the score takes far longer to learn."""
    small = dataclasses.replace(spec, width=8, frames=16, buffer=8, t_max=0.8, loss="dp", output_scale="none")
    noisy, clean = pair(1.0, 0.0)
    network, losses = overfit(small, noisy, clean, steps)
    made = enhance(network.eval(), noisy, small)
    before, after = (speech.si_sdr(clean.astype(np.float64), wave.astype(np.float64)) for wave in (noisy, made))
    return after - before >= 8, f"{steps} steps, loss {losses[-1]:.5f}: SI-SDR {before:.1f} dB to {after:.1f} dB"
