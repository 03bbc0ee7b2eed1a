"""The layout of Higgs Audio v2: what the library's own processor builds, what may be labelled, what is refused."""

import json
import shutil

import numpy as np
import pytest
import soundfile
import torch

from common.config import UserError
from common.loss import loss_head
from common.tokens import TokenDataset
from helpers.higgs_support import make_clips, stats_of, tokenizer_of
from higgs_clone import compute_loss
from models.higgs.layout import (
    build_row,
    check_row,
    collate,
    delayed,
    labelled_states,
    layout_of,
    undelayed,
    without_delay,
)
from models.higgs.text import Chat, normalise
from models.higgs.weights import load_higgs, refuse_original_format


@pytest.fixture(scope="module")
def clips(higgs_demo):
    return make_clips(higgs_demo)


@pytest.fixture(scope="module")
def layout(clips):
    return clips.layout


@pytest.fixture(scope="module")
def processor(higgs_demo):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(higgs_demo / "model"), local_files_only=True)


def turn(role, text=None, audio=None) -> dict:
    part = {"type": "audio", "audio": audio} if text is None else {"type": "text", "text": text}
    return {"role": role, "content": [part]}


# ---- against the library -----------------------------------------------------------------------------------------


def test_a_row_is_the_processors(higgs_demo, clips, processor):
    """From the same wav files, through the library's codec, template, delay and placeholders."""
    clip = 3
    i = clips.kept[clip]
    lines = [json.loads(line) for line in (higgs_demo / "audio/train.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["id"] == clips.tokens.id(i))
    target, reference = (
        soundfile.read(higgs_demo / "audio" / line[name], dtype="float32")[0] for name in ("target_audio", "ref_audio")
    )
    chat = [
        turn("system", "Generate audio following instruction."),
        turn("scene", "Audio is recorded from a quiet room."),
        turn("user", normalise(line["ref_text"])),
        turn("assistant", audio=reference),
        turn("user", normalise(line["target_text"])),
        turn("assistant", audio=target),
    ]
    expected = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"}
    )
    batch = clips.batch([clip])
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["audio_input_ids"], expected["audio_input_ids"])
    assert torch.equal(batch["audio_input_ids_mask"], expected["audio_input_ids_mask"].bool())
    prompt = processor.apply_chat_template(
        chat[:-1],
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"},
    )
    [row] = clips.rows([clip], answer=False)
    assert row.ids.tolist() == prompt["input_ids"][0].tolist()
    assert np.array_equal(row.frames, prompt["audio_input_ids"][0].numpy())


@pytest.mark.parametrize("frames", [1, 7, 8, 30])
def test_delay_is_the_processors_and_can_be_undone(layout, processor, frames):
    codes = np.random.default_rng(frames).integers(0, 1024, (frames, 8))
    framed = torch.nn.functional.pad(torch.from_numpy(codes.T), (1, 0), value=1024)
    framed = torch.nn.functional.pad(framed, (0, 1), value=1025)
    expected = processor.build_delay_pattern(framed[None])[0].T.numpy()
    stream = delayed(codes, layout)
    assert stream.shape == (frames + 9, 8) and np.array_equal(stream, expected)
    assert np.array_equal(undelayed(stream, layout, frames), codes)


def test_labels_are_the_targets_codes_and_one_end_a_codebook(clips, layout):
    [row] = clips.rows([5])
    i = clips.kept[5]
    frames, reference = int(clips.tokens.frames[i]), int(clips.tokens.frames[clips.reference[i]]) + 9
    assert (row.labels[:reference] == -100).all() and len(row.labels) == reference + frames + 9
    for k in range(8):
        column = row.labels[reference:, k]
        where = np.flatnonzero(column != -100)
        assert where.tolist() == list(range(k + 1, k + 2 + frames))
        assert np.array_equal(column[where[:-1]], clips.tokens.codes(i)[:, k]) and column[where[-1]] == 1025


@pytest.mark.parametrize("model_kind", ["audio", "text"])
def test_loss_equals_the_models_own(higgs_demo, model_kind):
    """The head runs on a fifth of the positions; the built-in one on all of them."""
    text = model_kind == "text"
    clips = make_clips(higgs_demo, text_loss=0.5 if text else 0.0)
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32, text_head=text).eval()
    batch = clips.batch([0, 4, 9])
    named = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask", "audio_labels")
    with torch.no_grad():
        own = model(**{name: batch[name] for name in named + (("labels",) if text else ())}).loss
        output = compute_loss(model, batch, clips)
    loss, stats = output.loss_sum, stats_of(output)
    assert float((stats[0] / stats[1]).sum()) == pytest.approx(float(own), abs=2e-5)
    total = stats[0, :8].sum() + (0.5 * stats[0, 8] if text else 0)
    assert float(loss) == pytest.approx(float(total), rel=1e-6)
    expected = 8 * (clips.tokens.frames[clips.kept[[0, 4, 9]]].astype(int) + 1).sum() + (
        0.5 * stats[1, 8] if text else 0
    )
    assert clips.target_weight([0, 4, 9]) == pytest.approx(float(expected))


