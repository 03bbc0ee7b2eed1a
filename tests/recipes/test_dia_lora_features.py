"""What the flags of the Dia LoRA recipe do, each shown on a short run of one rank in this process."""

import json
import subprocess

import numpy as np
import pytest
import soundfile
import torch
from peft import PeftModel
from safetensors.torch import load_file

import dia_lora
from common import checkpoint, engine
from common.config import UserError, parse_args
from common.ds_config import resolve_ds
from common.plan import Plan
from common.runtime import init_process
from common.tokens import TokenDataset
from helpers import support
from helpers.dia_support import SMALL
from models.dia.data import Clips
from models.dia.layout import labelled_states, layout_of
from models.dia.weights import load_dia


@pytest.fixture(scope="module")
def ranks():
    return init_process()


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
    assert facts["recipe"] == "dia_lora" and facts["checkpoint"] == {"step": 2, "score": 1.0}
    exported = load_file(run / "export" / "adapter_model.safetensors")
    best, last = (
        {name.replace(".default", ""): value for name, value in checkpoint.masters(run / "checkpoints" / step).items()}
        for step in ("step-00000002", "step-00000004")
    )
    assert set(exported) == set(best)
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert not all(torch.equal(exported[name], last[name]) for name in last)


def test_without_a_score_the_export_is_the_last_checkpoint(trained):
    _, run = trained(eval_every=1)
    facts = json.loads((run / "export" / "training_config.json").read_text())
    assert facts["checkpoint"] == {"step": 3, "score": None}


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


def test_ranks_a_group_and_the_trainable_count(trained):
    ds_engine, run = trained(lora_groups=["dec_cross", "dec_mlp"], lora_rank=4, group_ranks=["dec_cross=8"])
    weights = load_file(run / "export" / "adapter_model.safetensors")
    ranks = {("cross" in name): value.shape[0] for name, value in weights.items() if name.endswith("lora_A.weight")}
    assert ranks == {True: 8, False: 4}
    layers = dict(ds_engine.module.model.get_base_model().named_modules())
    expected = sum(
        (8 if "cross" in name else 4) * (module.in_features + module.out_features)
        for name, module in layers.items()
        if hasattr(module, "lora_A")
    )
    assert sum(p.numel() for p in engine.trainable(ds_engine).values()) == expected > 0


@pytest.mark.parametrize("variant", ["rslora", "dora"])
def test_lora_variants_train_and_reload(trained, demo, variant):
    ds_engine, run = trained(**{variant: True})
    base = load_dia(str(demo / "dia"), torch.float32)
    loaded = PeftModel.from_pretrained(base, str(run / "export")).eval()
    assert getattr(loaded.peft_config["default"], f"use_{variant}")
    clips = Clips(TokenDataset(str(demo / "tokens/eval")), layout_of(base.config), dia_lora.Config(), {}, False)
    batch = clips.batch([0])
    states = [labelled_states(model, batch)[0] for model in (ds_engine.module.model.eval(), loaded)]
    assert torch.allclose(*states, atol=1e-6)


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


def test_samples_are_spoken_decoded_and_reported(trained, demo):
    _, run = trained(eval_data=str(demo / "tokens/eval"), samples=2, sample_every=2, sample_frames=30)
    for step in ("step-00000002", "step-00000003", "recorded"):
        files = sorted((run / "samples" / step).glob("*.npy"))
        assert len(files) == 2
        for file in files:
            codes = np.load(file, allow_pickle=False)
            if len(codes):
                audio, rate = soundfile.read(file.with_suffix(".wav"))
                assert rate == 44100 and len(audio) == len(codes) * 512
                assert file.with_suffix(".png").stat().st_size > 1000
    facts = json.loads((run / "samples" / "step-00000003" / "clip-0000.json").read_text())
    assert facts["text"] == TokenDataset(str(demo / "tokens/eval")).text(0)
    assert {"seconds", "seconds_per_byte", "ended_by_eos", "repeats"} <= set(facts)
    recorded = json.loads((run / "samples" / "recorded" / "clip-0000.json").read_text())
    audio, _ = soundfile.read(run / "samples" / "recorded" / "clip-0000.wav")
    assert recorded["clipped"] == pytest.approx((np.abs(audio) >= 0.999).mean(), abs=0.02)
    assert 0 <= recorded["silent"] <= 1
    page = (run / "report.html").read_text()
    assert page.count("<audio") >= 2 and "http" not in page.split("<h2>Configuration")[0]


def test_dry_run_prints_the_plan_and_writes_nothing(trained, capsys):
    _, run = trained(dry_run=True)
    printed = capsys.readouterr().out
    for part in ("parameters", "trained", "padding", "ZeRO-2 on 1 ranks", "longest micro-batch", "measured peak"):
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


def speak_script(*arguments) -> subprocess.CompletedProcess:
    command = [support.PYTHON, support.ROOT / "finetune" / "infer" / "dia_speak.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=support.environment(), check=False)


@pytest.mark.long
def test_speaking_a_text_writes_sound(adapter, demo, tmp_path):
    words = ["--adapter", adapter, "--codec", demo / "codec", "--text", "[S1] bada gumi", "--seconds", "0.5"]
    done = speak_script(*words, "--wav", tmp_path / "a.wav")
    assert done.returncode == 0, done.stderr
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 44100 and 0 < len(audio) <= 0.5 * 44100 and np.abs(audio).max() > 0
    again = speak_script(*words, "--wav", tmp_path / "b.wav")
    assert again.returncode == 0 and (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


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
        (["--text", "hello", "--wav", "x.wav", "--temperature", "0.5"], "--temperature 0.5"),
        (["--text", "x" * 2000, "--wav", "x.wav"], "--text has 2002 bytes"),
    ],
)
def test_mistakes_in_speaking_are_one_sentence(adapter, words, sentence):
    done = speak_script("--adapter", adapter, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert sentence in done.stderr
