"""A network as an ONNX file, with its settings in it. The packages onnx, onnxscript and onnxruntime are optional."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn

from common.errors import UserError


def write(
    path: Path, kind: str, settings: dict, network: nn.Module, inputs: dict[str, torch.Tensor], **options
) -> None:
    """Writes the file; complete or not at all. `inputs`: examples by name; `options`: of torch's exporter."""
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError as error:
        raise UserError(
            f"an ONNX file needs the package {error.name}: pip install onnx onnxscript onnxruntime"
        ) from None
    draft = path.with_name(f".{path.name}.tmp")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), tuple(inputs.values()), draft, dynamo=True, external_data=False, verbose=False,
            input_names=list(inputs), output_names=["out"], **options,
        )  # fmt: skip
    content = onnx.load(draft)
    onnx.helper.set_model_props(content, {kind: json.dumps(settings)})
    onnx.save(content, draft)
    draft.replace(path)


def open_session(path: str, kind: str, threads: int = 0) -> tuple:
    """onnxruntime's session of a file that `write` made, and its settings. `threads`: 0 = as onnxruntime chooses."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError("an ONNX file needs the package onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    settings = session.get_modelmeta().custom_metadata_map.get(kind)
    if not settings:
        raise UserError(f"{path} is not an ONNX file of {kind}.")
    return session, json.loads(settings)
