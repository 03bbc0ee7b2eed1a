"""The networks of the Diffusion Buffer: sizes and names of the official ones, who sees whom, importing checkpoints."""

import dataclasses
import json
import math

import numpy as np
import pytest
import soundfile
import torch
from torch.nn import functional as F

from common.errors import UserError
from helpers.diffusion_buffer_support import randomised
from infer import convert, enhance
from models.diffusion_buffer.enhance import enhance as stream_whole
from models.diffusion_buffer.network import (
    BlockCausal,
    CumulativeNorm,
    NCSNpp,
    Resample,
    build_network,
    conv,
    fir_down,
    fir_up,
    norm,
)
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import load_network, write_export


def trained(network) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_parameter_counts_are_the_official_ones():
    with torch.device("meta"):
        assert trained(NCSNpp(96)) == 18_282_746 and len(NCSNpp(96).state_dict()) == 271
        assert trained(BlockCausal(128, 32)) == 26_328_462
        assert trained(BlockCausal(128, 16)) == 24_362_382
        large = build_network("ncsnpp_large", 128, 32)  # the official trainer's default size
        assert trained(large) == 67_381_662 and len(large.state_dict()) == 475
        # The official 175 entries have 42 more: two buffers that nothing reads in each of 21 norms.
        assert len(BlockCausal(128, 32).state_dict()) == 175 - 42


def test_names_and_shapes_follow_the_official_table():
    with torch.device("meta"):
        a, b = ({k: tuple(v.shape) for k, v in n.state_dict().items()} for n in (NCSNpp(96), BlockCausal(128, 32)))
    assert a["all_modules.0.W"] == (96,) and a["all_modules.1.weight"] == (384, 192)
    assert a["all_modules.7.Conv_2.weight"] == (192, 96, 1, 1) and a["all_modules.12.Conv_0.weight"] == (192, 4, 1, 1)
    assert a["all_modules.15.NIN_3.W"] == (192, 192) and a["all_modules.17.Conv_0.weight"] == (192, 384, 3, 3)
    assert a["all_modules.28.Conv_0.weight"] == (192, 288, 3, 3) and a["all_modules.32.Conv_0.weight"] == (
        96,
        288,
        3,
        3,
    )
    assert a["all_modules.33.Conv_time.weight"] == (96, 384, 3) and a["all_modules.35.weight"] == (4, 96, 3, 3)
    assert "all_modules.4.Conv_2.weight" not in a and a["output_layer.weight"] == (2, 4, 1, 1)
    assert b["temp_enc.lin_layer1.lin_layer.weight"] == (512, 256) and b["in_layer.weight"] == (128, 4, 3, 3)
    assert b["down_layers.3.Conv_1.weight"] == (256, 256, 3, 5) and b["up_layers.0.Conv_0.weight"] == (512, 256, 3, 3)
    assert b["up_layers.3.Conv_2.weight"] == (512, 128, 3, 3) and b["out_layers.3.weight"] == (2, 4, 1, 1)
    strides = [part.Conv_time.stride[0] for part in NCSNpp(8).all_modules if hasattr(part, "Conv_time")]
    assert strides == [1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]


def test_resampling_is_the_fir_filter():
    x, line = torch.randn(2, 3, 16, 24), torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    for both, kernel, stride, padding in (
        (True, torch.outer(line, line), (2, 2), (1, 1)),
        (False, line[:, None], (2, 1), (1, 0)),
    ):
        kernel = kernel.expand(3, 1, *kernel.shape)
        gain = stride[0] * stride[1]
        down = F.conv2d(x, kernel, stride=stride, padding=padding, groups=3)
        up = F.conv_transpose2d(x, gain * kernel, stride=stride, padding=padding, groups=3)
        assert torch.allclose(fir_down(x, both), down, atol=1e-6) and torch.allclose(fir_up(x, both), up, atol=1e-6)
        # as a GPU computes it
        assert torch.allclose(Resample(False, both).convolve(x), down, atol=1e-6)
        assert torch.allclose(Resample(True, both).convolve(x), up, atol=1e-6)


