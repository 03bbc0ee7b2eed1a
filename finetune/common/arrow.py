"""Datasets as data/ writes them: memory-mapped Arrow files, and dataset.json with a checksum for each.

Flat int16 columns (codes, samples) are read zero-copy.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from common.config import UserError


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

        from datasets import load_from_disk

        try:
            loaded = load_from_disk(str(self.folder))
        except Exception as error:  # state.json, dataset_info.json or an Arrow file may be broken in any way
            raise UserError(f"{folder} cannot be read ({type(error).__name__}): encode or copy it again.") from None
        listed = {(self.folder / file["name"]).resolve() for file in self.info["files"]}
        for file in loaded.cache_files:
            if Path(file["filename"]).resolve() not in listed:
                raise UserError(f"{file['filename']} is part of the dataset but not listed in its dataset.json.")
        self.table = loaded.data
        missing = set(self.columns) - set(self.table.column_names)
        if missing:
            raise UserError(f"{folder}: the dataset lacks the column(s) {', '.join(sorted(missing))}.")
        self._columns = {name: self.table.column(name) for name in self.table.column_names if name not in self.flat}

    def __len__(self) -> int:
        return len(self.table)

    def value(self, column: str, i: int):
        return self._columns[column][int(i)].as_py()

    def id(self, i: int) -> str:
        return self.value("id", i)

    def fingerprint(self) -> str:
        """A hash over the checksums of the Arrow files: it changes when anything in the dataset changes."""
        return hashlib.sha256(json.dumps(self.info["files"], sort_keys=True).encode()).hexdigest()[:16]

    def verify_files(self) -> None:
        """Checks all checksums and looks for duplicate ids."""
        for file in self.info["files"]:
            with open(self.folder / file["name"], "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                    raise UserError(f"{self.folder / file['name']} is damaged: its checksum is not dataset.json's.")
        ids = self._columns["id"]
        if len(ids.unique()) != len(ids):
            twice = next(row["values"] for row in ids.value_counts().to_pylist() if row["counts"] > 1)
            raise UserError(f"{self.folder}: the id {twice!r} occurs twice.")

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


def flat_views(column, lengths: np.ndarray, dataset: ArrowDataset, what: str):
    """The flat values of each Arrow chunk; for each clip its chunk and its start there. `what`: what a clip holds."""
    if not len(column):
        raise UserError(f"{dataset.folder} holds no clip.")
    values, chunk_of, starts = [], [], []
    for number, chunk in enumerate(column.chunks):
        kind = getattr(chunk.type, "value_type", chunk.type)
        if kind != "int16" or chunk.values.null_count:
            gaps = ", with gaps" * (kind == "int16")
            raise UserError(f"{dataset.folder}: {what} are {kind} lists{gaps}, not int16.")
        values.append(chunk.values.to_numpy(zero_copy_only=True))
        offsets = chunk.offsets.to_numpy()
        first = sum(map(len, starts))
        wrong = np.flatnonzero(np.diff(offsets) != lengths[first : first + len(chunk)])
        if len(wrong):
            clip = dataset.id(first + int(wrong[0]))
            raise UserError(f"{dataset.folder}: clip {clip!r} does not hold {what} of its length.")
        starts.append(offsets[:-1].astype(np.int64))
        chunk_of.append(np.full(len(chunk), number, dtype=np.int32))
    return values, np.concatenate(chunk_of), np.concatenate(starts)
