"""In a rank that helpers/patch has changed: it does nothing more from some moment on, so that a test can kill it there
however busy the machine is."""

import os
import time


def after_step(metrics) -> None:
    """The last rank halts after it has logged step HALT_AFTER, until it is asked to stop. Checkpoints are written by
    other threads, without the ranks' help."""
    log = metrics.Tracker.step

    def step(tracker, number: int, values: dict) -> None:
        from common.runtime import stop_requested

        log(tracker, number, values)
        halts = number == int(os.environ["HALT_AFTER"]) and tracker.process.rank == tracker.process.world - 1
        while halts and not stop_requested():
            time.sleep(0.1)

    metrics.Tracker.step = step


def while_saving(torch) -> None:
    """The first file of the checkpoint HALT_IN is written, and nothing after that."""
    write = torch.save

    def save(value, stream):
        write(value, stream)
        while os.environ["HALT_IN"] in stream.name:
            time.sleep(1)

    torch.save = save
