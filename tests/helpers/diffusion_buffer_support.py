"""What the tests and benchmarks of the Diffusion Buffer share: a synthetic pair, batches of it, overfitting it."""

import contextlib
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common.keyed_random import generator
from diffusion_buffer import Config, compute_loss
from models.diffusion_buffer import enhance, signal
from models.diffusion_buffer.data import Clips
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import RATE, Spec
from models.diffusion_buffer.weights import spec_of


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
    """Noisy and clean."""
    clean = speechlike(seconds)
    noise = generator("doctor").standard_normal(len(clean)).astype(np.float32)
    noise *= math.sqrt(np.square(clean).mean() / 10 ** (snr / 10)) / noise.std()
    return clean + noise, clean


def clips_of(noisy: np.ndarray, clean: np.ndarray, spec: Spec, gains: bool = False) -> Clips:
    """A training set of one pair, without a dataset on disk; its level changes only with `gains`."""
    sides = [(np.clip(side, -1, 1) * 32767).astype(np.int16) for side in (noisy, clean)]
    pairs = SimpleNamespace(
        samples=np.array([len(clean)]),
        id=lambda i: "clip",
        noisy=lambda i: sides[0],
        clean=lambda i: sides[1],
        folder="-",
    )
    clips = Clips(pairs, np.array([0]), spec, seed=0)
    if not gains:
        clips.gain = lambda key: 0.0
    return clips


def batch_of(spec: Spec, crops: int) -> dict:
    return clips_of(*pair(2.0), spec).batch([(epoch, 0) for epoch in range(crops)]) | {"autocast": False}


# ---- in place of a network -------------------------------------------------------------------------------------


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


def randomised(network):
    """The network with weights that are not nearly zero, so that every input has an influence."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5 * 0.5)
    return network


def measure_latency(spec: Spec, delay: int) -> int:
    """Samples that go in until an impulse comes out, from the position in a hop where it takes longest."""
    stream = enhance.Stream(PassThrough(), spec, delay)
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


def overfit(
    spec: Spec, noisy: np.ndarray, clean: np.ndarray, steps: int, crops: int = 8, lr: float = 2e-3, watch=None
) -> tuple[torch.nn.Module, list[float]]:
    """A network of this spec that has learned one pair, and its losses. `watch(step, network)` after each step."""
    torch.manual_seed(0)
    network = build_network(spec.network, spec.width, spec.block).train()
    clips = clips_of(noisy, clean, spec)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        batch = clips.batch([(step * crops + i, 0) for i in range(crops)]) | {"autocast": False}
        loss = compute_loss(network, batch, spec).loss_sum / (crops * spec.bins * spec.buffer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if watch:
            watch(step, network)
    return network, losses


def training_step(network: str, width: int = 8, crops: int = 4, **settings) -> tuple:
    """Network, micro-batch and loss of a training step."""
    config = Config(spec=json.dumps({"network": network} | ({"width": width} if width else {}) | settings))
    spec = spec_of(config)
    batch = clips_of(*pair(2.5), spec).batch([(epoch, 0) for epoch in range(crops)])
    model = build_network(spec.network, spec.width, spec.block).train()
    return model, batch | {"autocast": config.precision == "bf16"}, functools.partial(compute_loss, spec=spec)


# ---- in the ranks (rank_server.py) -----------------------------------------------------------------------------


@contextlib.contextmanager
def disturbed(recipe, process, nan=None, scores=None):
    """`nan`: this clip's samples are NaN. `scores`: what the evaluations return from step 1 on."""
    item, evaluate = Clips.item, recipe.evaluate

    def item_with_nan(self, row, epoch, name):
        sample = item(self, row, epoch, name)
        if name == nan:
            sample["noisy"][:] = float("nan")
        return sample

    def scored(model, clips, run, ema, step):
        score = evaluate(model, clips, run, ema, step)
        return scores[step - 1] if scores and step else score

    Clips.item, recipe.evaluate = item_with_nan, scored
    try:
        yield
    finally:
        Clips.item, recipe.evaluate = item, evaluate


def save_network(engine, config, process) -> None:
    """RUN/network-RANK.pt"""
    if not config.dry_run:
        torch.save(engine.module.model.state_dict(), Path(config.out) / f"network-{process.rank}.pt")
