"""The network of a stream as an ONNX file, for programs without torch: one call per frame.

ONNX has no complex numbers: real and imaginary parts are a last dimension. The diffusion times of a stream never
change, so what the network makes of them is part of the file, and so are the settings of the stream.
"""

import dataclasses
import json
import warnings
from pathlib import Path

import torch
from torch import nn

from common.config import UserError
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
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError as error:
        raise UserError(
            f"an ONNX file needs the package {error.name}: pip install onnx onnxscript onnxruntime"
        ) from None
    draft = path.with_name(f".{path.name}.tmp")
    inputs = tuple(torch.zeros(1, spec.bins, spec.frames, 2) for _ in range(2))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = RealNetwork(network.eval(), spec)
        torch.onnx.export(
            model, inputs, draft, dynamo=True, external_data=False, input_names=["x", "y"], output_names=["out"],
            verbose=False,
        )  # fmt: skip
    content = onnx.load(draft)
    onnx.helper.set_model_props(content, {"diffusion_buffer": json.dumps(dataclasses.asdict(spec))})
    onnx.save(content, draft)
    draft.replace(path)


class OnnxNetwork:
    """What Stream takes, computed by onnxruntime. `spec`: the settings in the file."""

    def __init__(self, path: str, threads: int = 0):
        """`threads`: 0 = as many as onnxruntime chooses."""
        try:
            import onnxruntime
        except ImportError:
            raise UserError("an ONNX file needs the package onnxruntime: pip install onnxruntime") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        settings = self.session.get_modelmeta().custom_metadata_map.get("diffusion_buffer")
        if not settings:
            raise UserError(f"{path} is not an ONNX file of this recipe.")
        self.spec = Spec(**json.loads(settings))

    def embed(self, t: torch.Tensor) -> list:
        return []

    def __call__(self, x: torch.Tensor, y: torch.Tensor, times, scales) -> torch.Tensor:
        inputs = {name: torch.view_as_real(side.contiguous()).numpy() for name, side in (("x", x), ("y", y))}
        (out,) = self.session.run(None, inputs)
        return torch.view_as_complex(torch.from_numpy(out).contiguous())
