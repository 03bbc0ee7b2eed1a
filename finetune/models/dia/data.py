"""A token dataset as Dia's training set. Shapes as in layout.py."""

import numpy as np
import torch

from common import keyed_random
from common.errors import UserError
from common.holdout import rows_to_use
from common.loss import IGNORE
from common.runtime import say, still_alive
from common.tokens import TokenDataset
from models.dia.layout import Layout, augment_tags, continue_text, delayed, text_bytes, with_speaker

VOICES = 8  # clips of about the same length, of which each epoch takes one as a voice prompt
CHANNEL_WEIGHTS = {"equal": (1.0,), "first4x": (4.0, 1.0)}  # the last value applies to all further channels

# ---- batches ---------------------------------------------------------------------------------------------------


class Clips:
    """The clips of a token dataset that Dia trains on (contracts.TrainingSet): which part of each, with which text."""

    def __init__(self, tokens: TokenDataset, layout: Layout, config, tag_map: dict[str, int], train: bool):
        self.tokens, self.layout, self.config, self.tag_map, self.train = (
            tokens,
            layout,
            config,
            tag_map,
            train,
        )
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
        self._choose_voices()
        self.channel_weights = _channel_weights(config.channel_weights, layout.channels)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def heard(self) -> np.ndarray:
        """Dataset rows whose codes the model gets to see."""
        return self.kept

    def _check_texts(self) -> None:
        """Finds over-long, missing and broken texts before training. NFC can at most triple the bytes of a text."""
        limit, too_long = self.layout.max_text, []
        is_kept = np.zeros(len(self.tokens), dtype=bool)
        is_kept[self.kept] = True
        odd = self.tokens.texts_matching(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
        for i in odd[is_kept[odd]]:
            for text in self.tokens.texts(i):
                text_bytes(text, self.tag_map, self.tokens.id(i))  # raises, naming the character
        long = self.tokens.long_texts(limit // 3)
        for i in long[is_kept[long]]:
            still_alive()
            texts = [with_speaker(text, self.config.text_mode) for text in self.tokens.texts(i)]
            if self.config.text_mode == "tags":
                texts += [augment_tags(text, 0.0, 0) for text in texts]  # "a,b" is longer as "a, b"
            size = max(len(text_bytes(text, self.tag_map, self.tokens.id(i))) for text in texts)
            if size > limit:
                if self.config.over_long_text == "error":
                    raise UserError(
                        f"{self.tokens.folder}: the text of clip {self.tokens.id(i)!r} has {size} bytes, the model"
                        f" takes {limit}; shorten it or use --over-long-text drop."
                    )
                too_long.append(i)
        empty = is_kept.copy()
        empty[self.tokens.long_texts(0)] = False
        empty = np.flatnonzero(empty)
        if len(empty) and not self.config.allow_empty_text:
            raise UserError(
                f"{self.tokens.folder}: clip {self.tokens.id(int(empty[0]))!r} has no text ({len(empty)} in all);"
                " add texts, or use --allow-empty-text."
            )
        is_kept[too_long] = False
        self.kept = self.kept[is_kept[self.kept]]
        self.dropped += len(too_long)

    def _text(self, i: int, epoch: int) -> str:
        """The text of a row; in training, one of its texts, another in each epoch."""
        texts = self.tokens.texts(i)
        chosen = 0
        if self.train and len(texts) > 1:
            draw = keyed_random.uniform(self.config.seed, epoch, self.tokens.id(i), "transcript")
            chosen = int(draw * len(texts))
        return with_speaker(texts[chosen], self.config.text_mode)

    def _choose_voices(self) -> None:
        """Draws which clips continue another one (--voice-prompt), and adds what that takes to their lengths.

        The clips of each speaker are put in order of length. A drawn clip gets a place there, the same in all epochs,
        and continues one of the VOICES clips up to that place: another in each epoch, yet never longer than planned.
        """
        self._voices = None
        config, speakers = self.config, self.tokens.column("speaker")
        if not config.voice_prompt or (speakers is None and not self.train):
            return
        if config.text_mode != "speech":
            raise UserError("--voice-prompt is for --text-mode speech: it continues a transcript.")
        if speakers is None:
            raise UserError(f"--voice-prompt: {self.tokens.folder} does not name the speakers of its clips.")
        speaker = speakers.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy().astype(np.int64)
        speaker, frames = speaker[self.kept], self.tokens.frames[self.kept].astype(np.int64)
        rate = self.tokens.info["sample_rate"] / self.tokens.info["hop"]
        room = np.minimum(self.layout.max_positions - self.lengths, int(config.voice_prompt_seconds * rate))
        order = np.lexsort((frames, speaker))
        own = np.empty_like(order)
        own[order] = np.arange(len(order))
        key, base = (speaker * 2**32 + frames)[order], speaker * 2**32
        first, end = np.searchsorted(key, base), np.searchsorted(key, base + room, side="right")
        others = end - first - ((first <= own) & (own < end))
        drawn, place = keyed_random.generator(config.seed, "voice_prompt").random((2, len(self)))
        last = first + (place * others).astype(np.int64)
        last += (first <= own) & (own <= last)  # a clip does not continue itself
        prompted = (drawn < config.voice_prompt) & (others > 0) & (speaker >= 0)
        if self.train and not prompted.any():
            raise UserError(
                f"--voice-prompt: no clip in {self.tokens.folder} can follow another by the same speaker of at most"
                f" {config.voice_prompt_seconds:g} s (--voice-prompt-seconds) so that both fit into the model."
            )
        self.lengths[prompted] += frames[order[last[prompted]]]
        self._voices = order, prompted, first, last, own

    def voice(self, clip: int, epoch: int) -> int | None:
        """The row of the dataset that this clip continues; None if it stands alone."""
        if self._voices is None:
            return None
        order, prompted, first, last, own = self._voices
        if not prompted[clip]:
            return None
        name, low = self.tokens.id(self.kept[clip]), max(first[clip], last[clip] - VOICES + 1)
        count = last[clip] - low + 1 - (low <= own[clip] < last[clip])
        place = low + int(keyed_random.uniform(self.config.seed, epoch, name, "voice") * count)
        place += low <= own[clip] <= place
        row = int(self.kept[order[place]])
        text = continue_text(self._text(row, epoch), self._text(self.kept[clip], epoch))
        return row if len(text_bytes(text, self.tag_map, name)) <= self.layout.max_text else None

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
        name, text, voice = self.tokens.id(i), self._text(i, epoch), self.voice(clip, epoch)
        if voice is not None:
            text = continue_text(self._text(voice, epoch), text)
        if self.train and config.text_mode == "tags":
            text = augment_tags(text, config.tag_dropout, config.tag_limit, config.seed, epoch, name)
        ids = text_bytes(text, self.tag_map, name)
        if self.train:
            if keyed_random.uniform(config.seed, epoch, name, "text_dropout") < config.text_dropout:
                # Zero ids but the same mask, as in generation: with a zero mask the model computes something else.
                ids = np.zeros(len(ids), dtype=np.uint8)
        return ids if len(ids) else np.zeros(1, dtype=np.uint8)

    def batch(self, clips, epoch: int = 0) -> dict:
        """These clips as right-padded tensors."""
        layout = self.layout
        texts, sequences, names = [], [], []
        for clip in clips:
            start, end, positions, final = self.part(clip, epoch)
            codes, context = self._codes(self.kept[clip])[start:end], 0
            name, voice = self.tokens.id(self.kept[clip]), self.voice(clip, epoch)
            if voice is not None:
                context = len(self._codes(voice))
                codes = np.concatenate([self._codes(voice), codes])
            texts.append(self.text(clip, epoch))
            sequences.append(delayed(codes, layout, positions + context, final, context))
            names.append(name)
        input_ids, attention_mask = pad_texts(texts)
        longest = max(len(inputs) for inputs, _ in sequences)
        ids = np.full((len(clips), longest, layout.channels), layout.pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORE)
        mask = np.zeros((len(clips), longest), dtype=np.int64)
        for row, (inputs, targets) in enumerate(sequences):
            ids[row, : len(inputs)], labels[row, : len(targets)], mask[row, : len(inputs)] = (
                inputs,
                targets,
                1,
            )
        # Known here, so that nothing has to ask the GPU for them: positions of the flattened batch with a target.
        targets = np.flatnonzero((labels != IGNORE).any(-1))
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": torch.from_numpy(ids),
            "decoder_attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
            "targets": torch.from_numpy(targets),
            "channel_weights": torch.as_tensor(self.channel_weights, dtype=torch.float32),
            "ids": names,
            "positions": mask.size,
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
        if self._voices is not None:
            say(f"voice prompts: {self._voices[1].sum():,} of {len(self):,} clips follow another by the same speaker")
        if self.config.text_dropout == 0 and self.train:
            say("warning: --text-dropout 0 trains no unconditional samples: guidance above 1 will sound worse")
        if self.config.text_mode == "speech":
            odd = self.tokens.texts_matching(r"^\s*\[S2\]|\[S1\][^\[]*\[S1\]|\[S2\][^\[]*\[S2\]")
            if len(odd):
                say(f"warning: in {len(odd)} texts the speakers do not begin with [S1] or do not alternate")


class WithRehearsal:
    """New clips, followed by rehearsal clips against forgetting. A micro-batch holds only one kind (plan.Mix)."""

    def __init__(self, clips: Clips, rehearsal: Clips):
        self.parts = (clips, rehearsal)
        self.config, self.layout, self.channel_weights = clips.config, clips.layout, clips.channel_weights
        self.lengths = np.concatenate([clips.lengths, rehearsal.lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def _own(self, indices) -> tuple[Clips, np.ndarray]:
        indices, first = np.asarray(indices), len(self.parts[0])
        return (self.parts[1], indices - first) if indices[0] >= first else (self.parts[0], indices)

    def batch(self, indices, epoch: int = 0) -> dict:
        clips, own = self._own(indices)
        return clips.batch(own, epoch)

    def target_weight(self, indices, epoch: int = 0) -> float:
        clips, own = self._own(indices)
        return clips.target_weight(own, epoch)

    def ids(self, indices) -> list[str]:
        clips, own = self._own(indices)
        return clips.ids(own)

    def fingerprint(self) -> dict:
        return {"data": self.parts[0].tokens.fingerprint(), "rehearsal": self.parts[1].tokens.fingerprint()}


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
