"""One pair of ranks trains several configurations one after another: an import of the libraries costs 10 s.

    run_many.py RECIPE JOBS.json      JOBS: [{"config": {...}}, ...] or {"call": "module:function", "with": {...}}

After each run it writes RUN/probe.npz (logits of the first evaluation batch, computed by the training engine) and
RUN/modules.json (what the process has imported) and RUN/buffers.json (what it would leave behind in shared memory).
"""

import importlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "tests")]


def main() -> None:
    from common.runtime import forbid_codec_imports

    forbid_codec_imports()
    recipe = importlib.import_module(sys.argv[1])
    import numpy as np
    import torch

    from common.ds_config import resolve_ds
    from common.runtime import init_process

    probe = higgs_logits if sys.argv[1].startswith("higgs") else dia_logits
    ranks = init_process()
    for job in json.loads(Path(sys.argv[2]).read_text()):
        if "call" in job:
            module, function = job["call"].split(":")
            getattr(importlib.import_module(module), function)(ranks, **job["with"])
            continue
        config = recipe.Config(**job["config"])
        engine = recipe.train(config, ranks, resolve_ds(config.ds, config, ranks.world))
        model = engine.module.model.eval()
        if not config.eval_data:
            continue
        with torch.no_grad():
            logits = probe(model, config)
        if ranks.is_main:
            np.savez(Path(config.out) / "probe.npz", logits=logits.float().numpy())
            modules = sorted(name for name, module in sys.modules.items() if module)
            (Path(config.out) / "modules.json").write_text(json.dumps(modules))
            buffers = Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")
            (Path(config.out) / "buffers.json").write_text(json.dumps([str(path) for path in buffers]))


def dia_logits(model, config):
    from common.lora import base_model
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    layout = layout_of(base_model(model).config)
    batch = Clips(TokenDataset(config.eval_data), layout, config, {}, train=False).batch([0, 1])
    batch.pop("ids")
    batch.pop("labels")
    return model(**batch, use_cache=False).logits


def higgs_logits(model, config):
    from helpers.higgs_support import logits_of

    return logits_of(model, config)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
