"""Memory and time of the codebook loss against full logits (S6), interleaved in one process.

    python tests/bench/bench_loss.py

Dia's real head: 9 codebooks x 1028 ids over 2048 wide states, 4 clips of 860 frames. Peak memory is the
kernel's high-water mark of a fresh process per side.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune")]
from run import Row, report  # noqa: E402

N, C, V, D = 4 * 860, 9, 1028, 2048


def sides(trained_head: bool):
    import torch
    from torch.nn import functional as F

    from common.loss import codebook_loss, loss_head

    torch.manual_seed(0)
    plain = torch.nn.Linear(D, C * V, bias=False).requires_grad_(trained_head)
    fused = loss_head(plain)
    hidden = torch.randn(N, D, requires_grad=True)
    labels = torch.randint(0, V, (N, C))
    weights = torch.ones(N, C)

    def run(side: str) -> list[float]:
        hidden.grad = plain.weight.grad = None
        if side == "full":
            loss = F.cross_entropy(plain(hidden).float().view(N * C, V), labels.flatten(), reduction="sum")
        else:
            loss, _ = codebook_loss(fused, hidden, labels, weights)
        loss.backward()
        norms = [float(p.grad.norm()) for p in (hidden, plain.weight) if p.grad is not None]
        return [float(loss.detach()), *norms]

    return run


def peak_mb(work) -> float:
    """How far resident memory rises above its present level while `work` runs (Linux keeps the high-water mark)."""

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def cpu_p10(sides: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Best-decile processor time of each side in seconds; they take turns."""
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            began = time.process_time()
            work()
            times[name].append(time.process_time() - began)
    return {name: statistics.quantiles(spent, n=10, method="inclusive")[0] for name, spent in times.items()}


def probe(file: str, *words: str) -> float:
    """Peak MB that `file --probe WORDS` prints in a fresh process: neither side hides in what the other has freed."""
    return float(subprocess.check_output([sys.executable, file, "--probe", *words], text=True).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.probe:
        run = sides(args.probe[1] == "trained")
        print(peak_mb(lambda: run(args.probe[0])))
        return
    for head in ("frozen", "trained"):
        run = sides(head == "trained")
        for expected, found in zip(run("full"), run("ours"), strict=True):
            assert abs(expected - found) <= 1e-4 * abs(expected), (expected, found)
        mb = {side: probe(__file__, side, head) for side in ("full", "ours")}
        cpu = cpu_p10({side: functools.partial(run, side) for side in mb}, args.rounds)
        memory, times = mb["full"] / mb["ours"], cpu["ours"] / cpu["full"]
        what = f"loss with a {head} head"
        report(Row("S6", f"{what}, peak", f"{mb['ours']:.0f} MB", memory, ">= 2.5", f"{mb['full']:.0f} MB (logits)"))
        seconds = f"{cpu['ours']:.2f} s", f"{cpu['full']:.2f} s (logits)"
        report(Row("S6", f"{what}, CPU time", seconds[0], times, "<= 1.05", seconds[1]))


if __name__ == "__main__":
    main()
