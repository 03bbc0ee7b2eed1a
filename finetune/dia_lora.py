"""Fine-tune Dia (1.6B text-to-speech) with LoRA.

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json \\
        --model nari-labs/Dia-1.6B-0626 --data DIR --eval-data DIR --out runs/my-voice

DIR is a token dataset (data/encode.py makes one from audio). The same through the launcher, which chooses the
number of ranks: ./launch.sh dia_lora --model ... . On a laptop, in a minute, with the embedded demo:

    deepspeed finetune/dia_lora.py --ds ds_configs/zero2.json --steps 20 --samples 1
"""

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import RunConfig, UserError, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.runtime import bar_codecs, catch_signals

# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config(RunConfig):
    lora_groups: list[str] = flag(["attn"], "groups (enc_attn dec_self ...) or presets (attn attn_mlp decoder)")
    lora_rank: int = flag(16, "rank r of the update", low=1)
    lora_alpha: float = flag(16.0, "scale of the update is alpha / r", low=0)
    lora_dropout: float = flag(0.05, "dropout on the input of the update", low=0, high=0.95)
    group_ranks: list[str] = flag([], "other ranks for some groups, such as dec_cross=32")
    rslora: bool = flag(False, "scale by alpha / sqrt(r)")
    dora: bool = flag(False, "weight-decomposed LoRA")
    load_in: Literal["full", "8bit", "4bit"] = flag("full", "how the frozen base is held (bitsandbytes)")

    text_mode: Literal["speech", "tags"] = flag("speech", "a transcript, or comma-separated tags (music)")
    tag_dropout: float = flag(0.1, "tags: probability to drop each", low=0, high=1)
    tag_limit: int = flag(0, "tags: at most this many; 0 = all", low=0)
    tag_map: str = flag("", "JSON file of tags that become one trained control byte each; empty = none")
    allow_empty_text: bool = flag(False, "train on clips that have no text")
    over_long_text: Literal["error", "drop"] = flag("error", "texts over the model's limit; never cut")
    max_seconds: float = flag(0.0, "longest part of a clip to train on; 0 = the model's limit", low=0)
    over_long: Literal["error", "drop", "crop"] = flag("error", "longer clips; crop only for tag prompts")
    uncond: float = flag(0.15, "share of samples without text, which guidance needs", low=0, high=1)
    uncond_scope: Literal["sample", "step"] = flag("sample", "decide a sample, or a whole step on all ranks")
    channel_weights: Literal["equal", "first4x"] = flag("equal", "loss weight of the codebooks")
    eos_weight: float = flag(1.0, "loss weight of the end token", low=0)
    sample_frames: int = flag(0, "longest sample; 0 = 1.5 x the longest evaluation clip", low=0)


# The demo learns a random tiny model from nothing, so LoRA also needs the MLPs and the head, and a high rate.
DEMO = {
    "lora_groups": ["attn_mlp", "head"],
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "lora_dropout": 0.0,
    "lr": 1e-2,
    "steps": 120,
    "warmup": 10.0,
    "micro_tokens": 1024,
    "precision": "fp32",
    "uncond": 0.1,
    "save_every": 60,
    "eval_every": 60,
}

if __name__ == "__main__":  # before the heavy imports: mistakes answer at once, and no signal is lost
    catch_signals()
    bar_codecs()
    CONFIG = parse_args(Config, __doc__, demo=DEMO)

import deepspeed
import numpy as np
import torch
from peft import PeftModel

from common import checkpoint, engine, lora, memory, runs, samples
from common.feed import mover, prefetch
from common.keyed import key64
from common.loss import fuse_head
from common.optim import learning_rate
from common.plan import Plan
from common.report import write_report
from common.runtime import Ranks, Stopped, all_sum, memory_gb, run, say, start_ranks, stop_requested
from common.tokens import TokenDataset
from common.track import Tracker
from models import dia

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
    model = dia.load_dia(config.model, dtype, quantization(config, dtype))
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
        dia.base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
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


# ---- data ------------------------------------------------------------------------------------------------------


def build_data(path: str, model_config, config: Config, tag_map: dict, train: bool, ranks: Ranks) -> dia.Clips:
    """A token dataset, checked against the model and, on the first rank, for damage."""
    tokens = TokenDataset(path)
    if config.verify_data and ranks.first:
        tokens.verify()
    clips = dia.Clips(tokens, dia.layout_of(model_config), config, tag_map, train)
    clips.warn()
    return clips


