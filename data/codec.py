"""Codecs behind one small record: samples -> (T, C) codes and back.

Each clip is encoded alone, in fp32 and eval mode: padding in a batch, `.train()` or bf16 would change codes.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from usage import UsageError

# model_type in config.json -> the name used in flags and in dataset.json
KINDS = {"dac": "dac"}


@dataclass
class Codec:
    name: str
    sample_rate: int
    hop: int
    codebooks: int
    codebook_size: int
    encode: Callable  # (n,) float32 tensor -> (T, codebooks) int64 tensor
    decode: Callable  # (T, codebooks) int64 tensor -> (n,) float32 tensor


def find_weights(weights: str) -> Path:
    """The local file or folder behind --codec-weights: a path, or a hub id (cached or fetched)."""
    path = Path(weights).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(weights, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"--codec-weights {weights} is neither a path here nor a reachable hub id: "
            f"{type(error).__name__}: {reason}"
        ) from None


def weight_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"--codec-weights {path} holds no .safetensors file")
    return files


def hash_weights(path: Path) -> str:
    """SHA-256 over the weight files in the order of their names: one file hashes to its own SHA-256."""
    digest = hashlib.sha256()
    for file in weight_files(path):
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def kind_of(path: Path) -> str:
    """Which codec the weights are for, from their own config.json."""
    try:
        model_type = json.loads((path / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError):
        raise UsageError(f"--codec-weights {path} has no config.json that names a model_type") from None
    if model_type not in KINDS:
        raise UsageError(
            f"--codec-weights {path} is a {model_type} model; known codecs are {', '.join(KINDS)}"
        )
    return KINDS[model_type]


def describe(path: Path) -> dict:
    """The codec's format out of its config.json: no weights, no torch."""
    config = json.loads((path / "config.json").read_text())
    return {
        "sample_rate": config["sampling_rate"],
        "hop": math.prod(config["downsampling_ratios"]),
        "codebooks": config["n_codebooks"],
        "codebook_size": config["codebook_size"],
    }


def load_codec(path: Path, device: str = "cpu") -> Codec:
    import torch
    from transformers import DacModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # the scripts show their own
    kind, format = kind_of(path), describe(path)
    weight_files(path)
    model = DacModel.from_pretrained(path, use_safetensors=True, local_files_only=True, dtype=torch.float32)
    model.eval().requires_grad_(False).to(device)

    @torch.inference_mode()
    def encode(wave):
        padded = torch.nn.functional.pad(wave, (0, -wave.shape[-1] % format["hop"])).to(device)
        return model.encode(padded[None, None]).audio_codes[0].T.cpu()

    @torch.inference_mode()
    def decode(codes):
        return model.decode(audio_codes=codes.T[None].to(device)).audio_values[0].cpu()

    return Codec(name=kind, **format, encode=encode, decode=decode)
