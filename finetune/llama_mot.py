"""Teach a frozen Llama 3 to generate music (MoT): new experts for music, unchanged text output.

    deepspeed finetune/llama_mot.py --ds ds_configs/zero2.json --model meta-llama/Llama-3.2-1B \\
        --musicgen facebook/musicgen-small --data DIR --eval-data DIR --out runs/my-music

DIR is a token dataset of MusicGen's EnCodec (data/encode.py --codec encodec --format musiccaps makes one).
./launch.sh llama_mot --model ... does the same and chooses the number of ranks. The embedded demo runs on a laptop in a
minute; the second line needs no DeepSpeed (one process, on a CPU, Apple GPU or NVIDIA GPU):

    deepspeed finetune/llama_mot.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import attention, compiling
from common.config import flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.runtime import catch_signals, forbid_codec_imports
from common.sample_scores import MusicFlags, SampleScores, best_score

# ---- flags -----------------------------------------------------------------------------------------------------


@dataclass
class Config(MusicFlags):
    revision: str = flag("", "branch, tag or commit of --model on the hub; empty = the newest", group="run")
    attn: attention.Attention = flag("auto", attention.HELP, group="run", may_change=True)
    compile: bool = flag(False, compiling.HELP, group="run", may_change=True)

    musicgen: str = flag("", "MusicGen whose feed-forward blocks initialise the experts: hub id or local folder")
    experts: Literal["musicgen", "llama"] = flag(
        "musicgen", "initial weights of the experts: MusicGen's feed-forward blocks, or Llama's own"
    )
    untie: Literal["ffn", "ffn+norm", "all"] = flag(
        "ffn", "weights that music has for itself: feed-forward (ffn), also norms (ffn+norm), also attention (all)"
    )
    train_parts: list[str] = flag(
        ["all"], "parts to train: embed head proj expert gain norm attn, or all, or proj_only (= proj head)"
    )
    quantize: Literal["none", "8bit", "4bit"] = flag("none", "load the frozen Llama in 8 or 4 bits (bitsandbytes)")
    adapter: str = flag("", "exported adapter folder to start from; empty = none")

    layout: Literal["flat", "delay"] = flag("flat", "one code per position, or one frame per position (4 x shorter)")
    max_audio: int = flag(2000, "maximum codes per clip; of longer clips a random window is trained on", low=4)
    over_long_text: Literal["error", "drop", "cut"] = flag(
        "error", "what to do with captions of more than 192 tokens: refuse them, drop their clips, or cut them"
    )
    allow_empty_text: bool = flag(False, "train on clips that have no caption")
    text_dropout: float = flag(
        0.1, "fraction of samples trained without a caption, which classifier-free guidance needs", low=0, high=1
    )

    codebook_weights: list[float] = flag([1.0, 1.0, 1.0, 1.0], "loss weight of each codebook")
    lr: float = flag(
        4e-4, "peak learning rate of new embeddings and projections", group="schedule", low=1e-6, high=1e-2
    )
    copied_lr: float = flag(
        0.25, "factor on --lr for weights copied from trained models", group="schedule", low=0, high=1
    )
    weight_decay: float = flag(0.1, "weight decay of matrices other than embeddings; 0 = off", group="optimizer", low=0)


# How samples are generated; see models/mot/generate.py. MusicGen's own values; the demo's music is its most likely one.
SAMPLING = {"temperature": 1.0, "top_k": 250, "guidance": 3.0}
DEMO_SAMPLING = {"temperature": 0.0, "guidance": 1.0}

# The demo trains from random weights, so music also needs its own attention and a high learning rate everywhere. One
# frame per position lets a step hold more clips.
DEMO = {
    "untie": "all",
    "layout": "delay",
    "lr": 4e-3,
    "copied_lr": 1.0,
    "weight_decay": 0.5,
    "steps": 400,
    "warmup": 10.0,
    "micro_tokens": 750,
    "precision": "fp32",
    "save_every": 100,
    "eval_every": 100,
}

if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, and no signal is lost
    catch_signals()
    forbid_codec_imports()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import torch

from common import engine, export_check, hub, lora, optim, runs
from common.codec import codec_identity
from common.contracts import LossOutput
from common.ema import Ema
from common.feed import prefetch, to_device
from common.gradient_check import GradientCheck, refuse_state
from common.holdout import check_holdout
from common.metrics import Meter, is_due
from common.plan import Plan
from common.report import say_result
from common.runtime import Process, any_rank, init_process, on_main, run_main, say, stop_requested
from common.tokens import open_tokens
from models.mot.build import (
    Donor,
    build_mot,
    calibrate,
    choose_parts,
    expert_of,
    is_copied,
    load_llama,
)
from models.mot.data import Clips, Tokenizer, check_coverage
from models.mot.evaluate import baselines, llama_text_logits, probe, token_metrics
from models.mot.generate import sample
from models.mot.layout import Layout
from models.mot.network import MoTLlama, Route, run_layer
from models.mot.weights import (
    adapter_weights,
    base_fingerprint,
    check_codec,
    describe,
    fill_adapter,
    read_description,
    write_adapter,
)

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict) -> MoTLlama:
    """Frozen Llama with new music experts. Under ZeRO-3 it is built sharded, never whole on one rank."""
    if stage_of(ds) == 3 and config.quantize != "none":
        raise UserError(f"--quantize {config.quantize} needs ZeRO-2: a quantised Llama cannot be sharded.")
    engine.build_sharded(ds)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    quantization = lora.quantization_config(config.quantize, dtype, keep=["lm_head"])
    llama = load_llama(config.model, dtype, attention.choose_attention(config.attn, config.precision), quantization)
    donor = Donor(config.musicgen) if config.musicgen else None
    expert = expert_of(config.experts, llama.config, donor)
    layout = Layout(llama.config.vocab_size, order=config.layout)
    model = build_mot(llama, layout, expert, config.untie, donor, config.seed, ds)
    choose_parts(model, config.train_parts)
    model.recompute = config.gradient_checkpointing
    return model


def init_adapter(model: MoTLlama, config: Config, clips: Clips) -> None:
    """Loads the weights of an earlier adapter; calibrates the gains of the experts on a clip if it has none."""
    if not config.adapter:
        calibrate(model, clips.batch([0]))
        return
    description = read_description(Path(config.adapter))
    if description["base_fingerprint"] != base_fingerprint(model.llama):
        raise UserError(f"--adapter {config.adapter} was trained on another Llama than --model {config.model}.")
    fill_adapter(model, Path(config.adapter))
    sources = tuple(description["expert"]["layer_map"])  # all experts were just replaced by that adapter's
    model.expert = dataclasses.replace(model.expert, layer_map=sources)


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(
    path: str, model: MoTLlama, tokenizer: Tokenizer, config: Config, process: Process, train: bool
) -> Clips | None:
    """A token dataset, checked against the model and, on the main rank, for damage; None without a path."""
    if not path:
        return None
    tokens = open_tokens(path, process)
    check_codec(tokens, config.adapter, process)
    if train:
        check_coverage(tokens)
    clips = Clips(tokens, model.layout, tokenizer, config, train, process)
    if not len(clips):
        raise UserError(f"{path} holds no clip to {'train' if train else 'evaluate'} on.")
    return clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model: MoTLlama, batch: dict) -> LossOutput:
    """Weighted cross-entropy of the next code in every codebook, SUMMED over targets: the step divides it later.

    B clips, L positions, H width, C codebooks. To add a term, add its weighted sum over targets to loss_sum, and a
    (sum, count) pair to the parts to see it in the log.
    """
    route = Route(batch["order"], batch["kind_counts"], batch["back"])
    hidden_blh = model(batch["input_ids"], batch["codebooks"], route=route)
    targets = batch["targets"].split(batch["target_counts"])  # positions with a label, for each codebook
    labels_nc = batch["labels"].flatten(0, 1)
    # Only the head knows which of its rows are the classes of a codebook.
    weights = batch["codebook_weights"], batch.get("position_weights")
    loss_sum, sums_2c = model.head(hidden_blh.flatten(0, 1), labels_nc, targets, *weights)
    return LossOutput(loss_sum, {f"channel_{c}": sums_2c[:, c].detach() for c in range(sums_2c.shape[1])})


def check_first_loss(loss: float, model: MoTLlama, config: Config) -> None:
    """Raises unless the first loss is about ln(classes), as it must be for new rows in the head that know nothing yet:
    otherwise layout, labels or rows are wrong."""
    expected = model.head.uniform_loss()
    say(f"first loss {loss:.4f}, ln(classes) {expected:.4f}")
    if config.adapter:  # the head is trained
        return
    if abs(loss - expected) > 0.5:
        raise UserError(f"the first loss is {loss:.4f} instead of about {expected:.4f}: the new embeddings are wrong.")
    if abs(loss - expected) > 0.05:
        say("warning: the first loss differs from ln(classes) by more than 0.05")


# ---- evaluation and score --------------------------------------------------------------------------------------


def evaluate(
    model: MoTLlama,
    clips: Clips | None,
    text_reference: list,
    sampling: dict,
    run: runs.Run,
    ema: Ema,
    scores: SampleScores,
    step: int,
) -> float | None:
    """Logs the metrics and makes the samples of the EMA weights; returns the checkpoint's score, lower is better."""
    if not clips:
        return None
    with ema.applied():
        metrics = token_metrics(model, clips, text_reference, run.process)
        played = []
        if run.config.samples:
            played = sample(model, clips, sampling, run.folder, step, run.process, run.sharded)
    run.tracker.event("eval", step, **metrics)
    say(f"evaluation at step {step}: loss {metrics['loss']:.4f}  {metrics['kbps']:.3f} of {metrics['codec_kbps']:.1f}"
        f" kbps  caption gain {metrics['caption_gain']:.4f}, at onsets {metrics['caption_gain_onsets']:.4f}"
        f"  text drift {metrics['text_drift']:g}")  # fmt: skip
    if metrics["text_drift"]:
        say("warning: text logits differ from those of the original Llama")
    # The loss among them is the unweighted one per code, with each clip's own caption.
    return best_score(metrics | scores.of_step(step, played), run.config.best_by)


