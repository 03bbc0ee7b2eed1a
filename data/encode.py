"""Encode audio and text as codec tokens on disk: once, offline, resumable.

    python data/encode.py --codec dac --codec-weights descript/dac_44khz --source my_clips --out tokens/train
    python data/encode.py --codec dac --codec-weights ./dac --format jsonl --source a.jsonl --out tokens/a

On a cluster, run an array of 8 jobs, then join their results:

    python data/encode.py ... --out tokens/train --shard $SLURM_ARRAY_TASK_ID/8
    python data/encode.py ... --out tokens/train --merge

If the command is killed, run it again to continue: finished clips are kept in OUT.work and are encoded again
only if their audio or a setting changed. OUT appears when it is complete, never before.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.codec import hash_weights
from common.errors import UserError, between, command_parser, run_command
from lib import store
from lib.clips import LABELS, REFERENCES, Clip, Options, Skipped
from lib.codec import PUBLISHED, describe, find_weights, kind_of
from lib.pool import Todo, run_workers
from lib.resume import ClipResult, Finished, Job, clips_key, is_current, load_finished, save_part, unfinished
from lib.sources import READERS, count_wanted, find_clips

CODEC_NAMES = ("dac", "encodec", "higgs")
SECONDS_PER_PART = 20.0  # finished clips are written to disk at least this often
BYTES_PER_WORKER = 30_000_000  # with less audio per worker, starting another process costs more time than it saves


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument_group("input, codec and output").add_argument
    add(
        "--codec",
        required=True,
        choices=CODEC_NAMES,
        help="dac for Dia, higgs for Higgs Audio v2, encodec for Llama MoT",
    )
    add(
        "--codec-weights",
        metavar="PATH_OR_ID",
        help="a hub id (descript/dac_44khz), a folder, or descript-audio-codec's .pth file; optional only if all "
        "clips are already codes",
    )
    add("--codec-revision", metavar="REV", help="branch, tag or commit of --codec-weights on the hub (default: newest)")
    add("--source", required=True, type=Path, help="folder, manifest or dataset to read; see --format")
    add("--format", choices=sorted(READERS), default="folder", help="format of --source (default: folder)")
    add("--out", required=True, type=Path, help="folder for the token dataset")
    add = parser.add_argument_group("where to find text and audio").add_argument
    add("--prompts", type=Path, help="folder with <stem>.txt or <stem>_prompt.txt (default: SOURCE/prompts)")
    add("--audio-root", type=Path, help="folder that manifest paths are relative to (default: the manifest's folder)")
    add(
        "--strip-prefix",
        action="append",
        default=[],
        metavar="TEXT",
        help='an instruction such as "Say this: " that is removed from texts which begin with exactly these characters;'
        " give it again for another (default: texts stay whole)",
    )
    add("--source-revision", metavar="REV", help="hf: branch, tag or commit of --source on the hub (default: newest)")
    add("--text-column", metavar="NAME", help="csv, hf: column with the text (default: text, caption, ...)")
    add("--captions", type=Path, metavar="CSV", help="legacy-npy: CSV file with the columns ytid and caption")
    add(
        "--musiccaps-split",
        choices=("balanced", "audioset"),
        default="balanced",
        help="musiccaps, legacy-npy: which rows become the eval split, the balanced subset or all AudioSet eval rows "
        "(default: balanced)",
    )
    add = parser.add_argument_group("how to encode, and which clips").add_argument
    add(
        "--missing-text",
        choices=("error", "skip", "empty"),
        default="error",
        help="what to do if a clip has no text: stop, skip the clip, or use an empty text (default: error)",
    )
    add(
        "--stereo",
        action="store_true",
        help="dac: encode left and right separately (18 channels: 9 left, then 9 right)",
    )
    add(
        "--loudness",
        type=between(float, -70, 0),
        metavar="LUFS",
        help="give every clip this loudness (ITU-R BS.1770), such as -23; less where it would clip (default: as it is)",
    )
    add("--min-seconds", type=between(float, 0), default=0.4, help="reject shorter clips (default: 0.4)")
    add(
        "--max-seconds",
        type=between(float, 0, above=True),
        default=math.inf,
        help="reject longer clips (default: no limit)",
    )
    add(
        "--max-reject",
        type=between(float, 0, 1),
        default=0.01,
        help="exit with code 1 if more than this fraction is rejected (default: 0.01)",
    )
    add = parser.add_argument_group("parallel encoding").add_argument
    add(
        "--workers",
        type=between(int, 1),
        help="number of processes, each with its own codec (default: by CPU cores and amount of audio, at most 8)",
    )
    add("--shard", type=parse_shard, metavar="I/N", help="encode only shard I of N (from 0), for job arrays")
    add("--merge", action="store_true", help="join the shards into --out without encoding anything")
    args = parser.parse_args(argv)
    if args.stereo and args.codec != "dac":
        parser.error("--stereo works only with --codec dac")
    if args.min_seconds > args.max_seconds:
        parser.error(f"--min-seconds {args.min_seconds:g} is more than --max-seconds {args.max_seconds:g}")
    if args.shard and args.merge:
        parser.error("--shard and --merge cannot be used together")
    return args


def parse_shard(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N-1")
    return index, count


def main() -> int:
    args = parse_args()
    for flag in ("prompts", "audio_root", "captions"):
        if (path := getattr(args, flag)) and not path.exists():
            raise UserError(f"--{flag.replace('_', '-')} {path} does not exist")
    options = Options(args.audio_root, args.captions, args.text_column, args.musiccaps_split, args.source_revision)
    skipped: list[Skipped] = []
    clips = find_clips(args.source, args.format, args.prompts, args.missing_text, options, skipped)
    print(f"{len(clips)} clips in {args.source}")
    clips = strip_prefixes(clips, args.strip_prefix)
    settings = {name: getattr(args, name) for name in ("stereo", "min_seconds", "max_seconds", "loudness")}
    return encode_dataset(
        clips,
        args.out,
        make_job(clips, args.codec, args.codec_weights, args.codec_revision, **settings),
        args.codec_weights,
        max_reject=args.max_reject,
        workers=args.workers or default_workers(clips),
        shard=args.shard,
        merge=args.merge,
        wanted=count_wanted(args.format, options, clips, skipped),
        skipped=skipped,
    )


def strip_prefixes(clips: list[Clip], prefixes: list[str]) -> list[Clip]:
    """The clips without instructions in their texts. Only an exact prefix is removed: a text may well hold a colon."""
    for prefix in prefixes:
        before, clips, count = clips, [], 0
        for clip in before:
            text, *texts = (text.removeprefix(prefix).strip() for text in (clip.text, *clip.texts))
            if not all((text, *texts)) and clip.text:
                raise UserError(f"--strip-prefix {prefix!r} leaves no text for {clip.id}")
            count += any(text.startswith(prefix) for text in (clip.text, *clip.texts))
            clips.append(replace(clip, text=text, texts=tuple(texts)))
        if not count:
            raise UserError(f"--strip-prefix {prefix!r}: no text begins with it; the first is {clips[0].text!r}")
        print(f"the texts of {count} of {len(clips)} clips began with {prefix!r}, which was removed")
    return clips


def default_workers(clips: list[Clip]) -> int:
    size = sum(file.stat().st_size for file in {clip.audio for clip in clips} if file.is_file())
    return max(1, min(len(os.sched_getaffinity(0)), 8, size // BYTES_PER_WORKER))


def encode_dataset(
    clips: list[Clip],
    out: Path,
    job: Job,
    weights: str | None,
    max_reject: float = 0.01,
    workers: int = 1,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    wanted: int | None = None,
    skipped: Sequence[Skipped] = (),
    synthetic: bool = False,
) -> int:
    """Encode the clips that are not encoded yet and write the dataset; returns the exit code.

    `weights`: the codec's weights as the user named them. `wanted`: number of clips that the source lists, if it lists
    more than it contains. `skipped`: what in the source is no clip; it is listed in skipped.jsonl. `synthetic`: no
    recordings, whose bandwidth says nothing.
    """
    out = out.absolute()
    work = out.with_name(out.name + ".work")
    tag = f"{shard[0]}of{shard[1]}" if shard else "0"
    with (
        store.name_full_disk(out),
        # Shards share the work folder with each other; any other run needs it for itself.
        store.locked(work / "lock", shared=shard is not None),
        store.locked(work / f"lock-{tag}") if shard else nullcontext(),
    ):
        if shard:
            clips = clips_of_shard(clips, *shard)
        else:
            store.restore_interrupted_publish(out)
        refuse_other_codec(out, job)

        # What is already encoded?
        finished = load_finished(out, work, job)
        todo = unfinished(clips, finished)

        # Encode the rest.
        if merge:
            refuse_unfinished(todo, finished)
        else:
            if todo and len(todo) < len(clips):
                print(f"{len(clips) - len(todo)} clips are already encoded, {len(todo)} left to check")
            narrow = encode_missing(todo, job, workers, work, tag, finished)
            if narrow and not synthetic:
                warn_of_narrow(narrow)

        # Write the dataset.
        if shard:
            print(f"shard {shard[0]}/{shard[1]} is done; when all are, run the same command with --merge")
        else:
            if is_current(out, clips, finished, job, skipped):
                print(f"nothing to do: {out} already has these {len(clips)} clips with these settings (cache hit)")
            else:
                write_tokens(clips, finished, job, weights, work, out, wanted or len(clips), skipped)
            shutil.rmtree(work, ignore_errors=True)
    return exit_code(clips, finished, max_reject)


# ---------------------------------------------------------------- settings and shard


def make_job(clips: list[Clip], codec: str, weights: str | None, revision: str | None = None, **settings) -> Job:
    """`settings`: those of Job, such as stereo."""
    if weights is None:
        if not all(clip.coded for clip in clips):
            raise UserError("--codec-weights is needed: a hub id or a local path")
        return Job(None, None, codec, **settings)
    path = find_weights(weights, revision)
    kind = kind_of(path)
    if kind != codec:
        raise UserError(f"--codec {codec} does not match --codec-weights {weights}, which is a {kind} codec")
    return Job(str(path), hash_weights(path), kind, **settings)


def clips_of_shard(clips: list[Clip], index: int, count: int) -> list[Clip]:
    """All clips of every count-th recording, so that each recording is read by one job only."""
    numbers = {recording: number for number, recording in enumerate(sorted({clip.recording for clip in clips}))}
    shard_clips = [clip for clip in clips if numbers[clip.recording] % count == index]
    if not shard_clips:
        raise UserError(f"shard {index}/{count} has no clips: there are only {len(numbers)} recordings")
    return shard_clips


def refuse_other_codec(out: Path, job: Job) -> None:
    info = store.read_dataset_json(out)
    if info and (info.get("codec"), info.get("weights_sha256")) != (job.codec, job.weights_sha256):
        raise UserError(
            f"--out {out} holds codes of another codec ({info.get('codec')}, weights {info.get('weights')}): "
            "choose another --out or remove it"
        )


# ---------------------------------------------------------------- encode


def refuse_unfinished(todo: Todo, finished: Finished) -> None:
    # A clip that its shard rejected counts as finished, even if its file could not be read.
    missing = [clip for clip, _ in todo if not getattr(finished.clips.get(clip.id), "reject", "")]
    if missing:
        raise UserError(
            f"--merge: {len(missing)} clips are not encoded yet or have changed, such as {missing[0].id}: "
            "run the missing shards first"
        )


def encode_missing(todo: Todo, job: Job, workers: int, work: Path, tag: str, finished: Finished) -> dict[str, float]:
    """Encode with a progress bar; finished clips go to part files in `work` along the way.

    Returns the highest frequency, by id, of those that hold far less than the codec can.
    """
    if not todo:
        return {}
    results, audio_seconds, parts, narrow = [], 0.0, len(list(work.glob("part-*.arrow"))), {}
    begin = saved_at = time.monotonic()
    with tqdm(total=len(todo), unit="clip", file=sys.stderr, mininterval=1.0) as bar:
        for batch in run_workers(todo, job, workers):
            results += batch
            audio_seconds += sum(result["seconds"] for result in batch)
            narrow |= {result["id"]: result["narrow"] for result in batch if result["narrow"]}
            bar.update(len(batch))
            speed = audio_seconds / max(time.monotonic() - begin, 1e-6)
            bar.set_postfix_str(f"{audio_seconds / 3600:.3f} h audio, {speed:.1f}x real time", refresh=False)
            if time.monotonic() - saved_at > SECONDS_PER_PART or bar.n == len(todo):
                save_part(work, f"{job.key()}-{tag}-{parts:06d}", results, finished)
                results, parts, saved_at = [], parts + 1, time.monotonic()
    return narrow


def warn_of_narrow(narrow: dict[str, float]) -> None:
    named = ", ".join(f"{id} ({hertz / 1000:.1f} kHz)" for id, hertz in list(narrow.items())[:5])
    more = ", ..." if len(narrow) > 5 else ""
    print(f"warning: {len(narrow)} clips hold no high frequencies, as if upsampled from a lower rate: a model trained"
          f" on them sounds dull. They end at: {named}{more}")  # fmt: skip


# ---------------------------------------------------------------- write the dataset


def write_tokens(
    clips: list[Clip],
    finished: Finished,
    job: Job,
    weights: str | None,
    work: Path,
    out: Path,
    wanted: int,
    skipped: Sequence[Skipped],
) -> None:
    reject_without_reference(clips, finished)
    kept = [clip for clip in clips if not finished.clips[clip.id].reject]
    if not kept:
        reason = finished.clips[clips[0].id].reject
        raise UserError(f"all {len(clips)} clips were rejected; the first: {clips[0].id}: {reason}")
    labels = [label for label in LABELS if any(getattr(clip, label) for clip in kept)]
    columns = {"id": "string", "text": "string", "codes": "int16 list", "frames": "int32"}
    if any(clip.texts for clip in kept):
        columns["texts"] = store.TEXTS
    columns |= {label: "string" for label in labels} | {"source": "string"}
    if any(clip.weight is not None for clip in kept):
        columns["weight"] = "float32"
    folder = work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    files = store.write_dataset(folder, token_rows(kept, finished, labels), columns)
    rejected = [clip for clip in clips if finished.clips[clip.id].reject]
    store.write_jsonl(folder / "rejects.jsonl", (reject_line(clip, finished.clips[clip.id]) for clip in rejected))
    store.write_jsonl(folder / "skipped.jsonl", map(asdict, skipped))
    recordings = sorted({clip.recording for clip in clips} & finished.recordings.keys())
    store.write_jsonl(folder / "sources.jsonl", ([name, *finished.recordings[name]] for name in recordings))
    format = describe(Path(job.path)) if job.path else PUBLISHED[job.codec]
    info = {
        "format": 1,
        "codec": job.codec,
        # A local path is made absolute: samples are decoded from other working directories.
        "weights": str(Path(weights).absolute()) if weights and Path(weights).exists() else weights,
        # The folder of a download is named after its commit.
        **({"weights_revision": Path(job.path).name} if weights and not Path(weights).exists() else {}),
        "weights_sha256": job.weights_sha256,
        **format,
        "channels": format["codebooks"] * (2 if job.stereo else 1),
        "layout": "frame-major",
        "rows": len(kept),
        "wanted": wanted,  # training compares the number of rows with this
        "frames": sum(finished.clips[clip.id].frames for clip in kept),
        "settings": job.settings(),
        "versions": store.versions("torch", "torchaudio", "transformers", "datasets", "soundfile"),
        "files": files,
        "key": job.key(),
        "clips": clips_key(clips, finished, skipped),
    }
    store.write_json(folder / "dataset.json", info)
    store.publish(folder, out)
    hours = info["frames"] * info["hop"] / info["sample_rate"] / 3600
    print(f"wrote {info['rows']} clips, {hours:.3f} h, {sum(f['bytes'] for f in files) / 1e6:.1f} MB to {out}")


def reject_without_reference(clips: list[Clip], finished: Finished) -> None:
    for clip in clips:
        for ref in (getattr(clip, name) for name in REFERENCES):
            if ref and finished.clips[ref].reject and not finished.clips[clip.id].reject:
                # An empty source, so that this clip is checked again once its reference is repaired.
                finished.clips[clip.id] = ClipResult("", reject=f"its reference {ref} was rejected")


def token_rows(clips: Iterable[Clip], finished: Finished, labels: list[str]) -> Iterator[dict]:
    for clip in clips:
        result = finished.clips[clip.id]
        row = {"id": clip.id, "text": clip.text, "frames": result.frames, "source": result.source}
        column, number = result.codes
        row["codes"] = column[number].values.to_numpy()
        row["texts"] = list(clip.texts) or [clip.text]
        row["weight"] = 1.0 if clip.weight is None else clip.weight
        yield row | {label: getattr(clip, label) for label in labels}


def reject_line(clip: Clip, result: ClipResult) -> dict:
    return {"id": clip.id, "audio": clip.recording, "reason": result.reject, "source": result.source}


def exit_code(clips: list[Clip], finished: Finished, max_reject: float) -> int:
    """0, or 1 if more clips were rejected than --max-reject allows; prints how many were."""
    rejected = [clip for clip in clips if finished.clips[clip.id].reject]
    if not rejected:
        return 0
    first = rejected[0]
    print(
        f"{len(rejected)} of {len(clips)} clips rejected (see rejects.jsonl); the first: {first.id}: "
        f"{finished.clips[first.id].reject}"
    )
    if len(rejected) <= max_reject * len(clips):
        return 0
    print(
        f"error: {len(rejected) / len(clips):.1%} of the clips were rejected, over --max-reject {max_reject:.1%}: "
        "fix or remove them, or raise it",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(main)
