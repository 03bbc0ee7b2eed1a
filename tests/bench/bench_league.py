"""Both enhancers, trained on a minute of real noisy speech, beside enhancers from the package registry.

    pip install --no-deps --target peers pyrnnoise webrtc-noise-gain noisereduce
    PYTHONPATH=peers python tests/bench/bench_league.py --recordings FOLDER --work league [--steps 650 1500]

FOLDER holds clean/*.wav and noisy/*.wav, pairs of the same name, and may hold voices/*.wav, more clean speech. The
files of --test are never trained on, and those of --judge choose the checkpoint. The noise of every other noisy file
(noisy minus clean) is also mixed onto all other clean speech, at 0 to 15 dB. Takes an hour of one core with the default
number of steps (CMGAN's, Diffusion Buffer's); the same command continues, and --steps 0 0 measures only the packages.
Delays of all outputs, up to 50 ms, are removed before they are compared.
"""

import argparse
import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "finetune"))
from common.speech_metrics import pesq_wb, si_sdr, stoi  # noqa: E402

RATE = 16000
SHARED = "--ranks 1 --precision fp32 --schedule cosine --warmup 50 --ema 0.99 --save-every 250 --samples 0"
TRAINING = {
    "cmgan": f"{SHARED} --channels 8 --disc-channels 8 --seconds 1 --micro-batch 2 --lr 1e-3"
    " --no-gradient-checkpointing --pesq-workers 1 --probe 24 --eval-every 250",
    # Its evaluation streams, frame by frame.
    "diffusion_buffer": f"{SHARED} --width 16 --frames 64 --buffer 20 --micro-batch 4 --lr 1e-3 --best-by pesq"
    " --eval-every 500",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for mixtures, runs and enhanced files")
    parser.add_argument("--steps", type=int, nargs=2, default=[650, 1500], help="of both trainings; 0: leave it out")
    parser.add_argument("--test", nargs="+", default=["p232_003", "p232_019", "p232_024", "p232_170"])
    parser.add_argument("--judge", nargs="+", default=["p232_014", "p232_052"])
    args = parser.parse_args()
    work = args.work.absolute()
    if not (work / "pairs" / "judge").exists():
        prepare(args.recordings, work, args.test, args.judge)
    test = {name: read(work / "test" / "clean" / f"{name}.wav") for name in args.test}
    noisy = {name: read(work / "test" / "noisy" / f"{name}.wav") for name in args.test}

    enhanced = {"noisy, as recorded": noisy}
    for label, package, enhance in PEERS:
        if find_spec(package):
            enhanced[label] = {name: enhance(wave) for name, wave in noisy.items()}
    for (recipe, flags), steps in zip(TRAINING.items(), args.steps, strict=True):
        if steps:
            train(recipe, flags, steps, work)
            enhanced[f"{recipe}, {steps} steps here"] = {name: read(work / recipe / f"{name}.wav") for name in test}
    print("\n| enhancer | PESQ | SI-SDR | ESTOI |\n|---|---|---|---|")
    for label, waves in enhanced.items():
        scores = np.mean([measures(test[name], aligned(wave, test[name])) for name, wave in waves.items()], axis=0)
        print("| {} | {:.2f} | {:.1f} dB | {:.3f} |".format(label, *scores))


def measures(clean: np.ndarray, wave: np.ndarray) -> list[float]:
    return [pesq_wb(clean, wave)[0], si_sdr(clean, wave), stoi(clean, wave, extended=True)]


# ---- data ------------------------------------------------------------------------------------------------------


def prepare(recordings: Path, work: Path, test: list[str], judge: list[str]) -> None:
    clean = {file.stem: read(file) for file in sorted((recordings / "clean").glob("*.wav"))}
    noisy = {file.stem: read(file) for file in sorted((recordings / "noisy").glob("*.wav"))}
    trained = [name for name in clean if name not in (*test, *judge)]
    for split, names in {"train": trained, "judge": judge, "test": test}.items():
        for name in names:
            write(work / split, name, clean[name], noisy[name])

    voices = {file.stem: read(file) for file in sorted((recordings / "voices").glob("*.wav"))}
    draw = np.random.default_rng(0)
    for speaker, speech in ({name: clean[name] for name in trained} | voices).items():
        for source in trained:
            if source != speaker:
                noise = noisy[source] - clean[source]
                noise = np.resize(np.roll(noise, draw.integers(len(noise))), len(speech))
                loudness = np.sqrt(np.mean(speech**2) / np.mean(noise**2)) * 10 ** (-draw.uniform(0, 15) / 20)
                write(work / "train", f"{speaker}-{source}", speech, speech + loudness * noise)
    for split in ("train", "judge"):
        folders = ["--clean", work / split / "clean", "--noisy", work / split / "noisy"]
        subprocess.run([sys.executable, ROOT / "data/pairs.py", *folders, "--out", work / "pairs" / split], check=True)


def write(folder: Path, name: str, clean: np.ndarray, noisy: np.ndarray) -> None:
    scale = min(1.0, 0.95 / max(np.abs(noisy).max(), np.abs(clean).max()))
    for side, wave in (("clean", clean), ("noisy", noisy)):
        (folder / side).mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / side / f"{name}.wav", scale * wave, RATE)


