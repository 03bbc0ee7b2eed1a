"""Teach Llama-3 music without changing what it says: frozen Llama, music experts that start from MusicGen (MoT).

    deepspeed finetune/llama_mot.py --ds ds_configs/zero2.json --model meta-llama/Llama-3.2-1B \\
        --musicgen facebook/musicgen-small --data DIR --eval-data DIR --out runs/my-music

DIR is a token dataset of MusicGen's EnCodec (data/encode.py --codec encodec --format musiccaps makes one). The same
through the launcher, which chooses the number of ranks: ./launch.sh llama_mot --model ... . On a laptop, in a
minute, with the embedded demo; the second line needs no DeepSpeed (one CPU, Apple or NVIDIA GPU):

    deepspeed finetune/llama_mot.py --ds ds_configs/zero2.json --steps 20 --samples 1
    python finetune/llama_mot.py --no-deepspeed --steps 20 --samples 1
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import RunConfig, UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.runtime import bar_codecs, catch_signals

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    deepspeed: bool = flag(True, "--no-deepspeed: one process, fp32, any device", group="run")
    min_coverage: float = flag(
        0.9, "share of the source's clips that the dataset must hold", group="run", low=0, high=1, free=True
    )

    musicgen: str = flag("", "MusicGen whose feed-forward blocks the experts start from: folder or hub id")
    experts: Literal["musicgen", "musicgen_absorbed", "llama", "random"] = flag("musicgen", "where the experts start")
    untie: Literal["ffn", "ffn+norm", "full"] = flag("ffn", "what music has of its own; full: norms and attention too")
    gate: Literal["scalar", "channel"] = flag("scalar", "learned gain on an expert's output")
    gate_start: Literal["calibrated", "zero"] = flag("calibrated", "as loud as the Llama block it stands in for, or 0")
    train_parts: list[str] = flag(["all"], "embed head proj expert gate norm attn, or proj_only (= proj head)")
    adapter: str = flag("", "exported adapter, or a .pt of the first MoT trainer, to start from; empty = none")

    ids: Literal["offset", "shared"] = flag("offset", "own ids a codebook, or one range for all (legacy)")
    layout: Literal["flat", "delay"] = flag("flat", "a code a position, or a frame a position (4 x shorter)")
    profile: Literal["default", "legacy"] = flag(
        "default", "lengths: whole captions and clips, or 1024 with ids shared"
    )
    max_seq: int = flag(0, "positions of a sequence, at most; 0 = the profile's", low=0)
    max_text: int = flag(0, "ids of a caption with BOS, at most; 0 = the profile's", low=0)
    max_audio: int = flag(0, "codes of the music, at most; 0 = the profile's", low=0)
    over_long_text: Literal["error", "drop", "cut"] = flag("error", "captions over --max-text (legacy: cut)")
    allow_empty_text: bool = flag(False, "train on clips that have no caption")
    caption_dropout: float = flag(0.1, "share of samples without caption, which guidance needs", low=0, high=1)

    loss_vocab: Literal["audio", "full"] = flag("audio", "classes: the codebook that is due, or all text and music ids")
    codebook_weights: list[float] = flag([1.0, 1.0, 1.0, 1.0], "loss weight of each codebook")
    lr: float = flag(4e-4, "peak learning rate of new rows and projections", group="schedule")
    copied_lr: float = flag(0.25, "factor on it for what starts from trained weights", group="schedule", low=0, high=1)
    weight_decay: float = flag(0.1, "on matrices only, not on embeddings; 0 = off", group="optimizer", low=0)

    sample_frames: int = flag(
        0, "longest sample; 0 = 1.25 x the longest evaluation clip", group="output", low=0, free=True
    )
    temperature: float = flag(1.0, "of the samples; 0 = the most likely code", group="output", low=0, free=True)
    top_k: int = flag(250, "samples choose among so many codes; 0 = all", group="output", low=0, free=True)
    guidance: float = flag(
        3.0, "of the samples: how much the caption counts; 1 = off", group="output", low=0, free=True
    )


# The demo learns from random weights, so music also gets its own attention, and one high rate for all.
DEMO = {
    "untie": "full",
    "lr": 4e-3,
    "copied_lr": 1.0,
    "steps": 200,
    "warmup": 10.0,
    "micro_tokens": 1400,
    "precision": "fp32",
    "guidance": 1.0,
    "temperature": 0.0,
    "save_every": 100,
    "eval_every": 100,
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and no signal is lost
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import torch

from common import engine, health, memory, runs, samples
from common import single_process as plain
from common.feed import mover, prefetch
from common.metrics import Meter, due
from common.optim import learning_rate
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, on_first, run_main, say, start_ranks, stop_requested
from common.tokens import TokenDataset
from models.mot import build as mot_build
from models.mot import data as mot_clips
from models.mot import evaluate as mot_eval
from models.mot import generate as mot_music
from models.mot import network as mot
from models.mot import weights as mot_adapter
from models.mot.layout import Layout

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict) -> mot.MoTLlama:
    """Frozen Llama with fresh music experts beside it. Under ZeRO-3 it is built sharded, never whole on a rank."""
    if config.profile == "legacy" and config.ids != "shared":
        raise UserError("--profile legacy has --ids shared: add it.")
    if config.layout == "delay" and (config.ids == "shared" or config.loss_vocab == "full"):
        raise UserError("--layout delay predicts 4 codes at once: it needs --ids offset and --loss-vocab audio.")
    if config.samples and config.guidance != 1 and not config.caption_dropout:
        raise UserError("--guidance compares with music without a caption: set --caption-dropout above 0, or it to 1.")
    if config.deepspeed:
        engine.build_sharded(ds)
    llama = mot_build.load_llama(config.model, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    donor = mot_build.Donor(config.musicgen) if config.musicgen else None
    expert = mot_build.expert_of(config.experts, config.gate, llama.config, donor)
    layout = Layout(llama.config.vocab_size, ids=config.ids, order=config.layout)
    full = config.loss_vocab == "full"
    model = mot_build.build_mot(llama, layout, expert, config.untie, full, donor, config.seed, ds)
    mot_build.choose_parts(model, config.train_parts)
    model.recompute = config.gradient_checkpointing
    return model


def start_weights(model: mot.MoTLlama, config: Config, clips: mot_clips.Clips) -> None:
    """Gates that fit the data, or an earlier adapter's weights."""
    mot_build.calibrate(model, clips.batch([0]), zero=config.gate_start == "zero")
    if config.adapter.endswith(".pt"):
        mot_adapter.fill_legacy(model, Path(config.adapter))
    elif config.adapter:
        before = mot_adapter.read_description(Path(config.adapter))
        if before["base_fingerprint"] != mot_adapter.base_fingerprint(model.llama):
            raise UserError(f"--adapter {config.adapter} was trained on another Llama than --model {config.model}.")
        mot_adapter.fill_adapter(model, Path(config.adapter))


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(path: str, model, tokenizer, config: Config, ranks: Ranks, train: bool) -> mot_clips.Clips | None:
    """A token dataset, checked against the model and, on the first rank, for damage; None without a path."""
    if not path:
        return None
    tokens = TokenDataset(path)
    if train:
        mot_clips.check_coverage(tokens, config.min_coverage)
    if config.verify_data:
        on_first(tokens.verify, ranks)
    return mot_clips.Clips(tokens, model.layout, tokenizer, config, train)


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch, clips: mot_clips.Clips):
    """Weighted loss sum over the batch's targets; per codebook the plain sum and the count."""
    return mot.mot_loss(model, batch, torch.as_tensor(clips.weights, dtype=torch.float32))


