"""Make noisy/clean pairs of speech for the enhancers, aligned int16 samples on disk.

    python data/pairs.py --clean train/clean --noisy train/noisy --out pairs/train
    python data/pairs.py --clean speech --noise noises --snr -5:15 --out pairs/mixed
    python data/pairs.py --voicebank VoiceBank-DEMAND --split train --out pairs/train
    python data/pairs.py --source JacobLinCool/VoiceBank-DEMAND-16k --split train --out pairs/train
    python data/pairs.py --dn-lm DN-LM/train --out pairs/drone

Noisy and clean files are matched by relative path without the suffix. Everything is mixed to mono and resampled once,
here. With --noise, the noise file, the offset in it and the SNR depend only on --seed and the name of the clean file,
so the same command makes the same mixtures anywhere. --voicebank reads VoiceBank-DEMAND as it is published: folders
such as clean_trainset_28spk_wav and noisy_testset_wav. --source is a Hugging Face dataset, on disk or on the hub, with
the columns id, clean and noisy. --dn-lm reads DroneNoise-LibriMix: folders with vocals.wav and mixture.wav.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, between, command_parser, run_command
from lib import store
from lib.clips import AUDIO_SUFFIXES, walk
from lib.hf import open_hf
from lib.waveform import Reject, prepare, read_samples

COLUMNS = {"id": "string", "noisy": "int16 list", "clean": "int16 list", "samples": "int32"}


@dataclass(frozen=True)
class Cell:
    """A recording in a Hugging Face dataset."""

    source: str
    split: str
    row: int
    column: str

    @property
    def name(self) -> str:
        return f"{self.column}, row {self.row}"

    def read_bytes(self) -> bytes:
        sound = open_hf(self.source)[self.split].select_columns([self.column])[self.row][self.column]
        return sound["bytes"] or Path(sound["path"]).read_bytes()


@dataclass(frozen=True)
class Pair:
    id: str
    clean: Path | Cell
    other: Path | Cell | None  # the noisy recording, or the noise to mix in; None: missing


@dataclass(frozen=True)
class Settings:
    sample_rate: int
    snr: tuple[float, float] | None  # dB, lowest and highest; None: the noisy files are given
    seed: int
    min_seconds: float


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--clean", type=Path, help="folder of clean speech")
    add("--noisy", type=Path, help="folder of noisy speech with the same file names")
    add("--noise", type=Path, help="folder of noise files to mix in, instead of --noisy")
    add("--voicebank", type=Path, help="folder with VoiceBank-DEMAND as published; with --split")
    add("--source", help="Hugging Face dataset with the columns id, clean and noisy: folder or hub id")
    add("--dn-lm", type=Path, help="folder of folders with vocals.wav and mixture.wav")
    add("--split", help="with --voicebank: train, test, 28spk or 56spk; with --source: a split, if it has several")
    add("--snr", type=snr_range, metavar="LO:HI", help="with --noise: signal-to-noise range in dB, such as -5:15")
    add("--out", required=True, type=Path, help="folder for the dataset")
    add("--sample-rate", type=between(int, 1000, 192000), default=16000, help="sample rate in Hz (default: 16000)")
    add("--seed", type=int, default=0, help="random seed for the mixtures (default: 0)")
    add("--min-seconds", type=between(float, 0), default=0.4, help="reject shorter clips (default: 0.4)")
    add(
        "--max-reject",
        type=between(float, 0, 1),
        default=0.01,
        help="exit with code 1 if more than this fraction is rejected (default: 0.01)",
    )
    workers = min(8, len(os.sched_getaffinity(0)))
    add("--workers", type=between(int, 1), default=workers, help="number of processes (default: CPU cores, at most 8)")
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--snr" in argv[:-1]:  # argparse would read the -5 in "--snr -5:15" as a flag
        index = argv.index("--snr")
        argv[index : index + 2] = [f"--snr={argv[index + 1]}"]
    args = parser.parse_args(argv)
    ways = ("clean", "dn_lm", "voicebank", "source")
    given = [f"--{way.replace('_', '-')}" for way in ways if getattr(args, way)]
    if not given:
        parser.error("one of --clean, --voicebank, --source and --dn-lm is needed")
    if not args.clean and (args.noisy or args.noise):
        given.append("--noisy" if args.noisy else "--noise")
    if len(given) > 1:
        parser.error(f"{given[0]} cannot be used together with {given[1]}")
    if args.clean and (args.noisy is None) == (args.noise is None):
        parser.error("--clean needs either --noisy or --noise")
    if (args.noise is None) != (args.snr is None):
        parser.error("--noise and --snr must be used together")
    if args.voicebank and args.split not in VOICEBANK:
        parser.error(f"--voicebank needs --split with one of {', '.join(VOICEBANK)}")
    if args.split and not (args.voicebank or args.source):
        parser.error("--split is for --voicebank and --source")
    return args


def snr_range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not -100 <= low <= high <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not LO:HI in dB with LO <= HI")
    return low, high


def main() -> int:
    args = parse_args()
    settings = Settings(args.sample_rate, args.snr, args.seed, args.min_seconds)
    if args.dn_lm:
        pairs = find_stems(args.dn_lm)
    elif args.voicebank:
        pairs = find_pairs(*find_voicebank(args.voicebank, args.split), flag="--voicebank")
    elif args.source:
        pairs = find_rows(args.source, args.split)
    else:
        pairs = find_pairs(args.clean, args.noisy) if args.noisy else find_mixtures(args.clean, args.noise, args.seed)
    out = args.out.absolute()
    work = out.with_name(out.name + ".work")
    with store.name_full_disk(out), store.locked(work / "lock"):
        store.restore_interrupted_publish(out)
        info = store.read_dataset_json(out)
        if info and info.get("kind") != "pairs":
            raise UserError(f"--out {out} holds another kind of dataset: choose another path or remove it")
        key = pairs_key(pairs, settings)
        if info and info["key"] == key:
            print(f"nothing to do: {out} already has these {len(pairs)} pairs with these settings (cache hit)")
            rejected = sum(1 for _ in store.read_jsonl(out / "rejects.jsonl"))
        else:
            rejected = write_pairs(pairs, settings, key, work, out, args.workers)
        shutil.rmtree(work, ignore_errors=True)
    if rejected:
        print(f"{rejected} of {len(pairs)} pairs rejected, see {out / 'rejects.jsonl'}")
    if rejected > args.max_reject * len(pairs):
        print(
            f"error: {rejected / len(pairs):.1%} of the pairs were rejected, over --max-reject {args.max_reject:.1%}: "
            "fix or remove them, or raise it",
            file=sys.stderr,
        )
        return 1
    return 0


# ---------------------------------------------------------------- find the files


def audio_files(folder: Path, flag: str) -> dict[str, Path]:
    """id -> file; refuses two files with the same id."""
    if not folder.is_dir():
        raise UserError(f"{flag} {folder} is not a folder")
    files = {}
    for file in walk(folder):
        if file.suffix.lower() in AUDIO_SUFFIXES:
            id = file.relative_to(folder).with_suffix("").as_posix()
            if id in files:
                raise UserError(f"two files have the id {id}: {files[id]} and {file}; rename one of them")
            files[id] = file
    if not files:
        raise UserError(f"no audio files found in {flag} {folder}")
    return files


def find_pairs(clean: Path, noisy: Path, flag: str = "") -> list[Pair]:
    """`flag`: the one that both folders come from, if it is one."""
    clean_files, noisy_files = audio_files(clean, flag or "--clean"), audio_files(noisy, flag or "--noisy")
    unmatched = sorted(noisy_files.keys() - clean_files.keys())
    if unmatched:
        print(f"{len(unmatched)} noisy files have no clean file and are left out: {', '.join(unmatched[:5])}")
    return [Pair(id, file, noisy_files.get(id)) for id, file in sorted(clean_files.items())]


VOICEBANK = {
    "train": ("trainset_28spk_wav", "trainset_56spk_wav"),
    "test": ("testset_wav",),
    "28spk": ("trainset_28spk_wav",),
    "56spk": ("trainset_56spk_wav",),
}


def find_voicebank(folder: Path, split: str) -> tuple[Path, Path]:
    """The folders of clean and of noisy speech in VoiceBank-DEMAND as it is published."""
    found = [name for name in VOICEBANK[split] if (folder / f"clean_{name}").is_dir()]
    if not found:
        raise UserError(f"--voicebank {folder} has no folder clean_{' or clean_'.join(VOICEBANK[split])}")
    if len(found) > 1:
        raise UserError(f"--voicebank {folder} has two training sets: choose one with --split 28spk or --split 56spk")
    return folder / f"clean_{found[0]}", folder / f"noisy_{found[0]}"


def find_rows(source: str, split: str | None) -> list[Pair]:
    """The rows of a Hugging Face dataset; audio is read later, row by row."""
    splits = open_hf(source)
    if split is None and len(splits) > 1:
        raise UserError(f"--source {source} has the splits {', '.join(splits)}: choose one with --split")
    split = next(iter(splits)) if split is None else split
    if split not in splits:
        raise UserError(f"--source {source} has no split {split}; it has {', '.join(filter(None, splits)) or 'none'}")
    names = splits[split].column_names
    if not {"clean", "noisy"} <= set(names):
        raise UserError(f"--source {source} needs the columns id, clean and noisy; it has {', '.join(names)}")
    ids = splits[split]["id"] if "id" in names else [f"{number:08d}" for number in range(len(splits[split]))]
    pairs = {}
    for row, id in enumerate(map(str, ids)):
        if id in pairs:
            raise UserError(f"--source {source}: two rows have the id {id}")
        pairs[id] = Pair(id, *(Cell(source, split, row, column) for column in ("clean", "noisy")))
    return list(pairs.values())


def find_stems(folder: Path) -> list[Pair]:
    """DroneNoise-LibriMix: vocals.wav is the clean speech, mixture.wav the noisy speech."""
    files = audio_files(folder, "--dn-lm")
    names = sorted(name.rpartition("/")[0] for name in files if name.rpartition("/")[2] == "vocals")
    if not names:
        raise UserError(f"--dn-lm {folder} has no folders with vocals.wav and mixture.wav")
    return [Pair(name, files[f"{name}/vocals"], files.get(f"{name}/mixture")) for name in names]


def find_mixtures(clean: Path, noise: Path, seed: int) -> list[Pair]:
    """Every clean file with the noise file that is to be mixed in."""
    noises = sorted(audio_files(noise, "--noise").values())
    clean_files = audio_files(clean, "--clean")
    return [Pair(id, file, noises[keyed(seed, id, "noise", len(noises))]) for id, file in sorted(clean_files.items())]


def keyed(seed: int, id: str, purpose: str, count: int) -> int:
    """A number below `count` that depends only on seed, id and purpose."""
    digest = hashlib.blake2b(json.dumps([seed, id, purpose]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count


def pairs_key(pairs: list[Pair], settings: Settings) -> str:
    """A hash that changes with any file or setting."""
    digest = hashlib.sha256(repr(settings).encode())
    for pair in pairs:
        for file in (pair.clean, pair.other):
            if isinstance(file, Cell):
                state = open_hf(file.source)[file.split]._fingerprint
            else:
                stat = file.stat() if file and file.exists() else None
                state = stat and (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            digest.update(f"{pair.id}|{file}|{state}".encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- make one pair


def make_pair(pair: Pair, settings: Settings) -> dict:
    """A row of the dataset, or a reject with its reason."""
    try:
        if pair.other is None:
            raise Reject("no noisy file with this name")
        clean = read_side(pair.clean, settings)
        if settings.snr:
            noisy = mix(clean, read_side(pair.other, settings), pair.id, settings)
        else:
            noisy = read_side(pair.other, settings)
            if abs(len(clean) - len(noisy)) > 1:  # a difference of one sample comes from resampling
                raise Reject(f"clean has {len(clean)} samples and noisy {len(noisy)}")
        samples = min(len(clean), len(noisy))
        noisy, clean = to_int16(noisy[:samples], clean[:samples])
        return {"id": pair.id, "noisy": noisy, "clean": clean, "samples": samples}
    except Reject as reason:
        return {"id": pair.id, "clean_file": str(pair.clean), "other_file": str(pair.other), "reason": str(reason)}


def read_side(file: Path | Cell, settings: Settings) -> np.ndarray:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Reject(f"{file.name}: unreadable file: {error.strerror}") from None
    try:
        wave, rate = read_samples(data, None, None)
        return prepare(wave, rate, settings.sample_rate, min_seconds=settings.min_seconds)[0].numpy()
    except Reject as reason:
        raise Reject(f"{file.name}: {reason}") from None


def mix(clean: np.ndarray, noise: np.ndarray, id: str, settings: Settings) -> np.ndarray:
    """Clean speech plus noise, with keyed offset and SNR; a noise shorter than the speech is repeated."""
    low, high = settings.snr
    steps = 1 << 20
    snr = low + (high - low) * keyed(settings.seed, id, "snr", steps + 1) / steps
    start = keyed(settings.seed, id, "place", len(noise))
    noise = np.take(noise, np.arange(start, start + len(clean)), mode="wrap")
    noise_power = np.mean(np.square(noise, dtype=np.float64))
    if noise_power == 0:
        raise Reject("the noise is silent at this offset")
    gain = np.sqrt(np.mean(np.square(clean, dtype=np.float64)) / noise_power / 10 ** (snr / 10))
    return clean + np.float32(gain) * noise


def to_int16(*waves: np.ndarray) -> list[np.ndarray]:
    """16-bit samples; if one wave would clip, all are scaled down alike, which keeps their ratio."""
    peak = max(1.0, *(np.abs(wave).max() for wave in waves))
    return [np.round(wave * (32767 / peak)).astype(np.int16) for wave in waves]


# ---------------------------------------------------------------- write the dataset


def write_pairs(pairs: list[Pair], settings: Settings, key: str, work: Path, out: Path, workers: int) -> int:
    """Make all pairs and write the dataset; returns the number of rejected pairs."""
    rejects, lengths = [], []

    def rows() -> Iterator[dict]:
        results = in_order(partial(make_pair, settings=settings), pairs, workers)
        for row in tqdm(results, total=len(pairs), unit="pair", file=sys.stderr, mininterval=1.0):
            if "reason" in row:
                rejects.append(row)
            else:
                lengths.append(row["samples"])
                yield row

    folder = work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    files = store.write_dataset(folder, rows(), COLUMNS)
    if not files:
        raise UserError(f"all {len(pairs)} pairs were rejected; the first: {rejects[0]['id']}: {rejects[0]['reason']}")
    store.write_jsonl(folder / "rejects.jsonl", rejects)
    info = {
        "format": 1,
        "kind": "pairs",
        "sample_rate": settings.sample_rate,
        "rows": len(lengths),
        "samples": sum(lengths),
        "settings": {
            "snr": settings.snr,
            "seed": settings.seed,
            "min_seconds": settings.min_seconds,
            "resampler": "torchaudio sinc_interp_hann",
        },
        "versions": store.versions("torch", "torchaudio", "datasets", "soundfile"),
        "files": files,
        "key": key,
    }
    store.write_json(folder / "dataset.json", info)
    store.publish(folder, out)
    print(f"wrote {info['rows']} pairs, {info['samples'] / settings.sample_rate / 3600:.3f} h to {out}")
    return len(rejects)


def in_order(function, items: list, workers: int) -> Iterator:
    """Like map(), but in `workers` processes and with a bounded number of results in memory."""
    if workers == 1 or len(items) < 64:  # starting a process takes seconds
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 8 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


if __name__ == "__main__":
    run_command(main)
