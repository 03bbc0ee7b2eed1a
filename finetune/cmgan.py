"""Train or fine-tune CMGAN, a speech enhancer with a discriminator that learns to predict PESQ.

    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --data pairs/train --hold-out p286 p287 --out runs/cmgan
    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --model best_ckpt/ckpt --data pairs/train --hold-out p286 \\
        --lr 1e-4 --schedule cosine --warmup 500 --epochs 10 --out runs/tuned

pairs/train is of data/pairs.py; --model takes the published generator, an export or a checkpoint of a run. Then:

    python finetune/cmgan.py --enhance noisy_wavs --model runs/tuned/export --out enhanced
    python finetune/cmgan.py --diagnose runs/tuned --eval-data pairs/valid

On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --steps 20 --eval-every 0
"""

import copy
import dataclasses
import functools
import itertools
import os
import time
from dataclasses import dataclass
from typing import Literal

from common.config import UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.pair_flags import PairConfig
from common.runtime import bar_codecs, catch_signals

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(PairConfig):
    diagnose: str = flag("", "check this run, checkpoint or export instead of training", group="run", free=True)
    epochs: float = flag(120.0, "passes over the data, used when --steps is 0", group="schedule", low=0)
    lr: float = flag(5e-4, "the generator's learning rate", group="schedule")
    disc_lr_ratio: float = flag(2.0, "the discriminator's learning rate over --lr", group="schedule", low=0.01)
    schedule: Literal["step", "cosine"] = flag("step", "after the warm-up", group="schedule")
    decay_epochs: float = flag(30.0, "step: epochs between drops", group="schedule", low=1e-3)
    decay: float = flag(0.5, "step: factor of a drop", group="schedule", low=1e-3, high=1)
    warmup: float = flag(0.0, "warm-up, as a share of the steps (below 1) or in steps", group="schedule", low=0)
    clip: float = flag(5.0, "largest gradient norm, of each network", group="optimizer", low=1e-6)
    ema: float = flag(0.999, "decay of the generator's average; 0 = off", group="optimizer", low=0, high=0.99999)
    precision: Literal["bf16", "fp32"] = flag("fp32", "of the conformers; all else is fp32", group="optimizer")
    gradient_checkpointing: bool = flag(True, "recompute conformers: half the memory, 1.2 x time", group="optimizer")

    channels: int = flag(64, "width of the generator, from scratch; 64 as published", low=4)
    disc_channels: int = flag(16, "width of the discriminator, from scratch; 16 as published", low=1)
    w_ri: float = flag(0.1, "weight of the spectrum's real and imaginary part", low=0)
    w_mag: float = flag(0.9, "weight of its magnitude", low=0)
    w_time: float = flag(0.2, "weight of the wave", low=0)
    w_gan: float = flag(0.05, "weight of the discriminator's opinion", low=0)
    noisy_term: bool = flag(False, "the discriminator also learns the noisy input's PESQ (MetricGAN+)")
    replay: int = flag(0, "steps whose estimates the discriminator sees again (MetricGAN+); 0 = none", low=0)
    gate: Literal["auto", "on", "off"] = flag("auto", "hold back a GAN term that knows no PESQ; auto = with --model")
    gate_open: float = flag(0.8, "correlation with PESQ that lets the GAN term in", low=0, high=1)
    gate_close: float = flag(0.6, "correlation that sends it out again", low=0, high=1)
    gan_ramp: int = flag(500, "steps in which it comes in or goes out", low=1)
    probe: int = flag(64, "held-out sounds that the discriminator is judged by", low=8)
    probe_every: int = flag(100, "steps between such judgements while there is a gate", low=1)
    max_pesq_invalid: float = flag(0.2, "stop when more labels than this share are missing", low=0, high=1, free=True)
    window_seconds: float = flag(16.0, "longer recordings are enhanced in windows of this length", low=2)

    @property
    def engine_precision(self) -> str:
        return "fp32"  # DeepSpeed's bf16 would also cast what has to stay fp32: STFT, losses, the discriminator

    def weights_at(self, gan_level: float) -> list[float]:
        """Of the loss terms, while the gate lets so much of the GAN term in."""
        return [self.w_ri, self.w_mag, self.w_time, self.w_gan * gan_level]


