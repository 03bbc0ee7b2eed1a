"""Batches, prepared while the model computes and moved to the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from common.runtime import still_alive


def prefetch(build: Callable[[int], dict], indices: Iterable[int], device: torch.device, depth: int = 3) -> Iterator:
    """`build(i)` for each i, in order, `depth` batches ahead, on the device. One thread is enough: codes are views into
    memory-mapped files."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = deque()
        for index in indices:
            waiting.append(pool.submit(build, index))
            if len(waiting) > depth:
                yield to_device(waiting.popleft().result(), device)
        while waiting:
            yield to_device(waiting.popleft().result(), device)


def to_device(batch: dict, device: torch.device) -> dict:
    """The batch with its tensors on the device, without waiting for the copy."""
    still_alive()  # an evaluation may take longer than --hang-timeout between two collectives
    if device.type == "cpu":
        return batch
    pin = device.type == "cuda"
    tensors = {key: value for key, value in batch.items() if torch.is_tensor(value)}
    moved = {key: (t.pin_memory() if pin else t).to(device, non_blocking=pin) for key, t in tensors.items()}
    return batch | moved
