"""One training step of Higgs Audio v2 with our loss against the model's own, interleaved in one process.

    python tests/bench/bench_higgs_step.py [--layers 2] [--width 768]

The built-in loss computes logits for all positions and all 8 codebooks; ours runs the head in chunks, only where there
is a label. Rows: 10 s of reference, 10 s of target, 120 tokens of text; as with LoRA, only inputs have gradients. Also
compares packed with padded rows, with targets of 2 to 20 s.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "finetune"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    import numpy as np
    import torch
    from bench_loss import peak_mb
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    from common.loss import loss_head
    from higgs_clone import compute_loss
    from models.higgs.layout import Layout, build_row, collate

    torch.manual_seed(0)
    config = HiggsAudioV2Config(
        vocab_size=300,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        head_dim=64,
        codebook_size=1026,
        pad_token_id=0,
        eos_token_id=1,
        audio_token_id=2,
        audio_delay_token_id=3,
        audio_bos_token_id=4,
    )
    model = HiggsAudioV2ForConditionalGeneration(config)
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()  # gradients flow down to the inputs, as with LoRA
    layout = Layout(8, 1024, 1025, audio=2, delay=3, audio_bos=4, pad=0, max_positions=2048)
    clips = SimpleNamespace(config=SimpleNamespace(text_loss=0.0))
    draw = np.random.default_rng(0)

    def row(name, reference, target):
        ids = np.concatenate([draw.integers(5, 300, 60), [4, 2], draw.integers(5, 300, 60), [4, 2], [1]])
        return build_row(name, ids, [draw.integers(0, 1024, (t, 8)) for t in (reference, target)], layout)

    weights = {"codebook_weights": torch.ones(8)}
    batch = collate([row(str(i), 250, 250) for i in range(2)], layout) | weights
    named = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask", "audio_labels")

    def own():
        model.zero_grad()
        (model(**{name: batch[name] for name in named}).loss).backward()

    def ours():
        model.zero_grad()
        compute_loss(model, batch, clips).loss_sum.backward()

    print("side       seconds per step   peak MB above the model")
    own()
    table = {"built in": ([], peak_mb(own))}
    model.audio_lm_head = loss_head(model.audio_lm_head)
    ours()
    table["ours"] = ([], peak_mb(ours))
    for _ in range(args.rounds):
        for name, work in (("built in", own), ("ours", ours)):
            began = time.monotonic()
            work()
            table[name][0].append(time.monotonic() - began)
    middle = {name: statistics.median(times) for name, (times, _) in table.items()}
    for name, (_, peak) in table.items():
        print(f"{name:<10} {middle[name]:16.3f}   {peak:10.0f}")
    print(f"built in / ours: {middle['built in'] / middle['ours']:.2f} x time,"
          f" {table['built in'][1] / table['ours'][1]:.2f} x memory")  # fmt: skip

    rows = [row(str(i), 125, int(25 * seconds)) for i, seconds in enumerate((2, 5, 9, 20))]
    times = {}
    for packed in (False, True):
        batch = collate(rows, layout, packed) | weights
        times[packed] = []
        for _ in range(args.rounds):
            began = time.monotonic()
            ours()
            times[packed].append(time.monotonic() - began)
        middle = statistics.median(times[packed])
        print(f"{'packed' if packed else 'padded'}: {batch['positions']} positions, {middle:.3f} s per step")


if __name__ == "__main__":
    main()
