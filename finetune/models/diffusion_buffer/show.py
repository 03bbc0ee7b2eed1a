"""What Diffusion Buffer is trained on for one pair, for ./launch.sh inspect. F bins, K frames."""

from common.evaluation import evaluating
from common.feed import to_device
from common.inspection import Table, facts, find_clip, level_table
from common.runtime import Process
from models.diffusion_buffer import signal
from models.diffusion_buffer.weights import spec_of


def sections(recipe, config, load, ds: dict, name: str | None, epoch: int, process: Process) -> list:
    """`recipe`: diffusion_buffer. `load` None: nothing is enhanced; trained weights come with --model."""
    spec = spec_of(config)
    clips, _ = recipe.build_data(config, spec, None, process)
    pairs, clip = clips.pairs, find_clip(clips.pairs, clips.rows, name)
    row = clips.rows[clip]
    key = (config.seed, epoch, pairs.id(row))
    batch = clips.batch([(epoch, clip)]) | {"autocast": config.precision == "bf16"}
    rate, samples = signal.RATE, int(pairs.samples[row])
    last, context = clips.last_frame(row, key), spec.frames - spec.buffer
    real = clips.real_frames(epoch, clip)
    first = (last - spec.frames + 1) * spec.hop - spec.n_fft // 2  # as in data.cut
    start = first / rate
    length = batch["noisy"].shape[1]
    shown = {
        "id": pairs.id(row),
        "data": pairs.folder,
        "epoch": epoch,
        "clip": f"{samples / rate:.3f} s ({samples} samples of {rate} Hz)",
        "crop": f"{length / rate:.3f} s from {start:.3f} s (sample {first}), {spec.frames} frames of {spec.bins} bins",
        "silence before the clip": f"{spec.frames - real} frames",
        "context": f"{context} frames of clean speech",
        "buffer": f"the last {spec.buffer} frames, which the loss is of",
        "random gain": f"{clips.gain(key):.2f} dB",
        "output": "clean speech (dp)" if spec.predicts_clean else f"the score ({spec.loss})",
    }
    times = [
        [str(context + b), f"{t:.4f}", f"{sigma:.4f}"]
        for b, (t, sigma) in enumerate(zip(batch["t"][0].tolist(), batch["sigma"][0].tolist(), strict=True))
    ]
    buffer = Table("Buffer", ["frame", "t", "sigma"], times, "diffusion times, 0 clean to 1 noisy, and their noise")
    more = []
    if load:
        output = compute(recipe, config, ds, spec, batch, process)
        weight = spec.bins * spec.buffer
        shown["loss"] = f"{float(output.loss_sum) / weight:.5f}"
        rows = [[part, f"{count:g}", f"{total / count:.5f}"] for part, (total, count) in parts_of(output).items()]
        rows += [[name, "", f"{float(value):.5f}"] for name, value in output.extra.items()]
        note = "computed by the recipe's compute_loss, by quarter of the buffer: t1 nearly clean to t4 nearly noisy"
        more = [Table("Loss", ["part", "bins", "value"], rows, note)]
    waves = {side: batch[side][0].numpy() for side in ("noisy", "clean")}
    return [facts("Clip", shown), level_table(waves), buffer, *more]


def compute(recipe, config, ds: dict, spec, batch: dict, process: Process):
    """The recipe's loss of the crop."""
    model = recipe.build_model(config, ds)[0].to(process.device)
    with evaluating(model):
        return recipe.compute_loss(model, to_device(batch, process.device), spec)


def parts_of(output) -> dict[str, tuple[float, float]]:
    return {name: tuple(part.tolist()) for name, part in output.parts.items()}
