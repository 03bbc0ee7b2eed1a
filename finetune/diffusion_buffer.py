"""Train or fine-tune a Diffusion Buffer: online speech enhancement by diffusion, one network call a frame.

    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --data pairs/train --hold-out p286 --out runs/live
    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --model official.ckpt --data pairs/train \\
        --hold-out p286 --lr 5e-5 --warmup 500 --out runs/tuned

pairs/train is a dataset of data/pairs.py at 16 kHz. The first command starts from nothing; --model takes an export
or a Lightning checkpoint of the official trainer. Then:

    python finetune/diffusion_buffer.py --enhance noisy_wavs --model runs/live/export --out enhanced --delay 5
    python finetune/diffusion_buffer.py --doctor

On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --steps 20 --eval-every 0
"""

import dataclasses
import faulthandler
import functools
import os
import signal as signals
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from common.config import UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.pair_flags import PairConfig
from common.runtime import bar_codecs, catch_signals

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(PairConfig):
    without: ClassVar[tuple[str, ...]] = ("micro_tokens", "seconds", "test_data", "gradient_checkpointing")

    doctor: bool = flag(False, "check mathematics, stream and loss without training, then stop", group="run", free=True)
    deep: bool = flag(False, "--doctor also learns one clip by heart, in minutes", group="run", free=True)
    safe: bool = flag(False, "micro-batches of one crop, fp32, no thread: the same training", group="run", free=True)
    overfit: str = flag("", "train and evaluate on the clip of this id alone: it must learn it by heart", group="run")
    delay: int = flag(0, "--enhance: frames until a frame is given out; 0 = the buffer", group="run", low=0, free=True)
    temperature: float = flag(1.0, "--enhance: scale of the stream's noise; 0 = none", group="run", low=0, free=True)
    refresh_context: bool = flag(False, "--enhance: the newest estimates replace the context", group="run", free=True)
    redraw_start: bool = flag(False, "--enhance: empty places are drawn for each frame", group="run", free=True)

    epochs: float = flag(250.0, "passes over the data, used when --steps is 0", group="schedule", low=0)
    micro_batch: int = flag(4, "crops a rank and micro-batch", group="schedule", low=1, free=True)
    accumulation: int = flag(1, "micro-batches a rank and optimizer step", group="schedule", low=1, free=True)
    schedule: Literal["cosine", "plateau"] = flag("cosine", "after the warm-up", group="schedule")
    patience: int = flag(3, "plateau: evaluations without a better --best-by until a drop", group="schedule", low=1)
    drop: float = flag(0.5, "plateau: factor of a drop, down to --min-lr-ratio", group="schedule", low=0.01, high=1)
    weight_decay: float = flag(0.0, "on matrices only; 0 = off", group="optimizer", low=0)
    ema: float = flag(0.999, "decay of the average of the weights; 0 = off", group="optimizer", low=0, high=0.99999)
    precision: Literal["bf16", "fp32"] = flag("bf16", "of the network; all else is fp32", group="optimizer", free=True)
    max_skips: int = flag(5, "abort after this many non-finite steps in a row", group="optimizer", low=1)
    best_by: Literal["pesq", "estoi", "si_sdr", "sdr", "lsd", "loss"] = flag(
        "pesq", "metric of the stream that chooses checkpoint and export, and that a plateau is seen by", group="output"
    )

    network: Literal["ncsnpp", "block_causal"] = flag("ncsnpp", "of the first or of the second paper")
    width: int = flag(0, "channels of the first scale; 0 = as published, 96 or 128", low=0)
    block: Literal[16, 32] = flag(32, "block_causal: frames of a block")
    n_fft: int = flag(510, "samples of a window", low=30)
    hop: int = flag(256, "samples between windows", low=8)
    frames: int = flag(128, "frames that the network sees, rounded up to what it takes", low=8)
    buffer: int = flag(20, "frames that are being denoised, the last of --frames", low=4)
    buffer_low: int = flag(0, "each step draws its buffer from this many frames up to --buffer; 0 = no draw", low=0)
    sde_c: float = flag(0.08, "noise of the diffusion: g(t)^2 = c k^2t")
    sde_k: float = flag(2.6, "its growth")
    t_eps: float = flag(0.03, "smallest time")
    t_max: float = flag(0.999, "largest time in training")
    reverse_start: float = flag(0.8, "time of the newest frame in the stream")
    loss: Literal["dp", "dsm", "dsm_unweighted"] = flag("dp", "dp: clean speech, any delay; dsm: the score")
    output_scale: Literal["auto", "none", "sigma", "time"] = flag("auto", "auto = none for dp, sigma for dsm")
    times: Literal["jitter", "random", "grid"] = flag("jitter", "how a crop's times are drawn")
    context_time: float = flag(0.0, "time of the context; 1 = official weights of scale time", low=0, high=1)
    context_noise: float = flag(0.0, "share of the crops whose context is not clean", low=0, high=1)
    context_own: float = flag(0.0, "share of the steps whose context is the network's own", low=0, high=1)
    level: Literal["none", "track"] = flag("none", "track: frames are brought to one level by those before them")
    phase: Literal["auto", "start", "middle"] = flag(
        "auto", "of a bin, from its window's start (official weights; ncsnpp) or middle (block_causal)"
    )
    gain_low: float = flag(-12.0, "keyed random level of a crop in dB, from")
    gain_high: float = flag(6.0, "to")
    pad_short: bool = flag(False, "accept clips shorter than the buffer: silence comes before them")

    @property
    def engine_precision(self) -> str:
        return "fp32"  # bf16 is for the network alone; spectra, diffusion and loss need all their digits


