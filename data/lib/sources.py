"""Where clips come from: one reader per input format, each giving Clips.

A clip's text is looked up in this order: the manifest's field, `<stem>.txt` next to the audio, `<prompts>/<stem>.txt`,
`<prompts>/<stem>_prompt.txt`. A file name is never used as a prompt.
"""

import csv
import functools
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.errors import UserError
from lib.chats import read_chatml, read_metadata_json, reference_clip, with_references
from lib.clips import (
    AUDIO_NAMES,
    AUDIO_SUFFIXES,
    ID_NAMES,
    MANIFEST_LABELS,
    REFERENCES,
    TEXT_NAMES,
    UNREADABLE_SUFFIXES,
    Clip,
    Options,
    Skipped,
    as_aspects,
    as_seconds,
    as_text,
    as_texts,
    as_weight,
    csv_rows,
    first_field,
    inside,
    jsonl_objects,
    read_lines,
    read_text,
    unreadable,
    walk,
)
from lib.hf import hf_content, open_hf, read_hf
from lib.musiccaps import musiccaps_rows, read_legacy_npy, read_musiccaps
from lib.waveform import Reject


def find_clips(
    source: Path,
    format: str,
    prompts: Path | None = None,
    missing_text: str = "error",
    options: Options | None = None,
    skipped: list[Skipped] | None = None,
) -> list[Clip]:
    """All clips of `source`, sorted by id, each with its text. What becomes no clip is added to `skipped`."""
    if not source.exists() and format != "hf":  # an hf source may be a hub id
        raise UserError(f"--source {source} does not exist")
    found = list(READERS[format](source, options or Options()))
    clips = [item for item in found if isinstance(item, Clip)]
    skipped = [] if skipped is None else skipped
    skipped += [item for item in found if isinstance(item, Skipped)]
    say_skipped(skipped)
    if not clips:
        raise UserError(f"no clips found in --source {source} with --format {format}")
    refuse_duplicates(clips)
    clips = find_texts(clips, prompts or (source if source.is_dir() else source.parent) / "prompts")
    return sorted(apply_missing_text(clips, missing_text, skipped), key=lambda clip: clip.id)


def say_skipped(skipped: list[Skipped]) -> None:
    """One line per reason, with the first few names; data/encode.py writes all of them to skipped.jsonl."""
    names: dict[str, list[str]] = {}
    for item in skipped:
        names.setdefault(item.reason, []).append(item.name)
    for reason, each in names.items():
        more = f", ... ({len(each) - 5} more in skipped.jsonl)" if len(each) > 5 else ""
        print(f"skipped {len(each)} ({reason}): {', '.join(each[:5])}{more}")


def count_wanted(format: str, options: Options, clips: list[Clip], skipped: list[Skipped]) -> int:
    """How many clips the source lists; a partly filled folder of .npy codes lists more in its captions than it has."""
    found = len(clips) + sum(item.has_audio for item in skipped)
    return max(found, len(list(musiccaps_rows(options.captions)))) if format == "legacy-npy" else found


# ---------------------------------------------------------------- formats


def read_folder(source: Path, options: Options) -> Iterator[Clip | Skipped]:
    """Every audio file in a folder and its subfolders; the id is the relative path without the suffix."""
    if not source.is_dir():
        raise UserError(f"--format folder needs a folder, but --source {source} is a file")
    files = list(walk(source))
    readable = [file for file in files if file.suffix.lower() in AUDIO_SUFFIXES]
    for file in readable:
        yield Clip(id=file.relative_to(source).with_suffix("").as_posix(), audio=file)
    converted = {file.with_suffix("") for file in readable}
    for file in files:
        if file.suffix.lower() in UNREADABLE_SUFFIXES and file.with_suffix("") not in converted:
            yield unreadable(file)


