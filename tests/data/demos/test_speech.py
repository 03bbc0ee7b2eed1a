"""data/assets and data/demos/speech.py: small, intact, without a trace of the machine that made them, and loadable."""

import itertools
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from common.codec import codec_identity, refuse_other_codec
from common.tokens import TokenDataset
from demos.speech import WORDS, sentences
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
    assert sum(Path(place).is_file() for place in originals) == 8
    processor = DiaProcessor.from_pretrained(speech / "dia")
    model = DiaForConditionalGeneration.from_pretrained(speech / "dia", dtype=torch.float32)
    config = model.config.decoder_config
    assert processor.audio_tokenizer.config.codebook_size == config.eos_token_id
    assert model.config.delay_pattern == [0, 8, 9, 10, 11, 12, 13, 14, 15], "the real model's"


def test_no_evaluation_sentence_is_trained_on(speech):
    train, evaluation = (datasets.load_from_disk(str(speech / "tokens" / split)) for split in ("train", "eval"))
    assert not set(train["text"]) & set(evaluation["text"])
    assert list(evaluation["text"]) == [f"[S1] {text}" for text in sentences()[:40]]
    words = {word for kind in WORDS for word in kind}
    assert {word for text in train["text"] for word in text.removeprefix("[S1] ").split()} == words


def test_any_part_of_the_sentences_has_words_of_every_kind():
    slots = re.findall(r"\(([^)]*)\)", (ASSETS / "voice/grammar.jsgf").read_text())
    expected = {" ".join(words) for words in itertools.product(*(slot.split(" | ") for slot in slots))}
    assert len(sentences()) == len(expected) == 625 and set(sentences()) == expected
    assert {word for text in sentences()[:100] for word in text.split()} == set(itertools.chain(*WORDS))


def test_the_codec_keeps_a_vowel():
    from transformers import DacModel

    codec = DacModel.from_pretrained(ASSETS / "codec", dtype=torch.float32).eval()
    time = np.arange(16000) / 16000
    harmonics = {k: np.exp(-(((120 * k - 600) / 300) ** 2)) + 0.05 for k in range(1, 30)}
    wave = sum(gain * np.sin(2 * np.pi * 120 * k * time) for k, gain in harmonics.items())
    wave = (0.3 * wave / np.abs(wave).max()).astype(np.float32)
    with torch.no_grad():
        codes = codec.encode(torch.from_numpy(wave)[None, None]).audio_codes
        again = codec.decode(audio_codes=codes).audio_values[0].numpy()
    assert codes.shape == (1, 9, 50)
    spectra = [np.abs(np.fft.rfft(x[4000:12000] * np.hanning(8000))) for x in (wave, again)]
    bands = [[spectrum[60 * k - 30 : 60 * k + 30].sum() for k in range(1, 12)] for spectrum in spectra]
    assert np.corrcoef(np.log(bands[0]), np.log(bands[1]))[0, 1] > 0.7  # the formant is where it was
