"""data/demos/mot.py: its music is what the captions say, and its codec keeps it."""

import numpy as np
import soundfile

from common.tokens import TokenDataset
from helpers import pitch_judge


def test_recordings_and_their_codes_are_heard_as_captioned(demo_mot):
    tokens, codec = TokenDataset(demo_mot / "tokens"), pitch_judge.load_codec(demo_mot)
    captions = [tokens.text(row) for row in range(len(tokens))]
    assert len(set(captions)) == 64
    for row, caption in enumerate(captions):
        recording, rate = soundfile.read(demo_mot / "audio" / f"{tokens.id(row)}.wav")
        for wave in (recording, pitch_judge.decode(tokens.codes(row), codec)):
            assert all(pitch_judge.follows(wave, rate, caption).values()), (caption, pitch_judge.tones(wave, rate))
            pitches, seconds = pitch_judge.named(caption)
            others = [other for other in captions if pitch_judge.named(other)[0] != pitches]
            assert not pitch_judge.follows(wave, rate, others[row % len(others)])["melody"]
            others = [other for other in captions if pitch_judge.named(other)[1] != seconds]
            assert not pitch_judge.follows(wave, rate, others[row % len(others)])["tempo"]


def test_noise_is_no_melody():
    noise = 0.2 * np.random.default_rng(0).standard_normal(28 * 640)
    assert pitch_judge.tones(noise, 32000) == []


def test_each_sound_has_one_tune_that_is_held_out(demo_mot):
    tokens = TokenDataset(demo_mot / "tokens")
    held_out = [tokens.text(row).split() for row in range(64) if tokens.label("split", row) == "eval"]
    assert len(held_out) == 8
    assert len({(words[1], words[-2]) for words in held_out}) == 8  # instrument and register
    assert len({(words[2], words[5]) for words in held_out}) == 8  # tempo and melody


def test_the_first_codebook_tells_instrument_and_pitch(demo_mot):
    """So it changes where a tone begins, and nowhere else."""
    tokens = TokenDataset(demo_mot / "tokens")
    for row in range(len(tokens)):
        frames = 10 if "slowly" in tokens.text(row) else 7
        first = tokens.codes(row)[:, 0].reshape(4, frames)
        assert (first == first[:, :1]).all() and (first[1:, 0] != first[:-1, 0]).all()
