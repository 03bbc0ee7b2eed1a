"""The generator as an ONNX file, for programs without torch: a compressed spectrum of any length in, one out.

`signal.spectrum` and `signal.wave_of` are the way from a wave and back; a file holds their constants.
"""

from pathlib import Path

import torch

from common import onnx_file
from models.cmgan import signal
from models.cmgan.network import BINS, TSCNet

EXAMPLE_FRAMES = 161


def write_onnx(path: Path, generator: TSCNet) -> None:
    """Writes the generator, complete or not at all: `spectrum` (1, 2, T, 201) -> `out`, the same shape."""
    settings = {"sample_rate": signal.RATE, "n_fft": signal.N_FFT, "hop": signal.HOP, "compression": signal.POWER}
    inputs = {"spectrum": torch.randn(1, 2, EXAMPLE_FRAMES, BINS)}
    frames = {2: torch.export.Dim("frames", min=4)}
    onnx_file.write(path, "cmgan", settings, generator, inputs, dynamic_shapes=(frames,))


class OnnxGenerator:
    """In place of the generator in models/cmgan/enhance.py, computed by onnxruntime."""

    def __init__(self, path: str, threads: int = 0):
        """`threads`: 0 = as many as onnxruntime chooses."""
        self.session, self.settings = onnx_file.open_session(path, "cmgan", threads)

    def __call__(self, spectrum: torch.Tensor) -> torch.Tensor:
        (out,) = self.session.run(None, {"spectrum": spectrum.contiguous().numpy()})
        return torch.from_numpy(out)
