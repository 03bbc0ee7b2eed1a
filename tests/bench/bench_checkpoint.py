"""How long a checkpoint keeps the training waiting: written at once, and from a copy in the background; and what
checkpoints cost a run of the Dia LoRA demo at the default --save-every (S8).

    python tests/bench/bench_checkpoint.py [--millions 20] [--rounds 5]

The wait: one rank, ZeRO-2, fp32 masters and moments of a plain network. Both ways take turns in one process. Stall:
until the training may go on. Until listed: until the checkpoint could be loaded. The share: two ranks; the cost of a
checkpoint is the stall that the run logs, and what the next steps take longer than others while it is written.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune")]
from run import Row, report  # noqa: E402

from common.config import RunConfig  # noqa: E402
from helpers import support  # noqa: E402

os.environ |= support.CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=20, help="trained parameters; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import torch

    from common import checkpoint, engine, optim
    from common.contracts import LossOutput
    from common.ds_config import resolve_ds
    from common.ema import Ema
    from common.runtime import init_process

    ranks = init_process()
    width = 1000
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(args.millions)))
    config = RunConfig(precision="fp32", lr=1e-4)
    ds = resolve_ds(str(ROOT / "ds_configs/zero2.json"), config, 1)
    optimizer = optim.build_optimizer(optim.parameter_groups(model, 0.0, ()), config, ds)
    ds_engine = engine.start_engine(model, lambda net, x: LossOutput(net(x).square().sum(), {}), optimizer, ds)
    ema = Ema(ds_engine, 0.0)
    scratch = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))

    def step() -> float:
        began = time.perf_counter()
        engine.backward(ds_engine, ds_engine(torch.randn(256, width)).loss_sum, 1.0, 1, last=True)
        engine.take_step(ds_engine)
        return time.perf_counter() - began

    quiet = min(step() for _ in range(3))
    rows = {"at once": [], "in the background": []}
    for number in range(args.rounds):
        for place, row in enumerate(rows.values()):
            state = {"step": 2 * number + place, "identity": {}}
            began = time.perf_counter()
            pending = checkpoint.save(scratch, ds_engine, state, ema, ranks, 2, None, background=bool(place))
            stall = time.perf_counter() - began
            beside = step()
            while pending.thread.is_alive():
                beside = step()
            listed = time.perf_counter() - began
            pending.wait()
            row.append((stall, listed if place else stall, beside))
    size = sum(path.stat().st_size for path in pending.path.rglob("*") if path.is_file())
    shutil.rmtree(scratch)
    print(f"checkpoint of {size / 1e6:.0f} MB; an undisturbed step takes {quiet:.3f} s\n")
    print(f"{'written':18} {'stall s':>8} {'until listed s':>15} {'a step meanwhile s':>19}")
    stalls = {}
    for name, row in rows.items():
        stalls[name], listed, beside = (statistics.median(column) for column in zip(*row, strict=True))
        print(f"{name:18} {stalls[name]:8.3f} {listed:15.3f} {beside:19.3f}")
    plain, ours = stalls.values()
    what = f"training waits for a checkpoint of {size / 1e6:.0f} MB"
    report(Row("S8", what, f"{ours:.3f} s", plain / ours, ">= 5", f"{plain:.3f} s (written at once)"))
    report_cost()


def report_cost(every: int = 12, saves: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["--steps", every * saves + every // 2, "--save-every", every, "--eval-every", 0, "--samples", 0]
        words += ["--out", run]
        codes, outputs = support.finish(support.start_ranks(ROOT / "finetune" / "dia_lora.py", words))
        assert codes == [0, 0], outputs[0][-2000:]
        seconds = {record["step"]: record["step_s"] for record in support.step_records(run)}
        stalls = [event["stall_s"] for event in support.metrics(run) if event.get("event") == "checkpoint"]
    step = statistics.median(seconds.values())
    after = [sum(seconds[save + n] - step for n in range(1, 4)) for save in range(every, every * saves + 1, every)]
    cost = statistics.median(stalls) + max(0.0, statistics.median(after))
    every = RunConfig().save_every
    ours, run = f"{1e3 * cost:.0f} ms per checkpoint", f"{every} steps of {1e3 * step:.0f} ms"
    report(
        Row(
            "S8",
            "checkpoints at the default --save-every, share of the time",
            ours,
            cost / (every * step),
            "<= 0.01",
            run,
        )
    )


if __name__ == "__main__":
    main()
