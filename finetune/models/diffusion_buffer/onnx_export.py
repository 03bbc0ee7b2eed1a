"""The network of a stream as an ONNX file, for programs without torch: one call per frame.

ONNX has no complex numbers: real and imaginary parts are a last dimension. The diffusion times of a stream never
change, so what the network makes of them is part of the file, and so are the settings of the stream.
"""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from common import onnx_file
from models.diffusion_buffer.enhance import Buffer
from models.diffusion_buffer.signal import Spec


class RealNetwork(nn.Module):
    """(1, F, K, 2) buffer and noisy frames -> (1, F, K, 2), at the diffusion times of a stream."""

    def __init__(self, network: nn.Module, spec: Spec):
        super().__init__()
        buffer = Buffer(network, spec)
        self.network, self.scales, self.times = network, buffer.scales, buffer.times

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        xy = torch.cat([x, y], dim=-1).permute(0, 3, 1, 2)
        return self.network.real_forward(xy, self.times, self.scales).permute(0, 2, 3, 1)


def write_onnx(path: Path, network: nn.Module, spec: Spec) -> None:
    """Writes the network of a stream; complete or not at all."""
    inputs = {name: torch.zeros(1, spec.bins, spec.frames, 2) for name in ("x", "y")}
    with torch.no_grad():
        model = RealNetwork(network.eval(), spec)
    onnx_file.write(path, "diffusion_buffer", dataclasses.asdict(spec), model, inputs)


class OnnxNetwork:
    """What Stream takes, computed by onnxruntime. `spec`: the settings in the file."""

    def __init__(self, path: str, threads: int = 0):
        """`threads`: 0 = as many as onnxruntime chooses."""
        self.session, settings = onnx_file.open_session(path, "diffusion_buffer", threads)
        self.spec = Spec(**settings)

    def embed(self, t: torch.Tensor) -> list:
        return []

    def __call__(self, x: torch.Tensor, y: torch.Tensor, times, scales) -> torch.Tensor:
        inputs = {name: torch.view_as_real(side.contiguous()).numpy() for name, side in (("x", x), ("y", y))}
        (out,) = self.session.run(None, inputs)
        return torch.view_as_complex(torch.from_numpy(out).contiguous())
