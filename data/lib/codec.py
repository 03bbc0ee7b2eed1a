"""Codecs with one interface: samples -> (T, C) codes and back.

Each clip is encoded alone, in fp32 and eval mode: padding in a batch, `.train()` or bf16 would change its codes.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from lib.hub import fetch

# model_type in config.json -> name in --codec and in dataset.json
KINDS = {"dac": "dac", "encodec": "encodec", "musicgen": "encodec", "higgs_audio_v2_tokenizer": "higgs"}

# The published codecs, for codes that come without codec weights.
PUBLISHED = {
    "dac": {"sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024},
    "encodec": {"sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048},
    "higgs": {"sample_rate": 24000, "hop": 960, "codebooks": 8, "codebook_size": 1024},
}

# DAC sees 7.3 frames to each side, so chunks that overlap by 8 frames give the codes of the whole clip. On a CPU,
# chunks of 2.5 s are also the fastest: the activations of longer ones do not fit the caches.
DAC_OVERLAP = 8
DAC_CHUNK = {"cpu": 216, "cuda": 2592}
# EnCodec has an LSTM and Higgs attends to the whole clip: neither can be chunked, so memory limits the length.
MAX_UNCUT_SECONDS = 120


@dataclass
class Codec:
    name: str
    sample_rate: int
    hop: int
    codebooks: int
    codebook_size: int
    max_seconds: float
    encode: Callable  # (n,) float32 tensor -> (T, codebooks) int64 tensor
    decode: Callable  # (T, codebooks) int64 tensor -> (n,) float32 tensor


# ---------------------------------------------------------------- weights


def find_weights(weights: str, revision: str | None = None) -> Path:
    """The local file or folder for --codec-weights, which is a path or a hub id (cached or downloaded)."""
    path = Path(weights).expanduser()
    if path.exists():
        return path
    try:
        return fetch(weights, revision)
    except UserError as error:
        raise UserError(f"--codec-weights {error}") from None


def kind_of(path: Path) -> str:
    """Which codec the weights belong to: a .pth file is descript's DAC, a folder names it in its config.json."""
    if path.is_file():
        if path.suffix != ".pth":
            raise UserError(f"--codec-weights {path} is neither a folder nor descript-audio-codec's .pth file")
        return "dac"
    try:
        model_type = json.loads((path / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"--codec-weights {path} has no config.json with a model_type") from None
    if model_type not in KINDS:
        raise UserError(f"--codec-weights {path} is a {model_type} model; it must be one of {', '.join(KINDS)}")
    if not list(path.glob("*.safetensors")):
        raise UserError(f"--codec-weights {path} has no .safetensors file")
    return KINDS[model_type]


def describe(path: Path) -> dict:
    """Sample rate, hop and codebooks; a transformers model's weights are not loaded for this."""
    kind = kind_of(path)
    if path.is_file():
        kwargs = read_pth(path)["metadata"]["kwargs"]
        return {
            "sample_rate": kwargs["sample_rate"],
            "hop": math.prod(kwargs["encoder_rates"]),
            "codebooks": kwargs["n_codebooks"],
            "codebook_size": kwargs["codebook_size"],
        }
    config = read_config(path)
    return {
        "sample_rate": config.sample_rate if kind == "higgs" else config.sampling_rate,
        "hop": config.hop_length,
        "codebooks": config.n_codebooks if kind == "dac" else config.num_quantizers,
        "codebook_size": config.codebook_size,
    }


def read_config(path: Path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return config.audio_encoder if config.model_type == "musicgen" else config


def read_pth(path: Path) -> dict:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        content["state_dict"], content["metadata"]["kwargs"]
    except Exception as error:
        raise UserError(
            f"--codec-weights {path} is not a plain descript-audio-codec file: {type(error).__name__}"
        ) from None
    return content


# ---------------------------------------------------------------- models


def load_codec(path: Path, device: str = "cpu") -> Codec:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # the commands show their own
    kind, format = kind_of(path), describe(path)
    if path.is_file():
        model, encode, decode = load_descript(path)
    else:
        model, encode, decode = LOADERS[kind](path)
    model.eval().requires_grad_(False).to(device)
    if kind == "dac":
        encode = in_chunks(encode, format["hop"], DAC_CHUNK["cuda" if "cuda" in device else "cpu"])

    def full_fp32():
        # torch's default for convolutions on a GPU is TF32, whose fewer digits change codes.
        return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)

    @torch.inference_mode()
    def encode_on_device(wave):
        with full_fp32():
            return encode(wave.to(device)).cpu()

    @torch.inference_mode()
    def decode_on_device(codes):
        with full_fp32():
            return decode(codes.to(device)).cpu()

    return Codec(
        name=kind,
        **format,
        max_seconds=math.inf if kind == "dac" else MAX_UNCUT_SECONDS,
        encode=encode_on_device,
        decode=decode_on_device,
    )


def load_dac(path: Path):
    from transformers import DacModel

    model = from_pretrained(DacModel, path)
    return (
        model,
        lambda wave: model.encode(wave[None, None]).audio_codes[0].T,
        lambda codes: model.decode(audio_codes=codes.T[None]).audio_values[0],
    )


def load_descript(path: Path):
    from dac import DAC

    content = read_pth(path)
    model = DAC(**content["metadata"]["kwargs"])
    model.load_state_dict(content["state_dict"])
    return (
        model,
        lambda wave: model.encode(wave[None, None])[1][0].T,
        lambda codes: model.decode(model.quantizer.from_codes(codes.T[None])[0])[0, 0],
    )


def load_encodec(path: Path):
    from transformers import EncodecModel

    config = read_config(path)
    if config.normalize or config.chunk_length_s or config.audio_channels != 1:
        # Their codes are meaningless without a scale per clip or chunk, which token models do not keep.
        raise UserError(
            f"--codec-weights {path} normalises its input, splits it into chunks or is stereo: "
            "use MusicGen's 32 kHz codec"
        )
    model = from_pretrained(EncodecModel, path, config=config, key_mapping={r"^audio_encoder\.": ""})
    bandwidth = config.target_bandwidths[-1]
    return (
        model,
        lambda wave: model.encode(wave[None, None], bandwidth=bandwidth).audio_codes[0, 0].T,
        lambda codes: model.decode(codes.T[None, None], [None]).audio_values[0, 0],
    )


def load_higgs(path: Path):
    from transformers import HiggsAudioV2TokenizerModel

    model = from_pretrained(HiggsAudioV2TokenizerModel, path)
    return (
        model,
        lambda wave: model.encode(wave[None, None]).audio_codes[0].T,
        lambda codes: model.decode(codes.T[None]).audio_values[0, 0],
    )


LOADERS = {"dac": load_dac, "encodec": load_encodec, "higgs": load_higgs}


def from_pretrained(model_class, path: Path, **kwargs):
    """Load in fp32 from safetensors; a missing tensor or wrong shape is an error instead of random weights."""
    import torch

    model, info = model_class.from_pretrained(
        path, use_safetensors=True, local_files_only=True, dtype=torch.float32, output_loading_info=True, **kwargs
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted(info["missing_keys"]) or sorted(info["mismatched_keys"])
        raise UserError(f"--codec-weights {path} lacks tensors that {model_class.__name__} needs: {names[0]}, ...")
    return model


def in_chunks(encode: Callable, hop: int, chunk: int) -> Callable:
    """Zero-pad to whole frames, then encode chunk by chunk, each with the edges of its neighbours as context."""
    import torch

    def encode_chunks(wave):
        wave = torch.nn.functional.pad(wave, (0, -wave.shape[-1] % hop))
        frames = wave.shape[-1] // hop
        codes = []
        for start in range(0, frames, chunk):
            first, last = max(0, start - DAC_OVERLAP), min(frames, start + chunk + DAC_OVERLAP)
            piece = encode(wave[first * hop : last * hop])
            codes.append(piece[start - first : start - first + chunk])
        return torch.cat(codes)

    return encode_chunks
