"""The sequence layout of Higgs Audio v2: delayed streams, labels, rows with placeholders, batches, labelled states.

Shapes: B rows, S positions on the text axis, F audio frames, K codebooks, T codec frames, D width, N positions with a
target.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.config import UserError
from common.lora import base_model
from common.loss import IGNORE

# ---- layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The facts of a Higgs checkpoint that a batch depends on."""

    codebooks: int
    bos: int  # first and last id of a codebook's stream
    eos: int
    audio: int  # placeholder on the text axis, one per audio frame
    delay: int  # placeholder for the last K - 1 frames of a segment
    audio_bos: int
    pad: int
    max_positions: int

    @property
    def tail(self) -> int:
        """Frames that a segment has beyond its codec frames: BOS, EOS and the longest delay."""
        return self.codebooks + 1


def layout_of(config, tokenizer) -> Layout:
    """Layout of a model config; its token ids must be the tokenizer's ids of the tokens in the chat template."""
    names = {
        "audio_token_id": "<|AUDIO_OUT|>",
        "audio_bos_token_id": "<|audio_out_bos|>",
        "audio_delay_token_id": "<|reserved_special_token_6|>",
        "pad_token_id": tokenizer.pad_token,
    }
    for field, token in names.items():
        token_id = tokenizer.convert_tokens_to_ids(token) if token else None
        if token_id != getattr(config, field):
            raise UserError(
                f"--model: config.json says {field} = {getattr(config, field)} but the tokenizer has {token!r} as"
                f" {token_id}: model and tokenizer are from different checkpoints."
            )
    top = max(config.audio_stream_bos_id, config.audio_stream_eos_id)
    if config.codebook_size <= top:  # as in the class's default; training would end in an opaque device assert on a GPU
        raise UserError(
            f"--model: codebook_size {config.codebook_size} has no room for the stream ids up to {top}; the published"
            " checkpoint has 1026."
        )
    return Layout(
        codebooks=config.num_codebooks,
        bos=config.audio_stream_bos_id,
        eos=config.audio_stream_eos_id,
        audio=config.audio_token_id,
        delay=config.audio_delay_token_id,
        audio_bos=config.audio_bos_token_id,
        pad=config.pad_token_id,
        max_positions=config.max_position_embeddings,
    )


def delayed(codes_tk: np.ndarray, layout: Layout) -> np.ndarray:
    """The stream (T + K + 1, K): codebook k has k + 1 times BOS, its codes, then EOS to the end."""
    frames = len(codes_tk)
    stream = np.full((frames + layout.tail, layout.codebooks), layout.eos, dtype=np.int64)
    for k in range(layout.codebooks):
        stream[: k + 1, k] = layout.bos
        stream[k + 1 : k + 1 + frames, k] = codes_tk[:, k]
    return stream


def delayed_labels(stream_fk: np.ndarray, layout: Layout) -> np.ndarray:
    """Labels of a target's stream: its codes and ONE end per codebook.

    Without the end the model never learns to stop. BOS is no label, because generation forces it.
    """
    frames = len(stream_fk) - layout.tail
    labels = np.full_like(stream_fk, IGNORE)
    for k in range(layout.codebooks):
        scored = slice(k + 1, k + 2 + frames)
        labels[scored, k] = stream_fk[scored, k]
    return labels


def undelayed(stream_fk: np.ndarray, layout: Layout, frames: int) -> np.ndarray:
    """Codes (T, K) from a stream that begins with its all-BOS frame."""
    return np.stack([stream_fk[k + 1 : k + 1 + frames, k] for k in range(layout.codebooks)], axis=1)


