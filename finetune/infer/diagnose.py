"""Check a speech enhancer, and what it needs: loss, labels, data, output, machine.

python finetune/infer/diagnose.py --run runs/tuned
python finetune/infer/diagnose.py --model runs/tuned/export --eval-data pairs/valid
python finetune/infer/diagnose.py --recipe diffusion_buffer

--run and --model check with the flags of their training, --recipe alone checks the recipe's defaults, before a
training. Every line is PASS, WARN or FAIL with its number. The exit code is 0 if nothing fails, otherwise 2.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import build_config, find_recipe, read_record, trained_flags
from common.config import UserError, command_parser
from common.runtime import forbid_codec_imports, run_main
from common.scorer import Scorer

RECIPES = ("cmgan", "diffusion_buffer")


def parse_args(argv: list[str] | None = None):
    parser = command_parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", type=Path, help="run folder")
    what.add_argument("--model", type=Path, help="export folder, checkpoint folder or file of weights")
    parser.add_argument("--recipe", choices=RECIPES, help="alone, or for a file of weights that has no config.json")
    parser.add_argument("--eval-data", default="", help="noisy/clean pairs; default: what the run was evaluated on")
    args = parser.parse_args(argv)
    if not (args.run or args.model or args.recipe):
        parser.error("give --run, --model or --recipe.")
    return args


def check(args) -> None:
    """Runs the checks of the recipe; raises a UserError if one fails."""
    place = args.run or args.model
    recipe = find_recipe(place, args.recipe, RECIPES) if place else args.recipe
    if args.run and not (args.run / "metrics.jsonl").is_file():
        raise UserError(f"--run {args.run} is not a run folder (no metrics.jsonl).")
    flags = trained_flags(read_record(place)) if place else {}
    changes = {"model": str(place or "")} | ({"eval_data": args.eval_data} if args.eval_data else {})
    if recipe == "cmgan":
        scorer = Scorer(flags.get("pesq_workers", 0))  # forks its processes, before torch is imported
        check_cmgan(flags, changes, scorer)
    else:
        check_diffusion_buffer(flags, changes)


def check_cmgan(flags: dict, changes: dict, scorer: Scorer) -> None:
    import cmgan
    from common.runs import demo_assets
    from common.runtime import init_process
    from models.cmgan.diagnose import diagnose

    process = init_process()
    config = build_config(cmgan.Config, flags, **changes)
    if not (config.model or config.eval_data):
        changes |= {"eval_data": str(demo_assets(process, "pairs") / "mild")}
        config = build_config(cmgan.Config, flags, **changes)
    diagnose(config.model, config, cmgan.loss_terms, cmgan.loss_weights(config, 1.0), process, scorer)


def check_diffusion_buffer(flags: dict, changes: dict) -> None:
    import diffusion_buffer
    from models.diffusion_buffer.diagnose import diagnose

    if "eval_data" in changes:
        changes |= {"data": changes["eval_data"]}  # its checks look at the training data, with no network
    diagnose(build_config(diffusion_buffer.Config, flags, **changes), diffusion_buffer.compute_loss)


if __name__ == "__main__":
    forbid_codec_imports()
    run_main(check, parse_args())
