"""Dia's text path and sequence layout: from a text and codes to what the model sees, from its states to their labels.

Shapes: B clips, S text bytes, L decoder positions, C channels (9 codebooks, or 18 for stereo), T codec frames.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from common import keyed_random
from common.errors import UserError
from common.lora import base_model
from common.loss import IGNORE

SPEAKER_BYTES = {"[S1]": "\x01", "[S2]": "\x02"}
# Where a long text may be split, in this order of preference: after a sentence, after a clause, between words.
BREAKS = (r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)])\s+|(?<=[。！？])", r"(?<=[,;:])\s+|(?<=[，、；：])", r"\s+")

# ---- text ------------------------------------------------------------------------------------------------------


def read_tag_map(path: str) -> dict[str, int]:
    """Tags that become one control byte each, such as {"[de]": 4}. The two speaker tags are built in."""
    if not path:
        return {}
    try:
        tag_map = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--tag-map {path} cannot be read as JSON: {error}.") from None
    if not isinstance(tag_map, dict) or not all(isinstance(byte, int) for byte in tag_map.values()):
        raise UserError(f'--tag-map {path} must be an object such as {{"[de]": 4}}.')
    tag_map = {unicodedata.normalize("NFC", tag): byte for tag, byte in tag_map.items()}  # as texts are
    for tag, byte in tag_map.items():
        if not tag or tag in SPEAKER_BYTES:
            raise UserError(f"--tag-map {path}: {tag!r} is empty or a speaker tag, which is built in.")
        # 0 is padding, 1 and 2 are the speakers, 8 to 13 are white space controls, 32 is the blank.
        if not (3 <= byte <= 7 or 14 <= byte <= 31):
            raise UserError(f"--tag-map {path}: {tag!r} has byte {byte}; use 3..7 or 14..31.")
    if len(set(tag_map.values())) != len(tag_map):
        raise UserError(f"--tag-map {path}: two tags share one byte.")
    return tag_map


def text_bytes(text: str, tag_map: dict[str, int], name: str) -> np.ndarray:
    """Text to ids (UTF-8 bytes): the only conversion, for training, evaluation, samples and generation."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(" " if c in "\r\n\t" else c for c in text if c != "\0")
    stray = [c for c in text if ord(c) < 32 or ord(c) == 127]
    if stray:
        raise UserError(f"the text of {name!r} holds the control character {stray[0]!r}.")
    for tag in sorted(tag_map, key=len, reverse=True):  # "[de][old]" before "[de]"
        text = text.replace(tag, chr(tag_map[tag]))
    for tag, byte in SPEAKER_BYTES.items():
        text = text.replace(tag, byte)
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def with_speaker(text: str, text_mode: str) -> str:
    """Prefixes a transcript that names no speaker with the first one, as in all texts the model was trained on."""
    return f"[S1] {text}" if text_mode == "speech" and not any(tag in text for tag in SPEAKER_BYTES) else text


def continue_text(before: str, text: str) -> str:
    """A transcript and the text that goes on after it. Speakers alternate, so one who goes on is not named again."""
    last = max(SPEAKER_BYTES, key=before.rfind)
    if last in before and text.startswith(last):
        text = text.removeprefix(last)
    return f"{before.rstrip()} {text.lstrip()}"


def split_text(text: str, limit: int, size: Callable[[str], int]) -> list[str]:
    """A text in parts of at most `limit` bytes, each beginning with its speaker; only a longer word stays whole."""
    if size(text) <= limit:
        return [text]

    def pieces(text: str, breaks: tuple[str, ...]) -> list[str]:
        if not breaks or size(f"[S1] {text}") <= limit:
            return [text]
        return [piece for part in re.split(breaks[0], text) if part for piece in pieces(part, breaks[1:])]

    parts, names = [""], "|".join(map(re.escape, SPEAKER_BYTES))
    for turn in re.split(rf"(?={names})", text.strip()):
        tag = re.match(names, turn)[0] if re.match(names, turn) else ""
        for piece in pieces(turn.removeprefix(tag).strip(), BREAKS):
            piece = f"{tag} {piece}".strip()
            joined = continue_text(parts[-1], piece).strip()
            if parts[-1] and size(joined) > limit:
                parts.append(piece)
            else:
                parts[-1] = joined
    return parts


