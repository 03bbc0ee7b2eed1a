"""The sequence layout of Higgs Audio v2: delayed streams, labels, rows with placeholders, batches, labelled states.

Shapes: B rows, S positions on the text axis, R real positions of all rows, F audio frames, K codebooks, T codec frames,
D width, N positions with a target.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UserError
from common.loss import IGNORE
from models.higgs.network import hidden_states

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
    weight: float = 1.0  # of its loss


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
    """The rows as one batch: right-padded, or `packed` end to end into one.

    Besides what the library's model takes, the batch says where its text, audio and targets are (see `indices`): a GPU
    would have to wait to find out. If the rows have weights, label_weights and text_label_weights (N, 1) are those of
    the targets.
    """
    texts = [_text_labels(row, layout) for row in rows]
    arrays, is_real = _packed(rows, texts) if packed else _padded(rows, texts, layout)
    if not text_loss:
        del arrays["labels"]
    audio = (arrays["audio_input_ids_mask"], arrays["audio_labels"])
    arrays |= indices(arrays["input_ids"], is_real, *audio, arrays.get("labels"), layout)
    lengths = [len(row.ids) for row in rows]
    if any(row.weight != 1 for row in rows):
        weights = np.array([[row.weight] for row in rows], dtype=np.float32)
        frames = [len(row.frames) for row in rows] if packed else arrays["audio_labels"].shape[1]
        row_of_frame = np.repeat(np.arange(len(rows)), frames)
        arrays["label_weights"] = weights[row_of_frame[arrays["label_at"]]]
        if text_loss:
            row_of_text = np.repeat(np.arange(len(rows)), lengths if packed else arrays["labels"].shape[1])
            arrays["text_label_weights"] = weights[row_of_text[arrays["text_label_at"]]]
    facts = {"ids": [row.name for row in rows], "positions": arrays["input_ids"].size, "longest_row": max(lengths)}
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | facts


def _text_labels(row: Row, layout: Layout) -> np.ndarray:
    """The row's text (S,) from its target's turns on; IGNORE elsewhere."""
    labels = np.where(audio_at(row.ids, layout), IGNORE, row.ids)
    labels[: row.text_from] = IGNORE
    return labels


def _packed(rows: list[Row], texts: list[np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All rows end to end in one, each with positions from 0; and which positions are real: all."""
    lengths = [len(row.ids) for row in rows]
    for labels in texts:
        labels[0] = IGNORE  # it would be predicted from the last position of the row before
    arrays = {
        "input_ids": np.concatenate([row.ids for row in rows])[None],
        "audio_input_ids": np.concatenate([row.frames for row in rows])[None],
        "audio_labels": np.concatenate([row.labels for row in rows])[None],
        "labels": np.concatenate(texts)[None],
        "position_ids": np.concatenate([np.arange(n) for n in lengths])[None],
        "row_of": np.repeat(np.arange(len(rows)), lengths),
        "row_starts": np.cumsum([0, *lengths], dtype=np.int32),
    }
    arrays["audio_input_ids_mask"] = np.ones(arrays["audio_input_ids"].shape[:2], dtype=bool)
    return arrays, np.ones(arrays["input_ids"].shape, dtype=bool)


def _padded(rows: list[Row], texts: list[np.ndarray], layout: Layout) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The rows side by side, padded on the right; and which positions are real."""
    arrays = {
        "input_ids": _stacked([row.ids for row in rows], layout.pad),
        "audio_input_ids": _stacked([row.frames for row in rows], layout.eos),
        "audio_labels": _stacked([row.labels for row in rows], IGNORE),
        "labels": _stacked(texts, IGNORE),
        "attention_mask": _stacked([np.ones(len(row.ids), dtype=np.int64) for row in rows], 0),
        "audio_input_ids_mask": _stacked([np.ones(len(row.frames), dtype=bool) for row in rows], False),
    }
    return arrays, arrays["attention_mask"].astype(bool)


def indices(ids_bs, is_real_bs, mask_bf, labels_bfk, text_labels_bs, layout: Layout) -> dict[str, np.ndarray]:
    """Where everything is, in flattened arrays.

    text_at, audio_at: the real positions in B x S, in which order the states (R, D) are kept; frame_at: the audio's
    frames in B x F. target_at: states that predict a frame, which is label_at in B x F; text_target_at and
    text_label_at (in B x S): the same for text.
    """
    is_audio = audio_at(ids_bs, layout) & is_real_bs
    found = {
        "text_at": np.flatnonzero(is_real_bs & ~is_audio),
        "audio_at": np.flatnonzero(is_audio),
        "frame_at": np.flatnonzero(mask_bf),
    }
    state_at = np.full(ids_bs.size, -1)
    state_at[np.concatenate([found["text_at"], found["audio_at"]])] = np.arange(is_real_bs.sum())
    scored = (labels_bfk != IGNORE).any(axis=-1).reshape(-1)[found["frame_at"]]
    found["label_at"] = found["frame_at"][scored]
    found["target_at"] = state_at[found["audio_at"][scored] - 1]  # position s predicts the frame at s + 1
    if text_labels_bs is not None:
        scored = text_labels_bs != IGNORE
        scored[:, 0] = False  # nothing predicts the first position
        found["text_label_at"] = np.flatnonzero(scored)
        found["text_target_at"] = state_at[found["text_label_at"] - 1]
    return found


def _stacked(arrays: list[np.ndarray], value) -> np.ndarray:
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
    return dataclasses.replace(row, frames=frames, labels=labels)


def labelled_states(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States (N, D) and labels (N, K) of the positions whose next frame has a target; also all states (R, D)."""
    hidden_rd = hidden_states(model, batch)
    labels_nk = batch["audio_labels"].flatten(0, 1).index_select(0, batch["label_at"])
    return hidden_rd.index_select(0, batch["target_at"]), labels_nk, hidden_rd


def labelled_text_states(hidden_rd: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """States (N, D) and labels (N, 1) of the positions whose next text token is a target."""
    labels_n = batch["labels"].flatten().index_select(0, batch["text_label_at"])
    return hidden_rd.index_select(0, batch["text_target_at"]), labels_n[:, None]
