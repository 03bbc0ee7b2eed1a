"""data/pairs.py: noisy/clean pairs, from given noisy files or mixed."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile


def rows(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in datasets.load_from_disk(str(out)).with_format("numpy")}


def reasons(out: Path) -> dict[str, str]:
    lines = (out / "rejects.jsonl").read_text().splitlines()
    return {json.loads(line)["id"]: json.loads(line)["reason"] for line in lines}


@pytest.fixture
def pairs(script, tmp_path):
    return lambda *more: script("pairs", "--clean", tmp_path / "clean", "--out", tmp_path / "out", *more)


def test_given_pairs(pairs, clip, tmp_path):
    clean = clip(tmp_path / "clean/deep/a.wav", None, rate=16000, seed=1)[:, 0]
    noisy = np.clip(clean + 0.1, -1, 1)
    (tmp_path / "noisy/deep").mkdir(parents=True)
    soundfile.write(tmp_path / "noisy/deep/a.flac", noisy, 16000)
    code, out, err = pairs("--noisy", tmp_path / "noisy")
    assert code == 0, err
    row = rows(tmp_path / "out")["deep/a"]
    features = datasets.load_from_disk(str(tmp_path / "out")).features
    assert features["clean"].feature.dtype == features["noisy"].feature.dtype == "int16"
    assert row["samples"] == len(clean) == len(row["noisy"])
    assert np.abs(row["clean"] / 32767 - clean).max() < 1e-4 and np.abs(row["noisy"] / 32767 - noisy).max() < 1e-4
    info = json.loads((tmp_path / "out/dataset.json").read_text())
    assert (info["kind"], info["sample_rate"], info["rows"]) == ("pairs", 16000, 1)
    code, out, _ = pairs("--noisy", tmp_path / "noisy")
    assert code == 0 and "cache hit" in out


def test_folders_of_stems(script, clip, tmp_path):
    waves = {}
    for number in (0, 1):
        for stem in ("vocals", "noise", "mixture"):
            path = tmp_path / f"dn/sample_{number:05d}/{stem}.wav"
            waves[number, stem] = clip(path, None, rate=16000, seed=10 * number + len(stem))[:, 0]
    (tmp_path / "dn/sample_00001/mixture.wav").unlink()
    (tmp_path / "dn/sample_00000/metadata.json").write_text("{}")
    options = ("--out", tmp_path / "out", "--max-reject", "0.6")
    code, out, err = script("pairs", "--dn-lm", tmp_path / "dn", *options)
    assert code == 0, err
    (row,) = rows(tmp_path / "out").values()
    assert row["id"] == "sample_00000" and reasons(tmp_path / "out") == {"sample_00001": "no noisy file with this name"}
    for side, stem in (("clean", "vocals"), ("noisy", "mixture")):
        assert np.abs(row[side] / 32767 - waves[0, stem]).max() < 1e-4
    code, _, err = script("pairs", "--dn-lm", tmp_path / "dn", "--clean", tmp_path / "dn", *options)
    assert code == 2 and "--clean cannot be used together with --dn-lm" in err


def test_voicebank_as_published(script, clip, tmp_path):
    root, waves = tmp_path / "vb", {}
    for number, name in enumerate(("trainset_28spk_wav/p226_001", "testset_wav/p232_001")):
        for side in ("clean", "noisy"):
            path = root / f"{side}_{name}.wav"
            waves[side, name] = clip(path, None, rate=48000, seed=2 * number + (side == "noisy"))[:, 0]
    for split, name in (("train", "p226_001"), ("28spk", "p226_001"), ("test", "p232_001")):
        code, _, err = script("pairs", "--voicebank", root, "--split", split, "--out", tmp_path / split)
        assert code == 0, err
        (row,) = rows(tmp_path / split).values()
        assert row["id"] == name and row["samples"] == 9600  # 48 kHz, as published, becomes 16
        assert np.abs(row["clean"].astype(float) - row["noisy"]).max() > 1000
    for words, sentence in (
        (("--split", "56spk"), "has no folder clean_trainset_56spk_wav"),
        (("--split", "valid"), "--voicebank needs --split with one of train, test, 28spk, 56spk"),
        ((), "--voicebank needs --split"),
    ):
        code, _, err = script("pairs", "--voicebank", root, "--out", tmp_path / "x", *words)
        assert code == 2 and sentence in err
    (root / "clean_trainset_56spk_wav").mkdir()
    code, _, err = script("pairs", "--voicebank", root, "--split", "train", "--out", tmp_path / "x")
    assert code == 2 and "choose one with --split 28spk or --split 56spk" in err


def test_hugging_face_columns(script, clip, tmp_path):
    """The same recordings as files and as a dataset make the same pairs; one row is broken."""
    sides = {"clean": [], "noisy": []}
    for number in range(3):
        for side, files in sides.items():
            path = tmp_path / f"{side}/p{number}.wav"
            clip(path, None, rate=22050, seed=2 * number + (side == "noisy"))
            files.append(str(path))
    content = [{"bytes": Path(path).read_bytes(), "path": None} for path in sides["noisy"]]
    content[2]["bytes"] = content[2]["bytes"][:999]
    data = {"id": ["p0", "p1", "p2"], "clean": sides["clean"], "noisy": content}  # by path, and as bytes
    data = (
        datasets.Dataset.from_dict(data).cast_column("clean", datasets.Audio()).cast_column("noisy", datasets.Audio())
    )
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "hf"))
    words = ("pairs", "--source", tmp_path / "hf", "--max-reject", "0.5", "--out")
    code, _, err = script(*words, tmp_path / "out", "--split", "train")
    assert code == 0, err
    code, _, err = script(
        "pairs", "--clean", tmp_path / "clean", "--noisy", tmp_path / "noisy", "--out", tmp_path / "f"
    )
    assert code == 0, err
    found, files = rows(tmp_path / "out"), rows(tmp_path / "f")
    assert set(found) == {"p0", "p1"} and "noisy, row 2: truncated wav" in reasons(tmp_path / "out")["p2"]
    for id, row in found.items():
        assert all(np.array_equal(row[side], files[id][side]) for side in sides)
    code, out, _ = script(*words, tmp_path / "out", "--split", "train")
    assert code == 0 and "cache hit" in out
    for more, sentence in (
        ((), "has the splits train, test: choose one with --split"),
        (("--split", "valid"), "has no split valid; it has train, test"),
        (("--clean", tmp_path), "--clean cannot be used together with --source"),
    ):
        code, _, err = script(*words, tmp_path / "x", *more)
        assert code == 2 and sentence in err, err
    data.remove_columns("noisy").save_to_disk(str(tmp_path / "half"))
    code, _, err = script("pairs", "--source", tmp_path / "half", "--out", tmp_path / "x")
    assert code == 2 and "needs the columns id, clean and noisy; it has id, clean" in err


def test_resampled_to_16_khz_and_mono(pairs, clip, tmp_path):
    for side in ("clean", "noisy"):
        clip(tmp_path / f"{side}/a.wav", None, rate=48000, channels=2, seconds=0.5)
    assert pairs("--noisy", tmp_path / "noisy")[0] == 0
    assert rows(tmp_path / "out")["a"]["samples"] == 8000


def test_two_channels_become_their_mean(pairs, clip, tmp_path):
    stereo = {side: clip(tmp_path / f"{side}/a.wav", None, rate=16000, channels=2) for side in ("clean", "noisy")}
    assert pairs("--noisy", tmp_path / "noisy")[0] == 0
    row = rows(tmp_path / "out")["a"]
    for side, wave in stereo.items():
        assert np.abs(row[side] / 32767 - wave.mean(1)).max() < 1e-4


def test_lengths_and_names_are_checked(pairs, clip, tmp_path):
    for name, seconds in (("good", 0.5), ("one_more", 0.5 + 1 / 16000), ("longer", 0.6)):
        clip(tmp_path / f"clean/{name}.wav", None, rate=16000, seconds=0.5)
        clip(tmp_path / f"noisy/{name}.wav", None, rate=16000, seconds=seconds)
    clip(tmp_path / "clean/alone.wav", None, rate=16000)
    clip(tmp_path / "noisy/stranger.wav", None, rate=16000)
    code, out, err = pairs("--noisy", tmp_path / "noisy")
    assert code == 1 and "stranger" in out and "over --max-reject" in err
    assert set(rows(tmp_path / "out")) == {"good", "one_more"}
    rejected = reasons(tmp_path / "out")
    assert "8000 samples and noisy 9600" in rejected["longer"] and "no noisy file" in rejected["alone"]


def test_mixing_has_the_requested_snr_and_is_keyed(pairs, clip, tmp_path):
    for number in range(8):
        clip(tmp_path / f"clean/{number}.wav", None, rate=16000, seed=number, seconds=1.0)
    clip(tmp_path / "noise/n.wav", None, rate=16000, seed=99, seconds=0.5)  # shorter than the speech
    assert pairs("--noise", tmp_path / "noise", "--snr", "-5:15")[0] == 0
    first = rows(tmp_path / "out")
    levels = {}
    for id, row in first.items():
        clean, noise = row["clean"].astype(float), row["noisy"].astype(float) - row["clean"]
        levels[id] = 10 * np.log10((clean**2).sum() / (noise**2).sum())
    assert all(-5.1 < level < 15.1 for level in levels.values()) and np.ptp(list(levels.values())) > 3

    (tmp_path / "clean/0.wav").unlink()  # the other mixtures must not change
    assert pairs("--noise", tmp_path / "noise", "--snr", "-5:15")[0] == 0
    second = rows(tmp_path / "out")
    assert all(np.array_equal(first[id]["noisy"], row["noisy"]) for id, row in second.items())
    assert pairs("--noise", tmp_path / "noise", "--snr", "-5:15", "--seed", 1)[0] == 0
    assert not np.array_equal(second["1"]["noisy"], rows(tmp_path / "out")["1"]["noisy"])


def test_exact_snr(pairs, clip, tmp_path):
    clip(tmp_path / "clean/a.wav", None, rate=16000)
    clip(tmp_path / "noise/n.wav", None, rate=16000, seed=9)
    assert pairs("--noise", tmp_path / "noise", "--snr", "3:3")[0] == 0
    row = rows(tmp_path / "out")["a"]
    clean, noise = row["clean"].astype(float), row["noisy"].astype(float) - row["clean"]
    assert abs(10 * np.log10((clean**2).sum() / (noise**2).sum()) - 3) < 0.01


def test_each_clip_has_its_own_piece_of_the_noise(pairs, clip, tmp_path):
    for number in range(4):
        clip(tmp_path / f"clean/{number}.wav", None, rate=16000, seed=number)
    clip(tmp_path / "noise/n.wav", None, rate=16000, seed=9, seconds=3.0)
    assert pairs("--noise", tmp_path / "noise", "--snr", "3:3")[0] == 0
    noises = np.stack([row["noisy"].astype(float) - row["clean"] for row in rows(tmp_path / "out").values()])
    assert np.abs(np.corrcoef(noises) - np.eye(4)).max() < 0.5


def test_loud_mixture_is_scaled_not_clipped(pairs, clip, tmp_path):
    clip(tmp_path / "clean/a.wav", None, rate=16000)
    clip(tmp_path / "noise/n.wav", None, rate=16000, seed=9)
    assert pairs("--noise", tmp_path / "noise", "--snr", "-20:-20")[0] == 0
    row = rows(tmp_path / "out")["a"]
    assert (np.abs(row["noisy"].astype(int)) >= 32767).sum() <= 1  # the peak alone
    clean, noise = row["clean"].astype(float), row["noisy"].astype(float) - row["clean"]
    assert abs(10 * np.log10((clean**2).sum() / (noise**2).sum()) + 20) < 0.1


@pytest.mark.parametrize(
    "flags, words", [((), "either --noisy or --noise"), (("--noise", "x"), "must be used together")]
)
def test_flags(pairs, flags, words):
    code, _, err = pairs(*flags)
    assert code == 2 and words in err


def test_empty_and_foreign_folders(pairs, clip, script, tmp_path, dac):
    (tmp_path / "clean").mkdir()
    code, _, err = pairs("--noisy", tmp_path / "clean")
    assert code == 2 and "no audio files found" in err
    clip(tmp_path / "clean/a.wav")
    arguments = ("--codec", "dac", "--codec-weights", dac, "--source", tmp_path / "clean", "--out", tmp_path / "out")
    assert script("encode", *arguments)[0] == 0
    code, _, err = pairs("--noisy", tmp_path / "clean")
    assert code == 2 and "another kind of dataset" in err
