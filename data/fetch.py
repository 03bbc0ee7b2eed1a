"""Download a model or a codec from the Hugging Face hub, for machines that have no network later.

    python data/fetch.py nari-labs/Dia-1.6B-0626
    python data/fetch.py nari-labs/Dia-1.6B-0626 --revision main

Run it again after an interruption: files that are complete are not downloaded again. The last line of the output is the
folder, which is named after the commit. All commands download what they need by themselves, so this one is never
required.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, command_parser, run_command
from lib.hub import fetch


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("name", metavar="owner/name", help="model or codec on the hub")
    parser.add_argument("--revision", default="", help="branch, tag or commit (default: the newest)")
    parser.add_argument(
        "--result", type=Path, metavar="FILE", help='for programs: write {"folder"} or {"problem"} here as JSON'
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    try:
        folder = fetch(args.name, args.revision or None)
    except UserError as error:
        if not args.result:
            raise
        args.result.write_text(json.dumps({"problem": str(error)}), encoding="utf-8")
        return
    if args.result:
        args.result.write_text(json.dumps({"folder": str(folder)}), encoding="utf-8")
    else:
        print(folder)


if __name__ == "__main__":
    run_command(main)
