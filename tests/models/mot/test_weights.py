"""models/mot/weights.py and mot_generate.py: the result, reloaded, refused where it does not fit, and used."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import llama_mot
from common.errors import UserError
from helpers.mot_support import DS, SMALL, assets, batch_of, build, loss_of
from models.mot.build import calibrate, legacy_layer_map, load_llama
from models.mot.weights import base_fingerprint, describe, fill_legacy, load_adapter, merge_tables, write_adapter

TOKENS = {"codec": "encodec", "weights_sha256": None, "sample_rate": 32000, "hop": 640}


def save(model, folder, demo, dropout=0.1):
    weights = {name: p.detach().clone() for name, p in model.adapter().items()}
    facts = TOKENS | {"weights": str(demo / "codec")}
    mark = base_fingerprint(model.llama)
    training = {"text_dropout": dropout}
    description = describe(model, str(demo / "llama"), mark, facts, training)
    write_adapter(folder, weights, description)
    return folder


@pytest.fixture(scope="module")
def exported(demo_mot, tmp_path_factory):
    model = build(demo_mot, untie="all", gain="channel")
    calibrate(model, batch_of(model, [9]), zero=False)
    return model, save(model, tmp_path_factory.mktemp("adapter") / "export", demo_mot)


@pytest.mark.parametrize("kind", ["musicgen", "musicgen_absorbed", "llama", "random"])
def test_every_kind_of_expert_reloads_into_a_fresh_llama(demo_mot, tmp_path, kind):
    model = build(demo_mot, kind, untie="ffn+norm").eval()
    folder = save(model, tmp_path / "export", demo_mot)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "codec.json"
    ]  # fmt: skip
    loaded, _ = load_adapter(folder, None, torch.float32)
    batch = batch_of(model, [6, 3])
    with torch.no_grad():
        assert torch.equal(loss_of(model, batch)[1], loss_of(loaded, batch)[1])
    assert not any(name.startswith("llama.") for name in load_file(folder / "adapter_model.safetensors"))


def test_reload_in_bf16_keeps_the_rotary_frequencies(exported):
    model, folder = exported
    loaded, _ = load_adapter(folder, None, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in loaded.parameters())
    assert loaded.llama.model.rotary_emb.inv_freq.dtype == torch.float32
    batch = batch_of(model, [30])
    with torch.no_grad():
        before, after = (loss_of(m, batch)[1][0].sum() for m in (model, loaded))
    assert float(after) == pytest.approx(float(before), rel=2e-3)


def test_fingerprint_tells_llamas_apart_but_not_their_precision(exported, demo_mot, tmp_path):
    model, folder = exported
    mark = base_fingerprint(model.llama)
    assert base_fingerprint(load_llama(str(demo_mot / "llama"), torch.bfloat16)) == mark
    other = tmp_path / "llama"
    shutil.copytree(demo_mot / "llama", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not the Llama that .* was trained on"):
        load_adapter(folder, str(other), torch.float32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("audio_embed.weight"), "1 tensors differ by name, such as audio_embed.weight"),
        (lambda w: w.update({"more": torch.zeros(1)}), "1 tensors differ by name, such as more"),
        (lambda w: w.update({"head.weight": torch.zeros(5, 64)}), r"head.weight has shape \(5, 64\)"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(exported, tmp_path, change, sentence):
    folder = tmp_path / "export"
    shutil.copytree(exported[1], folder)
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=sentence):
        load_adapter(folder, None, torch.float32)


def test_weights_that_are_not_finite_are_not_exported(demo_mot, tmp_path):
    model = build(demo_mot)
    with torch.no_grad():
        model.head.weight[3, 3] = float("nan")
    with pytest.raises(UserError, match="head.weight is not finite"):
        save(model, tmp_path / "export", demo_mot)
    assert not (tmp_path / "export").exists()


def test_something_else_is_no_adapter(tmp_path):
    with pytest.raises(UserError, match="no readable adapter_config.json"):
        load_adapter(tmp_path, None, torch.float32)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"kind": "lora", "format": 1}))
    with pytest.raises(UserError, match="another kind or format"):
        load_adapter(tmp_path, None, torch.float32)


# ---- checkpoints of the first trainer ------------------------------------------------------------------------------


PROJECTIONS = ("down_proj", "up_proj")


def legacy_file(folder, **more):
    draw = torch.Generator().manual_seed(5)
    state = {"output.weight": torch.randn(256 + 2048, 64, generator=draw)}
    for i in range(4):
        where = f"layers.{i}.feed_forward.local_experts.1."
        state[where + "down_proj.weight"] = torch.randn(48, 64, generator=draw)
        state[where + "up_proj.weight"] = torch.randn(64, 48, generator=draw)
    torch.save({"step": 9, "adapter_state_dict": state | more, "optimizer_state_dict": {}}, folder / "old.pt")
    return folder / "old.pt", state


def test_legacy_checkpoint_fills_projections_and_code_rows(demo_mot, tmp_path, capsys):
    model = build(demo_mot, ids="shared")
    before = {name: p.detach().clone() for name, p in model.adapter().items()}
    file, state = legacy_file(tmp_path)
    fill_legacy(model, file)
    printed = capsys.readouterr().out
    assert "loaded all 9 tensors" in printed and "no code embeddings" in printed
    assert torch.equal(model.head.weight[:2048], state["output.weight"][-2048:])
    assert torch.equal(model.head.weight[2048:], before["head.weight"][2048:])
    for i, own in enumerate(model.layers):
        where = f"layers.{i}.feed_forward.local_experts.1."
        assert torch.equal(own.ffn.proj_in.weight, state[where + "down_proj.weight"])
        assert torch.equal(own.ffn.proj_out.weight, state[where + "up_proj.weight"])
        assert torch.equal(own.ffn.fc1.weight, before[f"layers.{i}.ffn.fc1.weight"])


def test_legacy_projections_meet_the_experts_they_were_trained_with(demo_mot, tmp_path):
    """Llama layer i with MusicGen's layer i, and gains that fit the loaded projections."""
    from transformers import MusicgenForConditionalGeneration

    file, state = legacy_file(tmp_path)
    legacy = {"adapter": str(file), "ids": "shared", "profile": "legacy", "untie": "ffn", "deepspeed": False}
    config = llama_mot.Config(**{**SMALL, **assets(demo_mot), **legacy})
    model = llama_mot.build_model(config, DS)
    batch = batch_of(model, [9])
    llama_mot.init_adapter(model, config, SimpleNamespace(batch=lambda rows: batch))
    blocks = MusicgenForConditionalGeneration.from_pretrained(str(demo_mot / "musicgen")).decoder.model.decoder.layers
    x, gains = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)), []
    with torch.no_grad():
        for i, (own, block) in enumerate(zip(model.layers, blocks, strict=False)):
            down, up = (state[f"layers.{i}.feed_forward.local_experts.1.{name}.weight"] for name in PROJECTIONS)
            expected = block.fc2(F.gelu(block.fc1(block.final_layer_norm(x @ down.T)))) @ up.T
            assert torch.allclose(own.ffn(x), own.ffn.gain * expected, rtol=1e-4, atol=1e-5)
            gains.append(float(own.ffn.gain))
        calibrate(model, batch, zero=False)
    assert gains == pytest.approx([own.ffn.gain.item() for own in model.layers])
    save(model, tmp_path / "export", demo_mot)
    assert load_adapter(tmp_path / "export", None, torch.float32)[0].expert.layer_map == (0, 1, 2, 3)


