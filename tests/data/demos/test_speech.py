"""data/assets and data/demos/speech.py: small, intact, without a trace of the machine that made them, and loadable."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import datasets
import pytest
import torch

from common.codec import codec_identity, refuse_other_codec
from common.tokens import TokenDataset
from demos import make_assets, voices
from helpers import support

ASSETS = support.ROOT / "data" / "assets"


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    from demo import ensure_demo

    return ensure_demo(tmp_path_factory.mktemp("speech") / "demo", "speech")


def test_assets_are_small_intact_and_described():
    from lib.store import hash_file

    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 15e6
    hashes = json.loads((ASSETS / "hashes.json").read_text())
    described = {str(file.relative_to(ASSETS)) for file in files if file.name not in ("README.md", "hashes.json")}
    assert described == set(hashes)
    assert all(hash_file(ASSETS / name) == digest for name, digest in hashes.items())
    for card in ("codec", "dia", "higgs", "voice"):
        text = (ASSETS / card / "README.md").read_text()
        assert all(word in text for word in ("commands", "seed", "SHA-256", "flite", "licence")), card
        assert all(digest in hashes.values() for digest in re.findall(r"`([0-9a-f]{64})`", text)), card


def test_assets_name_no_path_of_the_machine_that_made_them():
    for file in [*ASSETS.rglob("*.json"), *ASSETS.rglob("*.jsonl")]:
        # A tokenizer has a lone "/" among its letters.
        assert not re.search(r'"(/\w|[A-Z]:\\)', file.read_text()), file


def test_paths_in_the_demo_lead_to_its_own_files(speech):
    from transformers import DiaForConditionalGeneration, DiaProcessor

    for split in ("train", "eval"):
        tokens = TokenDataset(speech / "tokens" / split)
        assert tokens.info["weights"] == str(speech / "codec")
        refuse_other_codec(tokens, codec_identity(tokens.info), "the demo")
    originals = [json.loads(line)[0] for line in (speech / "tokens/eval/sources.jsonl").read_text().splitlines()]
    assert sum(Path(place).is_file() for place in originals) == len(make_assets.ORIGINALS)
    processor = DiaProcessor.from_pretrained(speech / "dia")
    model = DiaForConditionalGeneration.from_pretrained(speech / "dia", dtype=torch.float32)
    config = model.config.decoder_config
    assert processor.audio_tokenizer.config.codebook_size == config.eos_token_id
    assert model.config.delay_pattern == [0, 8, 9, 10, 11, 12, 13, 14, 15], "the real model's"


def test_no_evaluation_sentence_is_trained_on(speech):
    train, evaluation = (datasets.load_from_disk(str(speech / "tokens" / split)) for split in ("train", "eval"))
    assert not set(train["text"]) & set(evaluation["text"])
    assert list(evaluation["text"]) == [f"[S1] {text}" for text in voices.sentences()[:40]]
    words = {word for kind in voices.WORDS for word in kind}
    assert {word for text in train["text"] for word in text.removeprefix("[S1] ").split()} == words
    # Nor by the base, whose sentences make_assets.py chooses: parts of sentences are shorter than any sentence.
    assert not set(make_assets.TRAIN) & set(make_assets.EVAL)
    assert all(len(text.split()) < 4 for text in make_assets.parts_of_sentences())


@pytest.mark.skipif(not shutil.which("flite"), reason="flite is not installed: apt-get install flite")
def test_the_new_voice_is_made_again_byte_for_byte(tmp_path):
    """The recordings that come with the demo are what flite says, whichever machine says it."""
    for number in make_assets.ORIGINALS[:2]:
        voices.speak("slt", voices.sentences()[number], tmp_path / "again.wav")
        assert (tmp_path / "again.wav").read_bytes() == (ASSETS / "voice/audio" / f"{number:03d}.wav").read_bytes()


@pytest.mark.skipif(not shutil.which("flite"), reason="flite is not installed: apt-get install flite")
def test_another_throat_changes_the_pitch_and_not_the_length(tmp_path):
    import numpy as np
    import soundfile

    pitches, lengths = [], []
    for throat in (1.0, 1.25):
        make_assets.speak_once("rms", "seven yellow candles", tmp_path / "wave.wav", 1.0, 100, throat)
        wave, rate = soundfile.read(tmp_path / "wave.wav")
        assert not wave[:100].any()
        spectrum = np.abs(np.fft.rfft(wave, 2**16)) ** 2  # the autocorrelation's peak is the pitch
        correlation = np.fft.irfft(spectrum)[: rate // 50]
        pitches.append(rate / (rate // 400 + correlation[rate // 400 :].argmax()))
        lengths.append(len(wave))
    assert pitches[1] / pitches[0] == pytest.approx(1.25, rel=0.05)
    assert lengths[1] / lengths[0] == pytest.approx(1, rel=0.03)


def test_without_flite_it_is_one_sentence(tmp_path, monkeypatch):
    command = [support.PYTHON, support.ROOT / "data/demos/make_assets.py", "--work", tmp_path / "work"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"],
        env=support.environment() | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "flite is not installed" in done.stderr and "Traceback" not in done.stderr
