"""The demo pairs of the Diffusion Buffer: those of CMGAN's demo, much noisier, since it is judged by decibels."""

from pathlib import Path

import demo_cmgan

SNR = (0.0, 10.0)


def build_parts(folder: Path, final: Path) -> None:
    demo_cmgan.build_parts(folder, final, SNR)
