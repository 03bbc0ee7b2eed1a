"""See what a recipe trains on: one clip as text, tokens, layout, labels and masks, and with a model its predictions.

    ./launch.sh inspect --recipe dia_lora                     the first clip of the embedded demo
    ./launch.sh inspect --recipe dia_lora --data DIR --clip ID --model M
    ./launch.sh inspect --run runs/my-voice --clip ID

The recipe's own batch and loss are used, so that what is shown is what is trained; dropout is off, as in evaluation.
All other flags are the recipe's, such as --text-dropout 0. A run or an exported folder supplies the flags of its
training; flags given here win. Tables are cut to the terminal's width: `| less -S` shows all of them.
"""

import dataclasses
import importlib
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import build_config, read_json, read_record, trained_flags
from common.config import NOT_REPEATED, check, parse_words
from common.errors import UserError, command_parser
from common.lora import read_lora
from common.runtime import forbid_codec_imports, run_main, say

# Recipe -> the package in models/ that shows its clips; the demo's assets, and where in them are what.
RECIPES = {
    "dia_lora": ("dia", "speech", {"model": "dia", "data": "tokens/train"}),
    "dia_full": ("dia", "speech", {"model": "dia", "data": "tokens/train"}),
    "higgs_clone": ("higgs", "clone", {"model": "model", "data": "tokens/train"}),
    "llama_mot": ("mot", "mot", {"model": "llama", "musicgen": "musicgen", "data": "tokens"}),
    "cmgan": ("cmgan", "pairs", {"data": "mild"}),
    "diffusion_buffer": ("diffusion_buffer", "pairs", {"data": "strong"}),
}
ENHANCERS = ("cmgan", "diffusion_buffer")


def parse_args(argv: list[str] | None = None):
    """The flags of this command, and in `words` those of the recipe."""
    parser = command_parser(__doc__)
    parser.add_argument("--recipe", choices=RECIPES, help="not needed with --run, or for an exported --model")
    parser.add_argument("--run", type=Path, help="run folder: its flags, its data, and its export for predictions")
    parser.add_argument("--data", default="", help="training data; default: the run's, or the embedded demo's")
    parser.add_argument(
        "--clip", metavar="ID", help="id of a training clip; default: the first; --clip=-x if it begins with a dash"
    )
    parser.add_argument(
        "--model", default="", help="as in the recipe, or a folder that it exported; default: no predictions"
    )
    parser.add_argument(
        "--no-predictions", action="store_true", help="read no weights, only configuration and tokenizer"
    )
    parser.add_argument(
        "--epoch", type=int, default=0, help="show the crops and dropped texts of this epoch (default: 0)"
    )
    args, args.words = parser.parse_known_args(argv)
    return args


# ---- flags and weights -----------------------------------------------------------------------------------------


def read_trained(args) -> tuple[str, dict]:
    """The recipe, and the flags that trained --run or --model; no flags before training."""
    place = args.run or Path(args.model)
    name, flags = None, {}
    if place.is_dir():
        record = read_record(place)
        flags = read_json(place / "training_config.json")  # an export has it, a run has not
        name = flags.get("recipe") or record.get("recipe")
        flags = flags or trained_flags(record)
    if args.run and not name:
        raise UserError(f"--run {args.run} is not a run folder: it holds no config.json that names a recipe.")
    if args.recipe and name and args.recipe != name:
        raise UserError(f"{place} was made by {name}, not by --recipe {args.recipe}.")
    name = name or args.recipe
    if not name:
        raise UserError("give --recipe, or --run with a run folder.")
    if name not in RECIPES:
        raise UserError(f"{place} was made by {name}; inspect knows {', '.join(RECIPES)}.")
    return name, flags