def check_first_loss(loss: float, model, config: Config) -> None:
    """A fresh head knows nothing: its loss is ln(classes), or something is wrong with layout, labels or rows."""
    expected = model.head.uniform_loss()
    say(f"first loss {loss:.4f}, ln(classes) {expected:.4f}")
    if config.adapter or config.loss_vocab == "full":  # which starts trained, in part at least
        return
    if abs(loss - expected) > 0.5:
        raise UserError(f"the first loss is {loss:.4f} instead of about {expected:.4f}: the new rows are not as meant.")
    if abs(loss - expected) > 0.05:
        say("warning: the first loss is further than 0.05 from ln(classes)")


# ---- evaluation, samples, export -------------------------------------------------------------------------------


def evaluate(model, clips: mot_clips.Clips | None, plain_text, run: runs.Run, step: int, to_device) -> float | None:
    """Metrics with the averaged weights, if there are any; returns the loss, which chooses the best checkpoint."""
    if not clips:
        return None
    with run.average.in_place():
        values = mot_eval.evaluate(model, clips, plain_text, run.ranks, to_device)
    run.tracker.event("eval", step, **values)
    say(f"evaluation at step {step}: loss {values['loss']:.4f}  {values['kbps']:.3f} of {values['codec_kbps']:.1f} kbps"
        f"  caption gain {values['caption_gain']:.4f}  text drift {values['text_drift']:g}")  # fmt: skip
    if values["text_drift"]:
        say("warning: text logits are no longer those of plain Llama")
    return values["loss"]


