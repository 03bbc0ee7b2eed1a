"""Demo assets without a download, all deterministic; a finished folder is recognised and reused at once.

    python data/demo.py --out demo
    python data/demo.py --out demo-higgs --model higgs

demos/<model>.py says what is in the folder.
"""

import argparse
import hashlib
import importlib
import json
import shutil
import time
from pathlib import Path

from lib.errors import UsageError, run
from lib.store import locked, sync_folder, versions, write_json

MODELS = ("dia", "higgs", "mot", "cmgan", "diffusion_buffer")  # demos/<model>.py has build_parts(folder, final)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--model", choices=MODELS, default="dia", help="whose assets (default: dia)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    print(ensure_demo(args.out, args.model))


def ensure_demo(out: Path, model: str = "dia") -> Path:
    """The demo folder, built unless it is there already; safe to call from several processes at once."""
    out = out.absolute()
    key = demo_key(out, model)
    if read_key(out) == key:
        return out
    with locked(out.with_name(out.name + ".lock"), waiting="another process is building the demo: waiting"):
        if read_key(out) == key:
            return out
        if out.exists() and read_key(out) is None and any(out.iterdir()):
            raise UsageError(f"{out} exists and is no demo folder: give another path or remove it")
        begin = time.monotonic()
        print(f"building the demo in {out} (once, about 15 s)", flush=True)
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
    """Changes with the code and libraries that make the demo, and with its place: the processor names it."""
    here = Path(__file__).parent
    digest = hashlib.sha256(str(out).encode())
    makers = [here / "demo.py", here / "encode.py", here / "pairs.py", *sorted((here / "lib").glob("*.py"))]
    for file in [*makers, *sorted((here / "demos").glob("*.py"))]:
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

    # Threads only cost time on models this small, and on a busy machine minutes.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        importlib.import_module(f"demos.{model}").build_parts(folder, final)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run(main)
