"""Make a Hugging Face folder from Llama as Meta distributes it (params.json, consolidated.*.pth, tokenizer.model).

    python finetune/infer/llama_convert.py Llama3.2-1B my-llama

Then train with --model my-llama. The whole model must fit in memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.errors import UserError, command_parser, run_command


def parse_args():
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder with params.json and consolidated.*.pth")
    parser.add_argument("out", type=Path, help="folder to write")
    return parser.parse_args()


def convert(args) -> None:
    if args.out.exists():
        raise UserError(f"{args.out} exists already.")
    from models.mot import meta

    meta.convert(args.folder, args.out)
    print(f"model in {args.out}")


def main() -> None:
    run_command(convert, parse_args())


if __name__ == "__main__":
    main()
