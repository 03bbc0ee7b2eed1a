"""Streaming speed on one core: real-time factor, and the work per frame as a clip gets longer.

OMP_NUM_THREADS=1 python tests/bench/bench_diffusion_buffer_stream.py [--published]

"processor" is the time that the process computed, which other jobs on the machine hardly change; "clock" what passed.
"""

import sys
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
from models.diffusion_buffer.signal import RATE, Spec

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
    lengths = [1.0] if published else [2.5, 10.0, 20.0]
    print("                             real-time factor           ms per frame, clock   ms per frame, processor")
    print("network                  s   clock   processor   traced   median   95 %       of the first and last quarter")
    for name, spec in (PUBLISHED if published else DEMO).items():
        torch.manual_seed(0)
        network = randomised(build_network(spec.network, spec.width, spec.block)).eval()
        for seconds, traced in [*((s, True) for s in lengths), (lengths[-1 if published else 1], False)]:
            clock, processor = measure(Traced(network, spec) if traced else network, spec, seconds)
            hop, quarter = spec.hop / RATE, len(clock) // 4
            ms = 1000 * np.array([np.median(clock), np.percentile(clock, 95), processor[:quarter].mean(),
                                  processor[-quarter:].mean()])  # fmt: skip
            print(f"{name:20} {seconds:5.1f} {clock.mean() / hop:7.2f} {processor.mean() / hop:11.2f}"
                  f" {'yes' if traced else 'no':>8} {ms[0]:8.2f} {ms[1]:6.2f} {ms[2]:12.2f} {ms[3]:8.2f}")  # fmt: skip


def measure(network, spec: Spec, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds by the clock and of the processor for each frame."""
    stream, (noisy, _), found = Stream(network, spec), pair(seconds), []
    for start in range(0, len(noisy), spec.hop):
        began = time.perf_counter(), time.process_time()
        stream.push(noisy[start : start + spec.hop])
        found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    clock, processor = np.array(found[8:]).T  # the first hops fill the window and warm up
    return clock, processor


if __name__ == "__main__":
    main()
