"""What the flags of the Higgs recipe do and refuse, on short runs of one rank in this process, and using the result."""

import functools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import higgs_clone
from common import engine
from common.ds_config import resolve_ds
from common.ema import Ema
from common.errors import UserError
from common.lora import base_model
from common.runtime import Process
from common.tokens import TokenDataset
from helpers import support
from helpers.higgs_support import SMALL, assets, make_clips
from models.higgs import weights as higgs_weights
from models.higgs.layout import labelled_states


@pytest.fixture(scope="module")
def process(only_rank):
    return only_rank


@pytest.fixture
def trained(higgs_demo, process, tmp_path):
    """Trains a good configuration with these changes; returns the engine and the run folder."""

    def run(**changes):
        settings = {**SMALL, **assets(higgs_demo), "eval_data": "", "accumulation": 1, "steps": 2}
        config = higgs_clone.Config(**{**settings, "out": str(tmp_path / "run"), **changes})
        return higgs_clone.train(config, process, resolve_ds(config.ds, config, 1)), tmp_path / "run"

    return run


def refused(trained, **changes) -> str:
    with pytest.raises(UserError) as error:
        trained(**changes)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- the five complaints -----------------------------------------------------------------------------------------


def test_a_backward_that_does_nothing_ends_the_run_by_name(trained, monkeypatch):
    real = engine.backward
    monkeypatch.setattr(engine, "backward", lambda e, loss, *more: real(e, 0 * loss, *more))
    assert "got no gradient in the first 3 steps" in refused(trained, steps=4)


def test_a_loss_without_a_graph_cannot_be_trained_on(trained, monkeypatch):
    real = higgs_clone.compute_loss

    def detached(*arguments, **options):
        output = real(*arguments, **options)
        return output._replace(loss_sum=output.loss_sum.detach())

    monkeypatch.setattr(higgs_clone, "compute_loss", detached)
    assert "the loss has no gradient" in refused(trained)


def test_empty_batches_pass_through_the_loggers(higgs_demo, tmp_path):
    from common.metrics import Meter
    from helpers.higgs_support import text_only

    clips = make_clips(higgs_demo)
    model = higgs_weights.load_higgs(str(higgs_demo / "model"), "", torch.float32)
    meter = Meter()
    for batch in (text_only(clips), clips.batch([0])):
        meter.add(batch, higgs_clone.compute_loss(model, batch, clips))
    totals = meter.reduce(Process(0, 1, torch.device("cpu")))
    assert len(totals.parts) == 9 and np.isfinite(list(totals.parts.values())).all() and meter.non_finite_ids() == []


def test_codes_of_another_codec_are_refused(trained, higgs_demo, tmp_path):
    import shutil

    shutil.copytree(higgs_demo / "tokens/train", tmp_path / "tokens")
    info = json.loads((tmp_path / "tokens/dataset.json").read_text())
    (tmp_path / "tokens/dataset.json").write_text(json.dumps(info | {"weights_sha256": "0" * 64}))
    assert "was encoded with other codec weights" in refused(trained, data=str(tmp_path / "tokens"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantize": "4bit", "ds": "ds_configs/zero3.json"}, "--quantize 4bit needs ZeRO-2 and a LoRA preset"),
        ({"quantize": "8bit", "preset": "full"}, "--quantize 8bit needs ZeRO-2 and a LoRA preset"),
        ({"io": "lora", "ds": "ds_configs/zero3.json"}, "--io lora needs ZeRO-2"),
        ({"io": "train", "preset": "audio_path"}, "--io train is for LoRA"),
        ({"micro_tokens": 100}, "--micro-tokens 100 is below the longest clip"),
        ({"model": "/nowhere"}, "--model /nowhere is neither a folder"),
    ],
)
def test_settings_that_cannot_train_are_one_sentence(trained, changes, sentence):
    assert sentence in refused(trained, **changes)


