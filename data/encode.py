"""Audio and text -> codec tokens on disk, once, offline, resumable.

    python data/encode.py --codec dac --codec-weights descript/dac_44khz --source my_clips --out tokens/train
    python data/encode.py --codec dac --codec-weights ./dac --format jsonl --source a.jsonl --out tokens/a

Killed at any moment, the same command continues: finished clips wait in OUT.work and are not encoded again
unless their audio or a setting changed. OUT itself appears complete or not at all.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sources import LABELS, READERS, Clip, find_clips
from usage import UsageError, run

CODEC_NAMES = ("dac",)
CLIPS_PER_TASK = 16  # what a worker takes at once: clips that follow each other often share a file
SECONDS_PER_PART = 20.0  # finished clips are made durable at least this often


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--codec", required=True, choices=CODEC_NAMES)
    add(
        "--codec-weights",
        required=True,
        metavar="PATH_OR_ID",
        help="a local path or a hub id (descript/dac_44khz)",
    )
    add("--source", required=True, type=Path, help="folder or manifest, as --format says")
    add("--format", choices=sorted(READERS), default="folder", help="what --source is (default: folder)")
    add("--out", required=True, type=Path, help="folder of the token dataset")
    add("--prompts", type=Path, help="folder with <stem>.txt or <stem>_prompt.txt (default: SOURCE/prompts)")
    add(
        "--audio-root",
        type=Path,
        help="folder that manifest paths start from (default: the manifest's folder)",
    )
    add(
        "--missing-text",
        choices=("error", "skip", "empty"),
        default="error",
        help="a clip without text stops the command, is left out, or gets an empty text (default: error)",
    )
    add(
        "--stereo",
        action="store_true",
        help="encode left and right alone: twice the channels, L block then R block",
    )
    add("--min-seconds", type=float, default=0.4, help="shorter clips are rejected (default: 0.4)")
    add(
        "--max-reject",
        type=float,
        default=0.01,
        help="share of rejected clips that is still a success (default: 0.01)",
    )
    add("--workers", type=int, default=1, help="processes, one codec each (default: 1)")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    clips = find_clips(args.source, args.format, args.prompts, args.audio_root, args.missing_text)
    print(f"{len(clips)} clips in {args.source}")
    return encode_dataset(
        clips,
        args.out,
        codec=args.codec,
        weights=args.codec_weights,
        stereo=args.stereo,
        min_seconds=args.min_seconds,
        max_reject=args.max_reject,
        workers=args.workers,
    )


def encode_dataset(
    clips: list[Clip],
    out: Path,
    codec: str,
    weights: str,
    stereo: bool = False,
    min_seconds: float = 0.4,
    max_reject: float = 0.01,
    workers: int = 1,
) -> int:
    """Encode what is not yet encoded, then write the dataset; 0, or 1 when too many clips were rejected."""
    import codec as codecs
    import store

    path = codecs.find_weights(weights)
    kind = codecs.kind_of(path)
    if kind != codec:
        raise UsageError(f"--codec {codec} does not fit --codec-weights {weights}, which is a {kind} codec")
    job = Job(str(path), codecs.hash_weights(path), kind, stereo, min_seconds)
    out = out.absolute()
    work = out.with_name(out.name + ".work")
    with store.clear_disk_errors(out), store.locked(work / "lock"):
        store.restore_interrupted_publish(out)
        refuse_other_codec(out, job)
        done = load_finished(out, work, job)
        todo = unfinished(clips, done)
        if todo and len(todo) < len(clips):
            print(f"{len(clips) - len(todo)} clips are encoded already, {len(todo)} to look at")
        encode_missing(todo, job, workers, work, done)
        if is_current(out, clips, done, job):
            print(f"nothing to do: {out} holds these {len(clips)} clips with these settings (cache hit)")
        else:
            write_tokens(clips, done, job, weights, work, out)
        shutil.rmtree(work, ignore_errors=True)
    return verdict(clips, done, max_reject)


# ---------------------------------------------------------------- what is done already


@dataclass(frozen=True)
class Job:
    """Everything that decides which codes a clip gets."""

    path: str
    weights_sha256: str
    codec: str
    stereo: bool
    min_seconds: float

    def settings(self) -> dict:
        return {
            "stereo": self.stereo,
            "min_seconds": self.min_seconds,
            "resampler": "torchaudio sinc_interp_hann",
        }

    def key(self) -> str:
        text = json.dumps([self.codec, self.weights_sha256, self.settings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Finished:
    """One clip that was looked at: its codes, or why it has none."""

    source: str  # SHA-256 of the audio file, and the part of it
    codes: object = None  # flat int16
    frames: int = 0
    reject: str = ""


@dataclass
class Done:
    clips: dict[str, Finished]
    files: dict[
        str, tuple[str, str]
    ]  # audio path -> (stat, SHA-256): an untouched file need not be read again


def file_stat(path: Path) -> str:
    """Changes whenever the file does: ctime cannot be set back."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def source_key(clip: Clip, sha256: str) -> str:
    return f"{sha256}:{clip.start}:{clip.end}"


