"""Which recipe made a run, a checkpoint or an export, and with which flags. Imports nothing heavy."""

import dataclasses
import json
from pathlib import Path

from common.errors import UserError


def read_record(path: Path) -> dict:
    """The config.json of an export or a run: in the folder itself, or that of the export or run which a checkpoint or
    a file of weights belongs to. Empty if there is none."""
    for folder in (path, *path.parents[:2]):
        file = folder / "config.json"
        if not file.is_file():
            continue
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({type(error).__name__}).") from None
        if isinstance(record, dict) and ("recipe" in record or "model_type" in record):
            return record
    return {}


def find_recipe(path: Path, asked: str | None, recipes: tuple[str, ...]) -> str:
    """The recipe that made `path`; `asked` (--recipe) names it for weights that came without a config.json."""
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    record = read_record(path)
    recipe = record.get("recipe") or record.get("model_type") or asked
    if not recipe:
        raise UserError(f"{path} comes without a config.json: name its recipe with --recipe {' or '.join(recipes)}.")
    if asked and recipe != asked:
        raise UserError(f"{path} was made by {recipe}, not by --recipe {asked}.")
    if recipe not in recipes:
        raise UserError(f"{path} was made by {recipe}; this command takes models of {' and '.join(recipes)}.")
    return recipe


def trained_flags(record: dict) -> dict:
    """The flags that the model of this config.json was trained with; empty if it does not say."""
    return record.get("config") or record.get("training_config") or {}


def read_json(file: Path) -> dict:
    """What a recipe wrote beside its weights; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it is not a JSON object; export the run again (./launch.sh convert).")
    return content


def build_config(config_class, flags: dict, **changes):
    """A recipe's config from recorded flags. Those that the recipe no longer has are ignored."""
    names = {item.name for item in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in flags.items() if name in names} | changes)
