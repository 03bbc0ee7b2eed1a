"""A token dataset as Llama MoT's training set: tokenizer, which part of a clip is used, padding, coverage.

Shapes: B clips, L positions, C codebooks.
"""

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

MAX_TEXT = 192  # tokens per caption, with BOS; MusicCaps' longest has about 150


# ---- text ------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Llama-3's tokenizer (tokenizer.json)."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        folder = hub.folder(path)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"--model {path} has no tokenizer.json.")
        try:
            self.model = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {path}: no usable tokenizer ({str(error).splitlines()[0]})") from None
        self.source, self.bos, self.size = path, self.model.bos_token_id, len(self.model)
        if self.bos is None:
            raise UserError(f"--model {path}: its tokenizer has no BOS token, with which every sequence begins.")

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, after BOS."""
        if not texts:
            return []
        encoded = self.model(texts, add_special_tokens=False).input_ids
        return [np.array([self.bos, *ids], dtype=np.int64) for ids in encoded]

    def identity(self) -> str:
        """Changes with anything that the ids of a text depend on."""
        return self.model.backend_tokenizer.to_str()

    def piece(self, number: int) -> str:
        return self.model.decode([number])

    @property
    def no_text(self) -> np.ndarray:
        """The empty caption, which guidance compares with."""
        return np.array([self.bos], dtype=np.int64)


# ---- clips -----------------------------------------------------------------------------------------------------


def check_coverage(tokens: TokenDataset) -> None:
    """Refuses a dataset that holds less than half of the clips that its source lists, such as 50 of 5233."""
    rows, wanted = len(tokens), tokens.info.get("wanted", len(tokens))
    say(f"{tokens.folder}: {rows} of {wanted} clips of its source are encoded ({100 * rows / max(1, wanted):.1f} %)")
    if rows < wanted / 2:
        raise UserError(
            f"{tokens.folder} holds {rows} of the {wanted} clips of its source: encode the rest (data/encode.py resumes"
            " where it stopped), or list only the clips that you have in the source."
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
        text_lengths = self._check_texts(sizes[:, 0].astype(np.int64))
        self.window = config.max_audio // layout.codebooks  # frames
        self.frames = tokens.frames[self.kept].astype(np.int64)
        self.lengths = text_lengths + layout.positions(np.minimum(self.frames, self.window))
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
        long, empty = np.flatnonzero(sizes > MAX_TEXT), np.flatnonzero(sizes == 1)
        if len(empty) and self.train and not self.config.allow_empty_text:
            raise UserError(
                f"{self.tokens.folder}: clip {self._id(empty[0])!r} has no caption ({len(empty)} in all); add"
                " captions, or use --allow-empty-text."
            )
        if not len(long):
            return sizes
        if self.config.over_long_text == "cut":
            say(f"{len(long)} of {len(self)} captions of {self.tokens.folder} are cut to {MAX_TEXT} tokens")
            return np.minimum(sizes, MAX_TEXT)
        if self.config.over_long_text == "drop":
            say(f"warning: {len(long)} clips of {self.tokens.folder} with captions over {MAX_TEXT} tokens are dropped")
            self.kept = self.kept[sizes <= MAX_TEXT]
            return sizes[sizes <= MAX_TEXT]
        raise UserError(
            f"{self.tokens.folder}: the caption of clip {self._id(long[0])!r} has {sizes[long[0]]} tokens, over the"
            f" limit of {MAX_TEXT} ({len(long)} in all): shorten it, or use --over-long-text drop or cut."
        )

    def _id(self, clip: int) -> str:
        return self.tokens.id(self.kept[clip])

    def ids(self, clips) -> list[str]:
        return [self._id(clip) for clip in clips]

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    def part(self, clip: int, epoch: int) -> tuple[int, int, bool]:
        """First frame, end frame and whether the clip's true end is included; training windows start anywhere."""
        frames, window = int(self.frames[clip]), self.window
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
        return ids[:MAX_TEXT]

    def text(self, clip: int, epoch: int) -> np.ndarray:
        """The caption's ids; a keyed fraction of the training samples has no caption."""
        draw = keyed_random.uniform(self.config.seed, epoch, self._id(clip), "caption")
        if self.train and draw < self.config.text_dropout:
            return self.tokenizer.no_text
        return self.caption(clip)

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
