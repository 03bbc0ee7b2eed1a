"""Trains an enhancer in a process whose memory is limited, really, from the second micro-batch on.

python tests/helpers/limited_memory.py SHARE RECIPE.LOSS FLAGS...

LOSS: the function of the recipe that computes the loss whose second micro-batch, and all after it, are limited.
SHARE: of the memory that its first micro-batch took on top of what the process had. A SHARE above 1 limits nothing.
MALLOC_MMAP_THRESHOLD_ must be set: what is freed then leaves the address space, which is what the limit counts.
"""

import importlib
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))

from common.config import parse_args
from common.runtime import catch_signals, resident_bytes, run_main
from common.scorer import Scorer


def main() -> None:
    assert "MALLOC_MMAP_THRESHOLD_" in os.environ
    share, name, *words = sys.argv[1:]
    catch_signals()
    scorer = Scorer(1)
    name, loss = name.split(".")
    recipe = importlib.import_module(name)
    compute_loss, sizes = getattr(recipe, loss), []

    def limited(*args, **kwargs):
        sizes.append(resident_bytes("VmSize"))
        if len(sizes) == 2:
            needed = resident_bytes("VmPeak") - sizes[0]
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (int(sizes[1] + float(share) * needed), hard))
            print(f"a micro-batch took {needed / 2**20:.0f} MB", flush=True)
        return compute_loss(*args, **kwargs)

    setattr(recipe, loss, limited)
    run_main(recipe.main, parse_args(recipe.Config, recipe.__doc__, words), scorer)


if __name__ == "__main__":
    main()
