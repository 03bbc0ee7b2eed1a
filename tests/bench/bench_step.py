"""One optimizer step of dia_full on 2 ranks against what else could take it: DeepSpeed's bare loop, plain DDP, the HF
Trainer and TRL's SFTTrainer with the same DeepSpeed JSON.

    python tests/bench/bench_step.py                  a model of 2 M weights
    python tests/bench/bench_step.py --size large     a model of 100 M weights
    python tests/bench/bench_step.py --side zero2 --side raw --rounds 30
    PYTHONPATH=/tmp/peers python tests/bench/bench_step.py --side zero2 --side trl

`dia_full.train` runs as it is, in a thread that waits after every logged step, and so does `Trainer.train`. All sides
are in the same two processes, load the same weights, take the same batches, and their losses are compared step by step
before anything is timed. Sides then take turns. Compared is the lowest decile of processor time per step, mean of both
ranks; wall time (median) is printed beside it. The first side in a process is slower than the same side in any other
place, by up to a tenth of the processor time; so the first one is thrown away.

`trl` runs if TRL can be imported (pip install --no-deps --target /tmp/peers trl). SFTTrainer's own loss knows only
language models with one head, and Dia has nine: the side overrides compute_loss, as TRL advises, with that of the HF
Trainer. So SFTTrainer's metrics, and what they cost, are left out.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from bench_dia_size import build_model  # noqa: E402

from helpers import support  # noqa: E402
from helpers.bench_rows import Row, report  # noqa: E402

# Encoder and decoder layers and width of the model; frames per clip, clips per micro-batch; warm-up, steps per turn.
SIZES = {"tiny": ((2, 2, 1 / 16), 60, 4, 15, 6), "large": ((2, 5, 1 / 2), 20, 2, 2, 1)}
TEXT = "[S1] The river is quiet in winter."
RANKS, CHANNELS, TAIL, ACCUMULATION = 2, 9, 16, 4
SIDES = "zero2 raw ddp hf hf_own_loss trl zero3 no_tracker accumulation forward_backward".split()
DEFAULTS = {"tiny": [side for side in SIDES if side != "no_tracker"], "large": ["zero2", "raw", "ddp"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--side", action="append", choices=SIDES, help="only these")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side; default: %(default)s")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    has_trl = importlib.util.find_spec("trl")
    if "trl" in (args.side or []) and not has_trl:
        sys.exit("TRL is missing: pip install --no-deps --target /tmp/peers trl, and set PYTHONPATH=/tmp/peers.")
    args.side = args.side or [side for side in DEFAULTS[args.size] if side != "trl" or has_trl]
    if args.scratch:
        try:
            run_rank(args)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # sides wait in threads, which would keep the process alive
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        result = measure(args, Path(folder))
    print(f"{'side':18} {'CPU ms (p10)':>13} {'wall ms (p50)':>14}")
    for side, times in result["sides"].items():
        print(f"{side:18} {times['cpu']:13.1f} {times['wall']:14.1f}")
    for row in rows(result, args.size):
        report(row)


def measure(args, scratch: Path) -> dict:
    """Starts the ranks, and returns what rank 0 has measured."""
    shape, frames, *_ = SIZES[args.size]
    build_model(scratch / "model", *shape)
    draw = np.random.default_rng(0)
    clips = [{"id": f"clip{i}", "text": TEXT, "codes": draw.integers(0, 1024, (frames, CHANNELS))} for i in range(64)]
    support.write_tokens(scratch / "tokens", clips)
    port, ranks = support.free_port(), []
    for rank in range(RANKS):
        with open(scratch / f"rank{rank}.log", "w") as log:
            command = [sys.executable, __file__, *sys.argv[1:], "--scratch", str(scratch)]
            environment = support.rank_environment(rank, RANKS, port)
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        sys.exit(f"rank {failed} failed:\n{(scratch / f'rank{failed}.log').read_text()[-3000:]}")
    return json.loads((scratch / "result.json").read_text())


def rows(result: dict, size: str) -> list[Row]:
    sides, weights = result["sides"], f"{result['weights'] / 1e6:.0f} M weights, 2 ranks"
    found = []

    def add(number: str, what: str, over: str, under: str, target: str, **columns) -> None:
        if over in sides and under in sides:
            ours = "zero2" if "zero2" in (over, under) else over
            ratio = sides[over]["cpu"] / sides[under]["cpu"]
            text = {name: f"{sides[side]['cpu']:.1f} ms" for name, side in columns.items()}
            what = f"{what}, {weights} (wall {sides[over]['wall'] / sides[under]['wall']:.2f})"
            found.append(Row(number, what, f"{sides[ours]['cpu']:.1f} ms", ratio, target, **text))

    add("P1", "step against DeepSpeed's bare loop", "zero2", "raw", "<= 1.03", limit="raw")
    add("P2", "HF Trainer with the same JSON and loss, against ours", "hf", "zero2", ">= 1.08", peer="hf")
    add(
        "P2",
        "HF Trainer with the model's own loss, against ours",
        "hf_own_loss",
        "zero2",
        ">= 1.08",
        peer="hf_own_loss",
    )
    add("P2", "TRL's SFTTrainer with the model's own loss, against ours", "trl", "zero2", ">= 1.08", peer="trl")
    add("P3", "step against plain DDP", "zero2", "ddp", "<= 1.15", limit="ddp")
    add("P3", "speed in ZeRO-3 against ZeRO-2", "zero2", "zero3", ">= 0.85", peer="zero3")
    add("P18", "step with TensorBoard against none", "zero2", "no_tracker", "<= 1.01", limit="no_tracker")
    if {"zero2", "accumulation", "forward_backward"} <= set(sides):
        extra = (sides["accumulation"]["cpu"] - sides["zero2"]["cpu"]) / (ACCUMULATION - 1)
        bare = sides["forward_backward"]["cpu"]
        what = f"each further micro-batch against forward and backward alone, {weights}"
        found.append(Row("P12", what, f"{extra:.1f} ms", extra / bare, "<= 1.03", limit=f"{bare:.1f} ms"))
    if {"zero2", "raw"} <= set(sides):  # once per size
        share = 100 * result["waited"]
        found.append(Row("P9", f"waiting for data, % of a step, {weights}", f"{share:.2f} %", share, "<= 1"))
    return found


# ---- in the ranks ------------------------------------------------------------------------------------------------


class Side:
    """Runs work(pause) in a thread that waits in pause(loss), which `work` calls after each step, for its next turn."""

    def __init__(self, work):
        self.work, self.losses, self.error = work, [], None
        self.may_go, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.may_go.acquire()
        try:
            self.work(self.pause)
        except BaseException as error:
            self.error = error
        self.error = self.error or RuntimeError("this side has ended")
        self.has_stopped.release()

    def pause(self, loss) -> None:
        self.losses.append(float(loss))
        self.has_stopped.release()
        self.may_go.acquire()

    def step(self) -> None:
        self.may_go.release()
        self.has_stopped.acquire()
        if self.error:
            raise self.error


def run_rank(args) -> None:
    import deepspeed
    import torch
    from accelerate.state import DistributedType, PartialState
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from torch import nn
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import dia_full
    from common import engine, optim, runs
    from common.ds_config import fit_buckets, resolve_ds
    from common.loss import IGNORE
    from common.memory import count_parameters
    from common.plan import Plan
    from common.runtime import all_sum, init_process
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of
    from models.dia.weights import load_dia

    process = init_process()
    _, frames, batch, warmup, turn = SIZES[args.size]
    zero2 = str(ROOT / "ds_configs" / "zero2.json")
    # A constant, small rate: all sides then walk through the same weights and can be compared step by step.
    config = functools.partial(
        dia_full.Config, ds=zero2, model=str(args.scratch / "model"), data=str(args.scratch / "tokens"),
        precision="fp32", lr=1e-5, warmup=0, min_lr_ratio=1.0, steps=10**6, micro_tokens=batch * (frames + TAIL),
        eval_every=0, save_every=0, samples=0, resume="never",
    )  # fmt: skip
    plain = config()
    model = load_dia(plain.model, torch.float32)  # now: after the side zero3, models are loaded in shards, by all ranks
    weights, layout = count_parameters(model)[0], layout_of(model.config)
    clips = Clips(TokenDataset(plain.data), layout, plain, {}, train=True)
    plan = Plan(clips.lengths, plain.micro_tokens, plain.seed)
    loss_fn = functools.partial(dia_full.compute_loss, clips=clips)
    assert len(plan.micro_batch(0)[1]) == batch

    class Batches(torch.utils.data.Dataset):
        """The micro-batches of all ranks in order."""

        def __len__(self) -> int:
            return plain.steps * RANKS

        def __getitem__(self, number: int) -> dict:
            epoch, rows = plan.micro_batch(number)
            return clips.batch(rows, epoch)

    batches = Batches()

    def build(ds: dict):
        model = dia_full.build_model(plain, ds, {})
        groups = optim.parameter_groups(model, plain.weight_decay, no_decay=("embed", "norm"))
        return model, optim.build_optimizer(groups, plain, ds)

    def mean_loss(module, batch: dict):
        """Clips are of one length, so that the mean over ranks of the means is the mean."""
        return module(batch).loss_sum / (batch["labels"] != IGNORE).sum()

    # ---- the sides

    pauses = {}
    own_log = runs.Run.log

    def log(run, step, meter, totals, step_weight, *more, **named):
        own_log(run, step, meter, totals, step_weight, *more, **named)
        pauses[run.folder](totals.loss_sum / step_weight)

    runs.Run.log = log

    def ours(name: str, pause, **flags) -> None:
        flags = config(out=str(args.scratch / name), **flags)
        pauses[Path(flags.out)] = pause
        dia_full.train(flags, process, resolve_ds(flags.ds, flags, RANKS))

    def raw(pause) -> None:
        model, optimizer = build(ds := resolve_ds(zero2, plain, RANKS))
        module = engine.LossModule(model, loss_fn)
        ds = fit_buckets(ds, trained=count_parameters(model)[1])
        ds_engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds)
        for number in itertools.count(process.rank, RANKS):
            loss = mean_loss(ds_engine, batches[number])
            ds_engine.backward(loss)
            ds_engine.step()
            pause(loss)

    def ddp(pause) -> None:
        model, optimizer = build(resolve_ds(zero2, plain, RANKS))
        module = nn.parallel.DistributedDataParallel(engine.LossModule(model.train(), loss_fn))
        for number in itertools.count(process.rank, RANKS):
            loss = mean_loss(module, batches[number])
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), plain.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            pause(loss)

    def forward_backward(pause) -> None:
        module = engine.LossModule(build(resolve_ds(zero2, plain, RANKS))[0].train(), loss_fn)
        for number in itertools.count(process.rank, RANKS):
            loss = mean_loss(module, batches[number])
            loss.backward()
            pause(loss)

    class OurLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, num_items_in_batch, **batch) -> dict:
            return {"loss": loss_fn(self.model, batch).loss_sum / num_items_in_batch}

    def for_own_loss(batch: dict) -> dict:
        inputs = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        return {k: batch[k] for k in inputs} | {"labels": batch["labels"].transpose(1, 2).flatten(0, 1)}

    # With DeepSpeed, accelerate would take each rank on a CPU for the only one.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)

    def hf(name: str, pause, own_loss: bool = False, trainer=Trainer, flags=TrainingArguments, **more) -> None:
        class Pause(TrainerCallback):
            def on_log(self, args, state, control, logs, **_):
                pause(logs["loss"])

        arguments = flags(
            str(args.scratch / name), deepspeed=zero2, per_device_train_batch_size=1, max_steps=plain.steps,
            learning_rate=plain.lr, lr_scheduler_type="constant", max_grad_norm=plain.max_grad_norm, logging_steps=1,
            save_strategy="no", report_to=["tensorboard"], disable_tqdm=True, train_sampling_strategy="sequential",
            remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        model, optimizer = build(resolve_ds(zero2, plain, RANKS))
        if own_loss:
            model = load_dia(plain.model, torch.float32)
            groups = optim.parameter_groups(model, plain.weight_decay, no_decay=("embed", "norm"))
            optimizer = optim.build_optimizer(groups, plain, resolve_ds(zero2, plain, RANKS))

        def collate(items: list) -> dict:
            return for_own_loss(items[0]) if own_loss else items[0]

        trainer(
            model=model if own_loss else OurLoss(model),
            args=arguments,
            callbacks=[Pause()],
            optimizers=(optimizer, None),
            **{"train_dataset": batches, "data_collator": collate} | more,
        ).train()

    def trl(pause) -> None:
        from datasets import Dataset
        from transformers import DiaTokenizer
        from trl import SFTConfig, SFTTrainer

        class OwnLoss(SFTTrainer):
            compute_loss = Trainer.compute_loss

        flags = functools.partial(
            SFTConfig, bf16=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}
        )
        hf(
            "trl",
            pause,
            own_loss=True,
            trainer=OwnLoss,
            flags=flags,
            processing_class=DiaTokenizer(),
            train_dataset=Dataset.from_dict({"number": range(len(batches))}),  # it takes no other kind of dataset
            data_collator=lambda items: for_own_loss(batches[items[0]["number"]]),
        )

    works = {
        "zero2": functools.partial(ours, "zero2"),
        "raw": raw,
        "ddp": ddp,
        "hf": functools.partial(hf, "hf"),
        "hf_own_loss": functools.partial(hf, "hf_own_loss", own_loss=True),
        "trl": trl,
        "zero3": functools.partial(ours, "zero3", ds=str(ROOT / "ds_configs" / "zero3.json")),
        "no_tracker": functools.partial(ours, "no_tracker", tracker=[]),
        "accumulation": functools.partial(ours, "accumulation", accumulation=ACCUMULATION),
        "forward_backward": forward_backward,
    }
    works["thrown away"] = functools.partial(ours, "thrown away")
    sides = {name: Side(works[name]) for name in ("thrown away", *args.side)}
    # DeepSpeed replaces F.linear for the whole process when it builds the first ZeRO-3 model.
    own_linear = torch.nn.functional.linear

    # ---- equal losses, then the times

    for side in sides.values():
        for _ in range(warmup):
            side.step()
    losses = {name: all_sum(side.losses, process) / RANKS for name, side in sides.items()}
    reference = next(iter(losses.values()))
    for name, found in losses.items():
        if name not in ("accumulation", "forward_backward"):  # these take other steps, or none
            assert np.allclose(found, reference, atol=1e-4), (name, found, reference)
    cpu, wall = {name: [] for name in sides}, {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            torch.nn.functional.linear = zero3_linear_wrap if name == "zero3" else own_linear
            for _ in range(turn):
                all_sum([0.0], process)  # both ranks begin together
                began_cpu, began = time.process_time(), time.perf_counter()
                side.step()
                cpu[name].append(time.process_time() - began_cpu)
                wall[name].append(time.perf_counter() - began)
    lowest = {name: all_sum([np.percentile(times, 10)], process)[0] / RANKS for name, times in cpu.items()}
    if process.is_main:
        result = {"weights": weights, "waited": 0.0}
        result["sides"] = {n: {"cpu": 1e3 * lowest[n], "wall": 1e3 * float(np.median(wall[n]))} for n in args.side}
        if "zero2" in sides:
            records = support.step_records(args.scratch / "zero2")[warmup:]
            result["waited"] = float(np.median([r["data_wait_s"] / r["step_s"] for r in records]))
        (args.scratch / "result.json").write_text(json.dumps(result))
    all_sum([0.0], process)
    os._exit(0)


if __name__ == "__main__":
    main()
