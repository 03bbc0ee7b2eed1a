"""The hold-out: a keyed split that stays as it is, and no evaluation clip that is trained on."""

from dataclasses import dataclass

import numpy as np
import pytest

from common import holdout, text_lengths
from common.errors import UserError
from common.holdout import check_holdout, refuse_overlap, rows_to_use, same_ids, same_sounds
from common.tokens import TokenDataset
from helpers import support


@dataclass
class Settings:
    eval_split: float = 0.0
    eval_split_by: str = "group"
    seed: int = 0
    allow_overlap: bool = False
    without: tuple = ()


@dataclass
class Rows:
    """What check_holdout needs to know of a training set."""

    tokens: TokenDataset
    kept: np.ndarray

    @property
    def heard(self):
        return self.kept

    def __len__(self):
        return len(self.kept)


@pytest.fixture
def make(tmp_path):
    """make(ids, columns, seed=, split=, codes=) -> a token dataset; every clip of every seed sounds different."""
    made = []

    def dataset(ids, columns=None, seed=0, split=None, codes=None, **info):
        rng = np.random.default_rng(seed)
        clips = [
            {"id": name, "text": "x", "codes": rng.integers(0, 1024, (1 + i % 3, 9))} for i, name in enumerate(ids)
        ]
        for i, sound in (codes or {}).items():
            clips[i]["codes"] = sound
        made.append(support.write_tokens(tmp_path / f"tokens{len(made)}", clips, split, columns, **info))
        return TokenDataset(str(made[-1]))

    return dataset


def names(count: int, start: int = 0) -> list[str]:
    return [f"clip-{i}" for i in range(start, start + count)]


# ---- --eval-split ----------------------------------------------------------------------------------------------


def test_each_row_is_on_one_side_and_the_sides_have_their_sizes(make):
    tokens = make(names(2000))
    train, held = (rows_to_use(tokens, Settings(0.1), side) for side in (True, False))
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(2000))
    assert abs(len(held) - 200) < 4 * np.sqrt(2000 * 0.1 * 0.9)  # four standard deviations of a fair draw
    other = rows_to_use(tokens, Settings(0.1, seed=1), False)
    assert len(np.intersect1d(held, other)) < 60, "another seed holds out other clips"
    wider = rows_to_use(tokens, Settings(0.2), False)
    assert np.isin(held, wider).all(), "a larger fraction only adds clips"


def test_rows_that_are_appended_move_no_other_row(make):
    before, after = make(names(300)), make(names(40, start=900) + names(300), seed=1)
    held = [{tokens.id(i) for i in rows_to_use(tokens, Settings(0.2), False)} for tokens in (before, after)]
    assert held[0] == {name for name in held[1] if int(name[5:]) < 300}


