"""See what a recipe trains on: one clip as text, tokens, layout, labels and masks, and with a model its predictions.

    ./launch.sh inspect --recipe dia_lora                     the first clip of the embedded demo
    ./launch.sh inspect --recipe dia_lora --data DIR --clip ID --model M --html clip.html
    ./launch.sh inspect --run runs/my-voice --clip ID

The recipe's own batch and loss are used, so that what is shown is what is trained; dropout is off, as in evaluation.
All other flags are the recipe's, such as --text-dropout 0. A run or an exported folder supplies the flags of its
training; flags given here win.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import build_config, read_record, trained_flags
from common.config import NOT_REPEATED, build_parser, check, read_config_file
from common.errors import UserError, command_parser, unknown_flag
from common.lora import read_lora
from common.runtime import forbid_codec_imports, run_main, say, skip_unused_imports

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
    """The flags of this command, and in `rest` those of the recipe."""
    parser = command_parser(__doc__)
    parser.add_argument("--recipe", choices=RECIPES, help="not needed with --run, or for an exported --model")
    parser.add_argument("--run", type=Path, help="run folder: its flags, its data, and its export for predictions")
    parser.add_argument("--data", help="training data; default: the run's, or the embedded demo's")
    parser.add_argument(
        "--clip", metavar="ID", help="id of a training clip; default: the first; --clip=-x if it begins with a dash"
    )
    parser.add_argument("--model", help="as in the recipe, or a folder that it exported; empty: no predictions")
    parser.add_argument(
        "--no-predictions", action="store_true", help="read no weights, only configuration and tokenizer"
    )
    parser.add_argument(
        "--epoch", type=int, default=0, help="show the crops and dropped texts of this epoch (default: 0)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with more rows, and pictures of pairs")
    args, args.rest = parser.parse_known_args(argv)
    return args


# ---- flags and weights -----------------------------------------------------------------------------------------


def read_trained(place: Path) -> tuple[str | None, dict]:
    """The recipe and the flags that made a run or an export; None and no flags for anything else."""
    file = place / "training_config.json"
    if not file.is_file():
        record = read_record(place)
        return record.get("recipe"), trained_flags(record)
    try:
        flags = json.loads(file.read_text(encoding="utf-8"))
        return flags.get("recipe"), flags
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}).") from None


def settle(args):
    """The recipe's module and config, the folder of a trained adapter or None, and whether anything is predicted."""
    place = args.run or Path(args.model or "")
    name, recorded = read_trained(place) if place.is_dir() and str(place) != "." else (None, {})
    if args.run and not name:
        raise UserError(f"--run {args.run} is not a run folder: it holds no config.json that names a recipe.")
    if args.recipe and name and args.recipe != name:
        raise UserError(f"{place} was made by {name}, not by --recipe {args.recipe}.")
    name = args.recipe or name
    if not name:
        raise UserError("give --recipe, or --run with a run folder.")
    if name not in RECIPES:
        raise UserError(f"{place} was made by {name}; inspect knows {', '.join(RECIPES)}.")

    if name not in ENHANCERS:
        skip_unused_imports()
    recipe = importlib.import_module(name)
    parser = build_parser(recipe.Config, "")
    words, unknown = parser.parse_known_args(args.rest)
    if unknown:
        raise UserError(unknown_flag(unknown[0], parser))
    given = {k: v for k, v in vars(words).items() if v is not None and k not in ("local_rank", "config")}
    given |= {flag: value for flag in ("data", "model") if (value := getattr(args, flag))}
    if words.config:
        given = read_config_file(words.config, recipe.Config) | given
    trained = (args.run / "export" if args.run else place) if recorded else None
    if trained and not trained.is_dir():
        say(f"{args.run} has no export yet: nothing is predicted")
        args.no_predictions, trained = True, None
    adapter = None
    if trained and (trained / "adapter_config.json").is_file():
        adapter = trained
        if not args.run:
            del given["model"]  # it is the adapter; its base is among its flags
    elif trained:
        if args.run and "model" in given:
            raise UserError("give --run or --model, not both: the run exported a whole model.")
        given["model"] = str(trained)
    if adapter and name == "llama_mot":
        given["adapter"] = str(adapter)
    demo = recipe.DEMO if not (recorded or given.get("model") or given.get("data")) else {}
    flags = {key: value for key, value in recorded.items() if key not in NOT_REPEATED}
    return name, recipe, build_config(recipe.Config, demo | flags | given), adapter


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
    """The sections of common/inspection.py, printed and, with --html, written."""
    if args.html and not args.html.parent.is_dir():
        raise UserError(f"--html {args.html}: the folder {args.html.parent} does not exist.")
    name, recipe, config, adapter = settle(args)
    if name not in ENHANCERS:
        skip_unused_imports(config)
    import numpy as np
    import torch

    from common import hub, inspection, single_process
    from common.pairs import PairDataset
    from common.runtime import Process
    from common.tokens import TokenDataset

    process = Process(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = with_demo(name, config, process)
    check(dataclasses.replace(config, model=config.model or "none", data=config.data))
    if not config.model and name in ("higgs_clone", "llama_mot"):
        raise UserError(
            f"--recipe {name} needs --model for its tokenizer; with --no-predictions its weights are not read."
        )
    package = importlib.import_module(f"models.{RECIPES[name][0]}.show")
    if Path(config.data, "dataset.json").is_file():  # a wrong id is found before a model is loaded
        dataset = PairDataset(config.data, package.signal.RATE) if name in ENHANCERS else TokenDataset(config.data)
        inspection.find_clip(dataset, np.arange(len(dataset)), args.clip)
    load = (lambda model: fill_lora(model, adapter) if adapter else None) if config.model else None
    if args.no_predictions or not load:
        load = None
        if name not in ENHANCERS:
            config = dataclasses.replace(
                config, world=1, **({"quantize": "none"} if hasattr(config, "quantize") else {})
            )
    if Path(config.model).is_dir() and hasattr(config, "revision"):  # a run's export, not the base on the hub
        config = dataclasses.replace(config, revision="")
    config = hub.pin(config, process)
    sections = package.sections(recipe, config, load, single_process.DS, args.clip, args.epoch, process)
    print(inspection.to_text(sections))
    if args.html:
        [_, clip] = sections[0].rows[0]
        inspection.write_page(args.html, f"{name}: {clip}", sections)
        print(f"\npage  {args.html}")
    return sections


if __name__ == "__main__":
    forbid_codec_imports()
    run_main(inspect, parse_args())
