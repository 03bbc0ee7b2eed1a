"""Memory a rank needs for weights, gradients and optimizer, before anything is allocated."""

from common.config import RunConfig
from common.ds_config import offloads_optimizer, stage_of
from common.runtime import Ranks, say


def count_parameters(model) -> tuple[int, int]:
    """All and trainable parameters."""
    sizes = [(_true_size(p), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, train in sizes if train)


def _true_size(parameter) -> int:
    """ZeRO-3 keeps a partitioned parameter's size in ds_numel; bitsandbytes packs two 4-bit values into a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return quantised.shape.numel() if quantised else getattr(parameter, "ds_numel", parameter.numel())


def quantised_savings(model, width: int) -> int:
    """Bytes that quantised weights take less than `width` a value."""
    packed = [p for p in model.parameters() if not p.is_floating_point()]
    return sum(width * _true_size(p) - p.numel() * p.element_size() for p in packed)


def predict(total: int, trained: int, ds: dict, config: RunConfig, world: int) -> dict[str, float]:
    """Bytes a rank, on the device and (with offload) in host memory. Activations are not in it.

    Compute weights and gradients take 2 bytes (bf16) or 4; an fp32 master, its gradient and Adam's two moments take
    16 (10 with 8-bit moments) and are split over the ranks from stage 1, gradients from stage 2, weights in stage 3.
    """
    width = 2 if config.precision == "bf16" else 4
    states = 8 + (2 if config.optimizer == "adamw8bit" else 8)
    stage = stage_of(ds)
    weights = width * total / (world if stage == 3 else 1)
    gradients = width * trained / (world if stage >= 2 else 1)
    optimizer = states * trained / (world if stage >= 1 else 1)
    host = 0.0
    if offloads_optimizer(ds):
        host, optimizer, gradients = host + optimizer + gradients, 0.0, 0.0
    if ds["zero_optimization"].get("offload_param", {}).get("device", "none") != "none":
        host, weights = host + weights, 0.0
    return {"device": weights + gradients + optimizer, "host": host}


def say_needs(model, ds: dict, config: RunConfig, ranks: Ranks) -> None:
    """Prints the size of the model and what its states will take."""
    total, trained = count_parameters(model)
    need = predict(total, trained, ds, config, ranks.world)
    need["device"] -= quantised_savings(model, 2 if config.precision == "bf16" else 4)
    need = {place: size / 2**30 for place, size in need.items()}
    say(
        f"parameters {total:,}, trained {trained:,}; ZeRO-{stage_of(ds)} on {ranks.world} ranks: states"
        f" {need['device']:.2f} GB a rank on the device, {need['host']:.2f} GB in host memory"
    )
