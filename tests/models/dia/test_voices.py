"""Clips that continue another clip of their speaker, and clips with several transcripts."""

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.loss import IGNORE
from common.plan import Plan
from models.dia.layout import continue_text

RATE = 44100 / 512


@pytest.fixture
def voices(make_clips, random_codes):
    """60 clips of 5 speakers; the last clip names none."""

    def make(share=0.5, frames=None, speakers=None, **flags):
        frames = frames or [int(n) for n in np.random.default_rng(2).integers(4, 60, 60)]
        speakers = speakers or [f"s{i % 5}" for i in range(len(frames) - 1)] + [None]
        return make_clips(random_codes(*frames), voice_prompt=share, columns={"speaker": speakers}, **flags)

    return make


def test_the_prompt_is_generations_own_prefix_and_only_the_clip_is_a_target(voices, processor, monkeypatch):
    clips = voices(share=1.0, frames=[11, 6], speakers=["a", "a"])
    prompt, target = (clips.tokens.codes(i).astype(np.int64) for i in (1, 0))
    batch = clips.batch([0])
    # The library, whose codec is made to give these codes.
    encoded = type("Output", (), {"audio_codes": torch.from_numpy(prompt.T.copy())[None]})
    monkeypatch.setattr(processor.audio_tokenizer, "encode", lambda *_, **__: encoded)
    theirs = processor(text=["[S1] text 1. text 0."], audio=[np.zeros(6 * 512, np.float32)], padding=True)
    assert torch.equal(batch["input_ids"], theirs["input_ids"])
    prefix, ours = theirs["decoder_input_ids"][0].long(), batch["decoder_input_ids"][0]
    assert prefix.shape == (6 + 16, 9)
    given = prefix != 1025  # PAD: still to be generated
    assert int(given.sum()) == 9 * 7 + sum(clips.layout.delay)
    assert torch.equal(ours[: len(prefix)][given], prefix[given])
    labels = batch["labels"][0].numpy()
    for channel, delay in enumerate(clips.layout.delay):
        where = np.flatnonzero(labels[:, channel] != IGNORE)
        assert np.array_equal(where, 6 + delay + np.arange(11 + 1))
        assert np.array_equal(labels[where, channel], [*target[:, channel], 1024])
    assert batch["decoder_input_ids"].shape[1] == clips.lengths[0] == 6 + 11 + 16


def test_each_epoch_continues_other_clips_of_the_speaker_within_the_planned_length(voices):
    clips = voices(share=1.0, voice_prompt_seconds=30 / RATE + 1e-6, max_seconds=60 / RATE)  # of the clips themselves
    speakers, frames = clips.tokens.column("speaker").to_pylist(), clips.tokens.frames
    assert clips.voice(59, 0) is None and clips.lengths[59] == frames[59] + 16
    seen = [set() for _ in range(59)]
    for epoch in range(40):
        for clip in range(59):
            voice = clips.voice(clip, epoch)
            assert voice != clip and speakers[voice] == speakers[clip] and frames[voice] <= 30
            assert frames[clip] + frames[voice] + 16 <= clips.lengths[clip]
            seen[clip].add(voice)
    assert np.mean([len(voices) for voices in seen]) > 2.5 and max(map(len, seen)) <= 8
    assert len(set.union(*seen)) > 0.9 * sum(frames[:59] <= 30), "all that are short enough are somebody's voice"
    # The longest of them is what the plan counts with.
    longest = [max(frames[voice] for voice in voices) for voices in seen]
    assert np.mean(clips.lengths[:59] - frames[:59] - 16 - longest) < 1


def test_choices_depend_on_seed_clip_and_epoch_alone(voices):
    one, again, other = voices(), voices(), voices(seed=1)
    choices = [[[clips.voice(c, e) for c in range(60)] for e in range(3)] for clips in (one, again, other)]
    assert choices[0] == choices[1] != choices[2] and choices[0][0] != choices[0][1]
    whole, parts = one.batch(range(60), 2), [one.batch([c], 2) for c in reversed(range(60))][::-1]
    for row, part in enumerate(parts):
        length = part["labels"].shape[1]
        assert torch.equal(whole["decoder_input_ids"][row, :length], part["decoder_input_ids"][0])
        assert torch.equal(whole["labels"][row, :length], part["labels"][0])


