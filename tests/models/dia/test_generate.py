"""What is generated, compared with plain transformers: the samples of a run, and speech that continues a recording."""

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.keyed_random import torch_seed
from common.runtime import Process
from models.dia import generate
from models.dia.generate import sample, sampling, speak, speak_parts
from models.dia.layout import continue_text, text_bytes

SETTINGS = {"guidance_scale": 3.0, "temperature": 1.8, "top_p": 0.9, "top_k": 45}
CAP = 13  # frames of a sample: 1.5 x the longest clip
TEXTS = ["[S1] one.", "[S1] a second text.", "[S1] three [S2] and more."]


def plain_codes(model, processor, text, frames, seed, audio=None, **settings):
    """(T, 9) codes by the library alone: its processor's inputs, its generate, its own way back from the delay."""
    inputs = processor(text=[text], audio=audio, padding=True, return_tensors="pt")
    torch.manual_seed(seed)
    stream = model.generate(**inputs, max_new_tokens=frames + 16, **settings)[0]
    start = processor.get_audio_prompt_len(inputs["decoder_attention_mask"])
    indices = processor.build_indices(1, len(stream), 9, model.config.delay_pattern, revert=True)
    codes = processor.apply_audio_delay(stream[None], -1, -1, indices)[0].numpy()
    end = int(np.flatnonzero(codes[start:, 0] == 1024)[0])
    return codes[start : start + end]


@pytest.fixture
def held_out(make_clips, random_codes):
    def make(**flags):
        return make_clips(random_codes(9, 7, 8), TEXTS, train=False, info={"weights": None}, samples=3, **flags)

    return make


def samples_of(model, clips, folder, step, ranks=1, all_ranks_must_join=False):
    """The codes of all ranks, one after the other in this process."""
    for rank in range(ranks):
        sample(model, clips, folder, step, Process(rank, ranks, torch.device("cpu")), all_ranks_must_join)
    return [np.load(file) for file in sorted((folder / "samples" / f"step-{step:08d}").glob("*.npy"))]


def test_samples_equal_plain_generate_with_the_same_settings(tiny_dia, processor, held_out, tmp_path):
    """Those of the checkpoint's generation_config.json; each clip with its own seed."""
    model, clips = tiny_dia(), held_out(seed=4)
    model.generation_config.update(do_sample=True, **SETTINGS)
    found = samples_of(model, clips, tmp_path, 5)
    for i, text in enumerate(TEXTS):
        expected = plain_codes(model, processor, text, CAP, torch_seed(4, i, "sample"))
        assert np.array_equal(found[i], expected) and len(expected) > 3


def test_greedy_samples_are_the_most_likely_codes_without_guidance(tiny_dia, processor, held_out, tmp_path):
    model, clips = tiny_dia(), held_out()
    found = samples_of(model, clips, tmp_path, 5)
    for i, text in enumerate(TEXTS):
        expected = plain_codes(model, processor, text, CAP, 0, do_sample=False, guidance_scale=None)
        assert np.array_equal(found[i], expected)


def test_samples_are_the_same_for_any_number_of_ranks_and_at_every_step(tiny_dia, held_out, tmp_path):
    model, clips = tiny_dia(), held_out()
    model.generation_config.update(do_sample=True, **SETTINGS)
    one = samples_of(model, clips, tmp_path / "one", 1)
    for other in (
        samples_of(model, clips, tmp_path / "one", 2),
        samples_of(model, clips, tmp_path / "two", 1, ranks=2, all_ranks_must_join=True),
        samples_of(model, clips, tmp_path / "four", 1, ranks=4, all_ranks_must_join=True),
    ):
        assert len(other) == 3 and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0][:5], one[1][:5])


@pytest.mark.parametrize("greedy", [False, True])
def test_under_zero3_every_rank_generates_equally_often(tiny_dia, held_out, tmp_path, monkeypatch, greedy):
    """A forward pass gathers the weights from all ranks: one call more on any rank would wait forever."""
    model, clips, calls = tiny_dia(), held_out(), []
    model.generation_config.update(do_sample=not greedy)
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs))
    counts = []
    for rank in range(4):  # 3 clips
        sample(model, clips, tmp_path, 1, Process(rank, 2 if rank < 2 else 4, torch.device("cpu")), True)
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] == (1 if greedy else 2) and counts[2] == counts[3] == 1


