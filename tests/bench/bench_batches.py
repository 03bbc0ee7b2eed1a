"""Micro-batches of like length against random padded ones, on a natural mix of lengths (S5).

    python tests/bench/bench_batches.py [--rounds 8]

20,000 clips of 1 to 20 s. Real tokens per second: forward and backward pass of the demo's Dia, all weights, against
random batches of 8 clips; both sides compute as many padded positions in all. The share of real positions is counted in
the batches themselves, so positions of dropped captions are padding.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from bench_data import natural_seconds, write  # noqa: E402
from run import Row, report  # noqa: E402

os.environ.setdefault("DS_ACCELERATOR", "cpu")
CLIPS, RANDOM_BATCH = 20_000, 8
SECONDS = natural_seconds(CLIPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model, clips = dia(folder)
        report_speed(model, clips, args.rounds)
        report_share(clips, "Dia, bucketed", ">= 0.95")
        report_share(higgs(folder), "Higgs, --packing", ">= 0.98")
        report_share(mot(folder), "Llama MoT, bucketed", ">= 0.98")


# ---- the three training sets -----------------------------------------------------------------------------------


def dataset(folder: Path, **facts) -> str:
    rate = facts["sample_rate"] / facts["hop"]
    frames = (SECONDS * rate).astype(int)
    write(folder, frames, text=lambda count: ("bada gumi " * 30)[: int(14 * count / rate)], **facts)
    return str(folder)


def dia(folder: Path):
    """The demo's model, with room for 20 s, and its clips."""
    from common.tokens import TokenDataset
    from dia_full import Config, build_model
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    shutil.copytree(ROOT / "data/assets/dia", folder / "dia")
    config = json.loads((folder / "dia/config.json").read_text())
    config["decoder_config"]["max_position_embeddings"] = 2048
    config["encoder_config"]["max_position_embeddings"] = 512
    (folder / "dia/config.json").write_text(json.dumps(config))
    data = dataset(folder / "dia-tokens", codec="dac", sample_rate=44100, hop=512, codebook_size=256)
    config = Config(model=str(folder / "dia"), data=data, precision="fp32")
    model = build_model(config, {"zero_optimization": {"stage": 2}}, {})
    return model, Clips(TokenDataset(data), layout_of(model.config), config, {}, train=True)


def higgs(folder: Path):
    from demo import ensure_demo

    from helpers.higgs_support import FACTS, make_clips

    demo = ensure_demo(ROOT / "runs" / "demo-assets-higgs", "higgs")
    return make_clips(demo, dataset(folder / "higgs-tokens", **FACTS), packing=True, reference_dropout=0.1)


def mot(folder: Path):
    from demo import ensure_demo

    from common.tokens import TokenDataset
    from llama_mot import Config
    from models.mot.data import Clips, Tokenizer
    from models.mot.layout import Layout

    facts = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "channels": 4, "codebook_size": 2048}
    demo = ensure_demo(ROOT / "runs" / "demo-assets-mot", "mot")
    tokens, tokenizer = TokenDataset(dataset(folder / "mot-tokens", **facts)), Tokenizer(str(demo / "llama"))
    return Clips(tokens, Layout(tokenizer.size), tokenizer, Config(over_long_text="cut"), train=True)


# ---- what is measured ------------------------------------------------------------------------------------------


def report_speed(model, clips, rounds: int) -> None:
    from common.plan import Plan
    from dia_full import compute_loss

    shuffled = np.random.default_rng(1).permutation(len(clips))[: RANDOM_BATCH * (CLIPS // RANDOM_BATCH)]
    random = shuffled.reshape(-1, RANDOM_BATCH)
    budget = int(RANDOM_BATCH * clips.lengths[random].max(axis=1).mean())  # steps as large as those of the other side
    plan = Plan(clips.lengths, budget, seed=0)

    def ours(batch):
        loss = compute_loss(model, batch, clips).loss_sum
        loss.backward()
        return float(loss.detach())

    def library(batch):
        """The loss of transformers: logits of all positions."""
        inputs = {name: value for name, value in batch.items() if name not in ("ids", "targets", "channel_weights")}
        labels = inputs.pop("labels").transpose(1, 2).flatten(0, 1)
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        return float(loss.detach()) * int((labels != -100).sum())

    sides = {
        "ours": (ours, plan.micro_batch),
        "random": (ours, lambda number: (0, random[number])),
        "random, library": (library, lambda number: (0, random[number])),
    }
    model.train()
    one_by_one = sum(ours(clips.batch([clip])) for clip in random[0])
    for name, (step, _) in sides.items():
        assert abs(step(clips.batch(random[0])) / one_by_one - 1) < 1e-4, name
    tokens, cpu, wall = ({name: 0.0 for name in sides} for _ in range(3))
    number = {name: 1 for name in sides}
    for _ in range(rounds):
        for name, (step, rows_of) in sides.items():
            for _ in range(2):
                epoch, rows = rows_of(number[name])
                number[name] += 1
                batch = clips.batch(rows, epoch)
                model.zero_grad()
                began, began_cpu = time.perf_counter(), time.process_time()
                step(batch)
                cpu[name] += time.process_time() - began_cpu
                wall[name] += time.perf_counter() - began
                tokens[name] += clips.lengths[rows].sum()
    speed = {name: tokens[name] / cpu[name] for name in sides}
    for name in sides:
        print(f"{name:16} {speed[name]:8.0f} tokens per CPU second, {tokens[name] / wall[name]:8.0f} by the clock")
    ours = f"{speed['ours']:.0f} tokens/s"
    for name, what in (("random", "the same loss"), ("random, library", "transformers' loss")):
        ratio, peer = speed["ours"] / speed[name], f"{speed[name]:.0f} (random batches, {what})"
        report(Row("S5", "real tokens per CPU second, natural lengths", ours, ratio, ">= 1.9", peer))


def report_share(clips, what: str, target: str) -> None:
    from common.plan import Plan

    plan = Plan(clips.lengths, clips.config.micro_tokens, seed=0)
    real = padded = 0
    for number in range(100):
        epoch, rows = plan.micro_batch(number)
        batch = clips.batch(rows, epoch)
        real += int(clips.lengths[rows].sum())
        padded += batch["positions"]
    shuffled = np.random.default_rng(1).permutation(len(clips))[: RANDOM_BATCH * (len(clips) // RANDOM_BATCH)]
    random = clips.lengths[shuffled].reshape(-1, RANDOM_BATCH)
    random_share = f"{random.sum() / (RANDOM_BATCH * random.max(axis=1)).sum():.3f} (random, 8 clips)"
    report(Row("S5", f"share of real positions: {what}", f"{real / padded:.3f}", real / padded, target, random_share))


if __name__ == "__main__":
    main()