@pytest.mark.parametrize("by", ["group", "speaker"])
def test_a_group_or_speaker_is_never_divided(make, by):
    column = [f"{by} {i % 50}" for i in range(1000)]
    tokens = make(names(1000), {by: column})
    sides = [{column[i] for i in rows_to_use(tokens, Settings(0.3, by), side)} for side in (True, False)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 50 and 3 < len(sides[1]) < 30


def test_without_groups_the_clips_are_divided_and_a_clip_without_its_group_stands_for_itself(make):
    by_clip = rows_to_use(make(names(200)), Settings(0.3), False)
    assert np.array_equal(by_clip, rows_to_use(make(names(200), {"group": [None] * 200}), Settings(0.3), False))
    assert np.array_equal(by_clip, rows_to_use(make(names(200), {"group": [""] * 200}), Settings(0.3), False))
    assert np.array_equal(by_clip, rows_to_use(make(names(200), {"group": ["a"] * 200}), Settings(0.3, "clip"), False))


def test_a_clip_that_is_marked_as_held_out_is_on_neither_side(make):
    tokens = make(names(300), split=["test" if i % 10 == 0 else "train" for i in range(300)])
    used = np.concatenate([rows_to_use(tokens, Settings(0.3), side) for side in (True, False)])
    assert np.array_equal(np.sort(used), [i for i in range(300) if i % 10])


def test_a_split_that_leaves_a_side_empty_is_refused(make):
    one = make(names(20), {"group": ["a"] * 20})
    with pytest.raises(UserError, match=r"--eval-split 0.1 holds out (all|none) of the 1 groups in .*: choose"):
        rows_to_use(one, Settings(0.1), True)
    with pytest.raises(UserError, match="has no column `speaker`"):
        rows_to_use(one, Settings(0.1, "speaker"), True)


# ---- no clip is both -------------------------------------------------------------------------------------------


def everything(tokens) -> np.ndarray:
    return np.arange(len(tokens))


def test_evaluation_data_that_is_the_training_data_is_refused(make, one_rank, capsys):
    tokens = make(names(30))
    clips = Rows(tokens, everything(tokens))
    with pytest.raises(UserError, match=r"evaluation clip 'clip-0' is trained on: its id .*30 such.*--eval-split 0.02"):
        check_holdout([clips], clips, Settings(), one_rank)
    check_holdout([clips], clips, Settings(allow_overlap=True), one_rank)
    assert "warning" in capsys.readouterr().out
    held, train = (Rows(tokens, rows_to_use(tokens, Settings(0.3), side)) for side in (False, True))
    check_holdout([train], held, Settings(0.3), one_rank)
    check_holdout([clips], None, Settings(), one_rank)


def test_an_id_in_two_datasets_counts_only_where_it_is_trained_on(make):
    train, held = make(names(30)), make(["other", "clip-7", "clip-9"], seed=1)
    assert same_ids(train, everything(train), held, everything(held)).tolist() == [[1, 7], [2, 9]]
    assert same_ids(train, np.arange(8), held, everything(held)).tolist() == [[1, 7]]


def test_the_same_sound_under_another_id_is_found(make, one_rank):
    train = make(names(60))
    held = make(["a", "b", "c"], seed=1, codes={1: train.codes(44)})
    assert same_sounds(train, everything(train), held, everything(held), one_rank).tolist() == [[1, 44]]
    assert not len(same_sounds(train, np.arange(44), held, everything(held), one_rank))
    assert not len(same_sounds(train, np.array([], dtype=np.int64), held, everything(held), one_rank))
    almost = train.codes(44).copy()
    almost[-1, -1] ^= 1
    near = make(["a"], codes={0: almost})
    assert not len(same_sounds(train, everything(train), near, everything(near), one_rank))
    with pytest.raises(UserError, match="clip 'b' is trained on: its sound is that of clip 'clip-44'"):
        refuse_overlap(train, everything(train), held, everything(held), Settings(), one_rank)


def test_hashes_of_a_large_dataset_are_remembered(make, one_rank, monkeypatch):
    monkeypatch.setattr(text_lengths, "REMEMBERED", 10)
    train = make(names(40))
    held = make(["a"], seed=1, codes={0: train.codes(22)})
    for _ in range(2):
        assert same_sounds(train, everything(train), held, everything(held), one_rank).tolist() == [[0, 22]]
        monkeypatch.setattr(TokenDataset, "sound", lambda self, i: self.codes(i) if len(self) == 1 else pytest.fail())
    assert len(list(train.folder.glob(".lengths-*.npy"))) == 1


def test_only_clips_of_equal_length_are_read(make, one_rank, monkeypatch):
    train = make(names(60))
    held = make(["a", "b"], seed=1)  # of 1 and 2 frames
    read = []
    monkeypatch.setattr(TokenDataset, "sound", lambda self, i: read.append(len(self.codes(i))) or self.codes(i))
    holdout.same_sounds(train, everything(train), held, everything(held), one_rank)
    assert set(read) == {1, 2} and len(read) == 42


def test_evaluation_data_of_another_codec_is_refused(make, one_rank):
    train, same = (Rows(t, everything(t)) for t in (make(["a"], weights_sha256="1" * 64), make(["b"], seed=1)))
    check_holdout([train], same, Settings(), one_rank)  # of unknown weights
    for fact, value in (("sample_rate", 24000), ("hop", 320), ("weights_sha256", "2" * 64)):
        other = make(["b"], seed=1, **{fact: value})
        with pytest.raises(
            UserError, match=f"{fact} = {value}|{value[:12]}" if fact[0] == "w" else f"{fact} = {value}"
        ):
            check_holdout([train], Rows(other, everything(other)), Settings(), one_rank)