# ---- rows and batches ------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One chat: ids (S,) with one placeholder per frame, frames (F, K) of all its audio, labels (F, K) of its target.

    A chat without audio has frames of shape (0, K). They are still passed to the model: a rank that left them out would
    skip the audio embedding, and under ZeRO-3 the other ranks would wait for it forever.
    """

    name: str
    ids: np.ndarray
    frames: np.ndarray
    labels: np.ndarray
    text_from: int  # first position of the target's turns


def build_row(name: str, ids: np.ndarray, segments: list[np.ndarray], layout: Layout, answer: bool = True) -> Row:
    """A row from `ids` with one placeholder per segment and the segments' codes (T, K).

    `answer`: the last segment is the target.
    """
    streams = [delayed(codes, layout) for codes in segments]
    places = np.flatnonzero(ids == layout.audio)
    if len(places) != len(streams):
        raise RuntimeError(f"row {name!r} has {len(places)} audio placeholders for {len(streams)} pieces of audio")
    pieces, end, text_from = [], 0, 0
    for number, (place, stream) in enumerate(zip(places, streams, strict=True)):
        if number == len(streams) - 1 and answer:
            text_from = sum(map(len, pieces))
        first = np.full(len(stream) - layout.codebooks + 1, layout.audio)
        pieces += [ids[end:place], first, np.full(layout.codebooks - 1, layout.delay)]
        end = place + 1
    pieces.append(ids[end:])
    none = np.zeros((0, layout.codebooks), dtype=np.int64)
    frames = np.concatenate([none, *streams])
    labels = np.full_like(frames, IGNORE)
    if answer and streams:
        labels[-len(streams[-1]) :] = delayed_labels(streams[-1], layout)
    row = Row(name, np.concatenate(pieces), frames, labels, text_from)
    if answer and streams:
        check_row(row, layout)
    return row


def check_row(row: Row, layout: Layout) -> None:
    """Raises if the row is inconsistent. The model does not check it: it silently accepts more frames than
    placeholders, or the frames of another row, and would train on the wrong pairs of text and audio."""
    scored = row.labels != IGNORE
    target = np.flatnonzero(scored.any(axis=1))[0] - 1 if scored.any() else 0
    last = len(scored) - 1 - scored[::-1].argmax(axis=0)  # scored frame of each codebook
    problems = {
        "placeholders and frames differ": audio_at(row.ids, layout).sum() != len(row.frames),
        "no label": not scored.any(),
        "labels differ in number": len(set(scored.sum(axis=0))) != 1,
        "an end is not trained": any(row.labels[t, k] != layout.eos for k, t in enumerate(last)),
        "an id is out of range": row.frames.min() < 0 or row.frames.max() > max(layout.bos, layout.eos),
        "the target does not begin with BOS": (row.frames[target] != layout.bos).any(),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise RuntimeError(f"row {row.name!r}: {problem}")


def audio_at(ids, layout: Layout):
    """Mask of the audio placeholders."""
    return (ids == layout.audio) | (ids == layout.delay)


def collate(rows: list[Row], layout: Layout, packed: bool = False, text_loss: bool = False) -> dict:
    """The rows as one batch of right-padded tensors.

    `packed`: all rows end to end in one, each with positions from 0, which also keeps their attention apart.
    """
    lengths = [len(row.ids) for row in rows]
    text_labels = [np.where(audio_at(row.ids, layout), IGNORE, row.ids) for row in rows]
    for row, labels in zip(rows, text_labels, strict=True):
        labels[: row.text_from] = IGNORE
    if packed:
        ids = np.concatenate([row.ids for row in rows])[None]
        frames = np.concatenate([row.frames for row in rows])[None]
        labels = np.concatenate([row.labels for row in rows])[None]
        for text in text_labels:
            text[0] = IGNORE  # it would be predicted from the last position of the row before
        texts = np.concatenate(text_labels)[None]
        where = {"position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None]}
        mask = np.ones(frames.shape[:2], dtype=bool)
    else:
        ids = _padded([row.ids for row in rows], layout.pad)
        frames = _padded([row.frames for row in rows], layout.eos)
        labels = _padded([row.labels for row in rows], IGNORE)
        texts = _padded(text_labels, IGNORE)
        where = {"attention_mask": torch.from_numpy(_padded([np.ones(n, dtype=np.int64) for n in lengths], 0))}
        mask = _padded([np.ones(len(row.frames), dtype=bool) for row in rows], False)
    batch = where | {
        "input_ids": torch.from_numpy(ids),
        "audio_input_ids": torch.from_numpy(frames),
        "audio_input_ids_mask": torch.from_numpy(mask),
        "audio_labels": torch.from_numpy(labels),
        "ids": [row.name for row in rows],
        "positions": ids.size,
    }
    return batch | {"labels": torch.from_numpy(texts)} if text_loss else batch


def _padded(arrays: list[np.ndarray], value) -> np.ndarray:
    longest = max(map(len, arrays))
    whole = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, dtype=arrays[0].dtype)
    for row, array in enumerate(arrays):
        whole[row, : len(array)] = array
    return whole


def without_delay(row: Row, layout: Layout) -> Row:
    """The row without the delay pattern, a common mistake in trainers: all codebooks of a frame at one position."""
    frames, labels = row.frames.copy(), row.labels.copy()
    starts = np.flatnonzero((row.frames == layout.bos).all(axis=1))
    for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
        count = end - start - layout.tail
        codes = undelayed(row.frames[start:end], layout, count)
        frames[start + 1 : end] = layout.eos
        frames[start + 1 : start + 1 + count] = codes
        if (labels[start:end] != IGNORE).any():
            labels[start:end] = IGNORE
            labels[start + 1 : start + 2 + count] = frames[start + 1 : start + 2 + count]
    return Row(row.name, row.ids, frames, labels, row.text_from)


def labelled_states(model, batch: dict, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States (N, D) and labels (N, K) of the positions whose next frame has a target; also all states (B, S, D)."""
    given = ("input_ids", "attention_mask", "position_ids", "audio_input_ids", "audio_input_ids_mask")
    inputs = {name: batch[name] for name in given if name in batch}
    hidden_bsd = base_model(model).model(**inputs, use_cache=False).last_hidden_state
    ids = batch["input_ids"]
    labels_bsk = ids.new_full((*ids.shape, layout.codebooks), IGNORE)
    labels_bsk[audio_at(ids, layout)] = batch["audio_labels"][batch["audio_input_ids_mask"]]
    labels_nk = labels_bsk[:, 1:].flatten(0, 1)  # position s predicts the frame at s + 1
    rows = (labels_nk != IGNORE).any(-1).nonzero().squeeze(-1)
    return hidden_bsd[:, :-1].flatten(0, 1)[rows], labels_nk[rows], hidden_bsd


def labelled_text_states(hidden_bsd: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """States (N, D) and labels (N, 1) of the positions whose next text token is a target."""
    labels_n = batch["labels"][:, 1:].flatten()
    rows = (labels_n != IGNORE).nonzero().squeeze(-1)
    return hidden_bsd[:, :-1].flatten(0, 1)[rows], labels_n[rows, None]
