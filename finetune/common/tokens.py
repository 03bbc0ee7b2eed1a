"""The token dataset: codes read zero-copy from a memory-mapped Arrow column.

A dataset is a `datasets` folder (save_to_disk) plus `dataset.json`, which names the codec and holds a checksum per
Arrow file: without it a flipped bit or a truncated file would load silently.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.arrow import ArrowDataset, int16_lists
from common.errors import UserError
from common.runtime import Process, on_main_for_long

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
        self._codes = int16_lists(self.table, "codes", lengths, self, what)

    @property
    def lengths(self) -> np.ndarray:
        return self.frames

    def sound(self, i: int) -> np.ndarray:
        return self.codes(i)

    def label(self, name: str, i: int) -> str | None:
        return self.value(name, i) if name in self._columns else None

    def text(self, i: int) -> str:
        return self.value("text", i) or ""

    def texts(self, i: int) -> list[str]:
        """All texts of a clip: `text` alone, unless the dataset has the column `texts`, whose first one that is."""
        several = self.value("texts", i) if "texts" in self._columns else None
        return [text for text in several or () if text] or [self.text(i)]

    def codes(self, i: int) -> np.ndarray:
        return self._codes[int(i)].values.to_numpy().reshape(-1, self.channels)

    def weights(self) -> np.ndarray | None:
        """What each clip's loss is multiplied by, from the column `weight`; None without that column."""
        if "weight" not in self._columns:
            return None
        try:
            weights = self._columns["weight"].to_numpy().astype(np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{self.folder}: the column `weight` does not hold numbers.") from None
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(bad):
            clip, weight = self.id(bad[0]), self.value("weight", bad[0])
            raise UserError(f"{self.folder}: clip {clip!r} has the weight {weight}; a weight is a number, 0 or more.")
        if not weights.any():
            raise UserError(f"{self.folder}: the column `weight` is 0 for every clip.")
        return weights

    def long_texts(self, limit: int) -> np.ndarray:
        """Indices of the clips with a text of more than `limit` UTF-8 bytes, without a Python string per clip."""
        return self._rows_where(lambda texts: pc.greater(pc.binary_length(texts), limit))

    def texts_matching(self, pattern: str) -> np.ndarray:
        """Indices of the clips with a text that matches a regular expression (RE2)."""
        return self._rows_where(lambda texts: pc.match_substring_regex(texts, pattern))

    def _rows_where(self, condition) -> np.ndarray:
        """Rows whose `text`, or any of whose `texts`, meets a condition on a whole column."""

        def found(texts) -> np.ndarray:
            return np.flatnonzero(pc.fill_null(condition(texts), False).to_numpy(zero_copy_only=False))

        rows, first = [found(self._columns["text"])], 0
        for chunk in self._columns["texts"].chunks if "texts" in self._columns else ():
            rows.append(first + pc.list_parent_indices(chunk).to_numpy()[found(pc.list_flatten(chunk))])
            first += len(chunk)
        return np.unique(np.concatenate(rows))

    def rows_of_split(self, train: bool) -> np.ndarray:
        """The rows to train on, or to evaluate on, according to the column `split`; all rows without that column."""
        everything = np.arange(len(self))
        if "split" not in self._columns:
            return everything
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

    def check_rows(self, tick) -> None:
        """Looks for codes outside the codebook and for empty clips."""
        size = self.info["codebook_size"]
        for chunk in self._codes.chunks:
            tick()
            low, high = (bound.as_py() for bound in pc.min_max(chunk.flatten()).values())
            if low is not None and (low < 0 or high >= size):
                self._refuse_codes(size)
        if (self.frames <= 0).any():
            raise UserError(f"{self.folder}: clip {self.id(int(np.argmin(self.frames)))!r} is empty.")

    def _refuse_codes(self, size: int) -> None:
        for i in range(len(self)):
            codes = self.codes(i)
            bad = codes[(codes < 0) | (codes >= size)]
            if len(bad):
                raise UserError(f"{self.folder}: clip {self.id(i)!r} holds code {bad[0]}, outside 0..{size - 1}.")


def open_tokens(path: str, process: Process) -> TokenDataset:
    """A token dataset, which the main rank has checked for damage."""
    tokens = TokenDataset(path)
    on_main_for_long(tokens.verify, process)
    return tokens
