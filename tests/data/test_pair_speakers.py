"""data/pair_speakers.py: a reference clip by the same speaker for every clip."""

import json
from pathlib import Path

import datasets
import pytest


def rows(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in datasets.load_from_disk(str(out))}


@pytest.fixture
def tokens(script, clip, dac, tmp_path):
    """tokens((id, speaker, split, seconds, seed), ...) -> a token dataset."""

    def make(*clips: tuple) -> Path:
        lines = []
        for id, speaker, split, seconds, seed in clips:
            clip(tmp_path / f"{id}.wav", None, seconds=seconds, seed=seed)
            line = {"id": id, "audio": f"{id}.wav", "text": id, "speaker": speaker, "split": split}
            lines.append({name: value for name, value in line.items() if value is not None})
        (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
        common = ("--codec", "dac", "--codec-weights", dac, "--format", "jsonl")
        code, _, err = script("encode", *common, "--source", tmp_path / "m.jsonl", "--out", tmp_path / "tokens")
        assert code == 0, err
        return tmp_path / "tokens"

    return make


def test_same_speaker_same_split_never_itself(script, tokens, tmp_path):
    names = [(speaker, number, split) for speaker in "ab" for number in range(3) for split in "xy"]
    clips = [(f"{s}{i}{p}", s, p, 0.5, seed) for seed, (s, i, p) in enumerate(names)]
    source = tokens(*clips, ("lonely", "c", "x", 0.6, 1001))
    code, out, err = script("pair_speakers", source, "--out", tmp_path / "out", "--min-seconds", 0.4)
    assert code == 0 and "12 of 13 clips have a reference, 1 left out" in out, err
    paired = rows(tmp_path / "out")
    assert len(paired) == 12
    for id, row in paired.items():
        ref = paired[row["ref"]]
        assert ref["id"] != id and (ref["speaker"], ref["split"]) == (row["speaker"], row["split"])
    info = json.loads((tmp_path / "out/dataset.json").read_text())
    assert info["rows"] == 12 and info["settings"]["pairing"]["seed"] == 0
    assert info["frames"] == sum(row["frames"] for row in paired.values())
    assert not list(source.glob("cache-*")) and not list((tmp_path / "out").glob("cache-*"))
    assert script("check", tmp_path / "out")[0] == 0


def test_choice_depends_only_on_seed_and_id(script, tokens, tmp_path):
    clips = [(f"a{i}", "a", None, 0.5, i) for i in range(8)]
    source = tokens(*clips)
    for name, seed in (("one", 0), ("two", 0), ("three", 5)):
        assert script("pair_speakers", source, "--out", tmp_path / name, "--min-seconds", 0.4, "--seed", seed)[0] == 0
    refs = [{id: row["ref"] for id, row in rows(tmp_path / name).items()} for name in ("one", "two", "three")]
    assert refs[0] == refs[1] != refs[2]


def test_same_audio_is_not_a_reference(script, tokens, tmp_path):
    source = tokens(("a", "s", None, 0.5, 1), ("copy", "s", None, 0.5, 1), ("other", "s", None, 0.5, 2))
    assert script("pair_speakers", source, "--out", tmp_path / "out", "--min-seconds", 0.4)[0] == 0
    paired = rows(tmp_path / "out")
    assert paired["a"]["ref"] == paired["copy"]["ref"] == "other"


def test_reference_lengths_and_allow_no_ref(script, tokens, tmp_path):
    source = tokens(("short", "s", None, 0.5, 1), ("long", "s", None, 0.9, 2))
    flags = ("--min-seconds", 0.8)
    assert script("pair_speakers", source, "--out", tmp_path / "out", *flags)[0] == 0
    paired = rows(tmp_path / "out")
    # "long" has no reference but is kept, because it is the reference of "short"
    assert paired["short"]["ref"] == "long" and paired["long"]["ref"] is None
    lonely = (tmp_path / "out2", *flags)
    assert script("pair_speakers", source, "--out", *lonely, "--allow-no-ref")[0] == 0
    assert len(rows(tmp_path / "out2")) == 2


def test_a_dialogue_keeps_its_references(script, clip, dac, tmp_path):
    for seed, name in enumerate(("talk", "a", "b", "c")):
        clip(tmp_path / f"{name}.wav", None, seed=seed)
    talk = {"id": "talk", "audio": "talk.wav", "text": "[SPEAKER0] x [SPEAKER1] y", "speaker": "both"}
    talk |= {"ref_audio": "a.wav", "ref_text": "x", "ref1_audio": "b.wav", "ref1_text": "y"}
    lines = [talk, *({"id": name, "audio": f"{name}.wav", "text": "x", "speaker": "s"} for name in "ac")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--codec", "dac", "--codec-weights", dac, "--format", "jsonl", "--source", tmp_path / "m.jsonl")
    assert script("encode", *flags, "--out", tmp_path / "tokens")[0] == 0
    assert script("pair_speakers", tmp_path / "tokens", "--out", tmp_path / "out", "--min-seconds", 0.4)[0] == 0
    found = {id: (row["ref"], row["ref1"]) for id, row in rows(tmp_path / "out").items()}
    expected = {"talk": ("a", "b@ref"), "a": ("c", None), "c": ("a", None), "b@ref": (None, None)}
    assert found == expected


def test_user_errors(script, tokens, tmp_path):
    source = tokens(("a", None, None, 0.5, 1))
    code, _, err = script("pair_speakers", source, "--out", tmp_path / "out")
    assert code == 2 and "has no speakers" in err
    code, _, err = script("pair_speakers", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and err.count("\n") == 1
