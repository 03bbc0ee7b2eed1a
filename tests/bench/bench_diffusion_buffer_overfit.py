"""One clip learned by heart and then streamed: SI-SDR against steps, as a table.

python tests/bench/bench_diffusion_buffer_overfit.py [--steps 1500] [--noisy FILE --clean FILE]
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from common import speech_metrics
from helpers.diffusion_buffer_support import overfit, pair
from models.diffusion_buffer.enhance import enhance_at
from models.diffusion_buffer.signal import Spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1500), ("every", 250), ("width", 16), ("n-fft", 126), ("hop", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("frames", 32), ("buffer", 8), ("crops", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--network", default="ncsnpp")
    parser.add_argument("--phase", default="start")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--snr", type=float, default=10.0)
    parser.add_argument("--loss", default="dp")
    parser.add_argument("--noisy")
    parser.add_argument("--clean")
    args = parser.parse_args()
    noisy, clean = pair(1.0, args.snr)
    if args.noisy:
        import soundfile

        noisy, clean = (soundfile.read(path, dtype="float32")[0][16000:32000] for path in (args.noisy, args.clean))
    spec = Spec(
        network=args.network, width=args.width, block=16, n_fft=args.n_fft, hop=args.hop, frames=args.frames,
        buffer=args.buffer, t_max=0.8, loss=args.loss, output_scale="none" if args.loss == "dp" else "sigma",
        phase=args.phase,
    )  # fmt: skip
    delays = [1, args.buffer] if args.loss == "dp" else [args.buffer]
    began = time.monotonic()
    print(f"noisy: SI-SDR {level(clean, noisy):.2f} dB")

    def watch(step: int, network) -> None:
        if (step + 1) % args.every == 0:
            (made,) = enhance_at(network.eval(), [noisy], spec, delays)
            network.train()
            found = "  ".join(f"d {d}: {level(clean, wave):.2f} dB" for d, wave in zip(delays, made, strict=True))
            print(f"step {step + 1}  {time.monotonic() - began:.0f} s  {found}", flush=True)

    _, losses = overfit(spec, noisy, clean, args.steps, args.crops, args.lr, watch)
    print(f"loss {losses[0]:.5f} to {np.mean(losses[-20:]):.5f}")


def level(clean, wave) -> float:
    return speech_metrics.si_sdr(clean.astype(np.float64), wave.astype(np.float64))


if __name__ == "__main__":
    main()
