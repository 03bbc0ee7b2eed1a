"""The Diffusion Buffer's weights on disk: exports of this project, and Lightning checkpoints of the official code."""

import dataclasses
import json
import math
import re
from pathlib import Path

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
from models.diffusion_buffer.signal import FACTOR, POWER, RATE, SPEC_NAMES, SPECS, Spec, build_spec

FIXED = {"sample_rate": RATE, "compression": POWER, "compression_factor": FACTOR, "window": "hann, periodic"}
UNUSED = (".counts", ".inv_div")  # buffers of the official cumulative norm that nothing reads


def load_network(path: str, spec: str = "") -> tuple[nn.Module, Spec]:
    """A trained network and its spec. `spec`: --spec, for what the model does not say of itself; it may only change how
    the network is used (FREE).

    `path`: an export, a run (its export, or without one its best checkpoint), a checkpoint of a run, or a Lightning
    file of the official code."""
    trained, weights, average = _read_model(path)
    found = _use(trained, spec, path)
    network = _fill(build_network(found.network, found.width, found.block), weights, path)
    if average is not None:
        fill_ema(network, average, Path(path))
    return network, found


def spec_of(config) -> Spec:
    """The spec that --model and --spec describe."""
    return _use(_read_model(config.model)[0] if config.model else {}, config.spec, config.model)


def _use(trained: dict, spec: str, path: str) -> Spec:
    """The spec of a network with the settings `trained`, used as --spec says. Refuses to change what its weights
    depend on: its outputs would be meaningless."""
    given = read_settings(spec)
    wrong = [
        f"{name} {given[name]} (it has {trained[name]})"
        for name in SPEC_NAMES
        if name in given and name in trained and name not in FREE and given[name] != trained[name]
    ]
    if wrong:
        raise UserError(f"--model {path} was trained with other settings than --spec: {', '.join(wrong)}.")
    return build_spec(trained | given)


def read_settings(text: str) -> dict:
    """The settings that --spec names: a published spec, a JSON file with some settings or of an export, or such JSON
    itself, as a run's config.json holds it."""
    if not text:
        return {}
    if text in SPECS:
        return dataclasses.asdict(SPECS[text])
    try:
        settings = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--spec {text} is neither one of {', '.join(SPECS)} nor a JSON file ({type(error).__name__})."
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"--spec {text} does not hold a JSON object.")
    return _exported(settings, text) if "model_type" in settings else settings


def _read_model(path: str) -> tuple[dict, dict[str, torch.Tensor], list | None]:
    """What a model says of its spec, its weights, and the official code's average of them."""
    folder = Path(path)
    if (folder / "export").is_dir():
        folder = folder / "export"
    elif entries := read_index(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []:
        scored = [entry for entry in entries if entry["score"] is not None and math.isfinite(entry["score"])]
        chosen = min(scored, key=lambda entry: entry["score"]) if scored else entries[-1]
        folder = folder / "checkpoints" / chosen["name"]
    if (folder / "manifest.json").is_file():
        return *_read_checkpoint(folder), None
    if (folder / "model.safetensors").is_file():
        try:
            facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / 'config.json'} cannot be read ({type(error).__name__}).") from None
        return _exported(facts, str(folder / "config.json")), read_file(folder / "model.safetensors"), None
    if not folder.is_file():
        raise UserError(f"--model {path} is neither an export folder nor a checkpoint file.")
    weights, content = read_lightning(folder)
    return _settings(weights, content, folder), weights, content.get("ema", {}).get("shadow_params")


def _read_checkpoint(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Of a run's checkpoint: the averaged weights, or the trained ones of a run without an average."""
    flags = trained_flags(read_record(folder))
    if not flags.get("spec"):
        raise UserError(f"--model {folder} is a checkpoint whose run has no config.json: it has to stay in its run.")
    spec = build_spec(read_settings(flags["spec"]))
    # The frozen frequencies of the times are not in a checkpoint: they are always the same.
    network = build_network(spec.network, spec.width, spec.block)
    frozen = {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}
    return dataclasses.asdict(spec), frozen | masters(folder, ema=bool(flags["ema"]))


def _exported(facts: dict, path: str) -> dict:
    """The settings in an export's config.json."""
    if facts.get("model_type") != "diffusion_buffer":
        raise UserError(f"{path} does not describe a Diffusion Buffer.")
    wrong = [f"{name} {facts.get(name)!r}" for name, value in FIXED.items() if facts.get(name) != value]
    if wrong:
        raise UserError(f"{path} has {', '.join(wrong)}, which this code does not support.")
    settings = {"stream": "own"} | {name: facts[name] for name in SPEC_NAMES if name in facts}  # old exports have none
    missing = set(SPEC_NAMES) - set(settings)
    if missing:
        raise UserError(f"{path} does not describe a Diffusion Buffer: it has no {min(missing)}.")
    return settings


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


def _settings(weights: dict[str, torch.Tensor], content: dict, path: Path) -> dict:
    """What an official file says of its spec: its network, and its trainer's arguments."""
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
