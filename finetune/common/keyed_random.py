"""Randomness by key instead of by generator state.

Every random decision is a function of a key such as (seed, epoch, sample id, purpose), so it is the same on any rank,
worker, world size or resume point.
"""

import hashlib

import numpy as np


def key64(*key) -> int:
    """64 bits from the key. repr() separates 1 from "1" and (1, 23) from (12, 3)."""
    key = tuple(part.item() if isinstance(part, np.generic) else part for part in key)  # np.int64(1) is 1
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def torch_seed(*key) -> int:
    """A seed for torch.manual_seed, which takes 63 bits."""
    return key64(*key) % 2**63


def uniform(*key) -> float:
    """A number in [0, 1)."""
    return (key64(*key) >> 11) * 2.0**-53


def generator(*key) -> np.random.Generator:
    """A private generator for decisions that need more than one number."""
    return np.random.Generator(np.random.PCG64(key64(*key)))
