"""Speaking: the guard between generated ids and the codec, greedy and drawn generation, batches of prompts."""

import numpy as np
import pytest
import torch

from helpers.higgs_support import make_clips
from models.higgs.generate import read_stream, sample_facts, speak
from models.higgs.layout import delayed
from models.higgs.weights import load_higgs


@pytest.fixture(scope="module")
def clips(higgs_demo):
    return make_clips(higgs_demo)


@pytest.fixture(scope="module")
def model(higgs_demo):
    return load_higgs(str(higgs_demo / "model"), "", torch.float32).eval()


@pytest.fixture
def codes():
    return np.random.default_rng(3).integers(0, 1024, (60, 8))


def test_a_whole_stream_gives_its_codes(clips, codes):
    spoken = read_stream(delayed(codes, clips.layout), clips.layout)
    assert spoken.ended and not spoken.bad_ids and not spoken.refused and np.array_equal(spoken.codes, codes)
    after = np.concatenate([delayed(codes, clips.layout), np.full((5, 8), 1025)])  # its batch went on
    assert np.array_equal(read_stream(after, clips.layout).codes, codes)


def test_a_stream_that_was_cut_gives_its_whole_frames(clips, codes):
    spoken = read_stream(delayed(codes, clips.layout)[:40], clips.layout)
    assert not spoken.ended and np.array_equal(spoken.codes, codes[:32])


@pytest.mark.parametrize("bad", [1024, 1025, -1])
def test_ids_that_are_no_codes_are_counted_and_mended(clips, codes, bad):
    stream = delayed(codes, clips.layout)
    stream[20, 2] = bad
    spoken = read_stream(stream, clips.layout)
    assert spoken.bad_ids == 1 and not spoken.refused
    assert spoken.codes[17, 2] == codes[16, 2] and 0 <= spoken.codes.min() and spoken.codes.max() < 1024


def test_too_many_of_them_or_too_few_frames_leave_nothing_to_decode(clips, codes):
    stream = delayed(codes, clips.layout)
    stream[20:24, 2] = 1025
    spoken = read_stream(stream, clips.layout)
    assert spoken.refused == "4 of 480 ids are not codes" and len(spoken.codes) == 0
    for size in (0, 1, 9, 12):
        short = read_stream(delayed(codes[:3], clips.layout)[:size], clips.layout)
        assert short.refused.startswith("empty") and short.codes.shape == (0, 8)


def test_a_sample_that_says_nothing_has_not_stopped(clips, codes):
    """The promotion guard compares stop rates with the base's, which may end its streams at once."""
    for said, stops in ((codes, True), (codes[:2], False)):
        spoken = read_stream(delayed(said, clips.layout), clips.layout)
        assert spoken.ended and sample_facts(spoken, clips, 0)["ended"] is stops


def test_greedy_draws_nothing_though_the_folder_asks_for_a_repeat_guard(model, clips):
    rows = clips.rows([0], answer=False)
    assert model.generation_config.ras_win_len == 7
    streams = [speak(model, rows, clips.layout, 20, seed, greedy=True)[0].stream for seed in (0, 1)]
    assert np.array_equal(*streams) and (streams[0][0] == 1024).all()  # the first frame is forced
    drawn = [speak(model, rows, clips.layout, 20, seed)[0].stream for seed in (0, 0, 1)]
    assert np.array_equal(drawn[0], drawn[1])
    assert drawn[0].shape != drawn[2].shape or not np.array_equal(drawn[0], drawn[2])
    assert model.generation_config.ras_win_len == 7 and model.generation_config.max_new_tokens is None


def test_prompts_of_different_length_say_the_same_together_as_alone(model, clips):
    indices = [0, 5, 10]
    assert len({len(row.ids) for row in clips.rows(indices, answer=False)}) > 1
    together = speak(model, clips.rows(indices, answer=False), clips.layout, 15, 0, greedy=True)
    for index, spoken in zip(indices, together, strict=True):
        [alone] = speak(model, clips.rows([index], answer=False), clips.layout, 15, 0, greedy=True)
        shared = min(len(alone.stream), len(spoken.stream))
        assert np.array_equal(alone.stream[:shared], spoken.stream[:shared]) and shared > 9


def test_a_prompt_without_a_reference_can_be_spoken(model, clips):
    [row] = clips.rows([0], np.array([-1]), answer=False)
    assert len(row.frames) == 0
    [spoken] = speak(model, [row], clips.layout, 10, 0, greedy=True)
    assert len(spoken.stream) and (spoken.stream[0] == 1024).all()
