"""What CMGAN is trained on for one pair, for ./launch.sh inspect."""

from common.evaluation import evaluating
from common.feed import to_device
from common.inspection import Table, facts, find_clip, level_table
from common.runtime import Process
from models.cmgan import signal
from models.cmgan.watch import GanRamp


def sections(recipe, config, load, ds: dict, name: str | None, epoch: int, process: Process) -> list:
    """`recipe`: cmgan. `load` None: nothing is enhanced; trained weights come with --model."""
    clips, *_ = recipe.build_data(config, process)
    pairs, clip = clips.pairs, find_clip(clips.pairs, clips.rows, name)
    row = clips.rows[clip]
    batch = clips.batch([clip], epoch)
    length, samples, rate = clips.length, int(pairs.samples[row]), signal.RATE
    if samples > length:
        start, draws = pairs.crop_start(row, length, config.seed, epoch, pairs.id(row))
        place = f"from {start / rate:.3f} s (sample {start})"
        place += f", place {draws + 1} of those drawn: the others had too little speech" if draws else ""
    else:
        start, place = 0, f"the whole clip, repeated {length / samples:.2f} times"
    normalised = signal.normalise(batch["noisy"], batch["clean"])
    shown = {
        "id": pairs.id(row),
        "data": pairs.folder,
        "epoch": epoch,
        "clip": f"{samples / rate:.3f} s ({samples} samples of {rate} Hz)",
        "crop": f"{length / rate:.3f} s ({length} samples) {place}",
        "normalised by": f"{float(normalised.scale[0]):.4f}, so that the noisy crop has unit power",
        "spectrum": "{} frames of {} bins, compressed to |X|^{}".format(
            *signal.spectrum(batch["noisy"]).shape[2:], signal.POWER
        ),
        "counts in the loss": "yes" if normalised.audible[0] else "no: the noisy crop is silence",
    }
    waves = {side: batch[side][0].numpy() for side in ("noisy", "clean")}
    more = []
    if load:
        output, terms = compute(recipe, config, ds, batch, process)
        estimate = output.extra
        waves["enhanced"] = (estimate.wave / estimate.normalised.scale[:, None])[0].cpu().numpy()
        shown["loss"] = f"{float(output.loss_sum):.5f}"
        weights = recipe.loss_weights(config, 1.0)
        rows = [
            [term, f"{weights[term]:g}", f"{float(value[0]):.5f}", f"{float(output.parts[term][0]):.5f}"]
            for term, value in terms.items()
        ]
        note = "computed by the recipe's loss_terms and compute_loss, the GAN term with its full weight"
        more = [Table("Loss", ["term", "weight", "value", "weighted"], rows, note)]
    return [facts("Clip", shown), level_table(waves), *more]


def compute(recipe, config, ds: dict, batch: dict, process: Process) -> tuple:
    """The recipe's loss of the crop, and its terms (1,) without weights."""
    generator, discriminator = (network.to(process.device) for network in recipe.build_model(config, ds))
    with evaluating(generator), evaluating(discriminator):
        ramp = GanRamp(used=False)
        output = recipe.compute_loss(generator, to_device(batch, process.device), discriminator, config, ramp)
        return output, recipe.loss_terms(output.extra, discriminator)