# ---- a recording that goes on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [False, True])
def test_speech_after_a_recording_equals_the_librarys_own(tiny_dia, processor, monkeypatch, greedy):
    """The processor encodes the recording itself; what our model gets and says is bit for bit the same."""
    model, wave = tiny_dia(), np.random.default_rng(3).uniform(-1, 1, 7 * 512).astype(np.float32)
    with torch.no_grad():
        codes = processor.audio_tokenizer.encode(torch.from_numpy(wave)[None, None]).audio_codes[0].T.numpy()
    text = continue_text("[S1] Who speaks.", "[S1] More.")
    settings = sampling(greedy, 1.8, 0.9, 45, 3.0)
    expected = plain_codes(model, processor, text, 20, 6, [wave], **settings)
    given, generate = {}, model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: given.update(inputs) or generate(**inputs))
    [(found, _)] = speak(model, [text_bytes(text, {}, "text")], 20, 6, voice=codes, **settings)
    theirs = processor(text=[text], audio=[wave], padding=True, return_tensors="pt")
    for name, value in theirs.items():
        assert torch.equal(given[name], value.long()), name
    assert np.array_equal(found, expected) and len(expected) > 3


LONG = "[S1] " + " ".join(f"This is sentence number {number} of a text that is long." for number in range(30))


def test_the_parts_of_a_long_text_continue_the_recording_of_the_voice(tiny_dia, random_codes):
    """Each is what one call says with that voice; the second has a seed of its own."""
    model, [voice], options = tiny_dia(), random_codes(40), sampling(False, 1.8, 0.9, 45, 3.0)
    text = LONG[: LONG.index(" This is sentence number 8")]
    parts = list(speak_parts(model, text, "speech", {}, 6, 86.1, 5, voice, "[S1] Hello.", **options))
    assert [left for *_, left in parts] == [1, 0] and continue_text(parts[0][0], parts[1][0]) == text
    for number, (part, codes, _, _) in enumerate(parts):
        ids = text_bytes(f"[S1] Hello. {part.removeprefix('[S1] ')}", {}, "text")
        seed = 5 if number == 0 else torch_seed(5, 1, "part")
        assert np.array_equal(codes, speak(model, [ids], 6, seed, voice=voice, **options)[0][0])


def test_without_a_recording_the_first_part_that_ends_is_the_voice_of_the_others(tiny_dia, monkeypatch, random_codes):
    calls, results = [], [(random_codes(99)[0], False), *((random_codes(90 + i)[0], True) for i in range(20))]

    def recorded(model, texts, frames, seed, voice=None):
        calls.append((bytes(texts[0]).decode(), frames, voice))
        return [results[len(calls) - 1]]

    monkeypatch.setattr(generate, "speak", recorded)
    parts = list(speak_parts(tiny_dia(), LONG, "speech", {}, 1722, 86.1, 0))
    assert len(parts) == len(calls) > 4 and [left for *_, left in parts][-3:] == [2, 1, 0]
    words = " ".join(part.removeprefix("[S1] ") for part, *_ in parts)
    assert f"[S1] {words}" == LONG
    assert calls[0][2] is None and calls[1][2] is None, "speech that was cut off is no voice"
    first = calls[1][0]
    for text, frames, voice in calls[2:]:
        assert voice is results[1][0] and text.startswith(first) and text.count("\x01") == 1
        assert len(text) <= 1024 and len(voice) + frames + 17 <= 3072 and frames == 1722
    assert len(first) <= 150 and max(len(text) - len(first) for text, *_ in calls[2:]) > 200


def test_a_recording_that_leaves_no_room_is_refused_and_tags_are_not_split(tiny_dia, random_codes, monkeypatch):
    with pytest.raises(UserError, match="35.4 s and 8 bytes of text"):
        next(speak_parts(tiny_dia(), LONG, "speech", {}, 90, 86.1, 0, random_codes(3050)[0], "[S1] Hello."))
    monkeypatch.setattr(generate, "speak", lambda *_, **__: [(random_codes(3)[0], True)])
    tags = ", ".join(f"tag number {number}" for number in range(60))
    assert [part for part, *_ in speak_parts(tiny_dia(), tags, "tags", {}, 9, 86.1, 0)] == [tags]