# A narrow model that learns the synthetic noise in a minute.
DEMO = {
    "channels": 8,
    "disc_channels": 4,
    "seconds": 0.6,
    "micro_batch": 1,
    "steps": 60,
    "lr": 2e-3,
    "ema": 0.95,
    "hold_out": ["dov"],
    "eval_every": 30,
    "save_every": 30,
    "probe": 24,
    "gradient_checkpointing": False,
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

from common import checkpoint, engine, memory, runs
from common.feed import mover, prefetch
from common.keyed_random import key64
from common.metrics import Meter, due
from common.optim import stepped_rate, turning_points
from common.pairs import Crops, PairDataset, split_pairs
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, memory_gb, run_main, say, start_ranks, stop_requested
from common.scorer import Scorer
from models.cmgan import enhance as cmgan_enhance
from models.cmgan import signal
from models.cmgan import watch as cmgan_watch
from models.cmgan import weights as cmgan_files
from models.cmgan.diagnose import diagnose
from models.cmgan.evaluate import Evaluation, evaluate, judge_discriminator, open_test, sample, test, warn_if_worse
from models.cmgan.labels import Labels, count_missing, discriminator_loss, valid_counts
from models.cmgan.network import Discriminator, TSCNet, settle_statistics

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict) -> tuple[TSCNet, Discriminator]:
    """Generator and discriminator, from --model as far as it has them."""
    if stage_of(ds) == 3:
        raise UserError(f"--ds {config.ds} is ZeRO-3: CMGAN's 2 million weights need no sharding, use zero2.json.")
    torch.manual_seed(key64(config.seed, "weights") % 2**63)
    if config.channels % 4:
        raise UserError(f"--channels {config.channels} is not a multiple of 4, the number of attention heads.")
    generator, discriminator = TSCNet(config.channels), None
    if config.model:
        generator, discriminator = cmgan_files.load_networks(config.model)
    generator.set_compute(config.gradient_checkpointing, config.precision == "bf16")
    return generator, discriminator or Discriminator(config.disc_channels)


def start_engines(generator, discriminator, config: Config, ds: dict) -> dict:
    """Two engines, each with its own optimizer, clipping and count of steps."""
    options = {"no_decay": ("rel_pos_emb", "norm"), "betas": (0.9, 0.999)}
    frozen = functools.partial(compute_loss, discriminator=discriminator)
    return {
        "g": engine.start_engine(generator, frozen, config, copy.deepcopy(ds), **options),
        "d": engine.start_engine(discriminator, discriminator_loss, config, copy.deepcopy(ds), **options),
    }


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(config: Config, ranks: Ranks) -> tuple[Crops, PairDataset | None, np.ndarray]:
    """The crops to train on; the pairs, and which of them, to evaluate on."""
    return split_pairs(config, signal.RATE, ranks)


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch, discriminator):
    """The generator's weighted loss sum, silence being 0, its terms' sums and counts, and what it made, detached."""
    pair = signal.normalise(batch["noisy"], batch["clean"])
    estimate = signal.estimate(model(signal.spectrum(pair.heard)), pair)
    terms = signal.generator_terms(estimate, discriminator) * batch["weights"][:, None] * pair.audible
    counts = torch.full((len(terms),), float(terms.shape[1]), device=terms.device)
    return terms.sum(), torch.stack([terms.detach().sum(1), counts]), estimate.detach()


