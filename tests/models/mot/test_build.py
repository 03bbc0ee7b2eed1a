"""models/mot/build.py: what is copied from MusicGen is MusicGen's, all of it, and stays ours."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from common import lora
from common.errors import UserError
from helpers.mot_support import batch_of, build, loss_of, quantised_llama
from models.mot.build import (
    PARTS,
    Donor,
    calibrate,
    choose_parts,
    expert_of,
    is_copied,
    layer_map,
    load_llama,
)


@pytest.fixture(scope="module")
def musicgen(demo_mot):
    from transformers import MusicgenForConditionalGeneration

    return MusicgenForConditionalGeneration.from_pretrained(str(demo_mot / "musicgen")).eval()


def tiny_llama(layers=4, hidden=64):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
    config = LlamaConfig(hidden_size=hidden, intermediate_size=96, num_hidden_layers=layers, **sizes)
    return LlamaForCausalLM(config).requires_grad_(False)


def tiny_donor(folder, layers, width=48, ffn=192, prefix="decoder.model.decoder.", **changes):
    """A MusicGen checkpoint with only the tensors that are read."""
    torch.manual_seed(1)
    shapes = {"fc1.weight": (ffn, width), "fc2.weight": (width, ffn)}
    shapes |= {"final_layer_norm.weight": (width,), "final_layer_norm.bias": (width,)}
    weights = {f"{prefix}layers.{i}.{n}": torch.randn(s) for i in range(layers) for n, s in shapes.items()}
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del weights[prefix + name]
        else:
            weights[prefix + name] = value
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    decoder = {"hidden_size": width, "ffn_dim": ffn, "num_hidden_layers": layers, "activation_function": "gelu"}
    (folder / "config.json").write_text(json.dumps({"model_type": "musicgen", "decoder": decoder}))
    return folder


# ---- the transplant ------------------------------------------------------------------------------------------------


def test_an_expert_is_musicgens_block_between_projections(demo_mot, musicgen, capsys):
    model = build(demo_mot)
    assert "copied 16/16 tensors into 4 music experts" in capsys.readouterr().out
    blocks = musicgen.decoder.model.decoder.layers
    x = torch.randn(9, 64)
    for i, source in enumerate((0, 2, 3, 5)):
        own, block = model.layers[i].ffn, blocks[source]
        with torch.no_grad():
            expected = block.fc2(F.gelu(block.fc1(block.final_layer_norm(x @ own.proj_in.weight.T))))
            expected = expected @ own.proj_out.weight.T
            assert torch.allclose(own(x), expected, atol=1e-6)
            assert not torch.allclose(own(x), expected * 1.01, atol=1e-6)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias") and "norm" not in name]


def test_projections_are_orthonormal_and_keep_the_loudness(demo_mot):
    own = build(demo_mot).layers[0].ffn
    inward, outward = own.proj_in.weight, own.proj_out.weight
    assert torch.allclose(inward @ inward.T, torch.eye(48), atol=1e-5)
    assert torch.allclose(outward.T @ outward, torch.eye(48) * 64 / 48, atol=1e-5)
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    rms = lambda t: float(t.detach().pow(2).mean().sqrt())  # noqa: E731
    assert rms(x @ inward.T) == pytest.approx(1, rel=0.02)
    assert rms(torch.randn(4000, 48) @ outward.T) == pytest.approx(1, rel=0.02)


def test_equal_widths_need_no_projections(tmp_path):
    model = build(None, llama=tiny_llama(hidden=48 + 16), donor=Donor(str(tiny_donor(tmp_path / "m", 3, width=64))))
    assert model.layers[0].ffn.proj_in is None and model.layers[0].ffn.proj_out is None
    assert not [name for name in model.adapter() if "proj_in" in name]


@pytest.mark.parametrize("untie", ["ffn", "all"])
def test_experts_from_llama_change_nothing_at_first(demo_mot, untie):
    model = build(demo_mot, kind="llama", untie=untie)
    x = torch.randn(9, 64)
    for own, layer in zip(model.layers, model.llama.model.layers, strict=True):
        assert torch.equal(own.ffn(x), layer.mlp(x))
        if untie == "all":
            assert torch.equal(own.input_norm(x), layer.input_layernorm(x))
            assert torch.equal(own.post_norm(x), layer.post_attention_layernorm(x))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                assert torch.equal(getattr(own.attn, name)(x), getattr(layer.self_attn, name)(x))


@pytest.mark.parametrize(("layers", "donor", "first"), [(16, 24, [0, 2, 3, 5]), (16, 48, [1, 4, 7, 10])])
def test_layer_map_of_the_published_pairs(layers, donor, first):
    assert layer_map(layers, donor)[:4] == tuple(first)


def test_a_deeper_llama_has_no_random_expert(tmp_path):
    """32 layers from 24."""
    folder = tiny_donor(tmp_path / "m", 24)
    model = build(None, llama=tiny_llama(layers=32), donor=Donor(str(folder)))
    source = load_file(folder / "model.safetensors")
    used = []
    for own in model.layers:
        same = [
            i
            for i in range(24)
            if torch.equal(source[f"decoder.model.decoder.layers.{i}.fc1.weight"], own.ffn.fc1.weight)
        ]
        assert len(same) == 1
        # The demo's norm has weights of 1, as every new one has: only these random ones show that they are copied.
        own_tensors = {"fc2.weight": own.ffn.fc2.weight, "final_layer_norm.weight": own.ffn.norm.weight}
        own_tensors["final_layer_norm.bias"] = own.ffn.norm.bias
        for name, value in own_tensors.items():
            assert torch.equal(source[f"decoder.model.decoder.layers.{same[0]}.{name}"], value), name
        used += same
    assert used == sorted(used) and set(used) == set(range(24)) and tuple(used) == model.expert.layer_map


def test_copies_are_leaves_of_our_own(tmp_path):
    folder = tiny_donor(tmp_path / "m", 3)
    donor = Donor(str(folder))
    llama = tiny_llama()
    model = build(None, llama=llama, donor=donor, untie="all")
    choose_parts(model, ["all"])
    assert all(p.is_leaf and p.grad_fn is None and p.requires_grad for p in model.adapter().values())
    before = {name: p.detach().clone() for name, p in model.adapter().items()}
    with torch.no_grad():
        for parameter in llama.model.layers.parameters():
            parameter.add_(1.0)
    shutil.rmtree(folder)
    assert all(torch.equal(before[name], p) for name, p in model.adapter().items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers__2__fc2__weight": None}, "lacks the tensor decoder.model.decoder.layers.2.fc2.weight"),
        ({"layers__0__fc1__bias": torch.zeros(192)}, "has a fc1.bias"),
        ({"layers__1__fc1__weight": torch.zeros(192, 47)}, "has shape (192, 47), not (192, 48)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, changes, sentence):
    donor = Donor(str(tiny_donor(tmp_path / "m", 3, **changes)))
    with pytest.raises(UserError) as error:
        build(None, llama=tiny_llama(), donor=donor)
    assert sentence in str(error.value)


def test_a_decoder_alone_and_shards_are_read_too(tmp_path):
    """MusicgenForCausalLM's names, spread over two files."""
    folder = tiny_donor(tmp_path / "m", 3, prefix="model.decoder.")
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors").unlink()
    donor = Donor(str(folder))
    assert all(len(donor.block(i)) == 4 for i in range(3))


