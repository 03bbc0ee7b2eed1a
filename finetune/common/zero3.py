"""ZeRO-3 with less Python around the model.

DeepSpeed gathers and releases weights in hooks, four for every module however small, and computes linear layers in a
Python function. On a GPU (not measured) the host may then fall behind.
"""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch import nn


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
    weights. Unlike that one it has no setup_context, for which torch inspects a signature at every call."""

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
