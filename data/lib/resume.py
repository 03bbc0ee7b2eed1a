"""What is already encoded: the clips in a finished dataset and in the part files of an interrupted run."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib import store
from lib.clips import Clip, Skipped
from lib.sources import content_stamp

PART_COLUMNS = {"id": "string", "source": "string", "codes": "int16 list", "frames": "int32", "reject": "string"}


@dataclass(frozen=True)
class Job:
    """Every setting that affects the codes of a clip."""

    path: str | None  # codec weights; None: all clips come as codes, made by unknown weights
    weights_sha256: str | None
    codec: str
    stereo: bool = False
    min_seconds: float = 0.4
    max_seconds: float = math.inf
    loudness: float | None = None  # LUFS; None: as it is

    def settings(self) -> dict:
        return {
            "stereo": self.stereo,
            "min_seconds": self.min_seconds,
            "max_seconds": None if math.isinf(self.max_seconds) else self.max_seconds,
            "resampler": "torchaudio sinc_interp_hann",
        } | ({} if self.loudness is None else {"loudness": self.loudness})

    def key(self) -> str:
        text = json.dumps([self.codec, self.weights_sha256, self.settings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class ClipResult:
    """The codes of one clip, or the reason why it was rejected."""

    source: str  # SHA-256 of the recording, start and end; empty if it could not be read
    codes: tuple | None = None  # Arrow column and row
    frames: int = 0
    reject: str = ""


@dataclass
class Finished:
    clips: dict[str, ClipResult] = field(default_factory=dict)  # id -> result
    # recording -> (stamp, SHA-256): a recording with an unchanged stamp is not read again
    recordings: dict[str, tuple[str, str]] = field(default_factory=dict)


def source_key(clip: Clip, sha256: str) -> str:
    return f"{sha256}:{clip.start}:{clip.end}"


# ---------------------------------------------------------------- read what is finished


def load_finished(out: Path, work: Path, job: Job) -> Finished:
    """Clips that this job has finished, in the dataset at `out` and in the part files in `work`."""
    finished = Finished()
    info = store.read_dataset_json(out)
    if info and info.get("key") == job.key():
        for entry in info["files"]:
            add_arrow(finished, out / entry["name"])
        for item in store.read_jsonl(out / "rejects.jsonl"):
            finished.clips[item["id"]] = ClipResult(item["source"], reject=item["reason"])
        add_recordings(finished, out / "sources.jsonl")
    for file in sorted(work.glob(f"part-{job.key()}-*.arrow")):
        add_arrow(finished, file)
    for file in sorted(work.glob("sources-*.jsonl")):
        add_recordings(finished, file)
    return finished


def add_arrow(finished: Finished, file: Path) -> None:
    for batch in store.read_arrow(file):
        codes = batch.column("codes")
        rejects = [""] * len(batch)
        if "reject" in batch.schema.names:  # a part file; a finished dataset keeps its rejects in rejects.jsonl
            rejects = batch.column("reject").to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("id", "source", "frames"))
        for row, (id, source, frames) in enumerate(zip(*columns, strict=True)):
            finished.clips[id] = ClipResult(source, (codes, row), frames, rejects[row])


def add_recordings(finished: Finished, file: Path) -> None:
    for recording, stamp, sha256 in store.read_jsonl(file):
        finished.recordings[recording] = (stamp, sha256)


def unfinished(clips: list[Clip], finished: Finished) -> list[tuple[Clip, str | None]]:
    """Clips for the workers, each with the source it had when it was last encoded (None: never)."""
    todo = []
    for clip in clips:
        result = finished.clips.get(clip.id)
        stamp, sha256 = finished.recordings.get(clip.recording, ("", ""))
        same = result and result.source == source_key(clip, sha256)
        if not (same and stamp == content_stamp(clip)):
            todo.append((clip, result.source if result else None))
    return todo


# ---------------------------------------------------------------- keep what is finished


def save_part(work: Path, name: str, results: list[dict], finished: Finished) -> None:
    """Write the workers' results to durable part files and add them to `finished`."""
    encoded = [result for result in results if not result["unchanged"]]
    if encoded:
        store.write_arrow(work / f"part-{name}.arrow", encoded, PART_COLUMNS)
        add_arrow(finished, work / f"part-{name}.arrow")
    recordings = {result["recording"]: (result["stamp"], result["sha256"]) for result in results if result["sha256"]}
    lines = ([recording, *stamp_and_hash] for recording, stamp_and_hash in recordings.items())
    store.write_jsonl(work / f"sources-{name}.jsonl", lines)
    finished.recordings |= recordings


# ---------------------------------------------------------------- is the dataset up to date


def is_current(out: Path, clips: list[Clip], finished: Finished, job: Job, skipped: Sequence[Skipped]) -> bool:
    """Whether writing the dataset at `out` again would change nothing."""
    info = store.read_dataset_json(out)
    return bool(info) and info.get("key") == job.key() and info.get("clips") == clips_key(clips, finished, skipped)


def clips_key(clips: list[Clip], finished: Finished, skipped: Sequence[Skipped]) -> str:
    """A hash that changes with any clip, text, label or recording in the dataset, and with what was skipped."""
    digest = hashlib.sha256()
    for clip in clips:
        fields = asdict(clip) | {"audio": None, "source": finished.clips[clip.id].source}
        digest.update(json.dumps(fields, sort_keys=True).encode())
    for item in skipped:
        digest.update(json.dumps(asdict(item), sort_keys=True).encode())
    return digest.hexdigest()[:16]
