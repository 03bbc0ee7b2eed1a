"""Check a speech enhancer on your data and machine: weights, labels, output, speed, memory.

python finetune/infer/diagnose.py --run runs/tuned
python finetune/infer/diagnose.py --model runs/tuned/export --eval-data pairs/valid
python finetune/infer/diagnose.py --recipe diffusion_buffer --data pairs/train --spec block_causal --micro-batch 16

--run and --model check a trained model with the flags of its training; --recipe checks a recipe before training, with
its defaults, not those of its demo. Flags of the recipe may follow and replace these values. Every line is PASS, WARN
or FAIL with a number. The exit code is 0 if nothing fails, otherwise 2.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import build_config, find_recipe, read_record, trained_flags
from common.config import check as check_flags
from common.config import parse_words
from common.errors import UserError, command_parser
from common.runtime import forbid_codec_imports, run_main
from common.scorer import Scorer

RECIPES = ("cmgan", "diffusion_buffer")


def parse_args(argv: list[str] | None = None):
    parser = command_parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", type=Path, help="run folder")
    what.add_argument("--model", type=Path, help="export folder, checkpoint folder or weights file")
    parser.add_argument(
        "--recipe", choices=RECIPES, help="recipe to check, or recipe of a weights file without config.json"
    )
    parser.add_argument("--eval-data", default="", help="noisy/clean pairs; default: what the run was evaluated on")
    args, args.words = parser.parse_known_args(argv)  # words: flags of the recipe, which is not known yet
    if not (args.run or args.model or args.recipe):
        parser.error("give --run, --model or --recipe.")
    return args


def recipe_config(config_class, args, flags: dict, **changes):
    """The recipe's config: what was recorded, then what this command's own flags say, then the recipe's flags."""
    config = build_config(config_class, flags, **changes | parse_words(config_class, args.words))
    check_flags(config)
    return config


def check(args) -> None:
    """Runs the checks of the recipe; raises a UserError if one fails."""
    place = args.run or args.model
    recipe = find_recipe(place, args.recipe, RECIPES) if place else args.recipe
    if args.run and not (args.run / "metrics.jsonl").is_file():
        raise UserError(f"--run {args.run} is not a run folder (no metrics.jsonl).")
    flags = trained_flags(read_record(place)) if place else {}
    changes = {"model": str(place or "")} | ({"eval_data": args.eval_data} if args.eval_data else {})
    if recipe == "cmgan":
        check_cmgan(args, flags, changes, Scorer())  # forks its processes, before torch is imported
    else:
        check_diffusion_buffer(args, flags, changes)


def check_cmgan(args, flags: dict, changes: dict, scorer: Scorer) -> None:
    import cmgan
    from common.runs import demo_assets
    from common.runtime import init_process
    from models.cmgan.diagnose import diagnose

    process = init_process()
    config = recipe_config(cmgan.Config, args, flags, **changes)
    if not (config.model or config.eval_data or config.data):
        changes |= {"eval_data": str(demo_assets(process, "pairs") / "mild")}
        config = recipe_config(cmgan.Config, args, flags, **changes)
    diagnose(config.model, config, cmgan.loss_terms, cmgan.loss_weights(config, 1.0), process, scorer)


def check_diffusion_buffer(args, flags: dict, changes: dict) -> None:
    import diffusion_buffer
    from common.runtime import init_process
    from models.diffusion_buffer.diagnose import diagnose

    config = recipe_config(diffusion_buffer.Config, args, flags, **changes)
    diagnose(config, diffusion_buffer.compute_loss, init_process())


if __name__ == "__main__":
    forbid_codec_imports()
    run_main(check, parse_args())
