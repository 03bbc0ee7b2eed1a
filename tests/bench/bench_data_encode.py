"""Encoding speed: data/encode.py's workers against the plain loop over files with the same codec.

    python tests/bench/bench_data_encode.py          # the tiny codec
    python tests/bench/bench_data_encode.py --full   # a DAC of the real size (76.6 M), random weights

The plain loop is what earlier trainers ran: read, resample, encode the whole clip, save a .pt; it is timed with
one thread and with all cores, and the faster counts. Both are timed after their codec is loaded. Target: at least
1.6 times as fast on 2 cores, with the same codes.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "data"))
TARGET = 1.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    clips, seconds = (10, 2.5) if args.full else (96, 3.0)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        weights = save_codec(folder / "codec", args.full)
        write_corpus(folder / "in", clips, seconds)
        loops = {threads: plain_loop(folder / "in", weights, folder, threads) for threads in {1, args.workers}}
        ours, our_codes = our_workers(folder / "in", weights, args.workers)
    plain, plain_codes = max(loops.values(), key=lambda loop: loop[0])
    same = sum((plain_codes[id] == codes).mean() for id, codes in our_codes.items()) / len(our_codes)
    print(f"codec {'full size' if args.full else 'tiny'}, {clips} clips of {seconds:g} s at 48 kHz")
    for threads, (speed, _) in loops.items():
        print(f"plain loop, {threads} threads {speed:8.2f} x real time")
    print(
        f"{args.workers} workers            {ours:8.2f} x real time   {ours / plain:.2f} x the loop (target {TARGET})"
    )
    print(f"codes equal to the unchunked clip's: {same:.6%}")
    return 0 if ours / plain >= TARGET and same > 0.9999 else 1


def save_codec(folder: Path, full: bool) -> Path:
    import torch
    from transformers import DacConfig, DacModel

    torch.manual_seed(0)
    size = {} if full else {"encoder_hidden_size": 4, "decoder_hidden_size": 32, "codebook_dim": 4}
    DacModel(DacConfig(sampling_rate=44100, **size)).save_pretrained(folder)
    return folder


def write_corpus(folder: Path, clips: int, seconds: float) -> None:
    import numpy as np
    import soundfile

    folder.mkdir()
    for number in range(clips):
        wave = np.random.default_rng(number).uniform(-0.5, 0.5, round(seconds * 48000))
        soundfile.write(folder / f"{number:03d}.wav", wave, 48000)
        (folder / f"{number:03d}.txt").write_text("x")


def plain_loop(source: Path, weights: Path, out: Path, threads: int) -> tuple[float, dict]:
    import soundfile
    import torch
    import torchaudio.functional
    from transformers import DacModel

    torch.set_num_threads(threads)
    model = DacModel.from_pretrained(weights).eval()
    audio, codes = 0.0, {}
    begin = time.perf_counter()
    with torch.no_grad():
        for file in sorted(source.glob("*.wav")):
            wave, rate = soundfile.read(file, dtype="float32")
            audio += len(wave) / rate
            wave = torchaudio.functional.resample(torch.from_numpy(wave), rate, 44100)
            wave = torch.nn.functional.pad(wave, (0, -len(wave) % 512))
            codes[file.stem] = model.encode(wave[None, None]).audio_codes[0].T
            torch.save(codes[file.stem], out / f"{file.stem}.pt")
    speed = audio / (time.perf_counter() - begin)
    return speed, {id: value.numpy() for id, value in codes.items()}


def our_workers(source: Path, weights: Path, workers: int) -> tuple[float, dict]:
    """Timed once every worker has given a result: loading the codec is not what is compared."""
    from encode import make_job
    from sources import find_clips
    from worker import run_workers

    clips = find_clips(source, "folder")
    job = make_job(clips, "dac", str(weights), False, 0.4, float("inf"))
    audio, begin, end, codes = 0.0, None, None, {}
    warm = workers
    for results in run_workers([(clip, None) for clip in clips], job, workers):
        end = time.perf_counter()
        warm -= 1
        if warm >= 0:
            begin = end
        else:
            audio += sum(result["seconds"] for result in results)
        codes |= {result["id"]: result["codes"].reshape(-1, 9) for result in results}
    return audio / (end - begin), codes


if __name__ == "__main__":
    sys.exit(main())