# ---- batch to loss ---------------------------------------------------------------------------------------------


def compute_loss(model, batch, clips: dia.Clips):
    """Weighted loss sum over the batch's targets; per channel the plain sum and the count."""
    weights = torch.as_tensor(clips.weights, dtype=torch.float32)
    return dia.dia_loss(model, batch, weights, clips.config.eos_weight, clips.layout.eos)


# ---- evaluation, samples, export -------------------------------------------------------------------------------


def sample(model, clips: dia.Clips, config: Config, folder: Path, step: int, ranks: Ranks, stage: int) -> list:
    """Speaks a few evaluation texts greedily, spread over all ranks; returns the decoders it started."""
    chosen = np.unique(np.linspace(0, len(clips) - 1, num=min(config.samples, len(clips)), dtype=int))
    prompts = [{"name": f"clip-{i:04d}", "text": clips.tokens.text(clips.kept[i]), "index": int(i)} for i in chosen]
    cap = config.sample_frames or int(1.5 * max(clips.tokens.frames))
    codec, board = clips.tokens.info["weights"], folder / "tensorboard"
    rate = clips.tokens.info["sample_rate"] / clips.tokens.info["hop"]

    def speak(mine: list[dict]) -> list:
        texts = [clips.text(prompt["index"], 0, 0) for prompt in mine]
        spoken = dia.speak(model, texts, cap, seed=key64(config.seed, step, "sample") % 2**63)
        facts = []
        for prompt, text, (codes, ended) in zip(mine, texts, spoken, strict=True):
            truth = clips.tokens.codes(clips.kept[prompt["index"]])
            shared = min(len(codes), len(truth))
            facts.append(
                {
                    "seconds": len(codes) / rate,
                    "seconds_a_byte": len(codes) / rate / max(1, len(text)),
                    "ended_by_eos": ended,
                    "repeats": samples.repeat_share(codes),
                    "codes_as_recorded": float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0,
                }
            )
        return [(codes, fact) for (codes, _), fact in zip(spoken, facts, strict=True)]

    files = samples.take_samples(prompts, speak, folder / "samples" / f"step-{step:08d}", ranks, stage == 3)
    decoders = [samples.start_decoder(files, codec, board, step)]
    recorded = folder / "samples" / "recorded"
    if ranks.first and not recorded.exists():
        truth = [(prompt, clips.tokens.codes(clips.kept[prompt["index"]])) for prompt in prompts]
        files = [samples.write_codes(recorded, p, c, {"seconds": len(c) / rate}) for p, c in truth]
        decoders.append(samples.start_decoder(files, codec, board, 0))
    return decoders


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
        runs.replace(draft, final)
    return final


# ---- training --------------------------------------------------------------------------------------------------


