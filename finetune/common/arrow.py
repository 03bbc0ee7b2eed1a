"""Datasets as data/ writes them: memory-mapped Arrow files, and dataset.json with a checksum for each.

Flat int16 columns (codes, samples) are read zero-copy.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.errors import UserError
from common.runtime import say, still_alive

CHUNK = 2**24  # bytes that are hashed at a time
VERIFIED = ".verified.json"


class ArrowDataset:
    """The rows of a dataset. Subclasses say what kind it is, what makes it, and what it must hold."""

    kind: str
    maker: str
    facts: tuple[str, ...]
    columns: tuple[str, ...]
    flat: tuple[str, ...]  # the int16 columns

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.info = self._read_info()
        self._check_sizes()
        self.table = self._map_files()
        missing = set(self.columns) - set(self.table.column_names)
        if missing:
            raise UserError(f"{folder}: the dataset lacks the column(s) {', '.join(sorted(missing))}.")
        self._columns = {name: self.table.column(name) for name in self.table.column_names if name not in self.flat}

    def _map_files(self) -> pa.Table:
        import datasets

        datasets.disable_progress_bars()
        try:
            data = datasets.load_from_disk(str(self.folder))
        except Exception as error:  # one of its files may be broken in any way
            raise UserError(
                f"{self.folder} cannot be read ({type(error).__name__}): encode or copy it again."
            ) from None
        listed = {(self.folder / file["name"]).resolve() for file in self.info["files"]}
        for file in data.cache_files:
            if Path(file["filename"]).resolve() not in listed:
                raise UserError(f"{file['filename']} is part of the dataset but not listed in its dataset.json.")
        return data.data.table

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str):
        """A whole Arrow column; None if the dataset has no column of this name."""
        return self._columns.get(name)

    def value(self, column: str, i: int):
        return self._columns[column][int(i)].as_py()

    def id(self, i: int) -> str:
        return self.value("id", i)

    def fingerprint(self) -> str:
        """A hash over the checksums of the Arrow files: it changes when anything in the dataset changes."""
        return hashlib.sha256(json.dumps(self.info["files"], sort_keys=True).encode()).hexdigest()[:16]

    def verify(self, tick=still_alive) -> None:
        """Reads everything once: checksums, duplicate ids and what check_rows looks for. Calls tick() while it works.

        That takes minutes to hours for a large dataset, so it is remembered for as long as size, time and inode of all
        files stay the same. data/check.py always reads them.
        """
        if is_verified(self.folder, self.info):
            return
        self._check_sums(tick)
        tick()
        ids = self._columns["id"]
        if pc.count_distinct(ids, mode="all").as_py() < len(ids):
            counts = ids.value_counts()
            twice = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
            raise UserError(f"{self.folder}: the id {twice!r} occurs twice.")
        self.check_rows(tick)
        remember_verified(self.folder, self.info)

    @property
    def lengths(self) -> np.ndarray:
        """How long the sound of each clip is."""
        raise NotImplementedError

    def sound(self, i: int) -> np.ndarray:
        """The clip's raw content (a view), to find clips that sound the same whatever their ids."""
        raise NotImplementedError

    def check_rows(self, tick) -> None:
        """Raises if a clip cannot be trained on."""
        raise NotImplementedError

    def _check_sums(self, tick) -> None:
        total, done, said = sum(file["bytes"] for file in self.info["files"]), 0, time.monotonic()
        for file in self.info["files"]:
            digest = hashlib.sha256()
            with open(self.folder / file["name"], "rb") as stream:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    tick()
                    if time.monotonic() - said > 60:
                        said = time.monotonic()
                        say(f"{self.folder}: checked {done / 1e9:.0f} of {total / 1e9:.0f} GB, once for this dataset")
            if digest.hexdigest() != file["sha256"]:
                raise UserError(f"{self.folder / file['name']} is damaged: its checksum is not dataset.json's.")

    def _read_info(self) -> dict:
        path = self.folder / "dataset.json"
        if not path.is_file():
            raise UserError(f"{self.folder} is not a {self.kind} (no dataset.json); make one with {self.maker}.")
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
            needed = {*self.facts, "files"} - set(info)
        except (ValueError, TypeError):
            raise UserError(f"{path} is not a JSON object.") from None
        if needed:
            raise UserError(f"{path} lacks {', '.join(sorted(needed))}; make the dataset again with {self.maker}.")
        return info

    def _check_sizes(self) -> None:
        for file in self.info["files"]:
            if Path(file["name"]).name != file["name"]:
                raise UserError(
                    f"{self.folder}/dataset.json lists {file['name']!r}, which is not in the dataset's folder."
                )
            path = self.folder / file["name"]
            size = path.stat().st_size if path.is_file() else None
            if size != file["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes, not {file['bytes']}"
                raise UserError(f"{path} {found}: the dataset is incomplete; encode or copy it again.")


def rows_named(names, ids) -> np.ndarray:
    """For each name the row in `ids` that holds it; -1 for a name that is null or not there."""
    return pc.fill_null(pc.index_in(names, value_set=ids), -1).to_numpy().astype(np.int64)


# ---- verified before -------------------------------------------------------------------------------------------


def is_verified(folder: Path, info: dict) -> bool:
    """Whether remember_verified noted this content and no file has changed since."""
    state = _state(folder, info)
    return any(_read(place) == state for place in note_places(folder, VERIFIED))


def remember_verified(folder: Path, info: dict) -> None:
    """Notes beside the dataset, or in the user's cache if that folder is read-only, that it was verified."""
    state = _state(folder, info)
    # A file system's clock may tick only once a second: within that, a change would leave the same time.
    if max((time_ns for _, time_ns, _ in state["files"].values()), default=0) > time.time_ns() - 2 * 10**9:
        return
    write_note(note_places(folder, VERIFIED), lambda stream: stream.write(json.dumps(state).encode()))


def _state(folder: Path, info: dict) -> dict:
    facts = {file["name"]: (folder / file["name"]).stat() for file in info["files"]}
    return {
        "dataset": hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest(),
        "files": {name: [fact.st_size, fact.st_mtime_ns, fact.st_ino] for name, fact in facts.items()},
    }


def note_places(folder: Path, name: str) -> tuple[Path, Path]:
    """Where to note something about a dataset: beside it, or in the user's cache if its folder is read-only."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "audio-finetune"
    return folder / name, cache / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}{name}"


def write_note(places: tuple[Path, ...], write: Callable[[BinaryIO], object]) -> None:
    """Writes a file to the first of these places that can be written; without one, what it says is found out again."""
    for place in places:
        draft = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as stream:
                write(stream)
            draft.replace(place)
            return


def _read(place: Path) -> dict | None:
    try:
        return json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def int16_lists(table: pa.Table, name: str, lengths: np.ndarray, dataset: ArrowDataset, what: str) -> pa.ChunkedArray:
    """A column of int16 lists without gaps, of these lengths. `what`: what a clip holds, for the message."""
    column = table.column(name)
    if not len(column):
        raise UserError(f"{dataset.folder} holds no clip.")
    kind = getattr(column.type, "value_type", column.type)
    gaps = kind == "int16" and any(chunk.flatten().null_count for chunk in column.chunks)
    if kind != "int16" or gaps:
        raise UserError(f"{dataset.folder}: {what} are {kind} lists{', with gaps' if gaps else ''}, not int16.")
    found = pc.fill_null(pc.list_value_length(column), -1).to_numpy()
    wrong = np.flatnonzero(found != lengths)
    if len(wrong):
        raise UserError(f"{dataset.folder}: clip {dataset.id(wrong[0])!r} does not hold {what} of its length.")
    return column