def test_a_model_of_another_kind_is_refused(trained, higgs_demo):
    assert "not 'higgs_audio_v2'" in refused(trained, model=str(higgs_demo / "codec"))


# ---- flags -------------------------------------------------------------------------------------------------------


def test_the_lora_flags_reach_peft(higgs_demo):
    flags = {"lora_rank": 4, "lora_alpha": 24, "lora_dropout": 0.25, "preset": "attn", "precision": "fp32"}
    config = higgs_clone.Config(**assets(higgs_demo), **flags)
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1))
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (4, 24, 0.25)
    assert {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")} == {24 / 4}


@pytest.mark.parametrize("variant", ["rslora", "dora"])
def test_lora_variants_train_and_reload(trained, higgs_demo, variant):
    from peft import PeftModel

    ds_engine, run = trained(**{variant: True})
    base = higgs_weights.load_higgs(str(higgs_demo / "model"), "", torch.float32)
    loaded = PeftModel.from_pretrained(base, str(run / "export")).eval()
    assert getattr(loaded.peft_config["default"], f"use_{variant}")
    clips = make_clips(higgs_demo)
    states = [labelled_states(m, clips.batch([0]))[0] for m in (ds_engine.module.model.eval(), loaded)]
    assert torch.allclose(*states, atol=1e-5)


def test_clips_without_a_reference_are_trained_on_only_with_dropout(trained, higgs_demo, tmp_path):
    source = TokenDataset(str(higgs_demo / "tokens/train"))
    rows = [{"id": source.id(i), "text": source.text(i), "codes": source.codes(i)} for i in range(8)]
    facts = {"codec": "higgs", "channels": 8, "codebooks": 8, "sample_rate": 24000, "hop": 960}
    refs = [rows[1]["id"], "", rows[3]["id"], "", "", "", "", ""]
    data = support.write_tokens(tmp_path / "tokens", rows, columns={"ref": refs}, **facts)
    assert len(make_clips(higgs_demo, data)) == 2
    clips = make_clips(higgs_demo, data, reference_dropout=0.1)
    assert len(clips) == 8 and [len(row.frames) == rows[i]["codes"].shape[0] + 9 for i, row in
                               enumerate(clips.rows(range(8)))] == [not ref for ref in refs]  # fmt: skip
    _, run = trained(data=str(data), reference_dropout=0.1)
    assert len(support.step_records(run)) == 2


def test_codebook_weights_and_text_loss_change_the_training(trained, higgs_demo):
    _, run = trained(text_loss=0.5, codebook_weights="first")
    assert "loss_text" in support.step_records(run)[0]
    weights = make_clips(higgs_demo, codebook_weights="first").codebook_weights
    assert weights.tolist() == pytest.approx([1.6, 1.6, 1.2, 1.2, 0.8, 0.8, 0.4, 0.4])


def test_the_end_loss_of_a_step_is_the_plain_cross_entropy_of_the_ends(higgs_demo):
    config = higgs_clone.Config(model=str(higgs_demo / "model"), precision="fp32", lora_rank=4, lora_dropout=0.0)
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1)).eval()
    clips = make_clips(higgs_demo)
    batch = clips.batch(range(4))
    with torch.no_grad():
        total, count = higgs_clone.compute_loss(model, batch, clips).parts["end"]
        hidden, labels, _ = labelled_states(model, batch)
        head = base_model(model).audio_lm_head.weight
        logits = (hidden @ head.T).view(*labels.shape, -1)
    ends = labels == clips.layout.eos
    assert int(count) == int(ends.sum()) == 4 * 8, "one end per clip and codebook"
    expected = torch.nn.functional.cross_entropy(logits[ends], labels[ends], reduction="sum")
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


def test_dry_run_prints_the_plan_and_writes_nothing(trained, capsys):
    _, run = trained(dry_run=True)
    printed = capsys.readouterr().out
    for part in ("parameters", "LoRA audio: 6 modules", "padding", "longest micro-batch", "peak memory"):
        assert part in printed
    assert not run.exists()


