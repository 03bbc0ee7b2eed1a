"""Which clips, which part of each, with which text: windows, unconditional rows, refusals."""

import multiprocessing
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.loss import IGNORE
from models.dia.data import pad_texts

FINETUNE = Path(__file__).resolve().parents[3] / "finetune"
TAIL = 16
RATE = 44100 / 512


def label_weight(clips, batch):
    """Sum of the token weights of a batch, counted label by label."""
    labels = batch["labels"].numpy()
    weight = (labels != IGNORE) * clips.channel_weights
    return (weight * np.where(labels == 1024, clips.config.eos_weight, 1.0)).sum()


# ---- windows ---------------------------------------------------------------------------------------------------

CROP = {"text_mode": "tags", "over_long": "crop", "tag_dropout": 0.0}


def crop(make_clips, codes, seconds=30 / RATE + 1e-6, **flags):
    return make_clips(codes, ["piano"] * len(codes), max_seconds=seconds, **CROP | flags)


def test_a_window_takes_max_seconds_times_the_datasets_own_rate(make_clips, random_codes):
    codes = random_codes(5)
    for rate, hop in [(44100, 512), (24000, 320), (16000, 640)]:
        clips = make_clips(codes, max_seconds=2.0, info={"sample_rate": rate, "hop": hop})
        assert clips.window == int(2.0 * rate / hop) + TAIL
    assert make_clips(codes).window == make_clips(codes, max_seconds=1e6).window == 3072


def test_no_codec_number_is_written_into_the_code():
    """The rate, the hop and their quotient come from dataset.json; 10 s is nobody's default."""
    literal = re.compile(r"(?<![\w.])(44[_]?100|512|86(\.1\d*)?)(?![\w.])")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(
            [*FINETUNE.glob("dia*.py"), *FINETUNE.glob("models/dia/*.py"), FINETUNE / "common/tokens.py"]
        )
        for line in path.read_text().splitlines()
        if literal.search(line) and not line.startswith("CODEC = ")  # what the processor of the native release says
    ]
    assert not found


def test_cut_windows_are_full_and_have_no_end_and_tails_have_theirs(make_clips, random_codes):
    codes = random_codes(200)
    clips = crop(make_clips, codes)
    window, delay = clips.window, np.array(clips.layout.delay)
    cut = whole = 0
    for epoch in range(60):
        start, end, positions, final = clips.part(0, epoch)
        labels = clips.batch([0], epoch)["labels"][0].numpy()
        assert positions == window == len(labels)
        if final:
            whole += 1
            assert (start, end) == (200 - (window - TAIL), 200)
            assert ((labels == 1024).sum(0) == 1).all() and ((labels != IGNORE).sum(0) == end - start + 1).all()
        else:
            cut += 1
            assert end - start == window and end <= 200
            assert not (labels == 1024).any() and ((labels != IGNORE).sum(0) == window - delay).all()
            assert not (labels[-1] == IGNORE).any(), "the cut ends in real labels in every channel"
            for channel, d in enumerate(delay):
                assert np.array_equal(labels[d:, channel], codes[0][start : end - d, channel])
    assert cut and whole


def test_every_start_of_a_window_occurs(make_clips, random_codes):
    clips = crop(make_clips, random_codes(50))
    last = 50 - (clips.window - TAIL)
    starts = {clips.part(0, epoch)[0] for epoch in range(400)}
    assert starts == {*range(0, 50 - clips.window + 1), last}


def test_windows_are_keyed_by_clip_and_epoch_and_fixed_in_evaluation(make_clips, random_codes):
    codes = random_codes(300, 300)
    clips, again = crop(make_clips, codes), crop(make_clips, codes)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    parts = [clips.part(clip, epoch) for clip in (0, 1) for epoch in range(20)]
    assert parts == [again.part(clip, epoch) for clip in (0, 1) for epoch in range(20)]
    assert len(set(parts[:20])) > 10 and parts[:20] != parts[20:]
    fixed = crop(make_clips, codes, train=False)
    assert {fixed.part(0, epoch) for epoch in range(20)} == {(0, fixed.window, fixed.window, False)}


