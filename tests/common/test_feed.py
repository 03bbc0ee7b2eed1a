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
    begun = [threading.Event() for _ in range(9)]
    begun[8].set()

    def build(n):
        begun[n].set()
        return n

    for n in prefetch(build, range(8), CPU):
        assert begun[n + 1].wait(timeout=300), "the next batch is built while this one is used"


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


def test_batches_for_a_gpu_are_pinned_in_the_thread_that_builds_them(monkeypatch):
    """A GPU that is not there: pinning and copying are recorded. The thread is told its GPU before it pins."""
    events, main = [], threading.get_ident()

    def record(what):
        return lambda tensor, *args, **kwargs: (
            events.append((what, threading.get_ident() != main, args, kwargs)) or tensor
        )

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", record("device"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", record("pin"))
    monkeypatch.setattr(torch.Tensor, "to", record("copy"))
    [batch] = prefetch(lambda n: {"labels": torch.zeros(3), "ids": ["a"]}, [0], gpu)
    assert batch["ids"] == ["a"]
    elsewhere = [what for what, in_thread, *_ in events if in_thread]
    assert elsewhere == ["device", "pin"]
    copies = [event[2:] for event in events if event[0] == "copy"]
    assert copies == [((gpu,), {"non_blocking": True})]


def test_on_a_cpu_nothing_is_copied():
    batch = {"labels": torch.zeros(3), "ids": ["a"]}
    assert to_device(batch, CPU)["labels"] is batch["labels"]