def test_kernels_lie_as_in_the_official_weights():
    layer, x = conv(3, 5, 3), torch.randn(2, 3, 16, 8)  # (N, C, F, K), as the official network has it
    expected = F.conv2d(x, layer.weight, layer.bias, padding=1)
    assert torch.allclose(layer(x.transpose(2, 3)).transpose(2, 3), expected, atol=1e-6)


# ---- the same, straight from the weights -----------------------------------------------------------------------
# Layouts are the official ones, (N, C, F, K). N sounds, C channels, F bins, K frames.


def mattering(network):
    """The network with weights that all matter: no norm is the identity, nothing starts at zero."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if not parameter.requires_grad:  # the frequencies of the times; smaller ones keep more digits
                parameter.copy_(noise)
            elif parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.7 / parameter[0].numel() ** 0.5))
    return network.eval()


def below(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def silu(x):
    return x / (1 + torch.exp(-x))


def group_norm(w, name, x):
    channels = x.shape[1]
    parts = x.unflatten(1, (min(channels // 4, 32), -1))
    mean, var = parts.mean((2, 3, 4), keepdim=True), parts.var((2, 3, 4), keepdim=True, unbiased=False)
    x = ((parts - mean) / (var + 1e-6).sqrt()).flatten(1, 2)
    return x * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def cumulative_norm(w, name, x):
    """Frame by frame, with the mean and variance of all frames so far."""
    parts = x.unflatten(1, (min(x.shape[1] // 4, 32), -1))
    frames = []
    for k in range(x.shape[-1]):
        heard = parts[..., : k + 1]
        mean, var = heard.mean((2, 3, 4), keepdim=True), heard.var((2, 3, 4), keepdim=True, unbiased=False)
        frames.append(((parts[..., k : k + 1] - mean) / (var + 1e-6).sqrt()).flatten(1, 2))
    return torch.cat(frames, -1) * w[f"{name}.gain"] + w[f"{name}.bias"]


def resampled(x, up, both):
    line = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    kernel = torch.outer(line, line) if both else line[:, None]
    kernel, stride, padding = kernel.expand(x.shape[1], 1, *kernel.shape), (2, 1 + both), (1, int(both))
    if up:
        gain = stride[0] * stride[1]
        return F.conv_transpose2d(x, gain * kernel, stride=stride, padding=padding, groups=x.shape[1])
    return F.conv2d(x, kernel, stride=stride, padding=padding, groups=x.shape[1])


def same_conv(w, name, x):
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, w[f"{name}.bias"], padding=weight.shape[-1] // 2)


def waves_of_time(frequencies, value):
    angle = 2 * math.pi * value[..., None] * frequencies
    return torch.cat([torch.sin(angle), torch.cos(angle)], -1)


def as_channels(x, y):
    return torch.stack([x.real, x.imag, y.real, y.imag], 1)


def plain_ncsnpp(w, x, y, t, scale, levels=4, blocks=1):
    """Attention is at the fifth scale, if there is one, and in the bottleneck."""
    modules = {int(name.split(".")[1]) for name in w if name.startswith("all_modules.")}
    parts = iter([below(w, f"all_modules.{i}.") for i in sorted(modules)])
    frequencies, first, second, start = (next(parts) for _ in range(4))
    time = waves_of_time(frequencies["W"], torch.log(t + 0.01))
    time = silu(time @ first["weight"].T + first["bias"]) @ second["weight"].T + second["bias"]

    def block(w, x, way=""):
        h = silu(group_norm(w, "GroupNorm_0", x))
        if way:
            h, x = (resampled(side, way == "up", both=True) for side in (h, x))
        bias = F.conv1d(F.pad(time.transpose(1, 2), (1, 1)), w["Conv_time.weight"], w["Conv_time.bias"])
        h = same_conv(w, "Conv_0", h) + bias[:, :, None, :: t.shape[1] // x.shape[-1]]
        h = same_conv(w, "Conv_1", silu(group_norm(w, "GroupNorm_1", h)))
        return ((same_conv(w, "Conv_2", x) if "Conv_2.weight" in w else x) + h) / math.sqrt(2)

    def attention(w, x):
        h = group_norm(w, "GroupNorm_0", x).flatten(2).transpose(1, 2)
        q, k, v = (h @ w[f"NIN_{i}.W"] + w[f"NIN_{i}.b"] for i in range(3))
        h = (q @ k.transpose(1, 2) / x.shape[1] ** 0.5).softmax(-1) @ v @ w["NIN_3.W"] + w["NIN_3.b"]
        return (x + h.transpose(1, 2).reshape(x.shape)) / math.sqrt(2)

    small = as_channels(x, y)
    h = same_conv({f"start.{n}": v for n, v in start.items()}, "start", small)
    skips = [h]
    for level in range(levels):
        for _ in range(blocks):
            h = block(next(parts), h)
            h = attention(next(parts), h) if level == 4 else h
            skips.append(h)
        if level < levels - 1:
            h, small = block(next(parts), h, "down"), resampled(small, up=False, both=True)
            h = same_conv(next(parts), "Conv_0", small) + h
            skips.append(h)
    h = block(next(parts), h)
    h = attention(next(parts), h)
    h = block(next(parts), h)
    pyramid = 0.0
    for level in reversed(range(levels)):
        for _ in range(blocks + 1):
            h = block(next(parts), torch.cat([h, skips.pop()], 1))
        h = attention(next(parts), h) if level == 4 else h
        grown = silu(group_norm({f"norm.{n}": v for n, v in next(parts).items()}, "norm", h))
        grown = same_conv({f"conv.{n}": v for n, v in next(parts).items()}, "conv", grown)
        pyramid = grown + (resampled(pyramid, up=True, both=True) if level < levels - 1 else 0.0)
        if level:
            h = block(next(parts), h, "up")
    assert not skips and next(parts, None) is None
    out = F.conv2d(pyramid / scale[:, None, None], w["output_layer.weight"], w["output_layer.bias"])
    return torch.complex(out[:, 0], out[:, 1])


def past_conv(w, name, x, stride=1):
    """One output frame per `stride` frames, counted from the newest; nothing sees a later frame."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    high, wide = weight.shape[2:]
    if high == 3:
        x = torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2)
    x = F.pad(x, (wide, 0))
    ends = range(x.shape[-1], wide, -stride)
    return torch.cat([F.conv2d(x[..., end - wide : end], weight, bias) for end in reversed(ends)], -1)


