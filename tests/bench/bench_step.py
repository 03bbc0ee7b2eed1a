"""One optimizer step of dia_full on 2 ranks with ZeRO-2, against others that could take it (S1, S2).

    python tests/bench/bench_step.py                  a model of 3 M weights
    python tests/bench/bench_step.py --size large     a model of 121 M weights
    python tests/bench/bench_step.py --side ours --side deepspeed --rounds 30

    deepspeed    DeepSpeed's own loop with ds_configs/zero2.json as it is
    ddp          plain DistributedDataParallel: no sharding
    trainer      the HF Trainer with the same JSON and our loss
    own_loss     the HF Trainer with the same JSON and the model's own loss

`dia_full.train` runs as it is, in a thread that waits after every logged step, and so does `Trainer.train`. All sides
are in the same two processes, load the same weights and take the same batches. Their losses are compared step by step
before anything is timed; then sides take turns. Compared is the tenth percentile of processor time per step, mean of
both ranks; the median by the clock stands beside it. Whichever side comes first in a process is slower than elsewhere
by up to a tenth, so the first one is thrown away.
"""

import argparse
import functools
import itertools
import json
import os
import re
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
from run import Row, report  # noqa: E402

from helpers import support  # noqa: E402

# Encoder and decoder layers and width of the model; frames per clip, clips per micro-batch; warm-up, steps per turn.
SIZES = {"small": ((2, 2, 1 / 16), 60, 4, 15, 6), "large": ((2, 5, 1 / 2), 20, 2, 2, 1)}
TEXT = "[S1] The river is quiet in winter."
RANKS, CHANNELS, TAIL = 2, 9, 16
SIDES = ("ours", "deepspeed", "ddp", "trainer", "own_loss")
ZERO2 = ROOT / "ds_configs" / "zero2.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--side", action="append", choices=SIDES, help="only these")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side; default: %(default)s")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.side = args.side or SIDES
    if args.scratch:
        try:
            run_rank(args)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # sides wait in threads, which would keep the process alive
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        result = measure(args, Path(folder))
    print(f"{'side':10} {'CPU ms (p10)':>13} {'wall ms (p50)':>14}")
    for side, times in result["sides"].items():
        print(f"{side:10} {times['cpu']:13.1f} {times['wall']:14.1f}")
    report_rows(result, args.size)


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


def build_model(folder: Path, encoder_layers: int, decoder_layers: int, width: float) -> None:
    """A Dia with random weights; Dia's own class defaults are the real model's sizes."""
    import torch
    from transformers import DiaConfig, DiaForConditionalGeneration
    from transformers.models.dia.configuration_dia import DiaDecoderConfig, DiaEncoderConfig

    encoder = DiaEncoderConfig(num_hidden_layers=encoder_layers)
    decoder = DiaDecoderConfig(num_hidden_layers=decoder_layers)
    for config in (encoder, decoder):
        for name, value in config.to_dict().items():
            if re.search(r"hidden_size|intermediate_size|num_(attention|key_value)_heads", name):
                setattr(config, name, max(1, int(value * width)))
    torch.manual_seed(0)
    DiaForConditionalGeneration(DiaConfig(encoder_config=encoder, decoder_config=decoder)).save_pretrained(folder)


