"""Streaming the files of an evaluation one at a time and together, interleaved in one run, and how far they differ.

python tests/bench/bench_diffusion_buffer_together.py [--published] [--files 8] [--seconds 0.5] [--rounds 3]

Times are those of the fastest round: other jobs on the machine only make a round slower.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from helpers.diffusion_buffer_support import pair
from models.diffusion_buffer.diagnose import randomised
from models.diffusion_buffer.enhance import enhance_at
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.signal import Spec

SMALL = {
    "ncsnpp 8, 16 frames": Spec(width=8, frames=16, buffer=8),
    "block_causal 8, 16 frames": Spec(network="block_causal", block=16, width=8, frames=16, buffer=8),
    "ncsnpp 32, 64 frames": Spec(width=32, frames=64, buffer=20),
}
PUBLISHED = {"ncsnpp 96, 128 frames": Spec(), "block_causal 128, 64 frames": Spec(network="block_causal", frames=64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="the networks of the papers")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a file")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{args.files} files of {args.seconds:g} s on {device.type}, {torch.get_num_threads()} threads; ms per frame"
          " and file")  # fmt: skip
    print(f"{'network':28}{'one at a time':>14}{'2 together':>12}{'all together':>14}{'difference':>12}")
    for name, spec in (PUBLISHED if args.published else SMALL).items():
        torch.manual_seed(0)
        network = randomised(build_network(spec.network, spec.width, spec.block)).to(device).eval()
        noisy, _ = pair(args.seconds + 0.1 * args.files)
        waves = [noisy[1600 * i : 1600 * i + int(16000 * args.seconds)] for i in range(args.files)]
        frames = args.files * (-(-(len(waves[0]) + spec.n_fft // 2) // spec.hop) + spec.buffer - 1)
        fastest, made = {}, {}
        for _ in range(args.rounds):
            for together in (1, 2, args.files):
                began = time.perf_counter()
                made[together] = []
                for start in range(0, args.files, together):
                    made[together] += enhance_at(network, waves[start : start + together], spec, [spec.buffer], device)
                took = 1000 * (time.perf_counter() - began) / frames
                fastest[together] = min(took, fastest.get(together, took))
        size = max(np.abs(wave).max() for (wave,) in made[1])
        pairs = zip(made[1], made[args.files], strict=True)
        worst = max(np.abs(alone - wave).max() for (alone,), (wave,) in pairs)
        print(
            f"{name:28}{fastest[1]:14.2f}{fastest[2]:12.2f}{fastest[args.files]:14.2f}{worst / size:12.1e}", flush=True
        )


if __name__ == "__main__":
    main()