def test_the_share_the_weights_and_the_plan_are_right(voices):
    clips = voices(share=0.5, frames=[20] * 399 + [5])
    continued = [clips.voice(clip, 0) is not None for clip in range(399)]
    assert abs(np.mean(continued) - 0.5) < 3 * np.sqrt(0.25 / 399)
    assert continued == [clips.voice(clip, 7) is not None for clip in range(399)], "the plan's lengths hold always"
    assert clips.lengths[:399].tolist() == [56 if yes else 36 for yes in continued]
    plan = Plan(clips.lengths, 400, 0)
    for number in range(plan.per_epoch):
        epoch, rows = plan.micro_batch(number)
        batch = clips.batch(rows, epoch)
        assert batch["positions"] <= 400
        assert clips.target_weight(rows, epoch) == float((batch["labels"] != IGNORE).sum())


def test_texts_that_do_not_fit_together_leave_the_clip_alone(voices, make_clips, random_codes):
    long = make_clips(
        random_codes(9, 9), ["[S1] " + "a" * 600, "b" * 500], voice_prompt=1.0, columns={"speaker": ["x", "x"]}
    )
    assert long.voice(0, 0) is None and long.batch([0])["labels"].shape[1] == 9 + 16
    assert len(long.text(1, 0)) == 502


def test_what_cannot_be_continued_is_one_sentence(make_clips, random_codes, voices):
    with pytest.raises(UserError, match="does not name the speakers"):
        make_clips(random_codes(5, 5), voice_prompt=0.5)
    with pytest.raises(UserError, match="no clip in .* can follow another by the same speaker"):
        voices(frames=[5, 5], speakers=["a", "b"])
    with pytest.raises(UserError, match="--text-mode speech"):
        voices(text_mode="tags")
    alone = make_clips(random_codes(5, 5), voice_prompt=0.5, train=False)
    assert alone.voice(0, 0) is None, "an evaluation set without speakers is evaluated as it is"


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("[S1] One.", "[S1] Two.", "[S1] One. Two."),
        ("[S1] One. [S2] Two.", "[S1] Three.", "[S1] One. [S2] Two. [S1] Three."),
        ("[S1] One. [S2] Two. ", "[S2] Three.", "[S1] One. [S2] Two. Three."),
        ("[S2] One. [S1] Two.", "[S1] Three. [S2] Four.", "[S2] One. [S1] Two. Three. [S2] Four."),
    ],
)
def test_a_speaker_who_goes_on_is_not_named_again(before, text, expected):
    assert continue_text(before, text) == expected


# ---- several transcripts ---------------------------------------------------------------------------------------


def heard(clips, clip, epoch):
    return bytes(clips.text(clip, epoch)).decode()


def test_each_epoch_takes_one_of_the_transcripts_and_evaluation_the_first(make_clips, random_codes):
    several = [["[S1] uh, one.", "[S1] one.", "[S1] 1."], ["[S1] two."], None]
    texts, columns = ["[S1] uh, one.", "[S1] two.", "[S1] three."], {"texts": several}
    clips, again = (make_clips(random_codes(5, 6, 7), texts, columns=columns) for _ in range(2))
    found = [heard(clips, 0, epoch) for epoch in range(300)]
    assert found == [heard(again, 0, epoch) for epoch in range(300)]
    for text in ("\x01 uh, one.", "\x01 one.", "\x01 1."):
        assert abs(found.count(text) - 100) < 3 * np.sqrt(300 * 2 / 9)
    assert {heard(clips, 1, epoch) for epoch in range(9)} == {"\x01 two."}
    assert {heard(clips, 2, epoch) for epoch in range(9)} == {"\x01 three."}
    held_out = make_clips(random_codes(5, 6, 7), texts, columns=columns, train=False)
    assert {heard(held_out, 0, epoch) for epoch in range(9)} == {"\x01 uh, one."}


def test_every_transcript_is_checked_before_training(make_clips, random_codes):
    codes, texts = random_codes(5, 6, 7), ["[S1] a.", "[S1] b.", "[S1] c."]
    too_long = {"texts": [["[S1] a."], ["[S1] b."], ["[S1] c.", "d" * 1100]]}
    with pytest.raises(UserError, match="the text of clip 'clip-2' has 1102 bytes"):
        make_clips(codes, texts, columns=too_long)
    assert make_clips(codes, texts, columns=too_long, over_long_text="drop").kept.tolist() == [0, 1]
    with pytest.raises(UserError, match="'clip-1' holds the control character"):
        make_clips(codes, texts, columns={"texts": [["[S1] a."], ["[S1] b.", "b\x07"], ["[S1] c."]]})
