"""One group of ranks trains several Diffusion Buffer configurations one after another: an import costs 10 s.

    run_many_diffusion_buffer.py JOBS.json      JOBS: [{"config": {...}, "nan": id, "inf": bool}, ...]

"nan": this clip's samples are NaN. "inf": the network's loss is infinite under autocast. After each run every rank
writes RUN/network-RANK.pt.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "finetune"))


def main() -> None:
    from common.runtime import bar_codecs

    bar_codecs()
    from common.scorer import Scorer

    scorer = Scorer(1)
    import torch

    import diffusion_buffer as recipe
    from common.ds_config import resolve_ds
    from common.runtime import start_ranks
    from models.buffer_data import Windows

    ranks = start_ranks(timeout_minutes=2)
    honest_item, honest_loss = Windows.item, recipe.batch_to_loss
    for job in json.loads(Path(sys.argv[1]).read_text()):

        def item(self, row, epoch, name, job=job):
            made = honest_item(self, row, epoch, name)
            if name == job.get("nan"):
                made["noisy"][:] = float("nan")
            return made

        def loss(model, batch, spec, job=job):
            total, *rest = honest_loss(model, batch, spec)
            return (total * float("inf") if job.get("inf") and batch["autocast"] else total), *rest

        Windows.item, recipe.batch_to_loss = item, loss
        config = recipe.Config(**job["config"])
        recipe.make_safe(config)
        engine = recipe.train(config, ranks, resolve_ds(config.ds, config, ranks.world), scorer)
        torch.save(engine.module.model.state_dict(), Path(config.out) / f"network-{ranks.rank}.pt")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
