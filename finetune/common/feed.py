"""Batches made ready while the model computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from common.runtime import still_alive


def prefetch(build: Callable, numbers: Iterable, depth: int = 3) -> Iterator:
    """`build(n)` for each n, in order, `depth` ahead. A thread is enough: codes are views into mapped memory."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = deque()
        for number in numbers:
            waiting.append(pool.submit(build, number))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def mover(device: torch.device) -> Callable[[dict], dict]:
    """A function that brings a batch's tensors to the device without waiting for the copy. A batch is a sign of life:
    an evaluation may have more of them than --hang-timeout lets pass between two words of the ranks."""

    def move(batch: dict) -> dict:
        still_alive()
        if device.type == "cpu":
            return batch
        pin = device.type == "cuda"
        tensors = {key: value for key, value in batch.items() if torch.is_tensor(value)}
        moved = {key: (t.pin_memory() if pin else t).to(device, non_blocking=pin) for key, t in tensors.items()}
        return batch | moved

    return move
