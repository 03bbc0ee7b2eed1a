"""Dia at size, randomly initialised: memory per rank beside the prediction, and optimizer steps that really run.

    python tests/bench/bench_dia_size.py --size large              dry runs: predicted and measured memory
    python tests/bench/bench_dia_size.py --size real --case lora   the real 1.6B: three bf16 steps, 2 ranks
    python tests/bench/bench_dia_size.py --size real --case full   the same, all weights
    python tests/bench/bench_dia_size.py --size small --case full --case full_zero2   a test runs the first

Rows: P20 for every case, P14 for the case lora.

The clips are 4 frames long: a CPU without bf16 instructions computes the backward pass at 0.6 GFLOP/s per core.
Needs up to 27 GB of memory and 4 GB of disk in --scratch.
"""

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
import common.runtime  # noqa: E402, F401  sets which instructions oneDNN may use; the ranks inherit it
from helpers import support  # noqa: E402
from helpers.bench_rows import Row, report  # noqa: E402

# Encoder and decoder layers, width. About 66 M, 350 M and 1.6 G weights.
SIZES = {"small": (2, 2, 1 / 2), "large": (6, 6, 3 / 4), "real": (12, 18, 1)}

# 8-bit moments, and a step that copies gradients and unpacks moments of 0.1 G parameters at a time.
SMALL_STEP = {"zero_optimization": {"stage": 3, "sub_group_size": 1e8, "reduce_bucket_size": 5e7}}
SMALL_STEP["zero_optimization"] |= {"stage3_max_live_parameters": 1e8, "stage3_prefetch_bucket_size": 1e7}
CASES = {
    "zero2": ("dia_full", 2, "zero2", ["--dry-run"]),
    "zero3": ("dia_full", 2, "zero3", ["--dry-run"]),
    "zero2_offload": ("dia_full", 2, "zero2_offload", ["--dry-run"]),
    "zero3_offload": ("dia_full", 2, "zero3_offload", ["--dry-run"]),
    "lora2": ("dia_lora", 2, "zero2", ["--dry-run"]),
    "lora": ("dia_lora", 2, "zero2", ["--steps", "3"]),
    "full": ("dia_full", 1, SMALL_STEP, ["--steps", "3", "--optimizer", "adamw8bit"]),
    "full_zero2": ("dia_full", 1, "zero2", ["--steps", "2", "--optimizer", "adamw8bit"]),
}
DRY = ["zero2", "zero3", "zero2_offload", "zero3_offload", "lora2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all dry runs")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/dia-size"), help="default: %(default)s")
    args = parser.parse_args()
    args.scratch.mkdir(exist_ok=True)
    model, tokens = args.scratch / args.size, args.scratch / "tokens"
    if not (model / "config.json").exists():
        build_model(model, *SIZES[args.size])
    if not tokens.exists():
        draw = np.random.default_rng(0)
        clips = [{"id": f"clip{i}", "text": "[S1] a", "codes": draw.integers(0, 1024, (4, 9))} for i in range(6)]
        support.write_tokens(tokens, clips)

    print(f"{'case':14} {'ranks':>5} {'predicted':>10} {'measured':>9} {'ratio':>6}   (GB per rank)   seconds per step")
    for case in args.case or DRY:
        recipe, world, ds, words = CASES[case]
        file = ROOT / "ds_configs" / f"{ds}.json" if isinstance(ds, str) else args.scratch / "ds.json"
        if isinstance(ds, dict):
            file.write_text(json.dumps(ds))
        out = args.scratch / "run"
        shutil.rmtree(out, ignore_errors=True)
        common = ["--model", model, "--data", tokens, "--micro-tokens", 20, "--ds", file, "--out", out]
        common += ["--samples", 0, "--no-export", "--save-every", 0, "--warmup", 1]
        began = time.monotonic()
        codes, outputs = support.finish(
            support.start_ranks(ROOT / "finetune" / f"{recipe}.py", [*common, *words], world), timeout=3600
        )
        if any(codes):
            print(f"{case:14} failed ({codes}):\n{outputs[0][-2000:]}")
            continue
        if "--dry-run" in words:
            predicted, measured = map(
                float, re.search(r"predicted (\S+) GB, measured peak (\S+) GB", outputs[0]).groups()
            )
            seconds = "one step, start included: " + f"{time.monotonic() - began:.0f}"
        else:
            predicted = float(re.search(r"predicted (\S+) GB", outputs[0])[1])
            records = support.step_records(out)
            measured = max(record["rss_gb"] for record in records)
            seconds = " ".join(f"{record['step_s']:.0f}" for record in records)
            print(
                *(f"  step {r['step']}: loss {r['loss']:.4f}, gradient norm {r['grad_norm']:.3f}" for r in records),
                sep="\n",
            )
        print(
            f"{case:14} {world:5} {predicted:10.2f} {measured:9.2f} {measured / predicted:6.2f}   {seconds:>30}",
            flush=True,
        )
        facts = next(line for line in outputs[0].splitlines() if line.startswith("parameters"))
        print(f"  {facts}")
        gb = f"{measured:.2f} GB", f"{predicted:.2f} GB predicted"
        off = max(measured / predicted, predicted / measured)
        report(Row("P20", f"memory of Dia, {args.size}, {case}", gb[0], off, "<= 1.1", limit=gb[1]))
        if case == "lora":
            trained = int(re.search(r"trained ([\d,]+)", facts)[1].replace(",", ""))
            size = sum(file.stat().st_size for file in (out / "checkpoints").glob("step-*/**/*") if file.is_file())
            mb = f"{size / 1e6:.1f} MB", f"{16 * trained / 1e6:.1f} MB (16 bytes per trained weight)"
            report(Row("P14", "LoRA checkpoint", mb[0], size / (16 * trained), "<= 1.3", limit=mb[1]))
    shutil.rmtree(args.scratch / "run", ignore_errors=True)


def build_model(folder: Path, encoder_layers: int, decoder_layers: int, width: float) -> None:
    """Dia's own class defaults are the real model's sizes; bf16 weights, so that the file is half as large."""
    import torch
    from transformers import DiaConfig, DiaForConditionalGeneration
    from transformers.models.dia.configuration_dia import DiaDecoderConfig, DiaEncoderConfig

    encoder, decoder = (
        DiaEncoderConfig(num_hidden_layers=encoder_layers),
        DiaDecoderConfig(num_hidden_layers=decoder_layers),
    )
    for config in (encoder, decoder):
        for name, value in config.to_dict().items():
            if re.search(r"hidden_size|intermediate_size|num_(attention|key_value)_heads", name):
                setattr(config, name, max(1, int(value * width)))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = DiaForConditionalGeneration(DiaConfig(encoder_config=encoder, decoder_config=decoder))
    model.save_pretrained(folder, max_shard_size="1GB")


if __name__ == "__main__":
    main()
