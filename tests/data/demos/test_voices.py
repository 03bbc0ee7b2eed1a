"""Synthetic voices, and the codec that was trained on them."""

import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import torch
from transformers import DacModel

from demos import voices

CODEC = Path(__file__).parents[3] / "data/assets/codec"


def test_every_sentence_of_the_grammar_once():
    slots = re.findall(r"\(([^)]*)\)", voices.grammar())
    expected = {" ".join(words) for words in itertools.product(*(slot.split(" | ") for slot in slots))}
    assert len(voices.sentences()) == len(expected) == 625 and set(voices.sentences()) == expected
    # Any part of them has words of every kind: the first hundred could be all that a model hears.
    assert {word for text in voices.sentences()[:100] for word in text.split()} == set(itertools.chain(*voices.WORDS))


def test_without_flite_it_says_what_to_install(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = script("demos.voices", "--out", tmp_path / "voices")
    assert code == 2 and "apt-get install flite" in err and not (tmp_path / "voices").exists()


def test_the_codec_is_the_one_on_its_card_and_keeps_a_vowel():
    card = (CODEC / "README.md").read_text()
    assert hashlib.sha256((CODEC / "model.safetensors").read_bytes()).hexdigest() in card
    codec = DacModel.from_pretrained(CODEC, dtype=torch.float32).eval()
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
