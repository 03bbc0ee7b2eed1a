"""Models in the Hugging Face format, from a hub id or a local folder; a local path never uses the network."""

from pathlib import Path

from common.config import UserError


def load_pretrained(model_class, config_class, path: str, dtype, revision: str | None = None, **options):
    """The complete model. Another model type, a missing weight or a pickle is a UserError."""
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    local = Path(path).is_dir()
    if not local and (Path(path).exists() or path.startswith((".", "/"))):
        raise UserError(f"--model {path} is not a folder in the Hugging Face format.")
    try:
        config = config_class.from_pretrained(path, local_files_only=local, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no usable config.json ({str(error).splitlines()[0]})") from None
    if config.model_type != config_class.model_type:
        raise UserError(f"--model {path} is a {config.model_type!r} model, not {config_class.model_type!r}.")
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
