"""One group of ranks trains several CMGAN configurations one after another: an import of the libraries costs 10 s.

    run_many_cmgan.py JOBS.json      JOBS: [{"config": {...}, "nan": id or null}, ...]

After each run every rank writes RUN/networks-RANK.pt with the weights and buffers of both networks as the last step
left them, before the best checkpoint is loaded for the export.
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

    import cmgan
    from common.ds_config import resolve_ds
    from common.pairs import Crops
    from common.runs import Run
    from common.runtime import init_process

    process = init_process(timeout_minutes=2)
    honest, load_best = Crops.batch, Run.load_best

    def save_networks(run, engines, *arguments):
        networks = {name: engines[name].module.model.state_dict() for name in engines}
        torch.save(networks, run.folder / f"networks-{process.rank}.pt")
        return load_best(run, engines, *arguments)

    Run.load_best = save_networks
    for job in json.loads(Path(sys.argv[1]).read_text()):
        config, poisoned = cmgan.Config(**job["config"]), job.get("nan")

        def batch(self, indices, epoch=0, poisoned=poisoned):
            made = honest(self, indices, epoch)
            if poisoned in made["ids"]:
                made["noisy"][made["ids"].index(poisoned), 5] = float("nan")
            return made

        Crops.batch = batch
        cmgan.train(config, process, resolve_ds(config.ds, config, process.world), scorer)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
