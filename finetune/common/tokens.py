"""The token dataset: codes read zero-copy from a memory-mapped Arrow column.

A dataset is a `datasets` folder (save_to_disk) plus `dataset.json`, which names the codec and holds a checksum per
Arrow file: without it a flipped bit or a truncated file would load silently.
"""

import numpy as np

from common.arrow import ArrowDataset, flat_views
from common.config import UserError

HELD_OUT = ["eval", "dev", "val", "valid", "validation", "test"]  # values of `split` that are never trained on


class TokenDataset(ArrowDataset):
    """Clips of codes with their texts. `frames[i]` is the length; `codes(i)` is a (T, C) view without a copy."""

    kind, maker = "token dataset", "data/encode.py"
    facts = ("codec", "sample_rate", "hop", "codebooks", "codebook_size", "channels")
    columns = ("id", "text", "codes", "frames")
    flat = ("codes",)

    def __init__(self, folder: str):
        super().__init__(folder)
        self.channels = self.info["channels"]
        self.frames = self._columns["frames"].to_numpy()
        lengths = self.frames.astype(np.int64) * self.channels
        what = f"frames x {self.channels} codes"
        self._values, self._chunk, self._start = flat_views(self.table.column("codes"), lengths, self, what)

    def column(self, name: str):
        """A whole Arrow column; None if the dataset has no column of this name."""
        return self._columns.get(name)

    def label(self, name: str, i: int) -> str | None:
        return self.value(name, i) if name in self._columns else None

    def text(self, i: int) -> str:
        return self.value("text", i) or ""

    def codes(self, i: int) -> np.ndarray:
        start = self._start[i]
        flat = self._values[self._chunk[i]][start : start + self.frames[i] * self.channels]
        return flat.reshape(-1, self.channels)

    def long_texts(self, limit: int) -> np.ndarray:
        """Indices of the texts with more than `limit` UTF-8 bytes, found without a Python string per clip."""
        import pyarrow.compute as pc

        return np.flatnonzero(pc.binary_length(self._columns["text"]).to_numpy() > limit)

    def texts_matching(self, pattern: str) -> np.ndarray:
        """Indices of the texts that match a regular expression (RE2)."""
        import pyarrow.compute as pc

        found = pc.match_substring_regex(self._columns["text"], pattern)
        return np.flatnonzero(pc.fill_null(found, False).to_numpy())

    def rows_of_split(self, train: bool) -> np.ndarray:
        """The rows to train on, or to evaluate on, according to the column `split`; all rows without that column."""
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
        """Refuses a dataset that was made with another codec, naming both values."""
        for name, wanted in facts.items():
            if self.info.get(name) != wanted:
                raise UserError(
                    f"{self.folder}: dataset.json says {name} = {self.info.get(name)!r} but the model needs"
                    f" {wanted!r}; encode the audio again with the model's codec."
                )

    def verify(self) -> None:
        """Checks checksums and code ranges, and looks for empty clips and duplicate ids."""
        self.verify_files()
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
