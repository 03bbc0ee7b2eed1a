"""Fine-tune Higgs Audio v2 for zero-shot voice cloning, with LoRA or in full.

    deepspeed finetune/higgs_clone.py --ds ds_configs/zero2.json \\
        --model bosonai/higgs-audio-v2-generation-3B-base --data DIR --eval-data DIR --out runs/my-voices

DIR is a token dataset whose clips name a reference by the same speaker (data/encode.py --codec higgs, and
data/pair_speakers.py where the manifest names none). The same through the launcher, which chooses the number of
ranks: ./launch.sh higgs_clone --model ... . On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/higgs_clone.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import RunConfig, UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.runtime import bar_codecs, catch_signals

# ---- arguments -------------------------------------------------------------------------------------------------

FULL = ("audio_path", "audio_path+attn", "full")


@dataclass
class Config(RunConfig):
    lr: float = flag(5e-5, "peak learning rate; full presets usually take 1e-5", group="schedule")
    revision: str = flag("", "revision of --model on the hub", group="run")

    preset: Literal["attn", "attn+audio", "all", "audio_path", "audio_path+attn", "full"] = flag(
        "attn+audio", "LoRA on attn(ention), audio and all (text) feed-forwards; or weights: audio_path, ..., full"
    )
    io: Literal["none", "lora", "full"] = flag("none", "LoRA presets: how audio embedding and head are trained")
    lora_rank: int = flag(16, "rank r of the update", low=1)
    lora_alpha: float = flag(32.0, "scale of the update is alpha / r", low=0)
    lora_dropout: float = flag(0.05, "dropout on the input of the update", low=0, high=0.95)
    rslora: bool = flag(False, "scale by alpha / sqrt(r)")
    dora: bool = flag(False, "weight-decomposed LoRA")
    load_in: Literal["full", "8bit", "4bit"] = flag("full", "how the frozen base is held (bitsandbytes)")

    text_loss: float = flag(0.0, "loss weight of the text after the reference; 0 = off", low=0)
    codebook_weights: Literal["equal", "first"] = flag("equal", "loss weight of the codebooks; first = 8 8 6 6 4 4 2 2")
    allow_no_ref: bool = flag(False, "also train clips without a reference: the model invents a voice for them")
    normalise_text: bool = flag(True, "texts as the base knows them: half-width punctuation, event tags, full stop")
    max_positions: int = flag(0, "longest row, reference and target together; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop"] = flag("error", "longer rows; never cut, that would teach not to stop")
    packing: bool = flag(False, "the rows of a micro-batch end to end in one, without padding")

    max_start_loss: float = flag(
        6.2, "refuse a base that starts above it or likes audio without delay better; 0 = an untrained base", low=0
    )
    promote_worse: bool = flag(False, "a checkpoint can be the best though it stops or clones worse than the base")
    greedy: bool = flag(False, "samples: the most likely codes instead of drawn ones")
    sample_frames: int = flag(0, "longest sample; 0 = 1.5 x the longest evaluation clip", low=0)
    similarity: str = flag("", "score samples: resemblyzer, or a folder with an x-vector model; empty = off")
    wer: str = flag("", "score samples: pocketsphinx (English), or a folder with a speech recogniser; empty = off")
    codec_name: str = flag(
        "bosonai/higgs-audio-v2-tokenizer", "hub id of the codec that an exported folder names; empty = as the base"
    )


# The demo learns a random tiny model from nothing, so the codes' embedding and head are trained too, at a high rate.
DEMO = {
    "io": "full",
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "lora_dropout": 0.0,
    "lr": 5e-3,
    "steps": 100,
    "warmup": 20.0,
    "micro_tokens": 2500,
    "precision": "fp32",
    "save_every": 50,
    "eval_every": 50,
    "max_start_loss": 0.0,
    "greedy": True,
    "codec_name": "",
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and no signal is lost
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import deepspeed
import torch

from common import checkpoint, engine, health, memory, runs, samples
from common.feed import mover, prefetch
from common.keyed_random import key64
from common.lora import base_model
from common.loss import fuse_head
from common.metrics import Meter, due
from common.optim import learning_rate
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, on_first, run_main, say, start_ranks, stop_requested
from models.higgs.data import Pairs, build_data
from models.higgs.evaluate import evaluate as token_metrics
from models.higgs.evaluate import higgs_loss, layout_losses
from models.higgs.generate import sample
from models.higgs.layout import layout_of
from models.higgs.text import Chat
from models.higgs.weights import add_lora, check_codec, load_higgs, load_tokenizer, unfreeze, write_model

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict):
    """The model with what --preset names trainable. Under ZeRO-3 it is built sharded, never whole on a rank."""
    if config.load_in != "full" and (stage_of(ds) == 3 or config.preset in FULL):
        raise UserError(f"--load-in {config.load_in} needs ZeRO-2 and a LoRA preset: a quantised base stays as it is.")
    if stage_of(ds) == 3 and config.io == "lora":
        raise UserError("--io lora needs ZeRO-2: PEFT cannot update a sharded embedding; --io full can be sharded.")
    if config.preset in FULL and config.io != "none":
        raise UserError(f"--io {config.io} is for LoRA; --preset {config.preset} trains embedding and head.")
    if config.lr > (1e-4 if config.preset in FULL else 1e-3):
        say(f"warning: --lr {config.lr:g} is far above the usual (LoRA 2e-5 .. 2e-4, full 1e-5)")
    engine.build_sharded(ds)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    options = {} if config.load_in == "full" else {"quantization_config": quantization(config, dtype)}
    model = load_higgs(config.model, config.revision, dtype, text_head=config.text_loss > 0, **options)
    for head in (model.audio_lm_head, model.text_lm_head):
        if head is not None and config.io == "none":  # PEFT wraps the head otherwise
            fuse_head(head)
    if config.preset in FULL:
        unfreeze(model, config.preset, config.text_loss > 0)
    else:
        model = add_lora(model, config, seed=key64(config.seed, "lora") % 2**63)
    if config.gradient_checkpointing:
        # Reentrant checkpointing finds no input that needs a gradient and dies.
        base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return model


def quantization(config: Config, dtype: torch.dtype):
    from transformers import BitsAndBytesConfig

    keep = ["audio_lm_head", "text_lm_head"]  # the loss reads a head's weight itself
    if config.load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=keep
    )


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch, pairs: Pairs):
    """Weighted loss sum over the batch's targets; per codebook the plain sum and the count."""
    return higgs_loss(model, batch, pairs.layout, pairs.weights, pairs.config.text_loss)


