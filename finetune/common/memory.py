"""How large a model is, what memory it takes at its peak, and work that may run out of it."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from common.runtime import Process, memory_gb


def count_parameters(model) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    sizes = [(_true_size(p), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, train in sizes if train)


def _true_size(parameter) -> int:
    """ZeRO-3 keeps a partitioned parameter's size in ds_numel; bitsandbytes packs two 4-bit values into a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return quantised.shape.numel() if quantised else getattr(parameter, "ds_numel", parameter.numel())


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


def out_of_memory(error: BaseException) -> str:
    """The first line of this error if it says that memory ran out, otherwise ""."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in message for text in OUT_OF_MEMORY):
        return message
    return ""


def try_in_memory(work: Callable) -> tuple:
    """What `work()` returns, and None; or None and the message, if it runs out of memory."""
    try:
        return work(), None
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error)
        if not message:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the traceback no longer holds the tensors
    return None, message
