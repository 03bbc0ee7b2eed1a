"""data/decode.py: codes -> wav."""

import json

import numpy as np
import pytest
import soundfile


@pytest.fixture
def decode(script, dac):
    return lambda *arguments: script("decode", "--codec-weights", dac, *arguments)


def codes(frames: int = 30, channels: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1024, (frames, channels)).astype(np.int16)


@pytest.mark.parametrize("channels, sides", [(9, 1), (18, 2)])
def test_wav(decode, tmp_path, channels, sides):
    np.save(tmp_path / "a.npy", codes(channels=channels))
    code, out, err = decode(tmp_path / "a.npy")
    assert code == 0, err
    wave, rate = soundfile.read(tmp_path / "a.wav", always_2d=True)
    assert rate == 44100 and wave.shape == (30 * 512, sides) and np.abs(wave).max() > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npy", "a.wav"]


def test_stereo_blocks_are_left_then_right(decode, tmp_path):
    both = codes(channels=18)
    np.save(tmp_path / "both.npy", both)
    np.save(tmp_path / "right.npy", both[:, 9:])
    assert decode(tmp_path / "both.npy", tmp_path / "right.npy")[0] == 0
    stereo, right = (soundfile.read(tmp_path / f"{name}.wav", always_2d=True)[0] for name in ("both", "right"))
    assert np.array_equal(stereo[:, 1], right[:, 0]) and not np.array_equal(stereo[:, 0], right[:, 0])


def test_no_frames_give_no_audio_and_no_error(decode, tmp_path):
    np.save(tmp_path / "empty.npy", codes(frames=0))
    code, out, _ = decode(tmp_path / "empty.npy")
    assert code == 0 and "0 frames" in out and not (tmp_path / "empty.wav").exists()


@pytest.mark.parametrize(
    "array, words",
    [
        (np.full((4, 9), 1024, np.int16), "code 1024"),
        (np.full((4, 9), -1, np.int16), "code -1"),
        (np.zeros((4, 8), np.int16), "8 channels"),
        (np.zeros((4, 9), np.float32), "integers"),
        (np.array([{"a": 1}], dtype=object), "plain .npy"),
    ],
)
def test_bad_codes_are_a_one_sentence_error(decode, tmp_path, array, words):
    np.save(tmp_path / "bad.npy", array, allow_pickle=True)
    code, _, err = decode(tmp_path / "bad.npy")
    assert code == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "bad.wav").exists()


def test_silence_and_clipping_are_added_to_the_json(tmp_path):
    from decode import add_audio_facts

    rate = 32000
    wave = np.concatenate([np.zeros(rate), np.full(rate // 2, 0.5), np.zeros(7680), np.ones(8320)])
    (tmp_path / "a.json").write_text('{"text": "x"}')
    add_audio_facts(tmp_path / "a.json", wave[None], rate)
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts == {"text": "x", "silent": 0.62, "longest_silence": 1.0, "clipped": 0.13}
    add_audio_facts(tmp_path / "a.json", np.full((1, rate), 0.5), rate)
    assert json.loads((tmp_path / "a.json").read_text())["longest_silence"] == 0.0