def train_step(engines, feed, labels: Labels, sounds: int, weights, step: int, rate, config: Config, ranks):
    """One optimizer step of both networks; returns the meter, what was applied, and what to log.

    Every rank takes the same path whatever its data: missing labels are zeros in a mask, never a branch.
    """
    g, d = engines["g"], engines["d"]
    meter, waiting, redraws = Meter(), [], 0
    with engine.frozen(d.module.model):
        for turn in range(config.accumulation):
            batch = meter.next(feed)
            batch["weights"] = weights
            slot = turn * ranks.world + ranks.rank
            # Dropout depends on the micro-batch alone, not on the rank that gets it or on what ran before.
            torch.manual_seed(key64(config.seed, step, slot, "dropout") % 2**63)
            loss_sum, stats, estimate = g(batch)
            waiting.append(labels.submit(slot, estimate, batch["ids"]))
            engine.backward(g, loss_sum, sounds, ranks.world)
            meter.add(batch, loss_sum, stats)
            redraws += batch["redraws"]
            if turn + 1 < config.accumulation:
                g.step()  # only counts the micro-batch
        engine.set_learning_rate(g, rate(step))
        applied, norm = engine.take_step(g)
    settle_statistics(g.module.model, ranks, applied)

    asked = time.monotonic()
    labelled = [labels.collect(step, part) for part in waiting]
    values = {"pesq_wait_s": time.monotonic() - asked, "grad_norm": norm}
    missing = [name for part in labelled for name in part.missing]
    silent = sum(float((1 - part.estimate.pair.audible).sum()) for part in waiting)
    sums = all_sum([*valid_counts(labelled), len(missing), redraws, silent], ranks).tolist()
    *counts, missing_anywhere, redraws, silent = sums
    loss_d = 0.0
    for turn, part in enumerate(labelled):
        torch.manual_seed(key64(config.seed, step, turn * ranks.world + ranks.rank, "dropout of d") % 2**63)
        loss = d((part, float(sounds), counts))
        engine.backward(d, loss, 1.0, ranks.world)
        loss_d += loss.item()
        if turn + 1 < config.accumulation:
            d.step()
    engine.set_learning_rate(d, rate(step) * config.disc_lr_ratio)
    applied_d, norm_d = engine.take_step(d)
    d.module.model.iterate()
    values |= {"grad_norm_d": norm_d, "loss_d": float(all_sum([loss_d], ranks)[0])}
    values |= {"pesq_missing": int(missing_anywhere), "redraws": int(redraws), "silent": int(silent)}
    return meter, applied and applied_d, values, missing


# ---- evaluation, samples, export -------------------------------------------------------------------------------