def load_finished(out: Path, work: Path, job: Job) -> Done:
    """Clips of the dataset at `out` and of an interrupted run's parts, if made with these settings."""
    import store

    done = Done({}, {})
    info = store.read_dataset_json(out)
    if info and info.get("key") == job.key():
        for entry in info["files"]:
            add_arrow(done, out / entry["name"])
        for item in store.read_jsonl(out / "rejects.jsonl"):
            done.clips[item["id"]] = Finished(item["source"], reject=item["reason"])
        for item in store.read_jsonl(out / "sources.jsonl"):
            done.files[item["audio"]] = (item["stat"], item["sha256"])
    for file in sorted(work.glob(f"part-{job.key()}-*.arrow")):
        add_arrow(done, file)
    for item in store.read_jsonl(work / "sources.jsonl"):
        done.files[item["audio"]] = (item["stat"], item["sha256"])
    return done


def add_arrow(done: Done, file: Path) -> None:
    import store

    for batch in store.read_arrow(file):
        names = batch.schema.names
        codes = batch.column("codes")
        rejects = batch.column("reject").to_pylist() if "reject" in names else [""] * len(batch)
        columns = (batch.column(name).to_pylist() for name in ("id", "source", "frames"))
        for row, (id, source, frames) in enumerate(zip(*columns, strict=True)):
            done.clips[id] = Finished(source, (codes, row), frames, rejects[row])


def unfinished(clips: list[Clip], done: Done) -> list[tuple[Clip, str | None]]:
    """Clips to hand to a worker, with the source they were last seen with (None: never)."""
    todo = []
    for clip in clips:
        finished = done.clips.get(clip.id)
        stat, sha256 = done.files.get(str(clip.audio), ("", ""))
        if (
            finished
            and stat
            and stat == file_stat(clip.audio)
            and finished.source == source_key(clip, sha256)
        ):
            continue
        todo.append((clip, finished.source if finished else None))
    return todo


def is_current(out: Path, clips: list[Clip], done: Done, job: Job) -> bool:
    import store

    info = store.read_dataset_json(out)
    return bool(info) and info.get("key") == job.key() and info.get("clips") == clips_key(clips, done)


def clips_key(clips: list[Clip], done: Done) -> str:
    """Changes with any text, label, clip or source of the dataset."""
    digest = hashlib.sha256()
    for clip in clips:
        fields = asdict(clip) | {"audio": None, "source": done.clips[clip.id].source}
        digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def refuse_other_codec(out: Path, job: Job) -> None:
    import store

    info = store.read_dataset_json(out)
    if info and (info.get("codec"), info.get("weights_sha256")) != (job.codec, job.weights_sha256):
        raise UsageError(
            f"--out {out} holds codes of another codec ({info.get('codec')}, weights {info.get('weights')}): "
            "give another --out or remove it"
        )


# ---------------------------------------------------------------- encoding


