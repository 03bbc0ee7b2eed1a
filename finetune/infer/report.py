"""Write report.html of a run, or one page that compares several.

    ./launch.sh report runs/my-voice
    ./launch.sh report runs/my-voice runs/other-voice --out comparison.html

The page is one file that needs no network. A run that has not finished, or crashed, has a report too.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as for the recipes

from common.errors import EXIT_USER_ERROR, UserError
from infer.dispatch import read_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./launch.sh report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder; several are compared")
    parser.add_argument("--run", type=Path, help="the same as RUN, as in the other commands")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write; default: report.html in the run folder, or comparison.html next to the first of several",
    )
    return parser.parse_args(argv)


def write(args: argparse.Namespace) -> Path:
    given = [*([args.run] if args.run else []), *args.runs]
    runs = list({run.resolve(): run for run in given}.values())
    if not runs:
        raise UserError("report: give a run folder, or several, as in ./launch.sh report runs/my-voice")
    for run in runs:
        read_recipe(str(run))
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run} holds no metrics.jsonl: it has not begun to train.")
    from common.report import comparison_page, report_page, write_page

    several = len(runs) > 1
    out = args.out or (runs[0].resolve().parent / "comparison.html" if several else runs[0] / "report.html")
    try:
        return write_page(comparison_page(runs) if several else report_page(runs[0]), out)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error.strerror}.") from None


if __name__ == "__main__":
    try:
        print(write(parse_args()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
