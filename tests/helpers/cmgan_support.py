"""What the tests of CMGAN share."""

import contextlib
from unittest import mock

import torch

SMALL = {
    "channels": 8,
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
    "gradient_checkpointing": False,
}


def small_probe(watch) -> None:
    """Changes models.cmgan.watch: a discriminator is judged quickly and often, and the GAN loss soon faded in."""
    watch.PROBE, watch.PROBE_EVERY, watch.RAMP, watch.OPENS, watch.CLOSES = 8, 2, 6, -1.0, -1.0


# ---- in the ranks (rank_server.py) -----------------------------------------------------------------------------


@contextlib.contextmanager
def watched(recipe, process, nan=None):
    """`nan`: a sample of this clip is NaN. Every rank writes RUN/networks-RANK.pt with weights and buffers of both
    networks as the last step left them, before the best checkpoint is loaded for the export."""
    from common.pairs import Crops
    from common.runs import Run
    from models.cmgan import watch

    probe, watch.PROBE = watch.PROBE, 8
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
        Crops.batch, Run.load_best, watch.PROBE = batch, load_best, probe


# ---- on a device that is not there (fake_device.py) ------------------------------------------------------------


def generator_step(channels: int = 8, crops: int = 4, seconds: float = 2.0, **flags) -> tuple:
    """Networks, micro-batch and loss of the generator's step."""
    import cmgan
    from models.cmgan import signal
    from models.cmgan.watch import GanRamp

    config = cmgan.Config(channels=channels, **flags)
    generator, discriminator = cmgan.build_model(config, {"zero_optimization": {"stage": 2}})
    networks = torch.nn.ModuleDict({"g": generator, "d": discriminator.requires_grad_(False)}).train()
    samples = int(16000 * seconds)
    batch = {"noisy": torch.zeros(crops, samples), "clean": torch.zeros(crops, samples), "positions": crops * samples}
    batch["hiss"] = signal._hiss(samples, torch.device("cpu"))
    gan_ramp = GanRamp(False)

    def loss(networks, batch):
        # A step after the first, which has left the hiss on the device.
        with mock.patch.object(signal, "_hiss", lambda length, device: batch["hiss"]):
            return cmgan.compute_loss(networks["g"], batch, networks["d"], config, gan_ramp)

    return networks, batch, loss


def discriminator_step(channels: int = 4, crops: int = 4, seconds: float = 2.0) -> tuple:
    """The same of the discriminator's, with --noisy-term."""
    import cmgan
    from models.cmgan.labels import Labelled
    from models.cmgan.network import BINS, Discriminator

    frames = int(16000 * seconds) // 100 + 1
    batch = {name: torch.zeros(crops, 1, BINS, frames) for name in ("clean", "made", "noisy")}
    batch |= {name: torch.zeros(crops) for name in ("labels", "valid")} | {"positions": crops * int(16000 * seconds)}

    def loss(discriminator, batch):
        labels, valid = batch["labels"], batch["valid"]
        others = [batch["made"], batch["noisy"]]
        labelled = Labelled(batch["clean"], others, [labels] * 2, [valid] * 2)
        return cmgan.discriminator_loss(discriminator, (labelled, float(crops), [float(crops)] * 2))

    return Discriminator(channels).train(), batch, loss
