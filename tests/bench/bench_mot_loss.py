"""Memory and time of the vocabulary losses against full logits, 992 labels, 130304 classes, interleaved in one run.

    OMP_NUM_THREADS=1 python tests/bench/bench_mot_loss.py

full logits: torch's cross-entropy over both tables concatenated. all: --loss-vocab all. audio: --loss-vocab audio.
Peak memory is the rise of the kernel's high-water mark, in a fresh process per side.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "tests" / "bench")]

V, WIDTH, FRAMES = 128256, 128, 248


def sides():
    import numpy as np
    import torch
    from torch.nn import functional as F

    from common.loss import IGNORE
    from models.mot.layout import Layout, music
    from models.mot.network import AudioHead

    torch.manual_seed(0)
    layout = Layout(V, ids="shared")
    text = torch.nn.Parameter(torch.randn(V, WIDTH) * 0.02, requires_grad=False)
    heads = {"all": AudioHead(layout, WIDTH, text), "audio": AudioHead(layout, WIDTH)}
    for head in heads.values():
        torch.nn.init.normal_(head.weight, std=0.002, generator=torch.Generator().manual_seed(1))
    codes = np.random.default_rng(0).integers(0, 2048, (FRAMES, 4))
    labels = torch.from_numpy(music(codes, layout, final=False)[2])[:-1]
    hidden = torch.randn(len(labels), WIDTH, requires_grad=True)
    targets = [(column != IGNORE).nonzero().squeeze(1) for column in labels.T]
    flat = labels.max(1).values

    def run(side: str) -> list[float]:
        hidden.grad = None
        for head in heads.values():
            head.weight.grad = None
        if side == "full logits":
            weight = heads["all"].weight
            loss = F.cross_entropy(hidden @ torch.cat([text, weight]).T, flat, reduction="sum")
        else:
            weight = heads[side].weight
            loss, _ = heads[side](hidden, labels, targets, torch.ones(4))
        loss.backward()
        return [float(loss.detach()), float(hidden.grad.norm()), float(weight.grad.norm())]

    return run


def main() -> None:
    from bench_loss import peak_mb

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    run = sides()
    if args.probe:
        print(peak_mb(lambda: run(args.probe)))
        return
    for expected, found in zip(run("full logits"), run("all"), strict=True):
        assert abs(expected - found) <= 1e-4 * abs(expected), (expected, found)
    times = {"full logits": [], "all": [], "audio": []}
    peaks = {}
    for side in times:
        peaks[side] = float(subprocess.check_output([sys.executable, __file__, "--probe", side], text=True))
    for _ in range(args.rounds):
        for side, found in times.items():
            began = time.process_time()
            run(side)
            found.append(time.process_time() - began)
    print(f"{'side':12} {'peak MB':>8} {'CPU s':>7} {'less memory':>12} {'faster':>7}")
    for side, found in times.items():
        less, faster = peaks["full logits"] / peaks[side], min(times["full logits"]) / min(found)
        print(f"{side:12} {peaks[side]:8.0f} {min(found):7.3f} {less:11.1f}x {faster:6.1f}x")


if __name__ == "__main__":
    main()
