"""The proof that the training is right: what was trained on comes out again, in the right voice, and stops.

Two mutations show that the proof can fail: the layout and the labels that other trainers use reach the same loss.
"""

import numpy as np
import pytest
import torch

import higgs_clone
from common.ds_config import resolve_ds
from common.errors import UserError
from common.tokens import TokenDataset
from helpers import support
from helpers.higgs_support import dialogues, make_clips
from models.higgs import data as higgs_data
from models.higgs.evaluate import PROBE_FRAMES, layout_losses, probe
from models.higgs.generate import speak
from models.higgs.layout import without_delay

FACTS = {"codec": "higgs", "channels": 8, "codebooks": 8, "sample_rate": 24000, "hop": 960}
OVERFIT = {
    "preset": "full",
    "precision": "fp32",
    "lr": 5e-3,
    "warmup": 10.0,
    "steps": 140,
    "max_start_loss": 0.0,
    "samples": 0,
    "save_every": 0,
    "eval_every": 0,
}


@pytest.fixture(scope="module")
def process(only_rank):
    return only_rank


def dataset(demo, folder, clips: list[tuple[str, str, str]]):
    """A dataset of (id, text, reference) with the demo's codes of that id; a reference's text is the demo's."""
    source = TokenDataset(str(demo / "tokens/train"))
    row = {source.id(i): i for i in range(len(source))}
    found = [{"id": id, "text": text or source.text(row[id]), "codes": source.codes(row[id])} for id, text, _ in clips]
    columns = {"ref": [ref for *_, ref in clips], "speaker": [id.split("_")[0] for id, *_ in clips]}
    return support.write_tokens(folder, found, columns=columns, **FACTS)


def overfit(demo, process, folder, out, **changes):
    assets = {"model": str(demo / "model"), "data": str(folder), "out": str(out)}
    config = higgs_clone.Config(**{**OVERFIT, **assets, **changes})
    engine = higgs_clone.train(config, process, resolve_ds(config.ds, config, 1))
    return engine.module.model.eval(), support.step_records(out)[-1]["loss"]


def said(demo, model, folder, cap=80):
    """What the model says after each prompt of the dataset, and what it was trained on."""
    clips = make_clips(demo, folder)
    indices = range(len(clips))
    spoken = speak(model, clips.rows(indices, answer=False), clips.layout, cap, seed=0, greedy=True)
    return spoken, [clips.tokens.codes(clips.kept[index]) for index in indices], clips


