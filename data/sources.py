"""Where clips come from: every input format ends as one list of Clip.

Text is looked up in this order: the manifest's field, `<stem>.txt` beside the audio, `<prompts>/<stem>.txt`,
`<prompts>/<stem>_prompt.txt`. A file name never becomes a prompt.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from usage import UsageError

AUDIO_SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf"}
LABELS = ("speaker", "lang", "group", "split")


@dataclass(frozen=True)
class Clip:
    id: str
    audio: Path
    text: str | None = None  # None: not found yet
    start: float | None = None  # seconds; None is the beginning
    end: float | None = None  # seconds; None is the end
    speaker: str | None = None
    lang: str | None = None
    group: str | None = None  # clips of one group must not be spread over train and eval
    split: str | None = None


def find_clips(
    source: Path,
    format: str,
    prompts: Path | None = None,
    audio_root: Path | None = None,
    missing_text: str = "error",
) -> list[Clip]:
    """All clips of `source`, sorted by id, each with its text."""
    if not source.exists():
        raise UsageError(f"--source {source} does not exist")
    clips = list(READERS[format](source, audio_root))
    if not clips:
        raise UsageError(f"no clips found in --source {source} as --format {format}")
    clips = find_texts(clips, prompts or (source if source.is_dir() else source.parent) / "prompts")
    refuse_duplicates(clips)
    return sorted(apply_missing_text(clips, missing_text), key=lambda clip: clip.id)


# ---------------------------------------------------------------- formats


def read_folder(source: Path, audio_root: Path | None) -> Iterator[Clip]:
    """Every audio file below a folder; the id is its relative path without the suffix."""
    if not source.is_dir():
        raise UsageError(f"--format folder needs a folder, and --source {source} is a file")
    for file in walk(source):
        if file.suffix.lower() in AUDIO_SUFFIXES:
            yield Clip(id=file.relative_to(source).with_suffix("").as_posix(), audio=file)


def read_jsonl(source: Path, audio_root: Path | None) -> Iterator[Clip]:
    """One object a line: id, audio; where known text | text_file, start, end, speaker, lang, group, split."""
    root = audio_root or source.parent
    for number, item in jsonl_objects(source):
        where = f"{source}:{number}"
        for field in ("id", "audio"):
            if not isinstance(item.get(field), str) or not item[field]:
                raise UsageError(f'{where} has no "{field}"')
        text = item.get("text")
        if text is None and "text_file" in item:
            text = read_text(inside(root, item["text_file"], where))
        yield Clip(
            id=item["id"],
            audio=inside(root, item["audio"], where),
            text=as_text(text, "text", where),
            start=as_seconds(item.get("start"), "start", where),
            end=as_seconds(item.get("end"), "end", where),
            **{label: as_text(item.get(label), label, where) for label in LABELS},
        )


READERS = {"folder": read_folder, "jsonl": read_jsonl}


# ---------------------------------------------------------------- text


def find_texts(clips: Iterable[Clip], prompts: Path) -> list[Clip]:
    """Fill in the text of clips whose manifest has none."""
    found, owner = [], {}
    for clip in clips:
        if clip.text is None:
            stem = clip.audio.stem
            candidates = (
                clip.audio.with_suffix(".txt"),
                prompts / f"{stem}.txt",
                prompts / f"{stem}_prompt.txt",
            )
            file = next((file for file in candidates if file.is_file()), None)
            if file:
                # One prompt file for two recordings would give one of them a wrong text.
                if owner.setdefault(file, clip.audio) != clip.audio:
                    raise UsageError(
                        f"two audio files would share the text {file}: {owner[file]} and {clip.audio}"
                    )
                clip = replace(clip, text=read_text(file))
        found.append(clip)
    return found


def apply_missing_text(clips: list[Clip], missing_text: str) -> list[Clip]:
    missing = [clip.id for clip in clips if not clip.text]
    if not missing:
        return clips
    named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    if missing_text == "error":
        raise UsageError(
            f"{len(missing)} of {len(clips)} clips have no text: {named} (give each a <stem>.txt, "
            "or choose --missing-text skip or empty)"
        )
    print(f"{len(missing)} of {len(clips)} clips have no text (--missing-text {missing_text}): {named}")
    if missing_text == "skip":
        clips = [clip for clip in clips if clip.text]
        if not clips:
            raise UsageError("no clip is left after --missing-text skip")
        return clips
    return [clip if clip.text else replace(clip, text="") for clip in clips]


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}): convert it"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


# ---------------------------------------------------------------- helpers


def walk(folder: Path) -> Iterator[Path]:
    """Files below a folder. Links to folders are not followed, so a link loop cannot catch us."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted(links):
            print(f"not followed: {os.path.join(parent, name)} is a link to a folder")
        yield from (Path(parent, name) for name in sorted(files))


def inside(root: Path, name: object, where: str) -> Path:
    """A path out of metadata, refused when it leaves the folder it belongs to."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(f"{where} has no usable path: {name!r}")
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):  # a link loop
        raise UsageError(f"{where}: {name} cannot be resolved") from None
    if not path.is_relative_to(root.resolve()):
        raise UsageError(f"{where}: {name} points outside {root}; move the file there or set --audio-root")
    return path


def refuse_duplicates(clips: list[Clip]) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        if clip.id in seen:
            raise UsageError(f"two clips have the id {clip.id}: {seen[clip.id].audio} and {clip.audio}")
        seen[clip.id] = clip


def jsonl_objects(source: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(read_text(source).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{source}:{number} is not JSON: {error}") from None
        if not isinstance(item, dict):
            raise UsageError(f"{source}:{number} is not a JSON object")
        yield number, item


def as_text(value: object, field: str, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):  # speaker numbers are common
        return str(value).strip()
    raise UsageError(f'{where}: "{field}" must be text, not {value!r}')


def as_seconds(value: object, field: str, where: str) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f'{where}: "{field}" must be seconds from 0, not {value!r}')
    return seconds
