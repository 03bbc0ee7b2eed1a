"""The networks of the Diffusion Buffer: sizes and names of the official ones, who sees whom, importing checkpoints."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from common.config import UserError
from models.diffusion_buffer.diagnose import randomised
from models.diffusion_buffer.network import BlockCausal, NCSNpp, build_network, conv, fir_down, fir_up
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import import_lightning, load_network, write_export


def trained(network) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_parameter_counts_are_the_official_ones():
    with torch.device("meta"):
        assert trained(NCSNpp(96)) == 18_282_746 and len(NCSNpp(96).state_dict()) == 271
        assert trained(BlockCausal(128, 32)) == 26_328_462
        assert trained(BlockCausal(128, 16)) == 24_362_382
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


def test_kernels_lie_as_in_the_official_weights():
    layer, x = conv(3, 5, 3), torch.randn(2, 3, 16, 8)  # (N, C, F, K), as the official network has it
    expected = F.conv2d(x, layer.weight, layer.bias, padding=1)
    assert torch.allclose(layer(x.transpose(2, 3)).transpose(2, 3), expected, atol=1e-6)


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


def lightning(network, path, average=None, prefix="dnn."):
    """As the official trainer writes it, with a class of its own among the arguments."""
    content = {"state_dict": {prefix + k: v for k, v in network.state_dict().items()}, "epoch": 3}
    content["hyper_parameters"] = {"data_module_cls": Spec, "made": Spec(), "lr": 1e-4}
    if average is not None:
        content["ema"] = {"decay": 0.999, "num_updates": 10, "shadow_params": average}
    torch.save(content, path)
    return path


SMALL = Spec(width=8, n_fft=30, hop=16, frames=16, buffer=4)


@pytest.mark.parametrize("network", ["ncsnpp", "block_causal"])
@pytest.mark.parametrize("prefix", ["dnn.", "dnn._orig_mod.", ""])
def test_a_lightning_checkpoint_gives_its_average(tmp_path, network, prefix):
    spec = dataclasses.replace(SMALL, network=network, block=32)
    source = build_network(network, 8, 32)
    plain = import_lightning(lightning(source, tmp_path / "a.ckpt", prefix=prefix), spec)
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in plain.state_dict().items())
    for parameters in (list(source.parameters()), [p for p in source.parameters() if p.requires_grad]):
        average = [torch.full_like(p, 0.5) for p in parameters]
        found = import_lightning(lightning(source, tmp_path / "b.ckpt", average, prefix), spec)
        assert all(bool((p == 0.5).all()) for p in found.parameters() if p.requires_grad)
    with pytest.raises(UserError, match="EMA has 3 tensors"):
        import_lightning(lightning(source, tmp_path / "c.ckpt", average[:3], prefix), spec)


def test_the_official_buffers_without_meaning_are_left_out(tmp_path):
    source = BlockCausal(8, 16)
    weights = {f"dnn.{k}": v for k, v in source.state_dict().items()}
    weights["dnn.out_layers.0.counts"], weights["dnn.out_layers.0.inv_div"] = torch.ones(1, 1, 16), torch.tensor(0.25)
    torch.save({"state_dict": weights}, tmp_path / "a.ckpt")
    spec = dataclasses.replace(SMALL, network="block_causal", block=16)
    import_lightning(tmp_path / "a.ckpt", spec)


def test_foreign_checkpoints_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {"dnn.all_modules.4.Dense_0.weight": torch.ones(2)}}, tmp_path / "bbed.ckpt")
    with pytest.raises(UserError, match="bbed.ckpt embeds one diffusion time per sound"):
        load_network(str(tmp_path / "bbed.ckpt"), SMALL)
    lightning(NCSNpp(16), tmp_path / "wide.ckpt")
    with pytest.raises(UserError, match=r"--width 8 \(it has 16\)"):
        load_network(str(tmp_path / "wide.ckpt"), SMALL)

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Payload()}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="not a plain checkpoint"):
        load_network(str(tmp_path / "evil.ckpt"), SMALL)
    lightning(NCSNpp(8), tmp_path / "hidden.ckpt")
    hidden = torch.load(tmp_path / "hidden.ckpt", weights_only=False)
    torch.save(hidden | {"hyper_parameters": {"x": Payload()}}, tmp_path / "hidden.ckpt")
    load_network(str(tmp_path / "hidden.ckpt"), SMALL)  # loads, and nothing in it has run
    assert not (tmp_path / "ran").exists()
    torch.save([torch.ones(2)], tmp_path / "list.ckpt")
    with pytest.raises(UserError, match="holds a list, not named weights"):
        load_network(str(tmp_path / "list.ckpt"), SMALL)
    with pytest.raises(UserError, match=r"--phase middle \(it has start\)"):
        load_network(str(tmp_path / "hidden.ckpt"), dataclasses.replace(SMALL, phase="middle"))


def test_an_export_knows_its_settings_and_refuses_others(tmp_path):
    write_export(tmp_path, NCSNpp(8), SMALL, {"step": 1})
    network, spec = load_network(str(tmp_path))
    assert spec == SMALL
    other = dataclasses.replace(SMALL, sde_c=0.52, hop=15)
    with pytest.raises(UserError, match=r"--hop 15 \(it has 16\), --sde-c 0.52 \(it has 0.08\)"):
        load_network(str(tmp_path), other)
