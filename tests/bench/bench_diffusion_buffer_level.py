"""Time to prepare a training crop with and without --level track, interleaved in one run.

python tests/bench/bench_diffusion_buffer_level.py

Clips of 2 to 30 s at the published settings. The first crop of a clip also computes the powers of all its frames.
"""

import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from helpers.diffusion_buffer_support import pair
from models.diffusion_buffer.diagnose import clips_of
from models.diffusion_buffer.signal import Spec

CROPS = 60


def main() -> None:
    print("clip     level none   level track (the first crop)      ms per crop, medians")
    for seconds in (2.0, 10.0, 30.0):
        noisy, clean = pair(seconds)
        clips = {level: clips_of(noisy, clean, dataclasses.replace(Spec(), level=level)) for level in ("none", "track")}
        times = {level: [] for level in clips}
        for epoch in range(CROPS):
            for level, training_set in clips.items():
                began = time.perf_counter()
                training_set.batch([(epoch, 0)])
                times[level].append(1000 * (time.perf_counter() - began))
        plain, tracked = (float(np.median(times[level][5:])) for level in ("none", "track"))
        print(f"{seconds:4.0f} s {plain:12.2f} {tracked:13.2f} ({times['track'][0]:.1f})")


if __name__ == "__main__":
    main()
