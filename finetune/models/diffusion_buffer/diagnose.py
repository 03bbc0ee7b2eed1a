"""What must hold before training a Diffusion Buffer can work, and whether a trained one does, as checks with numbers.

Most of it needs no trained network: the stream is checked with an oracle, a network that knows the answer.
"""

import copy
import dataclasses
import faulthandler
import functools
import math
import os
import signal as signals
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common import engine, memory, optim, speech_metrics
from common.ds_config import resolve_ds
from common.ema import Ema
from common.errors import UserError
from common.evaluation import evaluating
from common.feed import to_device
from common.keyed_random import generator
from common.pairs import PairDataset
from common.runtime import Process, memory_gb, say
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Clips, check_lengths
from models.diffusion_buffer.enhance import Buffer, Stream, Traced, enhance, enhance_at
from models.diffusion_buffer.evaluate import files_together
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import RATE, Spec, spec_of


class Oracle:
    """Replaces the network: returns the exact score or clean frames of a known pair. `sign` -1 flips the score.

    Where the noisy frames that it is shown are not the pair's own, it is wrong by the difference: otherwise a stream
    that does not move them with its buffer would go unnoticed.
    """

    def __init__(self, noisy: np.ndarray, clean: np.ndarray, spec: Spec, sign: int = 1):
        self.spec, self.sign, self.count = spec, sign, 0
        frames = -(-len(clean) // spec.hop) + 3 * spec.buffer
        before = torch.zeros(spec.bins, spec.frames - 1) + 0j
        self.noisy, self.clean = (
            torch.cat([before, signal.whole_spectrum(torch.from_numpy(wave), spec, frames)], dim=1)
            for wave in (noisy, clean)
        )
        t = signal.inference_times(spec)
        self.t = torch.from_numpy(t.astype(np.float32))
        self.variance = torch.from_numpy(np.square(signal.sigma(spec, t)).astype(np.float32))

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        size = self.spec.buffer
        shown = slice(self.count, self.count + self.spec.frames)
        misplaced = (y[0] - self.noisy[:, shown]).abs().amax(1, keepdim=True)  # 0 if every frame is in its place
        clean = self.clean[:, shown][:, -size:] + misplaced
        self.count += 1
        if not self.spec.predicts_clean:
            mean = (1 - self.t) * clean + self.t * y[0, :, -size:]
            clean = -self.sign * (x[0, :, -size:] - mean) / self.variance
        return torch.cat([x[0, :, :-size], clean], dim=1)[None]


class PassThrough:
    """Replaces the network: returns the noisy frames as if they were clean."""

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        return y


def synthetic_pair(seconds: float = 2.0, snr: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean: a buzz with pauses, peak 0.5, in white noise."""
    t = np.arange(int(seconds * RATE)) / RATE
    buzz = sum(np.sin(2 * np.pi * 130 * n * t) / n for n in range(1, 30)) * np.maximum(0, np.sin(2 * np.pi * 2.5 * t))
    clean = (0.5 * buzz / np.abs(buzz).max()).astype(np.float32)
    noise = generator("diagnose").standard_normal(len(clean)).astype(np.float32)
    noise *= math.sqrt(np.square(clean).mean() / 10 ** (snr / 10)) / noise.std()
    return clean + noise, clean


def clips_of(noisy: np.ndarray, clean: np.ndarray, spec: Spec) -> Clips:
    """A training set of one pair, without a dataset on disk."""
    sides = [(np.clip(side, -1, 1) * 32767).astype(np.int16) for side in (noisy, clean)]
    pairs = SimpleNamespace(
        samples=np.array([len(clean)]),
        id=lambda i: "clip",
        noisy=lambda i: sides[0],
        clean=lambda i: sides[1],
        folder="-",
    )
    config = SimpleNamespace(
        pad_short=True, seed=0, times="jitter", gain_low=0.0, gain_high=0.0, context_noise=0.0, context_own=0.0
    )
    return Clips(pairs, np.array([0]), spec, config)


def synthetic_batch(spec: Spec, crops: int) -> dict:
    batch = clips_of(*synthetic_pair(), spec).batch([(epoch, 0) for epoch in range(crops)])
    return batch | {"autocast": False, "own": False}


def small_network(spec: Spec) -> tuple[torch.nn.Module, Spec]:
    """An untrained network of width 8, always the same, and its spec."""
    torch.manual_seed(0)
    return build_network(spec.network, 8, spec.block), dataclasses.replace(spec, width=8)


def randomised(network):
    """The network with weights that are not nearly zero, so that every input has an influence."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5 * 0.5)
    return network


# ---- the checks: each returns True, False or None (a warning), and the numbers -------------------------------------


def check_settings(spec: Spec):
    t = signal.inference_times(spec)
    first, last = (f"t {t[i]:.3f} sigma {signal.sigma(spec, t[i]):.4f} g {signal.g(spec, t[i]):.4f}" for i in (0, -1))
    frames = signal.frame_count(RATE, spec.hop)
    return True, (
        f"1 s is {frames} frames of {spec.bins} bins, the network sees {spec.frames}, the buffer is {spec.buffer};"
        f" {first} ... {last}; dt {t[1] - t[0]:.4f}"
    )


def check_sigma(spec: Spec):
    """Closed form against the integral c (1-t)^2 int k^2s / (1-s)^2 ds, and g(0)^2 = c."""
    from scipy.integrate import quad

    worst = 0.0
    for t in (0.001, spec.t_eps, 0.25, 0.5, spec.reverse_start, spec.t_max):
        area, _ = quad(lambda s: spec.sde_k ** (2 * s) / (1 - s) ** 2, 0, t, epsabs=0, epsrel=1e-11)
        exact = math.sqrt(spec.sde_c * area) * (1 - t)
        worst = max(worst, abs(float(signal.sigma(spec, t)) / exact - 1))
    starts_at_c = abs(float(signal.g(spec, 0)) ** 2 - spec.sde_c) < 1e-12
    return worst < 1e-6 and starts_at_c, f"largest relative error {worst:.1e}"


def check_forward_process(spec: Spec, paths: int = 20000, steps: int = 400):
    """Euler steps of the forward process from 1 towards -1 end with its mean and variance."""
    draw = generator("diagnose", "forward process")
    end, x = 0.7, np.ones(paths)
    for t in np.arange(steps) * end / steps:
        step = end / steps
        x = x + (-1 - x) / (1 - t) * step + signal.g(spec, t) * math.sqrt(step) * draw.standard_normal(paths)
    mean, std = abs(x.mean() - (1 - 2 * end)), abs(x.std() / float(signal.sigma(spec, end)) - 1)
    return mean < 0.02 and std < 0.02, f"mean off by {mean:.4f}, standard deviation by {100 * std:.2f} %"


def check_noise(spec: Spec):
    power = float(np.square(np.abs(signal.complex_noise(generator("diagnose", "noise"), 100000))).mean())
    return abs(power - 1) < 0.02, f"E|z|^2 = {power:.4f}"


def check_oracle(spec: Spec):
    """The exact score or clean frames must give clean speech, and a flipped score must not."""
    noisy, clean = synthetic_pair()
    levels, size = {}, max(20, spec.buffer)  # with fewer steps some noise of the score is left
    for name, loss, sign in (("score", "dsm", 1), ("flipped score", "dsm", -1), ("clean", "dp", 1)):
        known = dataclasses.replace(spec, loss=loss, buffer=size, frames=max(size, spec.frames), level="none")
        enhanced = enhance(Oracle(noisy, clean, known, sign), noisy, known)
        levels[name] = speech_metrics.si_sdr(clean.astype(np.float64), enhanced.astype(np.float64))
    fine = levels["score"] > 35 and levels["flipped score"] < 0 and levels["clean"] > 60
    return fine, "SI-SDR " + ", ".join(f"{name} {level:.1f} dB" for name, level in levels.items()) + " (noisy 5.0)"


def check_causality(spec: Spec):
    """No gradient from what a stream has given out to what it receives later."""
    network, small = small_network(spec)
    frames = torch.zeros(spec.bins, 3 * spec.buffer, dtype=torch.complex64).normal_().requires_grad_()
    buffer = Buffer(randomised(network), small)
    n = 2 * spec.buffer
    for i in range(n):
        out = buffer.push(frames[None, :, i])
    (gradient,) = torch.autograd.grad(out[..., 0].abs().square().sum(), frames)
    past, future = (float(part.abs().sum()) for part in (gradient[:, :n], gradient[:, n:]))
    return future == 0 and past > 0, f"gradient to the past {past:.2e}, to the future {future:g}"


def check_chunks(spec: Spec):
    noisy, _ = synthetic_pair(0.5)
    outputs = []
    for size in (1, 160, 1000, len(noisy)):
        stream = Stream(PassThrough(), dataclasses.replace(spec, loss="dp"))
        chunks = [stream.push(noisy[i : i + size]) for i in range(0, len(noisy), size)]
        outputs.append(np.concatenate([*chunks, stream.flush()]))
    same = all(np.array_equal(outputs[0], other) for other in outputs[1:])
    return same, f"{'equal' if same else 'different'} bits from chunks of 1, 160, 1000 and {len(noisy)} samples"


def check_latency(spec: Spec):
    latencies = {delay: measure_latency(dataclasses.replace(spec, loss="dp"), delay) for delay in (1, spec.buffer)}
    fine = all(samples == spec.latency(delay) for delay, samples in latencies.items())
    return fine, ", ".join(f"delay {d}: {n} samples, {1000 * n / RATE:.1f} ms" for d, n in latencies.items())


def measure_latency(spec: Spec, delay: int) -> int:
    """Samples that go in until an impulse comes out, from the position in a hop where it takes longest."""
    stream = Stream(PassThrough(), spec, delay)
    position = (spec.buffer + 4) * spec.hop - spec.n_fft // 2
    given = 0
    for i in range(position + spec.n_fft + (delay + 2) * spec.hop):
        enhanced = stream.push(np.array([float(i == position)]))
        loud = np.flatnonzero(np.abs(enhanced) > 0.5)
        if len(loud):
            assert given + loud[0] == position, "the impulse came out at another position"
            return i + 1 - position
        given += len(enhanced)
    raise AssertionError("the impulse never came out")


def check_sample_counts(spec: Spec):
    wrong = []
    for length in (15999, 16000, 16001, 16255, 16256, 16257):
        wave = synthetic_pair(1.1)[1][:length]
        enhanced = enhance(PassThrough(), wave, dataclasses.replace(spec, loss="dp"))
        if len(enhanced) != length or np.abs(enhanced - wave).max() > 1e-5:
            wrong.append(length)
    return not wrong, f"15999 to 16257 samples come back unchanged{f', except {wrong}' if wrong else ''}"


@torch.no_grad()
def check_untrained(spec: Spec, compute_loss: Callable):
    network, small = small_network(spec)
    small = dataclasses.replace(small, loss="dsm", output_scale="sigma")
    loss = float(compute_loss(network, synthetic_batch(small, 4), small).loss_sum) / (4 * small.bins * small.buffer)
    return abs(loss - 1) < 0.1, f"DSM loss {loss:.3f}, expected 1"


@torch.no_grad()
def check_bf16(spec: Spec, compute_loss: Callable):
    network, small = small_network(spec)
    network, batch = randomised(network), synthetic_batch(small, 2)
    fp32, bf16 = (float(compute_loss(network, batch | {"autocast": a}, small).loss_sum) for a in (False, True))
    return abs(bf16 / fp32 - 1) < 0.02, f"the loss in bf16 differs from fp32 by {100 * abs(bf16 / fp32 - 1):.3f} %"


@torch.no_grad()
def check_ranges(spec: Spec, compute_loss: Callable):
    """Sigmas, target scores and network outputs of a batch."""
    network, small = small_network(spec)
    batch = synthetic_batch(small, 4)
    size = compute_loss(network, batch, small).extra
    sigmas, scores = batch["sigma"], (batch["z"] / batch["sigma"][:, None]).abs()
    numbers = (
        f"sigma {float(sigmas.min()):.4f} to {float(sigmas.max()):.4f}, |score| up to {float(scores.max()):.1f}"
        f" (rms {float(scores.square().mean().sqrt()):.1f}), output rms {float(size['out_rms']):.1e}"
    )
    fine = bool(sigmas.min() >= 1e-3) and bool(scores.isfinite().all()) and math.isfinite(float(size["out_max"]))
    return fine, numbers


def check_refusals(spec: Spec):
    """Settings and clips that would otherwise show up as NaN or a wrong shape are refused."""
    accepted = []
    for change in ({"buffer": spec.frames + 1}, {"t_eps": 0.0}, {"t_max": 1.0}, {"t_eps": 0.6, "t_max": 0.5}):
        try:
            spec_of(SimpleNamespace(**dataclasses.asdict(spec) | {"buffer_low": 0, "context_own": 0} | change))
            accepted.append(str(change))
        except UserError:
            pass
    for samples in (0, spec.n_fft // 4, spec.n_fft // 2):
        clip = np.zeros(samples, np.float32)
        try:
            clips_of(clip, clip, spec)
            accepted.append(f"{samples} samples")
        except UserError:
            pass
    return not accepted, f"not refused: {', '.join(accepted)}" if accepted else "4 settings and 3 clips are refused"


@torch.no_grad()
def check_nan(spec: Spec, compute_loss: Callable):
    """One NaN in one clip of a batch makes the loss NaN; that is how a step is skipped and its clips are named."""
    network, small = small_network(spec)
    batch = synthetic_batch(small, 2)
    before = float(compute_loss(network, batch, small).loss_sum)
    batch["noisy"][1, -spec.n_fft // 2] = float("nan")
    after = float(compute_loss(network, batch, small).loss_sum)
    return math.isfinite(before) and not math.isfinite(after), f"loss {before:.3g} without a NaN, {after} with one"


def check_silence(spec: Spec):
    network, small = small_network(spec)
    enhanced = enhance(randomised(network), np.zeros(3 * spec.n_fft, np.float32), small)
    return bool(np.isfinite(enhanced).all()), f"silence gives finite samples, at most {np.abs(enhanced).max():.1e}"


def check_repeats(spec: Spec, compute_loss: Callable):
    """Two optimizer steps, twice, with the same losses."""
    losses = []
    for _ in range(2):
        network, small = small_network(spec)
        optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(2):
            optimizer.zero_grad()
            loss = compute_loss(network, synthetic_batch(small, 2), small).loss_sum / (2 * small.bins * small.buffer)
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    return losses[0] == losses[1], f"two runs of two steps: losses {losses[0]} and {losses[1]}"


def check_stacks(spec: Spec):
    """SIGUSR2 makes a rank that hangs write its stacks."""
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.register(signals.SIGUSR2, stacks, all_threads=True)
        os.kill(os.getpid(), signals.SIGUSR2)
        faulthandler.unregister(signals.SIGUSR2)
        stacks.seek(0)
        lines = stacks.read().count("File ")
    return lines > 0, f"{lines} lines of stacks"


# ---- the checks of a network, a machine and data -------------------------------------------------------------------


def check_weights(network, config):
    finite = all(bool(value.isfinite().all()) for value in network.state_dict().values())
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return finite, f"{config.model} holds {size:,} weights" + ("" if finite else ", not all of them finite")


def check_memory(spec: Spec, network, config, compute_loss: Callable, process: Process):
    """One optimizer step of a real engine at the run's micro-batch, with optimizer states and EMA, then an evaluation.

    Works on a copy of the network, which the step changes. One rank here has all states: a run with more has less.
    """
    loss_fn = functools.partial(compute_loss, spec=spec)
    batch = synthetic_batch(spec, config.micro_batch) | {"autocast": config.precision == "bf16"}
    ds = resolve_ds(config.ds, dataclasses.replace(config, accumulation=1), process.world)
    network = copy.deepcopy(network).to(process.device).train()
    memory.forget_peak(process)
    (start,) = memory_gb(process).values()
    groups = optim.parameter_groups(network, config.weight_decay, no_decay=("GroupNorm", "out_layers.0"))
    ds_engine = engine.start_engine(network, loss_fn, optim.build_optimizer(groups, config, ds), ds)
    ema = Ema(ds_engine, config.ema)
    began = time.monotonic()
    output, problem = memory.try_in_memory(lambda: ds_engine(to_device(batch, process.device)))
    if problem:
        return False, f"--micro-batch {config.micro_batch} does not fit into memory ({problem}): lower it"
    weight = config.micro_batch * spec.bins * spec.buffer
    engine.backward(ds_engine, output.loss_sum, weight, process.world, last=True)
    engine.take_step(ds_engine)
    ema.update(0)
    seconds, (training,) = time.monotonic() - began, memory_gb(process).values()
    memory.forget_peak(process)
    together = files_together(spec, process.device)
    sounds = [np.zeros(4 * spec.hop, np.float32)] * together
    with ema.applied(), evaluating(network):
        enhance_at(network, sounds, spec, [spec.buffer], process.device)
    return True, (
        f"a step of --micro-batch {config.micro_batch} with optimizer states{' and EMA' if config.ema else ''} takes"
        f" {seconds:.1f} s and {training - start:.2f} GB;"
        f" the process peaks at {training:.2f} GB, in an evaluation of {together} files at a time at"
        f" {memory.peak_memory(process)}"
    )


SPEED_FRAMES, SPEED_SECONDS = 200, 20.0  # as many frames as a 99th percentile needs, but no longer than this


def check_speed(spec: Spec, network, process: Process):
    """Speed of the network's stream on this machine, as `enhance` runs it. None: it works, but not live."""
    device = process.device
    stream = Stream(Traced(network.to(device).eval(), spec, device), spec, device=device)
    sound = synthetic_pair(0.5)[0]
    stream.push(np.resize(sound, spec.n_fft + 2 * spec.hop))  # the first frames warm up
    times = []
    while len(times) < SPEED_FRAMES and (len(times) < 3 or sum(times) < SPEED_SECONDS):
        start = len(times) * spec.hop % (len(sound) - spec.hop)
        began = time.monotonic()
        stream.push(sound[start : start + spec.hop])
        times.append(time.monotonic() - began)
    hop = spec.hop / RATE
    middle, slow = float(np.median(times)), float(np.percentile(times, 99))
    where = device.type if device.type != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return slow / hop < 1 or None, (
        f"width {spec.width} on {where}: {1000 * middle:.1f} ms per frame, real-time factor {middle / hop:.2f}, 99 % of"
        f" {len(times)} frames below {slow / hop:.2f}"
    )


OUTPUT_SECONDS = 60.0  # that streaming recordings may take


def check_output(spec: Spec, network, config, process: Process):
    """The trained network on the beginning of some recordings. None: it does not make them better."""
    pairs, rows = evaluation_rows(config)
    device, network, gains, began = process.device, Traced(network.eval(), spec, process.device), [], time.monotonic()
    for row in rows:
        stream, out = Stream(network, spec, device=device), []
        noisy, clean = (side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))
        step = RATE // 4
        for start in range(0, len(noisy), step):
            out.append(stream.push(noisy[start : start + step]))
            if time.monotonic() - began > OUTPUT_SECONDS:
                break
        out.append(stream.flush())
        enhanced = np.concatenate(out).astype(np.float64)
        if not np.isfinite(enhanced).all():
            return False, f"clip {pairs.id(row)!r} is enhanced to samples that are not finite"
        before, after = (speech_metrics.si_sdr(clean[: len(enhanced)].astype(np.float64), wave[: len(enhanced)])
                         for wave in (noisy.astype(np.float64), enhanced))  # fmt: skip
        gains.append((before, after, len(enhanced) / RATE))
        if time.monotonic() - began > OUTPUT_SECONDS:
            break
    before, after, seconds = np.array(gains).T
    numbers = (
        f"SI-SDR {after.mean():.2f} dB, noisy {before.mean():.2f} dB, {len(gains)} recordings, {seconds.sum():.1f} s"
    )
    return bool(after.mean() > before.mean()) or None, numbers


def evaluation_rows(config) -> tuple[PairDataset, np.ndarray]:
    """What the run is evaluated on: --eval-data, or what --hold-out leaves of --data; without either, all of --data."""
    pairs = PairDataset(config.eval_data or config.data, RATE)
    rows = np.arange(len(pairs)) if config.eval_data else pairs.rows_starting(config.hold_out or [""])
    return pairs, rows[: config.eval_files or 8]


def check_data(spec: Spec, config, path: str):
    """Every pair can be trained on: sample rate, equal lengths, long enough, not silent."""
    if config.model and not Path(path).exists():
        return None, f"{path} is not here: the pairs are not checked"
    pairs = PairDataset(path, RATE)
    pairs.verify()
    check_lengths(pairs, np.arange(len(pairs)), spec, config.pad_short)
    silent = [pairs.id(i) for i in range(len(pairs)) if not pairs.clean(i).any() or not pairs.noisy(i).any()]
    frames = [signal.frame_count(int(n), spec.hop) for n in (pairs.samples.min(), pairs.samples.max())]
    numbers = f"{len(pairs)} mono pairs, {frames[0]} to {frames[1]} frames"
    return not silent or None, numbers + (f"; silent: {', '.join(silent[:5])}" if silent else "")


CHECKS = {
    "settings": check_settings,
    "sigma": check_sigma,
    "forward process": check_forward_process,
    "noise": check_noise,
    "oracle": check_oracle,
    "causality": check_causality,
    "chunks": check_chunks,
    "latency": check_latency,
    "lengths": check_sample_counts,
    "refusals": check_refusals,
    "silence": check_silence,
    "stacks": check_stacks,
}
LOSS_CHECKS = {
    "untrained loss": check_untrained,
    "bf16": check_bf16,
    "ranges": check_ranges,
    "not a number": check_nan,
    "repeatable": check_repeats,
}


def diagnose(config, compute_loss: Callable, process: Process, network=None) -> None:
    """Prints a line per check: PASS, WARN or FAIL, and the numbers; a failure raises UserError.

    `config` and `compute_loss`: the recipe's own, edits included. `network`: the trained one of `config`; None: the
    checks that need one take it with random weights.
    """
    threads = torch.get_num_threads()
    spec, checks = spec_of(config), dict(CHECKS)
    checks |= {name: functools.partial(check, compute_loss=compute_loss) for name, check in LOSS_CHECKS.items()}
    paths = {"data": config.data, "evaluation data": config.eval_data}
    paths = {name: path for name, path in paths.items() if path}
    checks |= {name: functools.partial(check_data, config=config, path=path) for name, path in paths.items()}
    if network is not None:
        checks["weights"] = lambda spec: check_weights(network, config)
        if any(Path(path).exists() for path in paths.values()):
            checks["output"] = lambda spec: check_output(spec, network, config, process)
    else:
        network = build_network(spec.network, spec.width, spec.block)
    checks["speed"] = lambda spec: check_speed(spec, network, process)
    checks["memory"] = lambda spec: check_memory(spec, network, config, compute_loss, process)
    failed = []
    for name, check in checks.items():
        began = time.monotonic()
        # Where networks are small, threads that wait for each other are slower; the run's own network gets them all.
        torch.set_num_threads(threads if name in ("output", "speed", "memory") else 1)
        try:
            fine, numbers = check(spec)
        except (UserError, AssertionError, ValueError, RuntimeError) as error:
            fine, numbers = False, str(error)
        verdict = {True: "PASS", False: "FAIL", None: "WARN"}[fine]
        say(f"{verdict}  {name}: {numbers}  [{time.monotonic() - began:.1f} s]")
        failed += [name] if verdict == "FAIL" else []
    if failed:
        raise UserError(f"some checks failed: {', '.join(failed)}.")