# ---- export ----------------------------------------------------------------------------------------------------


def export(model, ema: Ema, config: Config, folder: Path, clips: Clips, checkpoint: dict, process: Process):
    """Writes the adapter alone, with fp32 master (or EMA) weights. `checkpoint`: its step and score.

    Every rank must call it: ZeRO-3 gathers the weights here.
    """
    with ema.applied():
        weights = adapter_weights(model, keep=process.is_main)
    fingerprint = base_fingerprint(model.llama)
    training = {
        name: getattr(config, name) for name in ("train_parts", "text_dropout", "max_audio", "precision", "quantize")
    }
    description = describe(model, config.model, fingerprint, clips.tokens.info, training)
    description |= {"revision": config.revision or None, "recipe": "llama_mot", "checkpoint": checkpoint}
    on_main(lambda: write_adapter(folder, weights, description), process)


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, process: Process, ds: dict):
    """The whole run; returns the engine with the exported weights."""
    sampling = SAMPLING
    if not config.model:
        sampling = DEMO_SAMPLING
        assets = runs.demo_assets(process, "mot")
        config = dataclasses.replace(
            config,
            model=str(assets / "llama"),
            musicgen=config.musicgen or str(assets / "musicgen"),
            data=str(assets / "tokens"),
            eval_data=config.eval_data or str(assets / "tokens"),  # its column `split` separates the two
        )

    if not config.text_dropout:  # music without a caption, which guidance compares with, is not trained
        sampling = sampling | {"guidance": 1.0}

    # model and data
    config = hub.pin(config, process)
    hub.fetch(config.musicgen, process, flag="--musicgen")
    model = build_model(config, ds)
    tokenizer = Tokenizer(config.model)
    clips = build_data(config.data, model, tokenizer, config, process, train=True)
    eval_clips = build_data(config.eval_source, model, tokenizer, config, process, train=False)
    check_holdout([clips], eval_clips, config, process)
    codec = codec_identity(clips.tokens.info)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    micro_batches_per_step = process.world * config.accumulation
    steps = config.steps or plan.steps(config.epochs, micro_batches_per_step)
    say(f"clips {len(clips):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches_per_step}"
        " micro-batches")  # fmt: skip
    init_adapter(model, config, clips)

    # optimizer and engine
    def lr_scale(name: str) -> float:
        return config.copied_lr if is_copied(name) else 1.0  # trained weights need smaller steps than new ones

    groups = optim.parameter_groups(model, config.weight_decay, no_decay=("embed",), lr_scale=lr_scale)
    optimizer = optim.build_optimizer(groups, config, ds)  # any torch optimizer works here
    if config.compile:
        model.run_layer = compiling.compiled(run_layer, ds)
    ds_engine = engine.start_engine(model, compute_loss, optimizer, ds)
    assert model.llama.model.rotary_emb.inv_freq.dtype == torch.float32, "bf16 angles are wrong by radians"
    ema = Ema(ds_engine, config.ema)
    if config.dry_run:
        longest = plan.longest()
        batch = to_device(clips.batch(longest), process.device)
        engine.dry_run(ds_engine, batch, clips.target_weight(longest), process)
        return ds_engine

    # fresh start or resume
    fingerprint = clips.fingerprint() | {"optimizer": optim.describe_optimizer(optimizer)}
    run = runs.Run("llama_mot", config, ds, process, fingerprint, steps, codec)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    scores = SampleScores(run, eval_clips, ())
    text_reference = llama_text_logits(model, eval_clips, process.device) if eval_clips else []
    if run.checkpoint:
        run.load(ds_engine, ema)
    else:
        if eval_clips:
            losses = on_main(lambda: baselines(clips, eval_clips), process)
            run.tracker.event("baselines", 0, **losses)
            say("evaluation loss of trivial models:", ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
        evaluate(
            model, eval_clips, text_reference, sampling, run, ema, scores, step=0
        )  # what training has to improve on
    gradient_check = GradientCheck(active=not run.checkpoint)

    def build_micro_batch(index: int) -> dict:
        epoch, rows = plan.micro_batch(index)
        return clips.batch(rows, epoch)

    # Every rank knows the whole plan; its own micro-batches are every world-th one.
    first, end = run.start_step * micro_batches_per_step, steps * micro_batches_per_step
    batches = prefetch(build_micro_batch, range(first + process.rank, end, process.world), process.device)
    model.train()
    for step in range(run.start_step, steps):
        # ---- one optimizer step ------------------------------------------------------------------------------
        # The loss is divided once, by the target weight of the whole step (all ranks, all micro-batches), which the
        # plan tells in advance. Averaging the means of unequal micro-batches would weight short clips more.
        meter = Meter()
        rows_of_step = [plan.micro_batch(step * micro_batches_per_step + i) for i in range(micro_batches_per_step)]
        step_weight = sum(clips.target_weight(rows, epoch) for epoch, rows in rows_of_step)
        for i in range(config.accumulation):
            with meter.waiting():
                batch = next(batches)
            output = ds_engine(batch)
            last_of_step = i + 1 == config.accumulation
            engine.backward(ds_engine, output.loss_sum, step_weight, process.world, last_of_step)
            meter.add(batch, output)
        gradient_check.before_step(ds_engine)
        lr = optim.learning_rate(step, steps, config)
        optim.set_learning_rate(ds_engine, lr)
        applied, grad_norm = engine.take_step(ds_engine)
        totals = meter.reduce(process)
        # ------------------------------------------------------------------------------------------------------

        done, last = step + 1, step + 1 == steps
        if applied:
            gradient_check.after_step(ds_engine)
            ema.update(step)
            positions = sum(int(clips.lengths[rows].sum()) for _, rows in rows_of_step)
            epoch = round(done * micro_batches_per_step / plan.per_epoch, 4)
            run.log(done, meter, totals, step_weight, positions, lr, grad_norm, epoch=epoch)
            if step == 0:
                check_first_loss(totals.loss_sum / step_weight, model, config)
                refuse_state(model)
        else:
            run.skip(done, meter, [clips.batch(rows, epoch) for epoch, rows in rows_of_step])

        score, is_best = None, False
        if last or is_due(config.eval_every, done):
            score = evaluate(model, eval_clips, text_reference, sampling, run, ema, scores, done)
            is_best = run.is_best(done, score)
        if last or totals.stop or is_best or is_due(config.save_every, done):
            run.save(ds_engine, ema, done, score)
        if totals.stop and not last:  # all ranks agree on it, because totals are reduced
            run.stop(done)

    # finish
    checkpoint = run.load_best(ds_engine, ema, steps)
    export(model, ema, config, run.folder / "export", clips, checkpoint, process)
    export_check.require_same(run, ema, probe, model, eval_clips or clips)
    scores.finish()
    run.finish(steps)
    if process.is_main:
        say_result(run.folder, "adapter")
    return ds_engine


def main(config: Config) -> None:
    process = init_process()
    train(config, process, resolve_ds(config.ds, config, process.world))


if __name__ == "__main__":
    run_main(main, CONFIG)
