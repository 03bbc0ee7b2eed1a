"""Which card fits which recipe: the fastest settings whose predicted memory leaves 10 % of the card free.

    python tests/bench/bench_cards.py            all models, two minutes, no weights and no GPU
    python tests/bench/bench_cards.py dia_lora   some of them

Real configurations and micro-batches of tests/bench/bench_budget.py, AdamW. Activations are those of the recipe's own
forward and backward pass on tensors without memory. Host memory for offloading is not checked.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "bench"), str(ROOT / "finetune"), str(ROOT / "data")]
import bench_budget  # noqa: E402

from common import memory  # noqa: E402
from common.config import RunConfig  # noqa: E402
from common.ds_config import resolve_ds  # noqa: E402
from common.fit import FILES, ROOM  # noqa: E402

CARDS, RANKS = (16, 24, 48, 80), (1, 8, 64)
SETTINGS = [(file, ck) for file in FILES for ck in (False, True)]  # ck: gradient checkpointing
FP32 = ("cmgan", "diffusion_buffer")
NO_CHECKPOINTING = ("diffusion_buffer",)
ROWS = [name for name in bench_budget.ROWS if name not in ("llama_mot 1B untie all", "cmgan discriminator")]


def needs(name: str) -> tuple[int, dict]:
    """Positions of the micro-batch, and bytes on the GPU for every (ranks, file, checkpointing)."""
    fp32, found = name.startswith(FP32), {}
    config = RunConfig(precision="fp32" if fp32 else "bf16")
    for checkpointing in (False,) if name.startswith(NO_CHECKPOINTING) else (False, True):
        model, batch, loss = bench_budget.ROWS[name]().ours(checkpointing)
        total, trained = memory.count_parameters(model)

        def loss_fn(model, batch, loss=loss):
            output = loss(model, batch)
            return output if hasattr(output, "loss_sum") else SimpleNamespace(loss_sum=output)

        activations = memory.activation_bytes(model, loss_fn, batch)
        for file, ranks in ((file, ranks) for file, ck in SETTINGS if ck is checkpointing for ranks in RANKS):
            ds = resolve_ds(f"ds_configs/{file}.json", config, ranks)
            need = memory.predict(total, trained, ds, 4 if fp32 else 2, memory.STATE_BYTES["adamw"], ranks)
            found[ranks, file, checkpointing] = need["device"] + need["working"] + activations
    return batch["positions"], found


def cell(found: dict, ranks: int, card: int) -> str:
    for file, checkpointing in SETTINGS:
        size = found.get((ranks, file, checkpointing), float("inf")) / 2**30
        if size <= ROOM * card:
            return f"{file}{' + checkpointing' if checkpointing else ''} ({size:.1f})"
    return "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all without")
    names = parser.parse_args().rows or ROWS
    print("| recipe | positions | GPUs | " + " | ".join(f"{card} GB" for card in CARDS) + " |")
    print("|---" * (len(CARDS) + 3) + "|")
    for name in names:
        positions, found = needs(name)
        for ranks in RANKS:
            cells = [name, f"{positions:,}", str(ranks), *(cell(found, ranks, card) for card in CARDS)]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