def test_packed_rows_equal_padded_ones_in_loss_and_gradient(higgs_demo):
    found = []
    for packing in (False, True):
        clips = make_clips(higgs_demo, packing=packing, text_loss=0.3)
        model = load_higgs(str(higgs_demo / "model"), "", torch.float32, text_head=True)
        batch = clips.batch([0, 1, 4, 9])
        assert batch["input_ids"].shape[0] == (1 if packing else 4)
        output = compute_loss(model, batch, clips)
        output.loss_sum.backward()
        found.append((stats_of(output), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (padded, gradients), (packed, packed_gradients) = found
    assert torch.equal(padded[1], packed[1]) and torch.allclose(padded[0], packed[0], rtol=1e-5)
    scale = max(float(g.abs().max()) for g in gradients.values())
    assert gradients.keys() == packed_gradients.keys()
    assert all(float((g - packed_gradients[name]).abs().max()) < 1e-5 * scale for name, g in gradients.items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_without_audio_gives_zero_with_a_gradient(higgs_demo, clips, fused):
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32)
    if fused:
        model.audio_lm_head = loss_head(model.audio_lm_head)
    [ids] = clips.chat.ids([clips.chat.prompt("bada.", None, None, answer=False)])
    row = build_row("text only", ids, [], clips.layout, answer=False)
    batch = collate([row], clips.layout)
    assert batch["audio_input_ids"].shape == (1, 0, 8) and batch["audio_input_ids_mask"].shape == (1, 0)
    output = compute_loss(model, batch, clips)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0 and float(stats_of(output).abs().sum()) == 0
    audio = model.model.embed_audio_tokens.embed_audio_tokens.weight
    assert audio.grad is not None and not audio.grad.any()


def test_there_is_no_float_feature_in_a_batch(clips):
    assert {t.dtype for t in clips.batch([0, 1]).values() if torch.is_tensor(t)} == {torch.int64, torch.bool}


# ---- what is refused ---------------------------------------------------------------------------------------------


def spoil(row, problem, layout):
    if problem == "placeholders and frames differ":
        row.frames, row.labels = row.frames[:-1], row.labels[:-1]
    elif problem == "no label":
        row.labels[:] = -100
    elif problem == "labels differ in number":
        row.labels[np.flatnonzero(row.labels[:, 3] != -100)[0], 3] = -100
    elif problem == "an end is not trained":
        row.labels[row.labels == layout.eos] = -100
    elif problem == "an id is out of range":
        row.frames[2, 0] = 1026
    elif problem == "the target does not begin with BOS":
        row.frames[np.flatnonzero((row.labels != -100).any(axis=1))[0] - 1, 5] = 17


@pytest.mark.parametrize(
    "problem",
    [
        "placeholders and frames differ",
        "no label",
        "labels differ in number",
        "an end is not trained",
        "an id is out of range",
        "the target does not begin with BOS",
    ],
)
def test_a_spoiled_row_is_named(clips, layout, problem):
    [row] = clips.rows([2])
    check_row(row, layout)
    spoil(row, problem, layout)
    with pytest.raises(RuntimeError, match=f"row '{row.name}': {problem}"):
        check_row(row, layout)


def test_a_missing_reference_fails_the_row(clips, layout):
    i = clips.kept[0]
    [ids] = clips._prompts([0])
    with pytest.raises(RuntimeError, match="2 audio placeholders for 1 pieces"):
        build_row("x", ids, [clips.tokens.codes(i)], layout)


def test_another_reference_changes_the_targets_logits(higgs_demo, clips, layout):
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32).eval()
    other = clips.other_references([0])
    names = clips.tokens.column("speaker").to_pylist()
    assert names[other[0]] != names[clips.kept[0]]
    with torch.no_grad():
        right, labels, _ = labelled_states(model, clips.batch([0]), layout)
        wrong, same, _ = labelled_states(model, clips.batch([0], references=other), layout)
    assert torch.equal(labels, same) and float((right - wrong).abs().max()) > 1e-2


def test_the_layout_without_delay_holds_the_same_codes(clips, layout):
    [row] = clips.rows([2])
    flat = without_delay(row, layout)
    i = clips.kept[2]
    first = int(clips.tokens.frames[clips.reference[i]]) + 9
    codes = clips.tokens.codes(i)
    assert np.array_equal(flat.frames[first + 1 : first + 1 + len(codes)], codes)
    assert (flat.labels != -100).sum() == (row.labels != -100).sum()
    assert np.array_equal(flat.labels[first + 1 : first + 1 + len(codes)], codes)


def test_ids_of_model_and_tokenizer_must_agree(higgs_demo):
    from transformers import HiggsAudioV2Config

    tokenizer = tokenizer_of(higgs_demo)
    config = HiggsAudioV2Config.from_pretrained(str(higgs_demo / "model"))
    config.codebook_size = 1024  # the class's own default
    with pytest.raises(UserError, match="codebook_size 1024 has no room for the stream ids up to 1025"):
        layout_of(config, tokenizer)
    config.codebook_size, config.audio_token_id = 1026, 5
    with pytest.raises(UserError, match="audio_token_id = 5 but the tokenizer has '<|AUDIO_OUT|>' as"):
        layout_of(config, tokenizer)


def test_the_original_format_is_refused_with_the_way_out(higgs_demo, tmp_path):
    shutil.copytree(higgs_demo / "model", tmp_path / "old")
    config = json.loads((tmp_path / "old/config.json").read_text())
    (tmp_path / "old/config.json").write_text(json.dumps(config | {"model_type": "higgs_audio"}))
    with pytest.raises(UserError, match="original 'higgs_audio' format.*10840182"):
        refuse_original_format(str(tmp_path / "old"), "")
    with pytest.raises(UserError, match="original 'higgs_audio' format"):
        load_higgs(str(tmp_path / "old"), "", torch.float32)


# ---- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", "hello."),
        ("  hello,  world! ", "hello, world!"),
        ("你好，世界。", "你好, 世界."),
        ("it is 20°C (warm)", "it is 20 degrees Celsius warm."),
        ("so [laugh] there", "so <SE>[Laughter]</SE> there."),
        ("[humming start] la [humming end]", "<SE_s>[Humming]</SE_s> la <SE_e>[Humming]</SE_e>"),
        ("Say: this", "Say: this."),
    ],
)
def test_texts_are_normalised_as_the_base_knows_them(text, expected):
    assert normalise(text) == expected and normalise(expected) == expected


