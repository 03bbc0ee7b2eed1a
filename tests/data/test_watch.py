"""data/watch.py: the samples of a run become audio and scores."""

import io
import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import score
import soundfile
import torch

from helpers import scoring_models
from lib.embedding import frechet, load_embedder

NAMES = ["clip-0000", "clip-0003"]


@pytest.fixture
def run(tmp_path):
    """Recorded codes and those of one step; the second sample of the step is empty."""
    rng = np.random.default_rng(0)
    for folder in ("recorded", "step-00000004"):
        place = tmp_path / "samples" / folder
        place.mkdir(parents=True)
        for number, name in enumerate(NAMES):
            frames = 0 if folder != "recorded" and number else 30
            np.save(place / f"{name}.npy", rng.integers(0, 1024, (frames, 9), dtype=np.int16))
            facts = {"name": name, "text": "one two", "ended": number == 0, "duration_ratio": 1.5 - number}
            (place / f"{name}.json").write_text(json.dumps(facts if folder != "recorded" else {"text": "one two"}))
    return tmp_path


@pytest.fixture
def watch(script, run, monkeypatch):
    """watch(flags) -> the scores of all folders, by name."""

    def call(*flags, folders=("recorded", "step-00000004")) -> dict:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{folder} {' '.join(NAMES)}\n" for folder in folders)))
        code, _, err = script("watch", run, *flags)
        assert code == 0, err
        return {file.stem: json.loads(file.read_text()) for file in (run / "scores").glob("*.json")}

    return call


def test_samples_are_decoded_and_scored_and_a_silent_one_gets_the_worst(watch, run, dac, monkeypatch):
    """The recogniser hears "one"; the quality comes from a stand-in for the package, which is optional."""
    monkeypatch.setattr(score, "load_recogniser", lambda name: lambda wave: "one")

    def quality(wave, sr):
        return {"ovrl_mos": 3.0 if sr == 16000 and abs(wave).max() <= 1 else 0, "p808_mos": 2.0}

    fake = SimpleNamespace(run=quality)
    monkeypatch.setitem(sys.modules, "speechmos", SimpleNamespace(dnsmos=fake))
    scores = watch("--codec-weights", dac, "--wer", "any", "--dnsmos")
    assert scores["recorded"]["means"] == {"wer": 0.5, "dnsmos": 3.0}, "the ceiling"
    assert scores["step-00000004"]["means"] == {
        "wer": (0.5 + 1) / 2,
        "dnsmos": (3 + 1) / 2,
        "stop_rate": 0.5,
        "duration_ratio": 1.0,
    }
    assert scores["step-00000004"]["samples"][NAMES[1]]["unscored"] == "no sound"
    wave, rate = soundfile.read(run / "samples/step-00000004/clip-0000.wav")
    assert rate == 44100 and len(wave) == 30 * 512
    facts = json.loads((run / "samples/step-00000004/clip-0000.json").read_text())
    assert facts["wer"] == 0.5 and facts["heard"] == "one" and "silent" in facts


def test_an_end_before_the_first_frame_is_no_stop(watch, run, dac):
    for name, seconds in zip(NAMES, (0.7, 0.0), strict=True):
        facts = {"name": name, "text": "one two", "ended_by_eos": True, "seconds": seconds, "duration_ratio": 1.0}
        (run / f"samples/step-00000004/{name}.json").write_text(json.dumps(facts))
    assert watch("--codec-weights", dac)["step-00000004"]["means"]["stop_rate"] == 0.5


def test_a_set_with_a_silent_sample_has_no_frechet_distance(watch, run, dac, clap):
    means = watch("--codec-weights", dac, "--embedder", clap)["step-00000004"]["means"]
    assert "frechet" not in means and "caption" in means


