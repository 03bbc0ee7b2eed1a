"""What is tried before a training: whether a micro-batch fits, and one step's time and memory."""

import time

import torch

from common import engine
from common.memory import saved_bytes
from common.runtime import Ranks, memory_gb, say


def try_loss(model, batch: dict, loss_of, config, ranks: Ranks) -> None:
    """Forward and backward of one micro-batch, without a trace in the model."""
    loss, *_ = loss_of(model.to(ranks.device), batch | {"autocast": config.precision == "bf16"})
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def dry_run(ds_engine, build, target_bins: int, needs: float, config, ranks: Ranks) -> None:
    """One optimizer step, its time and memory beside what was foretold. `needs`: bytes of `memory.say_needs`."""
    autocast = {"autocast": config.precision == "bf16"}
    needs += saved_bytes(lambda: ds_engine(build(0) | autocast))
    began = time.monotonic()
    for turn in range(config.accumulation):
        loss_sum, stats, _ = ds_engine(build(turn) | autocast)
        engine.backward(ds_engine, loss_sum, target_bins, ranks.world)
        if turn + 1 < config.accumulation:
            ds_engine.step()
    applied, norm = engine.take_step(ds_engine)
    peak = " ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(ranks).items())
    loss = float(stats[0].sum() / stats[1].sum())
    say(f"dry run: one step {time.monotonic() - began:.1f} s, applied {applied}, loss {loss:.4f}, norm {norm:.3f};"
        f" memory a rank: predicted {needs / 2**30:.2f} GB, measured peak {peak}")  # fmt: skip