def augment_tags(text: str, drop: float, *key) -> str:
    """Augments a tag prompt ("calm, piano, 90 bpm"): drops each tag with probability `drop`, keeps one, shuffles."""
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    if not tags:
        return text
    draw = keyed_random.generator(*key, "tags")
    kept = [tag for tag in tags if draw.random() >= drop] or [tags[draw.integers(len(tags))]]
    return ", ".join(kept[i] for i in draw.permutation(len(kept)))


# ---- layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The facts of a Dia checkpoint that a batch depends on."""

    delay: tuple[int, ...]
    bos: int
    eos: int
    pad: int
    max_positions: int
    max_text: int

    @property
    def channels(self) -> int:
        return len(self.delay)

    @property
    def tail(self) -> int:
        """Decoder positions of a whole clip besides its frames: BOS and the longest delay."""
        return max(self.delay) + 1


def layout_of(model_config) -> Layout:
    decoder = model_config.decoder_config
    return Layout(
        delay=tuple(model_config.delay_pattern),
        bos=decoder.bos_token_id,
        eos=decoder.eos_token_id,
        pad=decoder.pad_token_id,
        max_positions=decoder.max_position_embeddings,
        max_text=model_config.encoder_config.max_position_embeddings,
    )


def delayed(codes_tc: np.ndarray, layout: Layout, positions: int, final: bool) -> tuple[np.ndarray, np.ndarray]:
    """Decoder inputs and labels (L, C) of one clip, in the layout of the HF processor.

    Channel c: BOS up to its delay, its codes, its own EOS right after them, then padding; inputs are all but the
    last position and labels all but the first. A window that stops before the clip's end (`final` false) is the
    same stream cut at `positions`: no EOS, no tail, every label real.
    """
    frames = len(codes_tc)
    stream = np.full((frames + layout.tail + 1, layout.channels), layout.pad, dtype=np.int64)
    for channel, delay in enumerate(layout.delay):
        stream[: delay + 1, channel] = layout.bos
        stream[delay + 1 : delay + 1 + frames, channel] = codes_tc[:, channel]
        if final:
            stream[delay + 1 + frames, channel] = layout.eos
    inputs, labels = stream[:positions], stream[1 : positions + 1]
    return inputs, np.where((labels == layout.bos) | (labels == layout.pad), IGNORE, labels)


def undelayed(stream_lc: np.ndarray, layout: Layout, frames: int) -> np.ndarray:
    """Codes (T, C) out of a generated stream."""
    return np.stack([stream_lc[d + 1 : d + 1 + frames, c] for c, d in enumerate(layout.delay)], axis=1)


def layers_of(model) -> list[torch.nn.Module]:
    dia = base_model(model).model
    return [*dia.encoder.layers, *dia.decoder.layers]


def labelled_states(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoder states (N, D) and labels (N, C) of the positions that have at least one target."""
    hidden_bld, rows_n = decoder_states(base_model(model).model, batch), batch["targets"]
    return hidden_bld.flatten(0, 1).index_select(0, rows_n), batch["labels"].flatten(0, 1).index_select(0, rows_n)


def decoder_states(dia, batch) -> torch.Tensor:
    """What the library's DiaModel computes, (B, L, D), but without a padding mask in the decoder's self-attention.

    Clips are padded on the right and attend causally, so no real position ever sees padding. The library's own forward
    makes the host wait for the GPU to look at its masks, and a mask of L x L keeps attention from its fast kernels.
    """
    decoder, text_mask = dia.decoder, batch["attention_mask"]
    if dia.config._attn_implementation == "sdpa":
        text_mask = text_mask[:, None, None].bool()  # in its final form: the library takes it as it is
    text_bsd = dia.encoder(batch["input_ids"], attention_mask=text_mask)[0]
    x_bld = decoder.embeddings(batch["decoder_input_ids"])
    rope = decoder.rotary_emb(x_bld, position_ids=torch.arange(x_bld.shape[1], device=x_bld.device)[None])
    causal = create_causal_mask(decoder.config, x_bld, attention_mask=None, past_key_values=None)  # None for SDPA
    text_mask = create_bidirectional_mask(decoder.config, x_bld, text_mask, encoder_hidden_states=text_bsd)
    for layer in decoder.layers:
        x_bld = layer(x_bld, rope, causal, text_bsd, encoder_attention_mask=text_mask)
    return decoder.norm(x_bld)