def past_conv_up(w, name, x, frames, stride=1):
    """The newest `frames`, of which each coarse frame writes `stride` and what its kernel adds after them."""
    y = F.conv_transpose2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=(1, stride))[:, :, 1:-1]
    end = x.shape[-1] * stride
    return y[..., end - frames : end]


def plain_block_causal(w, x, y, t, scale, strides):
    encoding = below(w, "temp_enc.")
    time = waves_of_time(encoding["W"], t)
    for i in (1, 2):
        time = time @ encoding[f"lin_layer{i}.lin_layer.weight"].T + encoding[f"lin_layer{i}.lin_layer.bias"]
    time = silu(time).transpose(1, 2)

    def block(w, x, stride, way, factor, frames=0):
        h = silu(cumulative_norm(w, "GroupNorm_0", x))
        bias = F.conv1d(time, w["Conv_time.weight"], w["Conv_time.bias"], stride=factor, padding=1)[:, :, None]
        if way:
            h, x = (resampled(side, way == "up", both=False) for side in (h, x))
        if way == "up":
            h = past_conv_up(w, "Conv_0", h, h.shape[-1]) + bias
            h = past_conv_up(w, "Conv_1", silu(cumulative_norm(w, "GroupNorm_1", h)), frames, stride)
            return (past_conv_up(w, "Conv_2", x, frames, stride) + h) / math.sqrt(2)
        h = past_conv(w, "Conv_0", h) + bias
        h = past_conv(w, "Conv_1", silu(cumulative_norm(w, "GroupNorm_1", h)), stride)
        return (past_conv(w, "Conv_2", x, stride) + h) / math.sqrt(2)

    h = past_conv(w, "in_layer", as_channels(x, y))
    skips, factor, lengths = [], 1, []
    for i, stride in enumerate(strides):
        lengths.append(h.shape[-1])
        h = block(below(w, f"down_layers.{i}."), h, stride, "down", factor)
        factor *= stride
        skips.append(h)
    for i in range(2):
        h = block(below(w, f"bottleneck_layers.{i}."), h, 1, "", factor)
    for i, stride in enumerate(reversed(strides)):
        h = torch.cat([h, skips.pop()], 1)
        h = block(below(w, f"up_layers.{i}."), h, stride, "up", factor, lengths.pop())
        factor //= stride
    h = silu(cumulative_norm(w, "out_layers.0", h))
    h = past_conv(w, "out_layers.3", past_conv(w, "out_layers.2", h)) / scale[:, None, None]
    return torch.complex(h[:, 0], h[:, 1])


