"""What PESQ adds to a CMGAN training step: the recipe's own step, with real labels and with labels at once.

    python tests/bench/bench_cmgan_pesq.py [--channels 16] [--seconds 1] [--batch 4] [--steps 6] [--trace out.json]

The last lines are a trace of one step: when its scores were asked for, when each was there, when the generator's step
was done and the scores were wanted. --trace writes it for chrome://tracing.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "data"), str(ROOT / "tests")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    from common.scorer import Scorer

    scorer = Scorer(1)
    import torch
    from demo import ensure_demo

    import cmgan
    from common.ds_config import resolve_ds
    from common.runtime import start_ranks
    from models.cmgan_labels import Labels

    pairs = ensure_demo(ROOT / "runs" / "demo-assets-cmgan", "cmgan") / "pairs"
    config = cmgan.Config(
        channels=args.channels, seconds=args.seconds, micro_batch=args.batch, data=str(pairs), lr=1e-4, steps=99
    )
    ranks = start_ranks()
    ds = resolve_ds("ds_configs/zero2.json", config, 1)
    engines = cmgan.start_engines(*cmgan.build_model(config, ds), config, ds)
    crops, _, _ = cmgan.build_data(config, ranks)
    weights = torch.tensor(config.weights)

    class AtOnce:
        """Labels that cost nothing."""

        def pesq(self, clean, made):
            return [self] * len(clean)

        def result(self, timeout):
            return 2.0, ""

    events = []

    class Watched(Labels):
        def submit(self, slot, estimate, ids):
            waiting = super().submit(slot, estimate, ids)
            asked = time.perf_counter()
            for name, future in zip(ids, waiting.scores, strict=True):
                future.add_done_callback(lambda f, n=name: events.append((n, asked, time.perf_counter())))
            return waiting

        def collect(self, step, waiting):
            wanted = time.perf_counter()
            found = super().collect(step, waiting)
            events.append(("collect", wanted, time.perf_counter()))
            return found

    kinds = {"labels at once": Labels(AtOnce(), False, 0, 0), "PESQ": Watched(scorer, False, 0, 0)}
    times = {name: [] for name in kinds}
    waits = []
    for step in range(args.steps + 1):  # taking turns, so that both see the same machine; the first warms up
        for name, labels in kinds.items():
            batch = crops.batch(range(args.batch), epoch=step)
            events.clear() if name == "PESQ" else None
            began = time.perf_counter()
            _, _, values, _ = cmgan.train_step(
                engines, iter([batch]), labels, args.batch, weights, step, lambda _: 1e-4, config, ranks
            )
            if step:
                times[name].append(time.perf_counter() - began)
                waits.append(values["pesq_wait_s"]) if name == "PESQ" else None
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    for name, value in middle.items():
        print(f"{name:16} {value:7.3f} s a step, {value / middle['labels at once']:.3f} x")
    print(f"waited for scores {1000 * sum(waits) / len(waits):.1f} ms a step")
    for name, start, end in sorted(events, key=lambda event: event[1]):
        print(f"  {name:12} {1000 * (start - began):8.1f} ms to {1000 * (end - began):8.1f} ms after the step began")
    if args.trace:
        rows = [
            {"name": n, "ph": "X", "pid": 0, "tid": n == "collect", "ts": 1e6 * (s - began), "dur": 1e6 * (e - s)}
            for n, s, e in events
        ]
        args.trace.write_text(json.dumps({"traceEvents": rows}))
    os._exit(0)


if __name__ == "__main__":
    main()
