"""Train or fine-tune a Diffusion Buffer: online speech enhancement by diffusion, one network call per frame.

    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --data pairs/train --hold-out p286 --out runs/live
    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --model official.ckpt --data pairs/train \\
        --hold-out p286 --lr 5e-5 --warmup 500 --out runs/tuned

pairs/train is a dataset of noisy/clean pairs at 16 kHz (data/pairs.py makes one). The first command trains from
scratch; --model takes an export of this recipe or a Lightning checkpoint of the official code. To check, then to use:

    python finetune/infer/diagnose.py --recipe diffusion_buffer
    python finetune/infer/enhance.py --run runs/live --source noisy_wavs --out enhanced --delay 5

The embedded demo runs on a laptop in a minute:

    deepspeed finetune/diffusion_buffer.py --ds ds_configs/zero2.json --steps 20 --eval-every 0
"""

import dataclasses
import faulthandler
import functools
import json
import math
import signal as signals
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
    without: ClassVar[tuple[str, ...]] = (*PairConfig.without, "seconds", "test_data", "gradient_checkpointing")

    epochs: float = flag(250.0, "passes over the training data, used when --steps is 0", group="schedule", low=0)
    # Crops are planned one by one: how they are split into micro-batches and ranks does not change the training.
    micro_batch: int = flag(4, "crops per micro-batch on each rank", group="schedule", low=1, may_change=True)
    accumulation: int = flag(
        1, "gradient accumulation: micro-batches per optimizer step on each rank", group="schedule", low=1,
        may_change=True,
    )  # fmt: skip
    schedule: Literal["cosine", "plateau"] = flag(
        "cosine",
        "learning-rate schedule after the warm-up; plateau = half after 3 evaluations without a better --best-by",
        group="schedule",
    )
    weight_decay: float = flag(0.0, "weight decay of matrices; 0 = off", group="optimizer", low=0)
    ema: float = flag(
        0.999, "decay of the moving average of the trained weights; 0 = off", group="optimizer", low=0, high=0.99999
    )
    precision: Literal["bf16", "fp32"] = flag(
        "bf16", "compute precision of the network (mixed precision); spectra, diffusion and loss are fp32",
        group="optimizer", may_change=True,
    )  # fmt: skip
    best_by: Literal["pesq", "estoi", "si_sdr", "sdr", "lsd", "loss"] = flag(
        "pesq", "metric that selects the best checkpoint, and that --schedule plateau watches", group="output"
    )

    spec: str = flag(
        "", "network, spectrum, diffusion and stream: ncsnpp, ncsnpp_dsm, ncsnpp_large, block_causal, demo, or a JSON"
        " file that changes some settings (docs/diffusion_buffer.md); empty = those of --model, or ncsnpp",
    )  # fmt: skip

    @property
    def engine_precision(self) -> str:
        return "fp32"  # --precision is for the network alone, by autocast: weights, spectra and loss stay in fp32


# A narrow network that learns the synthetic noise in a minute.
DEMO = {
    "spec": "demo",
    "micro_batch": 8,
    "steps": 160,
    "lr": 3e-3,
    "warmup": 20.0,
    "ema": 0.98,
    "precision": "fp32",
    "hold_out": ["dov"],
    "best_by": "si_sdr",
    "eval_every": 80,
    "save_every": 80,
    "samples": 2,
}

if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, and no signal is lost
    catch_signals()
    forbid_codec_imports()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)
    from common.scorer import Scorer

    SCORER = Scorer()  # its processes are forked here, while this one is small

import torch
from torch import nn