def inputs(frames):
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, 16, frames, dtype=torch.complex64, generator=draw) for _ in range(2))
    t, scale = torch.rand(2, frames, generator=draw), 0.5 + torch.rand(2, frames, generator=draw)
    return x, y, t, scale


@torch.no_grad()
def require_equal(network, expected, x, y, t, scale):
    found = network(x, y, network.embed(t), scale)
    error, size = float((found - expected).abs().max()), float(expected.abs().max())
    assert 0.1 < size < 100 and error < 1e-4 * size, (error, size)


def test_ncsnpp_equals_the_plain_computation():
    network = mattering(NCSNpp(8))
    data = inputs(16)
    with torch.no_grad():
        expected = plain_ncsnpp(network.state_dict(), *data)
    require_equal(network, expected, *data)


def test_ncsnpp_large_equals_the_plain_computation():
    network = mattering(build_network("ncsnpp_large", 8, 32))
    data = inputs(32)
    with torch.no_grad():
        expected = plain_ncsnpp(network.state_dict(), *data, levels=5, blocks=2)
    require_equal(network, expected, *data)


@pytest.mark.parametrize(("block", "strides", "frames"), [(16, (2, 2, 2, 2), 21), (32, (2, 2, 2, 4), 40)])
def test_block_causal_equals_the_plain_computation(block, strides, frames):
    network = mattering(BlockCausal(8, block))
    data = inputs(frames)
    with torch.no_grad():
        expected = plain_block_causal(network.state_dict(), *data, strides)
    require_equal(network, expected, *data)


@pytest.mark.parametrize("level", [1.0, 1e-3])  # a quiet sound, whose variance is that of the norms' epsilon
def test_norms_hold_their_epsilon_for_quiet_sounds(level):
    x = level * torch.randn(2, 16, 6, 9, generator=torch.Generator().manual_seed(2))
    for layer, plain in ((norm(16), group_norm), (CumulativeNorm(16), cumulative_norm)):
        weights = {f"n.{name}": value for name, value in mattering(layer).state_dict().items()}
        with torch.no_grad():
            assert torch.allclose(layer(x), plain(weights, "n", x), atol=1e-4)


# ---- who sees whom ---------------------------------------------------------------------------------------------


