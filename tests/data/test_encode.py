"""data/encode.py: from audio and text to a token dataset."""

import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
import torch
from transformers import DacModel

from lib.waveform import Reject, set_loudness


@pytest.fixture
def encode(script, dac):
    def call(source, out, *more):
        return script("encode", "--codec", "dac", "--codec-weights", dac, "--source", source, "--out", out, *more)

    return call


def rows(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in datasets.load_from_disk(str(out))}


def reference_codes(dac: Path, wave: np.ndarray) -> np.ndarray:
    """(T, 9) codes of the zero-padded clip, from the library itself."""
    model = DacModel.from_pretrained(dac).eval()
    padded = np.pad(wave, (0, -len(wave) % 512))
    with torch.no_grad():
        return model.encode(torch.from_numpy(padded)[None, None]).audio_codes[0].T.numpy()


def test_upsampled_clips_are_named(encode, clip, tmp_path):
    """White noise holds all frequencies of its rate, whatever the codec's is."""
    import scipy.signal

    for name, rate in (("full", 44100), ("wideband", 16000), ("telephone", 8000)):
        wave = clip(tmp_path / "in" / f"{name}.wav", seconds=1.0, rate=rate)
        if name == "telephone":  # written at the codec's rate, as such files are found
            wave = scipy.signal.resample(wave, 44100)
            soundfile.write(tmp_path / "in" / "telephone.wav", wave, 44100, subtype="PCM_16")
    code, out, err = encode(tmp_path / "in", tmp_path / "out")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("warning: 2 clips hold no high frequencies")]
    assert "full" not in line and "wideband (8.0 kHz)" in line
    (telephone,) = re.findall(r"telephone \(([\d.]+) kHz\)", line)
    assert float(telephone) == pytest.approx(4, abs=0.6)