@pytest.mark.parametrize("flags", [{}, {"channel_weights": "first4x"}, {"eos_weight": 3.0}, {"eos_weight": 0.25}])
def test_the_planned_weight_is_the_weight_of_the_labels(make_clips, random_codes, flags):
    flags = {"channel_weights": "equal"} | flags
    clips = crop(make_clips, random_codes(200, 12, 30, 31, 44, 46, 47, 60), **flags)
    chosen = np.arange(8)
    for epoch in range(25):
        batch = clips.batch(chosen, epoch)
        assert clips.target_weight(chosen, epoch) == pytest.approx(label_weight(clips, batch))
        assert batch["labels"].shape[1] == clips.lengths.max()
    speech = make_clips(random_codes(5, 9), **flags)
    assert speech.target_weight([0, 1], 0) == pytest.approx(label_weight(speech, speech.batch([0, 1])))


def test_a_window_below_the_delay_still_counts_its_labels(make_clips, random_codes):
    clips = crop(make_clips, random_codes(100), seconds=1.5 / RATE)
    assert clips.window == 17
    for epoch in range(10):
        assert clips.target_weight([0], epoch) == label_weight(clips, clips.batch([0], epoch))


@pytest.mark.parametrize("seconds", [-1.0, 0.001, float("nan")])
def test_a_window_without_a_frame_is_refused(make_clips, random_codes, seconds):
    with pytest.raises(UserError, match="--max-seconds"):
        crop(make_clips, random_codes(100), seconds=seconds)


def test_the_first_channel_can_count_four_times(make_clips, random_codes):
    assert make_clips(random_codes(3), channel_weights="first4x").channel_weights.tolist() == [4] + [1] * 8


# ---- refusals --------------------------------------------------------------------------------------------------


def test_an_over_long_clip_is_named_or_dropped(make_clips, random_codes):
    codes = random_codes(20, 40, 30)
    seconds = 30 / RATE + 1e-6
    with pytest.raises(UserError, match=r"'clip-1' takes 56 positions.* 46 .*--over-long"):
        make_clips(codes, max_seconds=seconds)
    clips = make_clips(codes, max_seconds=seconds, over_long="drop")
    assert clips.kept.tolist() == [0, 2] and clips.dropped == 1 and clips.lengths.tolist() == [36, 46]
    assert clips.batch([1])["ids"] == ["clip-2"]


def test_the_models_own_limit_holds_without_a_flag(make_clips, random_codes):
    make_clips(random_codes(3072 - TAIL))
    with pytest.raises(UserError, match="over the limit of 3072"):
        make_clips(random_codes(3072 - TAIL + 1))


def test_speech_is_never_cropped(make_clips, random_codes):
    with pytest.raises(UserError, match="--over-long crop"):
        make_clips(random_codes(40), over_long="crop", max_seconds=0.3)


def test_an_over_long_text_is_named_or_dropped_and_never_cut(make_clips, random_codes):
    texts = ["[S1] ok", "[S1] " + "x" * 1023, "[S1] " + "ä" * 511]
    with pytest.raises(UserError, match="'clip-1' has 1025 bytes, the model takes 1024"):
        make_clips(random_codes(3, 3, 3), texts)
    clips = make_clips(random_codes(3, 3, 3), texts, over_long="drop")
    assert clips.kept.tolist() == [0, 2] and clips.dropped == 1
    assert clips.batch([1])["input_ids"].shape == (1, 1024)


def test_a_text_that_grows_when_normalised_is_measured_after_it(make_clips, random_codes):
    grows = "\U0001d160" * 90  # 4 bytes each, 12 after NFC
    assert len(grows.encode()) < 1024 < len(unicodedata.normalize("NFC", grows).encode())
    with pytest.raises(UserError, match="1082 bytes"):
        make_clips(random_codes(3), [grows])


def test_tags_that_grow_when_joined_are_measured_joined(make_clips, random_codes):
    text = ",".join(["a"] * 500)  # 999 bytes as written, 1498 as "a, a, ..."
    with pytest.raises(UserError, match="1498 bytes"):
        make_clips(random_codes(3), [text], text_mode="tags")


@pytest.mark.parametrize("texts", [["[S1] a", ""], ["[S1] a", None]])
def test_a_missing_transcript_is_named(make_clips, random_codes, texts):
    with pytest.raises(UserError, match="'clip-1' has no text"):
        make_clips(random_codes(3, 3), texts)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("text", ["", None])
