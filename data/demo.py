"""Build the demo: a synthetic corpus and tiny models, deterministic and without a download.

    python data/demo.py --out demo
    python data/demo.py --out demo-higgs --model higgs
    python data/demo.py --out demo-pairs --model pairs

The docstring of data/demos/<model>.py lists what is in the folder. A folder that is up to date is reused.
"""

import argparse
import hashlib
import importlib
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, command_parser, run_command
from lib.store import locked, sync_folder, versions, write_json

HERE = Path(__file__).resolve().parent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the demo")
    parser.add_argument("--model", choices=find_models(), default="dia", help="which demo to build (default: dia)")
    return parser.parse_args(argv)


def find_models() -> list[str]:
    """Every demos/<model>.py that defines build_parts(folder, final); read as text, because importing takes time."""
    return [file.stem for file in sorted((HERE / "demos").glob("*.py")) if "\ndef build_parts(" in file.read_text()]


def main() -> None:
    args = parse_args()
    print(ensure_demo(args.out, args.model))


def ensure_demo(out: Path, model: str = "dia") -> Path:
    """The demo folder, built if it is missing or outdated; several processes may call this at once."""
    out = out.absolute()
    key = demo_key(out, model)
    if read_key(out) == key:
        return out
    with locked(out.with_name(out.name + ".lock"), waiting="another process is building the demo: waiting"):
        if read_key(out) == key:
            return out
        if out.exists() and read_key(out) is None and any(out.iterdir()):
            raise UserError(f"--out {out} exists and is not a demo folder: choose another path or remove it")
        begin = time.monotonic()
        print(f"building the demo in {out} (only once)", flush=True)
        temporary = out.with_name(out.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        build(temporary, out, model)
        write_json(temporary / "demo.json", {"key": key})
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
        sync_folder(out.parent)
        print(f"demo ready in {time.monotonic() - begin:.1f} s", flush=True)
    return out


def demo_key(out: Path, model: str) -> str:
    """A hash of the code, assets and libraries that build the demo, and of its path, which is stored in its files."""
    digest = hashlib.sha256(str(out).encode())
    code = [HERE / "demo.py", HERE / "encode.py", HERE / "pairs.py", *sorted((HERE / "lib").glob("*.py"))]
    assets = [file for file in sorted((HERE / "assets").rglob("*")) if file.is_file()]
    for file in [*code, *sorted((HERE / "demos").glob("*.py")), *assets]:
        digest.update(file.read_bytes())
    digest.update(json.dumps(versions("torch", "transformers", "datasets", "numpy")).encode())
    return digest.hexdigest()[:16]


def read_key(out: Path) -> str | None:
    try:
        return json.loads((out / "demo.json").read_text())["key"]
    except (OSError, ValueError, KeyError):
        return None


def build(folder: Path, final: Path, model: str) -> None:
    import torch

    # Threads only slow down models this small, on a busy machine by minutes.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        importlib.import_module(f"demos.{model}").build_parts(folder, final)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run_command(main)