def report_rows(result: dict, size: str) -> None:
    sides, large = result["sides"], size == "large"
    weights = f"{result['weights'] / 1e6:.0f} M weights, 2 ranks"

    def row(number: str, what: str, over: str, under: str, target: str) -> None:
        if over in sides and under in sides:
            ratio, wall = (sides[over][kind] / sides[under][kind] for kind in ("cpu", "wall"))
            peer = under if over == "ours" else over
            ours, other = f"{sides['ours']['cpu']:.1f} ms", f"{sides[peer]['cpu']:.1f} ms"
            report(Row(number, f"{what}, {weights} (by the clock {wall:.2f})", ours, ratio, target, other))

    row("S1", "step / DeepSpeed's own loop", "ours", "deepspeed", "<= 1.0")
    row("S1", "step / plain DDP", "ours", "ddp", "" if large else "<= 1.15")
    row("S2", "HF Trainer, same JSON and loss / step", "trainer", "ours", ">= 1.35" if large else ">= 1.08")
    row("S2", "HF Trainer, the model's own loss / step", "own_loss", "ours", ">= 1.1")


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
    from torch import nn
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import dia_full
    from common import engine, optim, runs
    from common.ds_config import resolve_ds
    from common.loss import IGNORE
    from common.plan import Plan
    from common.runtime import all_sum, init_process
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of
    from models.dia.weights import load_dia

    process = init_process()
    _, frames, batch, warmup, turn = SIZES[args.size]
    # A small, constant learning rate: all sides then walk through the same weights and can be compared step by step.
    config = functools.partial(
        dia_full.Config, ds=str(ZERO2), model=str(args.scratch / "model"), data=str(args.scratch / "tokens"),
        precision="fp32", lr=1e-5, warmup=0, steps=10**6, micro_tokens=batch * (frames + TAIL),
        eval_every=0, save_every=0, samples=0, resume="never",
    )  # fmt: skip
    plain = config()
    resolved = resolve_ds(plain.ds, plain, RANKS)
    model = load_dia(plain.model, torch.float32)
    weights, layout = sum(p.numel() for p in model.parameters()), layout_of(model.config)
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

    def build():
        model = dia_full.build_model(plain, resolved, {})
        return model, optimizer_of(model)

    def optimizer_of(model):
        groups = optim.parameter_groups(model, plain.weight_decay, no_decay=("embed", "norm"))
        return optim.build_optimizer(groups, plain, resolved)

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

    def ours(pause, name: str = "ours") -> None:
        flags = config(out=str(args.scratch / name))
        pauses[Path(flags.out)] = pause
        dia_full.train(flags, process, resolve_ds(flags.ds, flags, RANKS))

    def deepspeed_loop(pause) -> None:
        shipped = json.loads(ZERO2.read_text())
        batch_sizes = {"train_batch_size": RANKS, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        shipped |= batch_sizes | {"gradient_clipping": plain.max_grad_norm, "bf16": {"enabled": False}}
        shipped |= {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        model, optimizer = build()
        module = engine.LossModule(model.train(), loss_fn)
        ds_engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=shipped)
        for number in itertools.count(process.rank, RANKS):
            loss = mean_loss(ds_engine, batches[number])
            ds_engine.backward(loss)
            ds_engine.step()
            pause(loss)

    def ddp(pause) -> None:
        model, optimizer = build()
        module = nn.parallel.DistributedDataParallel(engine.LossModule(model.train(), loss_fn))
        for number in itertools.count(process.rank, RANKS):
            loss = mean_loss(module, batches[number])
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), plain.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            pause(loss)

    class OurLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, num_items_in_batch, **batch) -> dict:
            return {"loss": loss_fn(self.model, batch).loss_sum / num_items_in_batch}

    def for_own_loss(batch: dict) -> dict:
        labels = batch["labels"]
        masks = {
            "attention_mask": batch["attention_mask"],
            "decoder_attention_mask": torch.ones(batch["decoder_input_ids"].shape[:2], dtype=torch.long),
        }
        inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
        return inputs | masks | {"labels": labels.transpose(1, 2).flatten(0, 1)}

    # With DeepSpeed, accelerate would take each rank on a CPU for the only one.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)

    def trainer(pause, own_loss: bool = False) -> None:
        class Pause(TrainerCallback):
            def on_log(self, args, state, control, logs, **_):
                pause(logs["loss"])

        flags = TrainingArguments(
            str(args.scratch / f"trainer-{own_loss}"), deepspeed=str(ZERO2), per_device_train_batch_size=1,
            max_steps=plain.steps, learning_rate=plain.lr, lr_scheduler_type="constant", logging_steps=1,
            max_grad_norm=plain.max_grad_norm, save_strategy="no", report_to=["tensorboard"], disable_tqdm=True,
            train_sampling_strategy="sequential", remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        if own_loss:
            model = load_dia(plain.model, torch.float32)
            optimizer = optimizer_of(model)
        else:
            model, optimizer = build()
            model = OurLoss(model)

        def collate(items: list) -> dict:
            return for_own_loss(items[0]) if own_loss else items[0]

        Trainer(
            model=model,
            args=flags,
            callbacks=[Pause()],
            optimizers=(optimizer, None),
            train_dataset=batches,
            data_collator=collate,
        ).train()

    works = {
        "thrown away": functools.partial(ours, name="thrown away"),
        "ours": ours,
        "deepspeed": deepspeed_loop,
        "ddp": ddp,
        "trainer": trainer,
        "own_loss": functools.partial(trainer, own_loss=True),
    }
    sides = {name: Side(works[name]) for name in ("thrown away", *args.side)}

    # ---- equal losses, then the times

    for side in sides.values():
        for _ in range(warmup):
            side.step()
    losses = {name: all_sum(side.losses, process) / RANKS for name, side in sides.items()}
    reference = losses["thrown away"]
    for name, found in losses.items():
        assert np.allclose(found, reference, atol=1e-4), (name, found, reference)
    cpu, wall = {name: [] for name in sides}, {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            for _ in range(turn):
                all_sum([0.0], process)  # both ranks begin together
                began_cpu, began = time.process_time(), time.perf_counter()
                side.step()
                cpu[name].append(time.process_time() - began_cpu)
                wall[name].append(time.perf_counter() - began)
    lowest = {name: all_sum([np.percentile(times, 10)], process)[0] / RANKS for name, times in cpu.items()}
    if process.is_main:
        result = {"weights": weights}
        result["sides"] = {n: {"cpu": 1e3 * lowest[n], "wall": 1e3 * float(np.median(wall[n]))} for n in args.side}
        (args.scratch / "result.json").write_text(json.dumps(result))
    all_sum([0.0], process)
    os._exit(0)


if __name__ == "__main__":
    main()
