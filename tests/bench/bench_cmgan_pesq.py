"""What PESQ adds to a CMGAN training step: the recipe's own training, with real labels and with immediate labels.

    python tests/bench/bench_cmgan_pesq.py [--channels 8] [--seconds 1] [--batch 2] [--steps 7] [--trace out.json]
        [--share 0.02 0.5]

On a CPU a step takes much longer than its PESQ; on a GPU it does not. So every sound is scored again and again until
that takes --share of a step, in one process next to the one thread that trains. The last lines are a trace of one step:
when its scores were requested, when each of them was there, when the generator's step was done and the scores were
needed. --trace writes it for chrome://tracing.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "data"), str(ROOT / "tests")]
WARM_UP = 3  # steps with immediate labels; the first is slow, the others give the time of a step


class Immediate:
    """A label that costs nothing."""

    def result(self, timeout):
        return 2.0, ""

    def add_done_callback(self, callback):
        pass


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

    real_scorer = Scorer(1)
    import numpy as np
    from demo import ensure_demo

    import cmgan
    from common.ds_config import resolve_ds
    from common.runtime import init_process

    timings = []  # per step: start, clock, processor time, time spent waiting for labels
    events = {}  # per step: (name, start, end) of its scores

    class TimedMeter(cmgan.Meter):
        """The recipe creates a meter when a step begins and reduces it when the step ends."""

        def __init__(self):
            super().__init__()
            self.processor, self.start = time.process_time(), time.perf_counter()

        def reduce(self, process):
            times = [time.perf_counter() - self.start, time.process_time() - self.processor, waited[-1]]
            timings.append((self.start, *times))
            return super().reduce(process)

    waited = []

    class WatchedLabels(cmgan.Labels):
        def submit(self, slot, estimate, ids):
            waiting = super().submit(slot, estimate, ids)
            seen, asked = events.setdefault(len(timings), []), time.perf_counter()
            for name, future in zip(ids, waiting.scores, strict=True):
                future.add_done_callback(lambda _, n=name: seen.append((n, asked, time.perf_counter())))
            return waiting

        def collect(self, step, waiting):
            needed = time.perf_counter()
            labelled = super().collect(step, waiting)
            waited.append(time.perf_counter() - needed)
            events[step].append(("collect", needed, time.perf_counter()))
            return labelled

    class TurnScorer:
        """Immediate labels while warming up; then 0, or one of `repeats`, scorings per sound, taking turns by step, so
        that all of them see the same machine. The last score counts."""

        repeats = [0]

        def pesq(self, clean, estimates):
            step = len(timings)
            if step == WARM_UP:
                began = time.perf_counter()
                for score in real_scorer.pesq(clean, estimates):
                    score.result()
                self.once = time.perf_counter() - began
                alone = min(clock for _, clock, *_ in timings[1:])
                self.repeats = [0] + [max(1, round(share * alone / self.once)) for share in args.share]
            scores = [Immediate()] * len(clean)
            for _ in range(self.repeats[(step - WARM_UP - 1) % len(self.repeats)] if step > WARM_UP else 0):
                scores = real_scorer.pesq(clean, estimates)
            return scores

    cmgan.Meter, cmgan.Labels = TimedMeter, WatchedLabels
    scorer = TurnScorer()
    kinds = 1 + len(args.share)
    with tempfile.TemporaryDirectory() as folder:
        config = cmgan.Config(
            channels=args.channels,
            seconds=args.seconds,
            micro_batch=args.batch,
            data=str(ensure_demo(ROOT / "runs" / "demo-assets-pairs", "pairs") / "mild"),
            out=folder,
            lr=1e-4,
            steps=WARM_UP + 1 + kinds * args.steps,
            save_every=0,
            gradient_checkpointing=False,
            export=False,
        )
        process = init_process()
        cmgan.train(config, process, resolve_ds(config.ds, config, 1), scorer)
    # The trainer's own processor time shows what PESQ costs it on a machine whose other core is not free.
    print(f"{'per step':32} {'clock s':>8} {'x first':>8} {'cpu s':>8} {'x first':>8} {'waited s':>8}")
    first = None
    for kind, repeats in enumerate(scorer.repeats):
        name = f"PESQ x {repeats}, {repeats * scorer.once:.2f} s of work" if repeats else "immediate labels"
        clock, cpu, wait = np.median([times[1:] for times in timings[WARM_UP + 1 + kind :: kinds]], axis=0)
        first = first or (clock, cpu)
        print(f"{name:32} {clock:8.3f} {clock / first[0]:8.3f} {cpu:8.3f} {cpu / first[1]:8.3f} {wait:8.3f}")
    last = len(timings) - 1
    began = timings[last][0]
    for name, start, end in sorted(events[last], key=lambda event: event[1]):
        print(f"  {name:12} {1000 * (start - began):8.1f} ms to {1000 * (end - began):8.1f} ms after the step began")
    if args.trace:
        rows = [
            {"name": n, "ph": "X", "pid": 0, "tid": n == "collect", "ts": 1e6 * (s - began), "dur": 1e6 * (e - s)}
            for n, s, e in events[last]
        ]
        args.trace.write_text(json.dumps({"traceEvents": rows}))
    os._exit(0)


if __name__ == "__main__":
    main()
