"""Batches against the HF processor, bit for bit."""

import numpy as np
import pytest
import torch

from common.loss import IGNORE
from models.dia.layout import delayed, labelled_states, undelayed

TEXTS = ["[S1] Hello there. [S2] Grüße, (laughs) 你好 🎧!", "[S1] Yes.", "[S1] A third, longer text."]


@pytest.fixture
def waves():
    """Noise of 6, 4 and 11 frames, the second not a whole number of frames."""
    rng = np.random.default_rng(5)
    return [rng.uniform(-1, 1, n).astype(np.float32) for n in (6 * 512, 3 * 512 + 100, 11 * 512)]


def encode(processor, wave):
    """Codes (T, 9) straight from the codec, zero-padded to whole frames."""
    wave = np.pad(wave, (0, -len(wave) % 512))
    with torch.no_grad():
        return processor.audio_tokenizer.encode(torch.from_numpy(wave)[None, None]).audio_codes[0].T.numpy()


def test_ids_mask_and_labels_equal_the_processors(processor, waves, make_clips):
    codes = [encode(processor, wave) for wave in waves]
    assert len({frame.tobytes() for c in codes for frame in c}) > 15, "the tiny codec must tell the frames apart"
    ours = make_clips(codes, TEXTS).batch([0, 1, 2])
    theirs = processor(text=TEXTS, audio=waves, generation=False, output_labels=True)
    assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert torch.equal(ours["attention_mask"], theirs["attention_mask"])
    labels = theirs["labels"].view(3, 9, -1).transpose(1, 2)  # (B*C, L) -> (B, L, C)
    assert ours["labels"].shape == labels.shape
    for row, clip in enumerate(codes):
        used = len(clip) + 16
        left = labels.shape[1] - used  # the processor pads left, we pad right
        assert torch.equal(ours["decoder_input_ids"][row, :used], theirs["decoder_input_ids"][row, left:].long())
        assert torch.equal(ours["labels"][row, :used], labels[row, left:])
        assert theirs["decoder_attention_mask"][row].sum() == used
        assert (ours["labels"][row, used:] == IGNORE).all()


def test_states_and_gradients_without_a_decoder_mask_equal_the_librarys_with_one(tiny_dia, make_clips, random_codes):
    """Ragged clips and texts: the longest clip is three times the shortest."""
    clips = make_clips(random_codes(30, 9, 17), ["[S1] a.", "[S1] a much longer text.", "[S1] bc."])
    batch = clips.batch([0, 1, 2])
    assert not batch["attention_mask"].all()
    is_target = (batch["labels"] != IGNORE).any(-1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    inputs["decoder_attention_mask"] = (torch.arange(46) < torch.from_numpy(clips.lengths)[:, None]).long()
    expected_model, model = tiny_dia(3).train(), tiny_dia(3).train()
    expected = expected_model.model(**inputs, use_cache=False)[0][is_target]
    found, labels = labelled_states(model, batch)
    assert torch.equal(labels, batch["labels"][is_target])
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    for states in (found, expected):
        (states * weights).sum().backward()
    gradients = dict(model.model.named_parameters())
    for name, theirs in expected_model.model.named_parameters():
        scale = theirs.grad.abs().max()
        assert (gradients[name].grad - theirs.grad).abs().max() <= 1e-5 * scale, name


def test_one_clip_alone_equals_the_processor_without_any_padding(processor, waves, make_clips):
    for wave, text in zip(waves, TEXTS, strict=True):
        ours = make_clips([encode(processor, wave)], [text]).batch([0])
        theirs = processor(text=[text], audio=[wave], generation=False, output_labels=True)
        for name in ("input_ids", "attention_mask", "decoder_input_ids"):
            assert torch.equal(ours[name], theirs[name].long()), name
        assert torch.equal(ours["labels"].transpose(1, 2).reshape(9, -1), theirs["labels"])


def test_the_types_are_those_the_model_takes(make_clips, random_codes):
    batch = make_clips(random_codes(5, 3)).batch([1, 0])
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    assert tensors.pop("channel_weights").dtype == torch.float32
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in tensors.values())
    assert batch["ids"] == ["clip-1", "clip-0"] and batch["decoder_input_ids"].shape == (2, 21, 9)


def test_every_channel_has_a_target_for_each_frame_and_its_end(make_clips, random_codes):
    codes = random_codes(20, 3)
    labels = make_clips(codes).batch([0, 1])["labels"]
    for row, clip in enumerate(codes):
        for channel in range(9):
            real = labels[row, :, channel]
            assert real[real != IGNORE].tolist() == [*clip[:, channel].tolist(), 1024]


def test_code_0_is_a_target(make_clips):
    labels = make_clips([np.zeros((4, 9), np.int16)]).batch([0])["labels"]
    assert (labels == 0).sum() == 4 * 9


def test_undelaying_gives_the_codes_back(layout, random_codes):
    (codes,) = random_codes(7)
    inputs, labels = delayed(codes, layout, 7 + 16, True)
    stream = np.concatenate([inputs, labels[-1:]])
    assert np.array_equal(undelayed(stream, layout, 7), codes)


def test_the_layout_is_the_checkpoints(layout):
    assert layout.delay == (0, 8, 9, 10, 11, 12, 13, 14, 15) and layout.channels == 9 and layout.tail == 16
    assert (layout.bos, layout.eos, layout.pad) == (1026, 1024, 1025)
    assert (layout.max_positions, layout.max_text) == (3072, 1024)
