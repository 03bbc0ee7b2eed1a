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
import math
import signal as signals
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from common.config import flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.pair_flags import PairConfig
from common.runtime import catch_signals, forbid_codec_imports, world_size

# ---- flags -----------------------------------------------------------------------------------------------------


@dataclass
class Config(PairConfig):
    without: ClassVar[tuple[str, ...]] = (*PairConfig.without, "seconds", "test_data", "gradient_checkpointing")

    overfit: str = flag("", "sanity check: train and evaluate only on the clip with this id", group="run")

    epochs: float = flag(250.0, "passes over the training data, used when --steps is 0", group="schedule", low=0)
    # Crops are planned one by one: how they are split into micro-batches and ranks does not change the training.
    micro_batch: int = flag(
        4, "crops per micro-batch on each rank; computed in parts if it runs out of memory", group="schedule", low=1,
        may_change=True,
    )  # fmt: skip
    accumulation: int = flag(
        1, "gradient accumulation: micro-batches per optimizer step on each rank", group="schedule", low=1,
        may_change=True,
    )  # fmt: skip
    schedule: Literal["cosine", "plateau"] = flag(
        "cosine", "learning-rate schedule after the warm-up", group="schedule"
    )
    patience: int = flag(
        3, "plateau: evaluations in a row without a better --best-by before the learning rate drops", group="schedule",
        low=1,
    )  # fmt: skip
    drop: float = flag(
        0.5, "plateau: factor by which the learning rate drops, down to a tenth of --lr", group="schedule", low=0.01,
        high=1,
    )  # fmt: skip
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

    network: Literal["ncsnpp", "ncsnpp_large", "block_causal"] = flag(
        "ncsnpp",
        "ncsnpp: the network of the first paper; ncsnpp_large: the official trainer's default size of it; block_causal:"
        " the network of the second paper",
    )
    width: int = flag(0, "channels at the first scale; 0 = as published (ncsnpp 96, the others 128)", low=0)
    block: Literal[16, 32] = flag(32, "block_causal: frames per block")
    n_fft: int = flag(510, "STFT window length in samples", low=30)
    hop: int = flag(256, "samples between STFT frames", low=8)
    frames: int = flag(128, "frames that the network sees, rounded up to a multiple that it accepts", low=8)
    buffer: int = flag(20, "frames in the buffer: the last of --frames, which are being denoised", low=4)
    buffer_low: int = flag(
        0, "draw the buffer size of each optimizer step between this and --buffer; 0 = always --buffer", low=0
    )
    sde_c: float = flag(0.08, "diffusion noise level: c in g(t)^2 = c k^2t")
    sde_k: float = flag(2.6, "diffusion noise growth: k in g(t)^2 = c k^2t")
    t_eps: float = flag(0.03, "smallest diffusion time")
    t_max: float = flag(0.999, "largest diffusion time in training")
    reverse_start: float = flag(0.8, "diffusion time of the newest frame when streaming")
    loss: Literal["dp", "dsm", "dsm_unweighted"] = flag(
        "dp", "dp: predict clean speech, which allows any delay; dsm: denoising score matching"
    )
    output_scale: Literal["auto", "none", "sigma", "time"] = flag(
        "auto", "what the network output is divided by; auto = none for dp, sigma for dsm"
    )
    times: Literal["jitter", "random", "grid"] = flag(
        "jitter", "diffusion times of a crop: jitter = near those of a stream, random = uniform, grid = always the same"
    )
    context_time: float = flag(
        0.0, "diffusion time of context frames; 1 for official weights with --output-scale time", low=0, high=1
    )
    context_noise: float = flag(0.0, "fraction of crops whose context is corrupted by noise", low=0, high=1)
    context_own: float = flag(
        0.0, "fraction of optimizer steps whose context is the network's own output", low=0, high=1
    )
    level: Literal["none", "track"] = flag("none", "track: causal loudness normalisation")
    phase: Literal["auto", "start", "middle"] = flag(
        "auto", "reference of the STFT phase: the window's start (ncsnpp, official weights) or middle (block_causal)"
    )
    stream: Literal["own", "official"] = flag(
        "own",
        "official: enhance as the official code does, with an empty context until the buffer is full, and with --loss"
        " dp a context that each network call estimates again",
    )
    gain_low: float = flag(-12.0, "lower bound of each crop's random gain in dB")
    gain_high: float = flag(6.0, "upper bound of each crop's random gain in dB")
    pad_short: bool = flag(False, "accept clips shorter than the buffer, padded with silence at the start")

    @property
    def engine_precision(self) -> str:
        return "fp32"  # --precision is for the network alone, by autocast: weights, spectra and loss stay in fp32


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

if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, and no signal is lost
    catch_signals()
    forbid_codec_imports()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)
    from common.scorer import Scorer

    SCORER = Scorer(CONFIG.pesq_workers)  # its processes are forked here, while this one is small

import torch
from torch import nn

