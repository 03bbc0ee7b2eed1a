"""Streaming speed: real-time factor over 10 s, and the work a frame as a clip gets longer.

OMP_NUM_THREADS=1 python tests/bench/bench_diffusion_buffer_stream.py [--published]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))

import numpy as np
import torch

from models.buffer_doctor import awake, pair
from models.buffer_signal import RATE, Spec
from models.buffer_stream import Stream
from models.diffusion_buffer import build_network

DEMO = {
    "demo, ncsnpp 8": Spec(width=8, frames=16, buffer=8),
    "demo, block_causal 8": Spec(network="block_causal", block=16, width=8, frames=16, buffer=8),
}
PUBLISHED = {
    "published, ncsnpp 96": Spec(),
    "published, block_causal 128": Spec(network="block_causal", width=128, frames=64),
}


def main() -> None:
    torch.set_num_threads(1)
    published = "--published" in sys.argv
    seconds = 1.0 if published else 10.0
    print("network                       s   real-time factor   ms a frame: median  95 %   first half  second half")
    for name, spec in (PUBLISHED if published else DEMO).items():
        torch.manual_seed(0)
        stream = Stream(awake(build_network(spec.network, spec.width, spec.block)).eval(), spec)
        noisy, _ = pair(seconds)
        times = []
        for start in range(0, len(noisy), spec.hop):
            began = time.perf_counter()
            stream.push(noisy[start : start + spec.hop])
            times.append(time.perf_counter() - began)
        times = np.array(times[2:])  # the first hops only fill the window
        half = len(times) // 2
        ms = 1000 * np.array(
            [np.median(times), np.percentile(times, 95), *map(np.median, (times[:half], times[half:]))]
        )
        factor = times.sum() / (len(times) * spec.hop / RATE)
        print(f"{name:28} {seconds:3.0f}   {factor:16.2f}   {ms[0]:18.2f} {ms[1]:5.2f} {ms[2]:12.2f} {ms[3]:12.2f}")


if __name__ == "__main__":
    main()
