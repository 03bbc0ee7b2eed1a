"""models/mot/weights.py and mot_generate.py: the result, reloaded, refused where it does not fit, and used."""

import json
import shutil

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from helpers.mot_support import batch_of, build, loss_of
from models.mot.build import calibrate, load_llama
from models.mot.weights import base_fingerprint, describe, load_adapter, write_adapter

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
    model = build(demo_mot, untie="all")
    calibrate(model, batch_of(model, [9]))
    return model, save(model, tmp_path_factory.mktemp("adapter") / "export", demo_mot)


@pytest.mark.parametrize("kind", ["musicgen", "llama"])
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


def test_mistakes_are_one_sentence_and_write_no_sound(command, exported, demo_mot, tmp_path):
    np.save(tmp_path / "bad.npy", np.full((3, 4), 2048))
    without = save(exported[0], tmp_path / "undropped", demo_mot, dropout=0.0)
    play = ["--caption", "x", "--wav", tmp_path / "x.wav", "--seconds", "0.1"]
    for words, sentence in (
        (["--adapter", exported[1], "--caption", "x", "--wav", tmp_path / "no" / "x.wav"], "no does not exist"),
        (["--adapter", exported[1], *play, "--continue", tmp_path / "bad.npy"], "code 2048 is outside 0..2047"),
        (["--adapter", without, *play], "never saw music without a caption"),
        (["--adapter", exported[1], *play, "--codec", demo_mot / "llama"], "could not decode"),
    ):
        code, err = command(*words)
        assert code == 2 and "Traceback" not in err and sentence in err, err
        assert not (tmp_path / "x.wav").exists()