def test_a_file_that_is_not_visible_yet_is_waited_for(watch, run, dac):
    facts = run / "samples/step-00000004/clip-0000.json"
    whole = facts.read_text()
    facts.write_text(whole[:10])
    later = threading.Timer(0.5, lambda: facts.write_text(whole))
    later.start()
    assert watch("--codec-weights", dac)["step-00000004"]["means"] == {"stop_rate": 0.5, "duration_ratio": 1.0}


def test_a_sample_that_is_not_there_or_cannot_be_decoded_gets_the_worst(watch, run, dac, monkeypatch):
    monkeypatch.setattr("watch.VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr(score, "load_recogniser", lambda name: lambda wave: "one two")
    (run / "samples/step-00000004/clip-0000.npy").write_text("no codes")
    (run / "samples/step-00000004/clip-0003.json").unlink()
    scores = watch("--codec-weights", dac, "--wer", "any")
    assert scores["recorded"]["means"]["wer"] == 0 and scores["step-00000004"]["means"]["wer"] == 1


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    """A tiny CLAP with random weights, saved as any local model is."""
    torch.manual_seed(0)
    return scoring_models.save_clap(tmp_path_factory.mktemp("embedder") / "clap")


def test_frechet_distance_and_caption_agreement_equal_the_plain_model(watch, run, dac, clap):
    from transformers import ClapModel, ClapProcessor

    codes = np.random.default_rng(3).integers(0, 1024, (40, 9), dtype=np.int16)
    np.save(run / "samples/step-00000004/clip-0003.npy", codes)
    scores = watch("--codec-weights", dac, "--embedder", clap)
    model, processor = ClapModel.from_pretrained(clap).eval(), ClapProcessor.from_pretrained(clap)

    def embedded(folder):
        waves = [score.read_mono(run / "samples" / folder / f"{name}.wav", 48000) for name in NAMES]
        batches = [processor(text=["one two"], audio=[w], sampling_rate=48000, return_tensors="pt") for w in waves]
        with torch.no_grad():
            outputs = [model(**batch) for batch in batches]  # its own embeddings are normalised
        return outputs

    outputs = embedded("step-00000004")
    expected = np.mean([float(o.audio_embeds[0] @ o.text_embeds[0]) for o in outputs])
    assert scores["step-00000004"]["means"]["caption"] == pytest.approx(expected, abs=1e-4)
    embed = load_embedder(str(clap))
    sets = [
        np.concatenate([embed.sound(score.read_mono(run / "samples" / f / f"{name}.wav", 48000)) for name in NAMES])
        for f in ("step-00000004", "recorded")
    ]
    direction = sets[0][0] / np.linalg.norm(sets[0][0])
    assert np.allclose(direction, outputs[0].audio_embeds[0].numpy(), atol=1e-5)
    assert scores["step-00000004"]["means"]["frechet"] == pytest.approx(textbook(*sets), rel=1e-4, abs=1e-6)
    assert "frechet" not in scores["recorded"]["means"] and scores["recorded"]["means"]["caption"] < 1
    # A new process, after a resume.
    again = watch("--codec-weights", dac, "--embedder", clap)
    assert again["step-00000004"]["means"] == pytest.approx(scores["step-00000004"]["means"])


def textbook(a, b):
    """The usual formula, with the matrix square root of scipy."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b)
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * np.real(root)))


def test_frechet_distance_is_the_textbook_one():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(50, 6)) @ rng.normal(size=(6, 6)), rng.normal(1.0, 2.0, size=(40, 6))
    assert frechet(a, b) == pytest.approx(textbook(a, b), rel=1e-6)
    assert frechet(a, a) == pytest.approx(0, abs=1e-8) and frechet(a, a + 2) == pytest.approx(6 * 4)


@pytest.mark.parametrize("flags", [("--dnsmos",), ("--embedder", "nowhere")])
def test_a_missing_model_is_a_one_sentence_error(script, run, dac, monkeypatch, flags):
    monkeypatch.setitem(sys.modules, "speechmos", None)
    code, _, err = script("watch", run, *flags)
    assert code == 2 and ("pip install speechmos" in err or "is not a local folder" in err)