# ---- evaluation, samples, export -------------------------------------------------------------------------------


def check_start(model, pairs: Pairs, limit: float, to_device) -> None:
    """A trained base knows this layout: a wrong one shows here, before a step is spent on it."""
    delayed, flat = layout_losses(model, pairs, to_device)
    say(f"layout: loss {delayed:.3f} with the codebooks' delay, {flat:.3f} without")
    if limit and not delayed <= min(limit, flat):
        raise UserError(
            f"--model starts at a loss of {delayed:.3f} a code ({flat:.3f} without the codebooks' delay), over"
            f" --max-start-loss {limit:g} or worse with the delay: the base is not trained, or the codes are not its"
            " codec's. --max-start-loss 0 trains it all the same."
        )


def evaluate(model, pairs: Pairs | None, run: runs.Run, step: int, to_device, stage: int) -> tuple:
    """Metrics and samples with the averaged weights; returns the score that chooses the best checkpoint, and the
    decoders at work. No score for a model that stops or clones worse than the base."""
    if not pairs:
        return None, []
    decoders, config = [], run.config
    with run.average.in_place():
        values = token_metrics(model, pairs, run.ranks, to_device)
        if config.samples:
            facts, decoders = sample(model, pairs, run.folder, step, run.ranks, stage == 3)
            values |= facts
    base = run.first_eval() if step else values
    run.tracker.event("eval", step, **values)
    change = {name: values[name] - base[name] for name in values if name in base}
    say(f"evaluation at step {step}: " + "  ".join(
        f"{name} {value:.4f} ({change.get(name, 0):+.4f})" for name, value in values.items() if "_channel_" not in name
    ))  # fmt: skip
    if values.get("gap", 1) <= 0:
        say("warning: another speaker's reference does as well: the voice prompt is ignored")
    # Better is more for these, less for word errors; the tolerance is what sampling a few prompts may cost.
    worse = [name for name in ("stop_rate", "gap", "similarity") if change.get(name, 0) < -0.05]
    worse += ["wer"] if change.get("wer", 0) > 0.05 else []
    if worse and not config.promote_worse:
        say(f"warning: step {step} cannot be the best: worse than the base in {', '.join(worse)} (--promote-worse)")
        return None, decoders
    return values["loss"], decoders


