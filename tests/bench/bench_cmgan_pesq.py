"""What PESQ adds to a CMGAN training step: the recipe's own step, with real labels and with labels at once.

    python tests/bench/bench_cmgan_pesq.py [--channels 8] [--seconds 1] [--batch 2] [--steps 7] [--trace out.json]
        [--share 0.02 0.5]

On a CPU a step is much longer than its PESQ; on a GPU it is not. So every sound is scored again and again until that
takes --share of a step, in one process beside the one thread that trains. The last lines are a trace of one step: when
its scores were asked for, when each was there, when the generator's step was done and the scores were wanted. --trace
writes it for chrome://tracing.
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
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    from common.scorer import Scorer

    scorer = Scorer(1)
    import numpy as np
    import torch
    from demo import ensure_demo

    import cmgan
    from common.ds_config import resolve_ds
    from common.runtime import init_process
    from models.cmgan.labels import Labels

    pairs = ensure_demo(ROOT / "runs" / "demo-assets-pairs", "pairs") / "mild"
    config = cmgan.Config(
        channels=args.channels,
        seconds=args.seconds,
        micro_batch=args.batch,
        data=str(pairs),
        lr=1e-4,
        steps=99,
        gradient_checkpointing=False,
    )
    ranks = init_process()
    ds = resolve_ds("ds_configs/zero2.json", config, 1)
    engines = cmgan.start_engines(*cmgan.build_model(config, ds), config, ds)
    crops, _, _ = cmgan.build_data(config, ranks)
    weights = torch.tensor(config.weights_at(1.0))

    class AtOnce:
        """Labels that cost nothing."""

        def pesq(self, clean, made):
            return [self] * len(clean)

        def result(self, timeout):
            return 2.0, ""

    class Again:
        """The scorer with more work: every sound `times` over, the last score counts."""

        def __init__(self, times: int):
            self.times = times

        def pesq(self, clean, made):
            for _ in range(self.times):
                scores = scorer.pesq(clean, made)
            return scores

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

    def step(number: int, labels) -> tuple[float, float, float, float]:
        batch = crops.batch(range(args.batch), epoch=number)
        began, used = time.perf_counter(), time.process_time()
        *_, values, _ = cmgan.train_step(
            engines, iter([batch]), labels, args.batch, weights, number, lambda _: 1e-4, config, ranks
        )
        return began, time.perf_counter() - began, time.process_time() - used, values["pesq_wait_s"]

    free = Labels(AtOnce(), False, 0, 0)
    step(0, free)  # warms up
    alone = min(step(0, free)[1] for _ in range(2))
    batch = crops.batch(range(args.batch))
    began = time.perf_counter()
    for score in scorer.pesq(batch["clean"].numpy(), batch["noisy"].numpy()):
        score.result()
    once = time.perf_counter() - began
    repeats = [max(1, round(share * alone / once)) for share in args.share]
    kinds = {"labels at once": free}
    kinds |= {f"PESQ x {n}, {n * once:.2f} s of work": Watched(Again(n), False, 0, 0) for n in repeats}
    found = {name: [] for name in kinds}
    for number in range(args.steps):  # taking turns, so that all see the same machine
        for name, labels in kinds.items():
            events.clear()
            began, *values = step(number, labels)
            found[name].append(values)
    # The trainer's own processor time shows what PESQ costs it on a machine whose other core is not free.
    print(f"{'a step':32} {'clock s':>8} {'x first':>8} {'cpu s':>8} {'x first':>8} {'waited s':>8}")
    first = None
    for name, values in found.items():
        clock, cpu, waited = np.median(values, axis=0)
        first = first or (clock, cpu)
        print(f"{name:32} {clock:8.3f} {clock / first[0]:8.3f} {cpu:8.3f} {cpu / first[1]:8.3f} {waited:8.3f}")
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
