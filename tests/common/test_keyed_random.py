"""Keyed randomness: a pure function of the key."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import torch

from common import keyed_random as keyed


def test_values_are_frozen():
    """Another value would change every order, window and text of runs that are going on."""
    assert keyed.key64(0, 0, "clip", "uncond") == 10091936305839655730
    assert keyed.key64(20240613, 12, "a-b_c", "window") == 15147456980888119444
    assert keyed.uniform(0, 1, "uncond") == 0.7365108507390924
    assert keyed.generator(0, 0, "order").permutation(8).tolist() == [4, 1, 5, 2, 7, 6, 3, 0]


def test_a_key_is_the_blake2b_of_its_tuple():
    digest = hashlib.blake2b(b"(3, 'x')", digest_size=8).digest()
    assert keyed.key64(3, "x") == int.from_bytes(digest, "little")


def test_different_keys_differ_and_equal_ones_do_not():
    keys = [(1, 23), (12, 3), ("1", 23), (1, "23"), (1, 2, 3), (23, 1), ("1, 23",)]
    assert len({keyed.key64(*key) for key in keys}) == len(keys)
    assert keyed.key64(np.int64(1), np.int32(23)) == keyed.key64(1, 23), "a NumPy number is the same number"


def test_uniform_is_uniform_and_its_purposes_are_independent():
    draws = np.array([[keyed.uniform(0, 0, f"clip-{i}", p) for p in ("uncond", "window")] for i in range(4000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws[:, 0], bins=20, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws.T)[0, 1]) < 4 / np.sqrt(4000)


def test_consecutive_steps_are_uncorrelated():
    draws = np.array([keyed.uniform(0, step, "uncond") for step in range(4001)])
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 4 / np.sqrt(4000)


def test_global_generators_neither_matter_nor_move():
    before = keyed.uniform(5, "x"), keyed.generator(5, "x").random(3).tolist()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert (keyed.uniform(5, "x"), keyed.generator(5, "x").random(3).tolist()) == before
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_another_process_with_another_hash_seed_draws_the_same():
    code = "from common import keyed_random; print(keyed_random.key64(1, 'clip', 'order'))"
    paths = {"PYTHONPATH": ":".join(sys.path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=paths | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert {int(run.stdout) for run in runs} == {keyed.key64(1, "clip", "order")}
