"""PESQ beside the training: a few persistent processes a rank that score while the accelerator computes.

Imports no torch. The processes are forked before anything heavy is loaded or a GPU is touched: they stay small, need
no second import, and hold no CUDA context.
"""

import ctypes
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np

from common import speech_metrics as speech
from common.config import UserError
from common.runtime import still_alive

TIMEOUT = 120.0  # seconds for one score, which takes 0.1
PR_SET_PDEATHSIG = 1


def _live_with_parent() -> None:
    """A rank that is killed takes its scorers along; a wish to stop is the rank's to hear, not theirs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _pesq(clean: np.ndarray, estimate: np.ndarray) -> tuple[float, str]:
    return speech.pesq_wb(clean, estimate)


def _measure(clean: np.ndarray, estimate: np.ndarray) -> dict[str, float]:
    return speech.measure(clean, estimate)


def processes_a_rank() -> int:
    """The rank's share of the cores, less the one that it computes or loads data with."""
    ranks_here = int(os.environ.get("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here - 1)


class Scorer:
    def __init__(self, processes: int = 0):
        self.processes = processes or processes_a_rank()
        self.pool = ProcessPoolExecutor(self.processes, get_context("fork"), _live_with_parent)
        self.pool.submit(int).result()  # forks them all, now

    def pesq(self, clean: np.ndarray, estimates: np.ndarray) -> list[Future]:
        """Starts to score a batch, (B, L) each."""
        return [self._submit(_pesq, c, e) for c, e in zip(clean, estimates, strict=True)]

    def measure(self, clean: np.ndarray, estimate: np.ndarray) -> Future:
        """Starts every measure of one sound."""
        return self._submit(_measure, clean, estimate)

    def _submit(self, *work) -> Future:
        try:
            return self.pool.submit(*work)
        except BrokenProcessPool as error:  # a process died before; no new one can be forked beside a GPU
            failed = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def collect(scores: list[Future]) -> tuple[np.ndarray, list[str]]:
    """PESQ, NaN where there is none, and for each the reason ("" where there is a value). Never raises."""
    values, reasons = [], []
    for score in scores:
        try:
            value, reason = score.result(timeout=TIMEOUT)
        except Exception as error:  # a timeout, or a process that died
            value, reason = float("nan"), type(error).__name__
        values.append(value)
        reasons.append(reason)
    return np.array(values), reasons


def measured(score: Future) -> dict[str, float]:
    """What `Scorer.measure` started, waited for."""
    still_alive()
    try:
        return score.result()
    except BrokenProcessPool:
        raise UserError(
            "a process that measures sounds died, perhaps for want of memory: --pesq-workers 1 takes the least."
        ) from None
