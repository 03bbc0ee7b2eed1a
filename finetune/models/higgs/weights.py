"""Weights of Higgs Audio v2: loading, what a preset trains, folders in the native format."""

import json
import re
from pathlib import Path

import torch

from common import lora, runs
from common.checkpoint import write_json
from common.config import UserError
from common.hub import load_pretrained
from common.runtime import say

CODEC = "bosonai/higgs-audio-v2-tokenizer"
LAST_ORIGINAL = "10840182ca4ad5d9d9113b60b9bb3c1ef1ba3f84"
TEXT_HEAD = "text_lm_head.weight"
PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
)


# ---- loading ---------------------------------------------------------------------------------------------------


def load_higgs(path: str, revision: str, dtype: torch.dtype, text_head: bool = False, **options):
    """The model from a hub id or a local folder in the native format."""
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    refuse_original_format(path, revision)
    if text_head:
        options["use_text_head"] = True  # config.json does not say that there is one
    return load_pretrained(
        HiggsAudioV2ForConditionalGeneration, HiggsAudioV2Config, path, dtype, revision=revision or None, **options
    )


def refuse_original_format(path: str, revision: str) -> None:
    found = find_file(path, "config.json", revision)
    if found and json.loads(found.read_text(encoding="utf-8")).get("model_type") == "higgs_audio":
        raise UserError(
            f"--model {path} is in the original 'higgs_audio' format; take today's revision of"
            f" bosonai/higgs-audio-v2-generation-3B-base (native since April 2026; {LAST_ORIGINAL[:8]} was the last"
            " original one)."
        )


def load_tokenizer(path: str, revision: str):
    from transformers import AutoTokenizer

    local = Path(path).is_dir()
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or None, local_files_only=local)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path} has no usable tokenizer ({str(error).splitlines()[0]}).") from None


def find_file(path: str, name: str, revision: str = "") -> Path | None:
    """A file of a folder or of a hub id; None where there is none."""
    if Path(path).is_dir():
        return Path(path, name) if Path(path, name).is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(path, name, revision=revision or None, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None  # loading says why
    return Path(found) if found else None


def codec_of(path: str, revision: str) -> str | None:
    """Folder or hub id of the codec that the model's processor names."""
    found = find_file(path, "processor_config.json", revision)
    named = json.loads(found.read_text(encoding="utf-8")).get("audio_tokenizer") if found else None
    return named["audio_tokenizer_name_or_path"] if isinstance(named, dict) else named


def check_codec(tokens, path: str, revision: str) -> None:
    """Refuses codes of another codec than the model's: by its weights where both are here, else by its name."""
    import hashlib

    named = codec_of(path, revision)
    if not named:
        return
    files = sorted(Path(named).glob("*.safetensors")) if Path(named).is_dir() else []
    if files and tokens.info.get("weights_sha256"):
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.read_bytes())
        if digest.hexdigest() != tokens.info["weights_sha256"]:
            raise UserError(
                f"{tokens.folder} was encoded with other codec weights ({tokens.info['weights']}) than the model's"
                f" ({named}): encode the audio again with the model's codec."
            )
    elif (tokens.info.get("weights") or "").rpartition("/")[2] != named.rpartition("/")[2]:
        say(f"warning: {tokens.folder} names the codec {tokens.info.get('weights')}, the model names {named}")


# ---- what is trained -------------------------------------------------------------------------------------------

LORA_PRESETS = {"attn": ["attn"], "attn+audio": ["attn", "audio"], "all": ["attn", "audio", "text"]}
FULL_PRESETS = {
    "audio_path": ["audio", "io"],
    "audio_path+attn": ["audio", "io", "attn"],
    "full": ["audio", "io", "attn", "text", "norm"],
}
EMBEDDING = "model.embed_audio_tokens.embed_audio_tokens"


