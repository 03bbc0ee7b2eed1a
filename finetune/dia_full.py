"""Fine-tune all weights of Dia (1.6B text-to-speech), mono or stereo.

    deepspeed finetune/dia_full.py --ds ds_configs/zero3.json \\
        --model nari-labs/Dia-1.6B-0626 --data DIR --eval-data DIR --out runs/my-dia

DIR is a token dataset (data/encode.py makes one from audio; --stereo gives 18 channels, which a mono checkpoint
takes with --channels 18). The same through the launcher, which chooses the number of ranks: ./launch.sh dia_full
--model ... . On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/dia_full.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.config import UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.runtime import bar_codecs, catch_signals
from models.dia.flags import DiaFlags

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(DiaFlags):
    lr: float = flag(1e-5, "peak learning rate; 1e-5 for small batches, 4e-5 for about 128 clips", group="schedule")
    channels: int = flag(0, "0 = as the checkpoint; twice its number widens mono to stereo", low=0)
    freeze: list[str] = flag([], "what stays as it is: encoder, embeddings, first:K (K lowest layers)")
    layer_decay: float = flag(1.0, "each layer learns at this share of the rate of the one above", low=0.1, high=1)
    rehearsal: str = flag("", "DIR:SHARE, a token dataset not to forget and its share of the micro-batches")


DEMO = {
    "lr": 3e-3,
    "steps": 150,
    "warmup": 20.0,
    "micro_tokens": 600,
    "precision": "fp32",
    "uncond": 0.1,
    "save_every": 50,
    "eval_every": 50,
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and no signal is lost
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import deepspeed
import torch

from common import engine, health, memory, runs, samples
from common.feed import mover, prefetch
from common.loss import fuse_head
from common.metrics import Meter, due
from common.optim import learning_rate
from common.plan import Mix, Plan
from common.report import write_report
from common.runtime import Ranks, all_sum, run_main, say, start_ranks, stop_requested
from models.dia.data import Clips, WithRehearsal, build_data
from models.dia.evaluate import compute_loss, evaluate_and_log
from models.dia.generate import sample
from models.dia.layout import read_tag_map
from models.dia.weights import load_dia, needs_widening, widen, write_model

# ---- model -----------------------------------------------------------------------------------------------------


def build_model(config: Config, ds: dict, tag_map: dict[str, int]):
    """All of Dia, but for what --freeze names. Under ZeRO-3 it is built sharded, never whole on a rank."""
    wider = needs_widening(config.model, config.channels)
    engine.build_sharded(ds)
    model = load_dia(config.model, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    if wider:
        widen(model, ds)
    freeze(model, config.freeze)
    if tag_map and not model.model.encoder.embedding.weight.requires_grad:
        raise UserError("--tag-map needs the byte embedding, which --freeze encoder or embeddings keeps as it is.")
    fuse_head(model.logits_dense)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def freeze(model, presets: list[str]) -> None:
    patterns = {
        "encoder": r"model\.encoder\..*",
        "embeddings": r"model\.(encoder\.embedding|decoder\.embeddings)\..*",
    }
    for preset in presets:
        first = re.fullmatch(r"first:(\d+)", preset)
        if first:
            layers = "|".join(map(str, range(int(first[1]))))
            patterns[preset] = rf"model\.(encoder|decoder)\.layers\.({layers})\..*"
            deepest = model.config.decoder_config.num_hidden_layers
            if not 1 <= int(first[1]) <= deepest:
                raise UserError(f"--freeze {preset}: the decoder has {deepest} layers, so K is 1 to {deepest}.")
        elif preset not in patterns:
            raise UserError(f"--freeze {preset}: write encoder, embeddings or first:K.")
        named = {name: p for name, p in model.named_parameters() if re.fullmatch(patterns[preset], name)}
        for parameter in named.values():
            parameter.requires_grad_(False)
        say(f"frozen {preset}: {len(named)} parameters")


def rate_scale(model_config, layer_decay: float):
    """Share of the learning rate by a parameter's name: 1 at the head, less a layer further down in its stack."""
    depth = {
        "encoder": model_config.encoder_config.num_hidden_layers,
        "decoder": model_config.decoder_config.num_hidden_layers,
    }

    def scale(name: str) -> float:
        layer = re.match(r"model\.(encoder|decoder)\.layers\.(\d+)\.", name)
        if layer:
            return layer_decay ** (depth[layer[1]] - int(layer[2]))
        table = re.match(r"model\.(encoder|decoder)\.embedding", name)
        return layer_decay ** (depth[table[1]] + 1) if table else 1.0

    return scale


# ---- data ------------------------------------------------------------------------------------------------------


def rehearse(clips: Clips, plan: Plan, model, config: Config, tag_map: dict, ranks: Ranks, micro_batches: int):
    """Clips, plan and steps with --rehearsal mixed in."""
    folder, share = config.rehearsal.rpartition(":")[::2]
    try:
        share = float(share)
    except ValueError:
        share = 0.0
    if not folder or not 0 < share < 1:
        raise UserError(f"--rehearsal {config.rehearsal}: write DIR:SHARE with a share between 0 and 1.")
    rehearsal = build_data(folder, model, config, tag_map, ranks, train=True)
    steps = config.steps or plan.steps(config.epochs, micro_batches, 1 - share)
    other = Plan(rehearsal.lengths, config.micro_tokens, config.seed)
    say(f"rehearsal: {len(rehearsal):,} clips for {100 * share:g} % of the micro-batches")
    return WithRehearsal(clips, rehearsal), Mix(plan, other, share, config.seed, steps * micro_batches), steps


# ---- export ----------------------------------------------------------------------------------------------------


def export(engine_, config: Config, folder: Path, tag_map: dict, ranks: Ranks) -> Path:
    """The model from the fp32 masters, as transformers loads it. Every rank must call it: ZeRO-3 gathers here."""
    weights = engine.full_weights(engine_, everything=True, keep=ranks.first)
    if ranks.first:
        facts = dataclasses.asdict(config)
        write_model(folder / "export", engine_.module.model, weights, config.model, tag_map, facts)
    return folder / "export"


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
    padding = 100 * plan.padding()
    if config.rehearsal:
        clips, plan, steps = rehearse(clips, plan, model, config, tag_map, ranks, micro_batches)
    say(f"clips {len(clips):,}, padding {padding:.1f} %, {steps} steps of {micro_batches} micro-batches")
    needs = memory.say_needs(model, ds, config, ranks)

    # engine and resume
    loss_of = functools.partial(compute_loss, clips=clips)
    scale = rate_scale(model.config, config.layer_decay) if config.layer_decay < 1 else None
    ds_engine = engine.start_engine(model, loss_of, config, ds, no_decay=("embed", "norm"), rate_scale=scale)
    average = engine.Average(ds_engine, config.ema)
    to_device = mover(ranks.device)
    if config.dry_run:
        longest = plan.longest()
        weight = clips.target_weight(longest, 0)
        engine.dry_run(ds_engine, lambda chosen: to_device(clips.batch(chosen)), longest, weight, needs, ranks)
        return ds_engine
    fingerprint = clips.fingerprint() | {"tag_map": tag_map}
    run = runs.Run("dia_full", config, ds, ranks, ds_engine, average, fingerprint, steps)

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
        say(f"model    {run.folder / 'export'}\nsamples  {run.folder / 'samples'}\nreport   {write_report(run.folder)}")
    return ds_engine


def main(config: Config) -> None:
    ds = resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    train(config, start_ranks(), ds)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run_main(main, CONFIG)
