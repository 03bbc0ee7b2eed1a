"""Write report.html of a run, or one page that compares several.

    ./launch.sh report runs/my-voice
    ./launch.sh report runs/my-voice runs/other-voice --out comparison.html

The page is one file that needs no network. A run that has not finished, or crashed, has a report too.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the recipes

from common.errors import UserError, command_parser, run_command
from infer.dispatch import read_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.prog = "./launch.sh report"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write; default: report.html in the run folder, or comparison.html next to the first of several",
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    for run in args.runs:
        read_recipe(str(run))
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run} holds no metrics.jsonl: it has not begun to train.")
    from common.report import comparison_page, report_page, write_page

    first = args.runs[0]
    if len(args.runs) > 1:
        page, place = comparison_page(args.runs), first.resolve().parent / "comparison.html"
    else:
        page, place = report_page(first), first / "report.html"
    print(write_page(page, args.out or place))


if __name__ == "__main__":
    run_command(main)