def train(config: Config, ranks: Ranks, ds: dict):
    """The whole run; returns the engine with its trained weights."""
    stage, folder = stage_of(ds), runs.run_folder(config, "dia_lora", ranks)
    if not config.model:
        assets = runs.demo_assets(ranks)
        config.model, config.data = str(assets / "dia"), str(assets / "tokens" / "train")
        config.eval_data = config.eval_data or str(assets / "tokens" / "eval")

    # model and data
    tag_map = dia.read_tag_map(config.tag_map)
    model = build_model(config, ds, tag_map)
    model_config = dia.base_model(model).config
    clips = build_data(config.data, model_config, config, tag_map, True, ranks)
    eval_clips = build_data(config.eval_data, model_config, config, tag_map, False, ranks) if config.eval_data else None
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    eval_plan = Plan(eval_clips.lengths, config.micro_tokens, config.seed, jitter=0) if eval_clips else None
    eval_batches = [eval_plan.micro_batch(n)[1] for n in range(eval_plan.per_epoch)] if eval_plan else []
    micro_batches = ranks.world * config.accumulation  # of one optimizer step
    steps = config.steps or plan.steps(config.epochs, micro_batches)
    total, trained = memory.count_parameters(model)
    need = memory.predict(total, trained, ds, config, ranks.world)
    say(f"parameters {total:,}, trained {trained:,}; clips {len(clips):,}, padding {100 * plan.padding():.1f} %")
    say(f"ZeRO-{stage} on {ranks.world} ranks: states {need['device'] / 2**30:.2f} GB a rank on the device,"
        f" {need['host'] / 2**30:.2f} GB in host memory")  # fmt: skip

    # engine, resume
    ds_engine = engine.start_engine(
        model, functools.partial(compute_loss, clips=clips), config, ds, no_decay=("lora_", "embed", "norm")
    )
    average = engine.Average(ds_engine, config.ema)
    to_device = mover(ranks.device)
    if config.dry_run:
        dry_run(ds_engine, clips, plan, ranks, to_device)
        return ds_engine
    identity = runs.identity(config, stage, ranks, clips.tokens.fingerprint())
    start, best = 0, None
    found = checkpoint.choose(config.resume, folder / "checkpoints", ranks)
    tracker = Tracker(folder, ranks, steps)
    if found:
        state = checkpoint.load(found, ds_engine, average, ranks, identity)
        start, best = state["step"], state["best"]
    tracker.forget_after(start if found else -1)
    if found:
        tracker.event("resume", start, checkpoint=str(found))
        say(f"going on after step {start} from {found}")
    if ranks.first:
        runs.write_config(folder, "dia_lora", config, ds, {"identity": identity, "ranks": ranks.world})

    def save(step: int, score: float | None = None) -> None:
        state = {"step": step, "best": best, "identity": identity}
        path = checkpoint.save(folder / "checkpoints", ds_engine, state, average, ranks, config.keep, score)
        tracker.event("checkpoint", step, path=str(path))

    def evaluate(step: int) -> float | None:
        if not eval_clips:
            return None
        with average.in_place():
            values = dia.evaluate(model, eval_clips, eval_batches, ranks, to_device)
        tracker.event("eval", step, **values)
        say(f"evaluation at step {step}: loss {values['loss']:.4f}  text gap {values['text_gap']:.4f}"
            f"  end recall {values['eos_recall']:.2f}  end false alarm {values['eos_false_alarm']:.4f}")  # fmt: skip
        return values["loss"]

    def speak(step: int) -> None:
        if eval_clips and config.samples:
            with average.in_place():
                decoders.extend(sample(model, eval_clips, config, folder, step, ranks, stage))
            tracker.event("sample", step)

    def build(number: int) -> dict:
        epoch, chosen = plan.micro_batch(number)
        return clips.batch(chosen, epoch, number // micro_batches)

    # Every rank knows the whole plan; its own micro-batches are every world-th one.
    mine = range(start * micro_batches + ranks.rank, steps * micro_batches, ranks.world)
    feed = prefetch(build, mine)
    decoders, skips = [], 0
    unproven = start == 0  # until the first step has shown that every LoRA matrix trains
    if start == 0:
        evaluate(0)
    model.train()

    for step in range(start, steps):
        began, waited = time.monotonic(), 0.0
        step_clips = [plan.micro_batch(n) for n in range(step * micro_batches, (step + 1) * micro_batches)]
        step_weight = sum(clips.target_weight(chosen, epoch) for epoch, chosen in step_clips)
        sums = torch.zeros(2, clips.layout.channels, dtype=torch.float64)
        padded, broken = 0, []
        for turn in range(config.accumulation):
            asked = time.monotonic()
            batch = to_device(next(feed))
            waited += time.monotonic() - asked
            # Dropout depends on the micro-batch alone, not on the rank that gets it or on what ran before.
            torch.manual_seed(key64(config.seed, step, turn * ranks.world + ranks.rank, "dropout") % 2**63)
            loss_sum, stats = ds_engine(batch)
            engine.backward(ds_engine, loss_sum, step_weight, ranks.world)
            sums += stats.double().cpu()
            padded += batch["labels"].shape[0] * batch["labels"].shape[1]
            if not torch.isfinite(loss_sum):
                broken += batch["ids"]
            if turn + 1 < config.accumulation:
                ds_engine.step()  # only counts the micro-batch
        if unproven:
            check_gradients(ds_engine)
        lr = learning_rate(step, steps, config)
        engine.set_learning_rate(ds_engine, lr)
        applied, norm = engine.take_step(ds_engine)
        if unproven and applied:
            check_movement(ds_engine)
            unproven = False

        # One reduction a step carries the statistics and the wish to stop.
        real = sum(int(clips.lengths[c].sum()) for _, c in step_clips)
        *loss_count, padded, stop = all_sum([*sums.flatten(), padded, float(stop_requested())], ranks)
        channel_loss, channel_count = np.reshape(loss_count, (2, -1))
        step_s = time.monotonic() - began
        if applied:
            skips = 0
            average.update(step)
            tracker.step(
                step + 1,
                {
                    "epoch": round((step + 1) * micro_batches / plan.per_epoch, 4),
                    "loss": channel_loss.sum() / channel_count.sum(),
                    "lr": lr,
                    "grad_norm": norm,
                    "tokens": real,
                    "padding": 1 - real / padded,
                    "tokens_per_s": real / step_s,
                    "data_wait_s": waited,
                    "step_s": step_s,
                    **memory_gb(ranks),
                    **{f"loss_channel_{c}": channel_loss[c] / channel_count[c] for c in range(len(channel_loss))},
                },
            )
        else:
            skips += 1
            names = runs.gather_names(broken, ranks) or [
                clips.tokens.id(clips.kept[c]) for _, m in step_clips for c in m
            ]
            tracker.event("skip", step + 1, ids=names)
            say(f"warning: step {step + 1} skipped, loss or gradient not finite; clips: {', '.join(names[:20])}")
            if skips >= config.max_skips:
                raise UserError(
                    f"{skips} steps in a row were not finite (--max-skips), last with clips {', '.join(names[:5])};"
                    f" the checkpoints in {folder / 'checkpoints'} are from before."
                )

        done, last = step + 1, step + 1 == steps
        score = None
        if last or (config.eval_every and done % config.eval_every == 0):
            score = evaluate(done)
            best = score if best is None or (score is not None and score < best) else best
        if last or (config.sample_every and done % config.sample_every == 0):
            speak(done)
        if last or stop or (config.save_every and done % config.save_every == 0):
            save(done, score)
        if stop and not last:
            tracker.event("preempted", done)
            raise Stopped(f"stopped by a signal after step {done}; the same command with --out {folder} goes on")

    # finish
    if config.export:
        with average.in_place():
            export(ds_engine, config, folder, tag_map, ranks)
    samples.wait_for(decoders)
    all_sum([0.0], ranks)  # all samples are on disk
    tracker.event("done", steps)
    tracker.close()
    if ranks.first:
        say(f"adapter  {folder / 'export'}\nsamples  {folder / 'samples'}\nreport   {write_report(folder)}")
    return ds_engine


def check_gradients(ds_engine) -> None:
    """First step: a LoRA matrix without a gradient would train nothing and say nothing."""
    dead = lora.dead_matrices(engine.full_gradients(ds_engine))
    if dead:
        raise UserError(f"{len(dead)} LoRA matrices got no gradient at the first step, such as {dead[0]}.")


def check_movement(ds_engine) -> None:
    """First step: every lora_B starts at 0, so one that is still 0 was not updated."""
    still = lora.dead_matrices(engine.full_weights(ds_engine))
    if still:
        raise UserError(f"{len(still)} LoRA matrices did not move at the first step, such as {still[0]}.")


def dry_run(ds_engine, clips: dia.Clips, plan: Plan, ranks: Ranks, to_device) -> None:
    """One step on the longest batch, then stop."""
    longest = plan.longest()
    batch = to_device(clips.batch(longest))
    for _ in range(clips.config.accumulation):
        loss_sum, stats = ds_engine(batch)
        engine.backward(ds_engine, loss_sum, clips.target_weight(longest, 0), ranks.world)
        if ds_engine.is_gradient_accumulation_boundary():
            engine.take_step(ds_engine)
        else:
            ds_engine.step()
    peak = " ".join(f"{value:.2f} ({name})" for name, value in memory_gb(ranks).items())
    say(f"dry run: longest micro-batch {tuple(batch['labels'].shape)} (clips, positions, channels)"
        f" loss {float(stats[0].sum() / stats[1].sum()):.4f}; peak memory {peak}")  # fmt: skip


def main(config: Config) -> None:
    ds = resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    train(config, start_ranks(), ds)


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("WARNING")
    run(main, CONFIG)
