"""Make a Hugging Face folder from Llama as Meta distributes it (params.json, consolidated.*.pth, tokenizer.model).

    python finetune/infer/llama_convert.py Llama3.2-1B my-llama

Then train with --model my-llama. The whole model must fit in memory.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.config import EXIT_USER_ERROR, UserError


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="folder with params.json and consolidated.*.pth")
    parser.add_argument("out", type=Path, help="folder to write")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        if args.out.exists():
            raise UserError(f"{args.out} exists already.")
        from models.mot.meta import convert

        convert(args.folder, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    print(f"model in {args.out}")


if __name__ == "__main__":
    main()
