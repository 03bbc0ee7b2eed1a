"""Models in the Hugging Face format, from a hub id or a local folder; a local path never uses the network."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.config import UserError
from common.runtime import Process, any_rank

# What from_pretrained may ask for; not the same weights in other formats, nor the authors' own in subfolders.
FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_fetched = set()


def fetch(path: str, process: Process, revision: str | None = None, weights: bool = True) -> None:
    """Downloads a hub id once per machine, so that all ranks then load it from disk: 64 ranks that each ask the hub for
    every file are many requests, and may get two revisions. Does nothing for a folder. Every rank must call it.

    `weights` False: only the small files, for a model on paper. A failure is no error here: loading will say what is
    wrong.
    """
    if not path or _is_path(path) or process.world == 1:
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        job = pool.submit(_download, path, revision, weights) if process.local_rank == 0 else None
        while any_rank(job is not None and not job.done(), process):  # a sign of life for --hang-timeout
            time.sleep(0.2)
    if not any_rank(job is not None and job.exception() is not None, process):
        _fetched.add(path)


def _download(path: str, revision: str | None, weights: bool) -> None:
    from huggingface_hub import snapshot_download

    ignored = ["*/*"] + ([] if weights else ["*.safetensors"])
    snapshot_download(path, revision=revision or None, allow_patterns=FILES, ignore_patterns=ignored)


def _is_path(path: str) -> bool:
    """Whether this means a place on the disk, not a hub id."""
    return Path(path).exists() or path.startswith((".", "/"))


def is_local(path: str) -> bool:
    """Whether a model is loaded without the network: from a folder, or from the cache that `fetch` filled."""
    return path in _fetched or Path(path).is_dir()


def find_file(path: str, name: str, revision: str = "") -> Path | None:
    """A file in a folder or in a hub repository; None if there is none."""
    if Path(path).is_dir():
        return Path(path, name) if Path(path, name).is_file() else None
    from transformers.utils import cached_file

    options = {"revision": revision or None, "local_files_only": is_local(path)}
    try:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
    except (OSError, ValueError):
        return None  # loading the model reports why
    return Path(file) if file else None


def load_pretrained(model_class, config_class, path: str, dtype, revision: str | None = None, **options):
    """The complete model. Another model type, a missing weight or a pickle is a UserError."""
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    local = is_local(path)
    if not local and _is_path(path):
        raise UserError(f"--model {path} is not a folder in the Hugging Face format.")
    try:
        config = config_class.from_pretrained(path, local_files_only=local, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no usable config.json ({str(error).splitlines()[0]})") from None
    if config.model_type != config_class.model_type:
        raise UserError(f"--model {path} is a {config.model_type!r} model, not {config_class.model_type!r}.")
    if on_paper():
        quantization = options.pop("quantization_config", None)
        model = model_class._from_config(config, dtype=dtype, **options)
        if quantization:
            quantise_on_paper(model, quantization)
        return model
    try:
        model, info = model_class.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=local,
            revision=revision,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {path}: {str(error).splitlines()[0]}") from None
    if info["missing_keys"]:  # transformers would only warn and leave them random
        raise UserError(
            f"--model {path} lacks {len(info['missing_keys'])} weights, such as {min(info['missing_keys'])}."
        )
    restore_rope(model)
    return model


def quantise_on_paper(model, quantization) -> None:
    """Marks the weights that transformers would quantise."""
    from torch import nn
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*quantization.llm_int8_skip_modules, *(model._keep_in_fp32_modules or ())]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, kept):
            module.weight.bits_on_paper = 4 if quantization.load_in_4bit else 8


def inference_dtype():
    """The precision to use a trained model in: bf16 on a GPU, where fp32 takes twice the memory; fp32 on a CPU."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def on_paper() -> bool:
    """Inside memory.unallocated, where tensors have shapes but no memory."""
    import torch

    return torch.get_default_device().type == "meta"


def restore_rope(model) -> None:
    """Computes the RoPE frequencies again, in fp32.

    Under ZeRO-3 from_pretrained runs inside deepspeed.zero.Init, which rounds every floating tensor created there to
    the engine's precision. In bf16 the angles would be wrong by a radian after 1000 positions, silently: ZeRO-2 and
    every later use of the export compute them in fp32.
    """
    import torch

    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            exact = type(module)(module.config)
            for name, buffer in list(module.named_buffers(recurse=False)):
                value = getattr(exact, name).to(buffer.device)
                setattr(module, name, torch.nn.Buffer(value, persistent=name not in module._non_persistent_buffers_set))
