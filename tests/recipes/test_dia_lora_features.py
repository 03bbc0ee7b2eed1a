"""What the flags of the Dia LoRA recipe do, each shown on a short run of one rank in this process."""

import functools
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import soundfile
import torch
from peft import PeftModel
from safetensors.torch import load_file

import dia_lora
from common import checkpoint
from common.config import parse_args
from common.ds_config import resolve_ds
from common.errors import UserError
from common.plan import Plan
from common.tokens import TokenDataset
from helpers import support
from helpers.dia_support import SMALL
from models.dia.data import Clips
from models.dia.generate import speak
from models.dia.layout import labelled_states, layout_of, text_bytes
from models.dia.weights import load_dia


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture
def trained(demo, ranks, tmp_path):
    """Trains a good configuration with these changes; returns the engine and the run folder."""

    def run(**changes):
        assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "out": str(tmp_path / "run")}
        config = dia_lora.Config(**{**SMALL, **assets, "accumulation": 1, "steps": 3, **changes})
        return dia_lora.train(config, ranks, resolve_ds(config.ds, config, 1)), tmp_path / "run"

    return run


def test_a_run_repeated_from_its_config_json_has_the_same_losses_bit_for_bit(trained, demo, ranks, tmp_path):
    _, first = trained(lora_dropout=0.1, text_dropout=0.3, seed=3, ema=0.9, eval_data=str(demo / "tokens/eval"))
    words = ["--config", str(first / "config.json"), "--out", str(tmp_path / "again")]
    config = parse_args(dia_lora.Config, "doc", words, demo=dia_lora.DEMO)
    dia_lora.train(config, ranks, resolve_ds(config.ds, config, 1))
    losses = [
        [(r["step"], r["loss"]) for r in support.metrics(run) if "loss" in r] for run in (first, tmp_path / "again")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3 + 2


def test_the_export_is_the_best_checkpoint_and_says_which(trained, demo, monkeypatch):
    """The scores stand in for an evaluation that gets worse again; None can never be the best."""
    scores = iter([None, 3.0, 1.0, 2.0, None])  # before training, then after each step
    monkeypatch.setattr(dia_lora, "evaluate", lambda *_, **__: next(scores))
    _, run = trained(steps=4, eval_every=1, lr=5e-3, eval_data=str(demo / "tokens/eval"))
    facts = json.loads((run / "export" / "training_config.json").read_text())
    assert facts["recipe"] == "dia_lora" and facts["checkpoint"] == {"step": 2, "score": 1.0, "why": "the best by loss"}
    exported = load_file(run / "export" / "adapter_model.safetensors")
    best, last = (
        {name.replace(".default", ""): value for name, value in checkpoint.masters(run / "checkpoints" / step).items()}
        for step in ("step-00000002", "step-00000004")
    )
    assert set(exported) == set(best)
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert not all(torch.equal(exported[name], last[name]) for name in last)


@pytest.mark.long
def test_a_run_that_overfits_exports_the_step_before_it_did(trained, demo, tmp_path):
    """Two clips by heart: the held-out loss falls, then rises far above its lowest value."""
    tokens = TokenDataset(str(demo / "tokens/train"))
    clips = [{"id": tokens.id(i), "text": tokens.text(i), "codes": tokens.codes(i)} for i in range(2)]
    data = support.write_tokens(tmp_path / "two", clips)
    flags = {"lora_groups": ["attn_mlp", "head"], "lora_rank": 16, "lora_alpha": 32.0, "lr": 5e-3, "eval_every": 5}
    flags |= {"min_eos_recall": 0.0, "steps": 30, "micro_tokens": 600, "keep": 1}
    _, run = trained(data=str(data), eval_data=str(demo / "tokens/eval"), **flags)
    losses = {r["step"]: r["loss"] for r in support.metrics(run) if r.get("event") == "eval" and r["step"]}
    best = min(losses, key=losses.get)
    assert best < 30 and losses[30] > losses[best] + 0.1
    facts = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]
    assert (facts["step"], facts["score"]) == (best, pytest.approx(losses[best]))
    exported = load_file(run / "export" / "adapter_model.safetensors")
    kept = checkpoint.masters(run / "checkpoints" / f"step-{best:08d}")
    assert all(torch.equal(exported[name.replace(".default", "")], value) for name, value in kept.items())


