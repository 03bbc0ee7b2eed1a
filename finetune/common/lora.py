"""LoRA on explicitly named modules, where a group that matches too few is an error; quantised bases; the bare model."""

import json
import re
from pathlib import Path

from common import runs
from common.checkpoint import write_json
from common.errors import UserError


def resolve_groups(model, groups: dict[str, tuple[str, int]], wanted: list[str]) -> dict[str, list[str]]:
    """The module names of each group. `groups`: name -> (full-match pattern, how many modules it must match).

    PEFT alone complains only if nothing matches at all: a typo next to a correct name passes silently.
    """
    if not wanted:
        raise UserError(f"no LoRA group is given; the groups are {', '.join(groups)}.")
    found = {}
    for group in wanted:
        if group not in groups:
            raise UserError(f"unknown LoRA group {group!r}; the groups are {', '.join(groups)}.")
        pattern, expected = groups[group]
        found[group] = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
        if len(found[group]) != expected:
            raise UserError(
                f"LoRA group {group}: found {len(found[group])}, expected {expected} modules; those of this model are"
                " named differently."
            )
    return found


def add_lora(model, found: dict[str, list[str]], rank: int, seed: int, **options):
    """Wraps the named modules with PEFT; returns the PEFT model. Every rank draws the same initial matrices.

    `found`: as resolve_groups() returns it; `options`: further settings of PEFT's LoraConfig.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    targets = [name for hits in found.values() for name in hits]
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, target_modules=targets, **options)
    # PEFT would make the matrices fp32. Without ZeRO-3 DeepSpeed casts them to the precision of the run, with ZeRO-3 it
    # does not: there the update would be computed in fp32, with a quarter more activation memory.
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    wrapped = peft_model.targeted_module_names  # PEFT also takes modules whose names only end in a target
    assert sorted(wrapped) == sorted(targets), f"PEFT wrapped {len(wrapped)} modules, not the {len(targets)} named ones"
    return peft_model


def train_whole(model, modules: list[str]) -> None:
    """Trains the weights of these modules of the base besides LoRA; write_adapter() saves them as PEFT does.

    PEFT itself would train a copy of each and keep the original: twice the memory, and under ZeRO-3 an unsharded one.
    """
    for name in modules:
        model.get_base_model().get_submodule(name).weight.requires_grad_(True)
    model.peft_config["default"].modules_to_save = list(modules)


def base_model(model):
    """The model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def quantization_config(bits: str, dtype, keep: list[str]):
    """How bitsandbytes loads a frozen base: `bits` none (None), 8bit or 4bit; `keep`: modules that stay in full.

    The loss reads the weight of a head itself, so heads must be among them.
    """
    if bits == "none":
        return None
    import bitsandbytes.nn.modules as modules
    from transformers import BitsAndBytesConfig

    # On CPUs with bf16 instructions it repacks 4-bit weights in the first evaluation (0.50.2), which fails for widths
    # that are no multiple of 64, and replaces the weights that training goes on with.
    modules.has_avx512bf16 = lambda: False
    if bits == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=keep
    )


def read_adapter(folder: Path) -> dict:
    """The adapter_config.json of a PEFT adapter."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"--adapter {folder} holds no readable adapter_config.json: name an export folder.") from None
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UserError(f"--adapter {folder}: adapter_config.json names no base model; export the run again.")
    return config


def read_lora(folder: Path) -> dict:
    """The tensors of a PEFT adapter on disk."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    try:
        return load_file(file)
    except FileNotFoundError:  # PEFT would ask the hub for it
        raise UserError(f"--adapter {folder} has no {file.name}: export the run again (./launch.sh convert).") from None
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}): export the run again (./launch.sh convert).") from None


def load_lora(model, folder: Path):
    """The model with a PEFT adapter from disk."""
    from peft import PeftModel

    read_lora(folder)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (ValueError, RuntimeError, KeyError) as error:  # other names, other sizes
        reason = str(error).splitlines()[0][:120]
        raise UserError(
            f"--adapter {folder} does not fit this base model; was it trained on another? ({reason})"
        ) from None


def write_adapter(model, weights: dict, folder: Path, base: str, files: dict, revision: str | None = None) -> None:
    """A PEFT adapter folder with whole fp32 weights, complete or absent; `files`: JSON files to write besides."""
    from safetensors.torch import load_file, save_file

    draft = folder.with_name(f".{folder.name}.tmp")
    model.peft_config["default"].base_model_name_or_path = base
    model.peft_config["default"].revision = revision
    runs.empty_folder(draft)
    model.save_pretrained(str(draft), state_dict=weights, save_embedding_layers=False)
    whole = [f"base_model.model.{name}.weight" for name in model.peft_config["default"].modules_to_save or ()]
    whole = {name: weights[name] for name in whole if name in weights}
    if whole:  # of train_whole(): PEFT writes only what it has wrapped itself
        file = draft / "adapter_model.safetensors"
        save_file(load_file(file) | whole, file, metadata={"format": "pt"})
    for name, content in files.items():
        write_json(draft / name, content)
    runs.replace_folder(draft, folder)
