"""The token dataset: codes read zero-copy from a memory-mapped Arrow column.

A dataset is a `datasets` folder (save_to_disk) plus `dataset.json`, which names the codec and holds a checksum an
Arrow file: a flipped bit or a cut tail otherwise loads without a word.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from common.config import UserError

HELD_OUT = ["eval", "dev", "val", "valid", "validation", "test"]  # values of `split` that are never trained on


class TokenDataset:
    """Clips of codes with their texts. `frames[i]` is the length; `codes(i)` is a (T, C) view, nothing is copied."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.info = _read_info(self.folder)
        self.channels = self.info["channels"]
        _check_sizes(self.folder, self.info)

        from datasets import load_from_disk

        try:
            loaded = load_from_disk(str(self.folder))
        except Exception as error:  # whatever it trips over: state.json, dataset_info.json or an Arrow file
            raise UserError(f"{folder} cannot be read ({type(error).__name__}); encode or copy it again.") from None
        listed = {(self.folder / file["name"]).resolve() for file in self.info["files"]}
        for file in loaded.cache_files:
            if Path(file["filename"]).resolve() not in listed:
                raise UserError(f"{file['filename']} is part of the dataset but not listed in its dataset.json.")
        table = loaded.data
        missing = {"id", "text", "codes", "frames"} - set(table.column_names)
        if missing:
            raise UserError(f"{folder}: the dataset lacks the column(s) {', '.join(sorted(missing))}.")
        self._columns = {name: table.column(name) for name in table.column_names if name != "codes"}
        self.frames = self._columns["frames"].to_numpy()
        self._values, self._chunk, self._start = _flat_views(table.column("codes"), self.channels, self.frames, self)

    def __len__(self) -> int:
        return len(self.frames)

    def value(self, column: str, i: int) -> str:
        return self._columns[column][int(i)].as_py()

    def id(self, i: int) -> str:
        return self.value("id", i)

    def text(self, i: int) -> str:
        return self.value("text", i) or ""

    def codes(self, i: int) -> np.ndarray:
        start = self._start[i]
        flat = self._values[self._chunk[i]][start : start + self.frames[i] * self.channels]
        return flat.reshape(-1, self.channels)

    def long_texts(self, limit: int) -> np.ndarray:
        """Indices of the texts with more than `limit` UTF-8 bytes, without a Python string a clip."""
        import pyarrow.compute as pc

        return np.flatnonzero(pc.binary_length(self._columns["text"]).to_numpy() > limit)

    def texts_matching(self, pattern: str) -> np.ndarray:
        """Indices of the texts that match a regular expression (RE2)."""
        import pyarrow.compute as pc

        found = pc.match_substring_regex(self._columns["text"], pattern)
        return np.flatnonzero(pc.fill_null(found, False).to_numpy())

    def rows_of_split(self, train: bool) -> np.ndarray:
        """The rows to train on, or to evaluate on, as the column `split` says; all where it says nothing."""
        everything = np.arange(len(self))
        if "split" not in self._columns:
            return everything
        import pyarrow as pa
        import pyarrow.compute as pc

        held_out = pc.is_in(self._columns["split"], value_set=pa.array(HELD_OUT)).to_numpy()
        if train:
            return everything[~held_out]
        return everything[held_out] if held_out.any() else everything

    def require(self, **facts) -> None:
        """Refuses a dataset that another codec made, naming both values."""
        for name, wanted in facts.items():
            if self.info.get(name) != wanted:
                raise UserError(
                    f"{self.folder}: dataset.json says {name} = {self.info.get(name)!r} but the model needs"
                    f" {wanted!r}; encode the audio again with the model's codec."
                )

    def fingerprint(self) -> str:
        """Changes when any clip, text or codec changes: the checksums of the Arrow files."""
        return hashlib.sha256(json.dumps(self.info["files"], sort_keys=True).encode()).hexdigest()[:16]

    def verify(self) -> None:
        """Reads everything once: checksums, id range, empty clips, duplicate ids."""
        for file in self.info["files"]:
            with open(self.folder / file["name"], "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                    raise UserError(f"{self.folder / file['name']} is damaged: its checksum is not dataset.json's.")
        size = self.info["codebook_size"]
        for number, values in enumerate(self._values):
            bad = np.flatnonzero((values < 0) | (values >= size))
            if len(bad):
                rows = np.flatnonzero(self._chunk == number)
                row = rows[np.searchsorted(self._start[rows], bad[0], side="right") - 1]
                raise UserError(
                    f"{self.folder}: clip {self.id(row)!r} holds code {values[bad[0]]}, outside 0..{size - 1}."
                )
        if (self.frames <= 0).any():
            raise UserError(f"{self.folder}: clip {self.id(int(np.argmin(self.frames)))!r} is empty.")
        ids = self._columns["id"]
        if len(ids.unique()) != len(ids):
            twice = next(row["values"] for row in ids.value_counts().to_pylist() if row["counts"] > 1)
            raise UserError(f"{self.folder}: the id {twice!r} occurs twice.")


def _read_info(folder: Path) -> dict:
    path = folder / "dataset.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a token dataset (no dataset.json); make one with data/encode.py.")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        needed = {"codec", "sample_rate", "hop", "codebooks", "codebook_size", "channels", "files"} - set(info)
    except (ValueError, TypeError):
        raise UserError(f"{path} is not a JSON object.") from None
    if needed:
        raise UserError(f"{path} lacks {', '.join(sorted(needed))}; make the dataset again with data/encode.py.")
    return info


def _check_sizes(folder: Path, info: dict) -> None:
    for file in info["files"]:
        if Path(file["name"]).name != file["name"]:
            raise UserError(f"{folder}/dataset.json lists {file['name']!r}, which is not in the dataset's folder.")
        path = folder / file["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes, not {file['bytes']}"
            raise UserError(f"{path} {found}: the dataset is incomplete; encode or copy it again.")


def _flat_views(column, channels: int, frames: np.ndarray, dataset: TokenDataset):
    """Per Arrow chunk its flat values; per clip its chunk and where it starts in there."""
    if not len(column):
        raise UserError(f"{dataset.folder} holds no clip.")
    values, chunk_of, starts = [], [], []
    for number, chunk in enumerate(column.chunks):
        kind = getattr(chunk.type, "value_type", chunk.type)
        if kind != "int16" or chunk.values.null_count:
            raise UserError(f"{dataset.folder}: codes are {kind} lists{', with gaps' * (kind == 'int16')}, not int16.")
        values.append(chunk.values.to_numpy(zero_copy_only=True))
        offsets = chunk.offsets.to_numpy()
        first = sum(map(len, starts))
        wrong = np.flatnonzero(np.diff(offsets) != frames[first : first + len(chunk)].astype(np.int64) * channels)
        if len(wrong):
            clip = dataset.id(first + int(wrong[0]))
            raise UserError(f"{dataset.folder}: clip {clip!r} does not hold frames x {channels} codes.")
        starts.append(offsets[:-1].astype(np.int64))
        chunk_of.append(np.full(len(chunk), number, dtype=np.int32))
    return values, np.concatenate(chunk_of), np.concatenate(starts)