def test_a_checkpoint_worse_than_the_base_is_never_the_best(monkeypatch, capsys):
    base = {"loss": 5.0, "gap": 0.3, "stop_rate": 1.0}
    events = []

    def score(**values):
        config = SimpleNamespace(samples=0, best_by="loss")
        run = SimpleNamespace(config=config, process=None, first_eval=lambda: base, folder=None)
        run.tracker = SimpleNamespace(event=lambda *a, **k: events.append(k))
        monkeypatch.setattr(higgs_clone, "token_metrics", lambda *_: {"loss": 4.0, **values})
        return higgs_clone.evaluate(None, [1], run, Ema(None, 0.0), SimpleNamespace(of_step=lambda *_: {}), 7)

    assert score(gap=0.2, stop_rate=1.0) == 4.0
    assert score(gap=0.3, stop_rate=0.5) is None and "worse than the base in stop_rate" in capsys.readouterr().out
    assert score(gap=-0.01, stop_rate=1.0) == 4.0 and "voice prompt is ignored" in capsys.readouterr().out
    assert len(events) == 3

    def later(best_by="loss", **values):
        config = SimpleNamespace(best_by=best_by)
        start = base | {"wer": 0.4, "similarity": 0.6}
        return higgs_clone.score_of({"step": 7, "loss": 4.0, "gap": 0.3, "stop_rate": 1.0, **values}, start, config)

    assert later(wer=0.44, similarity=0.56) == 4.0
    assert later(wer=0.46, similarity=0.6) is None and later(wer=0.4, similarity=0.54) is None
    assert later("wer", wer=0.2, similarity=0.6) == pytest.approx(0.2, abs=1e-4)


def test_the_export_is_the_best_that_the_guard_lets_through(trained, higgs_demo, monkeypatch):
    """The lowest loss is that of step 2, which stops less often than the base does."""
    metrics = iter([{"loss": 5.0, "stop_rate": 0.9}, {"loss": 4.0, "stop_rate": 0.9}, {"loss": 1.0, "stop_rate": 0.5}])
    monkeypatch.setattr(higgs_clone, "token_metrics", lambda *_: next(metrics))
    _, run = trained(eval_data=assets(higgs_demo)["eval_data"], eval_every=1)
    facts = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]
    assert facts == {"step": 1, "score": 4.0, "why": "the best by loss"}


# ---- the result, used --------------------------------------------------------------------------------------------


speak_script = functools.partial(support.run_script, "infer/higgs_speak.py")


