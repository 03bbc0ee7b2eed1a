"""data/lib/sources.py: every input format, through data/encode.py."""

import csv
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile


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


def test_musiccaps_cuts_longer_recordings_to_the_captioned_part(encode, clip, tmp_path):
    """The codes are those of a file that was cut by hand; a file that was cut before is used whole."""
    wave = clip(tmp_path / "audio/whole.wav", None, seconds=4)
    soundfile.write(tmp_path / "audio/cut.wav", wave[88200:132300], 44100, subtype="FLOAT")
    clip(tmp_path / "audio/neither.wav", None, seconds=2.5)
    rows = [(name, 2, 3, name, "False", "False") for name in ("whole", "cut")]
    rows += [("neither", 20, 21, "from 20 s", "False", "False")]
    write_musiccaps(tmp_path / "caps.csv", *rows)
    encoded = encode(tmp_path / "caps.csv", "musiccaps", "--audio-root", tmp_path / "audio")
    assert encoded.keys() == {"whole", "cut"}
    assert encoded["whole"]["codes"] == encoded["cut"]["codes"] and encoded["cut"]["frames"] == -(-44100 // 512)
    [item] = map(json.loads, (tmp_path / "tokens/skipped.jsonl").read_text().splitlines())
    assert item["name"] == "neither.wav" and "too long for its caption's 1 s, and too short to be cut" in item["reason"]


def test_everything_that_is_skipped_is_named(script, dac, clip, tmp_path):
    """Sound that soundfile cannot read counts as missing; rows whose video is gone do not."""
    clip(tmp_path / "audio/good.wav", None)
    clip(tmp_path / "audio/other.wav", None)
    names = [f"m{number}" for number in range(7)]
    for name in (*names, "good"):  # good.wav is there too, so good.m4a is not missed
        (tmp_path / f"audio/{name}.m4a").write_bytes(b"\0\0\0 ftypM4A ")
    write_musiccaps(tmp_path / "caps.csv", *((name, 0, 10, "a", "False", "False") for name in ("good", "gone", *names)))
    arguments = ["--codec", "dac", "--codec-weights", dac, "--out", tmp_path / "tokens"]
    arguments += ["--source", tmp_path / "caps.csv", "--format", "musiccaps", "--audio-root", tmp_path / "audio"]
    code, out, _ = script("encode", *arguments)
    assert code == 0
    assert "skipped 7 (soundfile cannot read .m4a; convert it with: ffmpeg -i NAME.m4a NAME.wav): m0.m4a, m1" in out
    assert "m4.m4a, ... (2 more in skipped.jsonl)" in out and "skipped 1 (no audio file in" in out
    skipped = [json.loads(line) for line in (tmp_path / "tokens/skipped.jsonl").read_text().splitlines()]
    assert sorted(item["name"] for item in skipped) == sorted(["gone", "other.wav", *(f"{name}.m4a" for name in names)])
    assert json.loads((tmp_path / "tokens/dataset.json").read_text())["wanted"] == 1 + 7
    # A folder of files names them too.
    code, out, _ = script(
        "encode", *arguments[:4], "--source", tmp_path / "audio", "--missing-text", "skip", "--out", "x"
    )
    assert code == 2 and "skipped 7 (soundfile cannot read .m4a" in out


def test_musiccaps_aspects_are_kept(encode, clip, tmp_path):
    clip(tmp_path / "abc.wav", None)
    clip(tmp_path / "xyz.wav", None, seed=2)
    header = ["ytid", "caption", "aspect_list"]
    for last, sentence in (("['one", 'caps.csv: xyz: "aspect_list" must be a list of texts'), ("", None)):
        with open(tmp_path / "caps.csv", "w", newline="") as stream:
            csv.writer(stream).writerows(
                [header, ["abc", "drums", """['low quality', "it's a drum, \\u00e9"]"""], ["xyz", "a", last]]
            )
        encoded = encode(tmp_path / "caps.csv", "musiccaps")
        if sentence:
            assert sentence in encoded
    assert json.loads(encoded["abc"]["aspects"]) == ["low quality", "it's a drum, é"]
    assert encoded["xyz"]["aspects"] is None
    line = {"id": "j", "audio": "abc.wav", "text": "a", "aspects": ["one", "two"]}
    (tmp_path / "m.jsonl").write_text(json.dumps(line))
    assert json.loads(encode(tmp_path / "m.jsonl", "jsonl")["j"]["aspects"]) == ["one", "two"]


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


@pytest.mark.parametrize("frames", [1, 5])  # one frame, which a plain squeeze would lose
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_legacy_npy(encode, tmp_path, lead, frames):
    codes = np.random.default_rng(0).integers(0, 2048, (4, frames))
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/abc.npy", codes.reshape(*lead, 4, frames))
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


def test_legacy_npy_of_interleaved_codes(script, tmp_path):
    """c0 c1 c2 c3 of the first frame, then of the next; a number that is no multiple of 4 is rejected."""
    codes = np.random.default_rng(0).integers(0, 2048, (4, 4))  # (codebooks, frames)
    flat = [int(codes[k, t]) for t in range(4) for k in range(4)]
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/abc.npy", np.array(flat))
    np.save(tmp_path / "npy/odd.npy", np.array(flat[:-1]))
    write_musiccaps(tmp_path / "caps.csv", *((name, 0, 10, "drums", "False", "False") for name in ("abc", "odd")))
    arguments = ["--source", tmp_path / "npy", "--format", "legacy-npy", "--captions", tmp_path / "caps.csv"]
    code, out, _ = script("encode", "--codec", "encodec", *arguments, "--out", tmp_path / "tokens")
    assert code == 1 and "warning: abc is flat" in out and "codes of shape (15,) do not match 4 codebooks" in out
    assert rows(tmp_path / "tokens")["abc"]["codes"] == codes.T.reshape(-1).tolist()


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


def test_stereo_codes_need_the_flag(encode, tmp_path):
    codes = np.random.default_rng(0).integers(0, 1024, (18, 5))
    np.save(tmp_path / "one.npy", codes)
    (tmp_path / "m.jsonl").write_text(json.dumps({"id": "one", "codes": "one.npy", "text": "x"}))
    assert "add --stereo" in encode(tmp_path / "m.jsonl", "jsonl", weights=False)
    encoded = encode(tmp_path / "m.jsonl", "jsonl", "--stereo", weights=False)
    assert np.array_equal(np.reshape(encoded["one"]["codes"], (5, 18)), codes.T)


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


def test_dialogues_have_two_references(encode, clip, tmp_path):
    for number, name in enumerate("tabu"):
        clip(tmp_path / f"{name}.wav", None, seed=number)
    said = "[SPEAKER0] hi [SPEAKER1] ho"
    one = {"id": "x", "audio": "t.wav", "text": said, "ref_audio": "a.wav", "ref_text": "A.", "ref_speaker": "ann"}
    one |= {"ref1_audio": "b.wav", "ref1_text": "B.", "speaker": "both"}
    (tmp_path / "m.jsonl").write_text(json.dumps(one))
    encoded = encode(tmp_path / "m.jsonl", "jsonl")
    assert (encoded["x"]["ref"], encoded["x"]["ref1"], encoded["x"]["text"]) == ("a@ref", "b@ref", said)
    assert [encoded[id][name] for id in ("a@ref", "b@ref") for name in ("text", "speaker")] == ["A.", "ann", "B.", None]
    turns = [chat("system", "s"), chat("user", "[SPEAKER0] A."), chat("assistant", audio("a.wav"))]
    turns += [chat("user", "[SPEAKER1] B."), chat("assistant", audio("b.wav"))]
    turns += [chat("user", said), chat("assistant", audio("u.wav"))]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"id": "c", "messages": turns}))
    encoded = encode(tmp_path / "chat.jsonl", "chatml")
    assert {id: (row["text"], row["ref"], row["ref1"]) for id, row in encoded.items()} == {
        "c": (said, "a@ref", "b@ref"),
        "a@ref": ("A.", None, None),
        "b@ref": ("B.", None, None),
    }
    (tmp_path / "m.jsonl").write_text(json.dumps({name: value for name, value in one.items() if name != "ref_audio"}))
    assert "for [SPEAKER1] but none for [SPEAKER0]" in encode(tmp_path / "m.jsonl", "jsonl")


