"""The ONNX file of a stream's network: what it computes is what torch computes."""

import sys

import numpy as np
import pytest
import torch

from common.errors import UserError
from helpers.diffusion_buffer_support import pair, randomised
from infer import convert
from models.diffusion_buffer.enhance import enhance
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.onnx_export import OnnxNetwork, RealNetwork, write_onnx
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import write_export


def made(network: str):
    """A network with random weights whose stream is stable: its output is small, so that an error does not grow."""
    spec = Spec(network=network, block=16, width=8, n_fft=126, hop=64, frames=16, buffer=8)
    torch.manual_seed(0)
    net = randomised(build_network(network, 8, 16)).eval()
    if network == "ncsnpp":
        net.output_layer.weight.data *= 0.05
    return net, spec


class AsReal:
    """The module that is exported, without ONNX."""

    def __init__(self, net, spec):
        self.module = RealNetwork(net, spec)

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scales):
        return torch.view_as_complex(self.module(torch.view_as_real(x), torch.view_as_real(y)).contiguous())


@pytest.mark.parametrize("network", ["ncsnpp", "block_causal"])
def test_what_is_exported_streams_as_the_network_does(network):
    (net, spec), (noisy, _) = made(network), pair(0.2)
    expected = enhance(net, noisy, spec, delay=3)
    assert np.abs(expected).max() > 0.01
    found = enhance(AsReal(net, spec), noisy, spec, delay=3)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.parametrize("network", ["ncsnpp", "block_causal"])
def test_a_stream_of_the_onnx_file_equals_torch(network, tmp_path):
    pytest.importorskip("onnx", reason="the optional packages onnx, onnxscript and onnxruntime are not installed")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    (net, spec), (noisy, _) = made(network), pair(0.3)
    write_onnx(tmp_path / "live.onnx", net, spec)
    loaded = OnnxNetwork(str(tmp_path / "live.onnx"), threads=1)
    assert loaded.spec == spec and [path.name for path in tmp_path.iterdir()] == ["live.onnx"]
    for delay in (1, 8):
        expected = enhance(net, noisy, spec, delay=delay)
        assert np.abs(enhance(loaded, noisy, spec, delay=delay) - expected).max() < 1e-4 * np.abs(expected).max()


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    write_export(tmp_path / "export", *made("ncsnpp"), {})
    monkeypatch.setattr(sys, "argv", ["convert", "--onnx", "--model", str(tmp_path / "export"), "--out", "live.onnx"])
    with pytest.raises(UserError, match="needs the package onnx: pip install onnx onnxscript onnxruntime"):
        convert.convert(convert.parse_args())
    with pytest.raises(UserError, match="needs the package onnxruntime"):
        OnnxNetwork(str(tmp_path / "live.onnx"))
