"""--tracker: where the numbers of a run go besides metrics.jsonl.

A tracker that fails later (no network, a full disk) is dropped with a warning: it never stops a run.
"""

import hashlib
from pathlib import Path

from common.runtime import say

PROJECT = "audio-finetune"


class TensorBoard:
    """The run's only writer of event files: every open writer makes one more file."""

    def __init__(self, folder: Path, start: int, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.samples, self.start = folder / "samples", start
        self.written = set()  # sounds
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, numbers: dict, step: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def add_sounds(self) -> None:
        """Samples that became audible since the last call, or since the step that the run resumed after."""
        import soundfile

        for path in sorted(set(self.samples.glob("*/*.wav")) - self.written):
            stage, _, step = path.parent.name.partition("step-")
            step = int(step or 0)
            if step <= self.start and self.start:  # logged before the run was resumed
                continue
            try:
                wave, rate = soundfile.read(path, always_2d=True)
            except (OSError, RuntimeError):  # still being written; a RuntimeError is soundfile's own
                continue
            self.written.add(path)
            name = "/".join(["samples", path.stem, *([stage] if stage else [])])
            self.writer.add_audio(name, wave.mean(axis=1), step, sample_rate=rate)

    def close(self) -> None:
        self.add_sounds()
        self.writer.close()


class Wandb:
    def __init__(self, folder: Path, start: int, config: dict):
        import wandb

        self.run = wandb.init(
            project=PROJECT,
            name=folder.name,
            # The same folder is the same run, so that a resumed one continues its curves. A name may be used twice.
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(init_timeout=60, silent=True),
        )

    def log(self, numbers: dict, step: int) -> None:
        self.run.log(numbers, step=step)

    def add_sounds(self) -> None:
        """Sounds stay on this machine: only TensorBoard and the report have them."""

    def close(self) -> None:
        self.run.finish()


OPENERS = {"tensorboard": TensorBoard, "wandb": Wandb}


class Boards:
    """The trackers of a run, on its main rank."""

    def __init__(self, names: list[str], folder: Path, start: int, config: dict):
        """`start`: the step that the run resumes after; `config`: its flags, for the trackers that show them."""
        self.open = {}
        for name in names:
            try:
                self.open[name] = OPENERS[name](folder, start, config)
            except Exception as error:
                self._drop(name, error)

    def log(self, values: dict, step: int) -> None:
        """`values`: numbers by name, such as train/loss; everything else is left out."""
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        self._all("log", numbers, step)

    def add_sounds(self) -> None:
        self._all("add_sounds")

    def close(self) -> None:
        self._all("close")

    def _all(self, method: str, *arguments) -> None:
        for name, board in list(self.open.items()):
            try:
                getattr(board, method)(*arguments)
            except Exception as error:  # whatever goes wrong in a tracker, training continues
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self.open.pop(name, None)
        say(f"warning: --tracker {name} failed and is off for the rest of the run: {' '.join(str(error).split())}")