# A narrow network that learns the synthetic noise in a minute.
DEMO = {
    "width": 8,
    "frames": 16,
    "buffer": 8,
    "t_max": 0.8,
    "micro_batch": 8,
    "steps": 160,
    "lr": 3e-3,
    "warmup": 20.0,
    "ema": 0.98,
    "precision": "fp32",
    "hold_out": ["dov"],
    "best_by": "si_sdr",
    "gain_low": 0.0,
    "gain_high": 0.0,
    "eval_every": 80,
    "save_every": 80,
    "eval_files": 4,
    "samples": 2,
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and the scorers stay small
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)
    from common.scorer import Scorer

    SCORER = Scorer(CONFIG.pesq_workers)

import deepspeed
import numpy as np
import torch
from torch import nn

from common import engine, memory, runs
from common.feed import mover, prefetch
from common.keyed_random import key64, uniform
from common.metrics import Meter, due
from common.optim import judge, plateau_rate
from common.pairs import PairDataset, open_pairs, split_pairs
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, run_main, say, start_ranks, stop_requested
from common.scorer import Scorer
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Windows, buffer_size
from models.diffusion_buffer.enhance import Traced, enhance_folder, say_latency
from models.diffusion_buffer.evaluate import Evaluation, evaluate, sample, shown_score
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import Spec, batch_to_loss, spec_of
from models.diffusion_buffer.trial import dry_run, try_loss
from models.diffusion_buffer.weights import load_network, write_export

FP32_STEPS = 100  # after a loss that only fp32 could compute

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict, spec: Spec) -> nn.Module:
    if stage_of(ds) == 3:
        raise UserError(f"--ds {config.ds} is ZeRO-3: 18 to 26 million weights need no sharding, use zero2.json.")
    torch.manual_seed(key64(config.seed, "weights") % 2**63)
    if config.model:
        return load_network(config.model, spec)[0]
    return build_network(spec.network, spec.width, spec.block)


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(config: Config, spec: Spec, ranks: Ranks) -> tuple[Windows, PairDataset | None, np.ndarray]:
    """The windows to train on; the pairs, and which of them, to evaluate on."""
    if config.overfit:
        pairs = open_pairs(config.data, signal.RATE, config.verify_data, ranks)
        rows = pairs.rows_named(config.overfit)
        return Windows(pairs, rows, spec, config), pairs, rows
    crops, chosen, rows = split_pairs(config, signal.RATE, ranks)
    return Windows(crops.pairs, crops.rows, spec, config), chosen, rows


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch, spec: Spec):
    """Loss sum, its parts by quarter of the times, and the output's size; see models/diffusion_buffer/signal.py."""
    return batch_to_loss(model, batch, spec)


