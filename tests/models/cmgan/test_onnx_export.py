"""The ONNX file of the generator: what it computes is what torch computes, for any length."""

import sys

import numpy as np
import pytest
import torch

from common.errors import UserError
from infer import convert
from models.cmgan import network
from models.cmgan.enhance import enhance
from models.cmgan.network import TSCNet
from models.cmgan.onnx_export import OnnxGenerator, write_onnx


def made() -> TSCNet:
    torch.manual_seed(0)
    return TSCNet(4).eval()


def test_attention_is_the_same_as_it_is_exported(monkeypatch):
    """Few bins at a time, or all frames in one, instead of chunks that depend on the length."""
    generator, x, asked = made(), torch.randn(1, 2, 30, 201), []

    def rows(x):
        asked.append(network.CHUNK_BINS_EXPORT if x.shape[0] == 101 else 0)
        return asked[-1]

    with torch.no_grad():
        expected = generator(x)
        monkeypatch.setattr(network, "_rows_per_chunk", rows)
        assert torch.allclose(generator(x), expected, atol=1e-5) and set(asked) == {0, network.CHUNK_BINS_EXPORT}


@pytest.mark.long
def test_recordings_through_the_onnx_file_equal_torch(tmp_path, monkeypatch):
    """Converted by the command, from bare weights; recordings of lengths that are not the exported one."""
    pytest.importorskip("onnx", reason="the optional packages onnx, onnxscript and onnxruntime are not installed")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    generator, file = made(), tmp_path / "generator.onnx"
    torch.save(generator.state_dict(), tmp_path / "weights.pt")
    words = ["--model", str(tmp_path / "weights.pt"), "--recipe", "cmgan", "--onnx", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["convert", *words])
    convert.convert(convert.parse_args())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator.onnx", "weights.pt"]
    loaded = OnnxGenerator(str(file), threads=1)
    assert loaded.settings == {"sample_rate": 16000, "n_fft": 400, "hop": 100, "compression": 0.3}
    for samples in (400, 8000, 40000):  # the longest in two windows
        noisy = 0.1 * np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
        expected = enhance(generator, noisy, 32000, "cpu")
        found = enhance(loaded, noisy, 32000, "cpu")
        assert np.abs(expected).max() > 1e-3 and np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_missing_packages_and_a_recipe_that_is_not_known_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="needs the package onnx: pip install onnx onnxscript onnxruntime"):
        write_onnx(tmp_path / "generator.onnx", made())
    with pytest.raises(UserError, match="needs the package onnxruntime"):
        OnnxGenerator(str(tmp_path / "generator.onnx"))
    torch.save(made().state_dict(), tmp_path / "weights.pt")
    words = ["--model", str(tmp_path / "weights.pt"), "--onnx", "--out", str(tmp_path / "generator.onnx")]
    for more, sentence in (
        ([], "comes without a config.json: name its recipe with --recipe cmgan or diffusion_buffer"),
        (["--recipe", "cmgan", "--spec", "demo"], "--spec"),
    ):
        monkeypatch.setattr(sys, "argv", ["convert", *words, *more])
        with pytest.raises(UserError, match=sentence):
            convert.convert(convert.parse_args())
