"""The layout of Higgs Audio v2: what the library's own processor builds, what may be labelled, what is refused."""

import copy
import json
import shutil

import numpy as np
import pytest
import soundfile
import torch

from common.errors import UserError
from common.loss import loss_head
from common.tokens import TokenDataset
from helpers.higgs_support import WEIGHTS, dialogues, make_clips, stats_of, tokenizer_of, weighted
from higgs_clone import compute_loss
from models.higgs.data import VoiceClips
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


SPOKEN = "[SPEAKER0] bada gumi, [SPEAKER1] lono"


@pytest.fixture(scope="module")
def dialogue(higgs_demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialogue") / "tokens"
    rows = [("cleo_002", SPOKEN, "ada_004", "ben_005"), ("dov_003", "", "ada_004", "")]
    return dialogues(higgs_demo, folder, *rows, ("ada_004", "", "", ""), ("ben_005", "", "", ""))


def test_a_dialogue_is_the_processors(higgs_demo, dialogue, processor):
    """Voices in turns with tagged transcripts, as Boson's own script has them."""
    lines = [json.loads(line) for line in (higgs_demo / "audio/train.jsonl").read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    waves = {
        name: soundfile.read(higgs_demo / "audio" / found[name]["target_audio"], dtype="float32")[0]
        for name in ("cleo_002", "ada_004", "ben_005")
    }
    scene = turn("scene", "Audio is recorded from a quiet room.")
    chat = [turn("system", "Generate audio following instruction."), scene]
    for number, voice in enumerate(("ada_004", "ben_005")):
        chat.append(turn("user", f"[SPEAKER{number}] " + normalise(found[voice]["target_text"])))
        chat.append(turn("assistant", audio=waves[voice]))
    chat.append(turn("user", "[SPEAKER0] bada gumi,\n[SPEAKER1] lono."))
    options = {"tokenize": True, "return_dict": True}
    options["processor_kwargs"] = {"sampling_rate": 24000, "return_tensors": "pt"}
    expected = processor.apply_chat_template([*chat, turn("assistant", audio=waves["cleo_002"])], **options)
    clips = make_clips(higgs_demo, dialogue)
    assert clips.ids([0, 1]) == ["cleo_002", "dov_003"] and len(clips) == 2
    batch = clips.batch([0])
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["audio_input_ids"], expected["audio_input_ids"])
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, **options)
    [row] = clips.rows([0], answer=False)
    assert row.ids.tolist() == prompt["input_ids"][0].tolist()
    assert np.array_equal(row.frames, prompt["audio_input_ids"][0].numpy())
    frames = int(clips.tokens.frames[clips.kept[0]])
    assert (batch["audio_labels"] != -100).sum() == 8 * (frames + 1)  # the target alone
    assert clips.lengths.tolist() == [len(row.ids) for row in clips.rows([0, 1])]


def test_the_template_puts_voices_where_the_published_one_does(higgs_demo):
    """The published template itself is on the hub; this is what it renders."""
    audio = "<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>"
    turns = Chat(tokenizer_of(higgs_demo)).prompt("t.", ["a.", "b."], "Quiet.", answer=False)
    assert f"[SPEAKER0] a.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{audio}<|eot_id|>" in turns
    assert turns.index("[SPEAKER0] a.") < turns.index("[SPEAKER1] b.") < turns.index("t.<|eot_id|>")
    assert "SPEAKER" not in Chat(tokenizer_of(higgs_demo)).prompt("t.", "a.", None, answer=False)  # one voice: no tag