def read_jsonl(source: Path, options: Options) -> Iterator[Clip]:
    """One JSON object per line: id, audio (or codes), text or text_file; optionally start, end and labels.

    Voice-cloning manifests add ref_audio and ref_text, for a dialogue also ref1_audio and ref1_text (up to ref3_), and
    may name the clip target_audio and target_text. audio_codes, ref_audio_codes and so on hold the codes themselves.
    """
    root = options.audio_root or source.parent
    pairs = []
    for number, item in jsonl_objects(source):
        where = f"{source}:{number}"
        item = {name.removeprefix("target_"): value for name, value in item.items()}
        references = [manifest_reference(item, f"{name}_", root, where, source, number) for name in REFERENCES]
        pairs.append((manifest_clip(item, root, where, source, number), references))
    yield from with_references(pairs)


def read_csv(source: Path, options: Options) -> Iterator[Clip]:
    """LJSpeech's `id|text` without a header, or a CSV with a header that names audio, text and labels."""
    if source.is_dir():
        source = source / "metadata.csv"
    root = options.audio_root or source.parent
    content = read_lines(source)
    if "|" in content.split("\n", 1)[0]:
        for number, row in enumerate(csv.reader(content.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE), 1):
            if not row:
                continue
            where = f"{source}:{number}"
            if len(row) < 2:
                raise UserError(f"{where} is not id|text")
            # LJSpeech's third field is the text with numbers and abbreviations spelled out.
            yield Clip(id=row[0], audio=audio_named(root, row[0], where), text=row[-1].strip() or row[1].strip())
        return
    for number, item in csv_rows(content, source):
        where = f"{source}:{number}"
        audio = first_field(item, AUDIO_NAMES)
        if audio is None:
            raise UserError(
                f"{where} has no audio file; its column must have one of the names {', '.join(AUDIO_NAMES)}"
            )
        text = item.get(options.text_column) if options.text_column else first_field(item, TEXT_NAMES)
        item = {name: value or None for name, value in item.items()}
        item |= {"id": first_field(item, ID_NAMES) or Path(audio).with_suffix("").as_posix()}
        yield manifest_clip(item | {"audio": audio, "text": text}, root, where)


def audio_named(root: Path, name: str, where: str) -> Path:
    """The file for an id: LJSpeech has wavs/<id>.wav; others put it next to the list, or the suffix into the id."""
    for folder in ("wavs", "."):
        for suffix in ("", *AUDIO_SUFFIXES):
            path = inside(root, f"{folder}/{name}{suffix}", where)
            if path.is_file():
                return path
    return inside(root, f"wavs/{name}.wav", where)  # missing: the clip will be rejected under this name


def manifest_clip(item: dict, root: Path, where: str, source: Path | None = None, number: int = 0) -> Clip:
    """`source`, `number`: manifest and line, if the line may hold the codes themselves."""
    if not isinstance(item.get("id"), str) or not item["id"]:
        raise UserError(f'{where} has no "id"')
    inline = source is not None and item.get("audio_codes") is not None
    content = item.get("codes") or item.get("audio")
    if not (content or inline):
        raise UserError(f'{where} has neither "audio" nor "codes" nor "audio_codes"')
    text = item.get("texts") if item.get("text") is None else item["text"]
    if text is None and item.get("text_file"):
        text = read_text(inside(root, item["text_file"], where))
    return Clip(
        id=item["id"],
        audio=source if inline else inside(root, content, where),
        line=(number, "audio_codes") if inline else None,
        **as_texts(text, "text", where),
        start=as_seconds(item.get("start"), "start", where),
        end=as_seconds(item.get("end"), "end", where),
        coded=inline or "codes" in item,
        weight=as_weight(item.get("weight"), where),
        **{label: as_text(item.get(label), label, where) for label in MANIFEST_LABELS},
        aspects=as_aspects(item.get("aspects"), "aspects", where),
    )


def manifest_reference(item: dict, prefix: str, root: Path, where: str, source: Path, number: int) -> Clip | None:
    fields = {name.removeprefix(prefix): value for name, value in item.items() if name.startswith(prefix)}
    if fields.get("audio_codes") is None:
        return reference_clip(root, fields, where) if fields.get("audio") else None
    text = as_text(fields.get("text"), f"{prefix}text", where)
    id, line = f"{item['id']}@{prefix.removesuffix('_')}", (number, f"{prefix}audio_codes")
    speaker = as_text(fields.get("speaker"), f"{prefix}speaker", where)
    return Clip(id=id, audio=source, line=line, text=text, coded=True, speaker=speaker)