def run(network, x, y, t):
    return network(x, y, network.embed(t), torch.ones(1, x.shape[-1]))


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("frames", [40, 61])
def test_a_block_causal_frame_sees_as_many_later_frames_as_there_are(block, frames):
    torch.manual_seed(0)
    network = randomised(BlockCausal(8, block))
    y = torch.randn(1, 16, frames, dtype=torch.complex64)
    x = torch.randn(1, 16, frames, dtype=torch.complex64, requires_grad=True)
    out = run(network, x, y, torch.rand(1, frames))
    assert out.shape == x.shape
    for back in (1, 2, 3, 8, block - 1, block):
        (slope,) = torch.autograd.grad(out[0, :, -back].abs().square().sum(), x, retain_graph=True)
        seen = slope[0].abs().sum(0) > 0
        assert seen[-1] == (back <= block) and seen[frames - back]  # itself, and up to the newest frame
    (slope,) = torch.autograd.grad(out[0, :, -block - 1].abs().square().sum(), x)
    assert not (slope[0, :, -block:].abs().sum(0) > 0).any()  # the end of the block before knows nothing of this one


def test_everything_reaches_the_first_network_and_its_times_too():
    torch.manual_seed(0)
    network = randomised(NCSNpp(8))
    x, y = (torch.randn(1, 16, 16, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    t = torch.rand(1, 16, requires_grad=True)
    out = run(network, x, y, t)
    slopes = torch.autograd.grad(out.abs().square().sum(), [x, y, t])
    assert all(bool((slope.abs() > 0).all()) for slope in slopes)


def test_no_weight_is_without_gradient():
    torch.manual_seed(0)
    for network in (randomised(NCSNpp(8)), randomised(BlockCausal(8, 16))):
        x = torch.randn(2, 16, 16, dtype=torch.complex64)
        times = network.embed(torch.rand(2, 16))
        network(x, x.flip(0), times, torch.ones(2, 16)).abs().square().sum().backward()
        dead = [name for name, p in network.named_parameters() if p.requires_grad and not p.grad.any()]
        assert not [name for name in dead if not name.endswith("NIN_1.b")]  # a softmax does not see a common shift


# ---- files -----------------------------------------------------------------------------------------------------


def lightning(network, path, average=None, prefix="dnn.", **arguments):
    """As the official trainer writes it, with a class of its own among the arguments."""
    content = {"state_dict": {prefix + k: v for k, v in network.state_dict().items()}, "epoch": 3}
    content["hyper_parameters"] = {"data_module_cls": Spec, "made": Spec(), "lr": 1e-4} | arguments
    if average is not None:
        content["ema"] = {"decay": 0.999, "num_updates": 10, "shadow_params": average}
    torch.save(content, path)
    return path


SMALL = Spec(width=8, n_fft=30, hop=16, frames=16, buffer=4)


@pytest.mark.parametrize("network", ["ncsnpp", "block_causal"])
@pytest.mark.parametrize("prefix", ["dnn.", "dnn._orig_mod.", ""])
def test_a_lightning_checkpoint_gives_its_average(tmp_path, network, prefix):
    source = build_network(network, 8, 32)
    plain, spec = load_network(str(lightning(source, tmp_path / "a.ckpt", prefix=prefix)))
    assert (spec.network, spec.width, spec.block) == (network, 8, 32)
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in plain.state_dict().items())
    for parameters in (list(source.parameters()), [p for p in source.parameters() if p.requires_grad]):
        average = [torch.full_like(p, 0.5) for p in parameters]
        found, _ = load_network(str(lightning(source, tmp_path / "b.ckpt", average, prefix)))
        assert all(bool((p == 0.5).all()) for p in found.parameters() if p.requires_grad)
    with pytest.raises(UserError, match="EMA has 3 tensors"):
        load_network(str(lightning(source, tmp_path / "c.ckpt", average[:3], prefix)))


# What the official trainer's command line has by default, with BBED and a window that its network accepts.
CLI = {"sde": "bbed", "theta": 0.52, "k": 2.6, "T_sampling": 0.999, "t_eps": 0.03, "n_fft": 510, "hop_length": 160}
CLI |= {"num_frames": 256, "window": "hann", "spec_factor": 0.15, "spec_abs_exponent": 0.5, "fs": 16000}
CLI |= {"transform_type": "exponent", "normalize": "not", "loss_type": "mse", "output_scale": "time"}
CLI |= {"diff_buffer_length_inference": 15, "nf": 8, "ch_mult": [2, 2, 2, 2, 2], "num_res_blocks": 2}


def test_an_official_checkpoint_tells_its_settings(tmp_path):
    source = build_network("ncsnpp_large", 8, 32)
    path = str(lightning(source, tmp_path / "a.ckpt", **CLI))
    network, spec = load_network(path)
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in network.state_dict().items())
    assert spec == Spec(
        network="ncsnpp_large", width=8, n_fft=510, hop=160, frames=256, buffer=15, sde_c=0.52, loss="dsm",
        output_scale="time", context_time=1.0, stream="official",
    )  # fmt: skip
    given = {"buffer": 8, "reverse_start": 0.5, "stream": "own"}
    assert load_network(path, json.dumps(given))[1] == dataclasses.replace(spec, **given)
    with pytest.raises(UserError, match=r"hop 128 \(it has 160\), loss dp \(it has dsm\)"):
        load_network(path, json.dumps({"hop": 128, "loss": "dp", "output_scale": "time"}))
    with pytest.raises(UserError, match="lr is no setting"):
        load_network(path, '{"lr": 0.001}')


