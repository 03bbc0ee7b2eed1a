"""Decode codec tokens to audio: FILE.npy becomes FILE.wav in the same folder.

    python data/decode.py --codec-weights descript/dac_44khz samples/*.npy

FILE.npy holds integers of shape (T, C), where C is the number of codebooks, or twice that for stereo (all of the left
channel, then all of the right).
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import soundfile

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, command_parser, run_command
from lib.codec import find_weights, load_codec
from lib.store import write_json


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.npy", help="codes to decode")
    add(
        "--codec-weights",
        required=True,
        metavar="PATH_OR_ID",
        help="a local path or a hub id (descript/dac_44khz)",
    )
    add("--codec-revision", metavar="REV", help="branch, tag or commit of --codec-weights on the hub (default: newest)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    arrays = {file: read_codes(file) for file in args.files}
    for file, codes in arrays.items():
        if not len(codes):
            print(f"{file}: 0 frames, no audio to write")
    arrays = {file: codes for file, codes in arrays.items() if len(codes)}
    if not arrays:
        return
    codec = load_codec(find_weights(args.codec_weights, args.codec_revision))
    waves = {file: decode_codes(codec, codes, str(file)) for file, codes in arrays.items()}
    for file, wave in waves.items():
        write_sound(file.with_suffix(".wav"), wave, codec.sample_rate)
        print(f"{file.with_suffix('.wav')}: {wave.shape[1] / codec.sample_rate:.2f} s")


def read_codes(file: Path):
    """(T, C) integers; nothing is unpickled."""
    try:
        codes = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read {file} as a plain .npy array: {error}") from None
    if not isinstance(codes, np.ndarray) or codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise UserError(f"{file} must hold integers of shape (frames, channels)")
    return codes


def decode_codes(codec, codes, name: str):
    """(T, C) integers -> (1 or 2, n) float32 samples in -1..1."""
    import torch

    if codes.shape[1] not in (codec.codebooks, 2 * codec.codebooks):
        raise UserError(
            f"{name} has {codes.shape[1]} channels, but this codec needs {codec.codebooks}, "
            f"or {2 * codec.codebooks} for stereo"
        )
    if codes.min() < 0 or codes.max() >= codec.codebook_size:
        bad = codes.min() if codes.min() < 0 else codes.max()
        raise UserError(f"{name} has code {bad}, but this codec's codes are 0 to {codec.codebook_size - 1}")
    codes = torch.from_numpy(codes.astype(np.int64))
    channels = [codec.decode(block.contiguous()) for block in codes.split(codec.codebooks, dim=1)]
    return torch.stack(channels).clamp(-1, 1).numpy()


def write_sound(file: Path, wave, rate: int) -> None:
    """Writes FILE.wav, and its silence and clipping to FILE.json, if there is one."""
    write_wav(file, wave, rate)
    add_audio_facts(file.with_suffix(".json"), wave, rate)


def write_wav(file: Path, wave, rate: int) -> None:
    temporary = file.with_name(file.name + ".tmp")
    soundfile.write(temporary, wave.T, rate, subtype="PCM_16", format="WAV")
    temporary.rename(file)


def add_audio_facts(file: Path, wave, rate: int) -> None:
    """Add silence and clipping to the .json that training wrote next to the codes, if there is one."""
    if not file.exists():
        return
    size = rate // 50  # 20 ms
    windows = np.pad(wave.mean(axis=0), (0, -wave.shape[1] % size)).reshape(-1, size)
    silent = np.sqrt((windows**2).mean(axis=1)) < 10 ** (-50 / 20)  # -50 dBFS
    edges = np.flatnonzero(np.diff(np.concatenate([[0], silent, [0]]).astype(int)))
    longest = (edges[1::2] - edges[::2]).max() * size / rate if len(edges) else 0.0
    facts = {"silent": float(silent.mean()), "longest_silence": float(longest)}
    facts["clipped"] = float((np.abs(wave) >= 0.999).mean())
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | facts)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    run_command(main)
