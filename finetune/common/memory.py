"""Predicted memory per rank for weights, gradients and optimizer states, before anything is allocated."""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.config import RunConfig
from common.ds_config import REDUCE_BUCKET, offloads_optimizer, resolve_ds, stage_of
from common.one_piece import reduces_in_one_piece
from common.optim import state_bytes_per_weight, step_bytes_per_weight
from common.runtime import Process, memory_gb, resident_bytes, say

# What libraries and DeepSpeed's engine still add to a CPU process when its model and data are there; measured.
GROWTH = 0.08 * 2**30
DS_FILES = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


def count_parameters(model) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    sizes = [(_true_size(p), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, train in sizes if train)


def _true_size(parameter) -> int:
    """ZeRO-3 keeps a partitioned parameter's size in ds_numel; bitsandbytes packs two 4-bit values into a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return quantised.shape.numel() if quantised else getattr(parameter, "ds_numel", parameter.numel())


def loaded_bytes(model) -> int:
    """Bytes of this rank's parameters, under ZeRO-3 of its shards. Weights of a mapped file are read, and so in memory,
    from now on."""
    size = 0
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", parameter).detach()
        part.flatten()[::1024].sum()  # a value of every page
        size += packed_bytes(parameter) or part.numel() * part.element_size()
    return size


def quantised_savings(model, width: int) -> int:
    """Bytes that quantised weights save, compared with `width` bytes per value."""
    return sum(width * _true_size(p) - packed_bytes(p) for p in model.parameters() if packed_bytes(p))


def packed_bytes(parameter) -> int:
    """Bytes of a weight that bitsandbytes holds, or with --world would hold, in 4 or 8 bits; 0 for any other.

    4 bits: two values per byte, an fp32 scale per 64 values and the 16 values that the bits stand for. 8 bits: a byte
    per value and an fp32 scale per row.
    """
    bits = getattr(parameter, "bits_on_paper", None)
    if bits is None and not parameter.is_floating_point():
        bits = 4 if hasattr(parameter, "quant_state") else 8
    size = _true_size(parameter)
    return {None: 0, 4: size // 2 + 4 * -(-size // 64) + 16 * 4, 8: size + 4 * len(parameter)}[bits]


def predict(
    total: int,
    trained: int,
    ds: dict,
    width: int,
    state_bytes: float,
    world: int,
    step_bytes: float = 0.0,
    largest: int = 0,
) -> dict[str, float]:
    """Bytes per rank on the device and (with offload) in host memory, without activations.

    `width`: bytes of a compute weight and of its gradient, 2 for bf16 and 4 for fp32. An fp32 master weight takes 4
    bytes (stage 0 has none) and the optimizer states `state_bytes` more; these are split over the ranks from stage 1
    on, gradients from stage 2 on, weights in stage 3. The step needs fp32 gradients: those that stage 2 or 3 has added
    up in fp32, or stage 2 reduced in one piece, are used as they are, others are copied, in stage 3 one sub-group at a
    time. A sub-group is complete when it reaches its size, so it is larger by up to the `largest` trained parameter.
    `step_bytes`: what the optimizer makes besides, per weight that it updates at once. "working": what the backward
    pass needs besides, namely buckets that gradients are reduced in, and in stage 3 the gathered weights. Compared with
    measurements by tests/bench/bench_dia_size.py.
    """
    zero, stage, offload = ds["zero_optimization"], stage_of(ds), offloads_optimizer(ds)
    summed = max(width, _sum_width(ds))
    sent = max(width, 4 if ds.get("communication_data_type") == "fp32" else 0)
    shared = trained / (world if stage >= 1 else 1)
    weights = width * total / (world if stage == 3 else 1)
    gradients = summed * trained / (world if stage >= 2 else 1)
    at_once = {0: largest, 3: _size(zero, "sub_group_size", 1e9) + largest / world}.get(stage, shared)
    at_once = min(shared, at_once)
    one_piece = reduces_in_one_piece(ds, trained)
    in_place = stage == 2 and (summed > width or one_piece) or stage == 3 and summed == 4 and not offload
    masters = 4 * shared if stage else 0.0
    step = step_bytes * at_once + (4 * at_once if stage and (offload or not in_place) else 0)
    optimizer = masters + state_bytes * shared + step
    bucket = min(trained, _size(zero, "reduce_bucket_size", REDUCE_BUCKET))
    if stage == 3:
        live = min(total, _size(zero, "stage3_max_live_parameters", 1e9))
        if world == 1 and not _offloads_weights(zero):
            live = 0  # they are used where they are
        working = width * live + sent * bucket
    else:
        # One buffer, or two, and a copy of what is sent, if need be in fp32; gone before the step copies the gradients.
        buffers = (2 if zero.get("overlap_comm") and bucket < trained else 1) if stage else 0
        copies = width + (sent if sent > width else 0) if stage or world > 1 else 0
        kept = width if one_piece else 0  # the flat buffer
        if one_piece and summed > width and ds.get("gradient_accumulation_steps", 1) > 1:
            copies = width + summed  # the sums of earlier micro-batches are sent as they are
        working = (buffers * width + copies - kept) * bucket
        working = kept * bucket + max(0.0, working - (0 if offload else step))
    host = 0.0
    if offload:
        host, optimizer = host + optimizer, 0.0
        if not in_place:  # fp32 sums of stage 2 stay on the device until the step
            host, gradients = host + gradients, 0.0
    if _offloads_weights(zero):
        host, weights = host + weights, 0.0
    return {"device": weights + gradients + optimizer, "host": host, "working": working}


def communication(total: int, trained: int, ds: dict, width: int, world: int, accumulation: int) -> float:
    """Bytes that each rank sends per optimizer step, with ring algorithms.

    Stage 2 sums gradients on all ranks after every micro-batch, although each rank keeps only its share; stages 0 and 1
    do so once per step, and so does stage 2 in one piece. Then every rank sends its share of the new weights. Stage 3
    gathers all weights for the forward and again for the backward pass of every micro-batch (at most: it keeps what is
    needed again soon), and each rank receives only its share of the gradients.
    """
    stage, hop = stage_of(ds), (world - 1) / world
    sent = max(width, 4 if ds.get("communication_data_type") == "fp32" else 0)
    if stage == 3:
        return hop * accumulation * (2 * width * total + sent * trained)
    reductions = accumulation if stage == 2 else 1
    if accumulation > 1 and reduces_in_one_piece(ds, trained):
        reductions, sent = 1, max(sent, _sum_width(ds))
    return hop * (2 * sent * trained * reductions + (width * trained if stage else 0))


def _sum_width(ds: dict) -> int:
    """Bytes of a sum of gradients if that is always fp32; otherwise 0, and it is as wide as they are."""
    return 4 if ds.get("data_types", {}).get("grad_accum_dtype") == "fp32" else 0


def checkpoint_bytes(trained: int, ds: dict, width: int, state_bytes: float, ema: bool) -> float:
    """Size of a checkpoint: master weights, optimizer states, their average, and, except in stage 3, compute weights.

    Frozen weights are not saved."""
    return trained * (4 + state_bytes + (4 if ema else 0) + (width if stage_of(ds) < 3 else 0))


def _offloads_weights(zero: dict) -> bool:
    return zero.get("offload_param", {}).get("device", "none") != "none"


def _size(zero: dict, key: str, default: float) -> float:
    value = zero.get(key, default)
    return default if value == "auto" else value


def report_prediction(model, optimizer, ds: dict, config: RunConfig, process: Process) -> float:
    """Prints the size of the model and the predicted memory; returns the bytes per rank without activations."""
    total, trained = count_parameters(model)
    width = 2 if config.engine_precision == "bf16" else 4
    largest = max((_true_size(p) for p in model.parameters() if p.requires_grad), default=0)
    step_bytes = step_bytes_per_weight(optimizer, process.device.type)
    states = state_bytes_per_weight(optimizer)
    need = predict(total, trained, ds, width, states, process.world, step_bytes, largest)
    need["device"] -= quantised_savings(model, width)
    shown = {place: size / 2**30 for place, size in need.items()}
    needs = need["device"] + need["working"]
    if process.device.type == "cpu":
        # Without a GPU everything is resident memory of this process, in which libraries, data and weights are already.
        needs += need["host"] - loaded_bytes(model) + resident_bytes("VmRSS") + GROWTH
    say(
        f"parameters {total:,}, trained {trained:,}; ZeRO-{stage_of(ds)} on {process.world} ranks: states"
        f" {shown['device']:.2f} GB per rank on the device, {shown['host']:.2f} GB in host memory;"
        f" predicted {needs / 2**30:.2f} GB per rank in total, without activations"
    )
    return needs


STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256, "paged_adamw8bit": 2 + 8 / 256}  # per trained weight


def unallocated(config: RunConfig):
    """With --world, a model that is built inside has shapes but no memory: any size, on any machine."""
    return torch.device("meta") if config.world else contextlib.nullcontext()


@dataclass
class Paper:
    """A model without memory, counted. `packed`: bytes that a quantised base saves; `unpacked`: bytes of its largest
    weight, which is unpacked to be used; `activations`: bytes for the largest micro-batch."""

    config: RunConfig
    total: int
    trained: int
    packed: int
    unpacked: int
    activations: int

    def need(self, file: str) -> dict[str, float]:
        """Bytes per rank with this DeepSpeed file: "device", "host", "working", "sent" and "checkpoint"."""
        config, ds = self.config, resolve_ds(file, self.config, self.config.world)
        width = 2 if config.engine_precision == "bf16" else 4
        state_bytes = 8.0 if offloads_optimizer(ds) else STATE_BYTES[config.optimizer]
        need = predict(self.total, self.trained, ds, width, state_bytes, config.world)
        need["device"] -= self.packed
        need["working"] += self.unpacked
        need["sent"] = communication(self.total, self.trained, ds, width, config.world, config.accumulation)
        need["checkpoint"] = checkpoint_bytes(self.trained, ds, width, state_bytes, bool(config.ema))
        return need


def predict_on_paper(model, config: RunConfig, loss_fn, batch: dict, can_shard: bool = True) -> Paper:
    """--dry-run --world N: what each DeepSpeed file of the repository would need on N ranks.

    `batch`: the largest micro-batch; its activations are those of `loss_fn(model, batch)`. `can_shard`: whether the
    recipe runs with ZeRO-3."""
    total, trained = count_parameters(model)
    width = 2 if config.engine_precision == "bf16" else 4
    packed = quantised_savings(model, width)
    unpacked = max((width * p.numel() for p in model.parameters() if packed_bytes(p)), default=0)
    activations = activation_bytes(model.to(torch.bfloat16) if width == 2 else model, loss_fn, batch)
    paper = Paper(config, total, trained, packed, unpacked, activations)
    say(f"parameters {total:,}, trained {trained:,}; predicted for {config.world} ranks and --accumulation"
        f" {config.accumulation}, in GB; activations of {len(batch['ids'])} clips, {batch['positions']:,} positions:"
        f" {activations / 2**30:.2f}")  # fmt: skip
    say(f"{'':30}{'device':>8}{'+ buffers':>11}{'host':>8}{'sent per step':>15}{'checkpoint':>12}{'GPU in all':>12}")
    for file in DS_FILES:
        if "zero3" in file.name and (packed or not can_shard):
            continue  # nor can a quantised base be sharded
        need = paper.need(str(file))
        shown = [need[name] for name in ("device", "working", "host", "sent", "checkpoint")]
        shown.append(need["device"] + need["working"] + activations)
        row = "".join(f"{size / 2**30:{space}.2f}" for size, space in zip(shown, (8, 11, 8, 15, 12, 12), strict=True))
        say(f"{'ds_configs/' + file.name:30}{row}")
    return paper


# ---- activations on paper --------------------------------------------------------------------------------------


def activation_bytes(model, loss_fn, batch: dict) -> int:
    """Peak bytes that a forward and a backward pass need besides parameters and their gradients, without memory.

    The model may be on the device `meta`; its parameters are replaced by fake ones of the CPU, for good: those choose
    attention kernels that save as much for the backward pass as FlashAttention.
    """
    with FakeTensorMode():
        _make_fake(model)
        tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in batch.items() if torch.is_tensor(t)}
        return peak_bytes(model, loss_fn, batch | tensors)


def peak_bytes(model, loss_fn, batch: dict) -> int:
    """The same where it happens: peak bytes of the tensors made in a forward and a backward pass."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # gradients are predicted with the states
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with _Alive(model, batch) as alive:
        loss_fn(model.train(), batch).loss_sum.backward()
    return alive.peak


class _Alive(TorchDispatchMode):
    """Adds up the bytes of all tensors that are alive, each storage once, except those that were there before."""

    def __init__(self, model, batch: dict):
        super().__init__()
        there = [*model.parameters(), *model.buffers(), *(t for t in batch.values() if torch.is_tensor(t))]
        self.now, self.peak, self.storages = 0, 0, {t.untyped_storage()._cdata for t in there}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return False  # torch.istft asks whether its windows leave a gap: values that are not there
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage) -> None:
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, address: int, size: int) -> None:
        self.storages.discard(address)
        self.now -= size


def _make_fake(model) -> None:
    """Inside FakeTensorMode: parameters and buffers on a CPU that is not there; what is shared stays shared."""
    made = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        if isinstance(tensor, torch.nn.Parameter):
                            fake = torch.nn.Parameter(fake, tensor.requires_grad)
                        made[id(tensor)] = fake, tensor
                    table[name] = made[id(tensor)][0]


# ---- activations measured --------------------------------------------------------------------------------------


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


def forget_peak(process: Process) -> None:
    """From here on `peak_memory` is the peak since now, on NVIDIA GPUs and Linux; elsewhere it stays the whole one."""
    if process.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(process: Process) -> str:
    return " ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(process).items())


# How a CPU says it: torch's allocator, C++, and the library of convolutions, whose own buffers did not fit.
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "could not create a memory", "could not create a primitive",
                 "could not execute a primitive", "out of memory")  # fmt: skip


def try_in_memory(work: Callable) -> tuple:
    """What `work()` returns, and None; or None and the message, if it runs out of memory."""
    try:
        return work(), None
    except (RuntimeError, MemoryError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        known = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            text in message for text in OUT_OF_MEMORY
        )
        if not known:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the traceback no longer holds the tensors
    return None, message