def export(engine_, config: Config, folder: Path, ranks: Ranks) -> Path:
    """The adapter, or the whole model, from the fp32 masters. Every rank must call it: ZeRO-3 gathers here."""
    final, full, model = folder / "export", config.preset in FULL, engine_.module.model
    weights = engine.full_weights(engine_, everything=full, keep=ranks.first)
    facts = dataclasses.asdict(config)
    if ranks.first and full:
        write_model(final, model, weights, config.model, config.revision, config.codec_name, facts)
    elif ranks.first:
        draft = folder / ".export.tmp"
        model.peft_config["default"].base_model_name_or_path = config.model
        model.peft_config["default"].revision = config.revision or None
        runs.fresh(draft)
        model.save_pretrained(str(draft), state_dict=weights, save_embedding_layers=False)
        checkpoint.write_json(draft / "training_config.json", facts)
        runs.replace(draft, final)
    return final


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict):
    """The whole run; returns the engine with its trained weights."""
    if not config.model:
        assets = runs.demo_assets(ranks, "higgs")
        config.model, config.data = str(assets / "model"), str(assets / "tokens" / "train")
        config.eval_data = config.eval_data or str(assets / "tokens" / "eval")

    # model and data
    model = build_model(config, ds)
    tokenizer = load_tokenizer(config.model, config.revision)
    layout, chat = layout_of(base_model(model).config, tokenizer), Chat(tokenizer, config.normalise_text)
    pairs = build_data(config.data, layout, chat, config, ranks, train=True)
    eval_pairs = build_data(config.eval_data, layout, chat, config, ranks, train=False)
    on_first(lambda: check_codec(pairs.tokens, config.model, config.revision), ranks)
    plan = Plan(pairs.lengths, config.micro_tokens, config.seed)
    micro_batches = ranks.world * config.accumulation  # of one optimizer step
    steps = config.steps or plan.steps(config.epochs, micro_batches)
    say(f"pairs {len(pairs):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches} micro-batches")
    needs = memory.say_needs(model, ds, config, ranks)

    # engine and resume
    loss_of = functools.partial(compute_loss, pairs=pairs)
    ds_engine = engine.start_engine(model, loss_of, config, ds, no_decay=("lora_", "embed", "norm"))
    average = engine.Average(ds_engine, config.ema)
    to_device, stage = mover(ranks.device), stage_of(ds)
    if config.dry_run:
        longest = plan.longest()
        weight = pairs.target_weight(longest)
        engine.dry_run(ds_engine, lambda chosen: to_device(pairs.batch(chosen)), longest, weight, needs, ranks)
        return ds_engine
    commit = getattr(base_model(model).config, "_commit_hash", None)  # of the hub; None for a local folder
    fingerprint = {"data": pairs.tokens.fingerprint(), "model_commit": commit}
    run = runs.Run("higgs_clone", config, ds, ranks, ds_engine, average, fingerprint, steps)

    # loop: every rank knows the whole plan, and its own micro-batches are every world-th one
    feed = prefetch(
        lambda number: pairs.batch(plan.micro_batch(number)[1]),
        range(run.start * micro_batches + ranks.rank, steps * micro_batches, ranks.world),
    )
    decoders = []
    gate = health.Gate(closed=run.start == 0)
    if run.start == 0:
        check_start(model, eval_pairs or pairs, config.max_start_loss, to_device)
        decoders += evaluate(model, eval_pairs, run, 0, to_device, stage)[1]
    if all_sum([float(stop_requested())], ranks)[0]:
        run.stop(run.start)
    model.train()
    for step in range(run.start, steps):
        meter = Meter()
        parts = [plan.micro_batch(number)[1] for number in range(step * micro_batches, (step + 1) * micro_batches)]
        step_weight = sum(pairs.target_weight(chosen) for chosen in parts)
        for turn in range(config.accumulation):
            batch = to_device(meter.next(feed))
            # Dropout depends on the micro-batch alone, not on the rank that gets it or on what ran before.
            torch.manual_seed(key64(config.seed, step, turn * ranks.world + ranks.rank, "dropout") % 2**63)
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
            positions = sum(int(pairs.lengths[chosen].sum()) for chosen in parts)
            epoch = round(done * micro_batches / plan.per_epoch, 4)
            run.log(done, meter, totals, positions, epoch=epoch, lr=lr, grad_norm=norm)
        else:
            run.skip(done, meter, [pairs.id(clip) for chosen in parts for clip in chosen])

        score = None
        if last or due(config.eval_every, done):
            score, started = evaluate(model, eval_pairs, run, done, to_device, stage)
            decoders += started
        elif eval_pairs and config.samples and due(config.sample_every, done):
            with average.in_place():
                facts, started = sample(model, eval_pairs, run.folder, done, ranks, stage == 3)
            decoders += started
            run.tracker.event("sample", done, **facts)
        if last or totals.stop or due(config.save_every, done):
            run.save(done, score)
        if totals.stop and not last:
            run.stop(done)

    # finish
    if config.export:
        with average.in_place():
            export(ds_engine, config, run.folder, ranks)
    samples.wait_for(decoders)
    all_sum([0.0], ranks)  # the samples of all ranks are on disk
    run.finish(steps)
    if ranks.first:
        say(f"export   {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return ds_engine


def main(config: Config) -> None:
    ds = resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    train(config, start_ranks(), ds)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run_main(main, CONFIG)
