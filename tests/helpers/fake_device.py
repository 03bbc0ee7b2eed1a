"""A device that is not there: runs a training step without a GPU and counts what a GPU would have to do.

    counts = run(functools.partial(compute_loss, clips=clips), model, clips.batch([0, 1]))

Model and batch move to the device `lazy:0` as fake tensors, which have a shape and a device but no memory, so real
sizes fit; a model may also be built on the device `meta`. Forward and backward run there, and an operation on tensors
from both the CPU and the device fails as it would on a GPU.

Integers and booleans keep their values on the side ("shadow"), computed on the CPU beside the fake ones: code that
looks at them (a mask that is all ones, the indices of the labels) then does what it would do on a GPU, and is counted
when it makes the host wait. Floating values do not exist; asked for one, the device answers 1.0.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("lazy:0")
SHADOW_LIMIT = 2**24  # larger integer tensors (dense masks) have no values

aten = torch.ops.aten
# Neither a view nor a kernel: memory without content, or the same content under another name.
NO_KERNEL = {"_unsafe_view", "detach", "alias", "lift_fresh", "empty", "empty_strided", "empty_like", "new_empty"}
NO_KERNEL |= {"new_empty_strided", "_reshape_alias"}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
INDEXED |= {aten._unsafe_index.Tensor, aten._unsafe_index_put.default}
DEPENDS_ON_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Attention(NamedTuple):
    """One call of scaled_dot_product_attention."""

    queries: int  # positions
    keys: int
    heads: int
    kv_heads: int  # as many as `heads`, though the model has fewer: K and V were repeated
    mask: tuple[int, ...] | None  # shape
    is_causal: bool
    enable_gqa: bool

    @property
    def dense(self) -> bool:
        """Whether there is a mask with a value for every pair of positions."""
        return self.mask is not None and len(self.mask) > 1 and min(self.mask[-2:]) > 1


@dataclass
class Counts:
    syncs: Counter = field(default_factory=Counter)  # kind -> how often the host waits for the device
    kernels: Counter = field(default_factory=Counter)  # operation -> launches
    saved_bytes: int = 0  # for the backward pass, each storage once; parameters, buffers and the batch not counted
    attention: list[Attention] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Operations that are not views, each counted as one kernel; attention is one forward and one backward."""
        return self.kernels.total()


