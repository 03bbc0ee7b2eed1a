"""CMGAN's networks against a plain computation from their weights, and under the published names."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from common.errors import UserError
from common.runtime import Process
from models.cmgan import network
from models.cmgan import weights as weights_module
from models.cmgan.network import Discriminator, StepBatchNorm, TSCNet, batch_norm_statistics, update_batch_norm

ONE = Process(0, 1, torch.device("cpu"))


def generator(channels=8, dropout=0.0) -> TSCNet:
    """One whose every weight matters: no norm is the identity."""
    torch.manual_seed(0)
    model = TSCNet(channels, dropout)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.ndim == 1 and value.is_floating_point():
                value.add_(0.1 * torch.randn_like(value)).abs_() if "var" in name else value.add_(
                    0.1 * torch.randn_like(value)
                )
    return model


# ---- the same, straight from the weights -------------------------------------------------------------------------


def conformer(w, x):
    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def feed_forward(name, x):
        x = norm(f"{name}.fn.norm", x)
        x = x @ w[f"{name}.fn.fn.net.0.weight"].T + w[f"{name}.fn.fn.net.0.bias"]
        x = x * torch.sigmoid(x)
        return 0.5 * (x @ w[f"{name}.fn.fn.net.3.weight"].T + w[f"{name}.fn.fn.net.3.bias"])

    def attention(x):
        x = norm("attn.norm", x)
        n, dim = x.shape[1:]
        q = x @ w["attn.fn.to_q.weight"].T
        k, v = (x @ w["attn.fn.to_kv.weight"].T).split(dim, -1)
        out = torch.empty_like(x)
        d = dim // 4
        table = w["attn.fn.rel_pos_emb.weight"]
        for head in range(4):
            part = slice(head * d, head * d + d)
            for i in range(n):
                place = torch.tensor([min(512, max(-512, i - j)) + 512 for j in range(n)])
                logits = (k[:, :, part] + table[place]) @ q[:, i, part].unsqueeze(-1) / d**0.5
                out[:, i, part] = (logits.softmax(1) * v[:, :, part]).sum(1)
        return out @ w["attn.fn.to_out.weight"].T + w["attn.fn.to_out.bias"]

    def convolution(x):
        x = norm("conv.net.0", x).transpose(1, 2)
        x = F.conv1d(x, w["conv.net.2.weight"], w["conv.net.2.bias"])
        half = x.shape[1] // 2
        x = x[:, :half] * torch.sigmoid(x[:, half:])
        x = F.conv1d(F.pad(x, (15, 15)), w["conv.net.4.conv.weight"], w["conv.net.4.conv.bias"], groups=half)
        mean, var = w["conv.net.5.running_mean"], w["conv.net.5.running_var"]
        x = (x - mean[:, None]) / (var[:, None] + 1e-5).sqrt() * w["conv.net.5.weight"][:, None]
        x = x + w["conv.net.5.bias"][:, None]
        x = F.conv1d(x * torch.sigmoid(x), w["conv.net.7.weight"], w["conv.net.7.bias"])
        return x.transpose(1, 2)

    x = x + feed_forward("ff1", x)
    x = x + attention(x)
    x = x + convolution(x)
    x = x + feed_forward("ff2", x)
    return norm("post_norm", x)


def below(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def instance_norm(w, name, x):
    mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def prelu(slope, x):
    return torch.where(x > 0, x, slope[:, None, None] * x)


def dense_block(w, x):
    seen = x
    for i in range(4):
        x = F.conv2d(F.pad(seen, (1, 1, 2**i, 0)), w[f"conv{i + 1}.weight"], w[f"conv{i + 1}.bias"], dilation=(2**i, 1))
        x = prelu(w[f"prelu{i + 1}.weight"], instance_norm(w, f"norm{i + 1}", x))
        seen = torch.cat([x, seen], 1)
    return x


def sub_pixel(w, x):
    y = F.conv2d(F.pad(x, (1, 1)), w["conv.weight"], w["conv.bias"])
    out = torch.empty(y.shape[0], y.shape[1] // 2, y.shape[2], 2 * y.shape[3])
    out[..., 0::2], out[..., 1::2] = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]
    return out


def plain_generator(w, x):
    magnitude, phase = (x[:, :1] ** 2 + x[:, 1:] ** 2).sqrt(), torch.atan2(x[:, 1:], x[:, :1])
    e = below(w, "dense_encoder.")
    h = F.conv2d(torch.cat([magnitude, x], 1), e["conv_1.0.weight"], e["conv_1.0.bias"])
    h = dense_block(below(e, "dilated_dense."), prelu(e["conv_1.2.weight"], instance_norm(e, "conv_1.1", h)))
    h = F.conv2d(h, e["conv_2.0.weight"], e["conv_2.0.bias"], stride=(1, 2), padding=(0, 1))
    h = prelu(e["conv_2.2.weight"], instance_norm(e, "conv_2.1", h))
    for i in range(1, 5):
        b, c, t, f = h.shape
        for kind, order in (("time", (0, 3, 2, 1)), ("freq", (0, 2, 3, 1))):
            rows = h.permute(order)
            shape = rows.shape
            rows = rows.reshape(-1, *shape[2:])
            rows = rows + conformer(below(w, f"TSCB_{i}.{kind}_conformer."), rows)
            back = [order.index(axis) for axis in range(4)]
            h = rows.view(shape).permute(back)
    m, c = below(w, "mask_decoder."), below(w, "complex_decoder.")
    y = sub_pixel(below(m, "sub_pixel."), dense_block(below(m, "dense_block."), h))
    y = instance_norm(m, "norm", F.conv2d(y, m["conv_1.weight"], m["conv_1.bias"]))
    y = F.conv2d(prelu(m["prelu.weight"], y), m["final_conv.weight"], m["final_conv.bias"])
    mask = torch.where(y > 0, y, m["prelu_out.weight"] * y)
    z = sub_pixel(below(c, "sub_pixel."), dense_block(below(c, "dense_block."), h))
    z = F.conv2d(prelu(c["prelu.weight"], instance_norm(c, "norm", z)), c["conv.weight"], c["conv.bias"])
    parts = [mask * magnitude * torch.cos(phase), mask * magnitude * torch.sin(phase)]
    return torch.cat(parts, 1) + z


def test_the_generator_equals_the_plain_computation():
    model = generator(8).eval()
    x = torch.randn(2, 2, 23, 201)
    with torch.no_grad():
        expected, found = plain_generator(model.state_dict(), x), model(x)
    assert expected.abs().max() > 0.5
    assert torch.allclose(found, expected, atol=1e-5)


# ---- golden numbers ----------------------------------------------------------------------------------------------


def filled(model):
    """Every weight from a formula: the same on any machine and with any version of torch."""
    with torch.no_grad():
        for number, (name, value) in enumerate(model.state_dict().items()):
            if value.is_floating_point():
                wave = torch.from_numpy(np.sin(0.37 * np.arange(value.numel()) + number)).view(value.shape)
                value.copy_(1 + 0.3 * wave if "var" in name or "slope" in name else 0.2 * wave)
    return model.eval()


def waves(*shape, step: float) -> torch.Tensor:
    return torch.from_numpy(np.sin(step * np.arange(math.prod(shape)))).view(shape).float()


GOLDEN = {
    "corner": [-0.005851, 0.106998],
    "middle": [-0.035069, 0.083766],
    "end": [-0.021135, 0.089624],
    "spread": [0.024343, 0.057489],
    "judged": [0.33547, 0.335144],
}


def test_golden_numbers_of_both_networks():
    """From our own code, when it equalled the published code to 4e-6: a change of either shows here."""
    with torch.no_grad():
        made = filled(TSCNet(8))(waves(1, 2, 12, 201, step=0.11))
        judge = filled(Discriminator(4))
        for _ in range(20):
            judge.iterate()
        judged = judge(waves(2, 1, 201, 40, step=0.05) ** 2, waves(2, 1, 201, 40, step=0.07) ** 2)
    found = {"corner": made[0, :, 0, 0], "middle": made[0, :, 6, 100], "end": made[0, :, 11, 200], "judged": judged}
    found |= {"spread": torch.stack([made.mean(), made.std()])}
    for name, numbers in GOLDEN.items():
        assert found[name].tolist() == pytest.approx(numbers, abs=2e-5), (name, found[name].tolist())
    assert set(found) == set(GOLDEN)


def test_attention_does_not_depend_on_its_chunks(monkeypatch):
    model, x = generator(8).eval(), torch.randn(1, 2, 40, 201)
    with torch.no_grad():
        whole = model(x)
        monkeypatch.setattr(network, "CHUNK_LOGITS_CPU", 1)
        assert torch.allclose(model(x), whole, atol=1e-6)


def test_sizes_and_names_are_the_published_ones():
    model, judge = TSCNet(), Discriminator()
    assert sum(p.numel() for p in model.parameters()) == 1_834_833
    assert sum(p.numel() for p in judge.parameters()) == 181_650
    weights, others = model.state_dict(), judge.state_dict()
    assert len(weights) == 359 and len(others) == 34
    block = "TSCB_3.freq_conformer."
    shapes = {
        block + "attn.fn.rel_pos_emb.weight": (1025, 16),
        block + "attn.fn.to_kv.weight": (128, 64),
        block + "conv.net.2.weight": (256, 64, 1),
        block + "conv.net.4.conv.weight": (128, 1, 31),
        block + "conv.net.5.num_batches_tracked": (),
        block + "ff2.fn.fn.net.3.bias": (64,),
        "dense_encoder.dilated_dense.conv4.weight": (64, 256, 2, 3),
        "mask_decoder.sub_pixel.conv.weight": (128, 64, 1, 3),
        "mask_decoder.prelu_out.weight": (201,),
        "complex_decoder.conv.weight": (2, 64, 1, 2),
    }
    assert {name: tuple(weights[name].shape) for name in shapes} == shapes
    assert {"layers.0.weight_orig", "layers.14.weight_u", "layers.17.bias", "layers.18.slope"} <= set(others)


# ---- discriminator ---------------------------------------------------------------------------------------------


def torch_discriminator(spectral_norm, channels=4) -> nn.Sequential:
    """The published layers with torch's own spectral norm."""
    layers, inputs = [], 2
    for outputs in (channels, 2 * channels, 4 * channels, 8 * channels):
        conv = spectral_norm(nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False))
        layers += [conv, nn.InstanceNorm2d(outputs, affine=True), nn.PReLU(outputs)]
        inputs = outputs
    layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), spectral_norm(nn.Linear(8 * channels, 4 * channels))]
    layers += [nn.Dropout(0.3), nn.PReLU(4 * channels), spectral_norm(nn.Linear(4 * channels, 1)), nn.Identity()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("way", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_the_discriminator_equals_torchs_spectral_norm_under_old_and_new_names(way):
    torch.manual_seed(0)
    plain = torch_discriminator(way)
    x, y = torch.rand(3, 1, 201, 60), torch.rand(3, 1, 201, 60)
    plain(torch.cat([x, y], 1))  # a power iteration
    plain.eval()
    weights = {f"module.layers.{name}": value for name, value in plain.state_dict().items()}
    weights["module.layers.18.slope"] = torch.tensor([1.7])
    judge = weights_module.build_discriminator(weights, "here").eval()
    with torch.no_grad():
        expected = torch.sigmoid(1.7 * plain(torch.cat([x, y], 1)))[:, 0]
        assert torch.allclose(judge(x, y), expected, atol=1e-6)


def test_the_power_iteration_runs_once_a_step_and_finds_the_largest_singular_value():
    torch.manual_seed(0)
    judge = Discriminator(4).train()
    before = {name: value.clone() for name, value in judge.state_dict().items() if name.endswith(("_u", "_v"))}
    judge(torch.rand(1, 1, 201, 40), torch.rand(1, 1, 201, 40))
    assert all(torch.equal(judge.state_dict()[name], value) for name, value in before.items())
    for _ in range(100):
        judge.iterate()
    layer = judge.layers[3]
    found = layer.weight_u @ layer.weight_orig.flatten(1) @ layer.weight_v
    assert float(found) == pytest.approx(float(torch.linalg.svdvals(layer.weight_orig.flatten(1))[0]), rel=1e-3)


# ---- training mode ---------------------------------------------------------------------------------------------


def gradients(model, x):
    model.zero_grad()
    torch.manual_seed(3)
    out = model(x)
    (out.square().mean() + out.mean()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_checkpointing_changes_neither_gradients_nor_statistics():
    x = torch.randn(2, 2, 12, 201)
    found = []
    for checkpointing in (False, True):
        model = generator(8, dropout=0.2).train()
        model.set_compute(checkpointing, False)
        grads = gradients(model, x)
        update_batch_norm(model, [batch_norm_statistics(model)], ONE)
        found.append((grads, {name: value.clone() for name, value in model.named_buffers()}))
    (plain, buffers), (saved, buffers_saved) = found
    assert all(torch.allclose(plain[name], saved[name], atol=1e-7) for name in plain)
    assert all(torch.equal(buffers[name], buffers_saved[name]) for name in buffers)
    assert all(int(value) == 1 for name, value in buffers.items() if name.endswith("tracked"))


def test_the_statistics_of_one_batch_are_batch_norms_and_of_two_their_mean():
    torch.manual_seed(0)
    mine, plain = StepBatchNorm(5).train(), nn.BatchNorm1d(5).train()
    x = torch.randn(7, 5, 11) * 3 + 1
    assert torch.allclose(mine(x), plain(x), atol=1e-6)
    update_batch_norm(mine, [batch_norm_statistics(mine)], ONE)
    for name, value in plain.state_dict().items():
        assert torch.allclose(mine.state_dict()[name].float(), value.float(), atol=1e-6), name
    y = torch.randn(7, 5, 11) - 2
    before, statistics = mine.running_mean.clone(), []
    for batch in (x, y):
        mine(batch)
        statistics.append(batch_norm_statistics(mine))
    update_batch_norm(mine, statistics, ONE)
    expected = 0.9 * before + 0.1 * (x.mean((0, 2)) + y.mean((0, 2))) / 2
    assert torch.allclose(mine.running_mean, expected, atol=1e-6) and int(mine.num_batches_tracked) == 2
    mine(y * float("nan"))
    assert torch.allclose(mine.running_mean, expected, atol=1e-6), "only update_batch_norm changes them"


def test_biases_that_a_norm_removes_stay_where_they_are_and_all_others_have_a_gradient():
    model = generator(8).train()
    without = {id(bias) for bias in model.biases_without_effect()}
    assert len(without) == 3 + 3 * 4 + 8
    grads = gradients(model, torch.randn(1, 2, 12, 201))
    for name, parameter in model.named_parameters():
        assert bool(grads[name].any()) != (id(parameter) in without), name
    out = model.eval()(x := torch.randn(1, 2, 12, 201))
    with torch.no_grad():
        model.dense_encoder.dilated_dense.conv2.bias.add_(5.0)
    assert torch.allclose(model(x), out, atol=1e-4)


def test_bf16_is_for_the_conformers_alone():
    model = generator(8).eval()
    seen = {}
    model.TSCB_1.time_conformer.ff1.fn.fn.net[0].register_forward_hook(lambda m, i, o: seen.update(inside=o.dtype))
    model.dense_encoder.conv_1[0].register_forward_hook(lambda m, i, o: seen.update(outside=o.dtype))
    x = torch.randn(1, 2, 12, 201)
    with torch.no_grad():
        exact = model(x)
        model.set_compute(False, True)
        low = model(x)
    assert seen == {"inside": torch.bfloat16, "outside": torch.float32} and low.dtype == torch.float32
    assert 0 < float((low - exact).abs().max()) < 0.1 * float(exact.abs().max())


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ckpt", "weights.pt", "weights.safetensors", "module"])
def test_a_published_checkpoint_loads_strictly_whatever_its_form(form, tmp_path):
    model = generator(8).eval()
    weights = model.state_dict()
    path = tmp_path / form
    if form == "module":
        weights = {f"module.{name}": value for name, value in weights.items()}
    save_file(weights, path) if form.endswith("safetensors") else torch.save(weights, path)
    loaded, judge = weights_module.load_networks(str(path))
    x = torch.randn(1, 2, 9, 201)
    assert judge is None and torch.equal(loaded.eval()(x), model(x))


def test_an_export_comes_back_with_its_discriminator_and_as_the_bare_published_form(tmp_path):
    model, judge = generator(8).eval(), Discriminator(4).eval()
    weights_module.write_export(tmp_path / "export", model.state_dict(), judge.state_dict(), {"step": 7})
    x, y = torch.randn(1, 2, 9, 201), torch.rand(1, 1, 201, 40)
    for place in (tmp_path, tmp_path / "export"):
        loaded, other = weights_module.load_networks(str(place))
        assert torch.equal(loaded.eval()(x), model(x)) and torch.equal(other.eval()(y, y), judge(y, y))
    bare = torch.load(tmp_path / "export" / "generator.pt", weights_only=True)
    assert TSCNet(8).load_state_dict(bare, strict=True) and len(bare) == 359
    assert json.loads((tmp_path / "export" / "config.json").read_text())["channels"] == 8


class Payload:
    def __reduce__(self):
        import os

        return os.mkdir, (str(Payload.target),)


@pytest.mark.parametrize("harm", ["missing", "shape", "other", "pickle", "nothing"])
def test_what_is_no_cmgan_is_refused_in_one_sentence(harm, tmp_path):
    path = tmp_path / "ckpt"
    weights = generator(8).state_dict()
    if harm == "missing":
        weights.pop("TSCB_2.time_conformer.post_norm.bias")
    if harm == "shape":
        weights["mask_decoder.prelu_out.weight"] = torch.zeros(257)
    if harm == "other":
        weights = {"encoder.weight": torch.zeros(3)}
    if harm == "pickle":
        Payload.target = tmp_path / "owned"
        path.write_bytes(pickle.dumps(Payload()))
    elif harm != "nothing":
        torch.save(weights, path)
    with pytest.raises(UserError, match="--model") as error:
        weights_module.load_networks(str(path))
    assert "\n" not in str(error.value) and not (tmp_path / "owned").exists()
    if harm == "missing":
        assert "TSCB_2.time_conformer.post_norm.bias" in str(error.value)