def test_dialogues_have_up_to_four_references(encode, clip, tmp_path):
    for number, name in enumerate("tabcdu"):
        clip(tmp_path / f"{name}.wav", None, seed=number)
    said = "[SPEAKER0] hi [SPEAKER1] ho [SPEAKER2] ha [SPEAKER3] hu"
    one = {"id": "x", "audio": "t.wav", "text": said}
    for prefix, name in zip(("ref_", "ref1_", "ref2_", "ref3_"), "abcd", strict=True):
        one |= {f"{prefix}audio": f"{name}.wav", f"{prefix}text": f"{name.upper()}."}
    (tmp_path / "m.jsonl").write_text(json.dumps(one))
    names = ("ref", "ref1", "ref2", "ref3")
    encoded = encode(tmp_path / "m.jsonl", "jsonl")
    assert [encoded["x"][name] for name in names] == ["a@ref", "b@ref", "c@ref", "d@ref"]
    turns = [chat("system", "s")]
    for number, name in ((2, "c"), (0, "a"), (1, "b")):
        turns += [chat("user", f"[SPEAKER{number}] {name.upper()}."), chat("assistant", audio(f"{name}.wav"))]
    turns += [chat("user", said), chat("assistant", audio("u.wav"))]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"id": "c", "messages": turns}))
    encoded = encode(tmp_path / "chat.jsonl", "chatml")
    assert [encoded["c"].get(name) for name in names] == ["a@ref", "b@ref", "c@ref", None]
    del one["ref1_audio"], one["ref3_audio"]
    (tmp_path / "m.jsonl").write_text(json.dumps(one))
    assert "for [SPEAKER2] but none for [SPEAKER1]" in encode(tmp_path / "m.jsonl", "jsonl")


