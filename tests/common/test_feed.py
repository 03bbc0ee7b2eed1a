"""Batches made ready ahead."""

import threading
import time

import pytest
import torch

from common.feed import prefetch, to_device

CPU = torch.device("cpu")


def test_batches_come_in_order_whatever_they_take():
    def build(n):
        time.sleep(0.01 * (n % 3))
        return n * n

    assert list(prefetch(build, range(10), CPU)) == [n * n for n in range(10)]
    assert list(prefetch(build, [], CPU)) == []


def test_building_overlaps_with_computing():
    built, main = [], threading.get_ident()

    def build(n):
        built.append((n, threading.get_ident() != main))
        time.sleep(0.05)

    began = time.monotonic()
    for _ in prefetch(build, range(8), CPU):
        time.sleep(0.05)
    assert time.monotonic() - began < 0.75 * 8 * 0.1
    assert all(elsewhere for _, elsewhere in built)


def test_no_more_than_depth_batches_wait():
    built = []
    feed = prefetch(built.append, range(100), CPU, depth=3)
    next(feed)
    time.sleep(0.1)
    assert len(built) <= 5
    feed.close()
    assert len(built) <= 5


def test_an_error_while_building_reaches_the_loop():
    def build(n):
        if n == 2:
            raise ValueError("clip x")
        return n

    feed = prefetch(build, range(5), CPU)
    assert [next(feed), next(feed)] == [0, 1]
    with pytest.raises(ValueError, match="clip x"):
        next(feed)


def test_on_a_cpu_nothing_is_copied():
    batch = {"labels": torch.zeros(3), "ids": ["a"]}
    assert to_device(batch, CPU)["labels"] is batch["labels"]
