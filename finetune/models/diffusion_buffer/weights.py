"""The Diffusion Buffer's weights on disk: exports of this project, and Lightning checkpoints of the official code."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from common.artifacts import read_record, trained_flags
from common.checkpoint import masters, read_index, write_json
from common.errors import UserError
from common.runs import empty_folder, replace_folder
from common.runtime import say
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import FACTOR, POWER, RATE, SPEC_FLAGS, Spec, spec_of

FIXED = {"sample_rate": RATE, "compression": POWER, "compression_factor": FACTOR, "window": "hann, periodic"}
UNUSED = (".counts", ".inv_div")  # buffers of the official cumulative norm that nothing reads


def load_network(path: str, spec: Spec | None = None) -> tuple[nn.Module, Spec]:
    """A network and its spec. `spec`: what the flags ask for, which must agree; None: what the model itself says.

    `path`: an export, a run (its export, or without one its best checkpoint), a checkpoint of a run, or a file of the
    official code, which needs a spec."""
    folder = Path(path)
    if (folder / "export").is_dir():
        folder = folder / "export"
    elif entries := read_index(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []:
        scored = [entry for entry in entries if entry["score"] is not None and math.isfinite(entry["score"])]
        chosen = min(scored, key=lambda entry: entry["score"]) if scored else entries[-1]
        folder = folder / "checkpoints" / chosen["name"]
    if (folder / "manifest.json").is_file():
        return load_checkpoint(folder, spec)
    if (folder / "model.safetensors").is_file():
        exported = read_spec(folder / "config.json")
        if spec:
            require_same(exported, spec, path)
        network = build_network(exported.network, exported.width, exported.block)
        return _fill(network, read_file(folder / "model.safetensors"), path), exported
    if not folder.is_file():
        raise UserError(f"--model {path} is neither an export folder nor a checkpoint file.")
    assert spec, "a file of the official code has no spec of its own"
    return import_lightning(folder, spec), spec


def open_model(path: str, config_class, given: dict) -> tuple[nn.Module, Spec]:
    """A network to use, and its spec with the flags that the user has `given`; those that would give its numbers
    another meaning are refused. A file of the official code has what it does not tell from the recipe's defaults."""
    for name in given:
        if name not in SPEC_FLAGS:
            raise UserError(f"--{name.replace('_', '-')} is a flag for training, not for a trained network.")
    if Path(path).is_file():
        return load_network(path, spec_of(config_class(**official_settings(Path(path)) | given)))
    network, trained = load_network(path)
    spec = spec_of(config_class(**dataclasses.asdict(trained) | given))
    require_same(dataclasses.replace(trained, **{name: getattr(spec, name) for name in FREE}), spec, path)
    return network, spec


def load_checkpoint(folder: Path, spec: Spec | None) -> tuple[nn.Module, Spec]:
    """The averaged weights of a run's checkpoint, or the trained ones of a run without an average, and its spec."""
    flags = trained_flags(read_record(folder))
    if not flags:
        raise UserError(f"--model {folder} is a checkpoint whose run has no config.json: it has to stay in its run.")
    trained = spec_of(SimpleNamespace(**{"stream": "own"} | flags))
    if spec:
        require_same(trained, spec, str(folder))
    network = build_network(trained.network, trained.width, trained.block)
    weights = masters(folder, ema=bool(flags["ema"]))
    # The frozen frequencies of the times are not in a checkpoint: they are always the same.
    frozen = {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}
    return _fill(network, frozen | weights, folder), trained


def read_spec(path: Path) -> Spec:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        wrong = [f"{name} {facts[name]!r}" for name, value in FIXED.items() if facts[name] != value]
        spec = Spec(**{name: facts[name] for name in SPEC_FLAGS if name != "stream" or name in facts})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not describe a Diffusion Buffer ({type(error).__name__}: {error}).") from None
    if wrong:
        raise UserError(f"{path} has {', '.join(wrong)}, which this code does not support.")
    return spec


def require_same(trained: Spec, wanted: Spec, path: str) -> None:
    """Refuses flags that differ from what the network was trained with: its outputs would be meaningless."""
    differences = [
        f"--{name.replace('_', '-')} {getattr(wanted, name)} (it has {getattr(trained, name)})"
        for name in SPEC_FLAGS
        if getattr(trained, name) != getattr(wanted, name)
    ]
    if differences:
        raise UserError(
            f"--model {path} was trained with other settings: {', '.join(differences)}. Use the same flags."
        )


