"""How long a checkpoint keeps the training waiting: written at once, and from a copy in the background.

    python tests/bench/bench_checkpoint.py [--millions 60] [--rounds 5]

One rank, ZeRO-2, fp32 masters and moments of a plain network. Both ways take turns in one process. Stall: the time
until the training may go on. Until listed: the time until the checkpoint could be loaded.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune")]
from helpers import support  # noqa: E402

os.environ |= support.CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=60, help="trained parameters; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import torch

    from common import checkpoint, engine, optim
    from common.config import RunConfig
    from common.contracts import LossOutput
    from common.ds_config import resolve_ds
    from common.runtime import init_process

    ranks = init_process()
    width = 1000
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(args.millions)))
    config = RunConfig(precision="fp32", lr=1e-4)
    ds = resolve_ds(str(ROOT / "ds_configs/zero2.json"), config, 1)
    optimizer = optim.build_optimizer(optim.parameter_groups(model, 0.0, ()), config, ds)
    ds_engine = engine.start_engine(model, lambda net, x: LossOutput(net(x).square().sum(), {}), optimizer, ds)
    ema = engine.Ema(ds_engine, 0.0)
    scratch = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))

    def step() -> float:
        began = time.perf_counter()
        engine.backward(ds_engine, ds_engine(torch.randn(256, width)).loss_sum, 1.0, 1)
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
    for name, row in rows.items():
        stall, listed, beside = (sorted(column)[len(column) // 2] for column in zip(*row, strict=True))
        print(f"{name:18} {stall:8.3f} {listed:15.3f} {beside:19.3f}")


if __name__ == "__main__":
    main()
