"""data/cluster_speakers.py: speakers from embeddings, with an embedder of the test's own."""

import json
from collections import Counter

import cluster_speakers
import datasets
import numpy as np
import pytest
import soundfile

PITCH = {"ann": 200, "ben": 900, "cat": 2500}  # Hz
EMBEDDER = """
import numpy as np

def embed(wave):
    pitch = np.abs(np.fft.rfft(wave)).argmax() * 16000 / len(wave)
    angle = pitch / 2000
    return np.array([np.cos(angle), np.sin(angle), 0.1]) * 7
"""


def around(center: int, count: int, spread: float, rng) -> np.ndarray:
    vectors = np.eye(8)[center] + spread * rng.normal(size=(count, 8))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def linked(vectors: np.ndarray, threshold: float) -> set[frozenset]:
    """Average linkage by its definition: join the two nearest groups until none is near enough."""
    groups, distance = [[i] for i in range(len(vectors))], 1 - vectors @ vectors.T
    while len(groups) > 1:
        means = {(a, b): distance[np.ix_(groups[a], groups[b])].mean() for a in range(len(groups)) for b in range(a)}
        (a, b), nearest = min(means.items(), key=lambda item: item[1])
        if nearest > threshold:
            break
        groups[b] += groups.pop(a)
    return {frozenset(group) for group in groups}


def partition(numbers: np.ndarray) -> set[frozenset]:
    return {frozenset(np.flatnonzero(numbers == number).tolist()) for number in set(numbers.tolist())}


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.4, 0.9])
def test_clusters_are_those_of_average_linkage(threshold):
    rng = np.random.default_rng(1)
    vectors = np.concatenate([around(0, 9, 0.15, rng), around(1, 6, 0.3, rng), around(2, 4, 0.1, rng)])
    numbers = cluster_speakers.cluster(vectors, [f"c{i}" for i in range(19)], threshold)
    assert partition(numbers) == linked(vectors, threshold)


def test_of_many_clips_the_rest_joins_the_nearest_cluster(monkeypatch):
    rng = np.random.default_rng(2)
    vectors = np.concatenate([around(0, 30, 0.1, rng), around(1, 30, 0.1, rng), around(5, 1, 0.0, rng)])
    ids = [f"c{i}" for i in range(61)]
    whole = cluster_speakers.cluster(vectors, ids, 0.4)
    assert sorted(map(len, partition(whole))) == [1, 30, 30]
    monkeypatch.setattr(cluster_speakers, "MOST_CLUSTERED", 20)
    part = cluster_speakers.cluster(vectors, ids, 0.4)
    assert partition(part[:60]) == partition(whole[:60])


def test_purity_and_names():
    clusters = np.array([0, 0, 0, 0, 1, 1, 2, -1])
    known = ["a", "a", "b", None, None, None, "a", None]
    report = cluster_speakers.describe(clusters, known)
    assert report["purity"] == (2 + 1) / 4 and report["labelled"] == 4  # of a a b | - | a
    assert (report["speakers"], report["single"], report["largest"], report["unplaced"]) == (3, 1, 4, 1)
    assert (report["known_speakers"], report["split"]) == (2, 1)  # a is in two clusters
    named = cluster_speakers.name_speakers(clusters, known)
    assert named == ["a", "a", "b", "a", "speaker-0001", "speaker-0001", "a", None]
    assert cluster_speakers.describe(clusters, [None] * 8)["purity"] is None


@pytest.fixture
def tokens(script, dac, tmp_path):
    """Tones of three pitches; every other clip's speaker is known."""
    lines = []
    for number in range(12):
        name = list(PITCH)[number % 3]
        time = np.arange(22050) / 44100
        soundfile.write(tmp_path / f"{number}.wav", 0.5 * np.sin(2 * np.pi * (PITCH[name] + 5 * number) * time), 44100)
        line = {"id": f"{name}{number}", "audio": f"{number}.wav", "text": "x"}
        lines.append(line | ({"speaker": name} if number % 2 and name != "cat" else {}))
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--codec", "dac", "--codec-weights", dac, "--format", "jsonl", "--min-seconds", 0.1)
    code, _, err = script("encode", *flags, "--source", tmp_path / "m.jsonl", "--out", tmp_path / "tokens")
    assert code == 0, err
    return tmp_path / "tokens"


def test_clips_get_the_speakers_of_their_voices(script, tokens, tmp_path, monkeypatch):
    (tmp_path / "my_voices.py").write_text(EMBEDDER)
    monkeypatch.chdir(tmp_path)
    flags = ("--embedder", "my_voices:embed", "--threshold", 0.05)
    code, out, err = script("cluster_speakers", tokens, "--out", tmp_path / "out", *flags)
    assert code == 0, err
    rows = {row["id"]: row for row in datasets.load_from_disk(str(tmp_path / "out"))}
    for id, row in rows.items():
        assert row["speaker"] == ("speaker-0001" if id.startswith("cat") else id[:3])
    before = {row["id"]: row for row in datasets.load_from_disk(str(tokens))}
    assert all(row["codes"] == before[id]["codes"] for id, row in rows.items())
    known = {id: row["speaker"] for id, row in before.items() if row["speaker"]}
    right = sum(Counter(known[id] for id in known if rows[id]["speaker"] == name).most_common(1)[0][1]
                for name in set(known.values()))  # fmt: skip
    assert f"purity {right / len(known):.4f}, over {len(known)} clips" in out and "12 clips, 3 speakers" in out
    assert json.loads((tmp_path / "out/dataset.json").read_text())["settings"]["speakers"]["purity"] == 1.0
    assert script("check", tmp_path / "out")[0] == 0
    code, out, err = script("pair_speakers", tmp_path / "out", "--out", tmp_path / "pairs", "--min-seconds", 0.1)
    assert code == 0 and "12 of 12 clips have a reference" in out, err


def test_a_recording_that_is_gone_is_decoded(script, tokens, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(cluster_speakers, "load_embedder", lambda _: lambda wave: heard.append(wave) or np.ones(3))
    (tmp_path / "3.wav").unlink()
    code, out, err = script("cluster_speakers", tokens, "--out", tmp_path / "out", "--embedder", "mine")
    assert code == 0 and "12 clips, 1 speakers" in out, err
    assert len(heard) == 12 and all(abs(len(wave) - 8000) < 400 for wave in heard)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--embedder", "no_such_module:embed"), "--embedder no_such_module:embed cannot be imported"),
        (("--embedder", "json:no_function"), "--embedder json:no_function cannot be imported"),
        (("--embedder", "/nowhere"), "--embedder /nowhere is neither a known name nor a local folder"),
        (("--embedder", "math:isnan"), "--embedder math:isnan failed on clip"),  # it takes no array
        (("--embedder", "numpy:zeros_like"), "--embedder numpy:zeros_like gives no usable embedding of clip"),
        (("--embedder", "json:loads", "--threshold", 0), "--threshold: 0 is out of range"),
    ],
)
def test_user_errors(script, tokens, tmp_path, flags, sentence):
    code, _, err = script("cluster_speakers", tokens, "--out", tmp_path / "out", *flags)
    assert code == 2 and sentence in err and not (tmp_path / "out").exists(), err