def run(loss_fn, model: nn.Module, batch: dict) -> Counts:
    """Counts of `loss_fn(model, batch)`, which returns a loss or a LossOutput, and of its backward pass.

    The model's parameters and buffers are replaced by fake ones, for good.
    """
    counts = Counts()
    with fake_device():
        move(model)
        batch = {name: to_device(value) for name, value in batch.items()}
        tensors = [*model.parameters(), *model.buffers(), *batch.values()]
        there_before = {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if tensor.device == DEVICE and storage._cdata not in there_before:
                saved[storage._cdata] = storage  # kept alive, so that no address is used twice
            return tensor

        # DeepSpeed replaces `linear` for ZeRO-3 and does not put it back.
        plain_linear = mock.patch.object(nn.functional, "linear", torch._C._nn.linear)
        with plain_linear, Counting(counts), fused_attention(counts):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = loss_fn(model, batch)
            counts.saved_bytes = sum(storage.nbytes() for storage in saved.values())
            getattr(output, "loss_sum", output).backward()
    return counts


@contextlib.contextmanager
def fake_device():
    """Inside, tensors are fake. What libraries do differently on fake tensors or do not know of `lazy` is patched."""
    autocast = torch.autocast

    def autocast_unless_lazy(device_type, *args, **kwargs):
        return contextlib.nullcontext() if device_type == DEVICE.type else autocast(device_type, *args, **kwargs)

    with (
        mock.patch("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False),
        mock.patch("torch.autocast", autocast_unless_lazy),
        mock.patch("torch.amp.autocast", autocast_unless_lazy),
        mock.patch("torch.utils.checkpoint._infer_device_type", lambda *args: "cpu"),
        mock.patch("torch.get_rng_state", lambda: None),
        mock.patch("torch.set_rng_state", lambda state: None),
        FakeTensorMode(),
    ):
        yield


# ---- tensors ---------------------------------------------------------------------------------------------------


def to_device(value):
    """A tensor as a fake one on the device; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)
    if not isinstance(value, FakeTensor) and value.device.type == "cpu":
        remember(fake, value)
    return fake


def remember(fake: torch.Tensor, value: torch.Tensor) -> None:
    if not value.is_floating_point() and not value.is_complex() and value.numel() <= SHADOW_LIMIT:
        fake.shadow = value


def shadow(tensor: torch.Tensor) -> torch.Tensor | None:
    return getattr(tensor, "shadow", None)


def move(model: nn.Module) -> None:
    """Puts parameters and buffers on the device; what is shared stays shared."""
    moved = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device == DEVICE:
                    continue
                if id(tensor) not in moved:
                    fake = to_device(tensor)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = fake
                table[name] = moved[id(tensor)]


# ---- counting --------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts kernels and waits; answers what only a real device could know."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if any(t.device == DEVICE for t in inputs):
            if func in INDEXED:
                args = self._index_by_numbers(args)
                inputs = _tensors((args, kwargs))
            elif _hides_nonzero(func):
                self.counts.syncs[_name(func)] += 1
            elif DEPENDS_ON_VALUES & set(func.tags):
                self.counts.syncs[_name(func)] += 1
                self.counts.kernels[_name(func)] += 1
                return self._answer(func, args, kwargs, inputs)
        output = func(*args, **kwargs)
        outputs = _tensors(output)
        places = {t.device.type for t in [*inputs, *outputs]}
        if DEVICE.type not in places or func.namespace != "aten":
            return output
        if not func.is_view and _name(func) not in NO_KERNEL:
            self.counts.kernels[_name(func)] += 1
        if _name(func) in ("_to_copy", "copy_") and len(places) > 1:
            self.counts.syncs["copy to host" if outputs[0].device.type == "cpu" else "copy to device"] += 1
        self._follow(func, args, kwargs, inputs, outputs)
        return output

    def _index_by_numbers(self, args):
        """A boolean index is a hidden `nonzero`, a CPU index a hidden copy."""
        indices = []
        for index in args[1]:
            if index is not None and index.device.type == "cpu":
                self.counts.syncs["copy to device"] += 1
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            self.counts.syncs["boolean index"] += 1
            self.counts.kernels["nonzero"] += 1
            where = shadow(self._answer(aten.nonzero.default, (index,), {}, [index]))
            with unset_fake_temporarily():
                columns = where.unbind(1)
            indices += [to_device(column) for column in columns]
        return (args[0], indices, *args[2:])

    def _answer(self, func, args, kwargs, inputs):
        """What depends on values: computed on the shadows, or a guess where there are none."""
        if all(shadow(t) is not None for t in inputs):
            with unset_fake_temporarily():
                value = func(*_on_cpu(args), **_on_cpu(kwargs))
            return tree_map(to_device, value)
        tensor = inputs[0]
        if func is aten._local_scalar_dense.default:
            return True if tensor.dtype == torch.bool else tensor.dtype.is_floating_point * 1.0
        if func is aten.equal.default:
            return False
        if func is aten.nonzero.default:
            with unset_fake_temporarily():
                everywhere = torch.ones(tensor.shape).nonzero()
            return to_device(everywhere)
        if func is aten.masked_select.default:
            mask = shadow(inputs[1])
            if mask is not None:
                with unset_fake_temporarily():
                    count = int(mask.expand(tensor.shape).sum())
            return tensor.new_empty(tensor.numel() if mask is None else count)
        raise NotImplementedError(f"the result of {func} depends on values that a fake device does not have")

    def _follow(self, func, args, kwargs, inputs, outputs) -> None:
        """Computes integers and booleans on the shadows too. An in-place operation changes its shadow with it."""
        if not outputs or any(t.is_floating_point() or t.is_complex() for t in outputs):
            return
        if any(t.numel() > SHADOW_LIMIT for t in outputs) or torch.Tag.nondeterministic_seeded in func.tags:
            return
        if any(shadow(t) is None for t in inputs) or _name(func).startswith(("empty", "new_empty")):
            for t in outputs:
                t.shadow = None
            return
        with unset_fake_temporarily():
            values = _tensors(func(*_on_cpu(args), **_on_cpu(kwargs)))
        for t, value in zip(outputs, values, strict=True):
            t.shadow = value


def _hides_nonzero(func) -> bool:
    """Operations with a hidden `nonzero` whose result has a known shape."""
    return _name(func) == "masked_scatter_backward"


def _name(func) -> str:
    name = func._schema.name.split("::")[1]
    return "item" if name == "_local_scalar_dense" else name


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _on_cpu(tree):
    def convert(leaf):
        if isinstance(leaf, torch.Tensor):
            return shadow(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    return tree_map(convert, tree)


# ---- attention -------------------------------------------------------------------------------------------------


def fused_attention(counts: Counts):
    """Attention as one kernel that saves its inputs, its output and a number per query and head, as flash attention
    does. `lazy` itself would compute it step by step and save all weights."""

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        places = {t.device for t in (q, k, v, attn_mask) if t is not None}
        if places != {DEVICE}:
            raise RuntimeError(f"attention with tensors on several devices: {', '.join(map(str, places))}")
        heads, kv_heads = q.shape[-3], k.shape[-3]
        if heads != kv_heads and not enable_gqa:
            raise RuntimeError(f"attention with {heads} heads but {kv_heads} for K and V needs enable_gqa")
        shape = None if attn_mask is None else tuple(attn_mask.shape)
        call = Attention(q.shape[-2], k.shape[-2], heads, kv_heads, shape, is_causal, enable_gqa)
        counts.attention.append(call)
        return _Attention.apply(q, k, v, attn_mask, counts)

    return mock.patch("torch.nn.functional.scaled_dot_product_attention", attend)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, counts):
        # Flash kernels write (B, L, H, D), so that the usual transpose(1, 2).contiguous() is free.
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])
        out = q.new_empty(shape).transpose(-2, -3)
        logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        ctx.counts = counts
        counts.kernels["attention"] += 1
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        ctx.counts.kernels["attention backward"] += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None
