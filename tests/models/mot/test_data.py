"""models/mot/data.py: tokenizers, budgets, windows, caption dropout, coverage."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from common import text_lengths
from common.errors import UserError
from common.loss import IGNORE
from common.tokens import TokenDataset
from helpers import support
from llama_mot import Config
from models.mot.data import Clips, Tokenizer, check_coverage
from models.mot.layout import Layout

ENCODEC = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048, "channels": 4}


class Words:
    """One id per word: captions of a known length."""

    bos, size, source = 128000, 128256, "words"
    no_text = np.array([128000])
    identity = staticmethod(lambda: "words")
    most_at_once = 0

    def __call__(self, texts):
        Words.most_at_once = max(Words.most_at_once, len(texts))
        return [np.array([self.bos, *(1000 + len(word) for word in text.split())]) for text in texts]


@pytest.fixture
def make(tmp_path):
    """make(frames, words, ...) -> Clips of so many frames with captions of so many words."""
    made = []

    def call(frames, words, train=True, layout=None, info=None, columns=None, **flags):
        draw = np.random.default_rng(0)
        clips = [
            {"id": f"clip{i}", "text": "word " * w, "codes": draw.integers(0, 2048, (f, 4))}
            for i, (f, w) in enumerate(zip(frames, words, strict=True))
        ]
        folder = tmp_path / f"tokens{len(made)}"
        made.append(support.write_tokens(folder, clips, columns=columns, **ENCODEC | (info or {})))
        config = Config(**{"text_dropout": 0.0} | flags)
        layout = layout or Layout(128256, order=config.layout)
        return Clips(TokenDataset(str(made[-1])), layout, Words(), config, train)

    return call


def test_captions_are_never_tokenised_all_at_once(make, monkeypatch):
    monkeypatch.setattr(Words, "most_at_once", 0)
    monkeypatch.setattr(text_lengths, "ROWS", 8)
    clips = make([5] * 30, range(1, 31))
    assert Words.most_at_once == 8 and not hasattr(clips, "texts")
    assert clips.lengths.tolist() == [1 + words + clips.layout.positions(5) for words in range(1, 31)]


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def test_fast_tokenizer_of_llama_3s_kind(tmp_path):
    """Byte-level BPE that adds its BOS by itself: there must be one, not two."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    fast.train_from_iterator(["a slow piano", "a fast drum"], trainer)
    bos = fast.token_to_id(special[0])
    fast.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], bos)])
    PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=special[0], eos_token=special[1]).save_pretrained(tmp_path)
    ids = Tokenizer(str(tmp_path))(["a slow drum"])[0]
    assert ids[0] == bos and Counter(ids.tolist())[bos] == 1
    assert fast.decode(ids[1:].tolist()) == "a slow drum"


def test_a_folder_without_tokenizer_or_with_a_broken_one_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer.json"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    with pytest.raises(UserError, match="no usable tokenizer"):
        Tokenizer(str(tmp_path))


def test_a_tokenizer_larger_than_the_model_is_refused(make):
    with pytest.raises(UserError, match="do not belong together"):
        make([3], [2], layout=Layout(5000))


# ---- budgets and windows -------------------------------------------------------------------------------------------


def test_whole_captions_and_whole_clips(make):
    clips = make([500, 500], [152, 46])
    for clip, words in enumerate((152, 46)):
        batch = clips.batch([clip])
        assert batch["input_ids"].shape[1] == 1 + words + 1 + 2000
        labels = batch["labels"][0]
        assert int((labels != IGNORE).sum()) == 2001 and int(labels[-1, 0]) == clips.layout.eos
    assert clips.lengths.tolist() == [2154, 2048]


@pytest.mark.parametrize("layout", ["flat", "delay"])
def test_windows_are_whole_frames_anywhere_and_end_only_at_the_true_end(make, layout):
    clips = make([40], [5], max_audio=48, layout=Layout(128256, order=layout))
    assert clips.window == 12
    codes, starts = clips.tokens.codes(0), set()
    for epoch in range(300):
        start, end, final = clips.part(0, epoch)
        starts.add(start)
        assert end - start == 12 and final == (end == 40)
        batch = clips.batch([0], epoch)
        labels = batch["labels"][0]
        count = (labels != IGNORE).sum(0).numpy()
        assert (labels == clips.layout.eos).any() == final
        assert clips.target_weight([0], epoch) == count.sum() == clips.layout.targets(12, final).sum()
        if layout == "flat":
            music = batch["input_ids"][0, 7:, 0].numpy() - 128256
            assert len(music) % 4 == 0
            assert np.array_equal(music.reshape(-1, 4) % 2048, codes[start:end])
    assert starts == set(range(29))
    held_out = make([40], [5], train=False, max_audio=48)
    assert held_out.part(0, 7) == (0, 12, False)