def test_something_else_is_no_musicgen(demo_mot, tmp_path):
    with pytest.raises(UserError, match="'llama' model, not 'musicgen'"):
        Donor(str(demo_mot / "llama"))
    with pytest.raises(UserError, match="no readable config.json"):
        Donor(str(tmp_path))
    with pytest.raises(UserError, match="name one with --musicgen"):
        expert_of("musicgen", tiny_llama().config, None)


# ---- a Llama in 4 or 8 bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantised_llama_is_the_plain_one_for_text_and_its_experts_are_whole(demo_mot, bits):
    """Text logits are bit for bit those of transformers and bitsandbytes; experts hold what the packed weights mean."""
    quantization = lora.quantization_config(bits, torch.float32, keep=["lm_head"])
    llama = load_llama(str(demo_mot / "llama"), torch.float32, quantization=quantization)
    model = build(demo_mot, kind="llama", untie="all", llama=llama)
    assert {p.dtype for p in model.adapter().values()} == {torch.float32}
    packed = {name: p.clone() for name, p in llama.named_parameters() if not p.is_floating_point()}
    assert len(packed) == 4 * 7
    plain, ids = quantised_llama(demo_mot, bits), torch.tensor([[1, 7, 90, 12, 44]])
    with torch.no_grad():
        assert torch.equal(model.text_logits(ids), plain(ids).logits)
    whole = quantised_llama(demo_mot, bits).dequantize()  # plain Linear layers with the values of the packed weights
    for own, layer in zip(model.layers, whole.model.layers, strict=True):
        for name, value in own.ffn.named_parameters():
            assert torch.allclose(value, layer.mlp.get_parameter(name), atol=1e-6), name
        assert torch.allclose(own.attn.q_proj.weight, layer.self_attn.q_proj.weight, atol=1e-6)
    # Loss and gradients are those of the model on the whole weights; 8 bits also round the activations.
    batch, close = batch_of(model, [5, 3]), {"4bit": 1e-5, "8bit": 0.05}[bits]
    results = []
    for each in (model, build(demo_mot, kind="llama", untie="all", llama=whole.requires_grad_(False))):
        loss = loss_of(each, batch)[0]
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in each.adapter().items()}))
    (loss, grads), (expected, expected_grads) = results
    assert float(loss) == pytest.approx(float(expected), rel=close)
    for name, value in expected_grads.items():
        assert float((grads[name] - value).norm()) <= 2 * close * float(value.norm()), name
    assert all(torch.equal(p, packed[name]) for name, p in llama.named_parameters() if name in packed)