from common import engine, export_check, optim, runs
from common.contracts import LossOutput
from common.ema import Ema
from common.feed import prefetch, to_device
from common.keyed_random import torch_seed
from common.metrics import Meter, is_due
from common.pairs import split_pairs
from common.plan import Plan
from common.report import say_result
from common.runtime import Process, any_rank, barrier, init_process, run_main, say, stop_requested
from common.scorer import Scorer
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Clips
from models.diffusion_buffer.enhance import say_latency
from models.diffusion_buffer.evaluate import EvalClips, log_details, measure_files, probe, sample, summarise
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import load_network, spec_of, write_export

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict) -> tuple[nn.Module, Spec]:
    """The network, from --model or with random weights, and its settings."""
    if stage_of(ds) == 3:
        raise UserError(f"--ds {config.ds} is ZeRO-3: 18 to 26 million weights need no sharding, use zero2.json.")
    if config.model:
        return load_network(config.model, config.spec)
    spec = spec_of(config)
    torch.manual_seed(torch_seed(config.seed, "weights"))
    return build_network(spec.network, spec.width, spec.block), spec


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(config: Config, spec: Spec, scorer: Scorer, process: Process) -> tuple[Clips, EvalClips | None]:
    """The clips to train on and the files to evaluate on, None if there are none."""
    pairs, rows, eval_pairs, eval_rows = split_pairs(config, signal.RATE, process)
    eval_clips = EvalClips(eval_pairs, eval_rows, spec, config.seed, scorer) if len(eval_rows) else None
    return Clips(pairs, rows, spec, config.seed), eval_clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch: dict, spec: Spec) -> LossOutput:
    """Squared error of the network on the buffer, SUMMED over bins and frames: the step divides it later.

    N crops, F bins, K frames, of which the last B are the buffer. The buffer holds noisy speech at rising diffusion
    times t with noise z added; the context, the frames before it, holds clean speech. To add a term, add its weighted
    sum over target bins to loss_sum, and a (sum, count) pair to the parts to see it in the log.
    """
    clean_nfk, noisy_nfk = signal.spectra(batch["clean"], spec), signal.spectra(batch["noisy"], spec)
    if "loudness" in batch:  # level tracking
        clean_nfk, noisy_nfk = (side * batch["loudness"][:, None] for side in (clean_nfk, noisy_nfk))
    t_nb, sigma_nb, z_nfb = batch["t"], batch["sigma"], batch["z"]
    context = spec.frames - t_nb.shape[1]  # number of frames before the buffer

    # What a stream would have at this point: a buffer on its way from noisy to clean, and what is already enhanced.
    target_nfb = clean_nfk[..., context:]
    buffer_nfb = signal.diffuse(target_nfb, noisy_nfk[..., context:], t_nb, sigma_nb, z_nfb)
    x_nfk = torch.cat([clean_nfk[..., :context], buffer_nfb], dim=-1)

    # Only the network computes in bf16: spectra, diffusion and loss need the digits of fp32.
    with torch.autocast(t_nb.device.type, dtype=torch.bfloat16, enabled=batch["autocast"]):
        times, scales = model.embed(signal.frame_times(spec, t_nb)), signal.output_scales(spec, t_nb, sigma_nb)
        output_nfk = model(x_nfk, noisy_nfk, times, scales)

    output_nfb = output_nfk[..., context:]
    if spec.loss == "dp":  # data prediction: the output is clean speech
        error_nfb = output_nfb - target_nfb
    elif spec.loss == "dsm":  # denoising score matching: the output is the score -z / sigma, here times sigma
        error_nfb = sigma_nb[:, None] * output_nfb + z_nfb
    else:  # dsm_unweighted
        error_nfb = output_nfb + z_nfb / sigma_nb[:, None]
    squares_nb = torch.view_as_real(error_nfb).square().sum(-1).sum(1)

    # In the log: the loss by quarter of the diffusion times, t1 nearly clean to t4 nearly noisy, and the output's size.
    quarters = torch.tensor_split(squares_nb.detach().sum(0), 4)
    bins = len(squares_nb) * spec.bins  # target bins per frame of the buffer
    parts = {f"t{i}": torch.stack([q.sum(), q.new_full((), len(q) * bins)]) for i, q in enumerate(quarters, start=1)}
    size = output_nfb.detach().abs()
    return LossOutput(squares_nb.sum(), parts, {"out_rms": size.square().mean().sqrt(), "out_max": size.max()})


# ---- learning rate ---------------------------------------------------------------------------------------------

PATIENCE = 3  # --schedule plateau: evaluations in a row without a new best, after which the learning rate is halved


def learning_rate(step: int, steps: int, drops: int, config: Config) -> float:
    """Linear warm-up, then half of --lr for each drop so far; or --schedule cosine."""
    if config.schedule == "cosine" or step < optim.warmup_steps(config.warmup, steps):
        return optim.learning_rate(step, steps, config)
    return config.lr * max(0.5**drops, optim.LAST_RATE)


# ---- evaluation and score --------------------------------------------------------------------------------------


