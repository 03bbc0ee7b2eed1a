"""A user's mistake in Llama MoT is one clear sentence, an exit code, and nothing half-written."""

import csv
import math
import os

import numpy as np
import pytest

import llama_mot
from common.ds_config import resolve_ds
from common.errors import UserError
from common.runtime import Process, init_process
from common.tokens import TokenDataset
from helpers import support
from helpers.mot_support import SMALL, assets
from models.mot.legacy_codes import find_captions, place_for, token_folder

ENCODEC = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048, "channels": 4}


@pytest.fixture(scope="module")
def process():
    return init_process()


@pytest.fixture
def run(demo_mot, process, tmp_path):
    """run(...) trains a few steps in this process; run.refused(...) -> the sentence it is refused with."""

    def train(**changes):
        config = llama_mot.Config(
            **{**SMALL, **assets(demo_mot), "out": str(tmp_path / "run"), "accumulation": 1, **changes}
        )
        return llama_mot.train(config, process, resolve_ds(config.ds, config, 1))

    def refused(**changes) -> str:
        with pytest.raises(UserError) as error:
            train(**changes)
        sentence = str(error.value)
        assert "\n" not in sentence and len(sentence) < 400
        assert not (tmp_path / "run" / "export").exists()
        return sentence

    train.refused = refused
    return train


@pytest.fixture
def clips(demo_mot):
    tokens = TokenDataset(str(demo_mot / "tokens"))
    return [{"id": tokens.id(i), "text": tokens.text(i), "codes": np.array(tokens.codes(i))} for i in range(6)]


def test_missing_data_says_how_to_make_it(run, tmp_path):
    assert "is not a token dataset (no dataset.json); make one with data/encode.py" in run.refused(data=str(tmp_path))


@pytest.mark.parametrize("fact, value, needed", [("sample_rate", 24000, 32000), ("hop", 320, 640)])
def test_music_of_another_rate_or_hop(run, clips, tmp_path, fact, value, needed):
    data = support.write_tokens(tmp_path / "tokens", clips, **ENCODEC | {fact: value})
    assert f"{fact} = {value} but Llama MoT needs {needed}" in run.refused(data=str(data))


def test_evaluation_on_training_clips(run, clips, tmp_path):
    data = support.write_tokens(tmp_path / "tokens", clips, **ENCODEC)
    sentence = run.refused(data=str(data), eval_data=str(data))
    assert f"evaluation clip {clips[0]['id']!r} is trained on" in sentence and "--eval-split 0.02" in sentence


def test_a_part_of_the_source(run, clips, tmp_path):
    data = support.write_tokens(tmp_path / "tokens", clips, wanted=5233, **ENCODEC)
    assert "holds 6 of the 5233 clips of its source" in run.refused(data=str(data))


def test_a_code_out_of_range_names_the_clip(run, clips, tmp_path, monkeypatch):
    clips[3]["codes"][5, 1] = 2048
    data = support.write_tokens(tmp_path / "tokens", clips, **ENCODEC)
    for verify in (True, False):
        if not verify:  # damaged after it was verified
            monkeypatch.setattr(TokenDataset, "verify", lambda self, tick: None)
        sentence = run.refused(data=str(data), steps=9, out=str(tmp_path / f"run{verify}"))
        assert clips[3]["id"] in sentence and "2048" in sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"musicgen": ""}, "name one with --musicgen"),
        ({"profile": "legacy"}, "--profile legacy needs --ids shared"),
        ({"layout": "delay", "ids": "shared"}, "predicts 4 codes at once: it needs --ids offset"),
        ({"layout": "delay", "loss_vocab": "all"}, "predicts 4 codes at once: it needs --ids offset"),
        ({"train_parts": ["nothing"]}, "--train-parts nothing: choose from"),
        ({"text_dropout": 0.0, "samples": 1}, "set --text-dropout above 0"),
        ({"codebook_weights": [1.0]}, "--codebook-weights takes 4 numbers"),
        ({"max_text": 3}, "over --max-text 3"),
        ({"adapter": "nowhere"}, "no readable adapter_config.json"),
        ({"quantize": "4bit", "ds": "ds_configs/zero3.json"}, "--quantize 4bit needs ZeRO-2"),
    ],
)
def test_flags_that_do_not_go_together(run, changes, sentence):
    assert sentence in run.refused(**changes)


def test_models_of_another_kind(run, demo_mot, tmp_path):
    assert "not 'llama'" in run.refused(model=str(demo_mot / "musicgen"))
    assert "not 'musicgen'" in run.refused(musicgen=str(demo_mot / "llama"))
    assert "--model" in run.refused(model=str(tmp_path / "nothing"))


def test_a_first_loss_that_cannot_be_is_refused(run, monkeypatch):
    monkeypatch.setattr("models.mot.build.NEW_ROW_SCALE", 40.0)
    assert f"instead of about {math.log(2048):.4f}" in run.refused()