class Ignored:
    """Stands in for every class and function that a pickle names; none of them is imported or called."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass


def read_file(path: Path) -> dict:
    """Named tensors from a safetensors file or a pickle. No code in a pickle ever runs.

    Lightning's files also hold the trainer's arguments, some of which are classes of the official code.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Ignored, name) for name in foreign]):
            content = torch.load(path, "cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {path}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # a damaged or foreign pickle can make torch raise anything
        raise UserError(f"--model {path} is not a plain checkpoint of tensors ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise UserError(f"--model {path} holds a {type(content).__name__}, not named weights.")
    return content


def import_lightning(path: Path, spec: Spec) -> nn.Module:
    """The network of an official checkpoint: weights in state_dict, their EMA as an unnamed list in ema."""
    weights, content = read_lightning(path)
    stated = {name: value for name, value in _settings(weights, content, path).items() if name not in FREE}
    require_same(dataclasses.replace(spec, **stated), spec, str(path))
    network = _fill(build_network(spec.network, spec.width, spec.block), weights, path)
    ema = content.get("ema", {}).get("shadow_params")
    if ema is not None:
        fill_ema(network, ema, path)
    return network


def read_lightning(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights of an official checkpoint under the names of network.py, and all that the file holds."""
    content = read_file(path)
    weights = content.get("state_dict", content)
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise UserError(f"--model {path} is not a plain checkpoint of tensors.")
    weights = {re.sub(r"^(dnn\.)?(_orig_mod\.)?", "", name): value for name, value in weights.items()}
    weights = {name: value for name, value in weights.items() if not name.endswith(UNUSED)}
    if any(".Dense_0." in name for name in weights):
        raise UserError(
            f"--model {path} embeds one diffusion time per sound (Dense_0), as sgmse and BBED do; the Diffusion Buffer"
            " needs one per frame (Conv_time): these weights cannot be used."
        )
    return weights, content


# What the official trainer calls the settings that it saves with the weights, and those that only one value fits.
OFFICIAL = {
    "n_fft": ("n_fft", int),
    "hop_length": ("hop", int),
    "num_frames": ("frames", int),
    "diff_buffer_length_inference": ("buffer", int),
    "theta": ("sde_c", float),
    "k": ("sde_k", float),
    "t_eps": ("t_eps", float),
    "T_sampling": ("t_max", float),
    "loss_type": ("loss", {"mse": "dsm", "onestep": "dp"}.__getitem__),
    "output_scale": ("output_scale", {"time": "time", "sigma": "sigma", "no": "none"}.__getitem__),
}
ONLY = {"sde": "bbed", "window": "hann", "transform_type": "exponent", "spec_factor": FACTOR,
        "spec_abs_exponent": POWER, "fs": RATE}  # fmt: skip
FREE = ("frames", "buffer", "t_max", "reverse_start", "stream")  # a network can be used with other values of these


def official_settings(path: Path) -> dict:
    """The flags of an official checkpoint, as far as it tells them: its network and its trainer's arguments."""
    return _settings(*read_lightning(path), path)


def _settings(weights: dict[str, torch.Tensor], content: dict, path: Path) -> dict:
    causal = "in_layer.weight" in weights
    first = weights.get("in_layer.weight" if causal else "all_modules.3.weight")
    if first is None:
        raise UserError(f"--model {path} does not hold a Diffusion Buffer network.")
    large = any(name.startswith("all_modules.36.") for name in weights)
    network = "block_causal" if causal else "ncsnpp_large" if large else "ncsnpp"
    settings = {"network": network, "width": len(first), "phase": "start", "stream": "official"}
    if causal and "down_layers.3.Conv_1.weight" in weights:
        settings["block"] = 32 if weights["down_layers.3.Conv_1.weight"].shape[-1] == 5 else 16
    stated = content.get("hyper_parameters")
    stated = stated if isinstance(stated, dict) else {}
    for name, value in ONLY.items():
        if stated.get(name, value) != value:
            raise UserError(f"--model {path} was trained with {name} {stated[name]}; only {value} is supported.")
    for name, (ours, convert) in OFFICIAL.items():
        if name in stated:
            try:
                settings[ours] = convert(stated[name])
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"--model {path} was trained with {name} {stated[name]}, which is not supported."
                ) from None
    if settings.get("output_scale") == "time":
        settings["context_time"] = 1.0  # the official code sets it by accident, in training and when it enhances
    if stated.get("normalize", "not") != "not":
        say(f"warning: {path} was trained on recordings divided by their peak, which a stream does not know in advance:"
            " give it recordings with a peak of 1")  # fmt: skip
    return settings


def fill_ema(network: nn.Module, ema: list[torch.Tensor], path: Path) -> None:
    """Copies the EMA weights into the network. The list has no names: it is in the order of the parameters, either all
    of them or only the trained ones."""
    parameters = list(network.parameters())
    trained = [p for p in parameters if p.requires_grad]
    fitting = [group for group in (parameters, trained) if [p.shape for p in group] == [e.shape for e in ema]]
    if not fitting:
        raise UserError(f"--model {path}: its EMA has {len(ema)} tensors, which do not match the network's.")
    with torch.no_grad():
        for parameter, value in zip(fitting[0], ema, strict=True):
            parameter.copy_(value)


def _fill(network: nn.Module, weights: dict[str, torch.Tensor], path) -> nn.Module:
    expected = network.state_dict()
    wrong = sorted(set(expected) ^ set(weights))
    wrong = wrong or [name for name, value in expected.items() if value.shape != weights[name].shape]
    if wrong:
        raise UserError(f"--model {path}: {len(wrong)} weights do not fit, such as {wrong[0]}.")
    network.load_state_dict(weights)
    return network


def write_export(folder: Path, network: nn.Module, spec: Spec, facts: dict) -> None:
    """Writes a folder, complete or not at all: model.safetensors and config.json, which is all that a stream needs."""
    draft = folder.with_name(f".{folder.name}.tmp")
    empty_folder(draft)
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    save_file(weights, draft / "model.safetensors")
    write_json(draft / "config.json", {"model_type": "diffusion_buffer"} | facts | FIXED | dataclasses.asdict(spec))
    replace_folder(draft, folder)
