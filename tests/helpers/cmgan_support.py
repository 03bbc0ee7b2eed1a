"""What the tests of CMGAN share."""

import contextlib

import torch

SMALL = {
    "channels": 8,
    "disc_channels": 4,
    "seconds": 0.5,
    "micro_batch": 1,
    "accumulation": 2,
    "steps": 3,
    "lr": 2e-4,  # at 5e-4 the largest difference to one process is 1e-5, not 1e-6; why was not looked into
    "warmup": 2.0,
    "ema": 0.0,
    "eval_every": 0,
    "save_every": 0,
    "samples": 0,
    "probe": 8,
    "gradient_checkpointing": False,
}


# ---- in the ranks (rank_server.py) -----------------------------------------------------------------------------


@contextlib.contextmanager
def watched(recipe, process, nan=None):
    """`nan`: a sample of this clip is NaN. Every rank writes RUN/networks-RANK.pt with weights and buffers of both
    networks as the last step left them, before the best checkpoint is loaded for the export."""
    from common.pairs import Crops
    from common.runs import Run

    batch, load_best = Crops.batch, Run.load_best

    def batch_with_nan(self, indices, epoch=0):
        crops = batch(self, indices, epoch)
        if nan in crops["ids"]:
            crops["noisy"][crops["ids"].index(nan), 5] = float("nan")
        return crops

    def save_networks(run, engines, *arguments):
        networks = {name: engines[name].module.model.state_dict() for name in engines}
        torch.save(networks, run.folder / f"networks-{process.rank}.pt")
        return load_best(run, engines, *arguments)

    Crops.batch, Run.load_best = batch_with_nan, save_networks
    try:
        yield
    finally:
        Crops.batch, Run.load_best = batch, load_best
