"""The demo pairs of the Diffusion Buffer: those of CMGAN's demo, much noisier, since it is judged by decibels."""

from pathlib import Path

from demos import cmgan

SNR = (0.0, 10.0)


def build_parts(folder: Path, final: Path) -> None:
    cmgan.build_parts(folder, final, SNR)