def test_weights_are_kept(encode, clip, tmp_path):
    items = []
    for number, weight in enumerate((2, "0.5", None)):
        clip(tmp_path / f"{number}.wav", None, seed=number)
        items.append(
            {"id": str(number), "audio": f"{number}.wav", "text": "a"} | ({"weight": weight} if weight else {})
        )
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, items)))
    encoded = encode(tmp_path / "m.jsonl", "jsonl")
    assert {id: row["weight"] for id, row in encoded.items()} == {"0": 2.0, "1": 0.5, "2": 1.0}
    for wrong in (-1, "much", float("nan")):
        (tmp_path / "m.jsonl").write_text(json.dumps(items[0] | {"weight": wrong}))
        assert '"weight" must be a number, 0 or more' in encode(tmp_path / "m.jsonl", "jsonl")


@pytest.mark.parametrize("frames", [5, 9, 40])  # 9 x 9 does not tell which side is time
def test_jsonl_may_hold_the_codes_themselves(encode, tmp_path, frames):
    rng = np.random.default_rng(frames)
    target, reference = (rng.integers(0, 1024, (n, 9)) for n in (frames, 12))
    item = {
        "id": "x",
        "text": "a",
        "audio_codes": target.tolist(),
        "ref_text": "b",
        "ref_audio_codes": reference.tolist(),
    }
    (tmp_path / "m.jsonl").write_text("\n" + json.dumps(item))
    encoded = encode(tmp_path / "m.jsonl", "jsonl", weights=False)
    for id, codes in (("x", target), ("x@ref", reference)):
        assert np.array_equal(np.reshape(encoded[id]["codes"], (-1, 9)), codes)
    assert encoded["x"]["ref"] == "x@ref" and encoded["x@ref"]["text"] == "b"
    for wrong, reason in ((reference.tolist()[:3] + [[1]], "differ in length"), (["a"], "not"), ([[2000] * 9], "2000")):
        (tmp_path / "m.jsonl").write_text(json.dumps({"id": "y", "text": "a", "audio_codes": wrong}))
        assert reason in encode(tmp_path / "m.jsonl", "jsonl", weights=False)


def test_instructions_are_stripped_only_as_exact_prefixes(encode, clip, tmp_path):
    texts = {"a": "Say this: one: two", "b": "Say: three", "c": "one more Say this: four"}
    for number, (name, text) in enumerate(texts.items()):
        clip(tmp_path / f"in/{name}.wav", text, seed=number)
    assert {id: row["text"] for id, row in encode(tmp_path / "in", "folder").items()} == texts
    stripped = encode(tmp_path / "in", "folder", "--strip-prefix", "Say this: ", "--strip-prefix", "Say:")
    assert {id: row["text"] for id, row in stripped.items()} == texts | {"a": "one: two", "b": "three"}
    assert "no text begins with it" in encode(tmp_path / "in", "folder", "--strip-prefix", "Speak: ")
    assert "leaves no text for b" in encode(tmp_path / "in", "folder", "--strip-prefix", "Say: three")