READERS = {
    "folder": read_folder,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "musiccaps": read_musiccaps,
    "hf": read_hf,
    "legacy-npy": read_legacy_npy,
    "chatml": read_chatml,
    "metadata-json": read_metadata_json,
}


# ---------------------------------------------------------------- text and ids


def find_texts(clips: Iterable[Clip], prompts: Path) -> list[Clip]:
    """The clips, with texts from .txt files where the manifest has none."""
    with_text, owner = [], {}
    for clip in clips:
        if clip.text is None and clip.row is None and clip.line is None:
            stem = clip.audio.stem
            candidates = (
                clip.audio.with_suffix(".txt"),
                prompts / f"{stem}.txt",
                prompts / f"{stem}_prompt.txt",
            )
            file = next((file for file in candidates if file.is_file()), None)
            if file:
                # If two recordings shared a prompt file, one of them would get the wrong text.
                if owner.setdefault(file, clip.audio) != clip.audio:
                    raise UserError(f"{owner[file]} and {clip.audio} would share {file}: rename one of them")
                clip = replace(clip, text=read_text(file))
        with_text.append(clip)
    return with_text


def apply_missing_text(clips: list[Clip], missing_text: str, skipped: list[Skipped]) -> list[Clip]:
    missing = [clip.id for clip in clips if not clip.text]
    if not missing:
        return clips
    names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    if missing_text == "error":
        raise UserError(
            f"{len(missing)} of {len(clips)} clips have no text: {names} (give each a <stem>.txt, "
            "or use --missing-text skip or empty)"
        )
    print(f"{len(missing)} of {len(clips)} clips have no text (--missing-text {missing_text}): {names}")
    if missing_text == "skip":
        skipped += [Skipped(id, "no text", has_audio=False) for id in missing]
        clips = [clip for clip in clips if clip.text]
        if not clips:
            raise UserError("--missing-text skip leaves no clip: no clip has a text")
        return clips
    return [clip if clip.text else replace(clip, text="") for clip in clips]


def refuse_duplicates(clips: list[Clip]) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        if clip.id in seen:
            raise UserError(f"two clips have the id {clip.id}: {seen[clip.id].recording} and {clip.recording}")
        seen[clip.id] = clip


# ---------------------------------------------------------------- content


def content_stamp(clip: Clip) -> str:
    """A value that changes whenever the content does, without reading it: programs cannot set a file's ctime back."""
    if clip.row is not None:
        return open_hf(str(clip.audio))[clip.row[0]]._fingerprint
    try:
        stat = clip.audio.stat()
    except OSError:
        return ""
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def read_content(clip: Clip) -> bytes:
    file = clip.audio
    if clip.line is not None:
        number, field = clip.line
        item = json.loads(lines_of(file, content_stamp(clip))[number - 1])
        return npy_bytes(item.get(field, item.get(f"target_{field}")), frames_first=True)
    if clip.row is not None:
        split, number = clip.row
        data = open_hf(str(clip.audio))[split]
        value = data[number][hf_content(data)]
        if clip.coded:
            return npy_bytes(value)
        if value.get("bytes"):
            return value["bytes"]
        file = inside(clip.audio, value.get("path"), f"{clip.audio}, row {number}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise Reject(f"unreadable file: {error.strerror}") from None


@functools.lru_cache(maxsize=1)
def lines_of(manifest: Path, stamp: str) -> list[str]:
    """The lines of a manifest; `stamp`: changes with its content."""
    return read_lines(manifest).split("\n")


def npy_bytes(codes: object, frames_first: bool = False) -> bytes:
    """Codes as the bytes of an .npy file, in which codebooks come first."""
    try:
        array = np.asarray(codes)
    except ValueError:
        raise Reject("the lists of codes differ in length") from None
    if array.dtype == object:
        raise Reject("the codes are not lists of numbers")
    stream = io.BytesIO()
    np.save(stream, array.T if frames_first else array, allow_pickle=False)
    return stream.getvalue()
