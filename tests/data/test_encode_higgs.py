"""data/encode.py --codec higgs: from a user's recordings to reference/target pairs that the Higgs recipe trains on."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers.higgs_support import make_clips

RATE = 24000


@pytest.fixture
def encode(script, tmp_path, higgs_demo):
    def run(source: str, *more, code=0) -> str:
        weights = ("--codec", "higgs", "--codec-weights", higgs_demo / "codec")
        exit_code, out, err = script(
            "encode", *weights, "--source", tmp_path / source, "--out", tmp_path / "tokens", *more
        )
        assert exit_code == code, err
        return out + err

    return run


def check_pair(higgs_demo, folder: Path, texts: tuple[str, str]) -> None:
    clips = make_clips(higgs_demo, folder)
    [row] = clips.rows([0])
    prompt, dropped = clips.chat.decode([i for i in row.ids if i not in (clips.layout.audio, clips.layout.delay)])
    assert not dropped and prompt.index(texts[0]) < prompt.index(texts[1])
    target, reference = clips.kept[0], clips.reference[clips.kept[0]]
    assert len(row.frames) == clips.tokens.frames[[target, reference]].sum() + 18


def test_manifest_of_targets_and_references(encode, voices, tmp_path, higgs_demo):
    item = {"id": "a", "target_text": "the target", "target_audio": voices[0]}
    item |= {"ref_text": "the reference", "ref_audio": voices[1], "speaker": "ada", "scene": "A street."}
    (tmp_path / "m.jsonl").write_text(json.dumps(item))
    encode("m.jsonl", "--format", "jsonl")
    check_pair(higgs_demo, tmp_path / "tokens", ("the reference.", "the target."))
    [row] = make_clips(higgs_demo, tmp_path / "tokens").rows([0])
    assert "A street." in make_clips(higgs_demo, tmp_path / "tokens").chat.decode(row.ids)[0]


def test_chat(encode, voices, tmp_path, higgs_demo):
    def audio(name):
        return {"role": "assistant", "content": {"type": "audio", "audio_url": name}}

    turns = [{"role": "user", "content": "I am the voice"}, audio(voices[0])]
    turns += [{"role": "user", "content": "Say: this"}, audio(voices[1])]
    (tmp_path / "chat.json").write_text(json.dumps([{"id": "a", "messages": turns, "speaker": "ann"}]))
    encode("chat.json", "--format", "chatml")
    check_pair(higgs_demo, tmp_path / "tokens", ("I am the voice.", "Say: this."))


def test_pair_speakers(encode, voices, script, tmp_path, higgs_demo):
    items = [{"id": n, "audio": n, "text": f"text {i}", "speaker": n.split("_")[0]} for i, n in enumerate(voices)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, items)))
    encode("m.jsonl", "--format", "jsonl")
    code, out, err = script("pair_speakers", tmp_path / "tokens", "--out", tmp_path / "pairs", "--min-seconds", "0.4")
    assert code == 0, err
    clips = make_clips(higgs_demo, tmp_path / "pairs")
    names = [clips.tokens.id(i) for i in range(len(clips.tokens))]
    assert len(clips) == len(voices)
    assert all(names[i].split("_")[0] == names[clips.reference[i]].split("_")[0] for i in clips.kept)


def test_unusable_recordings_are_rejected_with_a_reason(encode, voices, tmp_path):
    """A recording from which no voice can be cloned must not get into the dataset."""
    bad = {
        "none": (np.zeros(0), "empty|no samples"),
        "tiny": (np.full(100, 0.5), "short|under"),
        "silent": (np.zeros(RATE), "silence"),
        "nan": (np.full(RATE, np.nan), "NaN"),
    }
    items = [{"id": "good", "audio": voices[0], "text": "fine"}]
    for name, (wave, _) in bad.items():
        soundfile.write(tmp_path / f"{name}.wav", wave, RATE, subtype="FLOAT")
        items.append({"id": name, "audio": f"{name}.wav", "text": "bad"})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, items)))
    encode("m.jsonl", "--format", "jsonl", code=1)
    rejects = map(json.loads, (tmp_path / "tokens/rejects.jsonl").read_text().splitlines())
    reasons = {line["id"]: line["reason"] for line in rejects}
    assert reasons.keys() == bad.keys()
    for name, (_, pattern) in bad.items():
        assert any(word in reasons[name] for word in pattern.split("|")), reasons[name]
