"""A token dataset as Llama MoT's training set: tokenizers, which part of a clip is used, padding, coverage.

Shapes: B clips, L positions, C codebooks.
"""

import json
from pathlib import Path

import numpy as np
import torch

from common import hub, keyed_random
from common.errors import UserError
from common.holdout import rows_to_use
from common.loss import IGNORE
from common.runtime import Process, say
from common.text_lengths import count_tokens
from common.tokens import TokenDataset
from models.mot.layout import Layout, music
from models.mot.meta import is_tiktoken, read_tiktoken

# Maximum positions per sequence, tokens per caption (with BOS) and codes per clip.
PROFILES = {
    "default": {"max_seq": 2304, "max_text": 192, "max_audio": 2000},
    "legacy": {"max_seq": 1024, "max_text": 31, "max_audio": 992},
}


# ---- text ------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Llama-3's fast tokenizer (tokenizer.json), or tokenizer.model in the format of tiktoken (Meta's Llama 3) or of
    SentencePiece."""

    def __init__(self, path: str):
        folder = hub.folder(path)
        self.source = path
        only_model = not (folder / "tokenizer.json").is_file()
        if only_model and not (folder / "tokenizer.model").is_file():
            raise UserError(f"--model {path} has neither tokenizer.json nor tokenizer.model.")
        if only_model and not is_tiktoken(folder / "tokenizer.model"):
            from sentencepiece import SentencePieceProcessor

            try:
                model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
            except (OSError, RuntimeError) as error:
                raise UserError(f"--model {path}: tokenizer.model is not a SentencePiece model ({error}).") from None
            self.encode_all, self.bos, self.size = model.encode, model.bos_id(), model.vocab_size()
            self.identity = lambda: repr(model.serialized_model_proto())
            self.piece = model.id_to_piece
        else:
            model = read_tiktoken(folder / "tokenizer.model") if only_model else load_tokenizer(path, folder)
            self.encode_all = lambda texts: model(texts, add_special_tokens=False).input_ids
            self.bos, self.size = model.bos_token_id, len(model)
            self.piece = lambda number: model.decode([number])
            self.identity = lambda: model.backend_tokenizer.to_str()  # changes with anything that ids depend on
        if self.bos is None or self.bos < 0:
            raise UserError(f"--model {path}: its tokenizer has no BOS token, with which every sequence begins.")

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, after BOS."""
        return [np.array([self.bos, *ids], dtype=np.int64) for ids in self.encode_all(texts)] if texts else []

    @property
    def no_text(self) -> np.ndarray:
        """The empty caption, which guidance compares with."""
        return np.array([self.bos], dtype=np.int64)