def export(ds_engine, config: Config, clips: mot_clips.Clips, run: runs.Run, step: int, score) -> Path:
    """The adapter alone, from the fp32 masters. Every rank must call it: ZeRO-3 gathers here."""
    model, folder = ds_engine.module.model, run.folder / "export"
    weights = mot_adapter.adapter_weights(ds_engine, keep=run.ranks.first)
    fingerprint = mot_adapter.base_fingerprint(model.llama)
    training = {name: getattr(config, name) for name in ("train_parts", "caption_dropout", "profile", "precision")}
    training |= {"step": step, "eval_loss": score, **clips.limits}
    description = mot_adapter.describe(model, config.model, fingerprint, clips.tokens.info, training)
    on_first(lambda: mot_adapter.write_adapter(folder, weights, description), run.ranks)
    return folder


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict):
    """The whole run; returns the engine with its trained weights."""
    if not config.model:
        assets = runs.demo_assets(ranks, "mot")
        config.model, config.data = str(assets / "llama"), str(assets / "tokens")
        config.musicgen = config.musicgen or str(assets / "musicgen")
        config.eval_data = config.eval_data or config.data  # its column `split` holds rows out

    # model and data
    model = build_model(config, ds)
    tokenizer = mot_clips.Tokenizer(config.model)
    clips = build_data(config.data, model, tokenizer, config, ranks, train=True)
    eval_clips = build_data(config.eval_data, model, tokenizer, config, ranks, train=False)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    micro_batches = ranks.world * config.accumulation  # of one optimizer step
    steps = config.steps or plan.steps(config.epochs, micro_batches)
    say(f"clips {len(clips):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches} micro-batches")
    start_weights(model, config, clips)
    needs = memory.say_needs(model, ds, config, ranks)

    # engine and resume
    loss_of = functools.partial(compute_loss, clips=clips)
    groups = {"no_decay": ("embed",), "rate_scale": functools.partial(rate_scale, config=config)}
    if config.deepspeed:
        ds_engine = engine.start_engine(model, loss_of, config, ds, **groups)
    else:
        ds_engine = plain.start_engine(model, loss_of, config, ranks, **groups)
    assert model.llama.model.rotary_emb.inv_freq.dtype == torch.float32, "bf16 angles are wrong by radians"
    average = engine.Average(ds_engine, config.ema)
    to_device = mover(ranks.device)
    if config.dry_run:
        longest = plan.longest()
        weight = clips.target_weight(longest, 0)
        engine.dry_run(ds_engine, lambda chosen: to_device(clips.batch(chosen)), longest, weight, needs, ranks)
        return ds_engine
    run = runs.Run("llama_mot", config, ds, ranks, ds_engine, average, {"data": clips.tokens.fingerprint()}, steps)

    # loop: every rank knows the whole plan, and its own micro-batches are every world-th one
    def build(number: int) -> dict:
        epoch, chosen = plan.micro_batch(number)
        return clips.batch(chosen, epoch)

    feed = prefetch(build, range(run.start * micro_batches + ranks.rank, steps * micro_batches, ranks.world))
    decoders, score = [], None
    gate = health.Gate(closed=run.start == 0)
    plain_text = mot_eval.PlainText(model, eval_clips, ranks.device) if eval_clips else None
    if run.start == 0:
        if eval_clips:
            known = on_first(lambda: mot_eval.baselines(clips, eval_clips), ranks)
            run.tracker.event("baselines", 0, **known)
            mot_eval.say_baselines(known)
        evaluate(model, eval_clips, plain_text, run, 0, to_device)
    if all_sum([float(stop_requested())], ranks)[0]:
        run.stop(run.start)
    model.train()
    for step in range(run.start, steps):
        meter = Meter()
        parts = [plan.micro_batch(number) for number in range(step * micro_batches, (step + 1) * micro_batches)]
        step_weight = sum(clips.target_weight(chosen, epoch) for epoch, chosen in parts)
        for turn in range(config.accumulation):
            batch = to_device(meter.next(feed))
            loss_sum, stats = ds_engine(batch)
            engine.backward(ds_engine, loss_sum, step_weight, ranks.world)
            meter.add(batch, loss_sum, stats)
            if turn + 1 < config.accumulation:
                ds_engine.step()  # only counts the micro-batch
        gate.before_step(ds_engine)
        lr = learning_rate(step, steps, config)
        engine.set_learning_rate(ds_engine, lr)
        applied, norm = engine.take_step(ds_engine)
        totals = meter.reduce(ranks)

        done, last = step + 1, step + 1 == steps
        if applied:
            gate.after_step(ds_engine)
            average.update(step)
            positions = sum(int(clips.lengths[chosen].sum()) for _, chosen in parts)
            epoch = round(done * micro_batches / plan.per_epoch, 4)
            run.log(done, meter, totals, positions, epoch=epoch, lr=lr, grad_norm=norm)
            if step == 0:
                check_first_loss(totals.losses.sum() / totals.counts.sum(), model, config)
                health.refuse_state(model)
        else:
            run.skip(done, meter, [clips.name(clip) for _, chosen in parts for clip in chosen])

        score = None
        if last or due(config.eval_every, done):
            score = evaluate(model, eval_clips, plain_text, run, done, to_device)
        if last or totals.stop or due(config.save_every, done):
            run.save(done, score)
        if totals.stop and not last:
            run.stop(done)
        if eval_clips and config.samples and (last or due(config.sample_every, done)):
            with average.in_place():
                decoders += mot_music.sample(model, eval_clips, run.folder, done, ranks, stage_of(ds) == 3)
            run.tracker.event("sample", done)

    # finish
    if config.export:
        with average.in_place():
            export(ds_engine, config, clips, run, steps, score)
    samples.wait_for(decoders)
    all_sum([0.0], ranks)  # the samples of all ranks are on disk
    run.finish(steps)
    if ranks.first:
        say(f"adapter  {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return ds_engine


def rate_scale(name: str, config: Config) -> float:
    return config.copied_lr if mot_build.copied_part(name) else 1.0


def main(config: Config) -> None:
    if not config.deepspeed:
        train(config, plain.one_process(config), plain.DS)
        return
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    train(config, start_ranks(), resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1"))))


if __name__ == "__main__":
    run_main(main, CONFIG)