# ---- gains and parts -----------------------------------------------------------------------------------------------


def test_calibrated_experts_are_as_loud_as_the_blocks_they_replace(demo_mot):
    model = build(demo_mot)
    batch = batch_of(model, [40])
    calibrate(model, batch)
    seen = {}
    for i, own in enumerate(model.layers):
        own.ffn.register_forward_hook(lambda _, inputs, out, i=i: seen.update({i: (inputs[0], out)}))
    with torch.no_grad():
        model(batch["input_ids"], batch["codebooks"], batch["mask"])
        for i, (x, out) in seen.items():
            wanted = model.llama.model.layers[i].mlp(x).pow(2).mean().sqrt()
            assert float(out.pow(2).mean().sqrt()) == pytest.approx(float(wanted), rel=1e-3)
            assert len(x) == 161


def test_parts_are_trained_alone_and_unknown_ones_refused(demo_mot):
    model = build(demo_mot)
    trained = lambda: {name for name, p in model.named_parameters() if p.requires_grad}  # noqa: E731
    choose_parts(model, ["proj_only"])
    assert {name.split(".")[-2] for name in trained()} == {"proj_in", "proj_out", "head"}
    choose_parts(model, ["embed", "gain"])
    assert len(trained()) == 2 + 4
    choose_parts(model, ["all"])
    assert trained() == set(model.adapter())
    for names, sentence in ((["attn"], "has no part 'attn'"), (["heads"], "choose from"), ([], "is empty")):
        with pytest.raises(UserError, match=sentence):
            choose_parts(model, names)


def test_every_parameter_is_of_exactly_one_part(demo_mot):
    for kind in ("musicgen", "llama"):
        for name in build(demo_mot, kind=kind, untie="all").adapter():
            assert sum(bool(re.fullmatch(pattern, name)) for pattern in PARTS.values()) == 1, name
    assert is_copied("layers.3.ffn.fc1.weight") and not is_copied("layers.3.ffn.gain")
