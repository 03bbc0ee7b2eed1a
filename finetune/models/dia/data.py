"""A token dataset as Dia's training set. Shapes as in layout.py."""

import numpy as np
import torch

from common import keyed_random
from common.errors import UserError
from common.holdout import rows_to_use
from common.loss import IGNORE
from common.runtime import say, still_alive
from common.tokens import TokenDataset
from models.dia.layout import Layout, augment_tags, delayed, text_bytes, with_speaker

CHANNEL_WEIGHTS = {"equal": (1.0,), "first4x": (4.0, 1.0)}  # the last value applies to all further channels

# ---- batches ---------------------------------------------------------------------------------------------------


class Clips:
    """The clips of a token dataset that Dia trains on (contracts.TrainingSet): which part of each, with which text."""

    def __init__(self, tokens: TokenDataset, layout: Layout, config, tag_map: dict[str, int], train: bool):
        self.tokens, self.layout, self.config = tokens, layout, config
        self.tag_map, self.train = tag_map, train
        # The ids right after the codes are EOS, PAD and BOS: a larger codebook would reach into them.
        tokens.require(codec="dac", channels=layout.channels, codebook_size=layout.eos)
        if config.over_long == "crop" and config.text_mode == "speech":
            raise UserError("--over-long crop is for --text-mode tags: a transcript belongs to its whole clip.")
        if not config.max_seconds >= 0:
            raise UserError(f"--max-seconds {config.max_seconds:g} is negative or not a number.")
        window = layout.max_positions
        if config.max_seconds:
            # The frame rate comes from the dataset's codec, never from a literal.
            rate = tokens.info["sample_rate"] / tokens.info["hop"]
            window = int(min(window, config.max_seconds * rate + layout.tail))
            if window <= layout.tail:
                raise UserError(f"--max-seconds {config.max_seconds:g} is less than one frame ({1 / rate:.3f} s).")
        self.window = window
        whole = tokens.frames + layout.tail
        self.kept = rows_to_use(tokens, config, train)
        self.weights = tokens.weights()  # of the clips' losses; None: all alike
        if train and self.weights is not None:
            self.kept = self.kept[self.weights[self.kept] > 0]
        self.dropped = 0
        too_long = whole[self.kept] > window
        if too_long.any() and config.over_long != "crop":
            longest = int(self.kept[np.argmax(whole[self.kept])])
            if config.over_long == "error":
                raise UserError(
                    f"{tokens.folder}: clip {tokens.id(longest)!r} takes {whole[longest]} positions, over the limit"
                    f" of {window} (--max-seconds and the model's own); use --over-long drop, or crop for tag prompts."
                )
            self.kept, self.dropped = self.kept[~too_long], int(too_long.sum())
        self._check_texts()
        self.lengths = np.minimum(whole[self.kept], window).astype(np.int64)
        self.channel_weights = _channel_weights(config.channel_weights, layout.channels)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def heard(self) -> np.ndarray:
        """Dataset rows whose codes the model gets to see."""
        return self.kept

    def _check_texts(self) -> None:
        """Refuses broken texts, and refuses or drops over-long ones, before training."""
        tokens, limit = self.tokens, self.layout.max_text
        broken = tokens.texts_matching(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
        for i in np.intersect1d(broken, self.kept):
            for text in tokens.texts(i):
                text_bytes(text, self.tag_map, tokens.id(i))  # raises, naming the character
        too_long = []
        for i in np.intersect1d(tokens.long_texts(limit // 3), self.kept):  # NFC can triple the bytes of a text
            still_alive()
            texts = [with_speaker(text, self.config.text_mode) for text in tokens.texts(i)]
            if self.config.text_mode == "tags":
                texts += [augment_tags(text, 0.0) for text in texts]  # "a,b" is longer as "a, b"
            size = max(len(text_bytes(text, self.tag_map, tokens.id(i))) for text in texts)
            if size <= limit:
                continue
            if self.config.over_long != "drop":
                raise UserError(
                    f"{tokens.folder}: the text of clip {tokens.id(i)!r} has {size} bytes, the model takes {limit};"
                    " shorten it, or use --over-long drop."
                )
            too_long.append(i)
        self.kept = self.kept[~np.isin(self.kept, too_long)]
        self.dropped += len(too_long)
        self.without_text = np.setdiff1d(self.kept, tokens.long_texts(0))
        if len(self.without_text) and self.config.text_mode == "speech":
            raise UserError(
                f"{tokens.folder}: clip {tokens.id(int(self.without_text[0]))!r} has no text ({len(self.without_text)}"
                " in all); add the transcripts, or leave these clips out."
            )

    def _text(self, i: int, epoch: int) -> str:
        """The text of a row; in training, one of its texts, another in each epoch."""
        texts = self.tokens.texts(i)
        chosen = 0
        if self.train and len(texts) > 1:
            draw = keyed_random.uniform(self.config.seed, epoch, self.tokens.id(i), "transcript")
            chosen = int(draw * len(texts))
        return with_speaker(texts[chosen], self.config.text_mode)

    def part(self, clip: int, epoch: int) -> tuple[int, int, int, bool]:
        """First frame, end frame, decoder positions, and whether the clip's true end is included."""
        i = self.kept[clip]
        frames, tail = int(self.tokens.frames[i]), self.layout.tail
        if frames + tail <= self.window:
            return 0, frames, frames + tail, True
        last = frames - (self.window - tail)  # from here the rest of the clip and its EOS fit
        start = 0
        if self.train:
            start = int(keyed_random.uniform(self.config.seed, epoch, self.tokens.id(i), "window") * (last + 1))
        if start + self.window > frames:
            return last, frames, self.window, True
        return start, start + self.window, self.window, False

    def target_weight(self, clips, epoch: int = 0) -> float:
        """Sum of the loss weights of these clips' targets, from lengths alone; must agree with compute_loss."""
        total = 0.0
        eos_extra = self.config.eos_weight - 1
        for clip in clips:
            start, end, positions, final = self.part(clip, epoch)
            if final:
                weight = self.channel_weights.sum() * (end - start + 1 + eos_extra)
            else:
                weight = (self.channel_weights * np.maximum(0, positions - np.array(self.layout.delay))).sum()
            total += weight if self.weights is None else weight * self.weights[self.kept[clip]]
        return total

    def text(self, clip: int, epoch: int) -> np.ndarray:
        """Byte ids; all zero for a keyed fraction of the samples, the unconditional input of guidance."""
        i, config = self.kept[clip], self.config
        name, text = self.tokens.id(i), self._text(i, epoch)
        if self.train and config.text_mode == "tags":
            text = augment_tags(text, config.tag_dropout, config.seed, epoch, name)
        ids = text_bytes(text, self.tag_map, name)
        if self.train:
            if keyed_random.uniform(config.seed, epoch, name, "text_dropout") < config.text_dropout:
                # Zero ids but the same mask, as in generation: with a zero mask the model computes something else.
                ids = np.zeros(len(ids), dtype=np.uint8)
        return ids if len(ids) else np.zeros(1, dtype=np.uint8)

    def batch(self, clips, epoch: int = 0) -> dict:
        """These clips as right-padded tensors."""
        layout = self.layout
        texts, sequences = [], []
        for clip in clips:
            start, end, positions, final = self.part(clip, epoch)
            codes = self._codes(self.kept[clip])[start:end]
            texts.append(self.text(clip, epoch))
            sequences.append(delayed(codes, layout, positions, final))
        input_ids, attention_mask = pad_texts(texts)
        longest = max(len(inputs) for inputs, _ in sequences)
        ids = np.full((len(clips), longest, layout.channels), layout.pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORE)
        for row, (inputs, targets) in enumerate(sequences):
            ids[row, : len(inputs)] = inputs
            labels[row, : len(targets)] = targets
        # Known here, so that nothing has to ask the GPU for them: positions of the flattened batch with a target.
        targets = np.flatnonzero((labels != IGNORE).any(-1))
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "targets": torch.from_numpy(targets),
            "channel_weights": torch.as_tensor(self.channel_weights, dtype=torch.float32),
            "ids": self.ids(clips),
            "positions": len(clips) * longest,
        }
        if self.weights is not None:
            weights = self.weights[self.kept[np.asarray(clips)]].astype(np.float32)
            batch["label_weights"] = torch.from_numpy(weights[targets // longest, None])  # (N, 1)
        return batch

    def _codes(self, row: int) -> np.ndarray:
        codes = self.tokens.codes(row)
        # An id in another channel's range would silently select that channel's embedding.
        if codes.min() < 0 or codes.max() >= self.tokens.info["codebook_size"]:
            code = min(codes.min(), 0) or codes.max()
            raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(row)!r} holds the code {code}, out of range.")
        return codes

    def ids(self, clips) -> list[str]:
        return [self.tokens.id(self.kept[clip]) for clip in clips]

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    def warn(self) -> None:
        """Warns about what can be trained but is probably a mistake."""
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and were dropped")
        if len(self.without_text):
            say(f"warning: {len(self.without_text)} clips of {self.tokens.folder} have no text")
        if self.config.text_dropout == 0 and self.train:
            say("warning: --text-dropout 0 trains no unconditional samples: guidance above 1 will sound worse")
        if self.config.text_mode == "speech":
            odd = self.tokens.texts_matching(r"^\s*\[S2\]|\[S1\][^\[]*\[S1\]|\[S2\][^\[]*\[S2\]")
            if len(odd):
                say(f"warning: in {len(odd)} texts the speakers do not begin with [S1] or do not alternate")


def _channel_weights(name: str, channels: int) -> np.ndarray:
    values = CHANNEL_WEIGHTS[name]
    return np.array([values[min(c, len(values) - 1)] for c in range(channels)])


def pad_texts(texts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, S) padded right with 0, and the mask, from lengths: unconditional texts are all 0 too."""
    longest = max(1, max(map(len, texts)))
    ids = np.zeros((len(texts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
