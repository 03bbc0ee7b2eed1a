"""Memory a rank needs for weights, gradients and optimizer, before anything is allocated."""

import torch

from common.config import RunConfig, UserError
from common.ds_config import offloads_optimizer, stage_of
from common.runtime import Ranks, all_sum, say

# What a CPU process still takes for libraries and DeepSpeed's engine after it has joined its ranks; measured, the same
# for 1 million and for 1.6 billion parameters.
GROWTH = 0.4 * 2**30


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
    Stage 3 works with what it gathers: live weights and the bucket that gradients are reduced in; stage 2 holds on
    to its two buckets when it offloads (all measured by tests/bench/bench_dia_size.py).
    """
    zero, stage = ds["zero_optimization"], stage_of(ds)
    width = 2 if config.engine_precision == "bf16" else 4
    moments = 2 if config.optimizer == "adamw8bit" else 8
    shared = trained / (world if stage >= 1 else 1)
    weights = width * total / (world if stage == 3 else 1)
    gradients = width * trained / (world if stage >= 2 else 1)
    # Stage 3 steps a sub-group at a time, and only that has its gradient in fp32.
    optimizer = (4 + moments) * shared + 4 * min(shared, _size(zero, "sub_group_size", 1e9) if stage == 3 else shared)
    bucket = width * min(trained, _size(zero, "reduce_bucket_size", 5e8))
    host = working = 0.0
    if stage == 3:
        working = width * min(total, _size(zero, "stage3_max_live_parameters", 1e9)) + bucket
    elif offloads_optimizer(ds):
        working = 2 * bucket
    if offloads_optimizer(ds):
        host, optimizer, gradients = host + optimizer + gradients, 0.0, 0.0
    if zero.get("offload_param", {}).get("device", "none") != "none":
        host, weights = host + weights, 0.0
    return {"device": weights + gradients + optimizer, "host": host, "working": working}


def _size(zero: dict, key: str, default: float) -> float:
    value = zero.get(key, default)
    return default if value == "auto" else value


def say_needs(model, ds: dict, config: RunConfig, ranks: Ranks) -> float:
    """Prints the size of the model and what its states will take; returns the bytes a rank without activations."""
    total, trained = count_parameters(model)
    need = predict(total, trained, ds, config, ranks.world)
    need["device"] -= quantised_savings(model, 2 if config.engine_precision == "bf16" else 4)
    shown = {place: size / 2**30 for place, size in need.items()}
    needs = need["device"] + need["working"]
    if ranks.device.type == "cpu":
        # Without a card everything is resident memory of this process, which had its libraries before its model.
        needs += need["host"] + ranks.resident + GROWTH
    say(
        f"parameters {total:,}, trained {trained:,}; ZeRO-{stage_of(ds)} on {ranks.world} ranks: states"
        f" {shown['device']:.2f} GB a rank on the device, {shown['host']:.2f} GB in host memory;"
        f" predicted {needs / 2**30:.2f} GB a rank in all, without activations"
    )
    return needs


def saved_bytes(forward) -> int:
    """What autograd keeps of a forward pass for the backward one, beside the parameters."""
    kept = {}

    def pack(tensor):
        source = tensor if tensor._base is None else tensor._base
        if not isinstance(source, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = forward()  # nothing is freed, and no address used twice, before the count
    del alive
    return sum(kept.values())


def fit_micro_batch(attempt, config, ranks: Ranks) -> bool:
    """Makes --micro-batch smaller and --accumulation larger until `attempt()`, a forward and backward, fits everywhere.

    Their product stays, so the training is the same. Returns whether anything changed, on every rank.
    """
    asked = config.micro_batch
    while all_sum([float(_runs_out(attempt))], ranks)[0]:
        size = config.micro_batch
        if size == 1:
            raise UserError("--micro-batch 1 does not fit into memory: a smaller model, shorter crops, or more memory.")
        smaller = max(n for n in range(1, size // 2 + 1) if size % n == 0)
        config.micro_batch, config.accumulation = smaller, config.accumulation * (size // smaller)
        say(f"warning: out of memory with --micro-batch {size}; going on with {smaller} and --accumulation"
            f" {config.accumulation}, the same training")  # fmt: skip
    return config.micro_batch != asked


def _runs_out(attempt) -> bool:
    try:
        attempt()
    except RuntimeError as error:  # a CPU has no error of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
    else:
        return False
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the traceback kept is gone by now
    return True
