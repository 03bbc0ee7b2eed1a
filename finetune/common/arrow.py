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
CHUNK_ROWS = 100_000
VERIFIED = ".verified.json"
DATASETS_FILES = ("state.json", "dataset_info.json")  # what the datasets library needs besides the Arrow files


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
        """What datasets.load_from_disk maps. Importing that takes 0.6 s of processor time on every rank, for pandas."""
        listed = {(self.folder / file["name"]).resolve() for file in self.info["files"]}
        tables = []
        try:
            state, _ = (json.loads((self.folder / name).read_text(encoding="utf-8")) for name in DATASETS_FILES)
            for file in state["_data_files"]:
                path = self.folder / file["filename"]
                if path.resolve() not in listed:
                    raise UserError(f"{path} is part of the dataset but not listed in its dataset.json.")
                tables.append(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())
            return pa.concat_tables(tables)
        except UserError:
            raise
        except Exception as error:  # one of these files may be broken in any way
            raise UserError(
                f"{self.folder} cannot be read ({type(error).__name__}): encode or copy it again."
            ) from None

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
        twice = first_repeated(self._columns["id"], tick)
        if twice is not None:
            raise UserError(f"{self.folder}: the id {twice!r} occurs twice.")
        self.check_rows(tick)
        remember_verified(self.folder, self.info)

    @property
    def lengths(self) -> np.ndarray:
        """How long the sound of each clip is."""
        raise NotImplementedError

    def sound(self, i: int) -> np.ndarray:
        """What makes clip i another clip than all others, whatever its id, without a copy."""
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


# ---- names -------------------------------------------------------------------------------------------------------
# By their hashes, 8 bytes each: Arrow's own tables of strings take 125 bytes per name, 0.9 GB for 7 million.


def name_hashes(column, tick=still_alive) -> np.ndarray:
    """A 64-bit hash per name, which holds within this process."""
    hashes, first = np.empty(len(column), dtype=np.int64), 0
    for chunk in column.chunks:
        hashes[first : first + len(chunk)] = [hash(name) for name in chunk.to_pylist()]
        first += len(chunk)
        tick()
    return hashes


def first_repeated(column, tick=still_alive) -> str | None:
    """The first name that occurs again."""
    hashes = name_hashes(column, tick)
    ordered = np.sort(hashes)
    repeated = np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]])
    seen = set()
    for row in np.flatnonzero(repeated):  # few: also names that only share their hash
        name = column[int(row)].as_py()
        if name in seen:
            return name
        seen.add(name)
    return None


def rows_named(names, ids) -> np.ndarray:
    """For each name the row in `ids` that holds it; -1 for a name that is null or not there."""
    wanted, hashes = name_hashes(names), name_hashes(ids)
    order = np.argsort(hashes, kind="stable")
    place = np.minimum(np.searchsorted(hashes, wanted, sorter=order), len(ids) - 1)
    rows = order[place]
    for first in range(0, len(rows), CHUNK_ROWS):  # a hash says where to look, and the names themselves are compared
        part = rows[first : first + CHUNK_ROWS]
        equal = pc.equal(names[first : first + CHUNK_ROWS], ids.take(np.maximum(part, 0)))
        part[~pc.fill_null(equal, False).to_numpy()] = -1
    return rows


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


def flat_views(column, lengths: np.ndarray, dataset: ArrowDataset, what: str):
    """The flat values of each Arrow chunk; for each clip its chunk and its start there. `what`: what a clip holds."""
    if not len(column):
        raise UserError(f"{dataset.folder} holds no clip.")
    values, chunk_of, starts, first = [], [], [], 0
    for number, chunk in enumerate(column.chunks):
        kind = getattr(chunk.type, "value_type", chunk.type)
        if kind != "int16" or chunk.values.null_count:
            gaps = ", with gaps" * (kind == "int16")
            raise UserError(f"{dataset.folder}: {what} are {kind} lists{gaps}, not int16.")
        values.append(chunk.values.to_numpy(zero_copy_only=True))
        offsets = chunk.offsets.to_numpy()
        wrong = np.flatnonzero(np.diff(offsets) != lengths[first : first + len(chunk)])
        if len(wrong):
            clip = dataset.id(first + int(wrong[0]))
            raise UserError(f"{dataset.folder}: clip {clip!r} does not hold {what} of its length.")
        starts.append(offsets[:-1].astype(np.int64))
        chunk_of.append(np.full(len(chunk), number, dtype=np.int32))
        first += len(chunk)
    return values, np.concatenate(chunk_of), np.concatenate(starts)