def read(file: Path) -> np.ndarray:
    wave, rate = soundfile.read(file, dtype="float32")
    return resampled(wave if wave.ndim == 1 else wave.mean(1), rate, RATE)


def resampled(wave: np.ndarray, rate: int, target: int) -> np.ndarray:
    import torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(np.ascontiguousarray(wave, dtype=np.float32)), rate, target).numpy()


def aligned(wave: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """As long as the clean speech, without the enhancer's delay."""
    reach = RATE // 20
    padded = np.pad(wave, (reach, reach + len(clean)))
    shifts = range(2 * reach + 1)
    best = max(shifts, key=lambda shift: np.dot(padded[shift : shift + len(clean)], clean))
    return padded[best : best + len(clean)]


# ---- the enhancers ---------------------------------------------------------------------------------------------


def train(recipe: str, flags: str, steps: int, work: Path) -> None:
    run, launch = work / "runs" / f"{recipe}-{steps}", str(ROOT / "launch.sh")
    data = ["--data", work / "pairs" / "train", "--eval-data", work / "pairs" / "judge"]
    if not (run / "export").exists():
        command = [launch, recipe, *flags.split(), *data, "--steps", str(steps), "--out", run]
        subprocess.run(command, check=True)
    subprocess.run(
        [launch, "enhance", "--run", run, "--source", work / "test" / "noisy", "--out", work / recipe], check=True
    )


def rnnoise(wave: np.ndarray) -> np.ndarray:
    """By its C library alone: the package imports more than it needs."""
    library = ctypes.CDLL(str(Path(next(iter(find_spec("pyrnnoise").submodule_search_locations))) / "librnnoise.so"))
    library.rnnoise_create.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.rnnoise_create(None))
    frames = resampled(wave, RATE, 48000) * 32768
    frames = np.pad(frames, (0, -len(frames) % 480)).reshape(-1, 480).astype(np.float32)
    for frame in frames:
        pointer = frame.ctypes.data_as(ctypes.c_void_p)
        library.rnnoise_process_frame(state, pointer, pointer)
    return resampled(frames.reshape(-1) / 32768, 48000, RATE)


def webrtc(wave: np.ndarray) -> np.ndarray:
    from webrtc_noise_gain import AudioProcessor

    processor = AudioProcessor(0, 4)  # no gain control, the strongest suppression
    frames = np.pad(wave, (0, -len(wave) % 160)).reshape(-1, 160)
    frames = np.round(frames * 32767).astype(np.int16)
    made = b"".join(processor.Process10ms(frame.tobytes()).audio for frame in frames)
    return np.frombuffer(made, np.int16).astype(np.float32) / 32768


def spectral_gating(wave: np.ndarray) -> np.ndarray:
    from noisereduce import reduce_noise

    return reduce_noise(y=wave, sr=RATE)


PEERS = [
    ("RNNoise (pyrnnoise)", "pyrnnoise", rnnoise),
    ("WebRTC's noise suppression (webrtc-noise-gain)", "webrtc_noise_gain", webrtc),
    ("spectral gating (noisereduce)", "noisereduce", spectral_gating),
]


if __name__ == "__main__":
    main()