def encode_missing(todo: list, job: Job, workers: int, work: Path, done: Done) -> None:
    """Encode in this process or in `workers` processes; keep what is finished in part files."""
    from tqdm import tqdm

    if not todo:
        return
    tasks = [todo[i : i + CLIPS_PER_TASK] for i in range(0, len(todo), CLIPS_PER_TASK)]
    waiting, saved_at, begin, audio_seconds = [], time.monotonic(), time.monotonic(), 0.0
    part = len(list(work.glob("part-*.arrow")))
    with tqdm(total=len(todo), unit="clip", file=sys.stderr, mininterval=1.0) as bar:
        for results in run_tasks(tasks, job, workers):
            waiting += results
            audio_seconds += sum(result["seconds"] for result in results)
            bar.update(len(results))
            speed = audio_seconds / max(time.monotonic() - begin, 1e-6)
            bar.set_postfix_str(f"{audio_seconds / 3600:.3f} h audio, {speed:.1f}x real time", refresh=False)
            if time.monotonic() - saved_at > SECONDS_PER_PART or bar.n == len(todo):
                save_part(work / f"part-{job.key()}-{part:06d}.arrow", waiting, done)
                part, waiting, saved_at = part + 1, [], time.monotonic()


PART_COLUMNS = {
    "id": "string",
    "source": "string",
    "codes": "int16 list",
    "frames": "int32",
    "reject": "string",
}


def save_part(file: Path, results: list[dict], done: Done) -> None:
    import store

    fresh = [result for result in results if not result["unchanged"] and result["source"]]
    if fresh:
        store.write_arrow(file, fresh, PART_COLUMNS)
        add_arrow(done, file)
    for result in results:
        if not result["source"]:  # could not even be read: looked at again by the next run
            done.clips[result["id"]] = Finished("", reject=result["reject"])
    lines = {r["audio"]: (r["stat"], r["sha256"]) for r in results if r["sha256"]}
    with open(file.parent / "sources.jsonl", "a", encoding="utf-8") as stream:
        for audio, (stat, sha256) in lines.items():
            stream.write(
                json.dumps({"audio": audio, "stat": stat, "sha256": sha256}, ensure_ascii=False) + "\n"
            )
    done.files |= lines


def run_tasks(tasks: list, job: Job, workers: int) -> Iterator[list[dict]]:
    workers = min(workers, len(tasks))
    if workers <= 1:
        start_worker(job, None)
        yield from map(encode_task, tasks)
        return
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(workers):
        numbers.put(number)
    with context.Pool(workers, start_worker, (job, numbers)) as pool:
        yield from pool.imap_unordered(encode_task, tasks)


WORKER: dict = {}  # this process's codec and job


def start_worker(job: Job, numbers) -> None:
    WORKER.update(job=job, number=numbers.get() if numbers else None, codec=None, file=(None, b"", ""))


def worker_codec():
    """Loaded by the first clip that needs it: a run that only finds unchanged files needs none."""
    if WORKER["codec"] is None:
        import torch
        from codec import load_codec

        if WORKER["number"] is not None:
            torch.set_num_threads(1)  # one core a worker: threads of several codecs would only fight
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{(WORKER['number'] or 0) % torch.cuda.device_count()}"
        WORKER["codec"] = load_codec(Path(WORKER["job"].path), device)
    return WORKER["codec"]


def encode_task(task: list[tuple[Clip, str | None]]) -> list[dict]:
    return [encode_clip(clip, last_source) for clip, last_source in task]


def encode_clip(clip: Clip, last_source: str | None) -> dict:
    """What one clip became, as plain values that travel between processes."""
    from waveform import Reject, prepare, read_samples

    job = WORKER["job"]
    result = {
        "id": clip.id,
        "audio": str(clip.audio),
        "stat": file_stat(clip.audio),  # before reading: a change while we read shows as changed next time
        "sha256": "",
        "source": "",
        "codes": [],
        "frames": 0,
        "seconds": 0.0,
        "reject": "",
        "unchanged": False,
    }
    try:
        data, result["sha256"] = read_file(clip.audio)
        result["source"] = source_key(clip, result["sha256"])
        if result["source"] == last_source:
            return result | {"unchanged": True}
        wave, rate = read_samples(data, clip.audio, clip.start, clip.end)
        result["seconds"] = wave.shape[1] / rate
        codec = worker_codec()
        wave = prepare(wave, rate, codec.sample_rate, job.stereo, job.min_seconds)
        codes = encode_wave(codec, wave, job.stereo)
        return result | {"codes": codes.reshape(-1), "frames": len(codes)}
    except Reject as reason:
        return result | {"reject": str(reason)}


