"""--compile: layers that are compiled for training (torch.compile). Imports nothing heavy: recipes read flags first."""

import functools

from common.ds_config import stage_of
from common.errors import UserError
from common.runtime import say

HELP = "compile the layers for training (torch.compile): the first steps take longer; not with ZeRO-3"


def compiled(run, ds: dict, backend: str = "inductor"):
    """`run(layer, ...)`, compiled for layers in training mode. Evaluation and generation stay as they are: caches and
    single tokens would compile again and again.

    Sizes are symbols in the compiled code, so all layers and all lengths share it; only sizes of 0 and 1 and layers
    whose input needs no gradient have code of their own. Dropout draws the numbers that it draws without compiling.
    """
    if stage_of(ds) == 3:
        raise UserError("--compile does not work with ZeRO-3, which gathers weights inside the layers; use ZeRO-2.")
    if backend == "inductor":
        _require_compiler()
    import torch

    # More than the kinds of sizes there are. At the limit torch would go on uncompiled, also between a forward pass and
    # its recomputation by gradient checkpointing, which must match.
    torch._dynamo.config.recompile_limit = 64
    options = {"fallback_random": True} if backend == "inductor" else None
    say(f"--compile: {run.__qualname__} is compiled during the first steps, which take longer")
    fast = torch.compile(run, dynamic=True, backend=backend, options=options)

    @functools.wraps(run)
    def choose(layer, *args, **kwargs):
        return (fast if layer.training else run)(layer, *args, **kwargs)

    return choose


def compile_layers(layers, ds: dict, backend: str = "inductor") -> None:
    """Compiles the forward passes of these modules in place. Names of parameters and checkpoints stay the same."""
    forwards = {kind: compiled(kind.forward, ds, backend) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = functools.partial(forwards[type(layer)], layer)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("--compile needs a C++ compiler, and none was found: install g++, or set CXX.") from None