@pytest.fixture(scope="module")
def one_pair(higgs_demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "tokens"
    return dataset(higgs_demo, folder, [("ada_000", "", "ada_004"), ("ada_004", "", "")])


@pytest.fixture(scope="module")
def learned(higgs_demo, process, one_pair, tmp_path_factory):
    return overfit(higgs_demo, process, one_pair, tmp_path_factory.mktemp("learned") / "run")


def test_one_pair_overfitted_is_regenerated_exactly_and_stops(higgs_demo, learned, one_pair):
    model, loss = learned
    assert loss < 0.1
    [spoken], [codes], _ = said(higgs_demo, model, one_pair)
    assert spoken.ended and len(spoken.stream) == len(codes) + 9 and not spoken.bad_ids
    assert np.array_equal(spoken.codes, codes)


def test_the_probe_of_an_export_holds_what_is_said_and_its_likeliest_codes(higgs_demo, learned, one_pair, process):
    """Of each codebook the codes that come before the end of what was said could be heard."""
    model, _ = learned
    clips = make_clips(higgs_demo, one_pair)
    inputs, logits = probe(model, clips, process.device)
    codes = inputs["codes"].view(-1, clips.layout.codebooks)
    truth = clips.tokens.codes(clips.kept[0])[:PROBE_FRAMES]
    said = codes[-(PROBE_FRAMES + clips.layout.codebooks) :]  # targets of the second row, one per frame and delay
    for k in range(clips.layout.codebooks):
        assert said[k:PROBE_FRAMES, k].tolist() == truth[: PROBE_FRAMES - k, k].tolist()
    assert (said[PROBE_FRAMES:] < 0).all() and (codes[: len(codes) - len(said)] < 0).all()
    is_said = inputs["codes"] >= 0
    assert torch.equal(logits[is_said][:, :1024].argmax(-1), inputs["codes"][is_said])


def mutate(monkeypatch, change) -> None:
    """Changes the rows that are trained on, after their check; generation stays as it is."""
    built = higgs_data.build_row

    def build(name, ids, segments, layout, answer=True):
        row = built(name, ids, segments, layout, answer)
        return change(row, layout) if answer else row

    monkeypatch.setattr(higgs_data, "build_row", build)


def mask_ends(row, layout):
    row.labels[row.labels == layout.eos] = -100
    return row


@pytest.mark.long
def test_without_the_delay_the_same_loss_regenerates_nothing(higgs_demo, process, one_pair, tmp_path, monkeypatch):
    mutate(monkeypatch, without_delay)
    model, loss = overfit(higgs_demo, process, one_pair, tmp_path / "run")
    monkeypatch.undo()
    assert loss < 0.1
    [spoken], [codes], _ = said(higgs_demo, model, one_pair)
    shared = min(len(codes), len(spoken.codes))
    assert len(spoken.codes) != len(codes) or (spoken.codes[:shared] == codes[:shared]).mean() < 0.6


@pytest.mark.long
def test_without_the_end_as_a_label_it_never_stops(higgs_demo, process, one_pair, tmp_path, monkeypatch):
    mutate(monkeypatch, mask_ends)
    model, loss = overfit(higgs_demo, process, one_pair, tmp_path / "run")
    monkeypatch.undo()
    assert loss < 0.1
    [spoken], [codes], _ = said(higgs_demo, model, one_pair, cap=80)
    assert not spoken.ended and len(spoken.stream) == 89


@pytest.fixture(scope="module")
def two_voices(higgs_demo, tmp_path_factory):
    """Two speakers say the same text: only the reference tells whose voice it is to be."""
    clips = [("ada_000", "the same words", "ada_004"), ("ada_004", "", "")]
    clips += [("ben_001", "the same words", "ben_005"), ("ben_005", "", "")]
    return dataset(higgs_demo, tmp_path_factory.mktemp("two") / "tokens", clips)


def test_two_voices_overfitted_follow_their_reference(higgs_demo, process, two_voices, tmp_path):
    model, _ = overfit(
        higgs_demo, process, two_voices, tmp_path / "run", steps=200, eval_data=str(two_voices), allow_overlap=True
    )
    spoken, codes, clips = said(higgs_demo, model, two_voices)
    assert all(np.array_equal(s.codes, c) for s, c in zip(spoken, codes, strict=True))
    values = [record for record in support.metrics(tmp_path / "run") if record.get("event") == "eval"]
    # Small by nature: once the first frames are given, they tell the voice themselves.
    assert values[-1]["gap"] > 0.02 and values[-1]["loss"] < 0.01
    # The other's reference calls the other's voice.
    other = clips.rows([0, 1], clips.other_references([0, 1]), answer=False)
    swapped = speak(model, other, clips.layout, 80, seed=0, greedy=True)
    assert np.array_equal(swapped[0].codes, codes[1]) and np.array_equal(swapped[1].codes, codes[0])


@pytest.mark.long
def test_an_overfitted_dialogue_follows_the_order_of_its_references(higgs_demo, process, tmp_path):
    said = "[SPEAKER0] the same [SPEAKER1] words"
    rows = [("ada_000", said, "ada_004", "ben_005"), ("ben_001", said, "ben_005", "ada_004")]
    folder = dialogues(higgs_demo, tmp_path / "tokens", *rows, ("ada_004", "", "", ""), ("ben_005", "", "", ""))
    model, _ = overfit(higgs_demo, process, folder, tmp_path / "run", steps=200)
    clips = make_clips(higgs_demo, folder)
    codes = [clips.tokens.codes(i) for i in clips.kept]
    spoken = speak(model, clips.rows([0, 1], answer=False), clips.layout, 80, seed=0, greedy=True)
    assert all(s.ended and np.array_equal(s.codes, c) for s, c in zip(spoken, codes, strict=True))
    exchanged = clips.rows([0, 1], clips.other_references([0, 1]), answer=False)
    spoken = speak(model, exchanged, clips.layout, 80, seed=0, greedy=True)
    assert all(np.array_equal(s.codes, c) for s, c in zip(spoken, codes[::-1], strict=True))


# ---- the start of a run ------------------------------------------------------------------------------------------


def test_a_trained_base_reads_the_delay_and_an_untrained_one_is_refused(
    higgs_demo, learned, one_pair, process, tmp_path
):
    model, _ = learned
    clips = make_clips(higgs_demo, one_pair)
    delayed, flat = layout_losses(model, clips, process.device)
    assert delayed < 0.2 and flat > 2 * delayed + 1
    higgs_clone.check_start(model, clips, 6.2, process.device)
    with pytest.raises(UserError, match="over --max-start-loss 6.2"):
        overfit(higgs_demo, process, one_pair, tmp_path / "run", max_start_loss=6.2)
    assert not support.step_records(tmp_path / "run")


def test_a_base_that_reads_audio_without_delay_better_is_refused(higgs_demo, learned, one_pair, process, monkeypatch):
    monkeypatch.setattr(higgs_clone, "layout_losses", lambda *_: (3.0, 2.9))
    with pytest.raises(UserError, match=r"2\.900 without the delay pattern"):
        higgs_clone.check_start(None, None, 6.2, None)
