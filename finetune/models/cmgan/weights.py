"""CMGAN's weights on disk: the published checkpoint, exports of this project, and checkpoints of a run."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.checkpoint import allow_list, write_json
from common.errors import UserError
from common.runs import empty_folder, replace_folder
from models.cmgan import signal
from models.cmgan.network import Discriminator, TSCNet

# torch's newer names for the parts of a spectrally normalised weight -> the published names
NEWER = {"original": "weight_orig", "0._u": "weight_u", "0._v": "weight_v"}


def load_networks(path: str) -> tuple[TSCNet, Discriminator | None]:
    """The generator and, if there is one, its discriminator; their widths follow from the weights.

    `path`: a bare generator state_dict as published (.pt, .safetensors or without a suffix), an export folder, a
    checkpoint of a run, or a run folder, whose export is loaded.
    """
    place = Path(path)
    if (place / "export").is_dir():
        place = place / "export"
    if place.is_file():
        return build_generator(read_file(place), place), None
    if (place / "generator.safetensors").is_file():
        generator = build_generator(read_file(place / "generator.safetensors"), place)
        file = place / "discriminator.safetensors"
        return generator, build_discriminator(read_file(file), file) if file.is_file() else None
    if (place / "g").is_dir() and (place / "d").is_dir():
        weights = [_engine_weights(place / name) for name in ("g", "d")]
        return build_generator(weights[0], place), build_discriminator(weights[1], place)
    raise UserError(f"--model {path} is neither a checkpoint file nor a folder with CMGAN's weights.")


def _engine_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in an engine's checkpoint, without the prefix of the wrapper around the model."""
    import deepspeed  # noqa: F401  allow_list() then allows the classes of its checkpoints

    (file,) = folder.glob("*model_states.pt")
    allow_list()
    weights = torch.load(file, map_location="cpu", weights_only=True)["module"]
    return {name.removeprefix("model."): value for name, value in weights.items()}


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """A state_dict from safetensors or a pickle, from which only tensors are ever loaded."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {path}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # torch raises whatever the damaged or foreign pickle makes it raise
        raise UserError(f"--model {path} is not a plain checkpoint of tensors ({type(error).__name__}).") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"--model {path} is not a bare state_dict; save only the generator's state_dict.")
    return content


def published_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without the prefix of DistributedDataParallel, and with the published names of spectral norm."""
    renamed = {}
    for name, value in weights.items():
        name = re.sub(
            r"parametrizations\.weight\.(original|0\._u|0\._v)$",
            lambda match: NEWER[match[1]],
            name.removeprefix("module."),
        )
        renamed[name] = value
    return renamed


def build_generator(weights: dict[str, torch.Tensor], path: Path) -> TSCNet:
    weights = published_names(weights)
    first = weights.get("dense_encoder.conv_1.0.weight")
    return _fill(TSCNet(len(first)) if first is not None else TSCNet(), weights, path)


def build_discriminator(weights: dict[str, torch.Tensor], path: Path) -> Discriminator:
    weights = published_names(weights)
    first = weights.get("layers.0.weight_orig")
    return _fill(Discriminator(len(first)) if first is not None else Discriminator(), weights, path)


def _fill(model, weights: dict[str, torch.Tensor], path: Path):
    wanted = model.state_dict()
    wrong = sorted(set(wanted) ^ set(weights))
    wrong = wrong or [name for name, value in wanted.items() if value.shape != weights[name].shape]
    if wrong:
        raise UserError(
            f"--model {path} is not a CMGAN {type(model).__name__}: {len(wrong)} weights do not fit, for example"
            f" {wrong[0]}."
        )
    model.load_state_dict(weights)
    return model


def write_export(folder: Path, generator: dict, discriminator: dict, facts: dict) -> None:
    """Writes a folder, whole or absent: safetensors and generator.pt under the published names, and config.json."""
    draft = folder.with_name(f".{folder.name}.tmp")
    empty_folder(draft)
    generator = {name: value.detach().cpu().contiguous() for name, value in generator.items()}
    save_file(generator, draft / "generator.safetensors")
    save_file({n: v.detach().cpu().contiguous() for n, v in discriminator.items()}, draft / "discriminator.safetensors")
    torch.save(generator, draft / "generator.pt")
    config = {
        "model_type": "cmgan",
        "sample_rate": signal.RATE,
        "n_fft": signal.N_FFT,
        "hop": signal.HOP,
        "window": "hamming, periodic",
        "compression": signal.POWER,
        "normalisation": "noisy to unit power",
        "channels": len(generator["dense_encoder.conv_1.0.weight"]),
    }
    write_json(draft / "config.json", config | facts)
    replace_folder(draft, folder)
