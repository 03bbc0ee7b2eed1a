"""Memory and time of --gradient-checkpointing, forward and backward pass, against keeping all activations (P11).

    python tests/bench/bench_recompute.py [--rounds 5]

A Dia of 6 + 6 layers and an eighth of the real width, random weights, fp32, four clips of 7 s: activations then take
most of the memory. Resident memory: how far a fresh process rises above the loaded model, gradients included. It also
holds what glibc's allocator does not give back, which is most of it with LoRA: MALLOC_MMAP_THRESHOLD_=1048576 makes it
give everything back, at twice the time. A GPU's memory follows the tensors: their peak, without gradients, is counted
too.
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
    """Two functions of a side, which keeps all activations ("kept") or not ("ours"): one computes loss and gradient
    norm, the other counts tensors, in MB, and leaves no gradients from then on."""
    import torch

    import dia_full
    import dia_lora
    from common.lora import base_model
    from common.memory import peak_bytes
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    script = {"full": dia_full, "lora": dia_lora}[recipe]
    without_dropout = {"lora_dropout": 0.0} if recipe == "lora" else {}
    config = script.Config(model=str(folder / "dia"), precision="fp32", gradient_checkpointing=True, **without_dropout)
    model = script.build_model(config, {"zero_optimization": {"stage": 2}}, {}).train()
    clips = Clips(TokenDataset(str(folder / "tokens")), layout_of(base_model(model).config), config, {}, train=True)
    batch = clips.batch(range(len(clips)))

    def switch(side: str) -> None:
        if side == "ours":
            base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
        else:
            base_model(model).gradient_checkpointing_disable()

    def count(side: str) -> float:
        switch(side)
        return peak_bytes(model, functools.partial(script.compute_loss, clips=clips), batch) / 2**20

    def run(side: str) -> list[float]:
        model.zero_grad()
        switch(side)
        loss = script.compute_loss(model, batch, clips).loss_sum
        loss.backward()
        return [
            float(loss),
            float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])),
        ]

    return run, count


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
        print(peak_mb(functools.partial(sides(Path(folder), recipe)[0], side)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for recipe in ("full", "lora"):
            report_recipe(Path(folder), recipe, args.rounds)


def report_recipe(folder: Path, recipe: str, rounds: int) -> None:
    run, count = sides(folder, recipe)
    for expected, found in zip(run("kept"), run("ours"), strict=True):
        assert abs(expected - found) <= 1e-5 * abs(expected), (expected, found)
    mb = {side: probe(__file__, side, recipe, str(folder)) for side in ("kept", "ours")}
    cpu = cpu_p10({side: functools.partial(run, side) for side in mb}, rounds)
    times = cpu["ours"] / cpu["kept"]
    what = f"gradient checkpointing, Dia {recipe}"
    tensors = {side: count(side) for side in mb}
    for kind, used in (("resident memory", mb), ("tensors", tensors)):
        shown = f"{used['ours']:.0f} MB", used["ours"] / used["kept"], "<= 0.6", f"{used['kept']:.0f} MB (without)"
        report(Row("P11", f"{what}, {kind}", *shown))
    seconds = f"{cpu['ours']:.2f} s", f"{cpu['kept']:.2f} s (without)"
    report(Row("P11", f"{what}, CPU time", seconds[0], times, "<= 1.35", seconds[1]))


if __name__ == "__main__":
    main()