def choose_model(args, is_trained: bool) -> tuple[str, Path | None]:
    """The value of the recipe's --model ("": as recorded), and the folder of a trained adapter, if there is one."""
    if not is_trained:
        return args.model, None
    export = args.run / "export" if args.run else Path(args.model)
    base = args.model if args.run else ""
    if not export.is_dir():
        say(f"{args.run} has no export yet: nothing is predicted")
        args.no_predictions = True
        return base, None
    if (export / "adapter_config.json").is_file():
        return base, export
    if base:
        raise UserError("give --run or --model, not both: the run exported a whole model.")
    return str(export), None


def recipe_config(args, name: str, recipe, recorded: dict) -> tuple:
    """The recipe's config, and the folder of a trained adapter or None. Flags given here win over recorded ones."""
    given = parse_words(recipe.Config, args.words)
    model, adapter = choose_model(args, bool(recorded))
    if model:
        given["model"] = model
    if args.data:
        given["data"] = args.data
    if adapter and name == "llama_mot":
        given["adapter"] = str(adapter)
    flags = {key: value for key, value in recorded.items() if key not in NOT_REPEATED}
    if not (recorded or model or args.data):
        flags = recipe.DEMO
    return build_config(recipe.Config, flags | given), adapter


def with_demo(name: str, config, process):
    """The config with the demo's data and, if neither data nor model is named, its model."""
    if config.data:
        return config
    from common.runs import demo_assets

    _, assets, places = RECIPES[name]
    folder = demo_assets(process, assets)
    wanted = ("data",) if config.model else tuple(places)
    return dataclasses.replace(config, **{field: str(folder / places[field]) for field in wanted})


def fill_lora(model, folder: Path) -> None:
    """Copies an exported PEFT adapter into the recipe's model."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    weights = read_lora(folder)
    odd = sorted(set(weights) ^ set(get_peft_model_state_dict(model, save_embedding_layers=False)))
    if odd:
        raise UserError(f"{folder} does not fit these flags: {len(odd)} tensors differ by name, such as {odd[0]}.")
    set_peft_model_state_dict(model, weights)


# ---- what is shown ---------------------------------------------------------------------------------------------


def inspect(args) -> list:
    """Prints the sections of common/inspection.py, and returns them."""
    name, recorded = read_trained(args)
    recipe = importlib.import_module(name)
    config, adapter = recipe_config(args, name, recipe, recorded)
    import numpy as np
    import torch

    from common import hub, inspection
    from common.ds_config import WHOLE
    from common.pairs import PairDataset
    from common.runtime import Process
    from common.tokens import TokenDataset

    process = Process(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = with_demo(name, config, process)
    check(dataclasses.replace(config, model=config.model or "none"))
    if not config.model and name in ("higgs_clone", "llama_mot"):
        raise UserError(
            f"--recipe {name} needs --model for its tokenizer; with --no-predictions its weights are not read."
        )
    package = importlib.import_module(f"models.{RECIPES[name][0]}.show")
    if Path(config.data, "dataset.json").is_file():  # a wrong id is found before a model is loaded
        dataset = PairDataset(config.data, package.signal.RATE) if name in ENHANCERS else TokenDataset(config.data)
        inspection.find_clip(dataset, np.arange(len(dataset)), args.clip)
    if Path(config.model).is_dir() and hasattr(config, "revision"):  # a run's export, not the base on the hub
        config = dataclasses.replace(config, revision="")
    if args.no_predictions or not config.model:
        load = None
        if config.model and name not in ENHANCERS:
            hub.fetch(config.model, process, config.revision)
    else:
        config = hub.pin(config, process)

        def load(model) -> None:
            if adapter:
                fill_lora(model, adapter)

    sections = package.sections(recipe, config, load, WHOLE, args.clip, args.epoch, process)
    width = shutil.get_terminal_size(fallback=(1000, 0)).columns  # a pipe or a file has no width
    print(inspection.to_text(sections, width))
    return sections


if __name__ == "__main__":
    forbid_codec_imports()
    run_main(inspect, parse_args())