def test_a_text_cannot_end_its_own_turn(higgs_demo):
    chat = Chat(tokenizer_of(higgs_demo))
    for text in ("a <|eot_id|> b", "<|AUDIO_OUT|>", "\ue001"):
        with pytest.raises(UserError, match="'clip-7' holds"):
            chat.text(text, "clip-7")
    with pytest.raises(UserError, match="clip 'clip-7' has no text"):
        chat.text("  ", "clip-7")


def test_ids_that_are_none_are_dropped_and_counted(higgs_demo):
    chat = Chat(tokenizer_of(higgs_demo))
    [ids] = chat.ids(["a b"])
    assert chat.decode([-100, *ids, 10**6, 2**40]) == ("a b", 3)
    assert chat.decode([]) == ("", 0)


# ---- datasets ----------------------------------------------------------------------------------------------------


def test_lengths_are_the_rows(clips):
    assert clips.lengths.tolist() == [len(row.ids) for row in clips.rows(range(len(clips)))]


def test_datasets_that_cannot_clone_are_refused(higgs_demo, tmp_path):
    from helpers.support import write_tokens

    source = TokenDataset(str(higgs_demo / "tokens/train"))
    clips = [{"id": source.id(i), "text": source.text(i), "codes": np.array(source.codes(i))} for i in range(4)]
    facts = {"codec": "higgs", "channels": 8, "codebooks": 8, "sample_rate": 24000, "hop": 960}

    def refused(name, **changes):
        folder = write_tokens(tmp_path / name, clips, **facts | changes)
        with pytest.raises(UserError) as error:
            make_clips(higgs_demo, folder=folder)
        return str(error.value)

    assert "names no references" in refused("none")
    ids = [clip["id"] for clip in clips]
    assert "is not in the dataset" in refused("lost", columns={"ref": ["nobody", *ids[:3]]})
    assert "is the clip itself" in refused("itself", columns={"ref": [ids[0], ids[2], ids[1], ids[1]]})
    clips[1]["codes"] = clips[0]["codes"].copy()
    assert "is the clip itself or its copy" in refused("copy", columns={"ref": [ids[1], "", "", ""]})
    assert "codec = 'dac' but the model needs 'higgs'" in refused("codec", codec="dac")
    clips[2]["codes"][3, 3] = 1024
    assert "holds the code 1024" in refused_at_batch(tmp_path, clips, facts, higgs_demo, ids)


def refused_at_batch(tmp_path, clips, facts, higgs_demo, ids) -> str:
    from helpers.support import write_tokens

    folder = write_tokens(tmp_path / "range", clips, columns={"ref": ["", "", ids[0], ""]}, **facts)
    with pytest.raises(UserError) as error:
        make_clips(higgs_demo, folder=folder).batch([0])
    return str(error.value)


def test_over_long_rows_are_an_error_or_left_out_never_cut(higgs_demo):
    with pytest.raises(UserError, match="over the limit of 245"):
        make_clips(higgs_demo, max_positions=245)
    short = make_clips(higgs_demo, max_positions=245, over_long="drop")
    assert 0 < len(short) < 64 and short.dropped == 64 - len(short) and short.lengths.max() <= 245
    assert all((row.labels == 1025).sum() == 8 for row in short.rows(range(len(short))))
