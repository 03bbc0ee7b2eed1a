"""What a clip is, and what every reader of clips uses: files, manifests and their fields."""

import ast
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf")
# Sound that soundfile cannot read. Such a file is named, never passed over in silence.
UNREADABLE_SUFFIXES = (".m4a", ".m4b", ".mp4", ".aac", ".webm", ".mka", ".mkv", ".wma", ".amr", ".ac3")
REFERENCES = ("ref", "ref1", "ref2", "ref3")  # of [SPEAKER0], [SPEAKER1], ... in a dialogue; `ref` is any other clip's
LABELS = ("speaker", "lang", "group", "split", *REFERENCES, "scene", "aspects")
MANIFEST_LABELS = [label for label in LABELS if label not in (*REFERENCES, "aspects")]
TEXT_NAMES = ("text", "caption", "transcript", "transcription", "sentence", "prompt")
ID_NAMES = ("id", "ytid")
AUDIO_NAMES = ("audio", "audio_file", "file", "file_name", "path")


@dataclass(frozen=True)
class Clip:
    id: str
    audio: Path  # the file, or the Hugging Face dataset that contains `row`
    text: str | None = None  # None: not found yet
    texts: tuple[str, ...] = ()  # all transcripts, `text` first, if there are several
    start: float | None = None  # seconds; None: from the beginning
    end: float | None = None  # seconds; None: to the end
    row: tuple[str, int] | None = None  # split and row number in a Hugging Face dataset
    coded: bool = False  # the content is codes, not audio
    speaker: str | None = None
    lang: str | None = None
    group: str | None = None  # clips of one group must all be in train or all in eval
    split: str | None = None
    ref: str | None = None  # id of the reference clip, whose voice is to be cloned; [SPEAKER0]'s in a dialogue
    ref1: str | None = None  # in a dialogue: ids of the reference clips of [SPEAKER1], [SPEAKER2] and [SPEAKER3]
    ref2: str | None = None
    ref3: str | None = None
    scene: str | None = None
    aspects: str | None = None  # what MusicCaps lists about the sound, as a JSON list of texts
    weight: float | None = None  # of its loss; None: 1
    line: tuple[int, str] | None = None  # the codes are in this line and field of `audio`, a JSONL file

    @property
    def recording(self) -> str:
        """Identifies the recording that this clip is all or part of: a file, a row of a dataset or a line of a file."""
        place = self.row or self.line
        return str(self.audio) if place is None else f"{self.audio}#{place[0]}#{place[1]}"


@dataclass(frozen=True)
class Skipped:
    """A file or row of the source that becomes no clip."""

    name: str
    reason: str
    has_audio: bool = True  # then training counts it as missing


@dataclass(frozen=True)
class Options:
    """Flags that only some formats use."""

    audio_root: Path | None = None  # manifest paths are relative to this instead of the manifest's folder
    captions: Path | None = None  # legacy-npy: CSV with the captions
    text_column: str | None = None  # csv, hf: column with the text
    musiccaps_split: str = "balanced"
    revision: str | None = None  # hf: of a dataset on the hub


# ---------------------------------------------------------------- files


def walk(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders. Links to folders are not followed, as they may form a loop."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in folders:
            if os.path.islink(os.path.join(parent, name)):
                print(f"not followed: {os.path.join(parent, name)} (a link to a folder)")
        yield from (Path(parent, name) for name in sorted(files))


def unreadable(file: Path) -> Skipped:
    suffix = file.suffix.lower()
    return Skipped(file.name, f"soundfile cannot read {suffix}; convert it with: ffmpeg -i NAME{suffix} NAME.wav")


def inside(root: Path, name: object, where: str, by_name: bool = False) -> Path:
    """The full path for a path in metadata; refused if it leads out of `root`.

    `by_name`: if the path does not exist, only its file name is looked up in `root`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{where} has no usable path: {name!r}")
    if by_name and not (root / name).exists():
        name = Path(name).name
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):  # a link loop
        raise UserError(f"{where}: {name} cannot be resolved (a loop of links?)") from None
    if not path.is_relative_to(root.resolve()):
        raise UserError(f"{where}: {name} points outside {root}; move the file there or set --audio-root")
    return path


def clip_id(root: Path, audio: Path) -> str:
    return audio.relative_to(root.resolve()).with_suffix("").as_posix()


def read_text(file: Path) -> str:
    return read_lines(file).strip()


def read_lines(file: Path) -> str:
    """The whole text, unstripped, so that line numbers in messages are those of the file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start}): convert it"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def jsonl_objects(source: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(read_lines(source).split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise UserError(f"{source}:{number} is not JSON: {error}") from None
        if not isinstance(item, dict):
            raise UserError(f"{source}:{number} is not a JSON object")
        yield number, item


def json_samples(source: Path) -> Iterator[tuple[int, dict]]:
    """Objects of a JSONL file, a JSON list, or the list "samples" in a JSON object."""
    if source.suffix == ".jsonl":
        yield from jsonl_objects(source)
        return
    content = json_file(source, (dict, list))
    samples = content if isinstance(content, list) else content.get("samples")
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise UserError(f'{source} must be a list of objects, or an object with such a list called "samples"')
    yield from enumerate(samples)


def json_file(file: Path, kind: type | tuple[type, ...]) -> object:
    try:
        content = json.loads(read_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, kind):
        expected = "an object" if kind is dict else "an object or a list"
        raise UserError(f"{file} must hold {expected}, not a {type(content).__name__}")
    return content


def csv_rows(content: str, source: Path) -> Iterator[tuple[int, dict]]:
    delimiter = "\t" if "\t" in content.split("\n", 1)[0] else ","
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter=delimiter)
    for row in reader:
        if None in row or None in row.values():
            raise UserError(f"{source}:{reader.line_num} does not have the same number of fields as the header")
        yield reader.line_num, row


# ---------------------------------------------------------------- fields


def first_field(item: dict, names: Iterable[str]) -> object:
    return next((item[name] for name in names if item.get(name)), None)


def as_text(value: object, field: str, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):  # speaker numbers are common
        return str(value).strip()
    raise UserError(f'{where}: "{field}" must be text, not {value!r}')


def as_texts(value: object, field: str, where: str) -> dict:
    """The text of a clip, or its several texts, as fields of Clip."""
    texts = [as_text(each, field, where) for each in (value if isinstance(value, list) else [value])]
    texts = [text for text in texts if text] or texts[:1] or [None]
    return {"text": texts[0], "texts": tuple(texts) if len(texts) > 1 else ()}


def as_aspects(value: object, field: str, where: str) -> str | None:
    """A list of texts as JSON; MusicCaps' CSV holds the text of a Python list."""
    try:
        aspects = ast.literal_eval(value) if value and isinstance(value, str) else value or []
    except (ValueError, SyntaxError):
        aspects = None
    if not isinstance(aspects, list) or not all(isinstance(aspect, str) for aspect in aspects):
        raise UserError(f'{where}: "{field}" must be a list of texts, not {str(value)[:60]!r}')
    return json.dumps(aspects, ensure_ascii=False) if aspects else None


def as_seconds(value: object, field: str, where: str) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(f'{where}: "{field}" must be a number of seconds, 0 or more, not {value!r}')
    return seconds


def as_weight(value: object, where: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise UserError(f'{where}: "weight" must be a number, 0 or more, not {value!r}')
    return weight