from common import engine, export_check, in_parts, optim, runs
from common.contracts import LossOutput
from common.ema import Ema
from common.feed import prefetch, to_device
from common.keyed_random import torch_seed, uniform
from common.metrics import Meter, is_due
from common.pairs import open_pairs, split_pairs
from common.plan import Plan
from common.report import say_result
from common.runtime import Process, any_rank, barrier, init_process, run_main, say, stop_requested
from common.scorer import Scorer
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Clips, buffer_size
from models.diffusion_buffer.enhance import say_latency
from models.diffusion_buffer.evaluate import EvalClips, log_details, measure_files, probe, sample, summarise
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import Spec, spec_of
from models.diffusion_buffer.weights import load_network, write_export

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict, spec: Spec) -> nn.Module:
    """The network, from --model or with random weights."""
    if stage_of(ds) == 3:
        raise UserError(f"--ds {config.ds} is ZeRO-3: 18 to 26 million weights need no sharding, use zero2.json.")
    torch.manual_seed(torch_seed(config.seed, "weights"))
    if config.model:
        return load_network(config.model, spec)[0]
    return build_network(spec.network, spec.width, spec.block)


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(config: Config, spec: Spec, scorer: Scorer, process: Process) -> tuple[Clips, EvalClips | None]:
    """The clips to train on and the files to evaluate on, None if there are none."""
    if config.overfit:
        pairs = eval_pairs = open_pairs(config.data, signal.RATE, process)
        rows = eval_rows = pairs.rows_named(config.overfit)
    else:
        pairs, rows, eval_pairs, eval_rows = split_pairs(config, signal.RATE, process)
    eval_clips = EvalClips(eval_pairs, eval_rows, spec, config.seed, scorer) if len(eval_rows) else None
    return Clips(pairs, rows, spec, config), eval_clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch: dict, spec: Spec) -> LossOutput:
    """Squared error of the network on the buffer, SUMMED over bins and frames: the step divides it later.

    N crops, F bins, K frames, of which the last B are the buffer. The buffer holds noisy speech at rising diffusion
    times t with noise z added; the context, the frames before it, holds clean speech. To add a term, add its weighted
    sum over target bins to loss_sum, and a (sum, count) pair to the parts to see it in the log.
    """
    clean_nfk, noisy_nfk = signal.spectra(batch["clean"], spec), signal.spectra(batch["noisy"], spec)
    if "loudness" in batch:  # --level track
        clean_nfk, noisy_nfk = (side * batch["loudness"][:, None] for side in (clean_nfk, noisy_nfk))
    t_nb, sigma_nb, z_nfb = batch["t"], batch["sigma"], batch["z"]
    context = spec.frames - t_nb.shape[1]  # number of frames before the buffer

    # What a stream would have at this point: a buffer on its way from noisy to clean, and what is already enhanced.
    target_nfb = clean_nfk[..., context:]
    buffer_nfb = signal.diffuse(target_nfb, noisy_nfk[..., context:], t_nb, sigma_nb, z_nfb)
    context_nfk = clean_nfk[..., :context]
    if "context_mix" in batch:  # --context-noise: a stream's context is not perfectly clean
        noise_nfk = (noisy_nfk - clean_nfk)[..., :context]
        context_nfk = context_nfk + batch["context_mix"][:, None, None] * noise_nfk + batch["context_noise"]

    # Only the network computes in bf16: spectra, diffusion and loss need the digits of fp32.
    with torch.autocast(t_nb.device.type, dtype=torch.bfloat16, enabled=batch["autocast"]):
        times, scales = model.embed(signal.frame_times(spec, t_nb)), signal.output_scales(spec, t_nb, sigma_nb)
        if batch["own"]:  # --context-own
            context_nfk = own_context(model, clean_nfk, noisy_nfk, batch, times, scales)
        output_nfk = model(torch.cat([context_nfk, buffer_nfb], dim=-1), noisy_nfk, times, scales)

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


@torch.no_grad()
def own_context(model, clean_nfk, noisy_nfk, batch: dict, times, scales) -> torch.Tensor:
    """The context as a stream has it: its newest B frames are the network's output, seen one buffer earlier."""
    buffer = batch["t"].shape[1]
    context = clean_nfk.shape[-1] - buffer
    clean_nfk, noisy_nfk = (  # B frames earlier, with silence before
        torch.cat([torch.zeros_like(side[..., :buffer]), side[..., :context]], dim=-1)
        for side in (clean_nfk, noisy_nfk)
    )
    clean_context, clean_buffer = clean_nfk[..., :context], clean_nfk[..., context:]
    buffer_nfb = signal.diffuse(clean_buffer, noisy_nfk[..., context:], batch["t"], batch["sigma"], batch["z_own"])
    output_nfk = model(torch.cat([clean_context, buffer_nfb], dim=-1), noisy_nfk, times, scales)
    return torch.cat([clean_context, output_nfk[..., context:]], dim=-1)[..., buffer:]


FP32_STEPS = 100  # how long --precision bf16 computes in fp32 after a loss that was finite only there


