"""Noisy/clean pairs: read without a copy, cropped by key where there is speech, held out by id."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from common.errors import UserError
from common.keyed_random import uniform
from common.pairs import Crops, PairDataset, speech_frames, split_pairs
from helpers import support


def clip(name: str, samples: int, seed: int = 0) -> dict:
    clean = np.random.default_rng(seed + samples).integers(-3000, 3000, samples, dtype=np.int16)
    return {"id": name, "clean": clean, "noisy": (clean + 7).astype(np.int16)}


@pytest.fixture
def data(tmp_path):
    rows = [clip("p1_001", 40000), clip("p1_002", 5000), clip("p2_001", 33000), clip("p3_001", 20000)]
    return PairDataset(str(support.write_pairs(tmp_path / "pairs", rows)), 16000), rows


def test_pairs_come_back_as_written_and_uncopied(data):
    pairs, rows = data
    pairs.verify()
    assert len(pairs) == 4 and pairs.samples.tolist() == [40000, 5000, 33000, 20000]
    for i, row in enumerate(rows):
        assert pairs.id(i) == row["id"]
        assert np.array_equal(pairs.clean(i), row["clean"]) and np.array_equal(pairs.noisy(i), row["noisy"])
    assert not pairs.clean(0).flags.owndata


def test_a_crop_depends_on_its_key_alone_and_both_sides_on_the_same_place(data):
    pairs, rows = data
    noisy, clean, redraws = pairs.crop(0, 16000, 3, 1, "p1_001")
    assert np.array_equal(noisy, clean + 7) and len(clean) == 16000 and redraws == 0
    start = int(uniform(3, 1, "p1_001", 0, "crop") * (40000 - 16000 + 1))
    assert np.array_equal(clean, rows[0]["clean"][start : start + 16000])
    assert np.array_equal(pairs.crop(0, 16000, 3, 1, "p1_001")[1], clean)
    assert not np.array_equal(pairs.crop(0, 16000, 3, 2, "p1_001")[1], clean)


def test_a_short_clip_goes_round_instead_of_being_padded(data):
    pairs, rows = data
    _, clean, _ = pairs.crop(1, 16000, 0)
    assert np.array_equal(clean, np.tile(rows[1]["clean"], 4)[:16000])


def test_a_place_without_speech_is_drawn_again(tmp_path):
    clean = np.zeros(160000, dtype=np.int16)
    clean[100000:110000] = 3000  # 0.6 s of sound in 10 s
    pairs = PairDataset(str(support.write_pairs(tmp_path / "p", [{"id": "a", "clean": clean, "noisy": clean}])), 16000)
    assert speech_frames(clean, 16000).sum() in (62, 63)
    found = [pairs.crop(0, 32000, 0, epoch, "a") for epoch in range(200)]
    heard = np.array([np.count_nonzero(crop[1]) >= 4800 for crop in found])
    first = np.array([crop[2] == 0 for crop in found])
    assert 0.1 < first.mean() < 0.35 and heard.mean() > 0.8
    assert max(crop[2] for crop in found) == 7  # it gives up, and PESQ's mask takes over


def test_silence_is_not_drawn_again(tmp_path):
    nothing = np.zeros(40000, dtype=np.int16)
    rows = [{"id": "a", "clean": nothing, "noisy": nothing}]
    pairs = PairDataset(str(support.write_pairs(tmp_path / "p", rows)), 16000)
    assert pairs.crop(0, 16000, 0)[2] == 0


def test_a_batch_is_the_same_whoever_else_is_in_it(data):
    pairs, _ = data
    crops = Crops(pairs, np.array([0, 2, 3]), 1.0, seed=4)
    both, alone = crops.batch([0, 2], epoch=3), crops.batch([2], epoch=3)
    assert both["ids"] == ["p1_001", "p3_001"] and both["noisy"].shape == (2, 16000)
    assert (both["clean"][1] == alone["clean"][0]).all() and both["positions"] == 32000
    assert float(both["clean"].abs().max()) <= 3000 / 32768


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_damage_and_another_rate_are_named(tmp_path):
    folder = support.write_pairs(tmp_path / "pairs", [clip("a", 9000)])
    with pytest.raises(UserError, match="sample_rate = 16000 but the model needs 8000"):
        PairDataset(str(folder), 8000)
    (file,) = folder.glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[-4000] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        PairDataset(str(folder), 16000).verify()
    file.write_bytes(content[:-8])
    with pytest.raises(UserError, match="incomplete"):
        PairDataset(str(folder), 16000)


def test_twice_the_same_id_and_unequal_sides_are_refused(tmp_path):
    twice = PairDataset(str(support.write_pairs(tmp_path / "twice", [clip("a", 900), clip("a", 800)])), 16000)
    with pytest.raises(UserError, match="'a' occurs twice"):
        twice.verify()
    wrong = clip("b", 900)
    wrong["noisy"] = wrong["noisy"][:-1]
    with pytest.raises(UserError, match="'b' does not hold noisy samples of its length"):
        PairDataset(str(support.write_pairs(tmp_path / "wrong", [wrong])), 16000)


def test_a_token_dataset_is_not_pairs(tmp_path):
    folder = support.write_tokens(tmp_path / "tokens", [{"id": "a", "text": "x", "codes": np.zeros((3, 9))}])
    with pytest.raises(UserError, match="lacks the column"):
        PairDataset(str(folder), 44100)


# ---- held out ----------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    data: str
    eval_data: str = ""
    hold_out: list = field(default_factory=list)
    allow_overlap: bool = False
    without: tuple = ("eval_split",)


def test_held_out_speakers_are_never_trained_on(data, one_rank):
    pairs, _ = data
    settings = Settings(str(pairs.folder), hold_out=["p2", "p3"])
    train_pairs, train_rows, eval_pairs, rows = split_pairs(settings, 16000, one_rank)
    assert [train_pairs.id(i) for i in train_rows] == ["p1_001", "p1_002"]
    assert [eval_pairs.id(i) for i in rows] == ["p2_001", "p3_001"]
    for prefixes, sentence in ((["q"], "no id in"), (["p"], "leaves nothing")):
        with pytest.raises(UserError, match=sentence):
            split_pairs(Settings(str(pairs.folder), hold_out=prefixes), 16000, one_rank)


def test_evaluation_data_must_not_be_training_data(data, tmp_path, one_rank, capsys):
    pairs, _ = data
    other = support.write_pairs(tmp_path / "other", [clip("p1_009", 9000), clip("p9_001", 9000)])
    _, train_rows, eval_pairs, rows = split_pairs(Settings(str(pairs.folder), str(other)), 16000, one_rank)
    assert len(train_rows) == 4 and len(rows) == 2 and eval_pairs.id(0) == "p1_009"
    assert "1 speakers are in --data and in --eval-data, such as p1" in capsys.readouterr().out
    with pytest.raises(UserError, match="evaluation clip 'p1_001' is trained on: its id is in .* \\(4 such\\)"):
        split_pairs(Settings(str(pairs.folder), str(pairs.folder)), 16000, one_rank)
    split_pairs(Settings(str(pairs.folder), str(pairs.folder), allow_overlap=True), 16000, one_rank)
    assert "warning" in capsys.readouterr().out


def test_the_same_speech_with_other_noise_under_another_id_is_training_data(data, tmp_path, one_rank):
    pairs, _ = data
    noisy = clip("p9_001", len(pairs.clean(2)))["noisy"]
    copy = {"id": "p9_001", "noisy": noisy, "clean": pairs.clean(2).copy()}
    other = support.write_pairs(tmp_path / "other", [clip("p9_002", 9000), copy])
    sentence = f"clip 'p9_001' is trained on: its sound is that of clip '{pairs.id(2)}'"
    with pytest.raises(UserError, match=sentence):
        split_pairs(Settings(str(pairs.folder), str(other)), 16000, one_rank)