def evaluate(model, clips: EvalClips | None, run: runs.Run, ema: Ema, step: int) -> float | None:
    """Logs the metrics of the EMA weights; returns the score, of which the lowest makes the best checkpoint."""
    if not clips:
        return None
    with ema.applied():
        rows = measure_files(model, clips, run.process)
    metrics = summarise(rows, clips.spec)
    run.tracker.event("eval", step, **metrics)
    say(f"evaluation at step {step}: SI-SDR {metrics['si_sdr']:.2f} dB (noisy {metrics['noisy_si_sdr']:.2f})  PESQ"
        f" {metrics['pesq']:.3f} (noisy {metrics['noisy_pesq']:.3f})  ESTOI {metrics['estoi']:.3f}"
        f"  LSD {metrics['lsd']:.2f} dB  loss {metrics['loss']:.5f}")  # fmt: skip
    log_details(rows, clips.spec, run, step)
    # The score is the metric of --best-by at the full delay, negated where higher is better. Without a value, or with
    # a single output that is not finite, there is no score, so such a model is never the best.
    best_by = run.config.best_by
    if not math.isfinite(metrics[best_by]) or metrics["not_finite"]:
        return None
    return metrics[best_by] if best_by in ("lsd", "loss") else -metrics[best_by]


# ---- export ----------------------------------------------------------------------------------------------------