def test_a_nan_clip_is_named_and_its_step_skipped(run, demo_mot, clips, tmp_path, monkeypatch):
    real = llama_mot.compute_loss
    bad = clips[2]["id"]

    def poisoned(model, batch):
        output = real(model, batch)
        return output._replace(loss_sum=output.loss_sum * float("nan")) if bad in batch["ids"] else output

    monkeypatch.setattr(llama_mot, "compute_loss", poisoned)
    data = support.write_tokens(tmp_path / "tokens", clips, **ENCODEC)
    run(data=str(data), eval_data="", micro_tokens=200, steps=6)
    skips = [record for record in support.metrics(tmp_path / "run") if record.get("event") == "skip"]
    assert [record["ids"] for record in skips] == [[bad]]


def test_dry_run_prints_the_plan_and_writes_nothing(run, tmp_path, capsys):
    run(dry_run=True)
    printed = capsys.readouterr().out
    for part in ("copied 40/40", "parameters", "trained", "padding", "longest micro-batch", "peak memory"):
        assert part in printed, part
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_an_exported_adapter(run, tmp_path):
    run(steps=6, lr=5e-3, copied_lr=1.0, warmup=1.0)
    before = [record["loss"] for record in support.step_records(tmp_path / "run")]
    run(adapter=str(tmp_path / "run" / "export"), out=str(tmp_path / "more"), steps=1, warmup=1.0)
    [after] = [record["loss"] for record in support.step_records(tmp_path / "more")]
    assert after < before[0] - 0.3
    with pytest.raises(UserError, match="has shape"):
        run(adapter=str(tmp_path / "run" / "export"), ids="shared", out=str(tmp_path / "other"))


@pytest.fixture
def pre_encoded(clips, tmp_path):
    """A folder as the first MoT trainer left it, with MusicCaps' CSV beside it."""
    folder = tmp_path / "pre_encoded_audio"
    folder.mkdir()
    for clip in clips:
        np.save(folder / f"{clip['id']}.npy", clip["codes"].T[None])
    with open(tmp_path / "musiccaps-public.csv", "w", newline="") as stream:
        rows = [[clip["id"], clip["text"], "False", "False"] for clip in clips]
        csv.writer(stream).writerows([["ytid", "caption", "is_balanced_subset", "is_audioset_eval"], *rows])
    return folder


@pytest.mark.long
def test_a_folder_of_legacy_codes_trains_as_its_token_dataset_does(run, clips, pre_encoded, tmp_path, capfd):
    """Losses equal those of a dataset written by hand; the second start converts nothing."""
    by_hand = support.write_tokens(tmp_path / "hand", sorted(clips, key=lambda clip: clip["id"]), **ENCODEC)
    losses = []
    for name, data in (("a", by_hand), ("b", pre_encoded), ("c", pre_encoded)):
        run(data=str(data), eval_data="", micro_tokens=200, steps=2, out=str(tmp_path / name))
        losses.append([record["loss"] for record in support.step_records(tmp_path / name)])
    assert losses[0] == losses[1] == losses[2]
    assert capfd.readouterr().out.count("cache hit") == 1 and (tmp_path / "pre_encoded_audio.tokens").is_dir()
    np.save(pre_encoded / f"{clips[0]['id']}.npy", np.full((4, 3), 2048))  # rejected, and so too few are left
    assert "holds 5 of the 6 clips of its source" in run.refused(data=str(pre_encoded), out=str(tmp_path / "d"))


def test_legacy_codes_without_captions_or_a_place(pre_encoded, tmp_path, monkeypatch):
    process, csv_file = Process(0, 1, "cpu"), tmp_path / "musiccaps-public.csv"
    assert find_captions(pre_encoded) == csv_file
    (pre_encoded / "copy.csv").write_bytes(csv_file.read_bytes())
    assert find_captions(pre_encoded).read_bytes() == csv_file.read_bytes()
    (pre_encoded / "copy.csv").write_text("ytid,caption\n")
    with pytest.raises(UserError, match=r"beside it there is .*copy.csv and .*musiccaps-public.csv: leave one"):
        token_folder(str(pre_encoded), process)
    for file in (pre_encoded / "copy.csv", csv_file):
        file.unlink()
    with pytest.raises(UserError, match="no CSV with the columns ytid and caption"):
        token_folder(str(pre_encoded), process)
    assert not place_for(pre_encoded).exists() and place_for(pre_encoded).parent == tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert place_for(pre_encoded).parent == tmp_path / "cache" / "audio-finetune"


@pytest.mark.long
def test_samples_are_played_decoded_and_reported(run, tmp_path):
    import json

    import soundfile

    run(samples=2, sample_frames=8, guidance=2.0)
    folder = tmp_path / "run" / "samples"
    for step in ("step-00000004", "recorded"):
        files = sorted((folder / step).glob("*.npy"))
        assert len(files) == 2
        for file in files:
            codes = np.load(file, allow_pickle=False)
            if len(codes):
                audio, rate = soundfile.read(file.with_suffix(".wav"))
                assert rate == 32000 and len(audio) == 640 * len(codes)
    facts = json.loads((folder / "step-00000004" / "clip-0000.json").read_text())
    assert {"text", "repeats", "distinct_codes", "ended_by_eos", "guidance", "seed"} <= set(facts)
    assert (tmp_path / "run" / "report.html").read_text().count("<audio") >= 2
