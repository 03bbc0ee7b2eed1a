"""data/train_codec.py: a codec learned from a folder of audio."""

import json

import numpy as np
import pytest
import soundfile
import torch
import train_codec
from transformers import DacModel

RATE = 8000
SMALL = "--rate 8000 --strides 4 4 --encoder-width 4 --decoder-width 16 --codebooks 3 --codebook-size 16".split()
SMALL += "--codebook-dim 4 --batch 4 --crop 0.2 --held-out 2 --eval-every 10".split()


def tone(number: int, seconds: float = 0.5) -> np.ndarray:
    """A vowel-like sound: harmonics of its own pitch."""
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = 110 * 2 ** (number / 7)
    wave = sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 6))
    return (0.3 * wave / np.abs(wave).max()).astype(np.float32)


@pytest.fixture
def source(tmp_path):
    for number in range(10):
        path = tmp_path / "clips" / f"deep{number % 2}" / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone(number), RATE)
    return tmp_path / "clips"


def spectral_error(codec: DacModel, wave: np.ndarray) -> float:
    """Mean distance in dB of plain STFT magnitudes after encoding to codes and decoding; not the training's loss."""
    with torch.no_grad():
        codes = codec.encode(torch.from_numpy(wave)[None, None]).audio_codes
        again = codec.decode(audio_codes=codes).audio_values[0].numpy()
    length = min(len(again), len(wave))
    spectra = [np.abs(np.fft.rfft(x[:length].reshape(-1, 160), axis=1)) + 1e-2 for x in (again, wave)]
    return float(np.abs(20 * np.log10(spectra[0] / spectra[1])).mean())


@pytest.mark.long
def test_it_learns_a_codec_that_transformers_loads(script, source, tmp_path):
    code, out, err = script("train_codec", "--source", source, "--out", tmp_path / "codec", *SMALL, "--steps", 120)
    assert code == 0, err
    trained = DacModel.from_pretrained(tmp_path / "codec", dtype=torch.float32).eval()
    assert (trained.config.hop_length, trained.config.sampling_rate, trained.config.n_codebooks) == (16, RATE, 3)
    code, _, err = script("train_codec", "--source", source, "--out", tmp_path / "begun", *SMALL, "--steps", 2)
    assert code == 0, err
    untrained = DacModel.from_pretrained(tmp_path / "begun", dtype=torch.float32).eval()
    wave = tone(3)  # a pitch that was trained, another length
    assert spectral_error(trained, wave) < 0.6 * spectral_error(untrained, wave)
    card = json.loads((tmp_path / "codec" / "training.json").read_text())
    assert card["flags"]["steps"] == "120" and not (tmp_path / "codec.training").exists()


def test_stopped_and_continued_equals_never_stopped(source, tmp_path, monkeypatch):
    monkeypatch.setattr(train_codec, "SAVE_EVERY", 6)

    def train(out: str):
        words = ["--source", str(source), "--out", str(tmp_path / out), *SMALL, "--steps", "20", "--share", "0.5"]
        args = train_codec.parse_args(words)
        waves = train_codec.read_waves(source, RATE, 0.2)
        return train_codec.train(args, waves[2:], waves[:2])[0].state_dict()

    whole = train("whole")
    # The evaluation at step 10 is where it is stopped: the last saved state is that of step 6, without quantizer.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_codec, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train("stopped")
    continued = train("stopped")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_codebooks_leave_little_of_the_latents(source):
    args = train_codec.parse_args(["--source", str(source), "--out", "unused", *SMALL])
    waves = train_codec.read_waves(source, RATE, 0.2)
    model = train_codec.build_model(args).eval()
    with torch.no_grad():
        latents = torch.cat([model.encoder(wave[None, None]) for wave in waves], dim=2)
        random = (latents - model.quantizer(latents)[0]).square().sum() / latents.square().sum()
        reported = train_codec.set_codebooks(model, waves, seed=0)
        left = (latents - model.quantizer(latents)[0]).square().sum() / latents.square().sum()
    assert reported == pytest.approx(float(left), rel=1e-3) and left < 0.25 * random


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--source", "nowhere"], "--source nowhere is not a folder"),
        (["--share", "1"], "--share must lie between 0 and 1"),
        (["--steps", "0"], "--steps: 0 is out of range: it takes 1 or more"),
        (["--decoder-width", "18"], "--decoder-width must be divisible by 4"),
        (["--held-out", "10"], "has 10 usable clips"),
    ],
)
def test_mistakes_are_one_sentence(script, source, tmp_path, words, sentence):
    code, _, err = script("train_codec", "--source", source, "--out", tmp_path / "codec", *SMALL, *words)
    assert code == 2 and sentence in err and "Traceback" not in err and not (tmp_path / "codec").exists()
