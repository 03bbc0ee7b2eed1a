"""A user's mistake in Llama MoT is one clear sentence, an exit code, and nothing half-written."""

import math

import numpy as np
import pytest

import llama_mot
from common.ds_config import resolve_ds
from common.errors import UserError
from common.tokens import TokenDataset
from helpers import support
from helpers.mot_support import SMALL, assets

ENCODEC = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048, "channels": 4}


@pytest.fixture(scope="module")
def process(only_rank):
    return only_rank


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
        ({"train_parts": ["nothing"]}, "--train-parts nothing: choose from"),
        ({"codebook_weights": [1.0]}, "--codebook-weights takes 4 numbers"),
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
    with pytest.raises(UserError, match="tensors differ by name"):
        run(adapter=str(tmp_path / "run" / "export"), untie="ffn", out=str(tmp_path / "other"))


@pytest.mark.long
def test_samples_are_played_decoded_and_reported(run, tmp_path):
    import json

    import soundfile

    run(samples=2)
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
