"""The Diffusion Buffer's weights on disk: what this project exports, and Lightning checkpoints of the official code."""

import dataclasses
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoint import write_json
from common.config import UserError
from common.runs import fresh, replace
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import FACTOR, POWER, RATE, SPEC_FLAGS, Spec

FIXED = {"sample_rate": RATE, "compression": POWER, "compression_factor": FACTOR, "window": "hann, periodic"}
NO_WEIGHTS = (".counts", ".inv_div")  # buffers of the official cumulative norm that nothing reads


def load_network(path: str, spec: Spec | None = None) -> tuple[nn.Module, Spec]:
    """A network and its spec. `spec`: what the flags say, which must agree; None: take the export's own word."""
    place = Path(path)
    if (place / "export").is_dir():
        place = place / "export"
    if (place / "model.safetensors").is_file():
        found = read_spec(place / "config.json")
        if spec:
            require_same(found, spec, path)
        return _fill(
            build_network(found.network, found.width, found.block), read_file(place / "model.safetensors"), path
        ), found
    if not place.is_file():
        raise UserError(f"--model {path} is neither an export folder nor a checkpoint file.")
    if spec is None:
        raise UserError(
            f"--model {path} is a bare checkpoint: train or convert it first, an export knows its settings."
        )
    return import_lightning(place, spec), spec


def read_spec(path: Path) -> Spec:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        wrong = [f"{name} {facts[name]!r}" for name, value in FIXED.items() if facts[name] != value]
        spec = Spec(**{name: facts[name] for name in SPEC_FLAGS})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not describe a Diffusion Buffer ({type(error).__name__}: {error}).") from None
    if wrong:
        raise UserError(f"{path} has {', '.join(wrong)}, which this code does not compute with.")
    return spec


def require_same(found: Spec, wanted: Spec, path: str) -> None:
    """A network means nothing under another diffusion or spectrum than its own."""
    differ = [
        f"--{name.replace('_', '-')} {getattr(wanted, name)} (it has {getattr(found, name)})"
        for name in SPEC_FLAGS
        if getattr(found, name) != getattr(wanted, name)
    ]
    if differ:
        raise UserError(f"--model {path} was trained otherwise: {', '.join(differ)}. Give the same flags.")


class Ignored:
    """Stands for every class and function that a pickle names, none of which is imported or called."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass


def read_file(path: Path) -> dict:
    """Safetensors, or a pickle of which nothing but tensors and plain containers is ever loaded.

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
    except Exception as error:  # torch raises whatever the damaged or foreign pickle makes it raise
        raise UserError(f"--model {path} is no plain checkpoint of tensors ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise UserError(f"--model {path} holds a {type(content).__name__}, not named weights.")
    return content


def import_lightning(path: Path, spec: Spec) -> nn.Module:
    """The official trainer's file: weights below state_dict, their average as a bare list below ema."""
    content = read_file(path)
    weights = content.get("state_dict", content)
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise UserError(f"--model {path} is no plain checkpoint of tensors.")
    weights = {re.sub(r"^(dnn\.)?(_orig_mod\.)?", "", name): value for name, value in weights.items()}
    weights = {name: value for name, value in weights.items() if not name.endswith(NO_WEIGHTS)}
    if any(".Dense_0." in name for name in weights):
        raise UserError(
            f"--model {path} embeds one time a sample (Dense_0), as sgmse and BBED do; the Diffusion Buffer needs one"
            " a frame (Conv_time): these weights cannot be used."
        )
    causal = "in_layer.weight" in weights
    first = weights.get("in_layer.weight" if causal else "all_modules.3.weight")
    if first is None:
        raise UserError(f"--model {path} holds no network of the Diffusion Buffer.")
    last = weights.get("down_layers.3.Conv_1.weight")
    found = {"network": "block_causal" if causal else "ncsnpp", "width": len(first), "phase": "start"}
    if last is not None:
        found["block"] = 32 if last.shape[-1] == 5 else 16
    require_same(dataclasses.replace(spec, **found), spec, str(path))
    network = _fill(build_network(spec.network, spec.width, spec.block), weights, path)
    average = content.get("ema", {}).get("shadow_params")
    if average is not None:
        fill_average(network, average, path)
    return network


def fill_average(network: nn.Module, average: list[torch.Tensor], path: Path) -> None:
    """The list has no names: it is in the order of the parameters, all of them or the trained ones."""
    parameters = list(network.parameters())
    trained = [p for p in parameters if p.requires_grad]
    fitting = [group for group in (parameters, trained) if [p.shape for p in group] == [a.shape for a in average]]
    if not fitting:
        raise UserError(f"--model {path}: its average has {len(average)} tensors that are not the network's.")
    with torch.no_grad():
        for parameter, value in zip(fitting[0], average, strict=True):
            parameter.copy_(value)


def _fill(network: nn.Module, weights: dict[str, torch.Tensor], path) -> nn.Module:
    wanted = network.state_dict()
    wrong = sorted(set(wanted) ^ set(weights))
    wrong = wrong or [name for name, value in wanted.items() if value.shape != weights[name].shape]
    if wrong:
        raise UserError(f"--model {path}: {len(wrong)} weights do not fit, such as {wrong[0]}.")
    network.load_state_dict(weights)
    return network


def write_export(folder: Path, network: nn.Module, spec: Spec, facts: dict) -> None:
    """export/: model.safetensors and config.json; a stream needs nothing else. Whole or absent."""
    final, draft = folder / "export", folder / ".export.tmp"
    fresh(draft)
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    save_file(weights, draft / "model.safetensors")
    write_json(draft / "config.json", {"model_type": "diffusion_buffer"} | facts | FIXED | dataclasses.asdict(spec))
    replace(draft, final)