@pytest.fixture(scope="module")
def adapter(higgs_demo, tmp_path_factory):
    """An adapter with weights that matter, saved by plain PEFT."""
    folder = tmp_path_factory.mktemp("adapter") / "export"
    config = higgs_clone.Config(model=str(higgs_demo / "model"), precision="fp32", lora_rank=4, io="lora")
    model = higgs_clone.build_model(config, resolve_ds(config.ds, config, 1))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(higgs_demo / "model")
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def test_merged_folder_is_complete_and_equals_base_plus_adapter(adapter, higgs_demo, tmp_path):
    from peft import PeftModel
    from transformers import AutoProcessor, HiggsAudioV2ForConditionalGeneration

    done = speak_script("--adapter", adapter, "--merge", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    merged = HiggsAudioV2ForConditionalGeneration.from_pretrained(str(tmp_path / "merged"), use_text_head=True).eval()
    base = higgs_weights.load_higgs(str(higgs_demo / "model"), "", torch.float32)
    tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
    clips = make_clips(higgs_demo)
    expected, found = (labelled_states(m, clips.batch([0, 1]))[0] for m in (tuned, merged))
    assert torch.allclose(expected, found, atol=1e-4) and float(expected.abs().max()) > 0.1
    head = load_file(higgs_demo / "model/model.safetensors")["text_lm_head.weight"]
    assert torch.equal(merged.text_lm_head.weight, head)
    processor = AutoProcessor.from_pretrained(str(tmp_path / "merged"))
    assert type(processor.audio_tokenizer).__name__ == "HiggsAudioV2TokenizerModel"
    assert "exists already" in speak_script("--adapter", adapter, "--merge", tmp_path / "merged").stderr


@pytest.mark.long
def test_a_merged_folder_names_the_codec_of_the_training_data(adapter, higgs_demo, tmp_path):
    used = tmp_path / "export"
    shutil.copytree(adapter, used)
    codec = {"name": "higgs", "place": str(tmp_path / "my-codec"), "sample_rate": 24000, "hop": 960, "sha256": "0" * 64}
    (used / "codec.json").write_text(json.dumps(codec))
    assert speak_script("--adapter", used, "--merge", tmp_path / "merged").returncode == 0
    assert json.loads((tmp_path / "merged/codec.json").read_text()) == codec
    done = speak_script("--model", tmp_path / "merged", "--text", "gumi", "--wav", tmp_path / "a.wav")
    assert done.returncode == 2 and done.stderr.strip().count("\n") == 0
    assert (
        f"the codec {codec['place']} (SHA-256 000000000000) is not on this machine; give it as --codec" in done.stderr
    )


def test_with_a_split_no_held_out_clip_is_heard_as_a_reference(higgs_demo):
    """By clip, so that references are on the other side of the split too."""
    flags = {"eval_split": 0.3, "eval_split_by": "clip"}
    held, train = (make_clips(higgs_demo, higgs_demo / "tokens/train", side, **flags) for side in (False, True))
    tokens = train.tokens
    names = {tokens.id(i): tokens.value("ref", i) for i in range(len(tokens))}
    held_ids, train_ids = (set(clips.ids(range(len(clips)))) for clips in (held, train))
    assert held_ids and train_ids and not held_ids & (train_ids | {names[name] for name in train_ids})
    assert {tokens.id(i) for i in train.heard} == train_ids | {names[name] for name in train_ids}
    assert train_ids == {name for name in names if name not in held_ids and names[name] not in held_ids}


@pytest.mark.long
def test_speaking_in_the_voice_of_a_recording_writes_sound(adapter, higgs_demo, tmp_path):
    voice = next((higgs_demo / "audio/eval").glob("*.wav"))
    words = ["--adapter", adapter, "--ref", voice, "--ref-text", "bada", "--text", "gumi lono", "--seconds", "1"]
    done = speak_script(*words, "--wav", tmp_path / "a.wav")
    assert done.returncode == 0, done.stderr
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 24000 and 0 < len(audio) <= 24000 and np.abs(audio).max() > 0


@pytest.mark.long
def test_a_dialogue_is_spoken_with_two_voices(adapter, higgs_demo, tmp_path):
    one, two = sorted((higgs_demo / "audio/eval").glob("*.wav"))[:2]
    words = ["--adapter", adapter, "--voice", one, "--voice-text", "bada", "--voice", two, "--voice-text", "lono"]
    words += ["--seconds", "1", "--wav", tmp_path / "a.wav", "--text", "[SPEAKER0] gumi [SPEAKER1] lono bada"]
    done = speak_script(*words)
    assert done.returncode == 0, done.stderr
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 24000 and 0 < len(audio) <= 24000 and np.abs(audio).max() > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--text", "hello"], "give --text and --wav"),
        (["--text", "hello", "--wav", "no/folder/x.wav"], "the folder no/folder does not exist"),
        (["--text", "hello", "--wav", "x.wav", "--ref", "x.wav"], "--ref and --ref-text go together"),
        (["--text", "hello", "--wav", "x.wav", *2 * ["--voice", "x.wav", "--voice-text", "x"]], "who speaks?"),
    ],
)
def test_mistakes_in_speaking_are_one_sentence(adapter, words, sentence):
    done = speak_script("--adapter", adapter, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr and sentence in done.stderr