def test_sound_without_tags_keeps_a_mask_and_is_counted(make_clips, random_codes, train, text, capsys):
    """A row with an all-zero mask is another thing to the model, and differs between attention backends."""
    clips = make_clips(random_codes(3, 3), [text, "piano"], text_mode="tags", train=train)
    assert clips.batch([0])["attention_mask"].sum() >= 1
    clips.warn()
    assert "1 clips of" in capsys.readouterr().out


def test_a_control_character_is_found_before_training(make_clips, random_codes):
    with pytest.raises(UserError, match=r"'clip-1' holds the control character '\\x03'"):
        make_clips(random_codes(3, 3, 3), ["[S1] a", "[S1] \x03b", "[S1] c"])


def test_a_dataset_of_another_codec_is_refused(make_clips, random_codes):
    with pytest.raises(UserError, match="codec = 'encodec' but the model needs 'dac'"):
        make_clips(random_codes(3), info={"codec": "encodec"})


def test_a_dataset_with_other_channels_is_refused(make_clips):
    with pytest.raises(UserError, match="channels = 18 but the model needs 9"):
        make_clips([np.zeros((3, 18))], info={"channels": 18})


def test_a_codebook_that_reaches_into_the_special_ids_is_refused(make_clips, random_codes):
    with pytest.raises(UserError, match="codebook_size = 2048"):
        make_clips(random_codes(3), info={"codebook_size": 2048})


@pytest.mark.parametrize("code", [1024, 1027, -1])
def test_a_code_out_of_range_never_reaches_the_model(make_clips, random_codes, code):
    """Ids from 1028 on read the next channel's embedding without an error."""
    codes = random_codes(3, 3)
    codes[1][2, 0] = code
    clips = make_clips(codes)
    with pytest.raises(UserError, match=f"'clip-1' holds the code {code}"):
        clips.batch([0, 1])


def test_warnings_name_what_is_probably_not_meant(make_clips, random_codes, capsys):
    texts = ["[S2] a", "[S1] a [S1] b", "[S1] a [S2] b [S1] c", "no tag"]
    make_clips(random_codes(3, 3, 3, 3), texts, text_dropout=0.0).warn()
    said = capsys.readouterr().out
    assert "in 2 texts the speakers" in said and "--text-dropout 0" in said
    make_clips(random_codes(3), ["[S1] a"], text_dropout=0.1).warn()
    assert capsys.readouterr().out == ""


# ---- texts -----------------------------------------------------------------------------------------------------


def test_speech_without_a_speaker_gets_the_first(make_clips, random_codes):
    clips = make_clips(random_codes(3, 3), ["hello", "[S2] hello"])
    assert bytes(clips.text(0, 0)) == b"\x01 hello" and bytes(clips.text(1, 0)) == b"\x02 hello"
    tags = make_clips(random_codes(3), ["piano"], text_mode="tags")
    assert bytes(tags.text(0, 0)) == b"piano"


def test_tags_are_augmented_in_training_only(make_clips, random_codes):
    prompt = "calm, piano, 90 bpm, night"
    flags = {"text_mode": "tags", "tag_dropout": 0.3}
    train, evaluation = (make_clips(random_codes(3), [prompt], train=t, **flags) for t in (True, False))
    assert {bytes(evaluation.text(0, e)).decode() for e in range(20)} == {prompt}
    seen = {bytes(train.text(0, e)).decode() for e in range(40)}
    assert len(seen) > 10 and {len(s.split(", ")) for s in seen} >= {2, 3, 4}
    assert bytes(train.text(0, 5)) == bytes(train.text(0, 5)), "keyed by clip and epoch"
    speech = make_clips(random_codes(3), [prompt], **flags | {"text_mode": "speech"})
    assert bytes(speech.text(0, 3)).decode() == "\x01 " + prompt


# ---- several transcripts ---------------------------------------------------------------------------------------


def text_of(clips, clip, epoch):
    return bytes(clips.text(clip, epoch)).decode()


