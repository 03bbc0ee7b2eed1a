"""Codes -> sound and picture: FILE.npy becomes FILE.wav and FILE.png beside it.

    python data/decode.py --codec-weights descript/dac_44khz samples/step-100.npy
    python data/decode.py --codec-weights DIR --tensorboard runs/a --step 100 samples/*.npy

FILE.npy holds integers of shape (T, C): C codebooks, or twice as many for stereo (L block, then R block).
Training never loads a codec: it writes .npy files and starts this script in another process.
"""

import argparse
import json
import os
from pathlib import Path

from lib.errors import UsageError, run


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.npy")
    add(
        "--codec-weights",
        required=True,
        metavar="PATH_OR_ID",
        help="a local path or a hub id (descript/dac_44khz)",
    )
    add(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="also add sound and picture to event files in this folder",
    )
    add("--step", type=int, default=0, help="step of the TensorBoard entries (default: 0)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    arrays = {file: read_codes(file) for file in args.files}
    for file, codes in arrays.items():
        if not len(codes):
            print(f"{file}: 0 frames, no sound to write")
    arrays = {file: codes for file, codes in arrays.items() if len(codes)}
    if not arrays:
        return
    from lib.codec import find_weights, load_codec

    codec = load_codec(find_weights(args.codec_weights))
    sounds = {file: decode_codes(codec, codes, str(file)) for file, codes in arrays.items()}
    for file, wave in sounds.items():
        write_wav(file.with_suffix(".wav"), wave, codec.sample_rate)
        write_spectrogram(file.with_suffix(".png"), wave, codec.sample_rate)
        add_facts(file.with_suffix(".json"), wave, codec.sample_rate)
        print(f"{file.with_suffix('.wav')}: {wave.shape[1] / codec.sample_rate:.2f} s")
    if args.tensorboard:
        add_to_tensorboard(args.tensorboard, args.step, sounds, codec.sample_rate)


def read_codes(file: Path):
    import numpy as np

    try:
        codes = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"cannot read {file} as a plain .npy array: {error}") from None
    if not isinstance(codes, np.ndarray) or codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise UsageError(f"{file} must hold integers of shape (frames, channels)")
    return codes


def decode_codes(codec, codes, name: str):
    """(T, C) integers -> (1 or 2, n) float32 samples within -1 and 1."""
    import numpy as np
    import torch

    channels = codes.shape[1]
    if channels not in (codec.codebooks, 2 * codec.codebooks):
        raise UsageError(
            f"{name} has {channels} channels; this codec has {codec.codebooks} codebooks "
            f"({2 * codec.codebooks} channels for stereo)"
        )
    if codes.min() < 0 or codes.max() >= codec.codebook_size:
        bad = codes.min() if codes.min() < 0 else codes.max()
        raise UsageError(f"{name} has the code {bad}; codes of this codec are 0 to {codec.codebook_size - 1}")
    codes = torch.from_numpy(codes.astype(np.int64))
    sides = [codec.decode(side.contiguous()) for side in codes.split(codec.codebooks, dim=1)]
    return torch.stack(sides).clamp(-1, 1).numpy()


def write_wav(file: Path, wave, rate: int) -> None:
    import soundfile

    temporary = file.with_name(file.name + ".tmp")
    soundfile.write(temporary, wave.T, rate, subtype="PCM_16", format="WAV")
    temporary.rename(file)


def write_spectrogram(file: Path, wave, rate: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from numpy import mean, pad

    mono = mean(wave, axis=0)
    figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
    window = 1024
    axes.specgram(pad(mono, (0, max(0, window - len(mono)))) + 1e-7, NFFT=window, Fs=rate, noverlap=window * 3 // 4)
    axes.set(xlabel="seconds", ylabel="Hz", title=file.stem)
    temporary = file.with_name(file.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=100)
    pyplot.close(figure)
    temporary.rename(file)


def add_facts(file: Path, wave, rate: int) -> None:
    """Completes the facts that training wrote beside the codes with what only the sound can tell."""
    import numpy as np

    from lib.store import write_json

    if not file.exists():
        return
    size = rate // 50  # 20 ms
    windows = np.pad(wave.mean(axis=0), (0, -wave.shape[1] % size)).reshape(-1, size)
    silent = np.sqrt((windows**2).mean(axis=1)) < 10 ** (-50 / 20)  # below -50 dB of full scale
    edges = np.flatnonzero(np.diff(np.concatenate([[0], silent, [0]]).astype(int)))
    longest = (edges[1::2] - edges[::2]).max() * size / rate if len(edges) else 0.0
    facts = {"silent": float(silent.mean()), "longest_silence": float(longest)}
    facts["clipped"] = float((np.abs(wave) >= 0.999).mean())
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | facts)


def add_to_tensorboard(folder: Path, step: int, sounds: dict, rate: int) -> None:
    import numpy as np
    from PIL import Image
    from torch import from_numpy
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for file, wave in sounds.items():
            # TensorBoard's audio is mono here: torch's writer takes one channel.
            writer.add_audio(f"samples/{file.stem}", from_numpy(wave.mean(axis=0)), step, sample_rate=rate)
            picture = np.asarray(Image.open(file.with_suffix(".png")).convert("RGB"))
            writer.add_image(f"spectrograms/{file.stem}", picture, step, dataformats="HWC")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    run(main)
