"""Counting tokens: never all texts at once, once per dataset and tokenizer, the same for any number of ranks."""

import threading

import numpy as np
import pytest

from common import runtime, text_lengths
from common.errors import UserError
from common.text_lengths import count_tokens
from common.tokens import TokenDataset


@pytest.fixture
def dataset(make_tokens, random_clips, monkeypatch, tmp_path):
    """40 clips; clip i has a text of i words. Large enough to be remembered."""
    monkeypatch.setattr(text_lengths, "ROWS", 8)
    monkeypatch.setattr(text_lengths, "REMEMBERED", 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return TokenDataset(str(make_tokens(random_clips(*[2] * 40), texts=["a " * i for i in range(40)])))


class Words:
    """A tokenizer that takes one id per word, and the sizes of what it was given at once."""

    def __init__(self, dataset, rows):
        self.dataset, self.rows, self.parts = dataset, rows, []

    def count(self, part):
        self.parts.append(len(part))
        return [len(self.dataset.text(self.rows[i]).split()) for i in part]


def test_texts_are_counted_in_parts_and_only_once(dataset):
    rows = np.arange(5, 40)
    words = Words(dataset, rows)
    for _ in range(2):
        counts = count_tokens(words.count, dataset, rows, lambda: "words")
        assert counts.tolist() == [[count] for count in range(5, 40)] and counts.dtype == np.int32
    assert words.parts == [8, 8, 8, 8, 3], "more than a part at once, or the same text twice"
    [note] = dataset.folder.glob(".lengths-*.npy")
    assert len(np.load(note)) == 35


@pytest.mark.parametrize("change", ["tokenizer", "rows", "content", "broken"])
def test_what_the_counts_depend_on_makes_new_ones(dataset, change):
    rows = np.arange(40)
    words = Words(dataset, rows)
    count_tokens(words.count, dataset, rows, lambda: "words")
    if change == "rows":
        words.rows = rows = rows[::-1].copy()
    if change == "content":
        dataset.info["files"][0]["sha256"] = "another"
    if change == "broken":
        [note] = dataset.folder.glob(".lengths-*.npy")
        note.write_bytes(note.read_bytes()[:-9])
    counts = count_tokens(words.count, dataset, rows, lambda: "letters" if change == "tokenizer" else "words")
    assert len(words.parts) == 10 and counts[:, 0].tolist() == rows.tolist()


def test_several_numbers_per_text(dataset):
    rows = np.arange(40)
    for _ in range(2):
        pairs = count_tokens(lambda part: [(i, 2 * i) for i in part], dataset, rows, lambda: "pairs", numbers=2)
        assert pairs.tolist() == [[i, 2 * i] for i in range(40)]
    assert count_tokens(Words(dataset, rows).count, dataset, rows, lambda: "pairs").shape == (40, 1)


def test_a_small_dataset_leaves_no_note(dataset):
    words = Words(dataset, np.arange(29))
    count_tokens(words.count, dataset, np.arange(29), lambda: pytest.fail("not needed"))
    assert not list(dataset.folder.glob(".lengths-*"))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work(dataset, monkeypatch, world):
    """Ranks as threads that meet where a collective would be."""
    here, boxes = threading.Barrier(world), {}

    def exchange(value, process):
        boxes[process.rank] = value
        here.wait(10)
        values = [boxes[rank] for rank in range(world)]
        here.wait(10)
        return values

    monkeypatch.setattr(text_lengths, "from_main", lambda value, process: exchange(value, process)[0])
    monkeypatch.setattr(text_lengths, "all_sum", lambda value, process: sum(exchange(value, process)))
    monkeypatch.setattr(text_lengths, "gather_lists", lambda value, process: sum(exchange(value, process), []))
    rows = np.arange(40)
    for bad in (None, 17):
        tokenizers, results = [Words(dataset, rows) for _ in range(world)], [None] * world

        def work(rank, bad=bad, tokenizers=tokenizers, results=results):
            def count(part):
                if bad in part:
                    raise UserError("the text of clip 17 is odd.")
                return tokenizers[rank].count(part)

            try:
                results[rank] = count_tokens(
                    count, dataset, rows, lambda: f"words {bad}", runtime.Process(rank, world, "cpu")
                )[:, 0].tolist()
            except UserError as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert results == [list(range(40)) if bad is None else "the text of clip 17 is odd."] * world
        if bad is None:
            assert sum(len(tokenizer.parts) for tokenizer in tokenizers) == 5
