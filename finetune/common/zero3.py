"""ZeRO-3 with less Python around the model, and fewer copies.

DeepSpeed gathers and releases weights in hooks, four for every module however small, computes linear layers in a
Python function, and sends the small weights one by one after every step. On a GPU (not measured) the host may then fall
behind. The step copies all gradients. On CPUs, gloo's collectives and DeepSpeed around them copy everything once more.
"""

import weakref
from collections.abc import Iterable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from common.ds_config import stage_of

TOGETHER = 100_000  # values of a gradient up to which it is not worth a message of its own on CPUs
# Sections of the JSON with which weights are not simply shards on the device.
OTHER_SHARDS = (
    "offload_param",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
)


@contextmanager
def gathered_whole(modules: Iterable[nn.Module]):
    """An engine that is made inside gathers the weights of each of these modules together, with hooks around it and
    none inside. Each must be called as a module, not only its parts.

    DeepSpeed calls them leaf modules. It would also reduce their gradients together, in a hook that comes before there
    are any if the module's input needs no gradient, such as a frozen embedding; so gradients keep hooks of their own.
    """
    from deepspeed.runtime.zero import stage3
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
    own, stage3.z3_leaf_parameter = stage3.z3_leaf_parameter, lambda _: False
    try:
        yield
    finally:
        stage3.z3_leaf_parameter = own


def quicken_linear() -> None:
    """Replaces what DeepSpeed computes linear layers with, as F.linear, from the first ZeRO-3 model on."""
    from deepspeed.runtime.zero import linear

    if Chosen.deepspeeds is None:
        Chosen.deepspeeds, linear.LinearFunctionForZeroStage3 = linear.LinearFunctionForZeroStage3, Chosen


class Chosen:
    """What DeepSpeed takes for its own function. Autocast, which has to be on in the backward pass too, is left to
    that one."""

    deepspeeds = None

    @classmethod
    def apply(cls, x, weight, bias):
        function = cls.deepspeeds if torch.is_autocast_enabled(x.device.type) else Linear
        return function.apply(x, weight, bias)


class Linear(torch.autograd.Function):
    """Like DeepSpeed's it keeps the parameter for the backward pass and no view of it, which would keep the gathered
    weights. Unlike that one it has no setup_context, see quicken_hooks."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return torch._C._nn.linear(x, weight, bias)  # what F.linear is otherwise

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        # A weight of another module than the one that is computed: no hook has gathered it again.
        released = hasattr(weight, "ds_id") and weight.ds_status.name == "NOT_AVAILABLE"
        if released:
            weight.all_gather()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad.matmul(weight) if needs_x else None
        grad_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        if released:
            weight.partition()
        return grad_x, grad_weight, grad_bias


def quicken_hooks(module: nn.Module) -> None:
    """The hooks that DeepSpeed puts around the backward pass of each module are autograd functions with a
    setup_context, for which torch inspects a signature at every call. This replaces them by functions without one."""
    for part in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            function = vars(part).get(name)
            if function and "setup_context" in vars(function):
                setattr(part, name, without_setup_context(function))


def without_setup_context(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    def forward(ctx, *inputs):
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (torch.autograd.Function,), methods)


# ---- CPUs ------------------------------------------------------------------------------------------------------


def suited_to_device(ds: dict) -> dict:
    """The JSON that DeepSpeed gets: on CPUs, weights are gathered one by one where they stay, not layer by layer into a
    buffer that they are copied from. No message is too small for that, because small weights stay gathered.

    The file cannot change that: Broadcasts relies on it."""
    from deepspeed.accelerator import get_accelerator

    if stage_of(ds) < 3 or get_accelerator().device_name() != "cpu":
        return ds
    return ds | {"zero_optimization": ds["zero_optimization"] | {"stage3_allgather_sequential": True}}


def quicken_cpu() -> None:
    """From now on ranks on CPUs use the collectives that gloo is fast with, gather weights into memory that they keep,
    and mark no ranges for a GPU's profiler, as DeepSpeed does hundreds of times per step."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, stage3
    from deepspeed.utils import nvtx

    if get_accelerator().device_name() == "cpu":
        partition_parameters._dist_allgather_fn, stage3.reduce_scatter_coalesced = Broadcasts, shards_of_means
        Broadcasts.memory = KeptMemory()
        nvtx.enable_nvtx = False


