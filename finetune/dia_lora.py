"""Fine-tune Dia (1.6B text-to-speech) with LoRA.

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json \\
        --model nari-labs/Dia-1.6B-0626 --data DIR --eval-data DIR --out runs/my-voice

DIR is a token dataset (data/encode.py makes one from audio). ./launch.sh dia_lora --model ... does the same and
chooses the number of ranks. The embedded demo runs on a laptop in a minute:

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from common.config import flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.runtime import catch_signals, forbid_codec_imports
from models.dia.flags import DiaFlags

# ---- flags -----------------------------------------------------------------------------------------------------


@dataclass
class Config(DiaFlags):
    without: ClassVar[tuple[str, ...]] = ("weight_decay",)  # LoRA matrices do not decay

    lora_groups: list[str] = flag(
        ["attn"], "modules to adapt: enc_attn dec_self dec_cross enc_mlp dec_mlp head, or attn, attn_mlp, decoder"
    )
    lora_rank: int = flag(16, "LoRA rank r", low=1)
    lora_alpha: float = flag(16.0, "LoRA alpha: the update is scaled by alpha / r", low=0)
    lora_dropout: float = flag(0.05, "dropout on the input of the LoRA update", low=0, high=0.95)
    channels: int = flag(
        0,
        "audio channels; 0 = the checkpoint's; twice as many = stereo, which also trains audio embedding and head",
        low=0,
    )
    quantize: Literal["none", "8bit", "4bit"] = flag("none", "load the frozen base in 8 or 4 bits (bitsandbytes)")


# The demo's voice differs so much from those of its tiny base that LoRA also needs the MLPs, the head and a high rate.
DEMO = {
    "lora_groups": ["decoder", "head"],
    "lora_rank": 64,
    "lora_alpha": 128.0,
    "lora_dropout": 0.0,
    "lr": 3e-3,
    "steps": 300,
    "warmup": 10.0,
    "micro_tokens": 800,
    "precision": "fp32",
    "ema": 0.98,
    "text_dropout": 0.0,  # nothing is spoken with guidance
    "channel_weights": "first4x",
    "eos_weight": 4.0,
    "save_every": 150,
    "eval_every": 150,
    "samples": 8,
}

if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, and no signal is lost
    catch_signals()
    forbid_codec_imports()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import torch

from common import engine, export_check, hub, lora, optim, runs
from common.attention import choose_attention
from common.codec import codec_identity
from common.compiling import compile_layers
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
from common.sample_scores import SampleScores, best_score, demo_measures
from common.tokens import open_tokens
from models.dia.data import Clips
from models.dia.evaluate import probe, token_metrics
from models.dia.generate import sample
from models.dia.layout import labelled_states, layers_of, layout_of, read_tag_map
from models.dia.weights import check_codec, load_dia, needs_widening, widen

# ---- model -----------------------------------------------------------------------------------------------------

PRESETS = {
    "attn": ["enc_attn", "dec_self", "dec_cross"],
    "attn_mlp": ["enc_attn", "dec_self", "dec_cross", "enc_mlp", "dec_mlp"],
    "decoder": ["dec_self", "dec_cross", "dec_mlp"],
}


def lora_groups(model_config) -> dict[str, tuple[str, int]]:
    """Group name -> pattern on module names and how many modules it must match."""
    encoder = model_config.encoder_config.num_hidden_layers
    decoder = model_config.decoder_config.num_hidden_layers
    attention, mlp = r"(q|k|v|o)_proj", r"mlp\.(gate_up_proj|down_proj)"
    return {
        "enc_attn": (rf"model\.encoder\.layers\.\d+\.self_attention\.{attention}", 4 * encoder),
        "dec_self": (rf"model\.decoder\.layers\.\d+\.self_attention\.{attention}", 4 * decoder),
        "dec_cross": (rf"model\.decoder\.layers\.\d+\.cross_attention\.{attention}", 4 * decoder),
        "enc_mlp": (rf"model\.encoder\.layers\.\d+\.{mlp}", 2 * encoder),
        "dec_mlp": (rf"model\.decoder\.layers\.\d+\.{mlp}", 2 * decoder),
        "head": (r"logits_dense", 1),
    }


def build_model(config: Config, ds: dict, tag_map: dict[str, int]):
    """The frozen base with LoRA on the chosen groups. Under ZeRO-3 it is built sharded, never whole on one rank."""
    if stage_of(ds) == 3 and config.quantize != "none":
        raise UserError(f"--quantize {config.quantize} needs ZeRO-2: a quantised base cannot be sharded.")
    if stage_of(ds) == 3 and tag_map:
        # PEFT 0.21 gathers those rows on CUDA only (peft/tuners/trainable_tokens/layer.py), so no test here proves it.
        raise UserError("--tag-map needs ZeRO-2: single rows of a sharded embedding cannot be trained.")
    names = [name for group in config.lora_groups for name in PRESETS.get(group, [group])]
    if config.channels and "head" in names:
        raise UserError("--lora-groups head: with --channels the head is trained whole, without LoRA.")
    wider = needs_widening(config.model, config.channels)
    engine.build_sharded(ds)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    quantization = lora.quantization_config(config.quantize, dtype, keep=["logits_dense"])
    attn = choose_attention(config.attn, config.precision, masks=True)
    model = load_dia(config.model, dtype, quantization, attn)
    if wider:
        widen(model, ds)
    modules = lora.resolve_groups(model, lora_groups(model.config), names)
    for group, hits in modules.items():
        say(f"LoRA {group}: {len(hits)} modules")
    model.logits_dense = loss_head(model.logits_dense)
    model = lora.add_lora(
        model,
        modules,
        config.lora_rank,
        seed=torch_seed(config.seed, "lora"),
        # Any other setting of PEFT's LoraConfig may stand here too, such as use_rslora=True or use_dora=True.
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        # The byte embedding is frozen: without this the row of a new tag would stay an untrained vector.
        trainable_token_indices={"embedding": sorted(tag_map.values())} if tag_map else None,
    )
    if config.channels:  # LoRA cannot make the tables of the new channels differ from those they are copies of
        lora.train_whole(model, ["model.decoder.embeddings.embed", "logits_dense"])
    if config.gradient_checkpointing:
        # Reentrant checkpointing needs an input that requires a gradient, and the frozen embeddings give none.
        base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return model


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(path: str, model, config: Config, tag_map: dict, process: Process, train: bool) -> Clips | None:
    """A token dataset, checked against the model and, on the main rank, for damage; None without a path."""
    if not path:
        return None
    tokens = open_tokens(path, process)
    check_codec(tokens, config.model, process)
    clips = Clips(tokens, layout_of(base_model(model).config), config, tag_map, train)
    if not len(clips):
        raise UserError(f"{path} holds no clip to {'train' if train else 'evaluate'} on.")
    clips.warn()
    return clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch: dict, clips: Clips) -> LossOutput:
    """Weighted cross-entropy of the next code in every channel, SUMMED over targets: the step divides it later.

    N positions with at least one target, C channels. To add a term, add its weighted sum over targets to loss_sum, and
    a (sum, count) pair to the parts to see it in the log.
    """
    hidden_nd, labels_nc = labelled_states(model, batch)
    is_target = labels_nc != IGNORE
    weights_nc = is_target * batch["channel_weights"] * batch.get("label_weights", 1)
    weights_nc = torch.where(labels_nc == clips.layout.eos, weights_nc * clips.config.eos_weight, weights_nc)
    loss_sum, losses_nc = codebook_loss(base_model(model).logits_dense, hidden_nd, labels_nc, weights_nc)
    sums_2c = torch.stack([losses_nc.sum(0), is_target.sum(0).float()]).detach()
    return LossOutput(loss_sum, {f"channel_{c}": sums_2c[:, c] for c in range(sums_2c.shape[1])})


# ---- evaluation and score --------------------------------------------------------------------------------------


def evaluate(model, clips: Clips | None, run: runs.Run, ema: Ema, scores: SampleScores, step: int) -> float | None:
    """Logs the metrics and makes the samples of the EMA weights; returns the checkpoint's score, lower is better."""
    if not clips:
        return None
    with ema.applied():
        metrics = token_metrics(model, clips, run.process)
        spoken = sample(model, clips, run.folder, step, run.process, run.sharded) if run.config.samples else []
    run.tracker.event("eval", step, **metrics)
    say(f"evaluation at step {step}: loss {metrics['loss']:.4f}  text gap {metrics['text_gap']:.4f}"
        f"  end recall {metrics['eos_recall']:.2f}  end false alarm {metrics['eos_false_alarm']:.4f}")  # fmt: skip
    metrics |= scores.of_step(step, spoken)
    # A model that would not stop speaking has no score, so it is never the best.
    return best_score(metrics, run.config.best_by) if metrics["eos_recall"] >= run.config.min_eos_recall else None


