"""How codes become ids and positions, and back. Needs numpy only.

Shapes: T codec frames, C codebooks, P positions of the music part. `codes` are (T, C), as token datasets hold them.

    flat    A_BOS c0_t0 c1_t0 ... cC_t0 c0_t1 ... [A_EOS]    one code per position, P = 1 + C T
    delay   one frame per position, codebook k shifted by k  C codes per position, P = T + C - 1

A_EOS is only ever a label, and only if the window reaches the true end of a clip.
"""

from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.loss import IGNORE


@dataclass(frozen=True)
class Layout:
    vocab: int  # ids below are Llama's own, all others are music
    codebooks: int = 4
    size: int = 2048  # codes per codebook; each codebook has ids of its own
    order: str = "flat"

    @property
    def bos(self) -> int:
        return self.vocab + self.size * self.codebooks

    @property
    def eos(self) -> int:
        return self.bos + 1

    @property
    def rows(self) -> int:
        """Ids beyond Llama's: codes, A_BOS, A_EOS."""
        return self.size * self.codebooks + 2

    @property
    def channels(self) -> int:
        """Input codes per position."""
        return 1 if self.order == "flat" else self.codebooks

    def first(self, codebook):
        """Id of a codebook's code 0."""
        return self.vocab + self.size * codebook

    def positions(self, frames):
        return 1 + self.codebooks * frames if self.order == "flat" else frames + self.codebooks - 1

    def targets(self, frames, final: bool) -> np.ndarray:
        """Number of labels per codebook, from the length alone."""
        if self.order == "delay" and not final:
            return np.maximum(0, frames - np.arange(self.codebooks))
        counts = np.full(self.codebooks, frames)
        counts[0] += final  # A_EOS is a label of codebook 0 only
        return counts


def code_ids(codes_tc: np.ndarray, layout: Layout) -> np.ndarray:
    """Ids (T, C). A code out of range is an error: it would silently be a code of another codebook, or a special id."""
    codes = np.asarray(codes_tc, dtype=np.int64)
    if codes.ndim != 2 or codes.shape[1] != layout.codebooks:
        raise UserError(f"codes of shape {codes.shape} are not (frames, {layout.codebooks}).")
    if codes.size and (codes.min() < 0 or codes.max() >= layout.size):
        bad = codes.min() if codes.min() < 0 else codes.max()
        raise UserError(f"code {bad} is outside 0..{layout.size - 1}.")
    return codes + layout.first(np.arange(layout.codebooks))


def music(codes_tc: np.ndarray, layout: Layout, final: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input ids (P, channels), their codebook (P, channels; C stands for A_BOS and A_EOS) and labels (P, C).

    Labels are already shifted: a position's label is the next id, in the column of its codebook. `final`: the codes
    reach the true end of the clip.
    """
    frames, c = len(codes_tc), layout.codebooks
    ids = code_ids(codes_tc, layout)
    if layout.order == "flat":
        inputs = np.concatenate([[layout.bos], ids.reshape(-1)])  # all codebooks of frame 0, then of frame 1, ...
        place = np.arange(len(inputs))
        codebook = np.where(place == 0, c, (place - 1) % c)
        labels = np.full((len(inputs), c), IGNORE, dtype=np.int64)
        labels[place[:-1], place[:-1] % c] = inputs[1:]
        if final:
            labels[-1, 0] = layout.eos
        return inputs[:, None], codebook[:, None], labels
    stream = np.full((frames + c, c), layout.eos, dtype=np.int64)
    for k in range(c):
        stream[: k + 1, k] = layout.bos
        stream[k + 1 : k + 1 + frames, k] = ids[:, k]
    count = layout.positions(frames) if final else frames
    inputs, labels = stream[:count], stream[1 : count + 1].copy()
    labels[(labels == layout.bos) | (labels == layout.eos)] = IGNORE
    if final:
        labels[frames, 0] = layout.eos
    codebook = np.where(inputs < layout.bos, np.arange(c), c)
    return inputs, codebook, labels
