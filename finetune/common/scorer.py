"""PESQ during training: a few persistent processes per rank that score while the accelerator computes.

Imports no torch. The processes are forked before anything heavy is loaded or a GPU is touched: they stay small, import
nothing twice, and hold no CUDA context.
"""

import ctypes
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np

from common import speech_metrics
from common.errors import UserError
from common.runtime import cores_per_rank, still_alive

TIMEOUT = 120.0  # seconds for one score, which takes 0.1
PR_SET_PDEATHSIG = 1


def _start_worker() -> None:
    """Workers die with their rank, and ignore stop signals: the rank handles those."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def processes_per_rank() -> int:
    """The rank's share of the cores, minus one that it computes or loads data with."""
    return max(1, cores_per_rank() - 1)


class Scorer:
    """A pool of processes that measure speech quality. Create it before torch is imported."""

    def __init__(self, processes: int = 0):
        self.processes = processes or processes_per_rank()
        self.pool = ProcessPoolExecutor(self.processes, get_context("fork"), _start_worker)
        self.pool.submit(int).result()  # forks all of them now

    def pesq(self, clean: np.ndarray, estimates: np.ndarray) -> list[Future]:
        """Starts scoring a batch, (B, L) each; `collect` waits for the scores."""
        return [self._submit(speech_metrics.pesq_wb, c, e) for c, e in zip(clean, estimates, strict=True)]

    def measure(self, clean: np.ndarray, estimate: np.ndarray) -> Future:
        """Starts computing every measure of one sound; `measured` waits for them."""
        return self._submit(speech_metrics.measure, clean, estimate)

    def _submit(self, *work) -> Future:
        try:
            return self.pool.submit(*work)
        except BrokenProcessPool as error:  # a process died earlier; a new one cannot be forked next to a GPU
            failed = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def collect(scores: list[Future]) -> tuple[np.ndarray, list[str]]:
    """PESQ values, NaN where there is none, and the reason for each NaN ("" otherwise). Never raises."""
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
    """The result of `Scorer.measure`, once it is there."""
    still_alive()
    try:
        return score.result()
    except BrokenProcessPool:
        raise UserError(
            "a process that measures sounds died, perhaps for lack of memory: --pesq-workers 1 uses the least."
        ) from None