# ---- export ----------------------------------------------------------------------------------------------------


def export(
    model,
    ema: Ema,
    config: Config,
    folder: Path,
    tag_map: dict,
    codec: dict,
    checkpoint: dict,
    process: Process,
) -> None:
    """Writes the adapter with fp32 master (or EMA) weights, as plain PEFT loads it. `codec`: of the training data;
    `checkpoint`: its step and score.

    Every rank must call it: ZeRO-3 gathers the weights here.
    """
    with ema.applied():
        weights = engine.full_weights(model, keep=process.is_main)
    if process.is_main:
        training = dataclasses.asdict(config) | {"recipe": "dia_lora", "checkpoint": checkpoint}
        files = {"tag_map.json": tag_map, "training_config.json": training, "codec.json": codec}
        lora.write_adapter(model, weights, folder, config.model, files, config.revision or None)


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, process: Process, ds: dict):
    """The whole run; returns the engine with the exported weights."""
    if not config.model:
        assets = runs.demo_assets(process, "speech")
        config = dataclasses.replace(
            config,
            model=str(assets / "dia"),
            data=str(assets / "tokens" / "train"),
            eval_data=config.eval_data or str(assets / "tokens" / "eval"),
            **demo_measures(config, assets / "grammar.jsgf"),
        )

    # model and data
    config = hub.pin(config, process)
    tag_map = read_tag_map(config.tag_map)
    model = build_model(config, ds, tag_map)
    clips = build_data(config.data, model, config, tag_map, process, train=True)
    eval_clips = build_data(config.eval_source, model, config, tag_map, process, train=False)
    check_holdout([clips], eval_clips, config, process)
    codec = codec_identity(clips.tokens.info)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    micro_batches_per_step = process.world * config.accumulation
    steps = config.steps or plan.steps(config.epochs, micro_batches_per_step)
    say(f"clips {len(clips):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches_per_step}"
        " micro-batches")  # fmt: skip
    loss_fn = functools.partial(compute_loss, clips=clips)

    # optimizer and engine
    groups = optim.parameter_groups(model, weight_decay=0.0, no_decay=())
    optimizer = optim.build_optimizer(groups, config, ds)  # any torch optimizer works here
    if config.compile:
        compile_layers(layers_of(model), ds)
    ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)
    ema = Ema(ds_engine, config.ema)
    if config.dry_run:
        longest = plan.longest()
        batch = to_device(clips.batch(longest), process.device)
        engine.dry_run(ds_engine, batch, clips.target_weight(longest), process)
        return ds_engine

    # fresh start or resume
    fingerprint = clips.fingerprint() | {"tag_map": tag_map, "optimizer": optim.describe_optimizer(optimizer)}
    run = runs.Run("dia_lora", config, ds, process, fingerprint, steps, codec)
    if any_rank(stop_requested(), process):  # a signal came while the model was loading: nothing new to save
        run.stop(run.start_step)
    scores = SampleScores(run, eval_clips, ("original", "recorded"))
    if run.checkpoint:
        run.load(ds_engine, ema)
    else:
        evaluate(model, eval_clips, run, ema, scores, step=0)  # what training has to improve on
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
            positions = sum(int(clips.lengths[rows].sum()) for _, rows in rows_of_step)
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
    export(model, ema, config, run.folder / "export", tag_map, codec, checkpoint, process)
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