def test_a_skipped_step_can_be_repeated_from_its_file(trained, tmp_path, monkeypatch):
    """The file holds what the step saw: computed again, it gives the loss of a run in which nothing failed."""
    trained(steps=1, out=str(tmp_path / "fine"))
    own = dia_lora.compute_loss

    def failing(model, batch, clips):
        output = own(model, batch, clips)
        return output._replace(loss_sum=output.loss_sum * float("nan"))

    monkeypatch.setattr(dia_lora, "compute_loss", failing)
    ds_engine, run = trained(steps=1)
    (skip,) = [record for record in support.metrics(run) if record.get("event") == "skip"]
    (batch,) = torch.load(run / "skipped" / "step-00000001.pt", weights_only=True)["micro_batches"]
    assert batch["ids"] == skip["ids"]
    clips = ds_engine.module.loss_fn.keywords["clips"]
    with torch.no_grad():  # nothing was applied: it is the model that the step saw
        again = own(ds_engine.module.model, batch, clips).loss_sum / float((batch["labels"] != -100).sum())
    (record,) = support.step_records(tmp_path / "fine")
    assert float(again) == pytest.approx(record["loss"], rel=1e-5)


def test_without_a_score_the_export_is_the_last_checkpoint(trained):
    _, run = trained(eval_every=1)
    facts = json.loads((run / "export" / "training_config.json").read_text())
    assert facts["checkpoint"] == {"step": 3, "score": None, "why": "the last: no evaluation gave a score"}


def test_the_logged_loss_is_what_is_optimised(trained):
    """Weights of channels and ends count; the parts stay plain means per channel."""
    _, run = trained(channel_weights="first4x", steps=1)
    record = support.step_records(run)[0]
    channels = [record[f"loss_channel_{c}"] for c in range(9)]
    assert record["loss"] == pytest.approx(np.average(channels, weights=[4.0] + [1.0] * 8), rel=1e-5)
    assert record["loss"] != pytest.approx(np.mean(channels), rel=1e-5)


def test_tag_rows_are_trained_saved_and_applied_after_reload(trained, demo, tmp_path):
    tags = {"[de]": 4, "[nl]": 14}
    (tmp_path / "tags.json").write_text(json.dumps(tags))
    tokens = TokenDataset(str(demo / "tokens/train"))
    clips = [
        {"id": tokens.id(i), "text": f"{['[de]', '[nl]'][i % 2]} {tokens.text(i)}", "codes": tokens.codes(i)}
        for i in range(12)
    ]
    data = support.write_tokens(tmp_path / "tokens", clips)
    ds_engine, run = trained(data=str(data), tag_map=str(tmp_path / "tags.json"), text_dropout=0.0, lr=5e-3)
    assert json.loads((run / "export" / "tag_map.json").read_text()) == tags

    base = load_dia(str(demo / "dia"), torch.float32)
    before = base.model.encoder.embedding.weight.detach().clone()
    loaded = PeftModel.from_pretrained(base, str(run / "export")).eval()
    layout = layout_of(base.config)
    config = dia_lora.Config(seed=0)
    batch = Clips(TokenDataset(str(data)), layout, config, tags, train=False).batch([0, 1])
    assert set(batch["input_ids"][:, 0].tolist()) == {4, 14}
    states = [labelled_states(model, batch)[0] for model in (ds_engine.module.model.eval(), loaded)]
    assert torch.equal(*states)
    after = loaded.merge_and_unload().model.encoder.embedding.weight
    changed = torch.nonzero((after != before).any(1)).flatten().tolist()
    assert changed == [4, 14]


def test_tag_map_under_zero3_is_refused(trained, tmp_path):
    (tmp_path / "tags.json").write_text('{"[de]": 4}')
    with pytest.raises(UserError, match="--tag-map needs ZeRO-2"):
        trained(tag_map=str(tmp_path / "tags.json"), ds="ds_configs/zero3.json")


