"""data/score.py: voice similarity and word error rate."""

import json
import sys
from pathlib import Path

import pytest
from score import word_error_rate

from helpers import scoring_models


@pytest.mark.parametrize(
    ("text", "heard", "errors"),
    [("one two three", "one two three", 0), ("One, two!", "one too", 0.5), ("a b", "", 1), ("a b", "x a b y", 1)],
)
def test_word_error_rate(text, heard, errors):
    assert word_error_rate(text, heard) == errors


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
    scores = json.loads(out.splitlines()[-1])
    for wave in waves:
        facts = json.loads(wave.with_suffix(".json").read_text())
        assert facts["text"] == "one two" and facts | scores[wave.stem] == facts
    return scores


def test_local_models_score_samples(script, sample_folder):
    voice = scoring_models.save_speaker_encoder(sample_folder / "xvector")
    words = scoring_models.save_recogniser(sample_folder / "ctc")
    scores = score(script, sample_folder, "--similarity", voice, "--wer", words)
    for sample in scores.values():  # each sample is its own reference
        assert sample["similarity"] == pytest.approx(1, abs=1e-5) and sample["wer"] >= 0 and "heard" in sample


@pytest.mark.long
def test_models_with_included_weights_score_samples(script, sample_folder):
    """Optional: pip install --no-deps resemblyzer webrtcvad-wheels pocketsphinx."""
    pytest.importorskip("resemblyzer")
    pytest.importorskip("pocketsphinx")
    scores = score(script, sample_folder, "--similarity", "resemblyzer", "--wer", "pocketsphinx")
    assert all(sample["similarity"] == pytest.approx(1, abs=1e-4) and sample["wer"] >= 0 for sample in scores.values())


VOICE = Path(__file__).parents[2] / "data" / "assets" / "voice"


def test_a_recogniser_that_knows_the_sentences_hears_the_recordings(script, tmp_path):
    pytest.importorskip("pocketsphinx", reason="pip install --no-deps -r requirements-scoring.txt")
    from demos.speech import sentences

    waves = sorted((VOICE / "audio").glob("*.wav"))
    assert waves
    for wave in waves:
        (tmp_path / wave.name).write_bytes(wave.read_bytes())
        facts = {"text": f"[S1] {sentences()[int(wave.stem)]}"}
        (tmp_path / wave.with_suffix(".json").name).write_text(json.dumps(facts))
    code, out, err = script("score", "--wer", f"pocketsphinx:{VOICE}/grammar.jsgf", *sorted(tmp_path.glob("*.wav")))
    assert code == 0, err
    heard = {name: sample["heard"] for name, sample in json.loads(out.splitlines()[-1]).items()}
    assert heard == {wave.stem: sentences()[int(wave.stem)] for wave in waves}


@pytest.mark.parametrize("content", [None, "not a grammar", "#JSGF V1.0;\ngrammar a;\npublic <a> = xqzt;\n"])
def test_a_grammar_that_cannot_be_used_is_one_sentence(script, sample_folder, content):
    pytest.importorskip("pocketsphinx", reason="pip install --no-deps -r requirements-scoring.txt")
    grammar = sample_folder / "words.jsgf"
    if content:
        grammar.write_text(content)
    waves = sorted((sample_folder / "samples").glob("*.wav"))
    code, _, err = script("score", "--wer", f"pocketsphinx:{grammar}", *waves)
    assert code == 2 and "words.jsgf" in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--similarity", "resemblyzer"), ("--wer", "pocketsphinx"), ("--wer", "nothing")])
def test_missing_model_is_a_one_sentence_error(script, sample_folder, monkeypatch, flags):
    for name in ("resemblyzer", "pocketsphinx"):
        monkeypatch.setitem(sys.modules, name, None)
    waves = sorted((sample_folder / "samples").glob("*.wav"))
    code, _, err = script("score", "--references", sample_folder / "refs", *flags, *waves)
    assert code == 2 and ("pip install" in err or "neither a known name" in err)