def test_legacy_experts_beyond_musicgens_layers_are_named(capsys):
    assert legacy_layer_map(4, 6) == (0, 1, 2, 3) and capsys.readouterr().out == ""
    assert legacy_layer_map(32, 24) == (*range(24), *[23] * 8)
    assert "left the experts of layers 24 to 31 random" in capsys.readouterr().out


def test_legacy_checkpoints_that_do_not_fit_are_refused(demo_mot, tmp_path):
    shared = build(demo_mot, ids="shared")
    file, _ = legacy_file(tmp_path)
    with pytest.raises(UserError, match="add --ids shared"):
        fill_legacy(build(demo_mot), file)
    with pytest.raises(UserError, match="the experts need projections"):
        fill_legacy(build(demo_mot, "llama", ids="shared"), file)
    with pytest.raises(UserError, match="holds layers.0.attention.wq.weight"):
        fill_legacy(shared, legacy_file(tmp_path, **{"layers.0.attention.wq.weight": torch.zeros(1)})[0])
    with pytest.raises(UserError, match="has shape"):
        fill_legacy(shared, legacy_file(tmp_path, **{"output.weight": torch.zeros(2100, 32)})[0])
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="is not a plain torch checkpoint"):
        fill_legacy(shared, tmp_path / "bad.pt")


