"""A token dataset as the training set for voice cloning: target clips with references. Shapes as in layout.py.

The voice comes from the codec codes of the reference in the prompt; the model has no other audio input.
"""

import numpy as np

from common.config import UserError
from common.runtime import say
from common.tokens import TokenDataset
from models.higgs.layout import Layout, Row, audio_at, build_row, collate
from models.higgs.text import Chat

# The last value applies to all further codebooks.
CODEBOOK_WEIGHTS = {"equal": (1.0,), "first": (8.0, 8.0, 6.0, 6.0, 4.0, 4.0, 2.0, 2.0)}


class VoiceClips:
    """The clips of a token dataset that Higgs trains on (contracts.TrainingSet), each with a reference clip by the same
    speaker."""

    def __init__(self, tokens: TokenDataset, layout: Layout, chat: Chat, config, train: bool):
        self.tokens, self.layout, self.chat, self.config, self.train = tokens, layout, chat, config, train
        # The ids right after the codes are the stream's BOS and EOS: a larger codebook would reach into them.
        tokens.require(codec="higgs", channels=layout.codebooks, codebook_size=layout.bos)
        self.reference = self._references()  # dataset row -> row of its reference, -1 for none
        self.kept = tokens.rows_of_split(train)
        if not config.allow_no_ref:
            self.kept = self.kept[self.reference[self.kept] >= 0]
        if not len(self.kept):
            raise UserError(f"{tokens.folder}: no clip has a reference; choose references with data/pair_speakers.py.")
        self._refuse_copies()
        frames = tokens.frames.astype(np.int64)
        ref = self.reference[self.kept]
        audio = frames[self.kept] + layout.tail + np.where(ref >= 0, frames[ref] + layout.tail, 0)
        prompt_sizes = [len(ids) for ids in self._prompts(range(len(self.kept)))]
        self.lengths = np.array(prompt_sizes) - 1 - (ref >= 0) + audio  # frames replace their placeholder
        self.dropped = 0
        self._limit(config.max_positions or layout.max_positions)
        self.codebook_weights = _codebook_weights(config.codebook_weights, layout.codebooks)
        self._other_references = None

    def __len__(self) -> int:
        return len(self.kept)

    def ids(self, indices) -> list[str]:
        return [self.tokens.id(i) for i in self._rows_in_dataset(indices)]

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    def _rows_in_dataset(self, indices) -> np.ndarray:
        return self.kept[np.asarray(indices, dtype=np.int64)]

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
        rows = pc.fill_null(pc.index_in(names, value_set=ids.combine_chunks()), -1).to_numpy()
        has_name = pc.fill_null(pc.greater(pc.utf8_length(names), 0), False).to_numpy()
        missing = np.flatnonzero(has_name & (rows < 0))
        if len(missing):
            clip, ref = self.tokens.id(missing[0]), self.tokens.value("ref", missing[0])
            raise UserError(f"{self.tokens.folder}: the reference {ref!r} of clip {clip!r} is not in the dataset.")
        return np.where(has_name, rows, -1)

    def _refuse_copies(self) -> None:
        """Refuses a reference that is the target itself: it would teach the model to copy, not to clone."""
        for i in self.kept[self.reference[self.kept] >= 0]:
            j = self.reference[i]
            same_size = self.tokens.frames[i] == self.tokens.frames[j]
            if i == j or (same_size and np.array_equal(self.tokens.codes(i), self.tokens.codes(j))):
                name = self.tokens.id(i)
                raise UserError(f"{self.tokens.folder}: the reference of clip {name!r} is the clip itself or its copy.")

    def _limit(self, limit: int) -> None:
        """Refuses or drops over-long rows. None is ever cut: a cut target would teach the model not to stop."""
        too_long = self.lengths > limit
        if not too_long.any():
            return
        if self.config.over_long == "error":
            worst = int(np.argmax(self.lengths))
            raise UserError(
                f"{self.tokens.folder}: clip {self.ids([worst])[0]!r} takes {self.lengths[worst]} positions with its"
                f" reference, over the limit of {limit} (--max-positions or the model's own); use --over-long drop."
            )
        self.kept, self.lengths, self.dropped = self.kept[~too_long], self.lengths[~too_long], int(too_long.sum())

    def _prompts(self, indices, references: np.ndarray | None = None, answer: bool = True) -> list[np.ndarray]:
        """Token ids of the chats, with one placeholder per piece of audio."""
        targets = self._rows_in_dataset(indices)
        refs = self.reference[targets] if references is None else references
        prompts = []
        for i, j in zip(targets, refs, strict=True):
            ref_text = self.chat.text(self.tokens.text(j), self.tokens.id(j)) if j >= 0 else None
            text = self.chat.text(self.tokens.text(i), self.tokens.id(i))
            prompts.append(self.chat.prompt(text, ref_text, self.tokens.label("scene", i), answer))
        return self.chat.ids(prompts)

    def target_weight(self, indices, epoch: int = 0) -> float:
        """Sum of the loss weights of these clips' targets. Must agree with the recipe's compute_loss."""
        frames = self.tokens.frames[self._rows_in_dataset(indices)].astype(np.int64)
        total = float(self.codebook_weights.sum() * (frames + 1).sum())  # + 1: the end of each codebook
        if self.config.text_loss:
            for row in self.rows(indices):
                first = max(1, row.text_from)  # nothing predicts the first position of a row
                total += self.config.text_loss * (~audio_at(row.ids[first:], self.layout)).sum()
        return total

    def rows(self, indices, references: np.ndarray | None = None, answer: bool = True) -> list[Row]:
        """These clips as chats. `references`: dataset rows to use instead of their own references, -1 for none.

        Without `answer` they end where the model begins to speak.
        """
        targets = self._rows_in_dataset(indices)
        refs = self.reference[targets] if references is None else references
        rows = []
        for i, j, ids in zip(targets, refs, self._prompts(indices, refs, answer), strict=True):
            spoken = ([j] if j >= 0 else []) + ([i] if answer else [])
            segments = [self._codes(clip) for clip in spoken]
            rows.append(build_row(self.tokens.id(i), ids, segments, self.layout, answer))
        return rows

    def _codes(self, i: int) -> np.ndarray:
        codes = self.tokens.codes(i)
        if codes.min() < 0 or codes.max() >= self.layout.bos:
            code = min(codes.min(), 0) or codes.max()
            raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(i)!r} holds the code {code}, out of range.")
        return codes

    def batch(self, indices, epoch: int = 0, references: np.ndarray | None = None) -> dict:
        """These clips as one batch. Nothing in it is random, so every epoch has the same. `references`: see rows."""
        rows = self.rows(indices, references)
        return collate(rows, self.layout, self.config.packing, bool(self.config.text_loss))

    def other_references(self, indices) -> np.ndarray | None:
        """For each clip the reference of another speaker, of similar length; None if there is only one speaker.

        If the dataset names no speakers, every reference counts as a speaker of its own.
        """
        if self._other_references is None:
            refs = self.reference[self.kept]
            names = self.tokens.column("speaker")
            speakers = refs if names is None else np.array(names.to_pylist()).astype(str)[self.kept]
            _, speakers = np.unique(speakers, return_inverse=True)
            self._other_references = np.full(len(refs), -1)
            for clip in np.flatnonzero(refs >= 0):
                others = refs[(speakers != speakers[clip]) & (refs >= 0)]
                if len(others):
                    distance = np.abs(self.tokens.frames[others].astype(int) - self.tokens.frames[refs[clip]])
                    self._other_references[clip] = others[np.argmin(distance)]
        if not (self._other_references >= 0).any():
            return None
        return self._other_references[np.asarray(indices, dtype=np.int64)]

    def say_summary(self) -> None:
        info, frames = self.tokens.info, self.tokens.frames[self.kept].astype(np.int64)
        hours = frames.sum() * info["hop"] / info["sample_rate"] / 3600
        quarter, half, most = np.percentile(self.lengths, [25, 50, 100]).astype(int)
        names = self.tokens.column("speaker")
        speakers = len(set(names.take(self.kept).to_pylist())) if names is not None else 0
        share = (self.reference[self.kept] >= 0).mean()
        say(
            f"{self.tokens.folder}: {len(self):,} targets, {hours:.3f} h, {speakers or 'unnamed'} speakers,"
            f" {100 * share:.0f} % with a reference; positions per row: quartile {quarter}, median {half},"
            f" maximum {most}"
        )
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and were dropped")


def _codebook_weights(name: str, codebooks: int) -> np.ndarray:
    """Loss weights (K,) with a mean of 1."""
    values = CODEBOOK_WEIGHTS[name]
    weights = np.array([values[min(k, len(values) - 1)] for k in range(codebooks)])
    return weights / weights.mean()
