"""Run the script of this folder that fits a trained run: what ./launch.sh does for speak, generate, enhance, diagnose,
convert, report, watch and inspect.

    python finetune/infer/dispatch.py speak --run runs/my-voice --text "[S1] Hello." --wav hello.wav

The recipe in the run's config.json selects the script, and --run becomes the flag which that script takes. All other
flags are passed on. Without --run, speak also works with --model or --adapter and a folder that a recipe exported.
"""

import argparse
import json
import os
import sys
from pathlib import Path

FINETUNE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FINETUNE))  # as for the recipes

from common.errors import EXIT_USER_ERROR, UserError

SCRIPTS = {
    "speak": {"dia_lora": "dia_speak.py", "dia_full": "dia_speak.py", "higgs_clone": "higgs_speak.py"},
    "generate": {"llama_mot": "mot_generate.py"},
    "enhance": {"cmgan": "enhance.py", "diffusion_buffer": "enhance.py"},
    "diagnose": {"cmgan": "diagnose.py", "diffusion_buffer": "diagnose.py"},
}
VERBS = (*SCRIPTS, "convert", "report", "watch", "inspect")
RECIPES = sorted({recipe for scripts in SCRIPTS.values() for recipe in scripts})
DIA_FORMATS = ("native", "stereo", "average")  # other verbs of convert, which make a Dia model folder


def command_for(verb: str, argv: list[str]) -> list[str]:
    """The script, relative to finetune/, and its arguments."""
    if verb in ("report", "watch"):
        return [f"infer/{verb}.py", *argv]
    if verb == "convert":
        return ["infer/dia_convert.py" if argv and argv[0] in DIA_FORMATS else "infer/convert.py", *argv]
    if verb == "inspect":
        return ["infer/inspect_clip.py", *argv]
    scripts = SCRIPTS[verb]
    recipes = " or ".join(", ".join(scripts).rsplit(", ", 1))
    usage = f"./launch.sh {verb} --run RUN [flags]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    for name in ("--run", "--adapter", "--model"):
        parser.add_argument(name)
    given, rest = parser.parse_known_args(argv)
    wants_help = bool({"-h", "--help"} & set(rest))
    if given.run:
        script = script_for(verb, read_recipe(given.run), given.run)
        arguments = ["--help"] if wants_help else script_arguments(verb, given, rest)
    elif len(set(scripts.values())) == 1:  # no run is needed to know the script
        script, arguments = next(iter(scripts.values())), argv
    else:
        recipe = exported_recipe(given.adapter) or exported_recipe(given.model)
        if not recipe and wants_help:
            print(f"{usage}\nRUN: folder of a {recipes} run. With --run, --help lists the other flags.")
            sys.exit()
        if not recipe:
            raise UserError(f"{verb}: give --run with the folder of a {recipes} run.")
        script, arguments = script_for(verb, recipe, given.adapter or given.model), argv
    return [f"infer/{script}", *arguments]


def read_recipe(run: str) -> str:
    """The recipe that made this run folder."""
    path = Path(run, "config.json")
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    except OSError:
        raise UserError(f"{run} is not a run folder: it holds no config.json.") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not the config.json of a run: it names no recipe.") from None
    if recipe not in RECIPES:
        raise UserError(f"{path} names the recipe {recipe!r}; the recipes are {', '.join(RECIPES)}.")
    return recipe


def exported_recipe(folder: str | None) -> str | None:
    """The recipe that exported this folder; None if it is something else, such as a hub id."""
    try:
        recipe = json.loads(Path(folder or "", "training_config.json").read_text(encoding="utf-8"))["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return recipe if recipe in RECIPES else None


def script_for(verb: str, recipe: str, source: str) -> str:
    if recipe in SCRIPTS[verb]:
        return SCRIPTS[verb][recipe]
    fitting = " or ".join(f"./launch.sh {other}" for other, scripts in SCRIPTS.items() if recipe in scripts)
    raise UserError(f"{source} comes from {recipe}, which {verb} does not support: use {fitting}.")


def script_arguments(verb: str, given: argparse.Namespace, rest: list[str]) -> list[str]:
    """The arguments with the script's own flags in place of --run."""
    others = [
        word for name in ("adapter", "model") if getattr(given, name) for word in (f"--{name}", getattr(given, name))
    ]
    if verb in ("enhance", "diagnose"):
        return ["--run", given.run, *others, *rest]
    export = Path(given.run, "export")
    if not export.is_dir():
        raise UserError(f"{export} does not exist: the run has not finished.")
    flag = "--adapter" if (export / "adapter_config.json").is_file() else "--model"
    if flag in others:
        raise UserError(f"give --run or {flag}, not both.")
    return [flag, str(export), *others, *rest]


def main() -> None:
    try:
        verb, *argv = sys.argv[1:] or [""]
        if verb not in VERBS:
            raise UserError(f"write one of {', '.join(VERBS)}, then its flags.")
        script, *arguments = command_for(verb, argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    path = str(FINETUNE / script)
    os.execv(sys.executable, [sys.executable, path, *arguments])  # signals and the exit code are the script's own


if __name__ == "__main__":
    main()
