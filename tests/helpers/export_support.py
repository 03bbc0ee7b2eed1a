"""What the tests of the export check share: keeping its probe, and damaging an export in ways that it must notice."""

import contextlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file


@contextlib.contextmanager
def keeps_probe(recipe, process):
    """Inside, the check leaves what it compares with in RUN/probe.safetensors."""
    from common import export_check

    own = export_check._compare

    def compare(run, inputs, outputs, *more):
        tensors = {name: value.detach().contiguous() for name, value in inputs.items()}
        save_file(tensors | {"outputs": outputs.detach().float().contiguous()}, run.folder / "probe.safetensors")
        own(run, inputs, outputs, *more)

    export_check._compare = compare
    try:
        yield
    finally:
        export_check._compare = own


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(path: Path, change) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def drop_adapter(export: Path) -> None:
    """The matrices are there, and do nothing: what PEFT makes of a file with other names."""
    edit_weights(
        export / "adapter_model.safetensors",
        lambda weights: {name: value * 0 if "lora_B" in name else value for name, value in weights.items()},
    )


def rename_adapter(export: Path) -> None:
    edit_weights(
        export / "adapter_model.safetensors",
        lambda weights: {name.replace("base_model.model", "model"): value for name, value in weights.items()},
    )


def wrong_alpha(export: Path) -> None:
    edit_json(export / "adapter_config.json", lambda config: config.update(lora_alpha=2 * config["lora_alpha"]))


def return_base(export: Path) -> None:
    base = Path(json.loads((export / "training_config.json").read_text())["model"])
    (export / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())


def wrong_rope(export: Path) -> None:
    def change(config: dict) -> None:
        config.get("decoder_config", config)["rope_parameters"]["rope_theta"] = 500.0

    edit_json(export / "config.json", change)


def noisy_weights(export: Path) -> None:
    """A hundredth of a weight's own size: an export of another step."""
    import torch

    (file,) = (file for file in export.glob("*.safetensors") if file.stem != "discriminator")
    edit_weights(
        file,
        lambda weights: {
            name: value + 0.01 * value.std() * torch.randn_like(value) if value.numel() > 1 else value
            for name, value in weights.items()
        },
    )
