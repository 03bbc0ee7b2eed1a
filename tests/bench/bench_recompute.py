"""Memory and time of --gradient-checkpointing, forward and backward pass, against keeping all activations (P11).

    python tests/bench/bench_recompute.py [--rounds 5]

A Dia of 6 + 6 layers and an eighth of the real width, random weights, fp32, four clips of 7 s: activations then take
most of the memory. Memory: how far a fresh process rises above the loaded model, gradients included.
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from bench_loss import cpu_p10, peak_mb, probe  # noqa: E402

from helpers.bench_rows import Row, report  # noqa: E402

os.environ.setdefault("DS_ACCELERATOR", "cpu")
FRAMES = 600


def sides(folder: Path, recipe: str):
    """A function that computes loss and gradient norm with all activations kept ("kept") or not ("ours")."""
    import torch

    import dia_full
    import dia_lora
    from common.lora import base_model
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    script = {"full": dia_full, "lora": dia_lora}[recipe]
    without_dropout = {"lora_dropout": 0.0} if recipe == "lora" else {}
    config = script.Config(model=str(folder / "dia"), precision="fp32", gradient_checkpointing=True, **without_dropout)
    model = script.build_model(config, {"zero_optimization": {"stage": 2}}, {}).train()
    clips = Clips(TokenDataset(str(folder / "tokens")), layout_of(base_model(model).config), config, {}, train=True)
    batch = clips.batch(range(len(clips)))

    def run(side: str) -> list[float]:
        model.zero_grad()
        if side == "ours":
            base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
        else:
            base_model(model).gradient_checkpointing_disable()
        loss = script.compute_loss(model, batch, clips).loss_sum
        loss.backward()
        return [
            float(loss),
            float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])),
        ]

    return run


def build(folder: Path) -> None:
    import torch
    from bench_dia_size import build_model

    from helpers.support import write_tokens

    build_model(folder / "dia", 6, 6, 1 / 8)
    torch.set_default_dtype(torch.float32)  # which it changes
    draw = np.random.default_rng(0)
    clips = [{"id": name, "text": "[S1] bada gumi", "codes": draw.integers(0, 1024, (FRAMES, 9))} for name in "abcd"]
    write_tokens(folder / "tokens", clips)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.probe:
        side, recipe, folder = args.probe
        print(peak_mb(functools.partial(sides(Path(folder), recipe), side)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for recipe in ("full", "lora"):
            report_recipe(Path(folder), recipe, args.rounds)


def report_recipe(folder: Path, recipe: str, rounds: int) -> None:
    run = sides(folder, recipe)
    for expected, found in zip(run("kept"), run("ours"), strict=True):
        assert abs(expected - found) <= 1e-5 * abs(expected), (expected, found)
    mb = {side: probe(__file__, side, recipe, str(folder)) for side in ("kept", "ours")}
    cpu = cpu_p10({side: functools.partial(run, side) for side in mb}, rounds)
    memory, times = mb["ours"] / mb["kept"], cpu["ours"] / cpu["kept"]
    what = f"gradient checkpointing, Dia {recipe}"
    report(Row("P11", f"{what}, peak", f"{mb['ours']:.0f} MB", memory, "<= 0.6", f"{mb['kept']:.0f} MB (without)"))
    seconds = f"{cpu['ours']:.2f} s", f"{cpu['kept']:.2f} s (without)"
    report(Row("P11", f"{what}, CPU time", seconds[0], times, "<= 1.35", seconds[1]))


if __name__ == "__main__":
    main()
