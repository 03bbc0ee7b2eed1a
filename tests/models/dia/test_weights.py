"""Dia as files: stereo widening, the native format, averages, folders that load elsewhere."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import DiaForConditionalGeneration

import dia_lora
from common import lora
from common.errors import UserError
from helpers import support
from helpers.dia_support import native_of
from models.dia import weights as dia_weights
from models.dia.weights import load_dia

ONE_PROCESS = {"zero_optimization": {"stage": 0}}


@pytest.fixture(scope="module")
def mono(demo):
    return str(demo / "dia")


def forward(model, codes):
    text = torch.tensor([[1, 32, 97, 98]])
    with torch.no_grad():
        return model(input_ids=text, decoder_input_ids=codes, use_cache=False).logits


def by_channel(logits, channels):
    """(B * C, L, V) -> (B, C, L, V)"""
    return logits.view(-1, channels, *logits.shape[-2:])


# ---- stereo ----------------------------------------------------------------------------------------------------


def test_stereo_with_equal_halves_is_the_mono_model(mono):
    codes = torch.randint(0, 1028, (2, 7, 9), generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        before = by_channel(forward(load_dia(mono, torch.float32).to(dtype), codes), 9)
        wide = load_dia(mono, torch.float32)
        dia_weights.widen(wide, ONE_PROCESS)
        after = by_channel(forward(wide.to(dtype), torch.cat([codes, codes], dim=-1)), 18)
        assert before.std() > 0.1
        for half in (after[:, :9], after[:, 9:]):
            assert float((half - before).abs().max() / before.abs().max()) <= tolerance


def test_the_right_half_is_heard(mono):
    wide = load_dia(mono, torch.float32)
    dia_weights.widen(wide, ONE_PROCESS)
    codes = torch.zeros(1, 5, 18, dtype=torch.long)
    other = codes.clone()
    other[0, 2, 12] = 5
    assert float((forward(wide, other) - forward(wide, codes)).abs().max()) > 1e-3


@pytest.mark.parametrize(("channels", "wider"), [(0, False), (9, False), (18, True)])
def test_channels_that_fit(mono, channels, wider):
    assert dia_weights.needs_widening(mono, channels) is wider


@pytest.mark.parametrize("channels", [1, 12, 27, 36])
def test_channels_that_fit_neither_are_refused(mono, channels):
    with pytest.raises(UserError, match=rf"--channels {channels}: .* has 9 channels"):
        dia_weights.needs_widening(mono, channels)


def test_a_stereo_checkpoint_loads_as_it_is(mono, tmp_path):
    convert("stereo", mono, tmp_path / "wide")
    wide = DiaForConditionalGeneration.from_pretrained(tmp_path / "wide")
    assert (
        wide.config.decoder_config.num_channels == 18 and wide.config.delay_pattern[:9] == wide.config.delay_pattern[9:]
    )
    assert dia_weights.needs_widening(str(tmp_path / "wide"), 18) is False
    expected = load_dia(mono, torch.float32)
    dia_weights.widen(expected, ONE_PROCESS)
    assert_same(wide.state_dict(), expected.state_dict())


def convert(*words) -> str:
    done = support.run_script("infer/dia_convert.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- native ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", pytest.param(".safetensors", marks=pytest.mark.long)])
def test_native_import_equals_the_hugging_face_weights(mono, tmp_path, suffix):
    model = load_dia(mono, torch.float32)
    native = native_of(model)
    file = tmp_path / f"dia{suffix}"
    if suffix == ".pth":
        torch.save(native, file)
    else:
        from safetensors.torch import save_file

        save_file(native, file)
    convert("native", file, tmp_path / "out")
    imported = DiaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert_same(imported.state_dict(), model.state_dict())
    for part in ("encoder_config", "decoder_config"):
        found, expected = (getattr(m.config, part).to_dict() for m in (imported, model))
        ignored = {"initializer_range", "dtype"}
        assert {k: v for k, v in found.items() if k not in ignored} == {
            k: v for k, v in expected.items() if k not in ignored
        }
    processor = json.loads((tmp_path / "out" / "processor_config.json").read_text())
    assert processor["feature_extractor"]["sampling_rate"] == 44100
    assert imported.generation_config.guidance_scale == 3.0


def test_native_kernels_compute_what_the_imported_matrices_do(mono):
    """Not a matter of names: a contraction over the kernel's input dimensions is the linear layer."""
    model = load_dia(mono, torch.float32)
    native = native_of(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights = dia_weights.native_weights(native, shapes)
    x = torch.randn(3, 64)
    kernel = native["decoder.layers.0.mlp.wi_fused.weight"]
    gate, up = torch.einsum("bi,iok->bok", x, kernel).unbind(1)
    assert torch.allclose(
        torch.cat([gate, up], -1), x @ weights["model.decoder.layers.0.mlp.gate_up_proj.weight"].T, atol=1e-5
    )
    heads = torch.randn(3, 4, 16)
    kernel = native["decoder.layers.1.self_attention.o_proj.weight"]
    out = torch.einsum("bhk,hko->bo", heads, kernel)
    assert torch.allclose(
        out, heads.flatten(1) @ weights["model.decoder.layers.1.self_attention.o_proj.weight"].T, atol=1e-5
    )


def test_a_native_checkpoint_with_a_missing_or_odd_weight_is_refused(mono):
    model = load_dia(mono, torch.float32)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    native = native_of(model)
    lacking = {name: value for name, value in native.items() if name != "decoder.norm.weight"}
    with pytest.raises(UserError, match="model.decoder.norm.weight"):
        dia_weights.native_weights(lacking, shapes)
    with pytest.raises(UserError, match="model.decoder.extra.weight"):
        dia_weights.native_weights(native | {"decoder.extra.weight": torch.zeros(2)}, shapes)


class Payload:
    def __reduce__(self):
        return (pytest.fail, ("the pickle ran",))


def test_a_native_file_never_runs_code(tmp_path):
    torch.save({"decoder.embeddings.0.weight": Payload()}, tmp_path / "evil.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Payload()))
    for name in ("evil.pth", "raw.pth", "absent.pth"):
        with pytest.raises(UserError, match=name):
            dia_weights.read_native(tmp_path / name)


def test_other_weights_are_no_native_dia(tmp_path):
    torch.save({"a.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="not a native Dia checkpoint"):
        dia_weights.read_native(tmp_path / "other.pth")


# ---- folders ---------------------------------------------------------------------------------------------------


def test_a_folder_in_many_shards_loads_with_transformers_and_speaks_with_the_processor(mono, tmp_path, monkeypatch):
    monkeypatch.setattr(dia_weights, "SHARD", "1MB")
    model = load_dia(mono, torch.float32)
    dia_weights.write_model(tmp_path / "out", model, model.state_dict(), mono, {"[de]": 4}, {"text_mode": "speech"})
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same(DiaForConditionalGeneration.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())
    assert json.loads((tmp_path / "out" / "tag_map.json").read_text()) == {"[de]": 4}
    from transformers import DiaProcessor, GenerationConfig

    processor = DiaProcessor.from_pretrained(tmp_path / "out")
    assert np.array_equal(processor.tokenizer("[S1] a")["input_ids"], [1, 32, 97])
    assert GenerationConfig.from_pretrained(tmp_path / "out").to_diff_dict() == model.generation_config.to_diff_dict()


@pytest.mark.long
def test_the_average_of_folders_is_their_mean(mono, tmp_path):
    models = [load_dia(mono, torch.float32) for _ in range(3)]
    for i, model in enumerate(models):
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        dia_weights.write_model(tmp_path / str(i), model, model.state_dict(), mono, {}, {"text_mode": "tags"})
    convert("average", tmp_path / "mean", *(tmp_path / str(i) for i in range(3)))
    mean = DiaForConditionalGeneration.from_pretrained(tmp_path / "mean").state_dict()
    for name, value in mean.items():
        expected = sum(model.state_dict()[name] for model in models) / 3
        assert torch.allclose(value, expected, atol=1e-6), name
    facts = json.loads((tmp_path / "mean" / "training_config.json").read_text())
    assert facts["text_mode"] == "tags" and facts["recipe"] == "dia_full", "what speaking needs to know"


def test_what_cannot_be_averaged_is_refused(mono, tmp_path):
    model = load_dia(mono, torch.float32)
    dia_weights.widen(model, ONE_PROCESS)
    dia_weights.write_model(tmp_path / "wide", model, model.state_dict(), mono, {}, {})
    with pytest.raises(UserError, match="cannot be averaged"):
        dia_weights.average([tmp_path / "wide", Path(mono)], tmp_path / "out")
    with pytest.raises(UserError, match="neither a model folder"):
        dia_weights.average([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- stereo with LoRA ------------------------------------------------------------------------------------------------


def test_a_stereo_adapter_loads_with_plain_peft_onto_the_widened_base(mono, tmp_path):
    config = dia_lora.Config(model=mono, precision="fp32", channels=18)
    model = dia_lora.build_model(config, ONE_PROCESS, {}).eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(name for name in trained if "lora_" not in name) == [
        "base_model.model.logits_dense.weight",
        "base_model.model.model.decoder.embeddings.embed.weight",
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    lora.write_adapter(model, {name: p.detach() for name, p in trained.items()}, tmp_path / "export", mono, {})
    base = load_dia(mono, torch.float32)
    dia_weights.widen(base, ONE_PROCESS)
    codes = torch.randint(0, 1024, (1, 5, 18), generator=generator)
    expected, untouched = forward(model, codes), forward(base, codes)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "export")).eval()
    assert torch.equal(forward(loaded, codes), expected)
    assert torch.allclose(forward(loaded.merge_and_unload(), codes), expected, atol=1e-4)
    assert (untouched - expected).abs().max() > 0.1
    with pytest.raises(UserError, match="head is trained whole"):
        dia_lora.build_model(replace(config, lora_groups=["attn", "head"]), ONE_PROCESS, {})
    with pytest.raises(UserError, match="it takes 9, or 18 for stereo"):
        dia_lora.build_model(replace(config, channels=12), ONE_PROCESS, {})
