"""Make Dia model folders from other formats; each result loads with DiaForConditionalGeneration.from_pretrained.

    python finetune/infer/dia_convert.py native dia-v0_1.pth my-dia                  import the authors' own release
    python finetune/infer/dia_convert.py stereo my-dia my-stereo-dia                 widen 9 channels to 18
    python finetune/infer/dia_convert.py average mean-dia runs/x/checkpoints/step-*  average checkpoints or models

./launch.sh convert takes the same arguments. Checkpoints of a run are exported by convert.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.errors import UserError, command_parser, run_command


def parse_args():
    parser = command_parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    native = verbs.add_parser("native", help="import the native .pth or .safetensors")
    native.add_argument("file", type=Path)
    native.add_argument("out", type=Path)
    stereo = verbs.add_parser("stereo", help="widen a mono model; with left = right it computes the same as before")
    stereo.add_argument("model", help="folder or hub id")
    stereo.add_argument("out", type=Path)
    stereo.add_argument("--revision", default="", help="revision of the model on the hub; default: the newest")
    average = verbs.add_parser("average", help="average checkpoints of dia_full or model folders")
    average.add_argument("out", type=Path)
    average.add_argument("sources", type=Path, nargs="+")
    return parser.parse_args()


def convert(args) -> None:
    if args.out.exists():
        raise UserError(f"{args.out} exists already.")
    import torch

    from common import hub
    from models.dia import weights as dia_weights

    if args.verb == "native":
        dia_weights.import_native(args.file, args.out)
    elif args.verb == "average":
        dia_weights.average(args.sources, args.out)
    else:
        hub.fetch(args.model, None, args.revision)
        model = dia_weights.load_dia(args.model, torch.float32)
        channels = model.config.decoder_config.num_channels
        dia_weights.widen(model, {"zero_optimization": {"stage": 0}})
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        dia_weights.write_model(args.out, model, weights, args.model, {}, {"widened_from": channels})
    print(f"model in {args.out}")


def main() -> None:
    run_command(convert, parse_args())


if __name__ == "__main__":
    main()
