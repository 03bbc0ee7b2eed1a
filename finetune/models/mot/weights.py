"""The exported adapter: all music weights and a description. It reloads into a fresh Llama, without MusicGen."""

import dataclasses
import hashlib
import importlib.metadata
import json
from pathlib import Path

import torch

from common import hub, runs
from common.checkpoint import write_json
from common.codec import FILE, codec_identity, refuse_other_codec
from common.engine import full_weights, gathered
from common.errors import UserError
from common.runtime import Process, on_main
from models.mot.build import load_llama
from models.mot.layout import Layout
from models.mot.network import AudioLayer, Expert, MoTLlama

FORMAT = 2
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def base_fingerprint(llama) -> str:
    """A hash of the sizes and of some weights as bf16: it tells Llamas apart, whatever precision they are loaded in.

    Instruct and base models differ in the norm and in embedding rows. Every rank must call it: ZeRO-3 gathers.
    """
    sizes = {name: getattr(llama.config, name) for name in SIZES}
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    embed, norm = llama.model.embed_tokens, llama.model.norm
    with gathered([embed.weight, norm.weight]), torch.no_grad():
        for weight in (embed.weight[:: max(1, len(embed.weight) // 64)], norm.weight):
            digest.update(weight.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- writing ---------------------------------------------------------------------------------------------------


def adapter_weights(model, keep: bool = True) -> dict[str, torch.Tensor]:
    """The whole adapter in fp32: master weights, and parameters that were frozen. Every rank must call it."""
    weights = full_weights(model, keep=keep)
    for name, parameter in model.adapter().items():
        if not parameter.requires_grad:
            with gathered([parameter]):
                if keep:
                    weights[name] = parameter.detach().float().cpu().clone()
    return weights


def write_adapter(final: Path, weights: dict[str, torch.Tensor], description: dict) -> None:
    """Writes an adapter folder, complete or not at all. `description`: see describe()."""
    from safetensors.torch import save_file

    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise UserError(f"{broken[0]} is not finite: nothing is exported; earlier checkpoints are intact.")
    draft = final.with_name(f".{final.name}.tmp")
    runs.empty_folder(draft)
    save_file({name: value.contiguous() for name, value in weights.items()}, draft / "adapter_model.safetensors")
    write_json(draft / "adapter_config.json", description)
    write_json(draft / FILE, codec_identity(description["codec"]))
    runs.replace_folder(draft, final)


def describe(model: MoTLlama, base: str, fingerprint: str, tokens: dict, training: dict) -> dict:
    """What adapter_config.json holds. `tokens`: the info of the dataset; `training`: flags worth keeping."""
    layout = model.layout
    return {
        "format": FORMAT,
        "kind": "llama-mot",
        "base_model_name_or_path": base,
        "base_fingerprint": fingerprint,
        "vocab_size": layout.vocab,
        "layout": dataclasses.asdict(layout),
        "special_ids": {"audio_bos": layout.bos, "audio_eos": layout.eos},
        "expert": dataclasses.asdict(model.expert),
        "untie": model.untie,
        "codec": {key: tokens.get(key) for key in ("codec", "weights", "weights_sha256", "sample_rate", "hop")},
        "training": training,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")},
    }


def check_codec(tokens, adapter: str, process: Process) -> None:
    """Refuses codes of another codec than MusicGen's, or than that of the adapter which is trained further."""
    expected, who = {"name": "encodec", "sample_rate": 32000, "hop": 640}, "Llama MoT"
    if adapter:
        expected, who = codec_identity(read_description(Path(adapter))["codec"]), f"--adapter {adapter}"
    on_main(lambda: refuse_other_codec(tokens, expected, who), process)


# ---- reading ---------------------------------------------------------------------------------------------------


def read_description(folder: Path) -> dict:
    try:
        description = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        known = description["kind"] == "llama-mot" and description["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} has no readable adapter_config.json of llama_mot.py.") from None
    if not known:
        raise UserError(
            f"{folder} holds an adapter of another kind or format ({description['kind']}, {description['format']})."
        )
    return description


def load_adapter(
    folder: Path, base: str | None, dtype: torch.dtype, llama=None, revision: str = ""
) -> tuple[MoTLlama, dict]:
    """Llama with the adapter, and the adapter's description. A base that it was not trained on is refused.

    `base`, `revision`: other ones than those of the training.
    """
    description = read_description(folder)
    revision = revision or ("" if base else description.get("revision") or "")
    base = base or description["base_model_name_or_path"]
    if not llama:
        hub.fetch(base, None, revision)
        llama = load_llama(base, dtype)
    fingerprint = base_fingerprint(llama)
    if fingerprint != description["base_fingerprint"]:
        raise UserError(
            f"--model {base} is not the Llama that {folder} was trained on (fingerprint {fingerprint}, adapter"
            f" {description['base_fingerprint']}, trained on {description['base_model_name_or_path']})."
        )
    expert = _from_fields(Expert, description["expert"] | {"layer_map": tuple(description["expert"]["layer_map"])})
    layers = [AudioLayer(llama.config, expert, description["untie"]) for _ in llama.model.layers]
    model = MoTLlama(llama, _from_fields(Layout, description["layout"]), expert, description["untie"], layers)
    fill_adapter(model, folder)
    for parameter in model.adapter().values():
        parameter.data = parameter.data.to(dtype)  # parameters only: the rotary frequencies stay fp32
    return model.eval(), description


def _from_fields(kind: type, values: dict):
    """Adapters of older versions also name ids and gains that are gone; with those their tensors do not fit."""
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


def fill_adapter(model: MoTLlama, folder: Path) -> None:
    """Copies an exported adapter into a model; names and shapes must be exactly the model's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}/adapter_model.safetensors cannot be read: {error}") from None
    adapter = model.adapter()
    odd = sorted(set(weights) ^ set(adapter))
    if odd:
        raise UserError(f"{folder} does not fit this model: {len(odd)} tensors differ by name, such as {odd[0]}.")
    for name, parameter in adapter.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if tuple(weights[name].shape) != shape:
            raise UserError(f"{folder}: {name} has shape {tuple(weights[name].shape)}, this model needs {shape}.")
        with gathered([parameter], write=True), torch.no_grad():
            parameter.copy_(weights[name])
