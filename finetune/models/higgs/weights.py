"""Higgs Audio v2 as files: load a model, name its parameters for training, write a model folder."""

import json
import re
from pathlib import Path

import torch

from common import runs
from common.checkpoint import write_json
from common.codec import FILE, recorded_codec, refuse_other_codec
from common.errors import UserError
from common.hub import find_file, folder, load_pretrained
from common.runtime import Process, on_main, say

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


def load_higgs(
    path: str, revision: str, dtype: torch.dtype, text_head: bool = False, quantization=None, attn: str = "sdpa"
):
    """HiggsAudioV2ForConditionalGeneration from a hub id or a local folder, in the native transformers format."""
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    refuse_original_format(path, revision)
    options = {"attn_implementation": attn} | ({"quantization_config": quantization} if quantization else {})
    if text_head:
        options["use_text_head"] = True  # config.json does not say that there is one
    return load_pretrained(
        HiggsAudioV2ForConditionalGeneration, HiggsAudioV2Config, path, dtype, revision=revision or None, **options
    )


def refuse_original_format(path: str, revision: str) -> None:
    file = find_file(path, "config.json", revision)
    if file and json.loads(file.read_text(encoding="utf-8")).get("model_type") == "higgs_audio":
        raise UserError(
            f"--model {path} is in the original 'higgs_audio' format; use the newest revision of"
            f" bosonai/higgs-audio-v2-generation-3B-base, which is in the native format since April 2026"
            f" ({LAST_ORIGINAL[:8]} was the last in the original one)."
        )


def load_tokenizer(path: str, revision: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder(path, revision=revision), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path} has no usable tokenizer ({str(error).splitlines()[0]}).") from None


def codec_of(path: str, revision: str) -> str | None:
    """Folder or hub id of the codec that the model's processor names."""
    file = find_file(path, "processor_config.json", revision)
    codec = json.loads(file.read_text(encoding="utf-8")).get("audio_tokenizer") if file else None
    return codec["audio_tokenizer_name_or_path"] if isinstance(codec, dict) else codec


def check_codec(tokens, path: str, revision: str, process: Process) -> None:
    """Refuses codes of another codec than the model's, as far as its files name it."""
    expected = {"name": "higgs", "sample_rate": 24000, "hop": 960}
    expected |= recorded_codec(Path(path)) or {"place": codec_of(path, revision)}
    on_main(lambda: refuse_other_codec(tokens, expected, f"--model {path}"), process)


# ---- what can be trained ---------------------------------------------------------------------------------------

EMBEDDING = "model.embed_audio_tokens.embed_audio_tokens"


def lora_groups(config, text_loss: bool) -> dict[str, tuple[str, int]]:
    """Group name -> pattern on module names and how many modules it must match. A bare `gate_proj` would match the text
    and the audio MLPs."""
    layers, mlp = config.num_hidden_layers, r"(gate|up|down)_proj"
    text = layers if text_loss else layers - 1  # without a text target the last layer's text MLP gets no gradient
    numbers = "|".join(map(str, range(text))) or "none"
    return {
        "attn": (r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", 4 * layers),
        "audio": (rf"model\.layers\.\d+\.audio_mlp\.{mlp}", 3 * layers),
        "text": (rf"model\.layers\.({numbers})\.mlp\.{mlp}", 3 * text),
        "head": (r"audio_lm_head", 1),
        # The full name: its parent is called `embed_audio_tokens` too, and PEFT would train nothing there.
        "embedding": (re.escape(EMBEDDING), 1),
    }


def full_groups(config, text_loss: bool) -> dict[str, tuple[str, int]]:
    """Group name -> pattern on parameter names and how many parameters it must match."""
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


def unfreeze(model, groups: list[str], text_loss: bool) -> None:
    """Makes exactly the parameters of these groups trainable, and the text head with `text_loss`."""
    patterns = full_groups(model.config, text_loss)
    names = [name for name, _ in model.named_parameters()]
    trained = {TEXT_HEAD} if text_loss else set()
    for group in groups:
        pattern, count = patterns[group]
        hits = [name for name in names if re.fullmatch(pattern, name)]
        if len(hits) != count:
            raise UserError(f"--preset: group {group} has {len(hits)} parameters in this model, expected {count}.")
        say(f"trained {group}: {count} parameters")
        trained.update(hits)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


# ---- a model folder --------------------------------------------------------------------------------------------


def base_text_head(path: str, revision: str) -> torch.Tensor | None:
    """The text head from the base's files, for a model that was loaded without it; None if the base has none."""
    from safetensors import safe_open

    index = find_file(path, "model.safetensors.index.json", revision)
    names = {"model.safetensors"}
    if index:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {weight_map[TEXT_HEAD]} if TEXT_HEAD in weight_map else set()
    for name in names:
        file = find_file(path, name, revision)
        if file:
            with safe_open(file, "pt") as tensors:
                if TEXT_HEAD in tensors.keys():  # noqa: SIM118
                    return tensors.get_tensor(TEXT_HEAD)
    return None


def write_model(
    folder: Path,
    model,
    weights: dict[str, torch.Tensor],
    source: str,
    revision: str,
    training: dict,
    codec: dict,
) -> None:
    """A folder that HiggsAudioV2ForConditionalGeneration.from_pretrained loads anywhere; complete or absent.

    `source`: the base, whose tokenizer, processor and chat template are copied. `codec`: the one that made the
    training data, which is the processor's (see check_codec).
    """
    from huggingface_hub import save_torch_state_dict

    if TEXT_HEAD not in weights:  # serving tools expect it, although generating speech does not use it
        head = base_text_head(source, revision)
        if head is not None:
            weights = weights | {TEXT_HEAD: head}
    draft = folder.with_name(f".{folder.name}.tmp")
    runs.empty_folder(draft)
    save_torch_state_dict(weights, draft, max_shard_size="2GB", metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    for name in PROCESSOR_FILES:
        file = find_file(source, name, revision)
        if file:
            (draft / name).write_bytes(file.read_bytes())
    write_json(draft / "training_config.json", training)
    write_json(draft / FILE, codec)
    runs.replace_folder(draft, folder)
