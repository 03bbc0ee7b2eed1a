"""Train or fine-tune CMGAN, a speech enhancer with a discriminator that learns to predict PESQ.

    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --data pairs/train --hold-out p286 p287 --out runs/cmgan
    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --model best_ckpt/ckpt --data pairs/train --hold-out p286 \\
        --lr 1e-4 --schedule cosine --warmup 500 --epochs 10 --out runs/tuned

pairs/train is a dataset of noisy/clean pairs (data/pairs.py makes one). --model takes the published generator, an
export or a checkpoint of a run. To use and to check the result:

    python finetune/infer/enhance.py --run runs/tuned --source noisy_wavs --out enhanced
    python finetune/infer/diagnose.py --run runs/tuned

The embedded demo runs on a laptop in a minute:

    deepspeed finetune/cmgan.py --ds ds_configs/zero2.json --steps 20 --eval-every 0
"""

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from common.config import flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.pair_flags import PairConfig, naming_micro_batch
from common.runtime import catch_signals, forbid_codec_imports, world_size

# ---- flags -----------------------------------------------------------------------------------------------------


@dataclass
class Config(PairConfig):
    best_by: ClassVar[str] = "pesq"

    epochs: float = flag(120.0, "passes over the training data, used when --steps is 0", group="schedule", low=0)
    lr: float = flag(5e-4, "peak learning rate of the generator", group="schedule", low=1e-6, high=1e-2)
    schedule: Literal["step", "cosine"] = flag(
        "step", "learning-rate schedule after the warm-up; step = half every 30 epochs", group="schedule"
    )
    warmup: float = flag(
        0.0, "learning-rate warm-up: a fraction of all steps (below 1) or a number of steps", group="schedule", low=0
    )
    max_grad_norm: float = flag(5.0, "clip the gradients of each network to this norm", group="optimizer", low=1e-6)
    ema: float = flag(
        0.999, "decay of the moving average of the generator's weights; 0 = off", group="optimizer", low=0, high=0.99999
    )
    precision: Literal["bf16", "fp32"] = flag(
        "fp32", "compute precision of the conformers; everything else is fp32", group="optimizer"
    )
    gradient_checkpointing: bool = flag(
        True, "recompute the conformers in the backward pass: half the memory, 1.2 x the time", group="optimizer"
    )

    channels: int = flag(64, "width of the generator when trained from scratch; 64 as published", low=4)
    w_gan: float = flag(0.05, "loss weight of the PESQ that the discriminator predicts (GAN loss); 0 = off", low=0)
    noisy_term: Literal["auto", "on", "off"] = flag(
        "auto",
        "train the discriminator on the PESQ of the noisy input too (MetricGAN+); auto = on when fine-tuning (--model)",
    )
    gan_gate: Literal["auto", "on", "off"] = flag(
        "auto",
        "disable the GAN loss until the discriminator correlates with PESQ; auto = on when fine-tuning (--model)",
    )

    @property
    def uses_noisy_term(self) -> bool:
        # What a trained generator makes is all good: without noisy inputs its discriminator never meets a low PESQ.
        return self.noisy_term == "on" or (self.noisy_term == "auto" and bool(self.model))

    @property
    def engine_precision(self) -> str:
        return "fp32"  # DeepSpeed's bf16 would also cast what has to stay fp32: STFT, losses, the discriminator


# A narrow model that learns to remove the synthetic noise in a minute.
DEMO = {
    "channels": 8,
    "seconds": 0.6,
    "micro_batch": 1,
    "steps": 60,
    "lr": 2e-3,
    "ema": 0.95,
    "hold_out": ["dov"],
    "eval_every": 30,
    "save_every": 30,
    "gradient_checkpointing": False,
}

if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, and no signal is lost
    catch_signals()
    forbid_codec_imports()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)
    from common.scorer import Scorer

    SCORER = Scorer()  # forks its processes, which stay small without torch

import numpy as np
import torch