def export(model, ema: Ema, config: Config, folder: Path, spec: Spec, checkpoint: dict, process: Process):
    """Writes the EMA weights with all the settings that a stream needs. `checkpoint`: its step and score.

    Every rank must call it: each holds a part of the EMA.
    """
    with ema.applied():
        if process.is_main:
            facts = {"recipe": "diffusion_buffer", "checkpoint": checkpoint}
            facts["training_config"] = dataclasses.asdict(config)
            write_export(folder, model, spec, facts)


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, process: Process, ds: dict, scorer: Scorer):
    """The whole run; returns the engine with the exported weights."""
    if not config.data:
        if config.model:
            raise UserError("--model without --data: add the pairs to fine-tune on.")
        config = dataclasses.replace(config, data=str(runs.demo_assets(process, "pairs") / "strong"))

    # model and data
    model, spec = build_model(config, ds)
    config = dataclasses.replace(config, spec=json.dumps(dataclasses.asdict(spec)))  # for the record, and for --config
    clips, eval_clips = build_data(config, spec, scorer, process)
    if config.schedule == "plateau" and not (eval_clips and config.eval_every):
        raise UserError("--schedule plateau needs evaluations: set --eval-every, and --eval-data or --hold-out.")
    # Planned crop by crop, so that any split into micro-batches and ranks trains the same optimizer steps.
    plan = Plan(clips.lengths, 1, config.seed)
    crops_per_step = process.world * config.accumulation * config.micro_batch
    steps = config.steps or plan.steps(config.epochs, crops_per_step)
    say(f"clips {len(clips):,}, {steps} steps of {crops_per_step} crops of {spec.frames} frames, the last {spec.buffer}"
        " of them in the buffer")  # fmt: skip
    say_latency(spec, spec.buffer)

    def build_batch(crops: range) -> dict:
        """These crops of the plan, which may span two epochs, as a micro-batch."""
        planned = [plan.micro_batch(crop) for crop in crops]
        batch = clips.batch([(epoch, int(rows[0])) for epoch, rows in planned])
        return batch | {"autocast": config.precision == "bf16"}

    loss_fn = functools.partial(compute_loss, spec=spec)

    # optimizer and engine
    micro_batches_per_step = process.world * config.accumulation
    groups = optim.parameter_groups(model, config.weight_decay, no_decay=("GroupNorm", "out_layers.0"))
    optimizer = optim.build_optimizer(groups, config, ds, betas=(0.9, 0.999))  # any torch optimizer works here
    ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)
    ema = Ema(ds_engine, config.ema)
    if config.dry_run:
        batch = to_device(build_batch(range(config.micro_batch)), process.device)
        step_weight = crops_per_step * spec.bins * spec.buffer
        engine.dry_run(ds_engine, batch, step_weight, process)
        return ds_engine

    # fresh start or resume
    fingerprint = clips.fingerprint() | {"crops": crops_per_step, "optimizer": optim.describe_optimizer(optimizer)}
    run = runs.Run("diffusion_buffer", config, ds, process, fingerprint, steps)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    dump_stacks_on_usr2(run.folder, process)
    loop_state = {"stale": 0, "drops": 0}  # evaluations since the last new best; drops of the learning rate
    if run.checkpoint:
        loop_state = run.load(ds_engine, ema)
    else:
        evaluate(model, eval_clips, run, ema, step=0)  # what training has to improve on

    def build_micro_batch(index: int) -> dict:
        first = index * config.micro_batch
        return build_batch(range(first, first + config.micro_batch))

    # Every rank knows the whole plan; its own micro-batches are every world-th one.
    first, end = run.start_step * micro_batches_per_step, steps * micro_batches_per_step
    batches = prefetch(build_micro_batch, range(first + process.rank, end, process.world), process.device)
    model.train()
    for step in range(run.start_step, steps):
        # ---- one optimizer step ------------------------------------------------------------------------------
        # The loss is divided once, by the number of target bins of the whole step (all ranks, all micro-batches).
        meter, extras, sigmas = Meter(), [], []
        step_weight = crops_per_step * spec.bins * spec.buffer
        for i in range(config.accumulation):
            with meter.waiting():
                batch = next(batches)
            with naming_micro_batch(config):
                output = ds_engine(batch)
                last_of_step = i + 1 == config.accumulation
                engine.backward(ds_engine, output.loss_sum, step_weight, process.world, last_of_step)
            meter.add(batch, output)
            extras.append(output.extra)
            sigmas.append(batch["sigma"])
        lr = learning_rate(step, steps, loop_state["drops"], config)
        optim.set_learning_rate(ds_engine, lr)
        applied, grad_norm = engine.take_step(ds_engine)
        totals = meter.reduce(process)
        # ------------------------------------------------------------------------------------------------------

        done, last = step + 1, step + 1 == steps
        planned = [plan.micro_batch(crop) for crop in range(step * crops_per_step, done * crops_per_step)]
        if applied:
            ema.update(step)
            # On this rank: large outputs, or diffusion times that are off, show here before the loss does.
            seen = {name: max(float(extra[name]) for extra in extras) for name in ("out_rms", "out_max")}
            seen |= {"sigma_min": float(torch.cat(sigmas).min()), "sigma_max": float(torch.cat(sigmas).max())}
            positions = sum(clips.real_frames(epoch, int(rows[0])) for epoch, rows in planned)
            epoch = round(done * crops_per_step / plan.per_epoch, 4)
            run.log(done, meter, totals, step_weight, positions, lr, grad_norm, epoch=epoch, **seen)
        else:
            indices = range(step * micro_batches_per_step, done * micro_batches_per_step)
            run.skip(done, meter, [build_micro_batch(index) for index in indices])

        score, is_best = None, False
        if last or is_due(config.eval_every, done):
            score = evaluate(model, eval_clips, run, ema, done)
            is_best = run.is_best(done, score)
            loop_state["stale"] = 0 if is_best else loop_state["stale"] + 1
            if loop_state["stale"] == PATIENCE:
                loop_state["stale"], loop_state["drops"] = 0, loop_state["drops"] + 1
            if eval_clips and config.samples:
                with ema.applied():
                    sample(model, eval_clips, run.folder, done, config.samples, process)
                run.tracker.event("sample", done)
        if last or totals.stop or is_best or is_due(config.save_every, done):
            run.save(ds_engine, ema, done, score, loop_state)
        if totals.stop and not last:  # all ranks agree on it, because totals are reduced
            run.stop(done)

    # finish
    checkpoint = run.load_best(ds_engine, ema, steps)
    export(model, ema, config, run.folder / "export", spec, checkpoint, process)
    export_check.require_same(run, ema, probe, model, clips)
    barrier(process)  # the samples of all ranks are on disk
    run.finish(steps)
    if process.is_main:
        say_result(run.folder, "model")
    return ds_engine


def dump_stacks_on_usr2(folder: Path, process: Process) -> None:
    """`kill -USR2 PID` writes the Python stacks of a rank that hangs to stacks-RANK.txt; so does a crash in C code."""
    stacks = open(folder / f"stacks-{process.rank:05d}.txt", "w")  # stays open as long as the process lives
    faulthandler.enable(stacks)
    faulthandler.register(signals.SIGUSR2, stacks)


def main(config: Config, scorer: Scorer) -> None:
    train(config, init_process(), resolve_ds(config.ds, config, world_size()), scorer)


if __name__ == "__main__":
    run_main(main, CONFIG, SCORER)
