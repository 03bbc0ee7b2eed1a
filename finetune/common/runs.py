"""The run folder, and the demo assets that stand in for a model and data."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common.checkpoint import write_json
from common.config import RunConfig, UserError
from common.runtime import Ranks, from_first, say

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "bitsandbytes")
# What may change between a run and its continuation without changing a single number of it.
FREE_TO_CHANGE = {
    *(
        "ds",
        "out",
        "resume",
        "dry_run",
        "verify_data",
        "save_every",
        "keep",
        "eval_every",
        "sample_every",
        "samples",
    ),
    *("export", "max_skips"),
}


def run_folder(config: RunConfig, recipe: str, ranks: Ranks) -> Path:
    """--out, or a folder named after the recipe and the time; the same on every rank."""
    name = config.out or str(Path("runs") / time.strftime(f"{recipe}-%Y%m%d-%H%M%S"))
    return Path(from_first(name, ranks))


def demo_assets(ranks: Ranks) -> Path:
    """The tiny model, codec and corpus of data/demo.py, made once by a process of its own."""
    folder = ROOT / "runs" / "demo-assets"
    say("embedded demo: a tiny random model and a synthetic corpus; --model and --data name the real thing")
    code = None
    if ranks.first:
        code = subprocess.run([sys.executable, ROOT / "data" / "demo.py", "--out", folder], check=False).returncode
    if from_first(code, ranks):
        raise UserError("data/demo.py could not make the demo assets; see its message above.")
    return folder


def identity(config: RunConfig, stage: int, ranks: Ranks, fingerprint: str) -> dict:
    """Everything a checkpoint depends on: a run goes on only from a checkpoint with the same."""
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE_TO_CHANGE}
    return fields | {"zero_stage": stage, "ranks": ranks.world, "data_fingerprint": fingerprint}


def write_config(folder: Path, recipe: str, config: RunConfig, ds: dict, facts: dict) -> None:
    """config.json: everything needed to repeat the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "recipe": recipe,
            "config": dataclasses.asdict(config),
            "ds_config": ds,
            **facts,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "git_commit": _git_commit(),
        },
    )


def _git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def gather_names(names: list[str], ranks: Ranks) -> list[str]:
    """The names of all ranks, on every rank."""
    if ranks.world == 1:
        return names
    import torch.distributed as dist

    boxes = [None] * ranks.world
    dist.all_gather_object(boxes, names)
    return [name for box in boxes for name in box]


def fresh(folder: Path) -> None:
    """An empty folder under this name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def replace(draft: Path, final: Path) -> None:
    """Puts a finished folder in place of an older one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    draft.rename(final)
    shutil.rmtree(old, ignore_errors=True)