def test_the_lora_flags_reach_peft(demo):
    flags = {"lora_rank": 4, "lora_alpha": 24, "lora_dropout": 0.25, "lora_groups": ["dec_self"], "precision": "fp32"}
    config = dia_lora.Config(model=str(demo / "dia"), data="x", **flags)
    model = dia_lora.build_model(config, resolve_ds(config.ds, config, 1), {})
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (4, 24, 0.25)
    assert {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")} == {24 / 4}


def test_cropped_tag_prompts_train(trained):
    _, run = trained(text_mode="tags", over_long="crop", max_seconds=0.5)
    records = support.step_records(run)
    assert len(records) == 3 and all(np.isfinite(r["loss"]) for r in records)
    # 0.5 s are 43 frames and the delay's tail; every clip of the demo is longer
    assert all(r["tokens"] % (43 + 16) == 0 for r in records)


def test_held_out_rows_are_never_trained_on(demo, tmp_path):
    source = TokenDataset(str(demo / "tokens/train"))
    clips = [{"id": source.id(i), "text": source.text(i), "codes": source.codes(i)} for i in range(6)]
    splits = ["train", "eval", "train", "test", "", "validation"]
    tokens = TokenDataset(str(support.write_tokens(tmp_path / "tokens", clips, splits)))
    layout = layout_of(load_dia(str(demo / "dia"), torch.float32).config)
    for train, kept in ((True, [0, 2, 4]), (False, [1, 3, 5])):
        chosen = Clips(tokens, layout, dia_lora.Config(), {}, train)
        assert chosen.batch(range(len(chosen)))["ids"] == [clips[i]["id"] for i in kept]


def test_a_split_evaluates_on_clips_that_are_not_trained_on(trained, demo, monkeypatch):
    seen = []
    check = dia_lora.check_holdout
    monkeypatch.setattr(dia_lora, "check_holdout", lambda *sets: (seen.extend([*sets[0], sets[1]]), check(*sets)))
    _, run = trained(eval_split=0.2, steps=1)
    ids = [set(clips.ids(range(len(clips)))) for clips in seen]
    whole = TokenDataset(str(demo / "tokens/train"))
    assert not ids[0] & ids[1] and ids[0] | ids[1] == {whole.id(i) for i in range(len(whole))} and len(ids[1]) > 3
    assert [record["step"] for record in support.metrics(run) if record.get("event") == "eval"] == [0, 1]
    # The export tells which codec it speaks through.
    made, weights = json.loads((demo / "tokens/train/dataset.json").read_text()), demo / "codec/model.safetensors"
    assert json.loads((run / "export/codec.json").read_text()) == {
        "name": "dac", "place": made["weights"], "sample_rate": 44100, "hop": 512,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }  # fmt: skip


def test_training_clips_are_not_evaluated_on(trained, demo, tmp_path):
    with pytest.raises(UserError, match="evaluation clip 'train-ada_000' is trained on"):
        trained(eval_data=str(demo / "tokens/train"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sample_rate": 24000}, "sample_rate = 24000 but --model .* needs 44100"),
        ({"hop": 320}, "hop = 320 but --model .* needs 512"),
        ({"weights_sha256": "0" * 64}, r"other codec weights \(.*, 000000000000\)"),
        ({"weights_sha256": "0" * 64, "weights": "someone/else"}, r"other codec weights \(someone/else, 0"),
    ],
)
def test_codes_of_another_codec_are_refused(trained, demo, tmp_path, change, words):
    shutil.copytree(demo / "tokens/train", tmp_path / "tokens")
    info = json.loads((tmp_path / "tokens/dataset.json").read_text())
    (tmp_path / "tokens/dataset.json").write_text(json.dumps(info | change))
    with pytest.raises(UserError, match=words):
        trained(data=str(tmp_path / "tokens"))
    assert not (tmp_path / "run").exists()


def test_a_first_step_without_texts_is_not_taken_for_dead_matrices(trained, demo):
    seed = first_seed_without_text(demo)
    _, run = trained(text_dropout=0.5, seed=seed, precision="bf16", lora_rank=4)
    assert len(support.step_records(run)) == 3


def first_seed_without_text(demo) -> int:
    """A seed for which the first step has no text at all and the second has some."""
    tokens = TokenDataset(str(demo / "tokens/train"))
    layout = layout_of(load_dia(str(demo / "dia"), torch.float32).config)
    for seed in range(500):
        config = dia_lora.Config(**SMALL, text_dropout=0.5, seed=seed)
        clips = Clips(tokens, layout, config, {}, train=True)
        plan = Plan(clips.lengths, config.micro_tokens, seed)
        first, second = (clips.batch(rows, epoch) for epoch, rows in map(plan.micro_batch, (0, 1)))
        if not first["input_ids"].any() and second["input_ids"].any():
            return seed
    raise AssertionError("no such seed")


@pytest.mark.long
def test_samples_are_spoken_decoded_and_reported(trained, demo, tmp_path):
    shutil.copytree(demo / "dia", tmp_path / "dia")
    settings = tmp_path / "dia" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": False, "guidance_scale": None}))
    tokens = TokenDataset(str(demo / "tokens/eval"))
    clips = [{"id": tokens.id(i), "text": tokens.text(i), "codes": tokens.codes(i)[:20]} for i in range(3)]
    held_out = support.write_tokens(tmp_path / "held-out", clips, weights=tokens.info["weights"])
    _, run = trained(model=str(tmp_path / "dia"), eval_data=str(held_out), samples=2, eval_every=2)
    for step in ("step-00000000", "step-00000002", "step-00000003", "recorded"):
        files = sorted((run / "samples" / step).glob("*.npy"))
        assert len(files) == 2
        for file in files:
            codes = np.load(file, allow_pickle=False)
            if len(codes):
                audio, rate = soundfile.read(file.with_suffix(".wav"))
                assert rate == 44100 and len(audio) == len(codes) * 512
    # Step 0 is what the base says, without any adapter.
    base, text = load_dia(str(demo / "dia"), torch.float32), TokenDataset(str(demo / "tokens/eval")).text(0)
    [(codes, _)] = speak(base, [text_bytes(text, {}, "eval")], max_frames=30, seed=0)
    assert np.array_equal(np.load(run / "samples" / "step-00000000" / "clip-0000.npy"), codes)
    facts = json.loads((run / "samples" / "step-00000003" / "clip-0000.json").read_text())
    assert facts["text"] == TokenDataset(str(demo / "tokens/eval")).text(0)
    assert {"seconds", "seconds_per_byte", "ended_by_eos", "repeats"} <= set(facts)
    recorded = json.loads((run / "samples" / "recorded" / "clip-0000.json").read_text())
    audio, _ = soundfile.read(run / "samples" / "recorded" / "clip-0000.wav")
    assert recorded["clipped"] == pytest.approx((np.abs(audio) >= 0.999).mean(), abs=0.02)
    assert 0 <= recorded["silent"] <= 1
    page = (run / "report.html").read_text()
    assert page.count("<audio") >= 2 and "://" not in page.split("<summary>Configuration")[0]


def test_dry_run_prints_the_plan_and_writes_nothing(trained, capsys):
    _, run = trained(dry_run=True)
    printed = capsys.readouterr().out
    for part in ("parameters", "trained", "padding", "ZeRO-2 on 1 ranks", "longest micro-batch", "peak memory"):
        assert part in printed
    assert not run.exists()


def test_a_run_does_not_go_on_with_other_settings(trained):
    trained()
    with pytest.raises(UserError, match=r"belongs to another run \(lora_rank: 4 then, 8 now\)"):
        trained(lora_rank=8)
    with pytest.raises(UserError, match="already holds checkpoints"):
        trained(resume="never")


# ---- the result, used --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(demo, tmp_path_factory):
    """An adapter with weights that matter, saved by plain PEFT."""
    folder = tmp_path_factory.mktemp("adapter") / "export"
    config = dia_lora.Config(model=str(demo / "dia"), precision="fp32", lora_rank=4)
    model = dia_lora.build_model(config, resolve_ds(config.ds, config, 1), {})
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(demo / "dia")
    model.save_pretrained(str(folder))
    return folder


speak_script = functools.partial(support.run_script, "infer/dia_speak.py")


@pytest.mark.long
def test_speaking_a_text_writes_sound(adapter, demo, tmp_path):
    words = ["--adapter", adapter, "--codec", demo / "codec", "--text", "[S1] bada gumi", "--seconds", "0.5"]
    done = speak_script(*words, "--wav", tmp_path / "a.wav")
    assert done.returncode == 0, done.stderr
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 44100 and 0 < len(audio) <= 0.5 * 44100 and np.abs(audio).max() > 0
    again = speak_script(*words, "--wav", tmp_path / "b.wav")
    assert again.returncode == 0 and (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def with_codec(adapter, folder, **changes):
    """The adapter in a folder, with a codec.json."""
    shutil.copytree(adapter, folder)
    codec = {"name": "dac", "place": None, "sample_rate": 44100, "hop": 512, "sha256": None} | changes
    (folder / "codec.json").write_text(json.dumps(codec))
    return folder


def test_a_codec_that_is_gone_or_has_changed_is_named_in_one_sentence(adapter, demo, tmp_path, monkeypatch, capsys):
    from infer import dia_speak

    gone = with_codec(adapter, tmp_path / "gone", place=str(tmp_path / "no-codec"), sha256="1" * 64)
    changed = with_codec(adapter, tmp_path / "changed", place=str(demo / "codec"), sha256="1" * 64)
    for folder, sentence in ((gone, "is not on this machine; give it as --codec"), (changed, "is no longer the one")):
        words = ["dia_speak.py", "--adapter", folder, "--text", "[S1] bada", "--wav", tmp_path / "a.wav"]
        monkeypatch.setattr("sys.argv", list(map(str, words)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            dia_speak.main()
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and sentence in said and "(SHA-256 111111111111)" in said


@pytest.mark.long
def test_speaking_through_a_pth_codec(adapter, tmp_path):
    """descript-audio-codec's own format, by --codec and as the recorded codec."""
    from dac import DAC

    sizes = {"encoder_dim": 4, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 32, "decoder_rates": [8, 8, 4, 2]}
    sizes |= {"n_codebooks": 9, "codebook_size": 1024, "codebook_dim": 4, "sample_rate": 44100}
    file = tmp_path / "weights.pth"
    torch.save({"state_dict": DAC(**sizes).state_dict(), "metadata": {"kwargs": sizes}}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    known = with_codec(adapter, tmp_path / "known", place=str(file), sha256=digest)
    for number, words in enumerate((["--adapter", adapter, "--codec", file], ["--adapter", known])):
        wav = tmp_path / f"{number}.wav"
        done = speak_script(*words, "--text", "[S1] bada gumi", "--seconds", "0.5", "--wav", wav)
        assert done.returncode == 0, done.stderr
        audio, rate = soundfile.read(wav)
        assert rate == 44100 and 0 < len(audio) <= 0.5 * 44100 and len(audio) % 512 == 0
    assert (tmp_path / "0.wav").read_bytes() == (tmp_path / "1.wav").read_bytes()


@pytest.mark.long
def test_a_long_text_is_spoken_in_parts_with_the_voice_of_a_recording(adapter, demo, tmp_path):
    """Two channels at 22.05 kHz in another container, as people have them."""
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, (22050, 2))
    soundfile.write(tmp_path / "voice.flac", noise, 22050)
    (tmp_path / "text.txt").write_text("Bada gumi lono sike.\n" * 20)
    words = ["--adapter", adapter, "--codec", demo / "codec", "--text-file", tmp_path / "text.txt", "--seconds", "0.3"]
    voice = ["--voice", tmp_path / "voice.flac", "--voice-text", "Lono bada."]
    done = speak_script(*words, *voice, "--wav", tmp_path / "a.wav")
    assert done.returncode == 0, done.stderr
    parts = [float(seconds) for seconds in re.findall(r"^part \d of 2: ([\d.]+) s", done.stdout, re.M)]
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert len(parts) == 2 and max(parts) <= 0.3 and len(audio) / rate == pytest.approx(sum(parts) + 0.2, abs=0.02)
    pause = audio[round(parts[0] * rate) + 500 :][: int(0.15 * rate)]
    assert not pause.any() and audio.any()
    assert "does not exist" in speak_script(*words, "--voice", "no.wav", "--voice-text", "a", "--wav", "x.wav").stderr


@pytest.mark.long
def test_merged_folder_loads_alone_and_equals_base_plus_adapter(adapter, demo, tmp_path):
    from transformers import DiaForConditionalGeneration, DiaTokenizer

    done = speak_script("--adapter", adapter, "--merge", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    merged = DiaForConditionalGeneration.from_pretrained(str(tmp_path / "merged"), local_files_only=True).eval()
    base = load_dia(str(demo / "dia"), torch.float32)
    tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout_of(base.config), dia_lora.Config(), {}, False)
    batch = clips.batch([0, 1])
    expected, found = (labelled_states(model, batch)[0] for model in (tuned, merged))
    assert torch.allclose(expected, found, atol=1e-4) and float(expected.abs().max()) > 0.1
    assert DiaTokenizer.from_pretrained(str(tmp_path / "merged"))("[S1] a").input_ids == [1, 32, 97]
    assert "exists already" in speak_script("--adapter", adapter, "--merge", tmp_path / "merged").stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--text", "hello"], "give --text and --wav"),
        (["--text", "hello", "--wav", "x.wav", "--temperature", "0.5"], "--temperature: 0.5 is out of range"),
        (["--text", "hello", "--wav", "x.wav", "--voice", "x.wav"], "--voice and --voice-text go together"),
        pytest.param(["--text", "x" * 2000, "--wav", "x.wav"], "--text has 2002 bytes", marks=pytest.mark.long),
    ],
)
def test_mistakes_in_speaking_are_one_sentence(adapter, words, sentence):
    done = speak_script("--adapter", adapter, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert sentence in done.stderr
