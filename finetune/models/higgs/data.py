"""A token dataset as the training set for voice cloning: target clips with references. Shapes as in layout.py.

The voice comes from the codec codes of the reference in the prompt; the model has no other audio input.
"""

import numpy as np
import torch

from common import keyed_random as keyed
from common.arrow import rows_named
from common.errors import UserError
from common.holdout import rows_to_use
from common.runtime import Process, say, still_alive
from common.text_lengths import count_tokens
from common.tokens import TokenDataset
from models.higgs.layout import Layout, Row, build_row, collate
from models.higgs.text import Chat, check_speakers

# The columns that name a clip's references: the only one, or [SPEAKER0]'s in a dialogue; [SPEAKER1]'s; and so on.
REFERENCES = ("ref", "ref1", "ref2", "ref3")
# The last value applies to all further codebooks.
CODEBOOK_WEIGHTS = {"equal": (1.0,), "first": (8.0, 8.0, 6.0, 6.0, 4.0, 4.0, 2.0, 2.0)}


class VoiceClips:
    """The clips of a token dataset that Higgs trains on (contracts.TrainingSet), each with a reference clip by the same
    speaker."""

    def __init__(
        self,
        tokens: TokenDataset,
        layout: Layout,
        chat: Chat,
        config,
        train: bool,
        process: Process | None = None,
    ):
        self.tokens, self.layout, self.chat, self.config, self.train = tokens, layout, chat, config, train
        # The ids right after the codes are the stream's BOS and EOS: a larger codebook would reach into them.
        tokens.require(codec="higgs", channels=layout.codebooks, codebook_size=layout.bos)
        self.references = self._references()  # (dataset rows, voices): rows of the references, -1 for none
        self.reference = self.references[:, 0]
        self.weights = tokens.weights()  # of the clips' losses; None: all alike
        self.kept = rows_to_use(tokens, config, train)
        if not config.reference_dropout:
            self.kept = self.kept[self.reference[self.kept] >= 0]
        if train and self.weights is not None:
            self.kept = self.kept[self.weights[self.kept] > 0]
        if train and config.eval_split:  # a held-out clip is not heard as a reference either
            held_out = rows_to_use(tokens, config, train=False)
            self.kept = self.kept[~np.isin(self.references[self.kept], held_out).any(axis=1)]
        if not len(self.kept):
            raise UserError(f"{tokens.folder}: no clip has a reference; choose references with data/pair_speakers.py.")
        self._refuse_copies()
        self.reference_dropout = config.reference_dropout if train else 0.0
        self._count_positions(process)
        self.dropped = 0
        self._limit(layout.max_positions)
        self.codebook_weights = _codebook_weights(config.codebook_weights, layout.codebooks)
        self._other_references = None

    def _count_positions(self, process: Process | None) -> None:
        """lengths and text_targets: positions and targets of --text-loss per clip; bare_lengths and bare_text_targets:
        the same for clips whose reference is dropped."""
        refs, tail = self.references[self.kept], self.layout.tail
        voices = (refs >= 0).sum(axis=1)
        audio = self.tokens.frames[self.kept].astype(np.int64) + tail
        bare = self.reference_dropout > 0
        sizes = count_tokens(
            self._prompt_sizes, self.tokens, self.kept, self.chat.identity, process, numbers=3 if bare else 2
        ).astype(np.int64)
        text = sizes[:, 0] - 1 - voices  # frames replace their placeholder
        reference_frames = self.tokens.frames.astype(np.int64)[refs]
        self.lengths = text + audio + np.where(refs >= 0, reference_frames + tail, 0).sum(axis=1)
        self.text_targets = text - sizes[:, 1]
        self.bare_lengths, self.bare_text_targets = self.lengths, self.text_targets
        if bare:
            self.bare_lengths = sizes[:, 2] - 1 + audio
            self.bare_text_targets = sizes[:, 2] - 2  # all but the audio's placeholder and the first position

    def __len__(self) -> int:
        return len(self.kept)

    def ids(self, indices) -> list[str]:
        return [self.tokens.id(i) for i in self._rows_in_dataset(indices)]

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    @property
    def heard(self) -> np.ndarray:
        """Dataset rows whose codes the model gets to see: targets and references."""
        references = self.references[self.kept]
        return np.union1d(self.kept, references[references >= 0])

    def _rows_in_dataset(self, indices) -> np.ndarray:
        return self.kept[np.asarray(indices, dtype=np.int64)]

    def _references(self) -> np.ndarray:
        voices = max((n + 1 for n, name in enumerate(REFERENCES) if self.tokens.column(name) is not None), default=0)
        if not voices:
            if self.config.reference_dropout:
                return np.full((len(self.tokens), 1), -1)
            raise UserError(
                f"{self.tokens.folder} names no references: give ref_audio and ref_text in the manifest, or choose them"
                " by speaker with data/pair_speakers.py."
            )
        rows = np.stack([self._rows_of_references(name) for name in REFERENCES[:voices]], axis=1)
        for n in range(1, voices):
            alone = np.flatnonzero((rows[:, n] >= 0) & (rows[:, n - 1] < 0))
            if len(alone):
                has, lacks = (f"`{REFERENCES[number]}` ([SPEAKER{number}])" for number in (n, n - 1))
                raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(alone[0])!r} has {has} but no {lacks}.")
        return rows

    def _rows_of_references(self, column: str) -> np.ndarray:
        import pyarrow.compute as pc

        names = self.tokens.column(column)
        if names is None:
            return np.full(len(self.tokens), -1)
        rows = rows_named(names, self.tokens.column("id"))
        has_name = pc.fill_null(pc.greater(pc.utf8_length(names), 0), False).to_numpy()
        missing = np.flatnonzero(has_name & (rows < 0))
        if len(missing):
            clip, ref = self.tokens.id(missing[0]), self.tokens.value(column, missing[0])
            raise UserError(f"{self.tokens.folder}: the reference {ref!r} of clip {clip!r} is not in the dataset.")
        return np.where(has_name, rows, -1)

    def _refuse_copies(self) -> None:
        """Refuses a reference that is the target itself: it would teach the model to copy, not to clone."""
        frames = self.tokens.frames
        for references in self.references[self.kept].T:
            same_size = (references >= 0) & (frames[self.kept] == frames[references])
            for i, j in zip(self.kept[same_size], references[same_size], strict=True):
                still_alive()
                if i == j or np.array_equal(self.tokens.codes(i), self.tokens.codes(j)):
                    name = self.tokens.id(i)
                    raise UserError(
                        f"{self.tokens.folder}: the reference of clip {name!r} is the clip itself or its copy."
                    )

    def _limit(self, limit: int) -> None:
        """Refuses or drops over-long rows. None is ever cut: a cut target would teach the model not to stop."""
        too_long = self.lengths > limit
        if not too_long.any():
            return
        if self.config.over_long == "error":
            worst = int(np.argmax(self.lengths))
            raise UserError(
                f"{self.tokens.folder}: clip {self.ids([worst])[0]!r} takes {self.lengths[worst]} positions with its"
                f" reference, over the model's limit of {limit}; use --over-long drop."
            )
        self.dropped = int(too_long.sum())
        for name in ("kept", "lengths", "text_targets", "bare_lengths", "bare_text_targets"):
            setattr(self, name, getattr(self, name)[~too_long])

    def _prompt_sizes(self, part: range) -> list[tuple]:
        """Tokens of each prompt, and how many come before the targets of --text-loss: everything after the references
        is one, or all but the first position if there is none. With --reference-dropout also the tokens without any
        reference."""
        references = self.references[self._rows_in_dataset(part)]
        sizes = []
        for ids, refs in zip(self._prompts(part), references, strict=True):
            voices = int((refs >= 0).sum())
            places = np.flatnonzero(ids == self.layout.audio)
            sizes.append((len(ids), int(places[voices - 1]) - (voices - 1) if voices else 1))
        if self.reference_dropout:
            bare = self._prompts(part, np.full_like(references, -1))
            sizes = [(*size, len(ids)) for size, ids in zip(sizes, bare, strict=True)]
        return sizes

    def _prompts(self, indices, references: np.ndarray | None = None, answer: bool = True) -> list[np.ndarray]:
        """Token ids of the chats, with one placeholder per piece of audio."""
        targets, prompts = self._rows_in_dataset(indices), []
        for i, refs in zip(targets, self.references[targets] if references is None else references, strict=True):
            name = self.tokens.id(i)
            said = [self.chat.text(self.tokens.text(j), self.tokens.id(j)) for j in refs if j >= 0]
            text = self.chat.text(self.tokens.text(i), name)
            check_speakers(text, len(said), name)
            prompts.append(self.chat.prompt(text, said, self.tokens.label("scene", i), answer))
        return self.chat.ids(prompts)

    # ---- one epoch's random choices: keyed by the clip, so that they depend on no rank and no resume

    def _is_bare(self, indices, epoch: int | None) -> np.ndarray:
        """Whose references are dropped in this epoch; none without an epoch."""
        if not self.reference_dropout or epoch is None:
            return np.zeros(len(indices), dtype=bool)
        seed = self.config.seed
        draws = [keyed.uniform(seed, epoch, name, "reference dropout") for name in self.ids(indices)]
        return np.array(draws) < self.reference_dropout

    def positions(self, indices, epoch: int | None = None) -> int:
        """Positions of these clips in an epoch, without padding: `lengths`, or less where references are dropped."""
        bare, indices = self._is_bare(indices, epoch), np.asarray(indices, dtype=np.int64)
        return int(np.where(bare, self.bare_lengths[indices], self.lengths[indices]).sum())

    def target_weight(self, indices, epoch: int | None = None) -> float:
        """Sum of the loss weights of these clips' targets. Must agree with the recipe's compute_loss."""
        indices = np.asarray(indices, dtype=np.int64)
        frames = self.tokens.frames[self.kept[indices]].astype(np.int64)
        bare = self._is_bare(indices, epoch)
        text = np.where(bare, self.bare_text_targets[indices], self.text_targets[indices])
        weights = 1.0 if self.weights is None else self.weights[self.kept[indices]]
        audio = self.codebook_weights.sum() * (weights * (frames + 1)).sum()  # + 1: the end of each codebook
        return float(audio + self.config.text_loss * (weights * text).sum())

    def rows(
        self,
        indices,
        references: np.ndarray | None = None,
        answer: bool = True,
        epoch: int | None = None,
        said: np.ndarray | None = None,
    ) -> list[Row]:
        """These clips as chats. `references`: dataset rows to use instead of their own references, -1 for none; `said`:
        codes to use instead of the clips' own.

        Without `answer` they end where the model begins to speak. `epoch`: the one whose random choices apply; without
        it no reference is dropped.
        """
        targets = self._rows_in_dataset(indices)
        if references is None:
            references = np.where(self._is_bare(indices, epoch)[:, None], -1, self.references[targets])
        references = np.reshape(references, (len(targets), -1))
        rows = []
        for i, refs, ids in zip(targets, references, self._prompts(indices, references, answer), strict=True):
            segments = [self._codes(j) for j in refs if j >= 0]
            segments += [self._codes(i) if said is None else said] if answer else []
            row = build_row(self.tokens.id(i), ids, segments, self.layout, answer)
            row.weight = 1.0 if self.weights is None else float(self.weights[i])
            rows.append(row)
        return rows

    def _codes(self, i: int) -> np.ndarray:
        codes = self.tokens.codes(i)
        if codes.min() < 0 or codes.max() >= self.layout.bos:
            code = min(codes.min(), 0) or codes.max()
            raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(i)!r} holds the code {code}, out of range.")
        return codes

    def batch(self, indices, epoch: int | None = None, references: np.ndarray | None = None) -> dict:
        """These clips as one batch. `epoch`, `references`: see rows."""
        return self.collate(self.rows(indices, references, epoch=epoch))

    def collate(self, rows: list[Row]) -> dict:
        """Rows as one batch, with the loss weights (K,) of the codebooks."""
        batch = collate(rows, self.layout, self.config.packing, bool(self.config.text_loss))
        return batch | {"codebook_weights": torch.tensor(self.codebook_weights, dtype=torch.float32)}

    def other_references(self, indices) -> np.ndarray | None:
        """For each clip the reference of another speaker, of similar length; for a dialogue its references in reverse
        order. None if there is only one speaker.

        If the dataset names no speakers, every reference counts as a speaker of its own.
        """
        if self._other_references is None:
            all_refs = self.references[self.kept]
            is_dialogue = (all_refs >= 0).sum(axis=1) > 1
            refs = np.where(is_dialogue, -1, all_refs[:, 0])
            names = self.tokens.column("speaker")
            speakers = refs if names is None else np.array(names.to_pylist()).astype(str)[self.kept]
            _, speakers = np.unique(speakers, return_inverse=True)
            self._other_references = np.full_like(all_refs, -1)
            self._other_references[is_dialogue] = all_refs[is_dialogue, ::-1]
            for clip in np.flatnonzero(refs >= 0):
                others = refs[(speakers != speakers[clip]) & (refs >= 0)]
                if len(others):
                    distance = np.abs(self.tokens.frames[others].astype(int) - self.tokens.frames[refs[clip]])
                    self._other_references[clip, 0] = others[np.argmin(distance)]
        if not (self._other_references >= 0).any():
            return None
        return self._other_references[np.asarray(indices, dtype=np.int64)]

    def say_summary(self) -> None:
        info, frames = self.tokens.info, self.tokens.frames[self.kept].astype(np.int64)
        hours = frames.sum() * info["hop"] / info["sample_rate"] / 3600
        quarter, half, most = np.percentile(self.lengths, [25, 50, 100]).astype(int)
        names = self.tokens.column("speaker")
        speakers = len(names.take(self.kept).unique()) if names is not None else 0
        share, dialogues = (self.reference[self.kept] >= 0).mean(), (self.references[self.kept, 1:] >= 0).sum()
        say(
            f"{self.tokens.folder}: {len(self):,} targets, {hours:.3f} h, {speakers or 'unnamed'} speakers,"
            f" {100 * share:.0f} % with a reference, {dialogues} dialogues; positions per row: quartile {quarter},"
            f" median {half}, maximum {most}"
        )
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and were dropped")


def _codebook_weights(name: str, codebooks: int) -> np.ndarray:
    """Loss weights (K,) with a mean of 1."""
    values = CODEBOOK_WEIGHTS[name]
    weights = np.array([values[min(k, len(values) - 1)] for k in range(codebooks)])
    return weights / weights.mean()