def encode_wave(codec, wave, stereo: bool):
    """(T, C) int16; for a stereo job L and R side by side, R a copy of L's codes where the source is mono."""
    import numpy as np
    import torch

    codes = [codec.encode(channel) for channel in wave]
    if stereo and len(codes) == 1:
        codes *= 2
    codes = torch.cat(codes, dim=1).numpy()
    assert 0 <= codes.min() and codes.max() < codec.codebook_size, (
        "the codec gave codes outside its own range"
    )
    return codes.astype(np.int16)


def read_file(path: Path) -> tuple[bytes, str]:
    """Bytes and SHA-256; the last file is kept, for a long recording comes as many clips in a row."""
    from waveform import Reject

    if WORKER["file"][0] != path:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Reject(f"unreadable file: {error.strerror}") from None
        WORKER["file"] = (path, data, hashlib.sha256(data).hexdigest())
    return WORKER["file"][1:]


# ---------------------------------------------------------------- writing


def write_tokens(clips: list[Clip], done: Done, job: Job, weights: str, work: Path, out: Path) -> None:
    import codec as codecs
    import store

    kept = [clip for clip in clips if not done.clips[clip.id].reject]
    if not kept:
        first = done.clips[clips[0].id].reject
        raise UsageError(
            f"every one of the {len(clips)} clips was rejected; the first: {clips[0].id}: {first}"
        )
    labels = [label for label in LABELS if any(getattr(clip, label) for clip in kept)]
    columns = {"id": "string", "text": "string", "codes": "int16 list", "frames": "int32"}
    columns |= {label: "string" for label in labels} | {"source": "string"}
    folder = work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    files = store.write_dataset(folder, token_rows(kept, done, labels), columns, sums=("frames",))
    rejected = [clip for clip in clips if done.clips[clip.id].reject]
    store.write_jsonl(folder / "rejects.jsonl", (reject_line(clip, done.clips[clip.id]) for clip in rejected))
    audio_files = sorted({str(clip.audio) for clip in clips} & done.files.keys())
    store.write_jsonl(
        folder / "sources.jsonl",
        ({"audio": name, "stat": done.files[name][0], "sha256": done.files[name][1]} for name in audio_files),
    )
    format = codecs.describe(Path(job.path))
    info = {
        "format": 1,
        "codec": job.codec,
        "weights": weights,
        "weights_sha256": job.weights_sha256,
        **format,
        "channels": format["codebooks"] * (2 if job.stereo else 1),
        "layout": "frame-major",
        "rows": sum(entry["rows"] for entry in files),
        "frames": sum(entry["frames"] for entry in files),
        "settings": job.settings(),
        "versions": store.versions("torch", "torchaudio", "transformers", "datasets", "soundfile"),
        "files": files,
        "key": job.key(),
        "clips": clips_key(clips, done),
    }
    store.write_json(folder / "dataset.json", info)
    store.publish(folder, out)
    hours = info["frames"] * info["hop"] / info["sample_rate"] / 3600
    print(
        f"wrote {info['rows']} clips, {hours:.3f} h, {sum(f['bytes'] for f in files) / 1e6:.1f} MB to {out}"
    )


def token_rows(clips: Iterable[Clip], done: Done, labels: list[str]) -> Iterator[dict]:
    import store

    for clip in clips:
        finished = done.clips[clip.id]
        row = {"id": clip.id, "text": clip.text, "frames": finished.frames, "source": finished.source}
        yield (
            row
            | {"codes": store.list_value(*finished.codes)}
            | {label: getattr(clip, label) for label in labels}
        )


def reject_line(clip: Clip, finished: Finished) -> dict:
    return {"id": clip.id, "audio": str(clip.audio), "reason": finished.reject, "source": finished.source}


def verdict(clips: list[Clip], done: Done, max_reject: float) -> int:
    rejected = [clip for clip in clips if done.clips[clip.id].reject]
    if not rejected:
        return 0
    first = rejected[0]
    print(
        f"{len(rejected)} of {len(clips)} clips rejected (rejects.jsonl); the first: {first.id}: "
        f"{done.clips[first.id].reject}"
    )
    if len(rejected) <= max_reject * len(clips):
        return 0
    print(
        f"error: {len(rejected) / len(clips):.1%} of the clips rejected, over --max-reject {max_reject:.1%}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main)
