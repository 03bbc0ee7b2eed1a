"""How many tokens each text takes: counted in parts, by all ranks together, and remembered for large datasets."""

import contextlib
import hashlib
from collections.abc import Callable

import numpy as np

from common.arrow import ArrowDataset, note_places, write_note
from common.errors import UserError
from common.runtime import Process, all_sum, from_main, gather_lists, say, still_alive

ROWS = 2048  # texts that are tokenised at a time: all of 7 million at once would take 38 GB
REMEMBERED = 100_000  # datasets of fewer rows are counted again at each start, which takes seconds


def count_tokens(
    count: Callable[[range], list],
    dataset: ArrowDataset,
    rows: np.ndarray,
    tokenizer: Callable[[], str],
    process: Process | None = None,
    numbers: int = 1,
    doing: str = "counting the tokens",
) -> np.ndarray:
    """`count(part)` for all parts of range(len(rows)), (rows, numbers) int32. Every rank must call it.

    `rows`: the rows of the dataset that are counted. `count` returns `numbers` integers per row. `tokenizer()` returns
    a key of the cache: all that the counts depend on besides the texts. `doing`: what is printed for a large dataset.
    """
    process = process or Process(0, 1, "cpu")
    places, known = (), None
    if len(rows) >= REMEMBERED and process.is_main:
        key = hashlib.sha256(repr((dataset.fingerprint(), tokenizer(), numbers)).encode() + rows.tobytes())
        places = note_places(dataset.folder, f".lengths-{key.hexdigest()[:16]}.npy")
        known = _read(places, (len(rows), numbers))
    known = from_main(known, process)
    if known is not None:
        return known
    counts, mistakes = np.zeros((len(rows), numbers), dtype=np.int32), []
    if len(rows) >= REMEMBERED:
        say(f"{doing} of {len(rows):,} clips of {dataset.folder}, once")
    try:
        for first in range(ROWS * process.rank, len(rows), ROWS * process.world):
            part = range(first, min(first + ROWS, len(rows)))
            counts[part.start : part.stop] = np.reshape(count(part), (len(part), numbers))
            still_alive()
    except UserError as error:
        mistakes = [str(error)]
    for mistake in gather_lists(mistakes, process):
        raise UserError(mistake)
    counts = all_sum(counts, process).astype(np.int32)
    write_note(places, lambda stream: np.save(stream, counts, allow_pickle=False))
    return counts


def _read(places, shape: tuple[int, int]) -> np.ndarray | None:
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            counts = np.load(place, allow_pickle=False)
            if counts.shape == shape and counts.dtype == np.int32:
                return counts
    return None
