"""Fine-tune Higgs Audio v2 for zero-shot voice cloning, with LoRA or in full.

    deepspeed finetune/higgs_clone.py --ds ds_configs/zero2.json \\
        --model bosonai/higgs-audio-v2-generation-3B-base --data DIR --eval-data DIR --out runs/my-voices

DIR is a token dataset in which every clip names a reference clip by the same speaker (data/encode.py --codec higgs
makes one; data/pair_speakers.py chooses references if the manifest names none). ./launch.sh higgs_clone --model ...
does the same and chooses the number of ranks. The embedded demo runs on a laptop in a minute:

    deepspeed finetune/higgs_clone.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import attention, compiling
from common.config import flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.runtime import catch_signals, forbid_codec_imports
from common.sample_scores import SampleScores, SpeechFlags, best_score, demo_measures

# ---- flags -----------------------------------------------------------------------------------------------------


@dataclass
class Config(SpeechFlags):
    lr: float = flag(
        5e-5,
        "peak learning rate; 2e-5 to 2e-4 for LoRA, about 1e-5 for full presets",
        group="schedule",
        low=1e-6,
        high=1e-2,
    )
    revision: str = flag("", "branch, tag or commit of --model on the hub; empty = the newest", group="run")
    attn: attention.Attention = flag("auto", attention.HELP, group="run", may_change=True)
    compile: bool = flag(False, compiling.HELP, group="run", may_change=True)

    preset: Literal["attn", "attn+audio", "all", "audio_path", "audio_path+attn", "full"] = flag(
        "attn+audio",
        "LoRA on attention (attn), also on audio MLPs (attn+audio), also on text MLPs (all); or, without LoRA, train"
        " audio MLPs, embedding and head (audio_path), also attention, or everything but the text embedding (full)",
    )
    io: Literal["none", "lora", "train"] = flag(
        "none", "LoRA presets: audio embedding and head stay frozen, get LoRA, or are trained in full"
    )
    lora_rank: int = flag(16, "LoRA rank r", low=1)
    lora_alpha: float = flag(32.0, "LoRA alpha: the update is scaled by alpha / r", low=0)
    lora_dropout: float = flag(0.05, "dropout on the input of the LoRA update", low=0, high=0.95)
    rslora: bool = flag(False, "rank-stabilised LoRA: scale by alpha / sqrt(r)")
    dora: bool = flag(False, "weight-decomposed LoRA (DoRA)")
    quantize: Literal["none", "8bit", "4bit"] = flag("none", "load the frozen base in 8 or 4 bits (bitsandbytes)")

    text_loss: float = flag(0.0, "loss weight of the text tokens after the reference; 0 = off", low=0)
    codebook_weights: Literal["equal", "first"] = flag(
        "equal", "loss weights of the codebooks; first = 8 8 6 6 4 4 2 2, scaled to a mean of 1"
    )
    reference_dropout: float = flag(
        0.0,
        "fraction of the training clips that get no reference, chosen anew each epoch; above 0, clips that have none"
        " are trained on too",
        low=0,
        high=1,
    )
    over_long: Literal["error", "drop"] = flag(
        "error", "what to do with longer rows; they are never cut, which would teach the model not to stop"
    )
    packing: bool = flag(False, "sequence packing: join the rows of a micro-batch end to end, without padding")

    max_start_loss: float = flag(
        6.2,
        "stop if the initial loss exceeds this, or is lower without the delay pattern; 0 = off (untrained base)",
        low=0,
    )


# The demo: a tiny Higgs that clones voices learns from speakers of a new kind, and two others of that kind judge it.
DEMO = {
    "io": "train",
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "lora_dropout": 0.0,
    "lr": 1e-3,
    "steps": 150,
    "warmup": 10.0,
    "micro_tokens": 1600,
    "precision": "fp32",
    "ema": 0.95,
    "codebook_weights": "first",
    "save_every": 75,
    "eval_every": 75,
    "samples": 16,
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
from common.gradient_check import GradientCheck
from common.holdout import check_holdout
from common.keyed_random import torch_seed
from common.lora import base_model
from common.loss import IGNORE, codebook_loss, loss_head
from common.metrics import Meter, is_due
from common.plan import Plan
from common.report import say_result
from common.runtime import Process, any_rank, init_process, run_main, say, stop_requested
from common.tokens import open_tokens
from models.higgs.data import VoiceClips
from models.higgs.evaluate import layout_losses, probe, token_metrics
from models.higgs.generate import sample, sample_metrics
from models.higgs.layout import Layout, labelled_states, labelled_text_states, layout_of
from models.higgs.network import run_layer
from models.higgs.text import Chat
from models.higgs.weights import EMBEDDING, check_codec, load_higgs, load_tokenizer, lora_groups, unfreeze, write_model

# ---- model -----------------------------------------------------------------------------------------------------

# Groups of modules, or of parameters, by the names of models/higgs/weights.py.
LORA_PRESETS = {"attn": ["attn"], "attn+audio": ["attn", "audio"], "all": ["attn", "audio", "text"]}
FULL_PRESETS = {
    "audio_path": ["audio", "io"],
    "audio_path+attn": ["audio", "io", "attn"],
    "full": ["audio", "io", "attn", "text", "norm"],
}


def build_model(config: Config, ds: dict):
    """The model with LoRA or unfrozen weights, by --preset. Under ZeRO-3 it is built sharded, never whole."""
    if config.quantize != "none" and (stage_of(ds) == 3 or config.preset in FULL_PRESETS):
        raise UserError(
            f"--quantize {config.quantize} needs ZeRO-2 and a LoRA preset: a quantised base can be neither sharded nor"
            " trained."
        )
    if stage_of(ds) == 3 and config.io == "lora":
        raise UserError("--io lora needs ZeRO-2: PEFT cannot update a sharded embedding; --io train works with ZeRO-3.")
    if config.preset in FULL_PRESETS and config.io != "none":
        raise UserError(f"--io {config.io} is for LoRA; --preset {config.preset} trains embedding and head anyway.")
    if config.lr > (1e-4 if config.preset in FULL_PRESETS else 1e-3):
        say(f"warning: --lr {config.lr:g} is far above the usual learning rate (LoRA 2e-5 to 2e-4, full presets 1e-5)")
    engine.build_sharded(ds)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    quantization = lora.quantization_config(config.quantize, dtype, keep=["audio_lm_head", "text_lm_head"])
    has_text_loss = config.text_loss > 0
    attn = attention.choose_attention(config.attn, config.precision, config.packing)
    model = load_higgs(config.model, config.revision, dtype, has_text_loss, quantization, attn)
    model.audio_lm_head = loss_head(model.audio_lm_head)
    if has_text_loss:
        model.text_lm_head = loss_head(model.text_lm_head)
    if config.preset in FULL_PRESETS:
        unfreeze(model, FULL_PRESETS[config.preset], has_text_loss)
    else:
        groups = LORA_PRESETS[config.preset] + (["head", "embedding"] if config.io == "lora" else [])
        modules = lora.resolve_groups(model, lora_groups(model.config, has_text_loss), groups)
        for group, hits in modules.items():
            say(f"LoRA {group}: {len(hits)} modules")
        model = lora.add_lora(
            model,
            modules,
            config.lora_rank,
            seed=torch_seed(config.seed, "lora"),
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            modules_to_save=[EMBEDDING, "audio_lm_head"] if config.io == "train" else None,
        )
    if config.gradient_checkpointing:
        # Reentrant checkpointing needs an input that requires a gradient, and the frozen embeddings give none.
        base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return model


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(
    path: str, layout: Layout, chat: Chat, config: Config, process: Process, train: bool
) -> VoiceClips | None:
    """A token dataset, checked against the model and, on the main rank, for damage; None without a path."""
    if not path:
        return None
    tokens = open_tokens(path, process)
    check_codec(tokens, config.model, config.revision, process)
    clips = VoiceClips(tokens, layout, chat, config, train, process)
    clips.say_summary()
    return clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch: dict, clips: VoiceClips) -> LossOutput:
    """Weighted cross-entropy of the next code in every codebook, SUMMED over targets: the step divides it later.

    N positions whose next frame has a target, K codebooks. To add a term, add its weighted sum over targets to loss_sum
    (and its weights to VoiceClips.target_weight), and a (sum, count) pair to the parts to see it in the log.
    """
    hidden_nd, labels_nk, hidden_rd = labelled_states(model, batch)
    is_target = labels_nk != IGNORE
    weights_nk = is_target * batch["codebook_weights"] * batch.get("label_weights", 1)
    # A batch without a single label (a chat without audio) has N = 0. It still goes through the head, which gives a
    # loss of 0 with a gradient of zeros: if its rank returned early or skipped the backward pass, the other ranks would
    # wait for it forever. A mean instead of a sum would be 0 / 0 = NaN here.
    loss_sum, losses_nk = codebook_loss(base_model(model).audio_lm_head, hidden_nd, labels_nk, weights_nk)
    sums_2k = torch.stack([losses_nk.sum(0), is_target.sum(0).float()]).detach()
    parts = {f"channel_{k}": sums_2k[:, k] for k in range(sums_2k.shape[1])}
    # The ends of the streams are few among many codes: whether the model learns to stop shows here, not in the loss.
    is_end = labels_nk == clips.layout.eos
    parts["end"] = torch.stack([torch.where(is_end, losses_nk, 0).sum(), is_end.sum().float()]).detach()
    if clips.config.text_loss:
        text_nd, labels_n1 = labelled_text_states(hidden_rd, batch)
        weights_n1 = torch.full(labels_n1.shape, clips.config.text_loss, device=text_nd.device)
        weights_n1 = weights_n1 * batch.get("text_label_weights", 1)
        text_sum, losses_n1 = codebook_loss(base_model(model).text_lm_head, text_nd, labels_n1, weights_n1)
        loss_sum = loss_sum + text_sum
        parts["text"] = torch.stack([losses_n1.sum(), torch.full_like(losses_n1.sum(), len(losses_n1))])
    return LossOutput(loss_sum, parts)


# ---- evaluation and score --------------------------------------------------------------------------------------


def check_start(model, clips: VoiceClips, limit: float, device: torch.device) -> None:
    """Aborts before the first step if the base does not fit the data: with the right layout and codec, a trained base
    starts with a low loss, lower than without the delay pattern. Wrong ones would train too, and only sound wrong."""
    delayed, flat = layout_losses(model, clips, device)
    say(f"initial loss per code: {delayed:.3f} with the delay pattern, {flat:.3f} without")
    if limit and not delayed <= min(limit, flat):
        raise UserError(
            f"--model starts with a loss of {delayed:.3f} per code ({flat:.3f} without the delay pattern), which is"
            f" over --max-start-loss {limit:g} or higher than without the pattern: the base is untrained, or the codes"
            " are from another codec; use --max-start-loss 0 to train anyway."
        )


def evaluate(model, clips: VoiceClips | None, run: runs.Run, ema: Ema, scores: SampleScores, step: int) -> float | None:
    """Logs the metrics and makes the samples of the EMA weights; returns the score (see `score_of`)."""
    if not clips:
        return None
    spoken = []
    with ema.applied():
        metrics = token_metrics(model, clips, run.process)
        # Samples are part of the evaluation: whether they stop and sound like the reference decides, besides the loss,
        # whether a checkpoint can be the best, and no teacher-forced metric shows it.
        if run.config.samples:
            spoken = sample(model, clips, run.folder, step, run.process, run.sharded)
            metrics |= sample_metrics(spoken, run.process)
    base = run.first_eval() if step else metrics
    run.tracker.event("eval", step, **metrics)
    change = {name: metrics[name] - base[name] for name in metrics if name in base}
    say(f"evaluation at step {step}: " + "  ".join(
        f"{name} {value:.4f} ({change.get(name, 0):+.4f})" for name, value in metrics.items() if "_channel_" not in name
    ))  # fmt: skip
    if metrics.get("gap", 1) <= 0:
        say("warning: the loss is as low with another speaker's reference: the voice prompt is ignored")
    return score_of(scores.of_step(step, spoken) | metrics | {"step": step}, base, run.config)


def score_of(metrics: dict, base: dict, config: Config) -> float | None:
    """The checkpoint's score, lower is better. `metrics`: of its evaluation and its samples; `base`: the same before
    training."""
    # A checkpoint that stops less often, sounds less like the reference or is less intelligible than the base has none,
    # so it is never the best. Few samples make these metrics noisy, hence the tolerance. The gap does not decide: it
    # also falls because the model knows more voices, so that another one's reference misleads it less.
    names = ("stop_rate", "similarity", "wer")
    change = {name: metrics[name] - base[name] for name in names if name in metrics and name in base}
    worse = [name for name in ("stop_rate", "similarity") if change.get(name, 0) < -0.05]
    worse += ["wer"] if change.get("wer", 0) > 0.05 else []
    if worse:
        say(f"warning: step {metrics['step']} cannot be the best: worse than the base in {', '.join(worse)}")
        return None
    return best_score(metrics, config.best_by)


# ---- export ----------------------------------------------------------------------------------------------------


def export(model, ema: Ema, config: Config, folder: Path, codec: dict, checkpoint: dict, process: Process) -> None:
    """Writes the adapter (LoRA presets) or the whole model, with fp32 master (or EMA) weights, as plain PEFT or
    transformers loads it. `codec`: of the training data; `checkpoint`: its step and score.

    Every rank must call it: ZeRO-3 gathers the weights here.
    """
    is_full = config.preset in FULL_PRESETS
    with ema.applied():
        weights = engine.full_weights(model, everything=is_full, keep=process.is_main)
    if not process.is_main:
        return
    training = dataclasses.asdict(config) | {"recipe": "higgs_clone", "checkpoint": checkpoint}
    if is_full:
        write_model(folder, model, weights, config.model, config.revision, training, codec)
    else:
        files = {"training_config.json": training, "codec.json": codec}
        lora.write_adapter(model, weights, folder, config.model, files, config.revision or None)


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, process: Process, ds: dict):
    """The whole run; returns the engine with the exported weights."""
    if not config.model:
        assets = runs.demo_assets(process, "clone")
        config = dataclasses.replace(
            config,
            model=str(assets / "model"),
            data=str(assets / "tokens" / "train"),
            eval_data=config.eval_data or str(assets / "tokens" / "eval"),
            **demo_measures(config),
        )

    # model and data
    config = hub.pin(config, process)
    model = build_model(config, ds)
    tokenizer = load_tokenizer(config.model, config.revision)
    layout = layout_of(base_model(model).config, tokenizer)
    chat = Chat(tokenizer)
    clips = build_data(config.data, layout, chat, config, process, train=True)
    eval_clips = build_data(config.eval_source, layout, chat, config, process, train=False)
    check_holdout([clips], eval_clips, config, process)
    codec = codec_identity(clips.tokens.info)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    micro_batches_per_step = process.world * config.accumulation
    steps = config.steps or plan.steps(config.epochs, micro_batches_per_step)
    say(f"clips {len(clips):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches_per_step}"
        " micro-batches")  # fmt: skip
    loss_fn = functools.partial(compute_loss, clips=clips)

    # optimizer and engine
    groups = optim.parameter_groups(model, config.weight_decay, no_decay=("lora_", "embed", "norm"))
    optimizer = optim.build_optimizer(groups, config, ds)  # any torch optimizer works here
    if config.compile:
        base_model(model).model.run_layer = compiling.compiled(run_layer, ds)
    ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)
    ema = Ema(ds_engine, config.ema)
    if config.dry_run:
        longest = plan.longest()
        batch = to_device(clips.batch(longest), process.device)
        engine.dry_run(ds_engine, batch, clips.target_weight(longest), process)
        return ds_engine

    # fresh start or resume
    commit = getattr(base_model(model).config, "_commit_hash", None)  # on the hub; None for a local folder
    fingerprint = clips.fingerprint() | {"model_commit": commit, "optimizer": optim.describe_optimizer(optimizer)}
    run = runs.Run("higgs_clone", config, ds, process, fingerprint, steps, codec)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    scores = SampleScores(run, eval_clips, ("reference",))
    if run.checkpoint:
        run.load(ds_engine, ema)
    else:
        check_start(model, eval_clips or clips, config.max_start_loss, process.device)
        evaluate(model, eval_clips, run, ema, scores, step=0)  # the base, which later ones are compared with
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
            # Dropout depends on the micro-batch alone, not on its rank or on what ran before.
            torch.manual_seed(torch_seed(config.seed, step, i * process.world + process.rank, "dropout"))
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
            positions = sum(clips.positions(rows, epoch) for epoch, rows in rows_of_step)
            epoch = round(done * micro_batches_per_step / plan.per_epoch, 4)
            run.log(done, meter, totals, step_weight, positions, lr, grad_norm, epoch=epoch)
        else:
            run.skip(done, meter, [clips.batch(rows, epoch) for epoch, rows in rows_of_step])

        score, is_best = None, False
        if last or is_due(config.eval_every, done):
            score = evaluate(model, eval_clips, run, ema, scores, done)
            is_best = run.is_best(done, score)
        if last or totals.stop or is_best or is_due(config.save_every, done):
            run.save(ds_engine, ema, done, score)
        if totals.stop and not last:  # all ranks agree on it, because totals are reduced
            run.stop(done)

    # finish
    checkpoint = run.load_best(ds_engine, ema, steps)
    export(model, ema, config, run.folder / "export", codec, checkpoint, process)
    export_check.require_same(run, ema, probe, model, eval_clips or clips)
    scores.finish()
    run.finish(steps)
    if process.is_main:
        say_result(run.folder, "export")
    return ds_engine


def main(config: Config) -> None:
    process = init_process()
    train(config, process, resolve_ds(config.ds, config, process.world))


if __name__ == "__main__":
    run_main(main, CONFIG)