def test_folder_to_dataset(encode, clip, dac, tmp_path):
    a = clip(tmp_path / "in/a.wav", "[S1] bada.", seed=1)
    b = clip(tmp_path / "in/deep/Ünïcode name.wav", "[S1] gümi.\n", seconds=0.7, channels=2, seed=2)
    code, out, _ = encode(tmp_path / "in", tmp_path / "tokens")
    assert code == 0, out
    encoded = rows(tmp_path / "tokens")
    assert [encoded[id]["text"] for id in ("a", "deep/Ünïcode name")] == ["[S1] bada.", "[S1] gümi."]
    for id, wave in (("a", a[:, 0]), ("deep/Ünïcode name", b.mean(axis=1))):
        expected = reference_codes(dac, wave)
        assert encoded[id]["frames"] == len(expected) == -(-len(wave) // 512)
        assert np.array_equal(np.reshape(encoded[id]["codes"], (-1, 9)), expected)
    info = json.loads((tmp_path / "tokens/dataset.json").read_text())
    assert info["frames"] == sum(row["frames"] for row in encoded.values())
    assert (info["codec"], info["channels"], info["hop"], info["rows"]) == ("dac", 9, 512, 2)
    assert not (tmp_path / "tokens.work").exists()


def test_codes_are_int16_lists(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    features = datasets.load_from_disk(str(tmp_path / "tokens")).features
    assert features["codes"].feature.dtype == "int16" and features["frames"].dtype == "int32"
    assert "speaker" not in features  # no clip has one


@pytest.mark.parametrize("file", ["in/prompts/track_01.txt", "in/prompts/track_01_prompt.txt"])
def test_prompt_folder(encode, clip, tmp_path, file):
    clip(tmp_path / "in/track_01.wav", None)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("loud drums")
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    assert rows(tmp_path / "tokens")["track_01"]["text"] == "loud drums"


def test_file_name_never_becomes_a_prompt(encode, clip, tmp_path):
    clip(tmp_path / "in/track_01.wav", None)
    clip(tmp_path / "in/other.wav", "[S1] bada.")
    code, _, err = encode(tmp_path / "in", tmp_path / "tokens")
    assert code == 2 and "track_01" in err and not (tmp_path / "tokens").exists()
    code, out, _ = encode(tmp_path / "in", tmp_path / "tokens", "--missing-text", "empty")
    assert code == 0 and "1 of 2 clips have no text" in out
    assert rows(tmp_path / "tokens")["track_01"]["text"] == ""
    assert encode(tmp_path / "in", tmp_path / "skipped", "--missing-text", "skip")[0] == 0
    assert set(rows(tmp_path / "skipped")) == {"other"}


def test_jsonl_manifest(encode, clip, dac, tmp_path):
    wave = clip(tmp_path / "long.wav", None, seconds=2.0)[:, 0]
    lines = [
        {"id": "one", "audio": "long.wav", "text": "[S1] one.", "start": 0.0, "end": 1.0, "speaker": "ann"},
        {"id": "two", "audio": "long.wav", "text": "[S1] two.", "start": 1.0, "split": "eval", "lang": "en"},
    ]
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out, err = encode(tmp_path / "clips.jsonl", tmp_path / "tokens", "--format", "jsonl")
    assert code == 0, err
    encoded = rows(tmp_path / "tokens")
    assert encoded["one"]["speaker"] == "ann" and encoded["two"]["speaker"] is None
    assert encoded["two"]["split"] == "eval" and encoded["two"]["lang"] == "en"
    assert np.array_equal(np.reshape(encoded["two"]["codes"], (-1, 9)), reference_codes(dac, wave[44100:]))


def test_jsonl_may_bring_codes(encode, tmp_path):
    codes = np.random.default_rng(0).integers(0, 1024, (9, 5))
    np.save(tmp_path / "a.npy", codes)
    (tmp_path / "clips.jsonl").write_text(json.dumps({"id": "a", "codes": "a.npy", "text": "[S1] a."}))
    assert encode(tmp_path / "clips.jsonl", tmp_path / "tokens", "--format", "jsonl")[0] == 0
    assert np.array_equal(np.reshape(rows(tmp_path / "tokens")["a"]["codes"], (5, 9)), codes.T)


def test_a_clip_may_have_several_texts(script, encode, tmp_path):
    """Read back by plain `datasets`; data/check.py looks at each of them."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 1024, (9, 60)))
    several = {"a": ["[S1] uh, one.", "", "[S1] one."], "b": "[S1] two.", "c": ["[S1] three."]}
    for field, last in (("text", "[S1] 1."), ("texts", "[S1] 1.\x07")):
        several["a"][1] = last
        lines = [{"id": id, "codes": "a.npy", field: texts} for id, texts in several.items()]
        (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert encode(tmp_path / "clips.jsonl", tmp_path / "tokens", "--format", "jsonl")[0] == 0
        found = rows(tmp_path / "tokens")
        assert found["a"]["text"] == "[S1] uh, one." and found["a"]["texts"] == ["[S1] uh, one.", last, "[S1] one."]
        assert [found[id]["texts"] for id in "bc"] == [["[S1] two."], ["[S1] three."]]
        code, out, _ = script("check", tmp_path / "tokens")
        assert ("with a control character in the text" in out) == (field == "texts"), out
    (tmp_path / "clips.jsonl").write_text(json.dumps({"id": "a", "codes": "a.npy", "texts": ["[S1] a.", 1.5]}))
    code, _, error = encode(tmp_path / "clips.jsonl", tmp_path / "more", "--format", "jsonl")
    assert code == 2 and '"text" must be text, not 1.5' in error


def test_resampled_once_then_a_cache_hit(encode, clip, tmp_path, monkeypatch):
    import torchaudio.functional

    calls = []
    real = torchaudio.functional.resample

    def counting(wave, *rates):
        calls.append(rates)
        return real(wave, *rates)

    monkeypatch.setattr(torchaudio.functional, "resample", counting)
    clip(tmp_path / "in/a.wav", rate=48000)
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    assert calls == [(48000, 44100)]
    before = (tmp_path / "tokens/data-00000-of-00001.arrow").stat()
    code, out, _ = encode(tmp_path / "in", tmp_path / "tokens")
    assert code == 0 and "cache hit" in out and len(calls) == 1
    assert (tmp_path / "tokens/data-00000-of-00001.arrow").stat().st_ino == before.st_ino


def test_only_what_changed_is_encoded_again(encode, clip, tmp_path, monkeypatch):
    from lib import pool

    encoded = []
    real = pool.encode_samples
    monkeypatch.setattr(pool, "encode_samples", lambda *args: encoded.append(1) or real(*args))
    for name in "abc":
        clip(tmp_path / f"in/{name}.wav", seed=ord(name))
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    first = rows(tmp_path / "tokens")
    assert len(encoded) == 3

    clip(tmp_path / "in/b.wav", seed=99)  # different audio
    (tmp_path / "in/c.wav").touch()  # same audio
    (tmp_path / "in/a.txt").write_text("[S1] new text.")  # a new text needs no encoding
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    second = rows(tmp_path / "tokens")
    assert len(encoded) == 4
    assert first["b"]["codes"] != second["b"]["codes"] and first["c"] == second["c"]
    assert second["a"]["text"] == "[S1] new text." and second["a"]["codes"] == first["a"]["codes"]

    assert encode(tmp_path / "in", tmp_path / "tokens", "--min-seconds", "0.1")[0] == 0  # a changed setting
    assert len(encoded) == 7


def test_rejects_have_a_reason_each(encode, clip, tmp_path):
    clip(tmp_path / "in/good.wav")
    clip(tmp_path / "in/short.wav", seconds=0.1)
    clip(tmp_path / "in/quad.wav", channels=4)
    for name, wave in (("silent", np.zeros(44100)), ("broken", np.full(44100, np.nan))):
        soundfile.write(tmp_path / f"in/{name}.wav", wave, 44100, subtype="FLOAT")
    data = (tmp_path / "in/good.wav").read_bytes()
    (tmp_path / "in/cut.wav").write_bytes(data[: len(data) // 2])
    (tmp_path / "in/nothing.wav").write_bytes(b"")
    (tmp_path / "in/text.wav").write_bytes(b"no audio at all")
    for name in ("silent", "broken", "cut", "nothing", "text"):
        (tmp_path / f"in/{name}.txt").write_text("[S1] x")
    code, out, err = encode(tmp_path / "in", tmp_path / "tokens")
    assert code == 1 and "over --max-reject" in err  # the good clip is written nevertheless
    assert set(rows(tmp_path / "tokens")) == {"good"}
    reasons = {}
    for line in (tmp_path / "tokens/rejects.jsonl").read_text().splitlines():
        reasons[json.loads(line)["id"]] = json.loads(line)["reason"]
    expected = {
        "short": "too short",
        "quad": "4 channels",
        "silent": "silence",
        "broken": "NaN",
        "cut": "truncated",
    }
    expected |= {"nothing": "empty file", "text": "unreadable"}
    assert reasons.keys() == expected.keys()
    for name, words in expected.items():
        assert words in reasons[name], reasons[name]
    code, out, _ = encode(tmp_path / "in", tmp_path / "tokens", "--max-reject", "1")
    assert code == 0 and "cache hit" in out and "7 of 8 clips rejected" in out


def test_another_codec_is_refused(script, encode, clip, dac, tmp_path):
    clip(tmp_path / "in/a.wav")
    assert encode(tmp_path / "in", tmp_path / "tokens")[0] == 0
    torch.manual_seed(7)
    DacModel(DacModel.config_class.from_pretrained(dac)).save_pretrained(tmp_path / "other")
    arguments = ("--codec", "dac", "--codec-weights", tmp_path / "other", "--source", tmp_path / "in")
    code, _, err = script("encode", *arguments, "--out", tmp_path / "tokens")
    assert code == 2 and "another codec" in err and err.count("\n") == 1
    assert not (tmp_path / "tokens.work").exists()  # a refused command leaves nothing


def test_loudness_is_that_of_the_standard_and_never_clips(script, dac, clip, tmp_path):
    """A sine of 997 Hz at full scale is -3.01 LUFS by definition; codes are those of a file that was scaled by hand."""
    time = np.arange(44100) / 44100
    sine = 0.25 * np.sin(2 * np.pi * 997 * time).astype(np.float32)
    found = set_loudness(torch.from_numpy(sine)[None], 44100, -20.0)
    assert 20 * np.log10(float(found.abs().max())) == pytest.approx(-20 + 3.01, abs=0.05)
    short = set_loudness(torch.from_numpy(sine[:8820])[None], 44100, -23.0)  # 0.2 s: measured with silence after it
    assert torch.isfinite(short).all() and short.abs().max() > 0
    loud = set_loudness(torch.from_numpy(sine)[None], 44100, -1.0)
    assert float(loud.abs().max()) == pytest.approx(1)
    with pytest.raises(Reject, match="too quiet"):
        set_loudness(torch.full((1, 44100), 1e-6), 44100, -23.0)

    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in/quiet.wav", sine / 8, 44100, subtype="FLOAT")
    soundfile.write(tmp_path / "in/right.wav", found[0].numpy(), 44100, subtype="FLOAT")
    common = ["--codec", "dac", "--codec-weights", dac, "--source", tmp_path / "in", "--missing-text", "empty"]
    codes = {}
    for name, more in (("plain", ()), ("even", ("--loudness", -20))):
        assert script("encode", *common, "--out", tmp_path / name, *more)[0] == 0
        codes[name] = {row["id"]: row["codes"] for row in datasets.load_from_disk(str(tmp_path / name))}
    right = np.array(codes["plain"]["right"])
    assert np.mean(np.array(codes["even"]["quiet"]) == right) > 0.99
    assert np.mean(np.array(codes["plain"]["quiet"]) == right) < 0.9
    assert json.loads((tmp_path / "even/dataset.json").read_text())["settings"]["loudness"] == -20
    assert script("encode", *common, "--out", tmp_path / "x", "--loudness", 3)[0] == 2
