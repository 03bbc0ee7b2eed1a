"""MusicCaps: its CSV with a folder of audio, or with the codes that earlier trainers made of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import soundfile

from common.errors import UserError
from lib.clips import (
    AUDIO_SUFFIXES,
    UNREADABLE_SUFFIXES,
    Clip,
    Options,
    Skipped,
    as_aspects,
    as_seconds,
    csv_rows,
    inside,
    json_file,
    read_lines,
    unreadable,
    walk,
)

CUT_TOLERANCE = 1.0  # seconds by which a file that was cut to the captioned part may be longer


def read_musiccaps(source: Path, options: Options) -> Iterator[Clip | Skipped]:
    """The MusicCaps CSV and a folder of audio files named by ytid (--audio-root); many videos no longer exist.

    A file is the captioned part of its video, or a longer recording, of which the captioned part is then cut out.
    """
    root = options.audio_root or source.parent
    files, unreadable_files, rows = {}, {}, 0
    for file in walk(root):
        if file.suffix.lower() in AUDIO_SUFFIXES:
            files[file.stem] = file
        elif file.suffix.lower() in UNREADABLE_SUFFIXES:
            unreadable_files[file.stem] = file
    unused = {file.stem: file for file in [*unreadable_files.values(), *files.values()]}
    for row in musiccaps_rows(source):
        rows += 1
        ytid = row["ytid"]
        unused.pop(ytid, None)
        if ytid in files:
            yield musiccaps_clip(row, files[ytid], options, f"{source}: {ytid}")
        elif ytid in unreadable_files:
            yield unreadable(unreadable_files[ytid])
        else:
            yield Skipped(ytid, f"no audio file in {root}", has_audio=False)
    for file in unused.values():
        yield Skipped(file.name, f"no row of {source.name} has this ytid", has_audio=False)
    print(f"{len(files.keys() - unused.keys())} of {rows} rows of {source.name} have an audio file in {root}")


def musiccaps_clip(row: dict, file: Path, options: Options, where: str) -> Clip | Skipped:
    clip = Clip(id=row["ytid"], audio=file, text=row["caption"], **musiccaps_labels(row, options, where))
    start, end = (as_seconds(row.get(name) or None, name, where) for name in ("start_s", "end_s"))
    seconds = duration(file)
    if start is None or end is None or seconds is None or seconds <= end - start + CUT_TOLERANCE:
        return clip  # an unreadable file is rejected when it is encoded
    if end <= start:
        raise UserError(f"{where}: end_s {end:g} is not after start_s {start:g}")
    if seconds < end - CUT_TOLERANCE:
        reason = f"too long for its caption's {end - start:g} s, and too short to be cut at start_s and end_s"
        return Skipped(file.name, reason)
    return replace(clip, start=start, end=end)


def duration(file: Path) -> float | None:
    """Seconds, from the header; None if soundfile cannot read it."""
    try:
        return soundfile.info(file).duration
    except (soundfile.LibsndfileError, RuntimeError):
        return None


def musiccaps_labels(row: dict, options: Options, where: str) -> dict[str, str | None]:
    column = {"balanced": "is_balanced_subset", "audioset": "is_audioset_eval"}[options.musiccaps_split]
    split = "eval" if row.get(column, "").strip().lower() == "true" else "train"
    return {"split": split, "aspects": as_aspects(row.get("aspect_list"), "aspect_list", where)}


def musiccaps_rows(source: Path) -> Iterator[dict]:
    for number, row in csv_rows(read_lines(source), source):
        if not row.get("ytid") or "caption" not in row:
            raise UserError(f"{source}:{number} has no ytid or no caption: is this the MusicCaps CSV?")
        yield row | {"caption": " ".join(row["caption"].split())}  # five captions hold line breaks


def read_legacy_npy(source: Path, options: Options) -> Iterator[Clip]:
    """`{ytid}.npy` of shape (4, T) or (1, 4, T), found through the metadata file or by name; captions from a CSV."""
    if options.captions is None:
        raise UserError("--format legacy-npy needs --captions, the CSV with ytid and caption")
    files = {file.stem: file for file in walk(source) if file.suffix == ".npy"}
    for name in ("pre_encoded_metadata.json", "metadata.json"):
        if (source / name).is_file():
            for ytid, entry in json_file(source / name, dict).items():
                path = entry.get("encoded_file") if isinstance(entry, dict) else entry
                if not isinstance(path, str):
                    raise UserError(f"{source / name}: {ytid} has no encoded file")
                # Such files often hold absolute paths of another machine: then only the file name is used.
                files[ytid] = inside(source, path, f"{source / name}: {ytid}", by_name=True)
            break
    captions = {row["ytid"]: row for row in musiccaps_rows(options.captions)}
    for ytid, file in files.items():
        row = captions.get(ytid, {})
        labels = musiccaps_labels(row, options, f"{options.captions}: {ytid}")
        yield Clip(id=ytid, audio=file, text=row.get("caption"), coded=True, **labels)