def export(nets: tuple, run: runs.Run, facts: dict) -> None:
    """The generator with its averaged weights, and the discriminator. Every rank must call it."""
    with run.average.in_place():
        if run.ranks.first:
            generator, discriminator = (net.state_dict() for net in nets)
            training = dataclasses.asdict(run.config)
            cmgan_files.write_export(run.folder, generator, discriminator, facts | {"training_config": training})


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict, scorer: Scorer):
    """The whole run; returns both engines with their trained weights."""
    if not config.data:
        if config.model:
            raise UserError("--model without --data: give pairs to train on, or --enhance or --diagnose.")
        config.data = str(runs.demo_assets(ranks, "cmgan") / "pairs")

    # model and data
    nets = generator, discriminator = build_model(config, ds)
    crops, chosen, rows = build_data(config, ranks)
    unseen = open_test(config, ranks)
    plan = Plan(np.full(len(crops), crops.length), config.micro_batch * crops.length, config.seed)
    micro_batches = ranks.world * config.accumulation  # of one optimizer step
    steps = config.steps or plan.steps(config.epochs, micro_batches)
    say(f"crops {len(crops):,} an epoch, {steps} steps of {micro_batches} micro-batches of {config.micro_batch}")
    for network in (generator, discriminator):
        memory.say_needs(network, ds, config, ranks)
    first = crops.batch(range(min(config.micro_batch, len(crops))))
    cmgan_watch.require_perfect(first["noisy"], first["clean"])

    # engines and resume
    engines = start_engines(generator, discriminator, config, ds)
    average = engine.Average(engines["g"], config.ema)
    labels = Labels(scorer, config.noisy_term, config.replay, config.seed)
    gate = cmgan_watch.gate_of(config, len(rows))
    rate = functools.partial(stepped_rate, steps=steps, steps_an_epoch=plan.per_epoch / micro_batches, config=config)

    def build(number: int) -> dict:
        epoch, chosen = plan.micro_batch(number)
        return mover(ranks.device)(crops.batch(chosen, epoch))

    if config.dry_run:
        dry_run(engines, itertools.repeat(mover(ranks.device)(first)), labels, rate, config, ranks, steps)
        return engines
    # What is evaluated on decides when the GAN term comes in, and which model is the best.
    fingerprint = {"data": crops.pairs.fingerprint(), "eval": chosen.fingerprint() if chosen else ""}
    run = runs.Run("cmgan", config, ds, ranks, engines, average, fingerprint, steps)
    extra = {"gate": gate.state(), "history": [], "labels": 0, "missing": 0, "reasons": {}, "best": None} | run.extra
    gate.restore(extra["gate"])
    if run.found and config.replay and (seen := checkpoint.load_mine(run.found, ranks)):
        labels.restore(seen, ranks.device)
    evaluation = Evaluation(chosen, rows, config, scorer, ranks) if len(rows) else None

    # loop: every rank knows the whole plan, and its own micro-batches are every world-th one
    feed = prefetch(build, range(run.start * micro_batches + ranks.rank, steps * micro_batches, ranks.world))
    if run.start == 0:
        extra["start"] = evaluate(nets, evaluation, run, 0, extra)
    if all_sum([float(stop_requested())], ranks)[0]:
        run.stop(run.start)
    for step in range(run.start, steps):
        parts = [plan.micro_batch(number) for number in range(step * micro_batches, (step + 1) * micro_batches)]
        sounds = sum(len(chosen) for _, chosen in parts)
        weights = torch.tensor(config.weights_at(gate.level), device=ranks.device)
        meter, applied, values, lost = train_step(engines, feed, labels, sounds, weights, step, rate, config, ranks)
        totals = meter.reduce(ranks)
        done, last = step + 1, step + 1 == steps
        if applied:
            average.update(step)
            values |= {"lr": rate(step), "lr_d": rate(step) * config.disc_lr_ratio, "gan_level": gate.level}
            gate.advance()
            epoch = round(done * micro_batches / plan.per_epoch, 4)
            run.log(done, meter, totals, sounds * crops.length, signal.TERMS, epoch=epoch, **values)  # token: sample
        else:
            run.skip(done, meter, [name for _, chosen in parts for name in crops.ids(chosen)])
        count_missing(extra, lost, values["pesq_missing"], sounds, done, run)

        score = None
        if gate.used and due(config.probe_every, done):
            judge_discriminator(gate, evaluation, discriminator, run, done)
        extra["gate"] = gate.state()
        if last or due(config.eval_every, done):
            score = evaluate(nets, evaluation, run, done, extra)
            if config.export and score is not None and (extra["best"] is None or score < extra["best"]):
                extra["best"] = score
                export(nets, run, {"step": done, "pesq": -score})
        if last or totals.stop or due(config.save_every, done):
            run.save(done, score, extra, labels.state())
        if totals.stop and not last:
            run.stop(done)
        if evaluation and config.samples and (last or due(config.sample_every, done)):
            sample(nets, evaluation, run, done)

    # finish
    if config.export and extra["best"] is None:
        export(nets, run, {"step": steps})
    warn_if_worse(extra)
    if unseen:
        test(unseen, run, scorer, steps)
    all_sum([0.0], ranks)  # what all ranks write is on disk
    run.finish(steps)
    if ranks.first:
        say(f"model    {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return engines


def dry_run(engines: dict, feed, labels: Labels, rate, config: Config, ranks: Ranks, steps: int) -> None:
    """One optimizer step of both networks, its memory, and where the learning rate changes."""
    weights = torch.tensor(config.weights_at(1.0), device=ranks.device)
    began = time.monotonic()
    sounds = config.micro_batch * config.accumulation * ranks.world
    _, applied, values, _ = train_step(engines, feed, labels, sounds, weights, 0, rate, config, ranks)
    peak = " ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(ranks).items())
    say(f"dry run: one step {time.monotonic() - began:.1f} s, applied {applied}, norm {values['grad_norm']:.3f}"
        f" and {values['grad_norm_d']:.3f}; peak memory {peak}")  # fmt: skip
    for step in turning_points(rate, steps, config):
        say(f"learning rate at step {step + 1}: {rate(step):.3g} and {rate(step) * config.disc_lr_ratio:.3g}")


def main(config: Config) -> None:
    ds = resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    if config.enhance:
        cmgan_enhance.main(config)
    elif config.diagnose:
        diagnose(config, start_ranks(), SCORER)
    else:
        train(config, start_ranks(), ds, SCORER)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run_main(main, CONFIG)
