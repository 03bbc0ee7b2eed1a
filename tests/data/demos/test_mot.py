"""data/demos/mot.py: its music is what the captions say, and its codec keeps it."""

from collections import Counter

import numpy as np
import soundfile

from common.tokens import TokenDataset
from helpers import pitch_judge


def test_recordings_and_their_codes_are_heard_as_captioned(demo_mot):
    tokens, codec = TokenDataset(demo_mot / "tokens"), pitch_judge.load_codec(demo_mot)
    captions = [tokens.text(row) for row in range(len(tokens))]
    assert len(set(captions)) == 128
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


def test_held_out_captions_combine_what_training_plays(demo_mot):
    """Each sound has two tunes that are held out. The three other instruments play them, in the same register."""
    tokens = TokenDataset(demo_mot / "tokens")
    kinds = {"train": set(), "eval": set()}
    for row in range(len(tokens)):
        _, instrument, tempo, _, _, melody, _, _, register, _ = tokens.text(row).split()
        kinds[tokens.label("split", row)].add((instrument, register, melody, tempo))
    assert len(kinds["train"]) == 112 and len(kinds["eval"]) == 16
    assert sorted(Counter(kind[:2] for kind in kinds["eval"]).values()) == [2] * 8
    assert len({kind[2:] for kind in kinds["eval"]}) == 16
    for _, *rest in kinds["eval"]:
        assert len([kind for kind in kinds["train"] if [*kind[1:]] == rest]) == 3


def test_each_codebook_tells_one_thing(demo_mot):
    """The first the pitch, the second also the instrument, the third how long the tone has sounded."""
    tokens, meanings = TokenDataset(demo_mot / "tokens"), [{}, {}, {}]
    for row in range(len(tokens)):
        caption, codes_tc = tokens.text(row), tokens.codes(row)
        pitches, seconds = pitch_judge.named(caption)
        frames = round(50 * seconds)
        for frame, codes in enumerate(codes_tc):
            pitch, instrument = pitches[frame // frames], caption.split()[1]
            for code, meaning, told in zip(codes, meanings, (pitch, (pitch, instrument), frame % frames), strict=False):
                assert meaning.setdefault(told, code) == code, (caption, frame)
    assert [len(set(meaning.values())) for meaning in meanings] == [8, 32, 10] == list(map(len, meanings))
