"""data/lib/sources.py: every input format, through data/encode.py."""

import csv
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
import torch


def rows(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in datasets.load_from_disk(str(out))}


@pytest.fixture
def encode(script, dac, tmp_path):
    """encode(source, format, ...) -> rows of the dataset, or the error message."""

    def call(source, format, *more, weights=True, codec="dac"):
        arguments = ["--codec", codec, "--source", source, "--format", format, "--out", tmp_path / "tokens"]
        if weights:
            arguments += ["--codec-weights", dac]
        code, out, err = script("encode", *arguments, *more)
        if code == 2:
            assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err, err
            return err.splitlines()[-1]
        assert code in (0, 1), err
        return rows(tmp_path / "tokens")

    return call


MUSICCAPS = "ytid start_s end_s caption is_balanced_subset is_audioset_eval".split()


def write_musiccaps(path: Path, *lines: tuple) -> None:
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([MUSICCAPS, *lines])


def test_ljspeech(encode, clip, tmp_path):
    clip(tmp_path / "in/wavs/LJ001-0001.wav", None)
    clip(tmp_path / "in/wavs/LJ001-0002.wav", None, seed=2)
    text = 'LJ001-0001|Chapter "1|chapter "one\nLJ001-0002|only one text\n'
    (tmp_path / "in/metadata.csv").write_text(text)
    encoded = encode(tmp_path / "in", "csv")
    assert {id: row["text"] for id, row in encoded.items()} == {
        "LJ001-0001": 'chapter "one',
        "LJ001-0002": "only one text",
    }


