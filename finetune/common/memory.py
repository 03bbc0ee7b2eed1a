"""Predicted memory per rank for weights, gradients and optimizer states, before anything is allocated."""

import torch

from common.config import RunConfig, UserError
from common.ds_config import offloads_optimizer, stage_of
from common.optim import state_bytes_per_weight
from common.runtime import Process, any_rank, memory_gb, say

# What libraries and DeepSpeed's engine add to a CPU process after it has joined its ranks; measured, the same for
# 1 million and for 1.6 billion parameters.
GROWTH = 0.4 * 2**30


def count_parameters(model) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    sizes = [(_true_size(p), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, train in sizes if train)


def _true_size(parameter) -> int:
    """ZeRO-3 keeps a partitioned parameter's size in ds_numel; bitsandbytes packs two 4-bit values into a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return quantised.shape.numel() if quantised else getattr(parameter, "ds_numel", parameter.numel())


def quantised_savings(model, width: int) -> int:
    """Bytes that quantised weights save, compared with `width` bytes per value."""
    packed = [p for p in model.parameters() if not p.is_floating_point()]
    return sum(width * _true_size(p) - p.numel() * p.element_size() for p in packed)


def predict(total: int, trained: int, ds: dict, width: int, state_bytes: float, world: int) -> dict[str, float]:
    """Bytes per rank on the device and (with offload) in host memory, without activations.

    `width`: bytes of a compute weight and of its gradient, 2 for bf16 and 4 for fp32. An fp32 master weight and its
    gradient take 8 bytes and the optimizer states `state_bytes` more; these are split over the ranks from stage 1 on,
    gradients from stage 2 on, weights in stage 3. Stage 3 also holds what it has gathered: live weights and the bucket
    that gradients are reduced in; stage 2 keeps its two buckets when it offloads (all measured by
    tests/bench/bench_dia_size.py).
    """
    zero, stage = ds["zero_optimization"], stage_of(ds)
    shared = trained / (world if stage >= 1 else 1)
    weights = width * total / (world if stage == 3 else 1)
    gradients = width * trained / (world if stage >= 2 else 1)
    # Stage 3 updates one sub-group at a time, and only that one has its gradients in fp32.
    optimizer = (4 + state_bytes) * shared + 4 * min(
        shared, _size(zero, "sub_group_size", 1e9) if stage == 3 else shared
    )
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


def report_prediction(model, optimizer, ds: dict, config: RunConfig, process: Process) -> float:
    """Prints the size of the model and the predicted memory; returns the bytes per rank without activations."""
    total, trained = count_parameters(model)
    width = 2 if config.engine_precision == "bf16" else 4
    need = predict(total, trained, ds, width, state_bytes_per_weight(optimizer), process.world)
    need["device"] -= quantised_savings(model, width)
    shown = {place: size / 2**30 for place, size in need.items()}
    needs = need["device"] + need["working"]
    if process.device.type == "cpu":
        # Without a GPU everything is resident memory of this process, whose libraries were there before the model.
        needs += need["host"] + process.resident + GROWTH
    say(
        f"parameters {total:,}, trained {trained:,}; ZeRO-{stage_of(ds)} on {process.world} ranks: states"
        f" {shown['device']:.2f} GB per rank on the device, {shown['host']:.2f} GB in host memory;"
        f" predicted {needs / 2**30:.2f} GB per rank in total, without activations"
    )
    return needs


def saved_bytes(forward) -> int:
    """Bytes that autograd saves in a forward pass for the backward pass, parameters not counted."""
    kept = {}

    def pack(tensor):
        source = tensor if tensor._base is None else tensor._base
        if not isinstance(source, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = forward()  # keeps everything allocated, so that no address is counted twice
    del alive
    return sum(kept.values())


def peak_memory(process: Process) -> str:
    return " ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(process).items())


def fit_micro_batch(attempt, micro_batch: int, accumulation: int, process: Process) -> tuple[int, int]:
    """The largest micro-batch for which `attempt(micro_batch)`, a forward and backward pass, fits on every rank.

    Returns it and the accumulation that goes with it: their product stays, so the training is the same."""
    while any_rank(_runs_out_of_memory(attempt, micro_batch), process):
        if micro_batch == 1:
            raise UserError(
                "--micro-batch 1 does not fit into memory: use a smaller model, shorter crops or more memory."
            )
        smaller = max(n for n in range(1, micro_batch // 2 + 1) if micro_batch % n == 0)
        accumulation *= micro_batch // smaller
        say(f"warning: --micro-batch {micro_batch} runs out of memory; using {smaller} with --accumulation"
            f" {accumulation}, which trains the same")  # fmt: skip
        micro_batch = smaller
    return micro_batch, accumulation


def _runs_out_of_memory(attempt, micro_batch: int) -> bool:
    try:
        attempt(micro_batch)
    except RuntimeError as error:  # a CPU has no error class for it
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
    else:
        return False
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the traceback no longer holds the tensors
    return True