def command(module, *words):
    """Runs a command of infer/ in this process."""
    parse = module.parse_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["command", *map(str, words)])
        return parse()


@pytest.mark.long
def test_an_official_file_is_converted_and_enhances_as_it_does_itself(tmp_path, capsys):
    source = randomised(build_network("ncsnpp_large", 8, 32))
    file = lightning(source, tmp_path / "a.ckpt", **CLI | {"n_fft": 126, "hop_length": 64, "num_frames": 32})
    settings = tmp_path / "live.json"
    settings.write_text('{"reverse_start": 0.5, "buffer": 6}')
    flags = ["--spec", settings]
    convert.convert(command(convert, "--model", file, "--out", tmp_path / "live", *flags))
    assert "reverse_start 0.5" in capsys.readouterr().out
    (tmp_path / "in").mkdir()
    noisy = 0.1 * np.random.default_rng(0).standard_normal(1600)
    soundfile.write(tmp_path / "in" / "a.wav", noisy, 16000, subtype="FLOAT")
    made = []
    for words in (["--model", tmp_path / "live"], ["--model", file, "--recipe", "diffusion_buffer", *flags]):
        out = tmp_path / f"out{len(made)}"
        enhance.enhance(command(enhance, *words, "--source", tmp_path / "in", "--out", out, "--temperature", "0"))
        made.append(soundfile.read(out / "a.wav", dtype="float32")[0])
    assert np.array_equal(*made) and len(made[0]) == 1600
    spec = load_network(str(file), str(settings))[1]
    assert spec.stream == "official" and np.array_equal(
        made[0], stream_whole(source.eval(), noisy.astype(np.float32), spec, temperature=0.0)
    )
    with pytest.raises(UserError, match="live exists already"):
        convert.convert(command(convert, "--model", file, "--out", tmp_path / "live"))
    with pytest.raises(UserError, match="is not a file; a run of this project is converted with --run"):
        convert.convert(command(convert, "--model", tmp_path / "live", "--out", tmp_path / "other"))
    with pytest.raises(UserError, match="neither one of ncsnpp"):
        enhance.enhance(command(enhance, *words[:4], "--spec", "nowhere", "--source", tmp_path / "in", "--out", "b"))
    with pytest.raises(SystemExit):
        command(convert, "--run", "runs/a", "--spec", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sde": "ouve"}, "was trained with sde ouve; only bbed is supported"),
        ({"spec_factor": 0.33}, "spec_factor 0.33; only 0.15"),
        ({"loss_type": "gencon_mel"}, "loss_type gencon_mel, which is not supported"),
        ({"hop_length": "fast"}, "hop_length fast, which is not supported"),
    ],
)
def test_official_settings_that_this_code_does_not_have_are_refused(tmp_path, arguments, message):
    lightning(NCSNpp(8), tmp_path / "a.ckpt", **CLI | arguments)
    with pytest.raises(UserError, match=message):
        load_network(str(tmp_path / "a.ckpt"))


