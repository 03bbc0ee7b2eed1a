"""A token dataset as Llama MoT's training set: tokenizers, which part of a clip is used, padding, coverage.

Shapes: B clips, L positions, C codebooks.
"""

from pathlib import Path

import numpy as np
import torch

from common import keyed_random
from common.config import UserError
from common.loss import IGNORE
from common.runtime import say
from common.tokens import TokenDataset
from models.mot.layout import Layout, music

# Maximum positions per sequence, tokens per caption (with BOS) and codes per clip.
PROFILES = {
    "default": {"max_seq": 2304, "max_text": 192, "max_audio": 2000},
    "legacy": {"max_seq": 1024, "max_text": 31, "max_audio": 992},
}


# ---- text ------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Llama-3's fast tokenizer (tokenizer.json) or a SentencePiece model (tokenizer.model); ids without BOS."""

    def __init__(self, path: str):
        folder = Path(path)
        self.source = path
        if folder.is_dir() and not (folder / "tokenizer.json").is_file():
            if not (folder / "tokenizer.model").is_file():
                raise UserError(f"--model {path} has neither tokenizer.json nor tokenizer.model.")
            from sentencepiece import SentencePieceProcessor

            try:
                model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
            except (OSError, RuntimeError) as error:
                raise UserError(f"--model {path}: tokenizer.model is not a SentencePiece model ({error}).") from None
            self.encode_all, self.bos, self.size = model.encode, model.bos_id(), model.vocab_size()
        else:
            from transformers import AutoTokenizer

            try:
                model = AutoTokenizer.from_pretrained(path, local_files_only=folder.is_dir())
            except (OSError, ValueError) as error:
                raise UserError(f"--model {path}: no usable tokenizer ({str(error).splitlines()[0]})") from None
            self.encode_all = lambda texts: model(texts, add_special_tokens=False).input_ids
            self.bos, self.size = model.bos_token_id, len(model)
        if self.bos is None or self.bos < 0:
            raise UserError(f"--model {path}: its tokenizer has no BOS token, with which every sequence begins.")

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, after BOS."""
        return [np.array([self.bos, *ids], dtype=np.int64) for ids in self.encode_all(texts)] if texts else []

    @property
    def no_text(self) -> np.ndarray:
        """The empty caption, which guidance compares with."""
        return np.array([self.bos], dtype=np.int64)


# ---- clips -----------------------------------------------------------------------------------------------------


def limits_of(config) -> dict[str, int]:
    """The maximum lengths: the profile's, or those of flags that are not 0."""
    return {name: getattr(config, name) or value for name, value in PROFILES[config.profile].items()}


def check_coverage(tokens: TokenDataset, min_coverage: float) -> None:
    """Refuses a dataset that holds too few of the clips that its source lists, such as 50 of 5233."""
    rows, wanted = len(tokens), tokens.info.get("wanted", len(tokens))
    say(f"{tokens.folder}: {rows} of {wanted} clips of its source are encoded ({100 * rows / max(1, wanted):.1f} %)")
    if rows < min_coverage * wanted:
        raise UserError(
            f"{tokens.folder} holds {rows} of the {wanted} clips of its source: encode the rest (data/encode.py resumes"
            f" where it stopped), or lower --min-coverage {min_coverage:g}."
        )


