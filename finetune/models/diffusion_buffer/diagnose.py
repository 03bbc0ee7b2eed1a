"""Checks of a Diffusion Buffer on a user's data and machine: settings, pairs, weights, output, speed and memory.

What a stream computes is proven by tests/models/diffusion_buffer, with an oracle in place of the network.
"""

import copy
import functools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common import speech_metrics
from common.errors import UserError
from common.feed import to_device
from common.memory import out_of_memory, peak_memory
from common.pairs import PairDataset
from common.runtime import Process, say
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import check_lengths
from models.diffusion_buffer.enhance import Stream, Traced
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import RATE, Spec
from models.diffusion_buffer.weights import load_network, spec_of

OUTPUT_FILES, OUTPUT_SECONDS = 8, 60.0  # recordings to enhance, and how long that may take
SPEED_FRAMES, SPEED_SECONDS = 200, 20.0  # as many frames as a 99th percentile needs, but no longer than this


def diagnose(config, compute_loss: Callable, process: Process) -> None:
    """Prints a line per check: PASS, WARN or FAIL, and the numbers; a failure raises UserError.

    `config` and `compute_loss`: the recipe's own, edits included. Without a --model the network has random weights.
    """
    if config.model:
        network, spec = load_network(config.model, config.spec)
    else:
        spec = spec_of(config)
        network = build_network(spec.network, spec.width, spec.block)
    network = network.to(process.device)
    paths = {"data": config.data, "evaluation data": config.eval_data}
    checks = {"settings": functools.partial(check_settings, spec)}
    for name, path in paths.items():
        if path:
            checks[name] = functools.partial(check_data, spec, path, bool(config.model))
    if config.model:
        checks["weights"] = functools.partial(check_weights, network, config.model)
        if any(path and Path(path).exists() for path in paths.values()):
            checks["output"] = functools.partial(check_output, spec, network, config, process)
    checks["speed"] = functools.partial(check_speed, spec, network, process)
    checks["memory"] = functools.partial(check_memory, spec, network, config, compute_loss, process)
    failed = []
    for name, check in checks.items():
        began = time.monotonic()
        try:
            fine, numbers = check()
        except UserError as error:
            fine, numbers = False, str(error)
        verdict = {True: "PASS", False: "FAIL", None: "WARN"}[fine]
        say(f"{verdict}  {name}: {numbers}  [{time.monotonic() - began:.1f} s]")
        failed += [name] if verdict == "FAIL" else []
    if failed:
        raise UserError(f"some checks failed: {', '.join(failed)}.")


# ---- the checks: each returns True, False or None (a warning), and the numbers ---------------------------------


def check_settings(spec: Spec):
    t = signal.inference_times(spec)
    first, last = (f"t {t[i]:.3f} sigma {signal.sigma(spec, t[i]):.4f} g {signal.g(spec, t[i]):.4f}" for i in (0, -1))
    frames = signal.frame_count(RATE, spec.hop)
    return True, (
        f"1 s is {frames} frames of {spec.bins} bins, the network sees {spec.frames}, the buffer is {spec.buffer};"
        f" {first} ... {last}; dt {t[1] - t[0]:.4f}"
    )


def check_data(spec: Spec, path: str, trained: bool):
    """Every pair can be trained on: sample rate, equal lengths, long enough, not silent."""
    if trained and not Path(path).exists():
        return None, f"{path} is not here: the pairs are not checked"
    pairs = PairDataset(path, RATE)
    pairs.verify()
    check_lengths(pairs, np.arange(len(pairs)), spec)
    silent = [pairs.id(i) for i in range(len(pairs)) if not pairs.clean(i).any() or not pairs.noisy(i).any()]
    frames = [signal.frame_count(int(n), spec.hop) for n in (pairs.samples.min(), pairs.samples.max())]
    numbers = f"{len(pairs)} mono pairs, {frames[0]} to {frames[1]} frames"
    return not silent or None, numbers + (f"; silent: {', '.join(silent[:5])}" if silent else "")


