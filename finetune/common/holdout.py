"""The hold-out: which clips are trained on, which are only evaluated on, and that no clip is both."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common import keyed_random
from common.arrow import ArrowDataset, rows_named
from common.codec import codec_identity, refuse_other_codec
from common.errors import UserError
from common.runtime import Process, say, still_alive
from common.text_lengths import count_tokens
from common.tokens import TokenDataset

# ---- --eval-split ------------------------------------------------------------------------------------------------


def rows_to_use(tokens: TokenDataset, config, train: bool) -> np.ndarray:
    """The rows to train on, or to evaluate on: what --eval-split says, else the column `split`."""
    if not config.eval_split:
        return tokens.rows_of_split(train)
    rows = tokens.rows_of_split(train=True)  # clips that are marked as held out stay out of both
    is_held_out = chosen_names(split_names(tokens, config), config.eval_split, config.seed)[rows]
    if is_held_out.all() or not is_held_out.any():
        count = len(split_names(tokens, config).take(rows).unique())
        raise UserError(
            f"--eval-split {config.eval_split:g} holds out {'all' if is_held_out.any() else 'none'} of the {count}"
            f" {config.eval_split_by}s in {tokens.folder}: choose another fraction or --eval-split-by."
        )
    return rows[is_held_out != train]


def split_names(tokens: TokenDataset, config):
    """The group of each row: all clips of a group go to the same side."""
    ids, by = tokens.column("id"), config.eval_split_by
    names = None if by == "clip" else tokens.column(by)
    if names is None:
        if by == "speaker":
            raise UserError(f"--eval-split-by speaker: {tokens.folder} has no column `speaker`.")
        return ids
    names = names.cast("string")  # a column without a single name has no type
    return pc.if_else(pc.fill_null(pc.greater(pc.utf8_length(names), 0), False), names, ids)


def chosen_names(names, fraction: float, seed: int) -> np.ndarray:
    """Which rows are held out. It depends on the row's name and the seed alone, so on no rank and no other row."""
    chosen, first = np.zeros(len(names), dtype=bool), 0
    for chunk in names.chunks:
        encoded = chunk.dictionary_encode()
        draws = [keyed_random.uniform(seed, name, "eval_split") for name in encoded.dictionary.to_pylist()]
        chosen[first : first + len(chunk)] = (np.array(draws) < fraction)[encoded.indices.to_numpy()]
        first += len(chunk)
        still_alive()
    return chosen


# ---- no clip is both ---------------------------------------------------------------------------------------------


def check_holdout(training_sets: list, eval_clips, config, process: Process) -> None:
    """Refuses evaluation clips that come from another codec than the training clips, or that are trained on.

    Every rank must call it. `eval_clips` may be None.
    """
    for clips in training_sets if eval_clips else ():
        refuse_other_codec(eval_clips.tokens, codec_identity(clips.tokens.info), f"--data {clips.tokens.folder}")
        refuse_overlap(clips.tokens, clips.heard, eval_clips.tokens, eval_clips.kept, config, process)


def refuse_overlap(
    train: ArrowDataset, train_rows: np.ndarray, held: ArrowDataset, held_rows: np.ndarray, config, process: Process
) -> None:
    """Refuses evaluation clips that are training clips, by their ids or sounds; --allow-overlap only warns of them.

    Every rank must call it.
    """
    by_id, by_sound = same_ids(train, train_rows, held, held_rows), None
    if not len(by_id):
        by_sound = same_sounds(train, train_rows, held, held_rows, process)
    both = by_id if by_sound is None else by_sound
    if not len(both):
        return
    row, other = both[0]
    how = "its id is" if by_sound is None else f"its sound is that of clip {train.id(other)!r}"
    found = f"{held.folder}: evaluation clip {held.id(row)!r} is trained on: {how} in {train.folder} ({len(both)} such)"
    if config.allow_overlap:
        say(f"warning: {found}")
        return
    split = "" if "eval_split" in config.without else " (--eval-split 0.02 holds some out)"
    raise UserError(f"{found}; evaluate on other clips{split}, or use --allow-overlap to test memorisation.")


def same_ids(train: ArrowDataset, train_rows: np.ndarray, held: ArrowDataset, held_rows: np.ndarray) -> np.ndarray:
    """(N, 2): a row of `held_rows` and the row of `train_rows` that has the same id."""
    if held.fingerprint() == train.fingerprint():
        shared = np.intersect1d(held_rows, train_rows)
        return np.stack([shared, shared], axis=1)
    # Looked up among the few that are evaluated: a table of the names of millions of training clips takes 1 GB.
    place = rows_named(train.column("id"), held.column("id").take(held_rows))
    trained = train_rows[place[train_rows] >= 0]
    both = np.stack([held_rows[place[trained]], trained], axis=1)
    return both[np.argsort(place[trained])]


def same_sounds(
    train: ArrowDataset, train_rows: np.ndarray, held: ArrowDataset, held_rows: np.ndarray, process: Process
) -> np.ndarray:
    """(N, 2): a row of `held_rows` and the first row of `train_rows` that sounds exactly the same.

    Only clips of equal length are compared, by their hashes, which are remembered for a large dataset.
    """
    candidates = train_rows[np.isin(train.lengths[train_rows], held.lengths[held_rows])]
    trained, wanted = (sound_hashes(*of, process) for of in ((train, candidates), (held, held_rows)))
    rows = rows_named(pa.array(wanted), pa.array(trained))
    found = rows >= 0
    return np.stack([held_rows[found], candidates[rows[found]]], axis=1)


def sound_hashes(dataset: ArrowDataset, rows: np.ndarray, process: Process) -> np.ndarray:
    """64 bits of the sound of each row. Every rank must call it."""

    def hashes(part: range) -> np.ndarray:
        digests = [hashlib.blake2b(dataset.sound(i), digest_size=8).digest() for i in rows[part.start : part.stop]]
        return np.frombuffer(b"".join(digests), dtype=np.int32)

    pairs = count_tokens(hashes, dataset, rows, lambda: "sound", process, numbers=2, doing="hashing the sounds")
    return np.ascontiguousarray(pairs).view(np.int64)[:, 0]