# ---- used ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capfd):
    """command(words) -> exit code and what went to stderr, without the seconds that a new Python takes."""
    from infer import mot_generate

    def call(*words) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mot_generate.py", *map(str, words)])
        capfd.readouterr()
        try:
            mot_generate.main()
        except SystemExit as stop:
            return stop.code, capfd.readouterr().err
        return 0, capfd.readouterr().err

    return call


@pytest.mark.long
def test_a_caption_becomes_sound_codes_and_facts(command, exported, tmp_path):
    words = ["--adapter", exported[1], "--caption", "The organ plays.", "--seconds", "0.2", "--min-seconds", "0.2"]
    code, err = command(*words, "--wav", tmp_path / "a.wav")
    assert code == 0, err
    codes = np.load(tmp_path / "a.npy", allow_pickle=False)
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 32000 and codes.shape == (10, 4) and len(audio) == 6400 and np.abs(audio).max() > 0
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["caption"] == "The organ plays." and facts["guidance"] == 3.0 and len(facts["adapter_sha256"]) == 64
    code, err = command(*words, "--continue", tmp_path / "a.npy", "--wav", tmp_path / "b.wav")
    assert code == 0, err
    longer = np.load(tmp_path / "b.npy", allow_pickle=False)
    assert len(longer) == 20 and np.array_equal(longer[:10], codes)


def test_tables_are_merged_into_a_plain_llama(exported, demo_mot, tmp_path):
    from transformers import LlamaForCausalLM

    model, folder = exported
    merge_tables(load_adapter(folder, None, torch.float32)[0], tmp_path / "tables")
    merged = LlamaForCausalLM.from_pretrained(str(tmp_path / "tables")).eval()
    rows = 256 + 4 * 2048 + 2
    assert merged.config.vocab_size % 64 == 0 and merged.config.vocab_size >= rows
    assert torch.equal(merged.model.embed_tokens.weight[256:rows], model.audio_embed.weight)
    assert torch.equal(merged.lm_head.weight[256:rows], model.head.weight)
    ids = torch.arange(5, 50)[None]
    with torch.no_grad():
        plain = load_llama(str(demo_mot / "llama"), torch.float32)(ids).logits
        assert torch.allclose(merged(ids).logits[..., :256], plain, atol=1e-5)
    assert "mot/network.py" in json.loads((tmp_path / "tables" / "mot_tables.json").read_text())["needs"]


def test_mistakes_are_one_sentence_and_write_no_sound(command, exported, demo_mot, tmp_path):
    np.save(tmp_path / "bad.npy", np.full((3, 4), 2048))
    without = save(exported[0], tmp_path / "undropped", demo_mot, dropout=0.0)
    play = ["--caption", "x", "--wav", tmp_path / "x.wav", "--seconds", "0.1"]
    for words, sentence in (
        (["--adapter", exported[1], "--caption", "x"], "give --caption and --wav"),
        (["--adapter", exported[1], "--caption", "x", "--wav", tmp_path / "no" / "x.wav"], "no does not exist"),
        (["--adapter", exported[1], *play, "--continue", tmp_path / "bad.npy"], "code 2048 is outside 0..2047"),
        (["--adapter", without, *play], "never saw music without a caption"),
        (["--adapter", exported[1], *play, "--codec", demo_mot / "llama"], "could not decode"),
    ):
        code, err = command(*words)
        assert code == 2 and "Traceback" not in err and sentence in err, err
        assert not (tmp_path / "x.wav").exists()
