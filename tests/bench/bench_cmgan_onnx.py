"""Real-time factor of CMGAN by onnxruntime and by torch, interleaved in one run on one thread, and their difference.

OMP_NUM_THREADS=1 python tests/bench/bench_cmgan_onnx.py [--channels 64] [--seconds 2] [--times 5]

Needs the optional packages onnx, onnxscript and onnxruntime.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))

import numpy as np
import torch

from models.cmgan.enhance import enhance
from models.cmgan.network import TSCNet
from models.cmgan.onnx_export import OnnxGenerator, write_onnx
from models.cmgan.signal import RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = TSCNet(args.channels).eval()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write_onnx(Path(folder, "generator.onnx"), generator)
        print(f"export: {time.process_time() - began:.0f} s of CPU time", flush=True)
        networks = {"torch": generator, "onnxruntime": OnnxGenerator(str(Path(folder, "generator.onnx")), threads=1)}
    noisy = 0.1 * np.random.default_rng(0).standard_normal(int(args.seconds * RATE)).astype(np.float32)
    factors, made = {name: [] for name in networks}, {}
    for _ in range(args.times + 1):  # the first one warms up
        for name, network in networks.items():
            began = time.process_time()
            made[name] = enhance(network, noisy, len(noisy), "cpu")
            factors[name].append((time.process_time() - began) / args.seconds)
    print(f"{args.channels} channels, {args.seconds:g} s at a time; real-time factor by CPU time: median, least, most")
    for name, values in factors.items():
        values = values[1:]
        print(f"{name:12}{np.median(values):8.2f}{min(values):8.2f}{max(values):8.2f}", flush=True)
    a, b = made.values()
    print(f"largest difference {np.abs(a - b).max() / np.abs(a).max():.1e} of the peak")


if __name__ == "__main__":
    main()