def load_tokenizer(path: str, folder: Path):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no usable tokenizer ({str(error).splitlines()[0]})") from None


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

    def __init__(
        self,
        tokens: TokenDataset,
        layout: Layout,
        tokenizer: Tokenizer,
        config,
        train: bool,
        process: Process | None = None,
    ):
        self.tokens, self.layout, self.tokenizer, self.config, self.train = tokens, layout, tokenizer, config, train
        tokens.require(codec="encodec", channels=layout.codebooks, codebook_size=layout.size)
        if tokenizer.size > layout.vocab:
            raise UserError(
                f"--model {tokenizer.source}: the tokenizer has {tokenizer.size} ids but the model only"
                f" {layout.vocab} embeddings: they do not belong together."
            )
        self.limits = limits_of(config)
        self.kept = rows_to_use(tokens, config, train)
        self.weights = tokens.weights()  # of the clips' losses; None: all alike
        if train and self.weights is not None:
            self.kept = self.kept[self.weights[self.kept] > 0]
        sizes = count_tokens(
            lambda part: [len(ids) for ids in tokenizer([tokens.text(self.kept[clip]) for clip in part])],
            tokens,
            self.kept,
            tokenizer.identity,
            process,
        )
        lengths = self.text_room = self._check_texts(sizes[:, 0].astype(np.int64))
        if train and config.aspect_captions:
            lengths = self.text_room = np.maximum(lengths, self._aspect_sizes(process))
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

    @property
    def heard(self) -> np.ndarray:
        """Dataset rows whose codes the model gets to see."""
        return self.kept

    def _check_texts(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens per caption as it is used; over-long captions are refused, cut, or dropped with their clips."""
        limit, policy = self.limits["max_text"], self.config.over_long_text
        long, empty = np.flatnonzero(sizes > limit), np.flatnonzero(sizes == 1)
        if len(empty) and self.train and not self.config.allow_empty_text:
            raise UserError(
                f"{self.tokens.folder}: clip {self._id(empty[0])!r} has no caption ({len(empty)} in all); add"
                " captions, or use --allow-empty-text."
            )
        if not len(long):
            return sizes
        if self.config.profile == "legacy" or policy == "cut":
            say(f"{len(long)} of {len(self)} captions of {self.tokens.folder} are cut to {limit} tokens")
            return np.minimum(sizes, limit)
        if policy == "drop":
            say(f"warning: {len(long)} clips of {self.tokens.folder} with captions over {limit} tokens are dropped")
            self.kept = self.kept[sizes <= limit]
            return sizes[sizes <= limit]
        raise UserError(
            f"{self.tokens.folder}: the caption of clip {self._id(long[0])!r} has {sizes[long[0]]}"
            f" tokens, over --max-text {limit} ({len(long)} in all): raise it, or use --over-long-text drop or cut."
        )

    def _aspect_sizes(self, process: Process | None) -> np.ndarray:
        """Tokens per list of aspects in its own order."""
        if self.tokens.column("aspects") is None:
            raise UserError(
                f"--aspect-captions: {self.tokens.folder} has no aspects; encode it again with --format musiccaps,"
                " from a CSV with the column aspect_list."
            )

        def count(part: range) -> list[int]:
            return [len(ids) for ids in self.tokenizer([", ".join(self._aspects(clip)) for clip in part])]

        def depends_on() -> str:
            return f"{self.tokenizer.identity()} aspects"

        sizes = count_tokens(count, self.tokens, self.kept, depends_on, process)
        return np.minimum(sizes[:, 0].astype(np.int64), self.limits["max_text"])

    def _aspects(self, clip: int) -> list[str]:
        return json.loads(self.tokens.label("aspects", self.kept[clip]) or "[]")

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
            weight = 1.0 if self.weights is None else self.weights[self.kept[clip]]
            total += float(weight * (self.codebook_weights * self.layout.targets(end - start, final)).sum())
        return total

    def caption(self, clip: int) -> np.ndarray:
        """The clip's own caption's ids."""
        [ids] = self.tokenizer([self.tokens.text(self.kept[clip])])
        return ids[: self.limits["max_text"]]

    def text(self, clip: int, epoch: int) -> np.ndarray:
        """The caption's ids; a keyed fraction of the training samples has no caption."""
        key = (self.config.seed, epoch, self._id(clip))
        dropped = keyed_random.uniform(*key, "caption") < self.config.text_dropout
        if self.train and not dropped and keyed_random.uniform(*key, "aspects") < self.config.aspect_captions:
            aspects = self._aspects(clip)
            if aspects:
                order = keyed_random.generator(*key, "aspect order").permutation(len(aspects))
                [ids] = self.tokenizer([", ".join(aspects[i] for i in order)])
                return ids[: self.text_room[clip]]  # another order may take a token more than the listed one
        return self.tokenizer.no_text if self.train and dropped else self.caption(clip)

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
        weights = torch.as_tensor(self.codebook_weights, dtype=torch.float32)
        batch = pad(rows, self.layout) | {"codebook_weights": weights, "ids": self.ids(clips)}
        if self.weights is not None:  # of all positions (B x L)
            weights = torch.as_tensor(self.weights[self.kept[np.asarray(clips)]], dtype=torch.float32)
            batch["position_weights"] = weights.repeat_interleave(batch["mask"].shape[1])
        return batch


def pad(rows: list[tuple], layout: Layout) -> dict:
    """Rows of (text, input ids, codebooks, labels) as one right-padded batch.

    input_ids and codebooks (B, L, channels), labels (B, L, C), mask (B, L), and what `places` tells.
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
    batch = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return batch | places(ids, mask, labels, layout) | {"positions": mask.size}


def places(ids: np.ndarray, mask: np.ndarray, labels: np.ndarray, layout: Layout) -> dict:
    """Where in the flattened batch text and music are (`order` and `back`, see network.Route), and the labels of each
    codebook, one codebook after the other. Known here, so that nothing has to ask the GPU for it."""
    real, is_music = mask.astype(bool), ids[..., 0] >= layout.vocab
    kinds = [np.flatnonzero(real & ~is_music), np.flatnonzero(real & is_music)]
    targets = [np.flatnonzero(labels[..., k] != IGNORE) for k in range(layout.codebooks)]
    order, back = np.concatenate(kinds), np.zeros(mask.size, dtype=np.int64)
    back[order] = np.arange(len(order))
    tensors = {"order": order, "back": back, "targets": np.concatenate(targets)}
    counts = {"kind_counts": list(map(len, kinds)), "target_counts": list(map(len, targets))}
    return {name: torch.from_numpy(value) for name, value in tensors.items()} | counts
