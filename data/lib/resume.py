"""What is encoded already: the clips of a finished dataset and of the parts that an interrupted run left."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.sources import Clip, content_stamp

PART_COLUMNS = {"id": "string", "source": "string", "codes": "int16 list", "frames": "int32", "reject": "string"}


@dataclass(frozen=True)
class Job:
    """Everything that decides which codes a clip gets."""

    path: str | None  # None: the clips come as codes, and nobody knows the weights
    weights_sha256: str | None
    codec: str
    stereo: bool
    min_seconds: float
    max_seconds: float

    def settings(self) -> dict:
        return {
            "stereo": self.stereo,
            "min_seconds": self.min_seconds,
            "max_seconds": None if math.isinf(self.max_seconds) else self.max_seconds,
            "resampler": "torchaudio sinc_interp_hann",
        }

    def key(self) -> str:
        text = json.dumps([self.codec, self.weights_sha256, self.settings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class Finished:
    """One clip that was looked at: its codes, or why it has none."""

    source: str  # SHA-256 of the content, and which part of it; empty where it could not be read
    codes: tuple | None = None  # Arrow column and row
    frames: int = 0
    reject: str = ""


@dataclass
class Done:
    clips: dict[str, Finished] = field(default_factory=dict)
    # place of the content -> (stamp, SHA-256): what has its old stamp need not be read again
    places: dict[str, tuple[str, str]] = field(default_factory=dict)


def source_key(clip: Clip, sha256: str) -> str:
    return f"{sha256}:{clip.start}:{clip.end}"


def load_finished(out: Path, work: Path, job: Job) -> Done:
    """Clips of the dataset at `out` and of the parts in `work`, as far as they were made by this job."""
    from lib import store

    done = Done()
    info = store.read_dataset_json(out)
    if info and info.get("key") == job.key():
        for entry in info["files"]:
            add_arrow(done, out / entry["name"])
        for item in store.read_jsonl(out / "rejects.jsonl"):
            done.clips[item["id"]] = Finished(item["source"], reject=item["reason"])
        add_places(done, out / "sources.jsonl")
    for file in sorted(work.glob(f"part-{job.key()}-*.arrow")):
        add_arrow(done, file)
    for file in sorted(work.glob("sources-*.jsonl")):
        add_places(done, file)
    return done


def add_arrow(done: Done, file: Path) -> None:
    from lib import store

    for batch in store.read_arrow(file):
        codes = batch.column("codes")
        rejects = [""] * len(batch)
        if "reject" in batch.schema.names:  # a part; a finished dataset lists its rejects elsewhere
            rejects = batch.column("reject").to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("id", "source", "frames"))
        for row, (id, source, frames) in enumerate(zip(*columns, strict=True)):
            done.clips[id] = Finished(source, (codes, row), frames, rejects[row])


def add_places(done: Done, file: Path) -> None:
    from lib import store

    for place, stamp, sha256 in store.read_jsonl(file):
        done.places[place] = (stamp, sha256)


def save_part(work: Path, name: str, results: list[dict], done: Done) -> None:
    """Make the results durable and enter them in `done`."""
    from lib import store

    fresh = [result for result in results if not result["unchanged"]]
    if fresh:
        store.write_arrow(work / f"part-{name}.arrow", fresh, PART_COLUMNS)
        add_arrow(done, work / f"part-{name}.arrow")
    places = {result["place"]: (result["stamp"], result["sha256"]) for result in results if result["sha256"]}
    store.write_jsonl(work / f"sources-{name}.jsonl", ([place, *values] for place, values in places.items()))
    done.places |= places


def unfinished(clips: list[Clip], done: Done) -> list[tuple[Clip, str | None]]:
    """Clips to hand to a worker, with the source they were last seen with (None: never)."""
    todo = []
    for clip in clips:
        finished = done.clips.get(clip.id)
        stamp, sha256 = done.places.get(clip.place, ("", ""))
        same = finished and finished.source == source_key(clip, sha256)
        if not (same and stamp == content_stamp(clip)):
            todo.append((clip, finished.source if finished else None))
    return todo


def is_current(out: Path, clips: list[Clip], done: Done, job: Job) -> bool:
    """Whether the dataset at `out` is what writing it again would give."""
    from lib import store

    info = store.read_dataset_json(out)
    return bool(info) and info.get("key") == job.key() and info.get("clips") == clips_key(clips, done)


def clips_key(clips: list[Clip], done: Done) -> str:
    """Changes with any text, label, clip or source of the dataset."""
    digest = hashlib.sha256()
    for clip in clips:
        fields = asdict(clip) | {"audio": None, "source": done.clips[clip.id].source}
        digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()[:16]
