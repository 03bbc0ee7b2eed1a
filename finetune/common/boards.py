"""--tracker: where the numbers of a run go besides metrics.jsonl.

A tracker that fails later (no network, a full disk) is dropped with a warning: it never stops a run.
"""

import functools
import hashlib
from pathlib import Path

from common.runtime import say

PROJECT = "audio-finetune"


class Boards:
    """The trackers of a run, on its main rank."""

    def __init__(self, names: list[str], folder: Path, start: int, config: dict):
        """`start`: the step that the run resumes after; `config`: its flags, for the trackers that show them."""
        self.open = {}
        for name in names:
            self._try(name, lambda name=name: self.open.update({name: OPENERS[name](folder, start, config)}))

    def log(self, values: dict, step: int) -> None:
        """`values`: numbers by name, such as train/loss; everything else is left out."""
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        for name, (log, _) in list(self.open.items()):
            self._try(name, lambda log=log: log(numbers, step))

    def close(self) -> None:
        for name, (_, close) in list(self.open.items()):
            self._try(name, close)

    def _try(self, name: str, action) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong in a tracker, training continues
            self.open.pop(name, None)
            say(f"warning: --tracker {name} failed and is off for the rest of the run: {' '.join(str(error).split())}")


def _open_tensorboard(folder: Path, start: int, config: dict):
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    @functools.cache
    def record(*names: str) -> Event:
        event = Event()
        for name in names:
            event.summary.value.add(tag=name)
        return event

    def log(numbers: dict, step: int) -> None:
        # All values in one record: add_scalar would write a record for each. Records are used again, because the pinned
        # protobuf is written in Python and takes longer to build one than to write it.
        event = record(*numbers)
        for value, number in zip(event.summary.value, numbers.values(), strict=True):
            value.simple_value = number
        writer.file_writer.add_event(event, step)

    return log, writer.close


def _open_wandb(folder: Path, start: int, config: dict):
    import wandb

    # The same folder is the same run, so that a resumed one continues its curves. A name alone may be used twice.
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    settings = wandb.Settings(init_timeout=60, silent=True)
    run = wandb.init(
        project=PROJECT,
        name=folder.name,
        id=identity,
        resume="allow",
        dir=str(folder),
        config=config,
        settings=settings,
    )
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def _open_trackio(folder: Path, start: int, config: dict):
    import trackio

    run = trackio.init(project=PROJECT, name=folder.name, config=config, resume="allow")
    return lambda numbers, step: run.log(numbers, step=step), run.finish


OPENERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "trackio": _open_trackio}