from common import engine, export_check, memory, optim, runs
from common.contracts import LossOutput
from common.ema import Ema
from common.feed import prefetch, to_device
from common.holdout import refuse_overlap
from common.keyed_random import torch_seed
from common.metrics import Meter, is_due
from common.pairs import Crops, PairDataset, open_pairs, split_pairs
from common.plan import Plan
from common.report import say_result
from common.runtime import Process, all_sum, any_rank, barrier, init_process, run_main, say, stop_requested
from common.scorer import Scorer
from models.cmgan import signal
from models.cmgan.evaluate import (
    EvalFiles,
    Evaluation,
    judge_discriminator,
    log_discriminator,
    probe,
    sample,
    test,
    warn_if_worse,
)
from models.cmgan.labels import Labelled, Labels, count_missing, restart_count, valid_counts
from models.cmgan.network import Discriminator, TSCNet, batch_norm_statistics, update_batch_norm
from models.cmgan.watch import LOOK_BACK, PROBE_EVERY, GanRamp, alarms, build_gan_ramp, require_equal, require_perfect
from models.cmgan.weights import load_networks, write_export

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict) -> tuple[TSCNet, Discriminator]:
    """Generator and discriminator, from --model if it has them, otherwise with random weights."""
    if stage_of(ds) == 3:
        raise UserError(f"--ds {config.ds} is ZeRO-3: CMGAN's 2 million weights need no sharding, use zero2.json.")
    torch.manual_seed(torch_seed(config.seed, "weights"))
    if config.channels % 4:
        raise UserError(f"--channels {config.channels} is not a multiple of 4, the number of attention heads.")
    generator, discriminator = TSCNet(config.channels), None
    if config.model:
        generator, discriminator = load_networks(config.model)
    generator.set_compute(config.gradient_checkpointing, config.precision == "bf16")
    return generator, discriminator or Discriminator(generator.channels // 4)


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(config: Config, process: Process) -> tuple[Crops, PairDataset | None, np.ndarray]:
    """The crops to train on; the pairs to evaluate on, and which rows of them."""
    pairs, rows, eval_pairs, eval_rows = split_pairs(config, signal.RATE, process)
    return Crops(pairs, rows, config.seconds, config.seed), eval_pairs, eval_rows


# ---- batch to loss ---------------------------------------------------------------------------------------------


def loss_terms(estimate: signal.Estimate, discriminator) -> dict[str, torch.Tensor]:
    """The terms of the generator's loss without their weights, (B,) each: the mean over one sound.

    Evaluation uses them too. To add a term, add it here, and its weight in loss_weights; it is then logged as
    loss_NAME. It must be 0 for a perfect estimate, which a check before training makes sure of.
    """
    magnitude, clean_magnitude = signal.magnitude(estimate.spec), signal.magnitude(estimate.clean_spec)
    predicted_quality = discriminator(clean_magnitude, magnitude)
    return {
        "ri": (estimate.spec - estimate.clean_spec).square().mean((2, 3)).sum(1),
        "mag": (magnitude - clean_magnitude).square().mean((1, 2, 3)),
        "time": (estimate.wave - estimate.normalised.clean).abs().mean(1),
        "gan": (predicted_quality - 1).square(),
    }


def loss_weights(config: Config, gan_level: float) -> dict[str, float]:
    """The weight of each term; `gan_level`: the part of the GAN loss that the gate lets through, 0 to 1."""
    return {"ri": 0.1, "mag": 0.9, "time": 0.2, "gan": config.w_gan * gan_level}


def compute_loss(model, batch: dict, discriminator, config: Config, gan_ramp: GanRamp) -> LossOutput:
    """The generator's loss, SUMMED over sounds: the step divides it by the number of sounds later.

    `extra` is the estimate, detached, for the PESQ labels and the discriminator.
    """
    normalised = signal.normalise(batch["noisy"], batch["clean"])
    estimate = signal.estimate(model(signal.spectrum(normalised.model_input)), normalised)
    weights, audible = loss_weights(config, gan_ramp.level), normalised.audible
    loss_sum, parts = 0.0, {}
    for name, term_b in loss_terms(estimate, discriminator).items():
        # A silent sound counts, but its loss is 0: there is nothing in it to enhance.
        term = (weights[name] * term_b * audible).sum()
        loss_sum = loss_sum + term
        parts[name] = torch.stack([term.detach(), term.new_full((), len(term_b))])
    return LossOutput(loss_sum, parts, extra=estimate.detach())


def discriminator_loss(discriminator, batch: tuple[Labelled, float, list[float]]) -> LossOutput:
    """(D(clean, clean) - 1)^2, and (D(clean, other) - label)^2 wherever PESQ gave a label.

    `batch`: a labelled micro-batch; the number of sounds in the whole step; its numbers of valid labels, of estimates
    and of noisy inputs. The loss is divided by these numbers here, because each term has its own.
    `extra` is the loss by what D was asked about: clean sounds, estimates, noisy inputs.
    """
    labelled, sounds, valid_labels = batch
    loss = (discriminator(labelled.clean, labelled.clean) - 1).square().sum() / sounds
    terms = {"clean": loss.detach(), "made": torch.zeros_like(loss), "noisy": torch.zeros_like(loss)}
    kinds = zip(("made", "noisy"), labelled.others, labelled.labels, labelled.valid, valid_labels, strict=False)
    for name, other, labels, valid, count in kinds:  # noisy inputs only with --noisy-term
        # Without any label the mask makes this term 0, but it is still computed: every rank has the same graph, and so
        # takes part in the same collectives.
        term = (valid * (discriminator(labelled.clean, other) - labels).square()).sum() / max(1.0, count)
        loss, terms[name] = loss + term, term.detach()
    return LossOutput(loss, {}, extra=terms)


# ---- learning rate ---------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, steps_per_epoch: float, config: Config) -> float:
    """Of the generator: linear warm-up, then half every 30 epochs, as published; or --schedule cosine."""
    if config.schedule == "cosine" or step < optim.warmup_steps(config.warmup, steps):
        return optim.learning_rate(step, steps, config)
    return config.lr * 0.5 ** int(step / steps_per_epoch / 30)


DISCRIMINATOR_RATE = 2.0  # its learning rate, in multiples of the generator's


# ---- evaluation and score --------------------------------------------------------------------------------------


def evaluate(
    networks: tuple,
    evaluation: Evaluation | None,
    run: runs.Run,
    ema: Ema,
    gan_ramp: GanRamp,
    loop_state: dict,
    step: int,
) -> float | None:
    """Logs the metrics of the EMA weights; returns the score, of which the lowest makes the best checkpoint."""
    if not evaluation:
        return None
    require_equal(run.process, *networks)
    table = run.folder / "evaluations" / f"step-{step:08d}.csv"
    metrics, points = evaluation.metrics(*networks, ema, loss_weights(run.config, gan_ramp.level), table)
    metrics |= {"gan_level": gan_ramp.level, "pesq_invalid": loop_state["missing"] / max(1, loop_state["labels"])}
    restart_count(loop_state)
    run.tracker.event("eval", step, **metrics)
    log_discriminator(run, step, points, metrics)
    say(f"evaluation at step {step}: PESQ {metrics['pesq']:.3f} (noisy {metrics['noisy_pesq']:.3f})  STOI"
        f" {metrics['stoi']:.3f}  SI-SDR {metrics['si_sdr']:.2f}  gain {metrics['gain']:.2f}  loss"
        f" {metrics['loss']:.4f}  D's correlation with PESQ {metrics['d_pearson']:.2f}, on outputs"
        f" {metrics['d_made_pearson']:.2f}  missing labels"
        f" {metrics['pesq_invalid']:.1%}")  # fmt: skip
    loop_state["history"] = [*loop_state["history"], [metrics["loss"], metrics["pesq"]]][-LOOK_BACK:]
    for message in alarms(metrics, evaluation.noisy, loop_state["history"], gan_ramp.level):
        run.tracker.event("alarm", step, message=message)
        say(message)
    # The score is PESQ, negated, and never the loss: the loss contains the discriminator, so it can fall while the
    # sound gets worse. If no file has a PESQ value, there is no score, and the checkpoint is never the best.
    return -metrics["pesq"] if math.isfinite(metrics["pesq"]) else None


# ---- export ----------------------------------------------------------------------------------------------------


def export(networks: dict, ema: Ema, config: Config, folder: Path, checkpoint: dict, process: Process) -> None:
    """Writes the generator with its EMA weights, and the discriminator. `checkpoint`: its step and score.

    Every rank must call it: each holds a part of the EMA weights.
    """
    with ema.applied():
        if process.is_main:
            generator, discriminator = (networks[name].state_dict() for name in ("g", "d"))
            facts = {"recipe": "cmgan", "checkpoint": checkpoint, "training_config": dataclasses.asdict(config)}
            write_export(folder, generator, discriminator, facts)


# ---- training --------------------------------------------------------------------------------------------------


def start_engines(
    generator: TSCNet, discriminator: Discriminator, config: Config, ds: dict, gan_ramp: GanRamp
) -> tuple[dict, tuple]:
    """Optimizer and engine of each network, which have their own gradient clipping: the engines by the names of their
    parts of a checkpoint, and the optimizers."""
    g_groups = optim.parameter_groups(generator, config.weight_decay, no_decay=("rel_pos_emb", "norm"))
    d_groups = optim.parameter_groups(discriminator, config.weight_decay, no_decay=())
    g_optimizer = optim.build_optimizer(g_groups, config, ds, betas=(0.9, 0.999))  # any torch optimizer works here
    d_optimizer = optim.build_optimizer(d_groups, config, ds, betas=(0.9, 0.999))
    loss_fn = functools.partial(compute_loss, discriminator=discriminator, config=config, gan_ramp=gan_ramp)
    g_engine = engine.start_engine(generator, loss_fn, g_optimizer, ds)
    d_engine = engine.start_engine(discriminator, discriminator_loss, d_optimizer, ds)
    return {"g": g_engine, "d": d_engine}, (g_optimizer, d_optimizer)


def train(config: Config, process: Process, ds: dict, scorer: Scorer):
    """The whole run; returns both engines, with the exported weights."""
    if not config.data:
        if config.model:
            raise UserError(
                "--model without --data: give pairs to train on, or use finetune/infer/enhance.py to enhance."
            )
        config = dataclasses.replace(config, data=str(runs.demo_assets(process, "pairs") / "mild"))

    # model and data
    networks = generator, discriminator = build_model(config, ds)
    clips, eval_pairs, eval_rows = build_data(config, process)
    test_pairs = open_pairs(config.test_data, signal.RATE, process) if config.test_data else None
    if test_pairs:
        refuse_overlap(clips.pairs, clips.rows, test_pairs, np.arange(len(test_pairs)), config, process)
    plan = Plan(clips.lengths, config.micro_batch * clips.length, config.seed)
    micro_batches_per_step = process.world * config.accumulation
    steps = config.steps or plan.steps(config.epochs, micro_batches_per_step)
    say(f"clips {len(clips):,}, {steps} steps of {micro_batches_per_step} micro-batches of {config.micro_batch} crops")
    # A perfect estimate must have no loss: otherwise the training would aim at another sound than the clean one.
    first_batch = clips.batch(range(min(config.micro_batch, len(clips))))
    require_perfect(first_batch["noisy"], first_batch["clean"], loss_terms)
    labels = Labels(scorer, config.uses_noisy_term)
    gan_ramp = build_gan_ramp(config, len(eval_rows))

    engines, optimizers = start_engines(generator, discriminator, config, ds, gan_ramp)
    g_engine, d_engine = engines.values()
    ema = Ema(g_engine, config.ema)
    if config.dry_run:
        dry_run(engines, to_device(first_batch, process.device), labels, config, process)
        return engines

    # fresh start or resume
    fingerprint = clips.fingerprint() | {
        "eval": eval_pairs.fingerprint() if eval_pairs else "",  # enables the GAN loss, and selects the best
        "optimizer": [optim.describe_optimizer(optimizer) for optimizer in optimizers],
    }
    run = runs.Run("cmgan", config, ds, process, fingerprint, steps)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    evaluation = None
    if len(eval_rows):
        evaluation = Evaluation(EvalFiles(eval_pairs, eval_rows, loss_terms, scorer, process), config)
    if run.checkpoint:
        loop_state = run.load(engines, ema)
        gan_ramp.restore(loop_state["gan_ramp"])
    else:
        # "history": loss and PESQ of the latest evaluations; the rest counts PESQ labels since the last one
        loop_state = {"history": [], "labels": 0, "missing": 0, "reasons": {}}
        evaluate(networks, evaluation, run, ema, gan_ramp, loop_state, step=0)  # what training has to improve on

    def build_micro_batch(index: int) -> dict:
        epoch, rows = plan.micro_batch(index)
        return clips.batch(rows, epoch)

    # Every rank knows the whole plan; its own micro-batches are every world-th one.
    first, end = run.start_step * micro_batches_per_step, steps * micro_batches_per_step
    steps_per_epoch = plan.per_epoch / micro_batches_per_step
    batches = prefetch(build_micro_batch, range(first + process.rank, end, process.world), process.device)
    generator.train()
    discriminator.train()
    for step in range(run.start_step, steps):
        # ---- one optimizer step of the generator -------------------------------------------------------------
        # The loss is divided once, by the number of sounds in the whole step (all ranks, all micro-batches), which the
        # plan tells in advance.
        meter, waiting, statistics, redraws = Meter(), [], [], 0
        rows_of_step = [plan.micro_batch(step * micro_batches_per_step + i) for i in range(micro_batches_per_step)]
        step_weight = sum(clips.target_weight(rows, epoch) for epoch, rows in rows_of_step)
        lr = learning_rate(step, steps, steps_per_epoch, config)
        # The generator's loss goes through the discriminator, which must not get gradients from it.
        with engine.frozen(discriminator):
            for i in range(config.accumulation):
                with meter.waiting():
                    batch = next(batches)
                # Dropout depends on the micro-batch alone, not on its rank or on what ran before.
                slot = i * process.world + process.rank
                torch.manual_seed(torch_seed(config.seed, step, slot, "dropout"))
                with naming_micro_batch(config):
                    output = g_engine(batch)
                    # Other processes compute PESQ during the backward pass and the optimizer step.
                    waiting.append(labels.submit(output.extra, batch["ids"]))
                    last_of_step = i + 1 == config.accumulation
                    engine.backward(g_engine, output.loss_sum, step_weight, process.world, last_of_step)
                meter.add(batch, output)
                statistics.append(batch_norm_statistics(generator))
                redraws += batch["redraws"]
            optim.set_learning_rate(g_engine, lr)
            applied, grad_norm = engine.take_step(g_engine)
        if applied:  # on all ranks or on none
            update_batch_norm(generator, statistics, process)

        # ---- labels: the PESQ of what the generator made -----------------------------------------------------
        # Every rank takes the same path whatever its data: a missing label is a 0 in a mask, never a branch.
        asked = time.monotonic()
        labelled = [labels.collect(micro_batch) for micro_batch in waiting]
        pesq_wait_s = time.monotonic() - asked
        missing_here = [name for micro_batch in labelled for name in micro_batch.missing]
        silent = sum(float((1 - micro_batch.estimate.normalised.audible).sum()) for micro_batch in waiting)
        counts = all_sum([*valid_counts(labelled), len(missing_here), redraws, silent], process).tolist()
        *valid_labels, missing, redraws, silent = counts  # of all ranks

        # ---- one optimizer step of the discriminator ---------------------------------------------------------
        terms_d = 0.0
        for i, micro_batch in enumerate(labelled):
            slot = i * process.world + process.rank
            torch.manual_seed(torch_seed(config.seed, step, slot, "dropout of d"))
            with naming_micro_batch(config):
                output = d_engine((micro_batch, step_weight, valid_labels))
                # The loss is already divided, hence the weight of 1.
                engine.backward(d_engine, output.loss_sum, 1.0, process.world, i + 1 == config.accumulation)
            terms_d = terms_d + torch.stack(list(output.extra.values()))
        optim.set_learning_rate(d_engine, lr * DISCRIMINATOR_RATE)
        applied_d, grad_norm_d = engine.take_step(d_engine)
        discriminator.iterate()  # one power iteration of its spectral norms per step, on the new weights
        totals = meter.reduce(process)
        # ------------------------------------------------------------------------------------------------------

        done, last = step + 1, step + 1 == steps
        terms_d = dict(zip(output.extra, all_sum(terms_d.tolist(), process).tolist(), strict=True))
        if applied and applied_d:
            ema.update(step)
            positions = sum(int(clips.lengths[rows].sum()) for _, rows in rows_of_step)  # audio samples
            epoch = round(done / steps_per_epoch, 4)
            more = {"epoch": epoch, "gan_level": gan_ramp.level}
            more |= {"lr_d": lr * DISCRIMINATOR_RATE, "grad_norm_d": grad_norm_d, "loss_d": sum(terms_d.values())}
            more |= {f"loss_d_{name}": value for name, value in terms_d.items()}
            more |= {"pesq_wait_s": pesq_wait_s, "pesq_missing": int(missing)}
            more |= {"redraws": int(redraws), "silent": int(silent)}
            run.log(done, meter, totals, step_weight, positions, lr, grad_norm, **more)
            gan_ramp.advance()
        else:
            run.skip(done, meter, [clips.batch(rows, epoch) for epoch, rows in rows_of_step])
        count_missing(loop_state, missing_here, int(missing), int(step_weight), done, run)
        if gan_ramp.used and is_due(PROBE_EVERY, done):
            judge_discriminator(gan_ramp, evaluation, discriminator, run, done)

        score, is_best = None, False
        if last or is_due(config.eval_every, done):
            score = evaluate(networks, evaluation, run, ema, gan_ramp, loop_state, done)
            is_best = run.is_best(done, score)
            if evaluation and config.samples:
                sample(generator, evaluation, run, ema, done)
        if last or totals.stop or is_best or is_due(config.save_every, done):
            run.save(engines, ema, done, score, loop_state | {"gan_ramp": gan_ramp.state()})
        if totals.stop and not last:  # all ranks agree on it, because totals are reduced
            run.stop(done)

    # finish
    checkpoint = run.load_best(engines, ema, steps)
    export({"g": generator, "d": discriminator}, ema, config, run.folder / "export", checkpoint, process)
    export_check.require_same(run, ema, probe, generator, clips)
    warn_if_worse(run)
    if test_pairs:
        test_files = EvalFiles(test_pairs, np.arange(len(test_pairs)), loss_terms, scorer, process)
        test(test_files, loss_weights(config, 1.0), run, steps)
    barrier(process)  # the samples of all ranks are on disk
    run.finish(steps)
    if process.is_main:
        say_result(run.folder, "model")
    return engines


def dry_run(engines: dict, batch: dict, labels: Labels, config: Config, process: Process) -> None:
    """--dry-run: one optimizer step of both networks on one micro-batch, its time and its memory."""

    def take_step(ds_engine, batch, step_weight: float) -> tuple[LossOutput, bool, float]:
        for i in range(config.accumulation):
            with naming_micro_batch(config):
                output = ds_engine(batch)
                engine.backward(ds_engine, output.loss_sum, step_weight, process.world, i + 1 == config.accumulation)
        return output, *engine.take_step(ds_engine)

    began = time.monotonic()
    sounds = float(len(batch["ids"]) * config.accumulation * process.world)
    with engine.frozen(engines["d"].module.model):
        output, applied, norm = take_step(engines["g"], batch, sounds)
    labelled = labels.collect(labels.submit(output.extra, batch["ids"]))
    _, applied_d, norm_d = take_step(engines["d"], (labelled, sounds, [sounds] * len(labelled.labels)), 1.0)
    say(f"dry run: one step of both networks {time.monotonic() - began:.1f} s, applied {applied and applied_d}, norm"
        f" {norm:.3f} and {norm_d:.3f}; peak memory {memory.peak_memory(process)}")  # fmt: skip


def main(config: Config, scorer: Scorer) -> None:
    train(config, init_process(), resolve_ds(config.ds, config, world_size()), scorer)


if __name__ == "__main__":
    run_main(main, CONFIG, SCORER)
