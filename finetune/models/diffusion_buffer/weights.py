"""The Diffusion Buffer's weights on disk: exports of this project, and Lightning checkpoints of the official code."""

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
from common.runs import empty_folder, replace_folder
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import FACTOR, POWER, RATE, SPEC_FLAGS, Spec

FIXED = {"sample_rate": RATE, "compression": POWER, "compression_factor": FACTOR, "window": "hann, periodic"}
UNUSED = (".counts", ".inv_div")  # buffers of the official cumulative norm that nothing reads


def load_network(path: str, spec: Spec | None = None) -> tuple[nn.Module, Spec]:
    """A network and its spec. `spec`: what the flags ask for, which must agree; None: use what the export says."""
    folder = Path(path)
    if (folder / "export").is_dir():
        folder = folder / "export"
    if (folder / "model.safetensors").is_file():
        exported = read_spec(folder / "config.json")
        if spec:
            require_same(exported, spec, path)
        network = build_network(exported.network, exported.width, exported.block)
        return _fill(network, read_file(folder / "model.safetensors"), path), exported
    if not folder.is_file():
        raise UserError(f"--model {path} is neither an export folder nor a checkpoint file.")
    if spec is None:
        raise UserError(
            f"--model {path} is a bare checkpoint without its settings: fine-tune it first and use the export."
        )
    return import_lightning(folder, spec), spec


def read_spec(path: Path) -> Spec:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        wrong = [f"{name} {facts[name]!r}" for name, value in FIXED.items() if facts[name] != value]
        spec = Spec(**{name: facts[name] for name in SPEC_FLAGS})
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
    causal = "in_layer.weight" in weights
    first = weights.get("in_layer.weight" if causal else "all_modules.3.weight")
    if first is None:
        raise UserError(f"--model {path} does not hold a Diffusion Buffer network.")
    last = weights.get("down_layers.3.Conv_1.weight")
    shape = {"network": "block_causal" if causal else "ncsnpp", "width": len(first), "phase": "start"}
    if last is not None:
        shape["block"] = 32 if last.shape[-1] == 5 else 16
    require_same(dataclasses.replace(spec, **shape), spec, str(path))
    network = _fill(build_network(spec.network, spec.width, spec.block), weights, path)
    ema = content.get("ema", {}).get("shadow_params")
    if ema is not None:
        fill_ema(network, ema, path)
    return network


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