def test_over_long_captions(make):
    with pytest.raises(UserError, match="clip 'clip1' has 301 tokens, over the limit of 192"):
        make([5, 5], [3, 300])
    assert len(make([5, 5], [3, 300], over_long_text="drop")) == 1
    cut = make([5, 5], [3, 300], over_long_text="cut")
    assert [len(cut.caption(clip)) for clip in (0, 1)] == [4, 192]


def test_missing_captions(make):
    with pytest.raises(UserError, match="clip 'clip1' has no caption"):
        make([5, 5], [3, 0])
    assert len(make([5, 5], [3, 0], allow_empty_text=True)) == 2


def test_text_dropout_is_keyed_per_sample_and_off_for_evaluation(make):
    clips = make([4] * 400, [5] * 400, text_dropout=0.3)
    dropped = [len(clips.text(i, 0)) == 1 for i in range(400)]
    assert 0.2 < np.mean(dropped) < 0.4
    assert dropped == [len(clips.text(i, 0)) == 1 for i in range(400)]
    assert dropped != [len(clips.text(i, 1)) == 1 for i in range(400)]
    clip = dropped.index(True)
    ids = clips.batch([clip])["input_ids"][0, :, 0]
    assert ids[:2].tolist() == [128000, clips.layout.bos]
    held_out = make([4] * 50, [5] * 50, train=False, text_dropout=0.9)
    assert all(len(held_out.text(i, 0)) == 6 for i in range(50))


def test_padding_is_at_the_right_and_masked(make):
    clips = make([3, 9], [2, 7])
    batch = clips.batch([0, 1])
    assert batch["mask"].sum(1).tolist() == [1 + 2 + 13, 1 + 7 + 37] and batch["positions"] == 2 * 45
    assert (batch["labels"][0, 16:] == IGNORE).all() and not batch["input_ids"][0, 16:].any()


def test_codebook_weights_are_checked_and_count(make):
    clips = make([3], [2], codebook_weights=[2.0, 1.0, 0.0, 0.5])
    assert clips.target_weight([0], 0) == 2 * 4 + 3 + 0.5 * 3
    for bad in ([1.0], [1.0, 1.0, 1.0, -1.0], [0.0] * 4):
        with pytest.raises(UserError, match="--codebook-weights takes 4"):
            make([3], [2], codebook_weights=bad)


def test_a_clips_weight_counts_and_zero_leaves_it_out(make):
    plain, clips = make([3, 9, 4], [2, 7, 1]), make([3, 9, 4], [2, 7, 1], columns={"weight": [0.5, 2.0, 0.0]})
    assert len(clips) == 2 and "position_weights" not in plain.batch([0])
    expected = 0.5 * plain.target_weight([0]) + 2 * plain.target_weight([1])
    assert clips.target_weight([0, 1]) == pytest.approx(expected)
    weights = clips.batch([0, 1])["position_weights"].view(2, -1)
    assert weights.shape == clips.batch([0, 1])["mask"].shape and weights.unique(dim=1).tolist() == [[0.5], [2.0]]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_tenth_of_the_source_is_refused(make, capsys):
    clips = make([3] * 50, [2] * 50, info={"wanted": 5233})
    with pytest.raises(UserError, match="holds 50 of the 5233 clips"):
        check_coverage(clips.tokens)
    assert "50 of 5233 clips" in capsys.readouterr().out
    check_coverage(make([3] * 50, [2] * 50, info={"wanted": 100}).tokens)
    check_coverage(make([3], [2]).tokens)  # a source that says nothing


def test_codes_of_another_codec_or_out_of_range(make):
    with pytest.raises(UserError, match="codec = 'dac' but the model needs 'encodec'"):
        make([3], [2], info={"codec": "dac"})
    clips = make([3], [2])
    clips.layout = replace(clips.layout, size=100)
    with pytest.raises(UserError, match="clip 'clip0': code .* is outside 0..99"):
        clips.batch([0])
