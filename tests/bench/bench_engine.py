"""Training speed of the Dia LoRA recipe's engine against bare PyTorch loops, interleaved in one process, one rank.

    python tests/bench/bench_engine.py [--rounds 9] [--steps 6]

Same model, batches and optimizer settings; the losses of all sides are compared before anything is timed. The figure
to trust is the ratio: machines are shared, so each side's best-decile CPU time is compared, and wall time beside it.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "finetune"), str(ROOT / "data")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=6, help="steps per side and round")
    args = parser.parse_args()

    import numpy as np
    import torch
    from demo import ensure_demo

    import dia_lora
    from common import engine, optim
    from common.ds_config import resolve_ds
    from common.metrics import Meter
    from common.plan import Plan
    from common.runtime import init_process
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of
    from models.dia.weights import load_dia

    process = init_process()
    demo = ensure_demo(ROOT / "runs" / "demo-assets-dia")
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens" / "train")}
    # A constant, small rate: all sides then walk through the same weights and can be compared step by step.
    config = dia_lora.Config(**assets, precision="fp32", lora_dropout=0.0, lr=1e-4, micro_tokens=2048)
    layout = layout_of(load_dia(config.model, torch.float32).config)
    clips = Clips(TokenDataset(config.data), layout, config, {}, train=True)
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    loss_fn = functools.partial(dia_lora.compute_loss, clips=clips)

    def batch_of(step):
        epoch, chosen = plan.micro_batch(step)
        return clips.batch(chosen, epoch), clips.target_weight(chosen, epoch), clips.lengths[chosen].sum()

    def deepspeed_side(stage):
        ds = resolve_ds(f"ds_configs/zero{stage}.json", config, 1)
        model = dia_lora.build_model(config, ds, {})
        optimizer = optim.build_optimizer(optim.parameter_groups(model, 0.0, ()), config, ds)
        ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)

        def step(number):
            batch, weight, _ = batch_of(number)
            meter = Meter()
            output = ds_engine(batch)
            engine.backward(ds_engine, output.loss_sum, weight, 1)
            meter.add(batch, output)
            engine.take_step(ds_engine)
            return meter.reduce(process).loss_sum / weight

        return step

    def bare_side(own_loss):
        ds = resolve_ds("ds_configs/zero2.json", config, 1)
        model = dia_lora.build_model(config, ds, {}).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

        def step(number):
            batch, weight, _ = batch_of(number)
            if own_loss:
                loss = loss_fn(model, batch).loss_sum / weight
            else:
                labels = batch["labels"].transpose(1, 2).flatten(0, 1)
                inputs = {k: v for k, v in batch.items() if k not in ("labels", "ids")}
                loss = model(**inputs, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    sides = {
        "bare PyTorch, transformers' own loss": bare_side(False),
        "bare PyTorch, our loss": bare_side(True),
        "recipe engine, ZeRO-2": deepspeed_side(2),
        "recipe engine, ZeRO-3": deepspeed_side(3),
    }
    warm = {name: [step(n) for n in range(8)] for name, step in sides.items()}
    reference = warm["bare PyTorch, transformers' own loss"]
    for name, losses in warm.items():
        assert np.allclose(losses, reference, atol=1e-4), (name, losses, reference)

    cpu, wall, tokens = ({name: [] for name in sides} for _ in range(3))
    number = 8
    for _ in range(args.rounds):
        for name, step in sides.items():
            for n in range(number, number + args.steps):
                began_cpu, began = time.process_time(), time.perf_counter()
                step(n)
                positions = batch_of(n)[2]
                cpu[name].append((time.process_time() - began_cpu) / positions)
                wall[name].append((time.perf_counter() - began) / positions)
                tokens[name].append(positions)
        number += args.steps
    base = "bare PyTorch, our loss"
    print(f"\n{'side':40} {'tok/s (CPU p10)':>16} {'tok/s (wall p50)':>17} {'ratio CPU':>10} {'ratio wall':>11}")
    for name in sides:
        p10, p50 = np.percentile(cpu[name], 10), np.median(wall[name])
        ratios = np.percentile(cpu[base], 10) / p10, np.median(wall[base]) / p50
        print(f"{name:40} {1 / p10:16.0f} {1 / p50:17.0f} {ratios[0]:10.3f} {ratios[1]:11.3f}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
