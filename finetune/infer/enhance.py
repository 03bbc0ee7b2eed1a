"""Enhance noisy recordings with a model that cmgan.py or diffusion_buffer.py trained.

python finetune/infer/enhance.py --run runs/tuned --source noisy_wavs --out enhanced
python finetune/infer/enhance.py --model runs/live/export --source noisy_wavs --out enhanced --delay 5
python finetune/infer/enhance.py --model best_ckpt/ckpt --recipe cmgan --source noisy_wavs --out enhanced
python finetune/infer/enhance.py --model official.ckpt --recipe diffusion_buffer --source noisy_wavs --out enhanced

--source is a recording or a folder of them, at any sample rate, mono or stereo, in any format that libsndfile reads.
Each is written as .wav, at its own sample rate, under the same name in --out. The models work up to 8 kHz: everything
above is cut, or with --high-band keep left as it is, noise included.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.artifacts import find_recipe
from common.errors import UserError, command_parser, run_command

# Flags that only one kind of model has, and their defaults.
OPTIONS = {
    "cmgan": {"window_seconds": 16.0, "no_padding": False},
    "diffusion_buffer": {"spec": "", "delay": 0, "temperature": 1.0, "seed": 0},
}
LOWEST = {"window_seconds": 2, "delay": 0, "temperature": 0}


def parse_args(argv: list[str] | None = None):
    parser = command_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="run folder, whose export is used")
    what.add_argument("--model", type=Path, help="export folder, checkpoint folder or weights file")
    parser.add_argument("--recipe", choices=OPTIONS, help="only for a weights file without config.json")
    parser.add_argument("--source", type=Path, required=True, help="a noisy recording, or a folder of them")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the enhanced recordings, or a .wav for a single one"
    )
    parser.add_argument(
        "--high-band", choices=("cut", "keep"), default="cut",
        help="above 8 kHz: cut, or keep the recording's own sound (default: cut)",
    )  # fmt: skip
    parser.add_argument(
        "--dnsmos", action="store_true", help="predict the quality before and after, without a reference (speechmos)"
    )
    cmgan = parser.add_argument_group("only for cmgan")
    cmgan.add_argument(
        "--no-padding", action="store_true", default=None,
        help="do not pad to whole frames with the recording's own start, as the published evaluation does",
    )  # fmt: skip
    cmgan.add_argument("--window-seconds", type=float, help="window length for long recordings (default: 16)")
    buffer = parser.add_argument_group("only for diffusion_buffer")
    buffer.add_argument(
        "--spec", help='JSON file of settings to use the network with, such as {"buffer": 10, "stream": "official"}'
    )
    buffer.add_argument("--delay", type=int, help="frames of delay; 0 = the whole buffer (default: 0)")
    buffer.add_argument("--temperature", type=float, help="scale of the diffusion noise; 0 = none (default: 1)")
    buffer.add_argument("--seed", type=int, help="random seed of the diffusion noise (default: 0)")
    return parser.parse_args(argv)


def options_of(args, recipe: str) -> dict:
    """The options of this kind of model; a flag that only another kind has is an error."""
    for other, options in OPTIONS.items():
        for name in options:
            if other != recipe and getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is for {other} models, but this is a {recipe} model.")
    options = {}
    for name, default in OPTIONS[recipe].items():
        given = getattr(args, name)
        options[name] = default if given is None else given
        if name in LOWEST and not options[name] >= LOWEST[name]:  # refuses NaN too
            raise UserError(f"--{name.replace('_', '-')} {given} is out of range: it takes {LOWEST[name]} or more.")
    return options


def enhance(args) -> None:
    recipe = find_recipe(args.run or args.model, args.recipe, tuple(OPTIONS))
    options = options_of(args, recipe)
    model = args.model
    if args.run:
        model = args.run / "export"
        if not model.is_dir():
            raise UserError(f"--run {args.run} has no export: it has not finished.")
    if recipe == "cmgan":
        from models.cmgan.enhance import enhance_run
    else:
        from models.diffusion_buffer.enhance import enhance_run

    from common.enhance_folder import Source

    source = Source(args.source, args.high_band, args.dnsmos)
    enhance_run(str(model), source, args.out, **options)


def main() -> None:
    run_command(enhance, parse_args())


if __name__ == "__main__":
    main()
