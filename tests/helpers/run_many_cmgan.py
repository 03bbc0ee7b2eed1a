"""One group of ranks trains several CMGAN configurations one after another: an import of the libraries costs 10 s.

    run_many_cmgan.py JOBS.json      JOBS: [{"config": {...}, "nan": id or null}, ...]

After each run every rank writes RUN/networks-RANK.pt with the weights and buffers of both networks.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "tests")]


def main() -> None:
    from common.runtime import bar_codecs

    bar_codecs()
    from common.scorer import Scorer

    scorer = Scorer(1)
    import torch

    import cmgan
    from common.ds_config import resolve_ds
    from common.pairs import Crops
    from common.runtime import start_ranks

    ranks = start_ranks(timeout_minutes=2)
    honest = Crops.batch
    for job in json.loads(Path(sys.argv[1]).read_text()):
        config, poisoned = cmgan.Config(**job["config"]), job.get("nan")

        def batch(self, chosen, epoch=0, poisoned=poisoned):
            made = honest(self, chosen, epoch)
            if poisoned in made["ids"]:
                made["noisy"][made["ids"].index(poisoned), 5] = float("nan")
            return made

        Crops.batch = batch
        engines = cmgan.train(config, ranks, resolve_ds(config.ds, config, ranks.world), scorer)
        networks = {name: engines[name].module.model.state_dict() for name in engines}
        torch.save(networks, Path(config.out) / f"networks-{ranks.rank}.pt")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