def test_csv_with_header(encode, clip, tmp_path):
    clip(tmp_path / "a.wav", None)
    (tmp_path / "list.csv").write_text('audio,words,speaker,start\na.wav,"one, two",ann,0.1\n')
    row = encode(tmp_path / "list.csv", "csv", "--text-column", "words")["a"]
    assert (row["text"], row["speaker"]) == ("one, two", "ann")
    assert row["frames"] == -(-round(0.5 * 44100) // 512)


def test_csv_with_ragged_rows(encode, clip, tmp_path):
    (tmp_path / "list.csv").write_text("audio,text\na.wav,one, two\n")
    assert "list.csv:2" in encode(tmp_path / "list.csv", "csv")


def test_musiccaps(encode, clip, tmp_path, capsys):
    clip(tmp_path / "audio/-0Gj8-vB1q4.wav", None)  # ids may start with a minus
    clip(tmp_path / "audio/abc.wav", None, seed=2)
    write_musiccaps(
        tmp_path / "caps.csv",
        ("-0Gj8-vB1q4", 30, 40, "two\nlines", "False", "True"),
        ("abc", 0, 10, "drums", "True", "True"),
        ("gone", 0, 10, "no such video", "False", "False"),
    )
    encoded = encode(tmp_path / "caps.csv", "musiccaps", "--audio-root", tmp_path / "audio")
    assert {id: (row["text"], row["split"]) for id, row in encoded.items()} == {
        "-0Gj8-vB1q4": ("two lines", "train"),
        "abc": ("drums", "eval"),
    }


def test_hf_dataset_with_audio(encode, clip, tmp_path):
    wave = clip(tmp_path / "a.wav", None)[:, 0]
    splits = {}
    for split in ("train", "test"):
        row = {"id": [f"clip-{split}"], "sentence": [f"{split} text"]}
        row["audio"] = [{"bytes": (tmp_path / "a.wav").read_bytes(), "path": "a.wav"}]
        splits[split] = datasets.Dataset.from_dict(row).cast_column("audio", datasets.Audio())
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "hf")
    encoded = encode(tmp_path / "hf", "hf")
    assert {id: (row["text"], row["split"]) for id, row in encoded.items()} == {
        "clip-train": ("train text", "train"),
        "clip-test": ("test text", "test"),
    }
    assert encoded["clip-train"]["frames"] == -(-len(wave) // 512)


def test_hf_dataset_with_legacy_codes(encode, tmp_path):
    codes = np.random.default_rng(0).integers(0, 2048, (4, 7))
    data = {"ytid": ["x"], "caption": ["drums"], "audio_codes": [codes.tolist()], "n_codebooks": [4]}
    datasets.Dataset.from_dict(data).save_to_disk(tmp_path / "hf")
    row = encode(tmp_path / "hf", "hf", weights=False, codec="encodec")["x"]
    assert row["text"] == "drums" and np.array_equal(np.reshape(row["codes"], (7, 4)), codes.T)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_legacy_npy(encode, tmp_path, lead):
    codes = np.random.default_rng(0).integers(0, 2048, (4, 1))  # one frame, which a plain squeeze would lose
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/abc.npy", codes.reshape(*lead, 4, 1))
    metadata = {"abc": {"encoded_file": "/home/somebody/else/abc.npy", "n_codebooks": 4}}
    (tmp_path / "npy/pre_encoded_metadata.json").write_text(json.dumps(metadata))
    write_musiccaps(tmp_path / "caps.csv", ("abc", 0, 10, "drums", "False", "False"))
    encoded = encode(
        tmp_path / "npy", "legacy-npy", "--captions", tmp_path / "caps.csv", weights=False, codec="encodec"
    )
    assert encoded["abc"]["text"] == "drums" and np.array_equal(encoded["abc"]["codes"], codes.T.reshape(-1))
    info = json.loads((tmp_path / "tokens/dataset.json").read_text())
    assert (info["sample_rate"], info["hop"], info["codebooks"], info["codebook_size"]) == (32000, 640, 4, 2048)


@pytest.mark.parametrize("frames", [1, 3, 500])
def test_legacy_npy_with_frames_first_is_read_with_a_warning(script, tmp_path, frames):
    codes = np.random.default_rng(0).integers(0, 2048, (frames, 4))
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/abc.npy", codes)
    write_musiccaps(tmp_path / "caps.csv", ("abc", 0, 10, "drums", "False", "False"))
    arguments = ["--source", tmp_path / "npy", "--format", "legacy-npy", "--captions", tmp_path / "caps.csv"]
    code, out, _ = script("encode", "--codec", "encodec", *arguments, "--out", tmp_path / "tokens")
    assert code == 0 and f"warning: abc has shape ({frames}, 4)" in out
    assert np.array_equal(rows(tmp_path / "tokens")["abc"]["codes"], codes.reshape(-1))


@pytest.mark.parametrize("name", ["pre_encoded_metadata.json", "metadata.json", None])
@pytest.mark.parametrize("kind", ["relative", "absolute", "moved", "object"])
def test_legacy_metadata_under_both_names_and_after_a_move(encode, tmp_path, name, kind):
    codes = np.random.default_rng(0).integers(0, 2048, (4, 3))
    folder = tmp_path / "npy"
    (folder / "codes").mkdir(parents=True)
    file = folder / "codes" / "abc.npy" if kind != "moved" else folder / "abc.npy"
    np.save(file, codes)
    path = {
        "relative": "codes/abc.npy",
        "absolute": str(file),
        "moved": "/home/other/abc.npy",
        "object": "codes/abc.npy",
    }
    entry = {"encoded_file": path[kind], "seq_len": 3} if kind == "object" else path[kind]
    if name:
        (folder / name).write_text(json.dumps({"abc": entry}))
    write_musiccaps(tmp_path / "caps.csv", ("abc", 0, 10, "drums", "False", "False"))
    encoded = encode(folder, "legacy-npy", "--captions", tmp_path / "caps.csv", weights=False, codec="encodec")
    assert np.array_equal(encoded["abc"]["codes"], codes.T.reshape(-1))


def test_dataset_records_how_many_clips_its_source_lists(encode, tmp_path):
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/a.npy", np.zeros((4, 3), int))
    write_musiccaps(tmp_path / "caps.csv", *((name, 0, 10, "drums", "False", "False") for name in "abcdefg"))
    encode(tmp_path / "npy", "legacy-npy", "--captions", tmp_path / "caps.csv", weights=False, codec="encodec")
    info = json.loads((tmp_path / "tokens/dataset.json").read_text())
    assert (info["rows"], info["wanted"]) == (1, 7)


def test_legacy_codes_out_of_range_are_rejected_not_clamped(encode, tmp_path):
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/good.npy", np.zeros((4, 3), int))
    np.save(tmp_path / "npy/bad.npy", np.full((4, 3), 2048))
    write_musiccaps(tmp_path / "caps.csv", ("good", 0, 1, "a", "", ""), ("bad", 0, 1, "b", "", ""))
    options = ("--captions", tmp_path / "caps.csv")
    assert set(encode(tmp_path / "npy", "legacy-npy", *options, weights=False, codec="encodec")) == {"good"}
    assert "2048 is outside 0..2047" in (tmp_path / "tokens/rejects.jsonl").read_text()


@pytest.mark.parametrize("channels, flags", [(9, ()), (18, ("--stereo",))])
def test_legacy_pt(encode, tmp_path, channels, flags):
    codes = torch.randint(0, 1024, (5, channels), generator=torch.Generator().manual_seed(0))
    (tmp_path / "pt").mkdir()
    for name in ("one", "track_01"):
        torch.save(codes, tmp_path / f"pt/{name}.pt")
    # The old encoder wrote file names as prompts into its metadata: those are not texts.
    (tmp_path / "pt/metadata.json").write_text(json.dumps({"one.pt": "loud drums", "track_01.pt": "Track 01"}))
    assert "track_01" in encode(tmp_path / "pt", "legacy-pt", *flags, weights=False)
    encoded = encode(tmp_path / "pt", "legacy-pt", *flags, "--missing-text", "empty", weights=False)
    assert encoded["one"]["text"] == "loud drums" and encoded["track_01"]["text"] == ""
    assert np.array_equal(np.reshape(encoded["one"]["codes"], (5, channels)), codes.numpy())


def test_stereo_legacy_codes_need_the_flag(encode, tmp_path):
    (tmp_path / "pt").mkdir()
    torch.save(torch.zeros(5, 18, dtype=torch.long), tmp_path / "pt/one.pt")
    assert "add --stereo" in encode(tmp_path / "pt", "legacy-pt", "--missing-text", "empty", weights=False)


def chat(role: str, *parts) -> dict:
    return {"role": role, "content": parts[0] if len(parts) == 1 else list(parts)}


def audio(name: str) -> dict:
    return {"type": "audio", "audio_url": name}


def test_chatml_both_layouts(encode, clip, tmp_path):
    for number, name in enumerate(("ref", "target", "second")):
        clip(tmp_path / f"{name}.wav", None, seed=number)
    system = "Generate audio.\n\n<|scene_desc_start|>\nA quiet room.\n<|scene_desc_end|>"
    official = [chat("system", system), chat("user", "I am the voice."), chat("assistant", audio("ref.wav"))]
    official += [chat("user", "Say: this"), chat("assistant", audio("target.wav"))]
    text = {"type": "text", "text": "second text"}
    lists = [
        chat("user", {"type": "text", "text": "I am the voice."}, audio("ref.wav"), "Speak: second text"),
        chat("assistant", text, audio("second.wav")),
    ]
    samples = [{"id": "a", "messages": official, "speaker": "ann"}, {"id": "b", "messages": lists}]
    (tmp_path / "chat.json").write_text(json.dumps(samples))
    encoded = encode(tmp_path / "chat.json", "chatml")
    assert encoded.keys() == {"a", "b", "ref@ref"}  # one reference for both
    assert (encoded["a"]["text"], encoded["a"]["ref"], encoded["a"]["scene"]) == (
        "Say: this",
        "ref@ref",
        "A quiet room.",
    )
    assert (encoded["b"]["text"], encoded["b"]["ref"]) == ("second text", "ref@ref")
    assert (encoded["ref@ref"]["text"], encoded["ref@ref"]["ref"]) == ("I am the voice.", None)


def test_chatml_start_index_trains_several_turns(encode, clip, tmp_path):
    messages = []
    for number in range(3):
        clip(tmp_path / f"{number}.wav", None, seed=number)
        messages += [chat("user", f"text {number}"), chat("assistant", audio(f"{number}.wav"))]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"id": "a", "messages": messages, "start_index": 2}))
    encoded = encode(tmp_path / "chat.jsonl", "chatml")
    assert {id: (row["text"], row["ref"]) for id, row in encoded.items()} == {
        "a.0": ("text 1", "0@ref"),
        "a.1": ("text 2", "0@ref"),
        "0@ref": ("text 0", None),
    }


