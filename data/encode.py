"""Audio and text -> codec tokens on disk, once, offline, resumable.

    python data/encode.py --codec dac --codec-weights descript/dac_44khz --source my_clips --out tokens/train
    python data/encode.py --codec dac --codec-weights ./dac --format jsonl --source a.jsonl --out tokens/a

On a cluster, as an array of 8 jobs, then once to join what they made:

    python data/encode.py ... --out tokens/train --shard $SLURM_ARRAY_TASK_ID/8
    python data/encode.py ... --out tokens/train --merge

Killed at any moment, the same command continues: finished clips wait in OUT.work and are not encoded again
unless their audio or a setting changed. OUT itself appears complete or not at all.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from lib.errors import UsageError, run
from lib.pool import run_workers
from lib.resume import Done, Finished, Job, clips_key, is_current, load_finished, save_part, unfinished
from lib.sources import LABELS, READERS, Clip, Options, count_wanted, find_clips

CODEC_NAMES = ("dac", "encodec", "higgs")
SECONDS_PER_PART = 20.0  # finished clips are made durable at least this often
BYTES_PER_WORKER = 30_000_000  # below this, a process more costs longer to start than it saves


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("what").add_argument
    add("--codec", required=True, choices=CODEC_NAMES)
    add(
        "--codec-weights",
        metavar="PATH_OR_ID",
        help="a hub id (descript/dac_44khz), a folder, or descript-audio-codec's .pth file; only the formats "
        "that bring codes do without",
    )
    add("--source", required=True, type=Path, help="folder, manifest or dataset, as --format says")
    add("--format", choices=sorted(READERS), default="folder", help="what --source is (default: folder)")
    add("--out", required=True, type=Path, help="folder of the token dataset")
    add = parser.add_argument_group("where things are").add_argument
    add("--prompts", type=Path, help="folder with <stem>.txt or <stem>_prompt.txt (default: SOURCE/prompts)")
    add("--audio-root", type=Path, help="folder that manifest paths start from (default: the manifest's)")
    add("--text-column", metavar="NAME", help="csv, hf: column with the text (default: text, caption, ...)")
    add("--captions", type=Path, metavar="CSV", help="legacy-npy: file with ytid and caption")
    add(
        "--musiccaps-split",
        choices=("balanced", "audioset"),
        default="balanced",
        help="musiccaps, legacy-npy: which rows are eval, the balanced subset or all AudioSet eval rows",
    )
    add = parser.add_argument_group("how").add_argument
    add(
        "--missing-text",
        choices=("error", "skip", "empty"),
        default="error",
        help="a clip without text stops the command, is left out, or gets an empty text (default: error)",
    )
    add("--stereo", action="store_true", help="dac: left and right each, 18 channels, L block then R block")
    add("--min-seconds", type=float, default=0.4, help="shorter clips are rejected (default: 0.4)")
    add("--max-seconds", type=float, default=math.inf, help="longer clips are rejected (default: no limit)")
    add("--max-reject", type=float, default=0.01, help="share of rejects that is a success (default: 0.01)")
    add = parser.add_argument_group("speed").add_argument
    add("--workers", type=int, help="processes, one codec each (default: by cores and by amount, up to 8)")
    add("--shard", type=shard_of, metavar="I/N", help="only the I-th of N parts (from 0), for job arrays")
    add("--merge", action="store_true", help="join the shards: encodes nothing, writes --out")
    args = parser.parse_args(argv)
    if args.stereo and args.codec != "dac":
        parser.error("--stereo is for --codec dac")
    if args.workers is not None and args.workers < 1:
        parser.error("--workers must be at least 1")
    if args.shard and args.merge:
        parser.error("--shard and --merge exclude each other")
    return args


def shard_of(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N-1")
    return index, count


def main() -> int:
    args = parse_args()
    options = Options(args.audio_root, args.captions, args.text_column, args.musiccaps_split)
    clips = find_clips(args.source, args.format, args.prompts, args.missing_text, options)
    print(f"{len(clips)} clips in {args.source}")
    return encode_dataset(
        clips,
        args.out,
        codec=args.codec,
        weights=args.codec_weights,
        stereo=args.stereo,
        min_seconds=args.min_seconds,
        max_seconds=args.max_seconds,
        max_reject=args.max_reject,
        workers=args.workers or default_workers(clips),
        shard=args.shard,
        merge=args.merge,
        wanted=count_wanted(args.format, options, clips),
    )


def default_workers(clips: list[Clip]) -> int:
    size = sum(file.stat().st_size for file in {clip.audio for clip in clips} if file.is_file())
    return max(1, min(len(os.sched_getaffinity(0)), 8, size // BYTES_PER_WORKER))


def encode_dataset(
    clips: list[Clip],
    out: Path,
    codec: str,
    weights: str | None,
    stereo: bool = False,
    min_seconds: float = 0.4,
    max_seconds: float = math.inf,
    max_reject: float = 0.01,
    workers: int = 1,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    wanted: int | None = None,
) -> int:
    """Encode what is not yet encoded, then write the dataset; 0, or 1 when too many clips were rejected.

    `wanted`: how many clips the source lists, if more than it has.
    """
    from lib import store

    job = make_job(clips, codec, weights, stereo, min_seconds, max_seconds)
    out = out.absolute()
    work = out.with_name(out.name + ".work")
    with store.clear_disk_errors(out), ExitStack() as locks:
        locks.enter_context(store.locked(work / "lock", shared=shard is not None))
        tag = "0"
        if shard:
            tag = f"{shard[0]}of{shard[1]}"
            locks.enter_context(store.locked(work / f"lock-{tag}"))
            clips = clips_of_shard(clips, *shard)
        else:
            store.restore_interrupted_publish(out)
        refuse_other_codec(out, job)
        done = load_finished(out, work, job)
        todo = unfinished(clips, done)
        if merge:
            refuse_unfinished(todo, done)
        else:
            if todo and len(todo) < len(clips):
                print(f"{len(clips) - len(todo)} clips are encoded already, {len(todo)} to look at")
            encode_missing(todo, job, workers, work, tag, done)
        if shard:
            print(f"shard {shard[0]}/{shard[1]} is done; after the last one run the same command with --merge")
        elif is_current(out, clips, done, job):
            print(f"nothing to do: {out} holds these {len(clips)} clips with these settings (cache hit)")
        else:
            write_tokens(clips, done, job, weights, work, out, wanted or len(clips))
        if not shard:
            shutil.rmtree(work, ignore_errors=True)
    return verdict(clips, done, max_reject)


def make_job(clips: list[Clip], codec: str, weights: str | None, stereo: bool, shortest: float, longest: float):
    from lib import codec as codecs

    if weights is None:
        if not all(clip.coded for clip in clips):
            raise UsageError("--codec-weights is needed: a hub id or a local path")
        return Job(None, None, codec, stereo, shortest, longest)
    path = codecs.find_weights(weights)
    kind = codecs.kind_of(path)
    if kind != codec:
        raise UsageError(f"--codec {codec} does not fit --codec-weights {weights}, which is a {kind} codec")
    return Job(str(path), codecs.hash_weights(path), kind, stereo, shortest, longest)


def clips_of_shard(clips: list[Clip], index: int, count: int) -> list[Clip]:
    """Every count-th recording, with all its clips: each file is then read by one job only."""
    places = {place: number for number, place in enumerate(sorted({clip.place for clip in clips}))}
    chosen = [clip for clip in clips if places[clip.place] % count == index]
    if not chosen:
        raise UsageError(f"shard {index}/{count} has no clips: there are only {len(places)} recordings")
    return chosen


def refuse_other_codec(out: Path, job: Job) -> None:
    from lib import store

    info = store.read_dataset_json(out)
    if info and (info.get("codec"), info.get("weights_sha256")) != (job.codec, job.weights_sha256):
        raise UsageError(
            f"--out {out} holds codes of another codec ({info.get('codec')}, weights {info.get('weights')}): "
            "give another --out or remove it"
        )


def refuse_unfinished(todo: list[tuple[Clip, str | None]], done: Done) -> None:
    # A file that a shard could not read is as finished as it gets.
    missing = [clip for clip, _ in todo if not getattr(done.clips.get(clip.id), "reject", "")]
    if missing:
        raise UsageError(
            f"--merge: {len(missing)} clips are not encoded yet or have changed, such as {missing[0].id}: "
            "run the shards that are missing"
        )


def encode_missing(
    todo: list[tuple[Clip, str | None]], job: Job, workers: int, work: Path, tag: str, done: Done
) -> None:
    """Encode, with a progress bar; what is finished goes to part files in `work` as it comes."""
    from tqdm import tqdm

    if not todo:
        return
    results, audio_seconds, parts = [], 0.0, len(list(work.glob("part-*.arrow")))
    begin = saved_at = time.monotonic()
    with tqdm(total=len(todo), unit="clip", file=sys.stderr, mininterval=1.0) as bar:
        for batch in run_workers(todo, job, workers):
            results += batch
            audio_seconds += sum(result["seconds"] for result in batch)
            bar.update(len(batch))
            speed = audio_seconds / max(time.monotonic() - begin, 1e-6)
            bar.set_postfix_str(f"{audio_seconds / 3600:.3f} h audio, {speed:.1f}x real time", refresh=False)
            if time.monotonic() - saved_at > SECONDS_PER_PART or bar.n == len(todo):
                save_part(work, f"{job.key()}-{tag}-{parts:06d}", results, done)
                results, parts, saved_at = [], parts + 1, time.monotonic()


# ---------------------------------------------------------------- writing


def write_tokens(
    clips: list[Clip], done: Done, job: Job, weights: str | None, work: Path, out: Path, wanted: int
) -> None:
    from lib import codec as codecs
    from lib import store

    reject_without_reference(clips, done)
    kept = [clip for clip in clips if not done.clips[clip.id].reject]
    if not kept:
        first = done.clips[clips[0].id].reject
        raise UsageError(f"every one of the {len(clips)} clips was rejected; the first: {clips[0].id}: {first}")
    labels = [label for label in LABELS if any(getattr(clip, label) for clip in kept)]
    columns = {"id": "string", "text": "string", "codes": "int16 list", "frames": "int32"}
    columns |= {label: "string" for label in labels} | {"source": "string"}
    folder = work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    files = store.write_dataset(folder, token_rows(kept, done, labels), columns, sums=("frames",))
    rejected = [clip for clip in clips if done.clips[clip.id].reject]
    store.write_jsonl(folder / "rejects.jsonl", (reject_line(clip, done.clips[clip.id]) for clip in rejected))
    places = sorted({clip.place for clip in clips} & done.places.keys())
    store.write_jsonl(folder / "sources.jsonl", ([place, *done.places[place]] for place in places))
    format = codecs.describe(Path(job.path)) if job.path else codecs.PUBLISHED[job.codec]
    info = {
        "format": 1,
        "codec": job.codec,
        # A path is kept whole: samples are decoded from other working directories.
        "weights": str(Path(weights).absolute()) if weights and Path(weights).exists() else weights,
        "weights_sha256": job.weights_sha256,
        **format,
        "channels": format["codebooks"] * (2 if job.stereo else 1),
        "layout": "frame-major",
        "rows": sum(entry["rows"] for entry in files),
        "wanted": wanted,  # what training measures the coverage by
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
    print(f"wrote {info['rows']} clips, {hours:.3f} h, {sum(f['bytes'] for f in files) / 1e6:.1f} MB to {out}")


def reject_without_reference(clips: list[Clip], done: Done) -> None:
    for clip in clips:
        if clip.ref and done.clips[clip.ref].reject and not done.clips[clip.id].reject:
            # No source: when the reference is mended, this clip is looked at again.
            done.clips[clip.id] = Finished("", reject=f"its reference {clip.ref} was rejected")


def token_rows(clips: Iterable[Clip], done: Done, labels: list[str]) -> Iterator[dict]:
    from lib import store

    for clip in clips:
        finished = done.clips[clip.id]
        row = {"id": clip.id, "text": clip.text, "frames": finished.frames, "source": finished.source}
        row["codes"] = store.list_value(*finished.codes)
        yield row | {label: getattr(clip, label) for label in labels}


def reject_line(clip: Clip, finished: Finished) -> dict:
    return {"id": clip.id, "audio": clip.place, "reason": finished.reject, "source": finished.source}


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
