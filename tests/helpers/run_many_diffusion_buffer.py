"""One group of ranks trains several Diffusion Buffer configurations one after another: an import costs 10 s.

    run_many_diffusion_buffer.py JOBS.json      JOBS: [{"config": {...}, "nan": id, "inf": bool, ...}, ...]

"nan": this clip's samples are NaN. "inf": the network's loss is infinite under autocast. "fits": a micro-batch of more
crops is too much for the first rank's memory. "scores": what the evaluations from step 1 on find. After each run every
rank writes RUN/network-RANK.pt.
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

    import diffusion_buffer as recipe
    from common.ds_config import resolve_ds
    from common.runtime import start_ranks
    from models.diffusion_buffer.data import Windows

    ranks = start_ranks(timeout_minutes=2)
    honest_item, honest_loss, honest_evaluate = Windows.item, recipe.batch_to_loss, recipe.evaluate
    for job in json.loads(Path(sys.argv[1]).read_text()):

        def item(self, row, epoch, name, spec, job=job):
            made = honest_item(self, row, epoch, name, spec)
            if name == job.get("nan"):
                made["noisy"][:] = float("nan")
            return made

        def loss(model, batch, spec, job=job):
            if ranks.first and len(batch["ids"]) > job.get("fits", 99):
                raise torch.OutOfMemoryError("CUDA out of memory")
            total, *rest = honest_loss(model, batch, spec)
            return (total * float("inf") if job.get("inf") and batch["autocast"] else total), *rest

        def evaluate(model, evaluation, run, step, job=job):
            found = honest_evaluate(model, evaluation, run, step)
            return job["scores"][step - 1] if "scores" in job and step else found

        Windows.item, recipe.batch_to_loss, recipe.evaluate = item, loss, evaluate
        config = recipe.Config(**job["config"])
        recipe.make_safe(config)
        engine = recipe.train(config, ranks, resolve_ds(config.ds, config, ranks.world), scorer)
        torch.save(engine.module.model.state_dict(), Path(config.out) / f"network-{ranks.rank}.pt")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
