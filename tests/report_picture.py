"""A picture of a run's report, for README.md: the top of the page, down to the first sample.

    ./launch.sh demo --out runs/demo
    python tests/report_picture.py runs/demo docs/report.png

It needs a browser: ./launch.sh setup --with-browser.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "finetune")]  # next to this folder, which is there already

from helpers import browser  # noqa: E402


def main() -> None:
    if len(sys.argv) != 3 or browser.missing():
        sys.exit(browser.missing() or __doc__)
    run, file = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, browser.open_browser(folder) as driver:
        browser.take_picture(run, file, driver)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