def test_peak_normalisation_is_mentioned(tmp_path, capsys):
    lightning(NCSNpp(8), tmp_path / "a.ckpt", **CLI | {"normalize": "noisy"})
    load_network(str(tmp_path / "a.ckpt"))
    assert "divided by their peak" in capsys.readouterr().out


def test_the_official_buffers_without_meaning_are_left_out(tmp_path):
    source = BlockCausal(8, 16)
    weights = {f"dnn.{k}": v for k, v in source.state_dict().items()}
    weights["dnn.out_layers.0.counts"], weights["dnn.out_layers.0.inv_div"] = torch.ones(1, 1, 16), torch.tensor(0.25)
    torch.save({"state_dict": weights}, tmp_path / "a.ckpt")
    assert load_network(str(tmp_path / "a.ckpt"))[1].block == 16


def test_foreign_checkpoints_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {"dnn.all_modules.4.Dense_0.weight": torch.ones(2)}}, tmp_path / "bbed.ckpt")
    with pytest.raises(UserError, match="bbed.ckpt embeds one diffusion time per sound"):
        load_network(str(tmp_path / "bbed.ckpt"))
    lightning(NCSNpp(16), tmp_path / "wide.ckpt")
    with pytest.raises(UserError, match=r"width 8 \(it has 16\)"):
        load_network(str(tmp_path / "wide.ckpt"), '{"width": 8}')

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Payload()}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="not a plain checkpoint"):
        load_network(str(tmp_path / "evil.ckpt"))
    lightning(NCSNpp(8), tmp_path / "hidden.ckpt")
    hidden = torch.load(tmp_path / "hidden.ckpt", weights_only=False)
    torch.save(hidden | {"hyper_parameters": {"x": Payload()}}, tmp_path / "hidden.ckpt")
    load_network(str(tmp_path / "hidden.ckpt"))  # loads, and nothing in it has run
    assert not (tmp_path / "ran").exists()
    torch.save([torch.ones(2)], tmp_path / "list.ckpt")
    with pytest.raises(UserError, match="holds a list, not named weights"):
        load_network(str(tmp_path / "list.ckpt"))
    with pytest.raises(UserError, match=r"phase middle \(it has start\)"):
        load_network(str(tmp_path / "hidden.ckpt"), '{"phase": "middle"}')


def test_an_export_knows_its_settings_and_refuses_others(tmp_path):
    write_export(tmp_path / "export", NCSNpp(8), SMALL, {"step": 1})
    network, spec = load_network(str(tmp_path))
    assert spec == SMALL
    with pytest.raises(UserError, match=r"hop 15 \(it has 16\), sde_c 0.52 \(it has 0.08\)"):
        load_network(str(tmp_path), '{"sde_c": 0.52, "hop": 15}')
    used = load_network(str(tmp_path), '{"buffer": 6, "stream": "official"}')[1]
    assert used == dataclasses.replace(SMALL, buffer=6, stream="official")
    again = load_network(str(tmp_path), str(tmp_path / "export" / "config.json"))[1]  # of an export, as a spec
    assert again == SMALL


def test_an_export_from_before_there_were_two_streams_has_the_own_one(tmp_path):
    write_export(tmp_path / "export", NCSNpp(8), SMALL, {})
    facts = json.loads((tmp_path / "export" / "config.json").read_text())
    del facts["stream"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(facts))
    assert load_network(str(tmp_path))[1] == SMALL
    del facts["sde_c"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="sde_c"):
        load_network(str(tmp_path))
