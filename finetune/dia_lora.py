"""Fine-tune Dia (1.6B text-to-speech) with LoRA.

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json \\
        --model nari-labs/Dia-1.6B-0626 --data DIR --eval-data DIR --out runs/my-voice

DIR is a token dataset (data/encode.py makes one from audio). The same through the launcher, which chooses the
number of ranks: ./launch.sh dia_lora --model ... . On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.runtime import bar_codecs, catch_signals
from models.dia.flags import DiaFlags

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(DiaFlags):
    lora_groups: list[str] = flag(["attn"], "groups (enc_attn dec_self ...) or presets (attn attn_mlp decoder)")
    lora_rank: int = flag(16, "rank r of the update", low=1)
    lora_alpha: float = flag(16.0, "scale of the update is alpha / r", low=0)
    lora_dropout: float = flag(0.05, "dropout on the input of the update", low=0, high=0.95)
    group_ranks: list[str] = flag([], "other ranks for some groups, such as dec_cross=32")
    rslora: bool = flag(False, "scale by alpha / sqrt(r)")
    dora: bool = flag(False, "weight-decomposed LoRA")
    weight_decay: float = flag(0.0, "LoRA matrices never decay", group="optimizer", low=0, high=0)
    load_in: Literal["full", "8bit", "4bit"] = flag("full", "how the frozen base is held (bitsandbytes)")


# The demo learns a random tiny model from nothing, so LoRA also needs the MLPs and the head, and a high rate.
DEMO = {
    "lora_groups": ["attn_mlp", "head"],
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "lora_dropout": 0.0,
    "lr": 3e-3,
    "steps": 240,
    "warmup": 20.0,
    "micro_tokens": 600,
    "precision": "fp32",
    "uncond": 0.1,
    "save_every": 80,
    "eval_every": 80,
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and no signal is lost
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import deepspeed
import torch
from peft import PeftModel

from common import checkpoint, engine, health, lora, memory, runs, samples
from common.feed import mover, prefetch
from common.keyed_random import key64
from common.lora import base_model
from common.loss import fuse_head
from common.metrics import Meter, due
from common.optim import learning_rate
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, run_main, say, start_ranks, stop_requested
from models.dia.data import build_data
from models.dia.evaluate import compute_loss, evaluate_and_log
from models.dia.generate import sample
from models.dia.layout import read_tag_map
from models.dia.weights import load_dia

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


def build_model(config: Config, ds: dict, tag_map: dict[str, int]) -> PeftModel:
    """The frozen base with LoRA on the named groups. Under ZeRO-3 it is built sharded, never whole on a rank."""
    if stage_of(ds) == 3 and config.load_in != "full":
        raise UserError(f"--load-in {config.load_in} needs ZeRO-2: a quantised base cannot be sharded.")
    if stage_of(ds) == 3 and tag_map:
        raise UserError("--tag-map needs ZeRO-2: PEFT cannot train single rows of a sharded embedding.")
    engine.build_sharded(ds)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = load_dia(config.model, dtype, quantization(config, dtype))
    names = [name for group in config.lora_groups for name in PRESETS.get(group, [group])]
    found = lora.resolve_groups(model, lora_groups(model.config), names)
    for group, hits in found.items():
        say(f"LoRA {group}: {len(hits)} modules")
    fuse_head(model.logits_dense)
    model = lora.add_lora(
        model,
        found,
        config.lora_rank,
        seed=key64(config.seed, "lora") % 2**63,
        group_ranks=parse_group_ranks(config.group_ranks, found),
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        # The byte embedding is frozen: without this a new tag's row would stay an untrained vector.
        trainable_token_indices={"embedding": sorted(tag_map.values())} if tag_map else None,
    )
    if config.gradient_checkpointing:
        # Reentrant checkpointing finds no input that needs a gradient and dies.
        base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return model


def quantization(config: Config, dtype: torch.dtype):
    if config.load_in == "full":
        return None
    from transformers import BitsAndBytesConfig

    keep = ["logits_dense"]  # the loss reads the head's weight itself
    if config.load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=keep
    )


def parse_group_ranks(items: list[str], found: dict) -> dict[str, int]:
    ranks = {}
    for item in items:
        group, _, rank = item.partition("=")
        if group not in found or not rank.isdigit() or int(rank) < 1:
            raise UserError(f"--group-ranks {item}: write GROUP=RANK with one of {', '.join(found)}.")
        ranks[group] = int(rank)
    return ranks


# ---- export ----------------------------------------------------------------------------------------------------


def export(engine_, config: Config, folder: Path, tag_map: dict, ranks: Ranks) -> Path:
    """The adapter from the fp32 masters, as plain PEFT loads it. Every rank must call it: ZeRO-3 gathers here."""
    weights = engine.full_weights(engine_)
    final, draft = folder / "export", folder / ".export.tmp"
    if ranks.first:
        model = engine_.module.model
        model.peft_config["default"].base_model_name_or_path = config.model
        runs.fresh(draft)
        model.save_pretrained(str(draft), state_dict=weights, save_embedding_layers=False)
        checkpoint.write_json(draft / "tag_map.json", tag_map)
        checkpoint.write_json(draft / "training_config.json", dataclasses.asdict(config))
        runs.replace(draft, final)
    return final


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict):
    """The whole run; returns the engine with its trained weights."""
    if not config.model:
        assets = runs.demo_assets(ranks)
        config.model, config.data = str(assets / "dia"), str(assets / "tokens" / "train")
        config.eval_data = config.eval_data or str(assets / "tokens" / "eval")

    # model and data
    tag_map = read_tag_map(config.tag_map)
    model = build_model(config, ds, tag_map)
    clips = build_data(config.data, model, config, tag_map, ranks, train=True)
    eval_clips = build_data(config.eval_data, model, config, tag_map, ranks, train=False)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    micro_batches = ranks.world * config.accumulation  # of one optimizer step
    steps = config.steps or plan.steps(config.epochs, micro_batches)
    say(f"clips {len(clips):,}, padding {100 * plan.padding():.1f} %, {steps} steps of {micro_batches} micro-batches")
    needs = memory.say_needs(model, ds, config, ranks)

    # engine and resume
    loss_of = functools.partial(compute_loss, clips=clips)
    ds_engine = engine.start_engine(model, loss_of, config, ds, no_decay=("lora_", "embed", "norm"))
    average = engine.Average(ds_engine, config.ema)
    to_device = mover(ranks.device)
    if config.dry_run:
        longest = plan.longest()
        weight = clips.target_weight(longest, 0)
        engine.dry_run(ds_engine, lambda chosen: to_device(clips.batch(chosen)), longest, weight, needs, ranks)
        return ds_engine
    fingerprint = clips.fingerprint() | {"tag_map": tag_map}
    run = runs.Run("dia_lora", config, ds, ranks, ds_engine, average, fingerprint, steps)

    # loop: every rank knows the whole plan, and its own micro-batches are every world-th one
    def build(number: int) -> dict:
        epoch, chosen = plan.micro_batch(number)
        return clips.batch(chosen, epoch, number // micro_batches)

    feed = prefetch(build, range(run.start * micro_batches + ranks.rank, steps * micro_batches, ranks.world))
    decoders = []
    gate = health.Gate(closed=run.start == 0)
    if run.start == 0:
        evaluate_and_log(model, eval_clips, run, 0, to_device)
    if all_sum([float(stop_requested())], ranks)[0]:
        run.stop(run.start)
    model.train()
    for step in range(run.start, steps):
        meter = Meter()
        parts = [plan.micro_batch(number) for number in range(step * micro_batches, (step + 1) * micro_batches)]
        step_weight = sum(clips.target_weight(chosen, epoch) for epoch, chosen in parts)
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
            positions = sum(int(clips.lengths[chosen].sum()) for _, chosen in parts)
            epoch = round(done * micro_batches / plan.per_epoch, 4)
            run.log(done, meter, totals, positions, epoch=epoch, lr=lr, grad_norm=norm)
        else:
            run.skip(done, meter, [clips.id(clip) for _, chosen in parts for clip in chosen])

        score = None
        if last or due(config.eval_every, done):
            score = evaluate_and_log(model, eval_clips, run, done, to_device)
        if last or totals.stop or due(config.save_every, done):
            run.save(done, score)
        if totals.stop and not last:
            run.stop(done)
        if eval_clips and config.samples and (last or due(config.sample_every, done)):
            with average.in_place():
                decoders += sample(model, eval_clips, run.folder, done, ranks, stage_of(ds) == 3)
            run.tracker.event("sample", done)

    # finish
    if config.export:
        with average.in_place():
            export(ds_engine, config, run.folder, tag_map, ranks)
    samples.wait_for(decoders)
    all_sum([0.0], ranks)  # the samples of all ranks are on disk
    run.finish(steps)
    if ranks.first:
        say(f"adapter  {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return ds_engine


def main(config: Config) -> None:
    ds = resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    train(config, start_ranks(), ds)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run_main(main, CONFIG)