def test_each_epoch_takes_one_of_the_transcripts_and_evaluation_the_first(make_clips, random_codes):
    several = [["[S1] uh, one.", "[S1] one.", "[S1] 1."], ["[S1] two."], None]
    texts, columns = ["[S1] uh, one.", "[S1] two.", "[S1] three."], {"texts": several}
    clips, again = (make_clips(random_codes(5, 6, 7), texts, columns=columns) for _ in range(2))
    found = [text_of(clips, 0, epoch) for epoch in range(300)]
    assert found == [text_of(again, 0, epoch) for epoch in range(300)]
    for text in ("\x01 uh, one.", "\x01 one.", "\x01 1."):
        assert abs(found.count(text) - 100) < 3 * np.sqrt(300 * 2 / 9)
    assert {text_of(clips, 1, epoch) for epoch in range(9)} == {"\x01 two."}
    assert {text_of(clips, 2, epoch) for epoch in range(9)} == {"\x01 three."}
    held_out = make_clips(random_codes(5, 6, 7), texts, columns=columns, train=False)
    assert {text_of(held_out, 0, epoch) for epoch in range(9)} == {"\x01 uh, one."}


def test_every_transcript_is_checked_before_training(make_clips, random_codes):
    codes, texts = random_codes(5, 6, 7), ["[S1] a.", "[S1] b.", "[S1] c."]
    too_long = {"texts": [["[S1] a."], ["[S1] b."], ["[S1] c.", "d" * 1100]]}
    with pytest.raises(UserError, match="the text of clip 'clip-2' has 1102 bytes"):
        make_clips(codes, texts, columns=too_long)
    assert make_clips(codes, texts, columns=too_long, over_long="drop").kept.tolist() == [0, 1]
    with pytest.raises(UserError, match="'clip-1' holds the control character"):
        make_clips(codes, texts, columns={"texts": [["[S1] a."], ["[S1] b.", "b\x07"], ["[S1] c."]]})


# ---- unconditional rows ----------------------------------------------------------------------------------------


def rows_without_text(clips, epoch, group=50):
    """Ids of the clips whose text is all zero; also checks that their mask is the conditional one."""
    found = set()
    for first in range(0, len(clips), group):
        batch = clips.batch(range(first, min(first + group, len(clips))), epoch)
        for name, ids, mask in zip(batch["ids"], batch["input_ids"], batch["attention_mask"], strict=True):
            if not ids.any():
                found.add(name)
                text = clips.tokens.text(int(name.split("-")[1]))
                assert mask.sum() == len(text.replace("[S1]", "1").encode())
    return found


def many(make_clips, count=2000, **flags):
    return make_clips([np.zeros((1, 9), np.int16)] * count, **{"text_dropout": 0.15} | flags)


def test_the_share_of_rows_without_text_is_as_asked(make_clips):
    clips = many(make_clips)
    shares = [len(rows_without_text(clips, epoch)) / 2000 for epoch in range(2)]
    assert all(abs(share - 0.15) < 3 * (0.15 * 0.85 / 2000) ** 0.5 for share in shares)
    assert rows_without_text(clips, 0) != rows_without_text(clips, 1)


def test_the_decision_belongs_to_the_clip_not_to_batch_or_global_generators(make_clips):
    clips = many(make_clips, 300)
    expected = rows_without_text(clips, 0, group=50)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert rows_without_text(clips, 0, group=7) == expected
    assert rows_without_text(many(make_clips, 300, seed=1), 0) != expected


def _rank_rows(clips, rank, queue):
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    mine = clips.batch(range(rank, 300, 2), 3)
    queue.put([name for name, ids in zip(mine["ids"], mine["input_ids"], strict=True) if not ids.any()])


def test_two_processes_with_other_global_generators_decide_alike(make_clips):
    clips = many(make_clips, 300)
    alone = rows_without_text(clips, 3)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_rank_rows, args=(clips, rank, queue)) for rank in (0, 1)]
    [p.start() for p in processes]
    found = set(queue.get(timeout=600)) | set(queue.get(timeout=600))
    [p.join() for p in processes]
    assert found == alone


def test_evaluation_always_has_its_text(make_clips):
    assert not rows_without_text(many(make_clips, 100, text_dropout=1.0, train=False), 0)
    assert len(rows_without_text(many(make_clips, 100, text_dropout=1.0), 0)) == 100


def test_the_mask_comes_from_lengths_not_from_ids():
    ids, mask = pad_texts([np.zeros(3, np.uint8), np.array([5], np.uint8), np.zeros(0, np.uint8)])
    assert ids.tolist() == [[0, 0, 0], [5, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
