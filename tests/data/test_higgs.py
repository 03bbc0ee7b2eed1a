"""From a user's recordings to pairs that the Higgs recipe trains on, through data/encode.py --codec higgs."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from score import word_errors

from helpers.higgs_support import make_pairs

RATE = 24000


@pytest.fixture
def voices(tmp_path, higgs_demo):
    """Recordings of the demo in a folder of their own."""
    for file in (higgs_demo / "audio/eval").glob("*.wav"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return sorted(path.name for path in tmp_path.glob("*.wav"))


@pytest.fixture
def encode(script, tmp_path, higgs_demo):
    def run(source: str, *more, code=0) -> str:
        weights = ("--codec", "higgs", "--codec-weights", higgs_demo / "codec")
        found, out, err = script("encode", *weights, "--source", tmp_path / source, "--out", tmp_path / "tokens", *more)
        assert found == code, err
        return out + err

    return run


def check_pair(higgs_demo, folder: Path, texts: tuple[str, str]) -> None:
    pairs = make_pairs(higgs_demo, folder)
    [row] = pairs.rows([0])
    prompt, dropped = pairs.chat.decode([i for i in row.ids if i not in (pairs.layout.audio, pairs.layout.delay)])
    assert not dropped and prompt.index(texts[0]) < prompt.index(texts[1])
    target, reference = pairs.kept[0], pairs.reference[pairs.kept[0]]
    assert len(row.frames) == pairs.tokens.frames[[target, reference]].sum() + 18


def test_a_manifest_of_targets_and_references(encode, voices, tmp_path, higgs_demo):
    item = {"id": "a", "target_text": "the target", "target_audio": voices[0]}
    item |= {"ref_text": "the reference", "ref_audio": voices[1], "speaker": "ada", "scene": "A street."}
    (tmp_path / "m.jsonl").write_text(json.dumps(item))
    encode("m.jsonl", "--format", "jsonl")
    check_pair(higgs_demo, tmp_path / "tokens", ("the reference.", "the target."))
    [row] = make_pairs(higgs_demo, tmp_path / "tokens").rows([0])
    assert "A street." in make_pairs(higgs_demo, tmp_path / "tokens").chat.decode(row.ids)[0]


def test_a_chat(encode, voices, tmp_path, higgs_demo):
    def audio(name):
        return {"role": "assistant", "content": {"type": "audio", "audio_url": name}}

    turns = [{"role": "user", "content": "I am the voice"}, audio(voices[0])]
    turns += [{"role": "user", "content": "Say: this"}, audio(voices[1])]
    (tmp_path / "chat.json").write_text(json.dumps([{"id": "a", "messages": turns, "speaker": "ann"}]))
    encode("chat.json", "--format", "chatml")
    check_pair(higgs_demo, tmp_path / "tokens", ("I am the voice.", "Say: this."))


def test_speakers_paired_by_the_tool(encode, voices, script, tmp_path, higgs_demo):
    items = [{"id": n, "audio": n, "text": f"text {i}", "speaker": n.split("_")[0]} for i, n in enumerate(voices)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, items)))
    encode("m.jsonl", "--format", "jsonl")
    code, out, err = script("pair_speakers", tmp_path / "tokens", "--out", tmp_path / "pairs", "--min-seconds", "0.4")
    assert code == 0, err
    pairs = make_pairs(higgs_demo, tmp_path / "pairs")
    names = [pairs.tokens.id(i) for i in range(len(pairs.tokens))]
    assert len(pairs) == len(voices)
    assert all(names[i].split("_")[0] == names[pairs.reference[i]].split("_")[0] for i in pairs.kept)


def test_unusable_recordings_are_named_with_the_reason(encode, voices, tmp_path):
    """Never an empty feature: what cannot show a voice does not get into the dataset."""
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


# ---- scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "heard", "errors"),
    [("one two three", "one two three", 0), ("One, two!", "one too", 0.5), ("a b", "", 1), ("a b", "x a b y", 1)],
)
def test_word_errors(text, heard, errors):
    assert word_errors(text, heard) == errors


@pytest.fixture
def sample_folder(tmp_path, voices):
    (tmp_path / "refs").mkdir()
    (tmp_path / "samples").mkdir()
    for name in voices[:2]:
        (tmp_path / "refs" / name).write_bytes((tmp_path / name).read_bytes())
        (tmp_path / "samples" / name).write_bytes((tmp_path / name).read_bytes())
        (tmp_path / "samples" / name).with_suffix(".json").write_text(json.dumps({"name": name, "text": "one two"}))
    return tmp_path


def score(script, folder: Path, *flags) -> dict:
    waves = sorted((folder / "samples").glob("*.wav"))
    code, out, err = script("score", "--references", folder / "refs", *flags, *waves)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    for wave in waves:
        facts = json.loads(wave.with_suffix(".json").read_text())
        assert facts["text"] == "one two" and facts | found[wave.stem] == facts
    return found


def test_local_models_score_samples(script, sample_folder):
    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2CTCTokenizer,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForCTC,
        Wav2Vec2ForXVector,
        Wav2Vec2Processor,
    )

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    sizes |= {"tdnn_dim": [16] * 5, "xvector_output_dim": 16, "vocab_size": 8, "pad_token_id": 0}
    extractor = Wav2Vec2FeatureExtractor()
    voice, words = sample_folder / "xvector", sample_folder / "ctc"
    Wav2Vec2ForXVector(Wav2Vec2Config(**sizes)).save_pretrained(voice)
    extractor.save_pretrained(voice)
    (sample_folder / "vocab.json").write_text(
        json.dumps({t: i for i, t in enumerate(["<pad>", "<unk>", "|", *"abcde"])})
    )
    tokenizer = Wav2Vec2CTCTokenizer(str(sample_folder / "vocab.json"), pad_token="<pad>", unk_token="<unk>")
    Wav2Vec2ForCTC(Wav2Vec2Config(**sizes)).save_pretrained(words)
    Wav2Vec2Processor(extractor, tokenizer).save_pretrained(words)
    found = score(script, sample_folder, "--similarity", voice, "--wer", words)
    for facts in found.values():  # a sample that is its own reference
        assert facts["similarity"] == pytest.approx(1, abs=1e-5) and facts["wer"] >= 0 and "heard" in facts


def test_the_plug_ins_with_weights_inside_score_samples(script, sample_folder):
    """Optional: pip install --no-deps resemblyzer webrtcvad-wheels pocketsphinx."""
    pytest.importorskip("resemblyzer")
    pytest.importorskip("pocketsphinx")
    found = score(script, sample_folder, "--similarity", "resemblyzer", "--wer", "pocketsphinx")
    assert all(facts["similarity"] == pytest.approx(1, abs=1e-4) and facts["wer"] >= 0 for facts in found.values())


@pytest.mark.parametrize("flags", [("--similarity", "resemblyzer"), ("--wer", "pocketsphinx"), ("--wer", "nothing")])
def test_a_missing_plug_in_is_one_sentence(script, sample_folder, monkeypatch, flags):
    import sys

    for name in ("resemblyzer", "pocketsphinx"):
        monkeypatch.setitem(sys.modules, name, None)
    waves = sorted((sample_folder / "samples").glob("*.wav"))
    code, _, err = script("score", "--references", sample_folder / "refs", *flags, *waves)
    assert code == 2 and ("pip install" in err or "neither a known name" in err)
