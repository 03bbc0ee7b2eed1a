"""data/lib/resume.py and pool.py, through data/encode.py: workers, shards, kill -9, a dying worker, two runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pyarrow as pa
import pytest

ROOT = Path(__file__).parents[3]
CLIPS = 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    import numpy as np
    import soundfile

    folder = tmp_path_factory.mktemp("corpus") / "in"
    folder.mkdir()
    for number in range(CLIPS):
        rng = np.random.default_rng(number)
        soundfile.write(folder / f"{number:02d}.wav", rng.uniform(-0.5, 0.5, 44100), 44100, subtype="PCM_16")
        (folder / f"{number:02d}.txt").write_text(f"[S1] {number}")
    return folder


@pytest.fixture(scope="module")
def arguments(corpus, dac):
    return ["--codec", "dac", "--codec-weights", str(dac), "--source", str(corpus)]


@pytest.fixture(scope="module")
def expected(arguments, tmp_path_factory) -> str:
    """SHA-256 of the Arrow file written by one uninterrupted process."""
    import encode

    out = tmp_path_factory.mktemp("plain") / "out"
    args = encode.parse_args([*arguments, "--out", str(out), "--workers", "1"])
    clips = encode.find_clips(args.source, args.format)
    assert encode.encode_dataset(clips, out, encode.make_job(clips, "dac", args.codec_weights), args.codec_weights) == 0
    return file_hash(out)


def file_hash(out: Path) -> str:
    (entry,) = json.loads((out / "dataset.json").read_text())["files"]
    return entry["sha256"]


HALT = "save = encode.save_part; encode.save_part = lambda *part: (save(*part), time.sleep(600)); "


def start(arguments: list[str], out: Path, workers: int, halt: bool = False) -> subprocess.Popen:
    """The command in a new process; it writes part files often, so that there is something to resume from. `halt`: it
    goes no further than the first one, however busy the machine is."""
    code = "import encode, time; from common.errors import run_command; encode.SECONDS_PER_PART = 0.1; "
    code += (HALT if halt else "") + "run_command(encode.main)"
    guarded = f"import sys; sys.path.insert(0, {str(ROOT / 'data')!r})\nif __name__ == '__main__': {code}"
    script = out.parent / "run.py"  # a file, because spawned workers import the main module again
    script.write_text(guarded)
    command = [sys.executable, script, *arguments, "--out", out, "--workers", str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_parts(process: subprocess.Popen, out: Path) -> None:
    """The last file of a part is the list of its recordings: without that, its clips are checked again."""
    end = time.monotonic() + 600
    lists = out.with_name(out.name + ".work")
    while not any(file.read_text().endswith("\n") for file in lists.glob("sources-*.jsonl")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def rows_in_parts(out: Path) -> int:
    files = out.with_name(out.name + ".work").glob("part-*.arrow")
    return sum(pa.ipc.open_stream(pa.memory_map(str(file))).read_all().num_rows for file in files)


@pytest.fixture
def count_encoded(monkeypatch):
    from lib import pool

    encoded = []
    real = pool.encode_samples
    monkeypatch.setattr(pool, "encode_samples", lambda *args: encoded.append(1) or real(*args))
    return encoded


def test_kill_9_then_the_same_command_continues(arguments, expected, script, count_encoded, tmp_path):
    out = tmp_path / "out"
    process = start(arguments, out, workers=2, halt=True)
    wait_for_parts(process, out)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with pytest.raises(FileNotFoundError):
        datasets.load_from_disk(str(out))
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "workers outlive a killed parent"

    finished = rows_in_parts(out)
    assert 0 < finished < CLIPS
    code, text, err = script("encode", *arguments, "--out", out, "--workers", 1)
    assert code == 0, err
    assert len(count_encoded) == CLIPS - finished and f"{finished} clips are already encoded" in text
    assert file_hash(out) == expected
    assert not out.with_name("out.work").exists()


@pytest.mark.long
def test_two_workers_write_the_same_bytes(arguments, expected, tmp_path):
    process = start(arguments, tmp_path / "out", workers=2)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert file_hash(tmp_path / "out") == expected and "h audio" in err and "x real time" in err


@pytest.mark.long
def test_dying_worker_is_a_one_sentence_error(arguments, expected, script, tmp_path):
    out = tmp_path / "out"
    process = start(arguments, out, workers=2)
    wait_for_parts(process, out)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "spawn_main" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
            break
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "error: a worker process died" in err and "Traceback" not in err
    assert not out.exists()
    assert script("encode", *arguments, "--out", out, "--workers", 1)[0] == 0
    assert file_hash(out) == expected


def test_shards_and_merge(arguments, expected, script, count_encoded, tmp_path):
    out = tmp_path / "out"
    run = [*arguments, "--out", out, "--workers", 1]
    assert script("encode", *run, "--shard", "0/3")[0] == 0
    assert script("encode", *run, "--shard", "2/3")[0] == 0
    assert not out.exists() and 0 < len(count_encoded) < CLIPS
    code, _, err = script("encode", *run, "--merge")
    assert code == 2 and "not encoded yet" in err and not out.exists()
    assert script("encode", *run, "--shard", "1/3")[0] == 0
    assert len(count_encoded) == CLIPS
    code, _, err = script("encode", *run, "--merge")
    assert code == 0, err
    assert file_hash(out) == expected and len(count_encoded) == CLIPS
    assert not out.with_name("out.work").exists()


def test_shard_flag_is_checked(arguments, script, tmp_path):
    code, _, err = script("encode", *arguments, "--out", tmp_path / "out", "--shard", "3/3")
    assert code == 2 and "3/3" in err


def test_second_run_at_the_same_time_is_refused(arguments, script, tmp_path):
    from lib import store

    with store.locked(tmp_path / "out.work/lock"):
        code, _, err = script("encode", *arguments, "--out", tmp_path / "out")
    assert code == 2 and "another process is writing here" in err


def test_killed_between_the_renames_of_publish(arguments, expected, script, count_encoded, tmp_path):
    out = tmp_path / "out"
    assert script("encode", *arguments, "--out", out)[0] == 0
    out.rename(tmp_path / "out.previous")  # as such a kill leaves it
    code, text, _ = script("encode", *arguments, "--out", out)
    assert code == 0 and "cache hit" in text and len(count_encoded) == CLIPS and file_hash(out) == expected
