"""Memory and time of the codebook loss against full logits (performance.md P10), interleaved in one process.

    python tests/bench/bench_loss.py

Dia's real head: 9 codebooks x 1028 ids over 2048 wide states, 4 clips of 860 frames. Peak memory is read from the
kernel's high-water mark of a fresh process a side, so that neither hides in what the other has freed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "finetune"))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.probe:
        run = sides(args.probe[1] == "trained")
        print(peak_mb(lambda: run(args.probe[0])))
        return
    print(f"{'head':8} {'side':6} {'peak MB':>8} {'CPU s (best)':>13}")
    for head in ("frozen", "trained"):
        run = sides(head == "trained")
        for expected, found in zip(run("full"), run("ours"), strict=True):
            assert abs(expected - found) <= 1e-4 * abs(expected), (expected, found)
        cpu, peak = {"full": [], "ours": []}, {}
        for side in cpu:
            probe = [sys.executable, __file__, "--probe", side, head]
            peak[side] = float(subprocess.check_output(probe, text=True))
        for _ in range(args.rounds):
            for side, times in cpu.items():
                began = time.process_time()
                run(side)
                times.append(time.process_time() - began)
        for side, times in cpu.items():
            print(f"{head:8} {side:6} {peak[side]:8.0f} {min(times):13.3f}")
        memory, duration = peak["full"] / peak["ours"], min(cpu["ours"]) / min(cpu["full"])
        print(f"{head:8} memory full / ours {memory:.2f}   time ours / full {duration:.3f}")


if __name__ == "__main__":
    main()
