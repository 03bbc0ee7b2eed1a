"""Batches, prepared while the model computes and moved to the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from common.runtime import still_alive


def prefetch(build: Callable[[int], dict], indices: Iterable[int], device: torch.device, depth: int = 3) -> Iterator:
    """`build(i)` for each i, in order, `depth` batches ahead, on the device. One thread is enough: codes are views into
    memory-mapped files."""
    # A new thread is on GPU 0, where pinning would open a second CUDA context.
    start = {"initializer": torch.cuda.set_device, "initargs": (device,)} if device.type == "cuda" else {}

    def build_pinned(index: int) -> dict:
        return pinned(build(index), device)

    with ThreadPoolExecutor(max_workers=1, **start) as pool:
        waiting = deque()
        for index in indices:
            waiting.append(pool.submit(build_pinned, index))
            if len(waiting) > depth:
                yield to_device(waiting.popleft().result(), device)
        while waiting:
            yield to_device(waiting.popleft().result(), device)


def to_device(batch: dict, device: torch.device) -> dict:
    """The batch with its tensors on the device, without waiting for the copy."""
    still_alive()  # an evaluation may take longer than --hang-timeout between two collectives
    if device.type == "cpu":
        return batch
    batch = pinned(batch, device)
    tensors = {key: value for key, value in batch.items() if torch.is_tensor(value)}
    return batch | {key: t.to(device, non_blocking=device.type == "cuda") for key, t in tensors.items()}


def pinned(batch: dict, device: torch.device) -> dict:
    """The batch in memory that a GPU copies from without the host waiting; what is there already stays as it is."""
    if device.type != "cuda":
        return batch
    return {key: value.pin_memory() if torch.is_tensor(value) else value for key, value in batch.items()}
