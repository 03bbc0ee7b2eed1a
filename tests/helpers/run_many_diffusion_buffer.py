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
    from common.runtime import forbid_codec_imports

    forbid_codec_imports()
    from common.scorer import Scorer

    scorer = Scorer(1)
    import torch

    import diffusion_buffer as recipe
    from common.ds_config import resolve_ds
    from common.runtime import init_process
    from models.diffusion_buffer.data import Clips

    process = init_process(timeout_minutes=2)
    honest_item, honest_loss, honest_evaluate = Clips.item, recipe.compute_loss, recipe.evaluate
    for job in json.loads(Path(sys.argv[1]).read_text()):

        def item(self, row, epoch, name, spec, job=job):
            made = honest_item(self, row, epoch, name, spec)
            if name == job.get("nan"):
                made["noisy"][:] = float("nan")
            return made

        def loss(model, batch, spec, job=job):
            if process.is_main and len(batch["ids"]) > job.get("fits", 99):
                raise torch.OutOfMemoryError("CUDA out of memory")
            output = honest_loss(model, batch, spec)
            infinite = job.get("inf") and batch["autocast"]
            return output._replace(loss_sum=output.loss_sum * float("inf")) if infinite else output

        def evaluate(model, clips, run, ema, step, job=job):
            score = honest_evaluate(model, clips, run, ema, step)
            return job["scores"][step - 1] if "scores" in job and step else score

        Clips.item, recipe.compute_loss, recipe.evaluate = item, loss, evaluate
        config = recipe.Config(**job["config"])
        engine = recipe.train(config, process, resolve_ds(config.ds, config, process.world), scorer)
        torch.save(engine.module.model.state_dict(), Path(config.out) / f"network-{process.rank}.pt")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
