"""Bad input to data/encode.py: each is a one-sentence error, without a traceback or half-written output."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


class Payload:
    """Unpickling this creates a file, which proves that code was executed."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def encode(script, dac, tmp_path):
    def call(source=tmp_path / "in", *more, out=tmp_path / "out", codec="dac"):
        arguments = ("--codec", codec, "--codec-weights", dac, "--source", source, "--out", out)
        return script("encode", *arguments, *more)

    return call


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, _, err = result
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and "Traceback" not in err, err
    for word in words:
        assert word in last, last


def reasons(out: Path) -> dict[str, str]:
    lines = (out / "rejects.jsonl").read_text().splitlines()
    return {json.loads(line)["id"]: json.loads(line)["reason"] for line in lines}


def test_no_files(encode, tmp_path):
    (tmp_path / "in").mkdir()
    refused(encode(), "no clips found", "in")
    refused(encode(tmp_path / "nowhere"), "does not exist")


def test_latin_1_text(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    (tmp_path / "in/a.txt").write_bytes("café".encode("latin-1"))
    refused(encode(), "a.txt", "not UTF-8", "0xe9")


@pytest.mark.parametrize("path", ["../../x.wav", "/etc/passwd", "link.wav", "", None, 7, "a\0b"])
def test_path_outside_the_folder(encode, clip, tmp_path, path):
    (tmp_path / "in").mkdir()
    clip(tmp_path / "secret.wav")
    (tmp_path / "in/link.wav").symlink_to(tmp_path / "secret.wav")
    (tmp_path / "in/a.jsonl").write_text(json.dumps({"id": "a", "audio": path, "text": "x"}))
    refused(encode(tmp_path / "in/a.jsonl", "--format", "jsonl"), "a.jsonl:1")


def test_text_file_outside_the_folder(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav", None)
    line = {"id": "a", "audio": "a.wav", "text_file": "../../../etc/hostname"}
    (tmp_path / "in/a.jsonl").write_text(json.dumps(line))
    refused(encode(tmp_path / "in/a.jsonl", "--format", "jsonl"), "points outside")


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"audio": "a.wav"}', '{"id": "a"}', '{"id": "a", "audio": "a", "start": -1}']
)
def test_broken_manifest_line(encode, tmp_path, line):
    (tmp_path / "a.jsonl").write_text("\n" + line)
    refused(encode(tmp_path / "a.jsonl", "--format", "jsonl"), "a.jsonl:2")


def test_duplicate_ids(encode, clip, tmp_path):
    clip(tmp_path / "a.wav")
    clip(tmp_path / "b.wav")
    lines = [{"id": "same", "audio": name, "text": "x"} for name in ("a.wav", "b.wav")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    refused(encode(tmp_path / "a.jsonl", "--format", "jsonl"), "same", "a.wav", "b.wav")


def test_two_files_with_one_stem(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    shutil.copy(tmp_path / "in/a.wav", tmp_path / "in/a.flac")
    refused(encode(), "two clips have the id a", "a.flac", "a.wav")


def test_two_stems_with_one_prompt(encode, clip, tmp_path):
    clip(tmp_path / "in/one/a.wav", None)
    clip(tmp_path / "in/two/a.wav", None)
    (tmp_path / "in/prompts").mkdir()
    (tmp_path / "in/prompts/a.txt").write_text("whose?")
    refused(encode(), "would share", "a.txt")


def test_link_loop(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/self.wav").symlink_to(tmp_path / "in/self.wav")
    (tmp_path / "in/self.txt").write_text("x")
    code, out, err = encode(tmp_path / "in", "--max-reject", "0.5")
    assert code == 0 and "not followed" in out, err
    assert "unreadable file" in reasons(tmp_path / "out")["self"]


def test_missing_audio_is_looked_up_again(encode, clip, tmp_path):
    clip(tmp_path / "a.wav")
    lines = [{"id": name, "audio": f"{name}.wav", "text": "x"} for name in "ab"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert encode(tmp_path / "a.jsonl", "--format", "jsonl")[0] == 1
    assert "No such file" in reasons(tmp_path / "out")["b"]
    clip(tmp_path / "b.wav", seed=3)
    assert encode(tmp_path / "a.jsonl", "--format", "jsonl")[0] == 0
    assert not reasons(tmp_path / "out")


def test_every_clip_rejected(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav", seconds=0.01)
    refused(encode(), "all 1 clips were rejected", "too short")
    assert not (tmp_path / "out").exists()


def test_pickle_in_npy_codes_is_not_executed(script, tmp_path):
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/good.npy", np.zeros((4, 3), int))
    np.save(tmp_path / "npy/evil.npy", np.array([Payload(tmp_path / "ran")], dtype=object), allow_pickle=True)
    (tmp_path / "npy/raw.npy").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    (tmp_path / "caps.csv").write_text("ytid,caption\ngood,a\nevil,b\nraw,c\n")
    common = ("--codec", "encodec", "--captions", tmp_path / "caps.csv", "--out", tmp_path / "out")
    code, _, err = script("encode", "--source", tmp_path / "npy", "--format", "legacy-npy", *common)
    assert code == 1, err
    assert "pickle" in reasons(tmp_path / "out")["evil"] and "raw" in reasons(tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_output_is_something_else(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    refused(encode(), "is not a dataset")
    assert (tmp_path / "out/thesis.txt").exists()


def test_unwritable_output(encode, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    (tmp_path / "file").write_text("")
    refused(encode(out=tmp_path / "file/out"), "file/out", "Not a directory")


def test_codec_weights_that_do_not_exist(script, clip, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    clip(tmp_path / "in/a.wav")
    arguments = ("--codec", "dac", "--source", tmp_path / "in", "--out", tmp_path / "out")
    refused(script("encode", *arguments, "--codec-weights", "no/such-codec"), "HF_HUB_OFFLINE forbids a download")
    refused(script("encode", *arguments), "--codec-weights is needed")
    (tmp_path / "empty").mkdir()
    refused(script("encode", *arguments, "--codec-weights", tmp_path / "empty"), "config.json")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 kB, if the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # a failed test may still have a file open


def test_full_disk_then_the_same_command(encode, clip, small_disk, tmp_path):
    for number in range(6):
        clip(tmp_path / f"in/{number}.wav", seconds=1.0, seed=number)
    (small_disk / "ballast").write_bytes(b"x" * 245_000)
    refused(encode(out=small_disk / "out"), str(small_disk), "is full")
    assert not (small_disk / "out").exists()
    (small_disk / "ballast").unlink()
    assert encode(out=small_disk / "out")[0] == 0
    assert json.loads((small_disk / "out/dataset.json").read_text())["rows"] == 6


def test_read_only_disk(encode, clip, small_disk, tmp_path):
    clip(tmp_path / "in/a.wav")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused(encode(out=small_disk / "out"), str(small_disk), "Read-only")


def test_no_traceback_from_the_real_command(tmp_path):
    command = [sys.executable, ROOT / "data/encode.py", "--codec", "dac", "--source", tmp_path / "no", "--out", "x"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: --source") and result.stderr.count("\n") == 1