def check_weights(network, path: str):
    finite = all(bool(value.isfinite().all()) for value in network.state_dict().values())
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return finite, f"{path} holds {size:,} weights" + ("" if finite else ", not all of them finite")


def check_output(spec: Spec, network, config, process: Process):
    """The trained network on the beginning of some recordings. None: it does not make them better."""
    pairs = PairDataset(config.eval_data or config.data, RATE)
    rows = np.arange(len(pairs)) if config.eval_data else pairs.rows_starting(config.hold_out or [""])
    traced, gains, began = Traced(network.eval(), spec, process.device), [], time.monotonic()
    for row in rows[:OUTPUT_FILES]:
        stream, out = Stream(traced, spec, device=process.device), []
        noisy, clean = (side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))
        for start in range(0, len(noisy), RATE // 4):
            out.append(stream.push(noisy[start : start + RATE // 4]))
            if time.monotonic() - began > OUTPUT_SECONDS:
                break
        out.append(stream.flush())
        enhanced = np.concatenate(out).astype(np.float64)
        if not np.isfinite(enhanced).all():
            return False, f"clip {pairs.id(row)!r} is enhanced to samples that are not finite"
        noisy, clean = (side[: len(enhanced)].astype(np.float64) for side in (noisy, clean))
        gains.append((speech_metrics.si_sdr(clean, noisy), speech_metrics.si_sdr(clean, enhanced)))
        if time.monotonic() - began > OUTPUT_SECONDS:
            break
    before, after = np.mean(gains, axis=0)
    return bool(after > before) or None, f"SI-SDR {after:.2f} dB, noisy {before:.2f} dB, {len(gains)} recordings"


def check_speed(spec: Spec, network, process: Process):
    """Speed of the network's stream on this machine, as `enhance` runs it. None: it works, but not live."""
    stream = Stream(Traced(network.eval(), spec, process.device), spec, device=process.device)
    hiss = np.random.default_rng(0).standard_normal(spec.hop).astype(np.float32) / 10
    for _ in range(4):  # the first frames warm up
        stream.push(hiss)
    times = []
    while len(times) < SPEED_FRAMES and (len(times) < 3 or sum(times) < SPEED_SECONDS):
        began = time.monotonic()
        stream.push(hiss)
        times.append(time.monotonic() - began)
    hop = spec.hop / RATE
    middle, slow = float(np.median(times)), float(np.percentile(times, 99))
    where = process.device.type if process.device.type != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return slow / hop < 1 or None, (
        f"width {spec.width} on {where}: {1000 * middle:.1f} ms per frame, real-time factor {middle / hop:.2f}, 99 % of"
        f" {len(times)} frames below {slow / hop:.2f}"
    )


def check_memory(spec: Spec, network, config, compute_loss: Callable, process: Process):
    """A step on silence at the run's micro-batch, on a copy of the network, with memory as large as a training's."""
    crops, samples = config.micro_batch, (spec.frames - 1) * spec.hop + spec.n_fft
    t = torch.from_numpy(signal.inference_times(spec).astype(np.float32)).repeat(crops, 1)
    batch = {
        "noisy": torch.zeros(crops, samples),
        "clean": torch.zeros(crops, samples),
        "t": t,
        "sigma": torch.from_numpy(signal.sigma(spec, t.numpy()).astype(np.float32)),
        "z": torch.zeros(crops, spec.bins, spec.buffer) + 0j,
        "autocast": config.precision == "bf16",
    }
    began = time.monotonic()
    try:
        network = copy.deepcopy(network).train()
        kept = [copy.deepcopy(network) for _ in range(3 if config.ema else 2)]  # two moments per weight, and the EMA
        compute_loss(network, to_device(batch, process.device), spec).loss_sum.backward()
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error)
        if not message:
            raise
        return False, f"a step of --micro-batch {crops} does not fit ({message}): lower --micro-batch"
    del kept
    seconds = time.monotonic() - began
    return True, f"a step of --micro-batch {crops} takes {seconds:.1f} s; the process peaks at {peak_memory(process)}"