class Broadcasts:
    """Starts to gather `whole` from the ranks' shards, of which `own` is this rank's; wait() ends it. gloo's all_gather
    takes four times as long, because it copies everything before and after."""

    memory = None  # of the engine that was started last

    def __init__(self, own: torch.Tensor, whole: torch.Tensor, group=None):
        # DeepSpeed's buffer was never touched, so dropping it is free; it takes views of it only later. Only in fp32:
        # in bf16 the gradients' fp32 sums need the memory of released weights.
        if whole.dtype == torch.float32:
            whole.set_(self.memory.like(whole))
        shards, rank = whole.chunk(dist.get_world_size(group)), dist.get_rank(group)
        if own.data_ptr() != shards[rank].data_ptr():
            shards[rank].copy_(own)
        self.works = [dist.broadcast(s, group=group, group_src=r, async_op=True) for r, s in enumerate(shards)]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class KeptMemory:
    """Memory for the weights that are gathered and released in every step. glibc would give it back to the system,
    which has to clear all of its pages again: a tenth of the processor time of a step of 121 M weights.

    Free and leased memory together never exceed what was leased at once."""

    def __init__(self):
        self.free: dict[int, list] = {}  # blocks by size in bytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat tensor of this size and type. Its memory is free again when neither it nor a view of it is left."""
        size = tensor.nbytes
        if not self.free.get(size):
            self.free.clear()
            self.free[size] = [torch.empty(size, dtype=torch.uint8).numpy()]
        block = self.free[size].pop()
        lease = block[:]  # an array of its own, which torch holds for as long as it uses the memory
        weakref.finalize(lease, self._take_back, block).atexit = False
        return torch.from_numpy(lease).view(tensor.dtype)

    def _take_back(self, block) -> None:
        self.free.setdefault(block.nbytes, []).append(block)


def shards_of_means(tensors: list[torch.Tensor], group=None) -> list[torch.Tensor]:
    """This rank's shard of the mean of each tensor over the ranks; the tensors may be changed. gloo's reduce_scatter
    takes twice as long, and DeepSpeed copies them all for it: here only small ones, to send them together."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    sums = [tensor.view(-1) for tensor in tensors]
    small = [number for number, tensor in enumerate(sums) if len(tensor) <= TOGETHER]
    messages = [tensor for tensor in sums if len(tensor) > TOGETHER]
    if small:
        together = torch.cat([sums[number] for number in small])
        messages.append(together)
        for number, part in zip(small, together.split([len(sums[number]) for number in small]), strict=True):
            sums[number] = part
    for work in [dist.all_reduce(message, group=group, async_op=True) for message in messages]:
        work.wait()
    sizes = [-(-len(tensor) // world) for tensor in sums]  # rounded up: the last ranks may have less, or nothing
    return [tensor[rank * size : (rank + 1) * size].div_(world) for tensor, size in zip(sums, sizes, strict=True)]


# ---- the optimizer step ----------------------------------------------------------------------------------------


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of all; a view if they lie one behind another, as the shards of gradients do, which DeepSpeed
    copies in every step."""
    first, place = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and tensor.dtype == first.dtype
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == place):
            return torch.cat([t.reshape(-1) for t in tensors])
        place += tensor.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def keeps_small_weights(ds: dict) -> bool:
    """Whether an engine of this JSON can have its SmallWeights."""
    return not any(ds["zero_optimization"].get(name) for name in OTHER_SHARDS) and not ds.get("torch_autocast")


class SmallWeights:
    """Weights too small to be worth gathering again and again (stage3_param_persistence_threshold), which stay whole on
    every rank. DeepSpeed's step releases them with all others, and then gathers them with one collective for each. Here
    they stay where they are, and their new values are sent together."""

    def __init__(self, engine):
        self.optimizer, self.module = engine.optimizer, engine.module
        self.everything = list(self.module.parameters())
        self.trained = [p for group in self.optimizer.fp16_groups for p in group if p.ds_persist]
        self.own_step, self.own_release = self.optimizer.step, self.optimizer._partition_all_parameters
        self.optimizer.step = self.step

    def step(self, closure=None) -> None:
        stay = []

        def release() -> None:
            self.release_others()
            # Those that are not gathered now, as after loading a checkpoint, are left to DeepSpeed.
            stay.extend(p for p in self.trained if p.ds_status.name == "AVAILABLE")

        self.optimizer._partition_all_parameters = release
        try:
            self.own_step(closure)
        finally:
            self.optimizer._partition_all_parameters = self.own_release
        if self.optimizer.overflow:  # the step was skipped
            return
        for dtype in sorted({p.dtype for p in stay}, key=str):
            send_shards([p for p in stay if p.dtype == dtype])

    def release_others(self) -> None:
        in_flight = self.module.ds_inflight_param_registry
        for parameter in self.everything:
            if parameter in in_flight:
                in_flight.pop(parameter).wait()
            parameter.ds_active_sub_modules.clear()
            if not parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":
                parameter.partition()


@torch.no_grad()
def send_shards(parameters: list[nn.Parameter]) -> None:
    """Fills parameters of one type, whole on every rank, with the values of all ranks' shards."""
    own = torch.cat([p.ds_tensor for p in parameters])
    shards = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_single(shards, own)
    lengths = [len(p.ds_tensor) for p in parameters]
    for parameter, columns in zip(parameters, shards.view(-1, len(own)).split(lengths, dim=1), strict=True):
        parameter.copy_(columns.reshape(-1)[: parameter.numel()].view_as(parameter))  # the last shard may be padded