def test_higgs_manifest_and_metadata_json(encode, clip, tmp_path):
    clip(tmp_path / "t.wav", "the text", seed=1)
    clip(tmp_path / "r.wav", None, seed=2)
    item = {"id": "x", "target_text": "the text", "target_audio": "t.wav", "ref_text": "r text", "ref_audio": "r.wav"}
    (tmp_path / "m.jsonl").write_text(json.dumps(item | {"scene": "Outside."}))
    encoded = encode(tmp_path / "m.jsonl", "jsonl")
    assert (encoded["x"]["ref"], encoded["x"]["scene"], encoded["r@ref"]["text"]) == ("r@ref", "Outside.", "r text")

    sample = {"audio_file": "t.wav", "transcript_file": "t.txt", "ref_audio_file": "r.wav", "ref_transcript": "r text"}
    (tmp_path / "metadata.json").write_text(json.dumps({"samples": [sample | {"speaker_id": 7}]}))
    encoded = encode(tmp_path, "metadata-json")
    assert (encoded["t"]["text"], encoded["t"]["ref"], encoded["t"]["speaker"]) == ("the text", "r@ref", "7")


def test_reference_that_is_the_target_is_refused(encode, clip, tmp_path):
    clip(tmp_path / "t.wav", None)
    item = {"id": "x", "text": "a", "audio": "t.wav", "ref_text": "a", "ref_audio": "./t.wav"}
    (tmp_path / "m.jsonl").write_text(json.dumps(item))
    assert "its own reference" in encode(tmp_path / "m.jsonl", "jsonl")


def test_target_is_rejected_with_its_reference(encode, clip, tmp_path):
    clip(tmp_path / "t.wav", None)
    clip(tmp_path / "good.wav", "[S1] x", seed=3)
    soundfile.write(tmp_path / "r.wav", np.zeros(44100), 44100)
    items = [
        {"id": "x", "text": "a", "audio": "t.wav", "ref_text": "b", "ref_audio": "r.wav"},
        {"id": "y", "text": "a", "audio": "good.wav"},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, items)))
    assert set(encode(tmp_path / "m.jsonl", "jsonl")) == {"y"}
    assert "its reference r@ref was rejected" in (tmp_path / "tokens/rejects.jsonl").read_text()
