"""Real-time factor of a stream by onnxruntime and by torch, interleaved in one run on one thread, and their difference.

OMP_NUM_THREADS=1 python tests/bench/bench_diffusion_buffer_onnx.py [--width 8] [--frames 16] [--buffer 8] [--hops 100]

Needs the optional packages onnx, onnxscript and onnxruntime.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from helpers.diffusion_buffer_support import pair
from models.diffusion_buffer.diagnose import randomised
from models.diffusion_buffer.enhance import Stream, Traced
from models.diffusion_buffer.network import build_network
from models.diffusion_buffer.onnx_export import OnnxNetwork, write_onnx
from models.diffusion_buffer.signal import RATE, Spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 8), ("frames", 16), ("buffer", 8), ("hops", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"width {args.width}, {args.frames} frames; real-time factor by the clock: median and 99 % of {args.hops} hops"
    )
    for kind in ("ncsnpp", "block_causal"):
        spec = Spec(network=kind, block=16, width=args.width, frames=args.frames, buffer=args.buffer)
        torch.manual_seed(0)
        network = randomised(build_network(kind, spec.width, spec.block)).eval()
        if kind == "ncsnpp":
            network.output_layer.weight.data *= 0.05  # with random weights its stream is only stable if it is soft
        with tempfile.TemporaryDirectory() as folder:
            write_onnx(Path(folder, "live.onnx"), network, spec)
            onnx = OnnxNetwork(str(Path(folder, "live.onnx")), threads=1)
        streams = {"torch": Stream(Traced(network, spec), spec), "onnxruntime": Stream(onnx, spec)}
        noisy, _ = pair((args.hops + 12) * spec.hop / RATE)
        times, made = {name: [] for name in streams}, {name: [] for name in streams}
        for start in range(0, len(noisy), spec.hop):
            for name, stream in streams.items():
                began = time.perf_counter()
                made[name].append(stream.push(noisy[start : start + spec.hop]))
                times[name].append((time.perf_counter() - began) * RATE / spec.hop)
        a, b = (np.concatenate(parts) for parts in made.values())
        for name, factors in times.items():
            factors = factors[12:]  # the first hops fill the window and warm up
            print(f"{kind:14}{name:14}{np.median(factors):8.2f}{np.percentile(factors, 99):8.2f}", flush=True)
        print(f"{kind:14}largest difference {np.abs(a - b).max() / np.abs(a).max():.1e} of the peak", flush=True)


if __name__ == "__main__":
    main()
