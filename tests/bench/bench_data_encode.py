"""Encoding speed: data/encode.py's workers against the plain loop over files with the same codec.

    python tests/bench/bench_data_encode.py          # the tiny codec
    python tests/bench/bench_data_encode.py --full   # a DAC of the real size (76.6 M), random weights

The plain loop is what earlier trainers ran: read, resample, encode the whole clip, save a .pt, one thread. Wall
time counts on an idle machine only; the ratio of CPU time per second of audio, times the workers, is what idle
cores would show, and is what the target is checked on: at least 1.6 times as fast, with the same codes.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import psutil

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
        plain, plain_cpu, plain_codes = plain_loop(folder / "in", weights, folder)
        ours, our_cpu, our_codes = our_workers(folder / "in", weights, args.workers)
    same = sum((plain_codes[id] == codes).mean() for id, codes in our_codes.items()) / len(our_codes)
    print(f"codec {'full size' if args.full else 'tiny'}, {clips} clips of {seconds:g} s at 48 kHz")
    ratio = args.workers * plain_cpu / our_cpu
    print(f"plain loop   {plain:7.2f} x real time by the clock, {plain_cpu:.4f} CPU seconds a second of audio")
    print(
        f"{args.workers} workers    {ours:7.2f} x real time by the clock, {our_cpu:.4f} CPU seconds a second of audio"
    )
    print(f"ratio        {ours / plain:7.2f} by the clock, {ratio:.2f} by CPU time on idle cores (target {TARGET})")
    print(f"codes equal to the unchunked clip's: {same:.6%}")
    return 0 if ratio >= TARGET and same > 0.9999 else 1


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


def plain_loop(source: Path, weights: Path, out: Path) -> tuple[float, float, dict]:
    import soundfile
    import torch
    import torchaudio.functional
    from transformers import DacModel

    torch.set_num_threads(1)
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
            begin, cpu = end, cpu_of_children()
        else:
            audio += sum(result["seconds"] for result in results)
            spent = cpu_of_children() - cpu
        codes |= {result["id"]: result["codes"].reshape(-1, 9) for result in results}
    return audio / (end - begin), spent / audio, codes


def cpu_of_children() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


if __name__ == "__main__":
    sys.exit(main())