def test_four_voices_are_the_processors(higgs_demo, processor, tmp_path):
    """One turn per reference, in the order of the tags, and a row of the same dataset with fewer voices."""
    voices, said = ["ada_004", "ben_005", "dov_003", "ada_000"], "[SPEAKER3] gumi [SPEAKER1] lono [SPEAKER2] x"
    rows = [("cleo_002", said, *voices), ("ben_001", SPOKEN, "ada_004", "ben_005", "", "")]
    folder = dialogues(higgs_demo, tmp_path / "tokens", *rows, *((voice, "", "", "", "", "") for voice in voices))
    lines = [json.loads(line) for line in (higgs_demo / "audio/train.jsonl").read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    chat = [turn("system", "Generate audio following instruction.")]
    chat.append(turn("scene", "Audio is recorded from a quiet room."))
    for number, voice in enumerate(voices):
        wave, _ = soundfile.read(higgs_demo / "audio" / found[voice]["target_audio"], dtype="float32")
        chat.append(turn("user", f"[SPEAKER{number}] " + normalise(found[voice]["target_text"])))
        chat.append(turn("assistant", audio=wave))
    chat.append(turn("user", "[SPEAKER3] gumi\n[SPEAKER1] lono\n[SPEAKER2] x."))
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    options["processor_kwargs"] = {"sampling_rate": 24000, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(chat, **options)
    clips = make_clips(higgs_demo, folder)
    [row] = clips.rows([0], answer=False)
    assert row.ids.tolist() == prompt["input_ids"][0].tolist()
    assert np.array_equal(row.frames, prompt["audio_input_ids"][0].numpy())
    assert clips.lengths.tolist() == [len(row.ids) for row in clips.rows([0, 1])]
    four, two = clips.other_references([0, 1])
    names = [[clips.tokens.id(i) for i in refs if i >= 0] for refs in (four, two)]
    assert names == [voices[::-1], ["ben_005", "ada_004"]], "in reverse order"


def test_a_dialogues_other_voices_are_its_own_exchanged(higgs_demo, dialogue):
    clips = make_clips(higgs_demo, dialogue)
    assert clips.other_references([0]).tolist() == clips.references[clips.kept[:1], ::-1].tolist()


@pytest.mark.parametrize(
    ("text", "ref", "ref1", "sentence"),
    [
        ("[SPEAKER0] a [SPEAKER1] b", "ada_004", "", "has the tag [SPEAKER1], but there is 1 reference"),
        ("[SPEAKER0] a [SPEAKER2] b", "ada_004", "ben_005", "has the tag [SPEAKER2], but there are 2 references"),
        ("a b", "ada_004", "ben_005", "has 2 references but no tag"),
        ("[SPEAKER0] a [SPEAKER1] b", "", "ben_005", "has `ref1` ([SPEAKER1]) but no `ref` ([SPEAKER0])"),
        ("[SPEAKER0] a [SPEAKER1] b", "ada_004", "nobody", "the reference 'nobody' of clip"),
        ("[SPEAKER0] a [SPEAKER1] b", "ada_004", "cleo_002", "is the clip itself"),
    ],
)
def test_dialogues_whose_voices_do_not_fit_are_refused(higgs_demo, tmp_path, text, ref, ref1, sentence):
    rows = [("cleo_002", text, ref, ref1), ("ada_004", "", "", ""), ("ben_005", "", "", "")]
    with pytest.raises(UserError) as error:
        make_clips(higgs_demo, dialogues(higgs_demo, tmp_path / "tokens", *rows))
    assert sentence in str(error.value)


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


def test_targets_are_counted_once_without_reading_a_text_again(higgs_demo, monkeypatch):
    references = VoiceClips._references

    def some_have_none(self):
        rows = references(self)
        rows[::3] = -1
        return rows

    monkeypatch.setattr(VoiceClips, "_references", some_have_none)
    flags = {"text_loss": 0.5, "reference_dropout": 0.1, "over_long": "drop"}
    longest = int(make_clips(higgs_demo, **flags).lengths.max())
    clips = make_clips(higgs_demo, **flags, max_positions=longest - 1)
    assert clips.dropped and (clips.reference[clips.kept] < 0).any()
    batches = [clips.batch([i]) for i in range(len(clips))]
    monkeypatch.setattr(Chat, "ids", None)
    for i, batch in enumerate(batches):
        text, codes = (int((batch[name][:, 1:] != -100).sum()) for name in ("labels", "audio_labels"))
        assert clips.target_weight([i]) == codes + 0.5 * text
    assert clips.target_weight([0, 3, 5]) == sum(clips.target_weight([i]) for i in (0, 3, 5))


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


def test_packed_text_labels_are_those_of_the_padded_rows(clips, layout):
    """Without a reference a row's text targets begin at its first position, which nothing in its own row predicts."""
    rows = clips.rows([0, 1, 4], references=np.full(3, -1))
    assert all(row.text_from == 0 for row in rows)
    found = []
    for packed in (False, True):
        labels = collate(rows, layout, packed, text_loss=True)["labels"][:, 1:]  # nothing predicts the first position
        found.append(labels[labels != -100].tolist())
    assert found[0] == found[1] and len(found[0]) > 20


def test_codebook_weights_have_a_mean_of_one(higgs_demo):
    weights = make_clips(higgs_demo, codebook_weights="first").codebook_weights
    assert weights.mean() == pytest.approx(1.0)
    assert (weights / weights[-1]).round(6).tolist() == [4, 4, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_without_audio_gives_zero_with_a_gradient(higgs_demo, clips, fused):
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32)
    if fused:
        model.audio_lm_head = loss_head(model.audio_lm_head)
    [ids] = clips.chat.ids([clips.chat.prompt("bada.", None, None, answer=False)])
    row = build_row("text only", ids, [], clips.layout, answer=False)
    batch = clips.collate([row])
    assert batch["audio_input_ids"].shape == (1, 0, 8) and batch["audio_input_ids_mask"].shape == (1, 0)
    output = compute_loss(model, batch, clips)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0 and float(stats_of(output).abs().sum()) == 0
    audio = model.model.embed_audio_tokens.embed_audio_tokens.weight
    assert audio.grad is not None and not audio.grad.any()


def test_there_is_no_float_feature_in_a_batch(clips):
    batch = clips.batch([0, 1])
    assert batch.pop("codebook_weights").shape == (8,)
    assert {t.dtype for t in batch.values() if torch.is_tensor(t)} == {torch.int64, torch.bool}


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
    assert names[other[0, 0]] != names[clips.kept[0]]
    with torch.no_grad():
        right, labels, _ = labelled_states(model, clips.batch([0]))
        wrong, same, _ = labelled_states(model, clips.batch([0], references=other))
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
        ("[SPEAKER0]hello[SPEAKER1]  hi", "[SPEAKER0] hello\n[SPEAKER1] hi."),
        ("[SPEAKER0] hello,\nworld!\n\n[SPEAKER1] hi?", "[SPEAKER0] hello, world!\n[SPEAKER1] hi?"),
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


def test_a_prompt_begins_with_one_bos(higgs_demo):
    """The template has it; the published tokenizer, unlike the demo's, would add another."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer_of(higgs_demo))
    bos = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    adds_bos = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)])
    tokenizer.backend_tokenizer.post_processor = adds_bos
    assert tokenizer("a").input_ids[0] == bos
    chat = Chat(tokenizer)
    prompt = chat.prompt("a b.", "c d.", None, answer=True)
    [ids] = chat.ids([prompt])
    assert (ids == bos).sum() == 1 and ids[0] == bos
    assert ids.tolist() == tokenizer(prompt, add_special_tokens=False).input_ids


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
    with pytest.raises(UserError, match="limit of 245"):
        make_clips(higgs_demo, max_positions=245)
    short = make_clips(higgs_demo, max_positions=245, over_long="drop")
    assert 0 < len(short) < 64 and short.dropped == 64 - len(short) and short.lengths.max() <= 245
    assert all((row.labels == 1025).sum() == 8 for row in short.rows(range(len(short))))


# ---- weights, dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_weight_multiplies_its_clips_loss(higgs_demo, tmp_path, packing):
    flags = {"packing": packing, "text_loss": 0.5}
    clips = make_clips(higgs_demo, weighted(higgs_demo, tmp_path / "tokens"), **flags)
    plain = make_clips(higgs_demo, **flags)
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32, text_head=True).eval()
    chosen = [0, 20, 40, 60, 5]
    weights = [WEIGHTS[name.split("_")[0]] for name in clips.ids(chosen)]
    assert len(set(weights)) == 4 and clips.ids(chosen) == plain.ids(chosen)
    with torch.no_grad():
        alone = [float(compute_loss(model, plain.batch([i]), plain).loss_sum) for i in chosen]
        together = float(compute_loss(model, clips.batch(chosen), clips).loss_sum)
    assert together == pytest.approx(np.dot(weights, alone), rel=1e-5)
    assert clips.target_weight(chosen) == pytest.approx(np.dot(weights, [plain.target_weight([i]) for i in chosen]))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_and_zero_leaves_a_clip_out(higgs_demo, tmp_path, monkeypatch, weight):
    monkeypatch.setitem(WEIGHTS, "ben", weight)
    with pytest.raises(UserError, match="clip 'ben_001' has the weight"):
        make_clips(higgs_demo, weighted(higgs_demo, tmp_path / "bad"))
    monkeypatch.setitem(WEIGHTS, "ben", 0.0)
    folder = weighted(higgs_demo, tmp_path / "zero")
    assert len(make_clips(higgs_demo, folder)) == 48 and len(make_clips(higgs_demo, folder, train=False)) == 64


def test_a_reference_is_dropped_by_clip_and_epoch_alone(higgs_demo):
    flags = {"reference_dropout": 0.3, "text_loss": 0.5}
    clips, whole = make_clips(higgs_demo, **flags), make_clips(higgs_demo)
    everything = list(range(len(clips)))
    seen, bare = {}, 0
    for epoch in range(3):
        for i, row in enumerate(clips.rows(everything, epoch=epoch)):
            target = int(clips.tokens.frames[clips.kept[i]]) + 9
            frames = (
                undelayed(row.frames, clips.layout, len(row.frames) - target - 9) if len(row.frames) > target else None
            )
            seen[epoch, i] = None if frames is None else frames.tobytes()
            bare += frames is None
            if frames is not None:
                assert np.array_equal(clips.tokens.codes(clips.reference[clips.kept[i]]), frames)
            assert clips.positions([i], epoch) == len(row.ids) <= clips.lengths[i] == whole.lengths[i]
            assert (frames is None) == (len(row.ids) < clips.lengths[i])
            batch = clips.collate([row])
            text, codes = (int((batch[name][:, 1:] != -100).sum()) for name in ("labels", "audio_labels"))
            assert clips.target_weight([i], epoch) == codes + 0.5 * text
    assert 0.15 < bare / len(seen) < 0.45
    changed = [seen[0, i] != seen[1, i] for i in everything]
    assert 0.2 < np.mean(changed) < 0.65  # a new choice in each epoch
    again = make_clips(higgs_demo, **flags)  # another process, another order
    for i, row in zip(everything[::-2], again.rows(everything[::-2], epoch=1), strict=True):
        [expected] = clips.rows([i], epoch=1)
        assert np.array_equal(row.frames, expected.frames) and np.array_equal(row.ids, expected.ids)
    evaluated = make_clips(higgs_demo, train=False, **flags)
    assert evaluated.lengths.tolist() == make_clips(higgs_demo, train=False).lengths.tolist()
    # Without an epoch (the dry run) a row is as long as planned.
    assert clips.lengths.tolist() == [len(row.ids) for row in clips.rows(everything)]
