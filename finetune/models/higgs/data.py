"""Token datasets as pairs of a reference and a target by the same speaker. Shapes as in layout.py.

The voice comes from the codec codes of the reference in the prompt; there is no other audio input to this model.
"""

import numpy as np

from common.config import UserError
from common.runtime import Ranks, on_first, say
from common.tokens import TokenDataset
from models.higgs.layout import Layout, Row, audio_at, build_row, collate
from models.higgs.text import Chat

CODEBOOK_WEIGHTS = {"equal": (1.0,), "first": (8.0, 8.0, 6.0, 6.0, 4.0, 4.0, 2.0, 2.0)}


# ---- pairs -----------------------------------------------------------------------------------------------------


class Pairs:
    """A token dataset seen as pairs of a reference and a target by the same speaker."""

    def __init__(self, tokens: TokenDataset, layout: Layout, chat: Chat, config, train: bool):
        self.tokens, self.layout, self.chat, self.config, self.train = tokens, layout, chat, config, train
        # The ids right after the codes are the stream's BOS and EOS: a larger codebook would reach into them.
        tokens.require(codec="higgs", channels=layout.codebooks, codebook_size=layout.bos)
        self.reference = self._references()  # row of each row's reference; -1: none
        self.kept = tokens.rows_of_split(train)
        if not config.allow_no_ref:
            self.kept = self.kept[self.reference[self.kept] >= 0]
        if not len(self.kept):
            raise UserError(f"{tokens.folder}: no clip has a reference; choose them with data/pair_speakers.py.")
        self._refuse_copies()
        frames = tokens.frames.astype(np.int64)
        ref = self.reference[self.kept]
        audio = frames[self.kept] + layout.tail + np.where(ref >= 0, frames[ref] + layout.tail, 0)
        sizes = [len(ids) for ids in self._prompts(range(len(self.kept)))]
        self.lengths = np.array(sizes) - 1 - (ref >= 0) + audio  # a placeholder becomes its frames
        self.dropped = 0
        self._limit(config.max_positions or layout.max_positions)
        weights = CODEBOOK_WEIGHTS[config.codebook_weights]
        weights = np.array([weights[min(k, len(weights) - 1)] for k in range(layout.codebooks)])
        self.weights = weights / weights.mean()
        self._swap = None

    def __len__(self) -> int:
        return len(self.kept)

    def id(self, clip: int) -> str:
        return self.tokens.id(self.kept[clip])

    def _references(self) -> np.ndarray:
        names = self.tokens.column("ref")
        if names is None:
            if self.config.allow_no_ref:
                return np.full(len(self.tokens), -1)
            raise UserError(
                f"{self.tokens.folder} names no references: give ref_audio and ref_text in the manifest, or choose them"
                " by speaker with data/pair_speakers.py."
            )
        import pyarrow.compute as pc

        ids = self.tokens.column("id")
        found = pc.fill_null(pc.index_in(names, value_set=ids.combine_chunks()), -1).to_numpy()
        named = pc.fill_null(pc.greater(pc.utf8_length(names), 0), False).to_numpy()
        lost = np.flatnonzero(named & (found < 0))
        if len(lost):
            clip, ref = self.tokens.id(lost[0]), self.tokens.value("ref", lost[0])
            raise UserError(f"{self.tokens.folder}: the reference {ref!r} of clip {clip!r} is not in the dataset.")
        return np.where(named, found, -1)

    def _refuse_copies(self) -> None:
        """A reference with the sound of its target teaches to copy, not to clone."""
        for i in self.kept[self.reference[self.kept] >= 0]:
            j = self.reference[i]
            same_size = self.tokens.frames[i] == self.tokens.frames[j]
            if i == j or (same_size and np.array_equal(self.tokens.codes(i), self.tokens.codes(j))):
                name = self.tokens.id(i)
                raise UserError(f"{self.tokens.folder}: the reference of clip {name!r} is the clip itself or its copy.")

    def _limit(self, limit: int) -> None:
        too_long = self.lengths > limit
        if not too_long.any():
            return
        if self.config.over_long == "error":
            worst = int(np.argmax(self.lengths))
            raise UserError(
                f"{self.tokens.folder}: clip {self.id(worst)!r} takes {self.lengths[worst]} positions with its"
                f" reference, over the limit of {limit} (--max-positions or the model's own); use --over-long drop."
            )
        self.kept, self.lengths, self.dropped = self.kept[~too_long], self.lengths[~too_long], int(too_long.sum())

    def _prompts(self, clips, references: np.ndarray | None = None, answer: bool = True) -> list[np.ndarray]:
        rows = self.kept[np.asarray(clips, dtype=np.int64)]
        refs = self.reference[rows] if references is None else references
        prompts = []
        for i, j in zip(rows, refs, strict=True):
            said = self.chat.text(self.tokens.text(j), self.tokens.id(j)) if j >= 0 else None
            text = self.chat.text(self.tokens.text(i), self.tokens.id(i))
            prompts.append(self.chat.prompt(text, said, self.tokens.label("scene", i), answer))
        return self.chat.ids(prompts)

    def target_weight(self, clips, epoch: int = 0) -> float:
        """Sum of the token weights of these clips' targets: known from lengths alone, on every rank."""
        rows = self.kept[np.asarray(clips, dtype=np.int64)]
        total = float(self.weights.sum() * (self.tokens.frames[rows].astype(np.int64) + 1).sum())
        if self.config.text_loss:
            for row in self.rows(clips):
                first = max(1, row.text_from)  # nothing predicts the first position of a row
                total += self.config.text_loss * (~audio_at(row.ids[first:], self.layout)).sum()
        return total

    def rows(self, clips, references: np.ndarray | None = None, answer: bool = True) -> list[Row]:
        """These clips as rows; `references`: other rows than their own, -1 for none."""
        chosen = self.kept[np.asarray(clips, dtype=np.int64)]
        refs = self.reference[chosen] if references is None else references
        rows = []
        for i, j, ids in zip(chosen, refs, self._prompts(clips, refs, answer), strict=True):
            used = ([j] if j >= 0 else []) + ([i] if answer else [])
            segments = [self._codes(u) for u in used]
            rows.append(build_row(self.tokens.id(i), ids, segments, self.layout, answer))
        return rows

    def _codes(self, i: int) -> np.ndarray:
        codes = self.tokens.codes(i)
        if codes.min() < 0 or codes.max() >= self.layout.bos:
            code = min(codes.min(), 0) or codes.max()
            raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(i)!r} holds the code {code}, out of range.")
        return codes

    def batch(self, clips, references: np.ndarray | None = None) -> dict:
        rows = self.rows(clips, references)
        return collate(rows, self.layout, self.config.packing, bool(self.config.text_loss))

    def swapped(self, clips) -> np.ndarray | None:
        """For each clip the reference of another speaker, as long as its own as far as possible; None: all are one.

        Without speakers in the dataset every reference counts as one.
        """
        if self._swap is None:
            refs = self.reference[self.kept]
            names = self.tokens.column("speaker")
            voices = refs if names is None else np.array(names.to_pylist()).astype(str)[self.kept]
            _, voices = np.unique(voices, return_inverse=True)
            self._swap = np.full(len(refs), -1)
            for clip in np.flatnonzero(refs >= 0):
                others = refs[(voices != voices[clip]) & (refs >= 0)]
                if len(others):
                    apart = np.abs(self.tokens.frames[others].astype(int) - self.tokens.frames[refs[clip]])
                    self._swap[clip] = others[np.argmin(apart)]
        found = self._swap[np.asarray(clips, dtype=np.int64)]
        return found if (self._swap >= 0).any() else None

    def say_facts(self) -> None:
        info, frames = self.tokens.info, self.tokens.frames[self.kept].astype(np.int64)
        hours = frames.sum() * info["hop"] / info["sample_rate"] / 3600
        quarter, half, most = np.percentile(self.lengths, [25, 50, 100]).astype(int)
        named = self.tokens.column("speaker")
        voices = len(set(named.take(self.kept).to_pylist())) if named is not None else 0
        share = (self.reference[self.kept] >= 0).mean()
        say(
            f"{self.tokens.folder}: {len(self):,} targets, {hours:.3f} h, {voices or 'unnamed'} speakers,"
            f" {100 * share:.0f} % with a reference; positions a row {quarter} / {half} / {most} (quarter, half, most)"
        )
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and left out")


def build_data(path: str, layout: Layout, chat: Chat, config, ranks: Ranks, train: bool) -> Pairs | None:
    """A token dataset, checked against the model and, on the first rank, for damage; None without a path."""
    if not path:
        return None
    tokens = TokenDataset(path)
    if config.verify_data:
        on_first(tokens.verify, ranks)
    pairs = Pairs(tokens, layout, chat, config, train)
    pairs.say_facts()
    return pairs