def loss_or_fp32(ds_engine, batch: dict):
    """The loss, computed again in fp32 where bf16 makes it infinite; whether that helped."""
    found = ds_engine(batch)
    if not batch["autocast"] or bool(found[0].isfinite()):
        return *found, False
    found = ds_engine(batch | {"autocast": False})
    return *found, bool(found[0].isfinite())


# ---- export ----------------------------------------------------------------------------------------------------


def export(model, spec: Spec, run: runs.Run, facts: dict) -> None:
    """The averaged weights with all that a stream needs to know. Every rank must call it."""
    with run.average.in_place():
        if run.ranks.first:
            write_export(run.folder, model, spec, facts | {"training_config": dataclasses.asdict(run.config)})


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict, scorer: Scorer):
    """The whole run; returns the engine with its trained weights."""
    if not config.data:
        if config.model:
            raise UserError("--model without --data: give pairs to train on, or --enhance.")
        config.data = str(runs.demo_assets(ranks, "diffusion_buffer") / "pairs")

    # model and data
    spec = spec_of(config)
    model = build_model(config, ds, spec)
    windows, chosen, rows = build_data(config, spec, ranks)
    crops = config.micro_batch * config.accumulation * ranks.world  # of one optimizer step
    plan = Plan(np.ones(len(windows), dtype=np.int64), 1, config.seed)  # one by one: any split trains the same steps
    steps = config.steps or plan.steps(config.epochs, crops)
    say(f"clips {len(windows):,}, {steps} steps of {crops} crops of {spec.frames} frames, the last {spec.buffer} noisy")
    say_latency(spec, spec.buffer)

    def build(number: int) -> dict:
        """Micro-batch `number` of this rank: its share of a step's crops."""
        step, turn = divmod(number, config.accumulation)
        first = step * crops + (turn * ranks.world + ranks.rank) * config.micro_batch
        parts = [plan.micro_batch(first + i) for i in range(config.micro_batch)]
        batch = windows.batch([(e, int(clip[0])) for e, clip in parts], buffer_size(step, spec, config))
        return mover(ranks.device)(batch) | {"own": uniform(config.seed, step, "own") < config.context_own}

    # engine and resume
    loss_of = functools.partial(compute_loss, spec=spec)
    halved = memory.fit_micro_batch(lambda: try_loss(model, build(0), loss_of, config, ranks), config, ranks)
    ds = resolve_ds(config.ds, config, ranks.world) if halved else ds
    needs = memory.say_needs(model, ds, config, ranks)
    options = {"no_decay": ("GroupNorm", "out_layers.0"), "betas": (0.9, 0.999)}
    ds_engine = engine.start_engine(model, loss_of, config, ds, **options)
    average = engine.Average(ds_engine, config.ema)
    if config.dry_run:
        dry_run(ds_engine, build, crops * spec.bins * buffer_size(0, spec, config), needs, config, ranks)
        return ds_engine
    fingerprint = {"data": windows.pairs.fingerprint(), "rows": len(windows), "crops": crops}
    run = runs.Run("diffusion_buffer", config, ds, ranks, ds_engine, average, fingerprint, steps)
    extra = {"best": None, "stale": 0, "drops": 0, "fp32_until": 0} | run.extra
    evaluation = Evaluation(chosen, rows, spec, config, scorer, ranks) if len(rows) else None
    if config.schedule == "plateau" and not (evaluation and config.eval_every):
        raise UserError("--schedule plateau sees a plateau in evaluations: give --eval-every and pairs to evaluate on.")
    if halved:
        run.tracker.event("out_of_memory", run.start, micro_batch=config.micro_batch, accumulation=config.accumulation)
    stacks = open(run.folder / f"stacks-{ranks.rank:05d}.txt", "w")  # kill -USR2 says where a rank hangs
    faulthandler.enable(stacks)
    faulthandler.register(signals.SIGUSR2, stacks)

    # loop: every rank knows the whole plan
    numbers = range(run.start * config.accumulation, steps * config.accumulation)
    feed = map(build, numbers) if config.safe else prefetch(build, numbers)
    if run.start == 0:
        evaluate(model, evaluation, run, 0)
    if all_sum([float(stop_requested())], ranks)[0]:
        run.stop(run.start)
    model.train()
    for step in range(run.start, steps):
        meter, watched, rescued, sigmas = Meter(), [], 0, []
        target_bins = crops * spec.bins * buffer_size(step, spec, config)
        for turn in range(config.accumulation):
            batch = meter.next(feed)
            batch["autocast"] = config.precision == "bf16" and step >= extra["fp32_until"]
            loss_sum, stats, watch, saved = loss_or_fp32(ds_engine, batch)
            engine.backward(ds_engine, loss_sum, target_bins, ranks.world)
            meter.add(batch, loss_sum, stats)
            watched.append(watch)
            sigmas.append(batch["sigma"])
            rescued += saved
            if turn + 1 < config.accumulation:
                ds_engine.step()  # only counts the micro-batch
        lr = plateau_rate(step, steps, extra["drops"], config)
        engine.set_learning_rate(ds_engine, lr)
        applied, norm = engine.take_step(ds_engine)
        totals = meter.reduce(ranks)

        done, last = step + 1, step + 1 == steps
        parts = [plan.micro_batch(number) for number in range(step * crops, done * crops)]
        if config.precision == "bf16" and all_sum([rescued], ranks)[0]:
            extra["fp32_until"] = done + FP32_STEPS
            run.tracker.event("amp_fallback", done, until=extra["fp32_until"])
            say(f"warning: step {done} was finite only in fp32, which the next {FP32_STEPS} steps take too")
        if applied:
            average.update(step)
            values = {name: max(float(watch[name]) for watch in watched) for name in watched[0]}
            values |= {"sigma_min": float(torch.cat(sigmas).min()), "sigma_max": float(torch.cat(sigmas).max())}
            values["loss"] = float(totals.losses.sum() / totals.counts.sum())
            epoch, heard = round(done * crops / plan.per_epoch, 4), sum(windows.heard(e, int(c[0])) for e, c in parts)
            run.log(done, meter, totals, heard, signal.QUARTERS, epoch=epoch, lr=lr, grad_norm=norm, **values)
        else:
            run.skip(done, meter, [name for _, clip in parts for name in windows.ids(clip)])

        score = None
        if last or due(config.eval_every, done):
            score = evaluate(model, evaluation, run, done)
            if judge(extra, score, config) and config.export:
                export(model, spec, run, {"step": done, "best": shown_score(score, config.best_by)})
        if last or totals.stop or due(config.save_every, done):
            run.save(done, score, extra)
        if totals.stop and not last:
            run.stop(done)
        if evaluation and config.samples and (last or due(config.sample_every, done)):
            sample(model, evaluation, run, done)

    # finish
    if config.export and extra["best"] is None:  # no evaluation, or none that was finite
        export(model, spec, run, {"step": steps})
    all_sum([0.0], ranks)  # what all ranks write is on disk
    run.finish(steps)
    if ranks.first:
        say(f"model    {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return ds_engine


def make_safe(config: Config) -> None:
    """--safe: the same crops in every optimizer step, one at a time and in full precision."""
    if config.safe:
        config.accumulation, config.micro_batch = config.accumulation * config.micro_batch, 1
        config.precision = "fp32"


def main(config: Config) -> None:
    make_safe(config)
    spec = spec_of(config)
    if config.doctor:
        from models.diffusion_buffer.diagnose import diagnose

        diagnose(config, spec, SCORER)
    elif config.enhance:
        if not config.model or not config.out:
            raise UserError("--enhance needs --model and --out.")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network, spec = load_network(config.model)
        options = {"seed": config.seed, "temperature": config.temperature, "device": device}
        options |= {"refresh": config.refresh_context, "redraw": config.redraw_start}
        network = Traced(network.to(device).eval(), spec, device)
        enhance_folder(network, spec, Path(config.enhance), Path(config.out), config.delay, **options)
    else:
        train(config, start_ranks(), resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1"))), SCORER)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run_main(main, CONFIG)
