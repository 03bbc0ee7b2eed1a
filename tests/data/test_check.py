"""data/check.py: the summary of a dataset, and the problems that training would refuse."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lib import store


@pytest.fixture
def tokens(script, clip, dac, tmp_path):
    """tokens(name, {id: (seed, text)}, split) -> a token dataset made by data/encode.py."""

    def make(name: str, clips: dict, split: str = "train", **labels) -> Path:
        lines = []
        for id, (seed, text) in clips.items():
            clip(tmp_path / name / f"{id}.wav", None, seed=seed)
            lines.append({"id": id, "audio": f"{id}.wav", "text": text, "split": split, "speaker": "ann"} | labels)
        (tmp_path / name / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
        out = tmp_path / f"{name}_tokens"
        arguments = ("--codec", "dac", "--codec-weights", dac, "--format", "jsonl", "--missing-text", "empty")
        assert script("encode", *arguments, "--source", tmp_path / name / "m.jsonl", "--out", out)[0] == 0
        return out

    return make


def write(folder: Path, rows: list[dict]) -> list[dict]:
    """The columns of these rows; all but codes and frames are texts."""
    kinds = {"codes": store.LISTS, "frames": "int32"}
    return store.write_dataset(folder, rows, {name: kinds.get(name, "string") for name in rows[0]})


def rewrite(folder: Path, change) -> None:
    """Change rows of a dataset and update its checksums, so that only a check of the rows can find the damage."""
    info = store.open_dataset(folder)
    rows = [dict(row) for row in store.read_rows(folder, info)]
    change(rows)
    new = folder.with_name("new")
    info["files"] = write(new, rows)
    info["rows"] = len(rows)
    store.write_json(new / "dataset.json", info)
    shutil.rmtree(folder)
    new.rename(folder)


def test_good_dataset(script, tokens, tmp_path):
    folder = tokens("a", {"x": (1, "[S1] hello"), "y": (2, "[S1] there")})
    code, out, err = script("check", folder, "--listen", 2)
    assert code == 0 and "no problems" in out, err
    for words in ("2 clips", "0.000 h", "codec dac", "speaker: 1 (ann 2)", "codes ", "0.60"):
        assert words in out, words
    made = sorted(file.name for file in (tmp_path / "a_tokens.check").iterdir())
    assert made == ["000000-x.wav", "000001-y.wav"]


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda data: data[:-8], "bytes instead of"),
        (lambda data: data[:500] + bytes(8) + data[508:], "SHA-256"),
        (None, "is missing"),
    ],
)
def test_damaged_files(script, tokens, damage, words):
    folder = tokens("a", {"x": (1, "[S1] hello")})
    file = folder / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(data))
    code, out, _ = script("check", folder)
    assert code == 1 and words in out


def set_first(**values):
    def change(rows):
        rows[0] |= values

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (set_first(codes=np.full(9, 1024, np.int16), frames=1), "outside 0..1023: x"),
        (set_first(codes=np.full(9, -1, np.int16), frames=1), "outside 0..1023: x"),
        (set_first(codes=np.zeros(0, np.int16), frames=0), "without frames: x"),
        (set_first(codes=np.zeros(8, np.int16), frames=1), "without 9 codes per frame: x"),
        (set_first(id="y"), "with a duplicate id: y"),
        (set_first(text="é" * 513), "over 1024 bytes: x"),
        (lambda rows: rows[0].update(codes=rows[1]["codes"], split="eval"), "in another split: y = x"),
    ],
)
def test_rows_that_training_refuses(script, tokens, change, words):
    folder = tokens("a", {"x": (1, "[S1] hello"), "y": (2, "[S1] there")})
    rewrite(folder, change)
    code, out, _ = script("check", folder)
    assert code == 1 and "PROBLEM" in out and words in out, out


def test_leak_between_two_datasets(script, tokens):
    train = tokens("a", {"x": (1, "[S1] hello"), "y": (2, "[S1] there")})
    same = tokens("b", {"z": (2, "[S1] there")}, split="eval")
    assert script("check", train)[0] == script("check", same)[0] == 0
    code, out, _ = script("check", train, same)
    assert code == 1 and "z = y in train" in out


def test_a_group_in_two_splits_is_a_problem_and_a_speaker_a_note(script, tokens):
    train = tokens("a", {"x": (1, "[S1] hello"), "y": (2, "[S1] there")}, group="book 1")
    held = tokens("b", {"z": (3, "[S1] there")}, split="eval", group="book 1")
    other = tokens("c", {"w": (4, "[S1] there")}, split="eval", group="book 2", speaker="bob")
    code, out, _ = script("check", train, held)
    assert code == 1 and "1 clips of a group that is also in another split: z (book 1, as x in train)" in out
    assert "note: 1 clips of a speaker who is also in another split, the first of each: z (ann, as x in train)" in out
    code, out, _ = script("check", train, other)
    assert code == 0 and "another split" not in out
    rewrite(train, lambda rows: rows[1].update(split="eval"))
    code, out, _ = script("check", train)
    assert code == 1 and "another split: y (book 1, as x in train)" in out


def test_an_id_in_two_datasets_is_a_problem(script, tokens):
    train, held = tokens("a", {"x": (1, "[S1] hello")}), tokens("b", {"x": (3, "[S1] there")}, split="eval")
    code, out, _ = script("check", train, held)
    assert code == 1 and f"with the id of a clip in another dataset: x in {train}" in out


def test_notes_are_not_problems(script, tokens):
    folder = tokens("a", {"y": (2, "[S1] " + "a" * 90), "z": (2, "[S1] there")})
    code, out, _ = script("check", folder)
    assert code == 0
    assert "characters per second: y" in out and "z = y" in out


def test_what_training_would_refuse_is_a_problem(script, tokens):
    folder = tokens("a", {"x": (1, ""), "y": (2, "[S1] bell \a"), "z": (3, "[S1] there")})
    code, out, _ = script("check", folder)
    assert code == 1
    assert "1 clips without text" in out and "1 clips with a control character in the text: y" in out


def test_dangling_reference(script, tokens):
    folder = tokens("a", {"x": (1, "[S1] hello")})
    info = store.open_dataset(folder)
    rows = [row | {"ref": "nobody"} for row in store.read_rows(folder, info)]
    info["files"] = write(folder.with_name("refs"), rows)
    store.write_json(folder.with_name("refs") / "dataset.json", info)
    code, out, _ = script("check", folder.with_name("refs"))
    assert code == 1 and "whose reference is missing" in out


def test_pairs(script, clip, tmp_path):
    for side, seed in (("clean", 1), ("noisy", 2)):
        clip(tmp_path / f"{side}/a.wav", None, rate=16000, seed=seed)
    sides = ("--clean", tmp_path / "clean", "--noisy", tmp_path / "noisy")
    assert script("pairs", *sides, "--out", tmp_path / "pairs")[0] == 0
    code, out, _ = script("check", tmp_path / "pairs", "--listen", 1)
    assert code == 0 and "1 pairs at 16000 Hz" in out and (tmp_path / "pairs.check/000000-a.wav").exists()


def test_other_weights_for_listening(script, tokens, tmp_path):
    import torch
    from transformers import DacModel

    folder = tokens("a", {"x": (1, "[S1] hello")})
    torch.manual_seed(3)
    weights = json.loads((folder / "dataset.json").read_text())["weights"]
    DacModel(DacModel.config_class.from_pretrained(weights)).save_pretrained(tmp_path / "other")
    code, _, err = script("check", folder, "--listen", 1, "--codec-weights", tmp_path / "other")
    assert code == 2 and "not the weights that made" in err


def test_not_a_dataset(script, tmp_path):
    code, _, err = script("check", tmp_path)
    assert code == 2 and err.count("\n") == 1