class Clips:
    """The clips of a token dataset that are trained on (contracts.TrainingSet): which frames, with which caption."""

    def __init__(self, tokens: TokenDataset, layout: Layout, tokenizer: Tokenizer, config, train: bool):
        self.tokens, self.layout, self.tokenizer, self.config, self.train = tokens, layout, tokenizer, config, train
        tokens.require(codec="encodec", channels=layout.codebooks, codebook_size=layout.size)
        if tokenizer.size > layout.vocab:
            raise UserError(
                f"--model {tokenizer.source}: the tokenizer has {tokenizer.size} ids but the model only"
                f" {layout.vocab} embeddings: they do not belong together."
            )
        self.limits = limits_of(config)
        self.kept = tokens.rows_of_split(train)
        self.texts = tokenizer([tokens.text(i) for i in self.kept])
        self._check_texts()
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        room = layout.frames_in(self.limits["max_seq"] - lengths)
        # Music gets the positions that the caption leaves, in whole frames.
        self.window = np.minimum(room, self.limits["max_audio"] // layout.codebooks)
        if len(self.window) and self.window.min() < 1:
            raise UserError(f"--max-seq {self.limits['max_seq']} leaves no room for music beside the longest caption.")
        self.frames = tokens.frames[self.kept].astype(np.int64)
        self.lengths = lengths + layout.positions(np.minimum(self.frames, self.window))
        self.codebook_weights = weights = np.array(config.codebook_weights, dtype=np.float64)
        if len(weights) != layout.codebooks or not (weights >= 0).all() or not weights.any():
            raise UserError(
                f"--codebook-weights takes {layout.codebooks} numbers of 0 or more, not {config.codebook_weights}."
            )

    def __len__(self) -> int:
        return len(self.kept)

    def _check_texts(self) -> None:
        limit, policy = self.limits["max_text"], self.config.over_long_text
        long = [i for i, text in enumerate(self.texts) if len(text) > limit]
        empty = [i for i, text in enumerate(self.texts) if len(text) == 1]
        if empty and self.train and not self.config.allow_empty_text:
            raise UserError(
                f"{self.tokens.folder}: clip {self._id(empty[0])!r} has no caption ({len(empty)} in all); add"
                " captions, or use --allow-empty-text."
            )
        if not long:
            return
        if self.config.profile == "legacy" or policy == "cut":
            say(f"{len(long)} of {len(self)} captions of {self.tokens.folder} are cut to {limit} tokens")
            self.texts = [text[:limit] for text in self.texts]
        elif policy == "drop":
            say(f"warning: {len(long)} clips of {self.tokens.folder} with captions over {limit} tokens are dropped")
            keep = sorted(set(range(len(self))) - set(long))
            self.kept, self.texts = self.kept[keep], [self.texts[i] for i in keep]
        else:
            raise UserError(
                f"{self.tokens.folder}: the caption of clip {self._id(long[0])!r} has {len(self.texts[long[0]])}"
                f" tokens, over --max-text {limit} ({len(long)} in all): raise it, or use --over-long-text drop or cut."
            )

    def _id(self, clip: int) -> str:
        return self.tokens.id(self.kept[clip])

    def ids(self, clips) -> list[str]:
        return [self._id(clip) for clip in clips]

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    def part(self, clip: int, epoch: int) -> tuple[int, int, bool]:
        """First frame, end frame and whether the clip's true end is included; training windows start anywhere."""
        frames, window = int(self.frames[clip]), int(self.window[clip])
        if frames <= window:
            return 0, frames, True
        start = 0
        if self.train:
            start = int(keyed_random.uniform(self.config.seed, epoch, self._id(clip), "window") * (frames - window + 1))
        return start, start + window, start + window == frames

    def target_weight(self, clips, epoch: int = 0) -> float:
        """Sum of the loss weights of these clips' targets, from lengths alone. Must agree with compute_loss."""
        total = 0.0
        for clip in clips:
            start, end, final = self.part(clip, epoch)
            total += float((self.codebook_weights * self.layout.targets(end - start, final)).sum())
        return total

    def text(self, clip: int, epoch: int) -> np.ndarray:
        """The caption's ids; a keyed fraction of the training samples has no caption."""
        dropped = keyed_random.uniform(self.config.seed, epoch, self._id(clip), "caption") < self.config.text_dropout
        return self.tokenizer.no_text if self.train and dropped else self.texts[clip]

    def batch(self, clips, epoch: int = 0, texts: list[np.ndarray] | None = None) -> dict:
        """These clips as right-padded tensors; `texts`: captions to use instead of their own."""
        rows = []
        for number, clip in enumerate(clips):
            start, end, final = self.part(clip, epoch)
            try:
                sequence = music(self.tokens.codes(self.kept[clip])[start:end], self.layout, final)
            except UserError as error:
                raise UserError(f"{self.tokens.folder}: clip {self._id(clip)!r}: {error}") from None
            rows.append((self.text(clip, epoch) if texts is None else texts[number], *sequence))
        return pad(rows, self.layout) | {"ids": self.ids(clips)}


def pad(rows: list[tuple], layout: Layout) -> dict:
    """Rows of (text, input ids, codebooks, labels) as one right-padded batch.

    input_ids and codebooks (B, L, channels), labels (B, L, C), mask (B, L).
    """
    longest = max(len(text) + len(ids) for text, ids, *_ in rows)
    shape = (len(rows), longest)
    ids = np.zeros((*shape, layout.channels), dtype=np.int64)
    books = np.zeros_like(ids)
    labels = np.full((*shape, layout.codebooks), IGNORE, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, (text, row_ids, row_books, row_labels) in enumerate(rows):
        first, end = len(text), len(text) + len(row_ids)
        ids[row, :first] = text[:, None]
        ids[row, first:end], books[row, first:end], labels[row, first:end] = row_ids, row_books, row_labels
        mask[row, :end] = 1
    tensors = {"input_ids": ids, "codebooks": books, "labels": labels, "mask": mask}
    return {name: torch.from_numpy(value) for name, value in tensors.items()} | {"positions": mask.size}