def lora_groups(config, text_loss: bool) -> dict[str, tuple[str, int]]:
    """Group name -> pattern on module names and how many modules it must match. A bare `gate_proj` would match both
    feed-forward paths."""
    layers, mlp = config.num_hidden_layers, r"(gate|up|down)_proj"
    text = layers if text_loss else layers - 1  # no text position is scored, so the last layer's text path is idle
    numbers = "|".join(map(str, range(text))) or "none"
    return {
        "attn": (r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", 4 * layers),
        "audio": (rf"model\.layers\.\d+\.audio_mlp\.{mlp}", 3 * layers),
        "text": (rf"model\.layers\.({numbers})\.mlp\.{mlp}", 3 * text),
        "head": (r"audio_lm_head", 1),
        # The whole name: `embed_audio_tokens` alone is also its parent, and trains nothing.
        "embedding": (re.escape(EMBEDDING), 1),
    }


def full_groups(config, text_loss: bool) -> dict[str, tuple[str, int]]:
    """The same for parameters: group name -> pattern and how many it must match."""
    layers, mlp = config.num_hidden_layers, r"(gate|up|down)_proj\.weight"
    text = layers if text_loss else layers - 1
    numbers = "|".join(map(str, range(text))) or "none"
    return {
        "attn": (r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj\.weight", 4 * layers),
        "audio": (
            rf"model\.layers\.\d+\.(audio_mlp\.{mlp}|audio_(input|post_attention)_layernorm\.weight)",
            5 * layers,
        ),
        "io": (rf"{re.escape(EMBEDDING)}\.weight|audio_lm_head\.weight", 2),
        "text": (
            rf"model\.layers\.(({numbers})\.(mlp\.{mlp}|post_attention_layernorm\.weight)|\d+\.input_layernorm\.weight)",
            4 * text + layers,
        ),
        "norm": (r"model\.norm\.weight", 1),
    }


def add_lora(model, config, seed: int):
    """The frozen model with LoRA on the preset's modules, resolved one by one; prints how many each group has."""
    names = LORA_PRESETS[config.preset] + (["head", "embedding"] if config.io == "lora" else [])
    found = lora.resolve_groups(model, lora_groups(model.config, config.text_loss > 0), names)
    for group, hits in found.items():
        say(f"LoRA {group}: {len(hits)} modules")
    return lora.add_lora(
        model,
        found,
        config.lora_rank,
        seed=seed,
        group_ranks={},
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        modules_to_save=[EMBEDDING, "audio_lm_head"] if config.io == "full" else None,
    )


def unfreeze(model, preset: str, text_loss: bool) -> None:
    """Trains exactly the preset's parameters; a pattern that matches another number than the model has is an error."""
    groups = full_groups(model.config, text_loss)
    names = [name for name, _ in model.named_parameters()]
    wanted = set()
    for group in FULL_PRESETS[preset]:
        pattern, count = groups[group]
        hits = [name for name in names if re.fullmatch(pattern, name)]
        if len(hits) != count:
            raise UserError(f"--preset {preset}: {group} has {len(hits)} parameters in this model, not {count}.")
        say(f"trained {group}: {count} parameters")
        wanted.update(hits)
    if text_loss:
        wanted.add(TEXT_HEAD)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)


# ---- folders ---------------------------------------------------------------------------------------------------


def base_text_head(path: str, revision: str) -> torch.Tensor | None:
    """The text head of a base whose model was loaded without it; None where the base has none."""
    from safetensors import safe_open

    index = find_file(path, "model.safetensors.index.json", revision)
    names = {"model.safetensors"}
    if index:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {where[TEXT_HEAD]} if TEXT_HEAD in where else set()
    for name in names:
        file = find_file(path, name, revision)
        if file:
            with safe_open(file, "pt") as tensors:
                if TEXT_HEAD in tensors.keys():  # noqa: SIM118
                    return tensors.get_tensor(TEXT_HEAD)
    return None


def write_model(
    folder: Path, model, weights: dict[str, torch.Tensor], source: str, revision: str, codec: str, facts: dict
) -> None:
    """A folder in the native format that from_pretrained loads anywhere; whole or absent.

    Tokenizer, processor and template are the base's. `codec`: the hub id that the processor is to name, for a path
    of this machine means nothing elsewhere; empty keeps what the base names.
    """
    from huggingface_hub import save_torch_state_dict

    if TEXT_HEAD not in weights:  # tools that serve the model expect it, though speaking never uses it
        head = base_text_head(source, revision)
        if head is not None:
            weights = weights | {TEXT_HEAD: head}
    draft = folder.with_name(f".{folder.name}.tmp")
    runs.fresh(draft)
    save_torch_state_dict(weights, draft, max_shard_size="2GB", metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    copy_processor(source, revision, draft, codec)
    write_json(draft / "training_config.json", facts)
    runs.replace(draft, folder)


def copy_processor(source: str, revision: str, folder: Path, codec: str) -> None:
    for name in PROCESSOR_FILES:
        found = find_file(source, name, revision)
        if found:
            (folder / name).write_bytes(found.read_bytes())
    processor = folder / "processor_config.json"
    if codec and processor.is_file():
        facts = json.loads(processor.read_text(encoding="utf-8"))
        named = facts.get("audio_tokenizer")
        facts["audio_tokenizer"] = named | {"audio_tokenizer_name_or_path": codec} if isinstance(named, dict) else codec
        write_json(processor, facts)