def loss_or_fp32(module, batch: dict) -> LossOutput:
    """The loss; `rescued` in its extra: whether it had to be computed in fp32 because it is finite only there.

    A loss that is not finite even in fp32 comes from the clip or the weights: the step is then skipped as usual.
    Looking at the loss waits for the GPU. It has to be before the backward pass: after it the gradients of all
    micro-batches are one sum, which a NaN has spoilt.
    """
    output, rescued = module(batch), False
    if batch["autocast"] and not bool(output.loss_sum.isfinite()):
        output = module(batch | {"autocast": False})
        rescued = bool(output.loss_sum.isfinite())
    return output._replace(extra=output.extra | {"rescued": rescued})


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

    if config.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True  # as is torch's default for convolutions

    # model and data
    spec = spec_of(config)
    model = build_model(config, ds, spec)
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

    def build_batch(crops: range, step: int) -> dict:
        """These crops of the plan, which may span two epochs, as a micro-batch of this step."""
        planned = [plan.micro_batch(crop) for crop in crops]
        batch = clips.batch([(epoch, int(rows[0])) for epoch, rows in planned], buffer_size(step, spec, config))
        # All micro-batches of a step take the same kind of context, whatever their rank.
        own = uniform(config.seed, step, "own") < config.context_own
        return batch | {"own": own, "autocast": config.precision == "bf16"}

    loss_fn = functools.partial(compute_loss, spec=spec)

    # optimizer and engine
    micro_batches_per_step = process.world * config.accumulation
    groups = optim.parameter_groups(model, config.weight_decay, no_decay=("GroupNorm", "out_layers.0"))
    optimizer = optim.build_optimizer(groups, config, ds, betas=(0.9, 0.999))  # any torch optimizer works here
    ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)
    ema = Ema(ds_engine, config.ema)
    if config.dry_run:
        batch = to_device(build_batch(range(config.micro_batch), 0), process.device)
        step_weight = crops_per_step * spec.bins * buffer_size(0, spec, config)
        engine.dry_run(ds_engine, batch, step_weight, process)
        return ds_engine

    # fresh start or resume
    fingerprint = clips.fingerprint() | {"crops": crops_per_step, "optimizer": optim.describe_optimizer(optimizer)}
    run = runs.Run("diffusion_buffer", config, ds, process, fingerprint, steps)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    dump_stacks_on_usr2(run.folder, process)
    # Evaluations since the last new best, drops of the learning rate, and the step up to which bf16 is off.
    loop_state = {"stale": 0, "drops": 0, "fp32_until": 0}
    if run.checkpoint:
        loop_state = run.load(ds_engine, ema)
    else:
        evaluate(model, eval_clips, run, ema, step=0)  # what training has to improve on

    def build_micro_batch(index: int) -> dict:
        first = index * config.micro_batch
        return build_batch(range(first, first + config.micro_batch), step=index // micro_batches_per_step)

    # Every rank knows the whole plan; its own micro-batches are every world-th one.
    first, end = run.start_step * micro_batches_per_step, steps * micro_batches_per_step
    batches = prefetch(build_micro_batch, range(first + process.rank, end, process.world), process.device)
    compute = functools.partial(loss_or_fp32, ds_engine.module)
    parts = 1  # that a micro-batch is computed in; more once it has run out of memory
    model.train()
    for step in range(run.start_step, steps):
        # ---- one optimizer step ------------------------------------------------------------------------------
        # The loss is divided once, by the number of target bins of the whole step (all ranks, all micro-batches).
        meter, extras, sigmas, parts_before = Meter(), [], [], parts
        step_weight = crops_per_step * spec.bins * buffer_size(step, spec, config)
        for i in range(config.accumulation):
            with meter.waiting():
                batch = next(batches)
            if step < loop_state["fp32_until"]:
                batch["autocast"] = False
            ds_engine.set_gradient_accumulation_boundary(i + 1 == config.accumulation)
            output, parts = in_parts.backward(ds_engine, batch, compute, step_weight, parts, process)
            meter.add(batch, output)
            extras += output.extra
            sigmas.append(batch["sigma"])
        lr = optim.plateau_rate(step, steps, loop_state["drops"], config)
        optim.set_learning_rate(ds_engine, lr)
        applied, grad_norm = engine.take_step(ds_engine)
        totals = meter.reduce(process)
        # ------------------------------------------------------------------------------------------------------

        done, last = step + 1, step + 1 == steps
        if parts > parts_before:
            run.tracker.event("out_of_memory", done, parts=parts)
        # Where bf16 failed once it will soon fail again, and each failure costs a second forward pass.
        if config.precision == "bf16" and any_rank(any(extra["rescued"] for extra in extras), process):
            loop_state["fp32_until"] = done + FP32_STEPS
            run.tracker.event("amp_fallback", done, until=loop_state["fp32_until"])
            say(f"warning: the loss of step {done} was finite only in fp32; the next {FP32_STEPS} steps use fp32")
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
            # --schedule plateau: --patience evaluations in a row without a new best make a drop.
            loop_state["stale"] = 0 if is_best else loop_state["stale"] + 1
            if loop_state["stale"] >= config.patience:
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
