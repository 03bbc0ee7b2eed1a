"""Encoding speed: data/encode.py's workers against the plain loop over files with the same codec.

    python tests/bench/bench_data_encode.py          # the tiny codec
    python tests/bench/bench_data_encode.py --full   # a DAC of the real size (76.6 M), random weights

The plain loop is what earlier trainers ran: read, resample, encode the whole clip, save a .pt. It runs with torch's
default of a thread a core and with one thread; both sides take turns, and each side's best round by the clock counts.
A clock is only as good as the machine is idle, so CPU seconds a second of audio stand beside it. With --full the limit
is what the cores would reach if they did nothing but the codec's multiplications.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "tests")]
from helpers.bench_rows import Row, report  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clips, seconds = (10, 2.5) if args.full else (96, 3.0)
    cores = multiprocessing.cpu_count()
    names = {cores: f"plain loop, {cores} threads", 1: "plain loop, 1 thread"}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        weights = save_codec(folder / "codec", args.full)
        write_corpus(folder / "in", clips, seconds)
        rounds = {name: [] for name in [*names.values(), f"{args.workers} workers"]}
        for _ in range(args.rounds):
            for threads, name in names.items():
                *figures, plain_codes = plain_loop(folder / "in", weights, folder, threads)
                rounds[name].append(figures)
            *figures, our_codes = our_workers(folder / "in", weights, args.workers)
            rounds[f"{args.workers} workers"].append(figures)
        limit = cores * product_limit(weights) if args.full else 0.0
    same = sum((plain_codes[id] == codes).mean() for id, codes in our_codes.items()) / len(our_codes)
    print(f"codec {'full size' if args.full else 'tiny'}, {clips} clips of {seconds:g} s at 48 kHz")
    print(f"{'side':24} {'x real time':>12} {'CPU s a second of audio':>24} {'ours is faster by':>18}")
    ours = max(speed for speed, _ in rounds[f"{args.workers} workers"])
    for name, figures in rounds.items():
        speed, cpu = max(speed for speed, _ in figures), min(cpu for _, cpu in figures)
        print(f"{name:24} {speed:12.2f} {cpu:24.4f} {ours / speed:18.2f}")
    print(f"codes equal to the unchunked clip's: {same:.6%}")
    if args.full:
        plain = max(speed for speed, _ in rounds[names[cores]])
        what = f"encoding with the full-size codec, x real time on {cores} cores"
        peer, limit = f"{plain:.2f} ({names[cores]})", f"{limit:.2f} (its products alone)"
        report(Row("P19", what, f"{ours:.2f}", ours / plain, ">= 1.8", peer, limit))
    return 0 if same > 0.9999 else 1


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


def plain_loop(source: Path, weights: Path, out: Path, threads: int) -> tuple[float, float, dict]:
    import soundfile
    import torch
    import torchaudio.functional
    from transformers import DacModel

    torch.set_num_threads(threads)
    model = DacModel.from_pretrained(weights).eval()
    audio, codes = 0.0, {}
    begin, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        for file in sorted(source.glob("*.wav")):
            wave, rate = soundfile.read(file, dtype="float32")
            audio += len(wave) / rate
            wave = torchaudio.functional.resample(torch.from_numpy(wave), rate, 44100)
            wave = torch.nn.functional.pad(wave, (0, -len(wave) % 512))
            codes[file.stem] = model.encode(wave[None, None]).audio_codes[0].T
            torch.save(codes[file.stem], out / f"{file.stem}.pt")
    speed, cpu = audio / (time.perf_counter() - begin), (time.process_time() - cpu) / audio
    return speed, cpu, {id: value.numpy() for id, value in codes.items()}


def our_workers(source: Path, weights: Path, workers: int) -> tuple[float, float, dict]:
    """Timed once every worker has given a result: loading the codec is not what is compared."""
    from encode import make_job

    from lib.pool import run_workers
    from lib.sources import find_clips

    clips = find_clips(source, "folder")
    job = make_job(clips, "dac", str(weights), None, False, 0.4, float("inf"))
    audio, begin, end, codes = 0.0, None, None, {}
    warm = workers
    for results in run_workers([(clip, None) for clip in clips], job, workers):
        end = time.perf_counter()
        warm -= 1
        if warm >= 0:
            begin, cpu = end, cpu_of_children()
        else:
            audio += sum(result["seconds"] for result in results)
            spent = cpu_of_children() - cpu
        codes |= {result["id"]: result["codes"].reshape(-1, 9) for result in results}
    return audio / (end - begin), spent / audio, codes


def product_limit(weights: Path) -> float:
    """How many seconds of audio one core could encode per second if it only multiplied and added, as fast as it
    multiplies large matrices."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import DacModel

    torch.set_num_threads(1)
    model, matrix, times = DacModel.from_pretrained(weights).eval(), torch.rand(1024, 1024), []
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.encode(torch.zeros(1, 1, 44032))
    for _ in range(20):
        began = time.process_time()
        matrix @ matrix
        times.append(time.process_time() - began)
    return 2 * 1024**3 / min(times) / (counter.get_total_flops() / (44032 / 44100))


def cpu_of_children() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


if __name__ == "__main__":
    sys.exit(main())
