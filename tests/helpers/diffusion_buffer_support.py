"""What the tests and benchmarks of the Diffusion Buffer share: a synthetic pair, batches of it, overfitting it."""

import contextlib
import functools
import math
from pathlib import Path

import numpy as np
import torch

from common.keyed_random import generator
from diffusion_buffer import Config, compute_loss
from models.diffusion_buffer.data import Clips
from models.diffusion_buffer.diagnose import clips_of
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import RATE, Spec, spec_of


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


def batch_of(spec: Spec, crops: int) -> dict:
    batch = clips_of(*pair(2.0), spec).batch([(epoch, 0) for epoch in range(crops)])
    return batch | {"autocast": False, "own": False}


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
        batch = clips.batch([(step * crops + i, 0) for i in range(crops)]) | {"autocast": False, "own": False}
        loss = compute_loss(network, batch, spec).loss_sum / (crops * spec.bins * spec.buffer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if watch:
            watch(step, network)
    return network, losses


def training_step(network: str, width: int = 8, crops: int = 4, **flags) -> tuple:
    """Network, micro-batch and loss of a training step."""
    config = Config(network=network, width=width, **flags)
    spec = spec_of(config)
    clips = clips_of(*pair(2.5), spec)
    clips.config = config
    batch = clips.batch([(epoch, 0) for epoch in range(crops)])
    batch |= {"autocast": config.precision == "bf16", "own": config.context_own > 0}
    model = build_network(spec.network, spec.width, spec.block).train()
    return model, batch, functools.partial(compute_loss, spec=spec)


# ---- in the ranks (rank_server.py) -----------------------------------------------------------------------------


@contextlib.contextmanager
def disturbed(recipe, process, nan=None, inf=False, fits=99, from_step=1, scores=None):
    """`nan`: this clip's samples are NaN. `inf`: the loss is infinite under autocast. `fits`: more crops at once are
    too much for the main rank's memory, in the backward pass from this step on. `scores`: what the evaluations return
    from step 1 on."""
    item, loss_fn, evaluate, computed = Clips.item, recipe.compute_loss, recipe.evaluate, []

    def item_with_nan(self, row, epoch, name, spec):
        sample = item(self, row, epoch, name, spec)
        if name == nan:
            sample["noisy"][:] = float("nan")
        return sample

    def out_of_memory(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def disturbed_loss(model, batch, spec):
        computed.append(1)
        output = loss_fn(model, batch, spec)
        if process.is_main and len(batch["ids"]) > fits and len(computed) >= from_step:
            output.loss_sum.register_hook(out_of_memory)  # in the backward pass, when other ranks may be ahead
        return output._replace(loss_sum=output.loss_sum * float("inf")) if inf and batch["autocast"] else output

    def scored(model, clips, run, ema, step):
        score = evaluate(model, clips, run, ema, step)
        return scores[step - 1] if scores and step else score

    Clips.item, recipe.compute_loss, recipe.evaluate = item_with_nan, disturbed_loss, scored
    try:
        yield
    finally:
        Clips.item, recipe.compute_loss, recipe.evaluate = item, loss_fn, evaluate


def save_network(engine, config, process) -> None:
    """RUN/network-RANK.pt"""
    if not config.dry_run:
        torch.save(engine.module.model.state_dict(), Path(config.out) / f"network-{process.rank}.pt")
