"""Where clips come from: one reader per input format, each giving Clips.

A clip's text is looked up in this order: the manifest's field, `<stem>.txt` next to the audio, `<prompts>/<stem>.txt`,
`<prompts>/<stem>_prompt.txt`. A file name is never used as a prompt.
"""

import csv
import functools
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lib.errors import UserError
from lib.waveform import Reject

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf")
LABELS = ("speaker", "lang", "group", "split", "ref", "scene")
TEXT_NAMES = ("text", "caption", "transcript", "transcription", "sentence", "prompt")
ID_NAMES = ("id", "ytid")
AUDIO_NAMES = ("audio", "audio_file", "file", "file_name", "path")


@dataclass(frozen=True)
class Clip:
    id: str
    audio: Path  # the file, or the Hugging Face dataset that contains `row`
    text: str | None = None  # None: not found yet
    start: float | None = None  # seconds; None: from the beginning
    end: float | None = None  # seconds; None: to the end
    row: tuple[str, int] | None = None  # split and row number in a Hugging Face dataset
    coded: bool = False  # the content is codes, not audio
    speaker: str | None = None
    lang: str | None = None
    group: str | None = None  # clips of one group must all be in train or all in eval
    split: str | None = None
    ref: str | None = None  # id of the reference clip, whose voice is to be cloned
    scene: str | None = None

    @property
    def recording(self) -> str:
        """Identifies the recording that this clip is all or part of: a file, or a row of a dataset."""
        return str(self.audio) if self.row is None else f"{self.audio}#{self.row[0]}#{self.row[1]}"


@dataclass(frozen=True)
class Options:
    """Flags that only some formats use."""

    audio_root: Path | None = None  # manifest paths are relative to this instead of the manifest's folder
    captions: Path | None = None  # legacy-npy: CSV with the captions
    text_column: str | None = None  # csv, hf: column with the text
    musiccaps_split: str = "balanced"


def find_clips(
    source: Path,
    format: str,
    prompts: Path | None = None,
    missing_text: str = "error",
    options: Options | None = None,
) -> list[Clip]:
    """All clips of `source`, sorted by id, each with its text."""
    if not source.exists() and format != "hf":  # an hf source may be a hub id
        raise UserError(f"--source {source} does not exist")
    clips = list(READERS[format](source, options or Options()))
    if not clips:
        raise UserError(f"no clips found in --source {source} with --format {format}")
    refuse_duplicates(clips)
    clips = find_texts(clips, prompts or (source if source.is_dir() else source.parent) / "prompts")
    return sorted(apply_missing_text(clips, missing_text), key=lambda clip: clip.id)


def count_wanted(format: str, options: Options, clips: list[Clip]) -> int:
    """How many clips the source lists; a partly filled folder of .npy codes lists more in its captions than it has."""
    return max(len(clips), len(list(musiccaps_rows(options.captions)))) if format == "legacy-npy" else len(clips)


# ---------------------------------------------------------------- audio formats


def read_folder(source: Path, options: Options) -> Iterator[Clip]:
    """Every audio file in a folder and its subfolders; the id is the relative path without the suffix."""
    if not source.is_dir():
        raise UserError(f"--format folder needs a folder, but --source {source} is a file")
    for file in walk(source):
        if file.suffix.lower() in AUDIO_SUFFIXES:
            yield Clip(id=file.relative_to(source).with_suffix("").as_posix(), audio=file)


def read_jsonl(source: Path, options: Options) -> Iterator[Clip]:
    """One JSON object per line: id, audio (or codes), text or text_file; optionally start, end and labels.

    Voice-cloning manifests add ref_audio and ref_text, and may name the clip target_audio and target_text.
    """
    root = options.audio_root or source.parent
    pairs = []
    for number, item in jsonl_objects(source):
        where = f"{source}:{number}"
        item = {name.removeprefix("target_"): value for name, value in item.items()}
        pairs.append((manifest_clip(item, root, where), manifest_reference(item, root, where)))
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


def read_musiccaps(source: Path, options: Options) -> Iterator[Clip]:
    """The MusicCaps CSV and a folder of audio files named by ytid (--audio-root); many videos no longer exist."""
    root = options.audio_root or source.parent
    files = {file.stem: file for file in walk(root) if file.suffix.lower() in AUDIO_SUFFIXES}
    rows = list(musiccaps_rows(source))
    available = [row for row in rows if row["ytid"] in files]
    for row in available:
        split = musiccaps_split(row, options)
        yield Clip(id=row["ytid"], audio=files[row["ytid"]], text=row["caption"], split=split)
    print(f"{len(available)} of {len(rows)} rows of {source.name} have an audio file in {root}")


def musiccaps_split(row: dict, options: Options) -> str:
    column = {"balanced": "is_balanced_subset", "audioset": "is_audioset_eval"}[options.musiccaps_split]
    return "eval" if row.get(column, "").strip().lower() == "true" else "train"


# ---------------------------------------------------------------- codes made by earlier trainers


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
        split = musiccaps_split(row, options)
        yield Clip(id=ytid, audio=file, text=row.get("caption"), coded=True, split=split)


def read_legacy_pt(source: Path, options: Options) -> Iterator[Clip]:
    """`.pt` files of shape (T, 9) or (T, 18); metadata.json maps files to prompts, or is a list of objects."""
    texts = {}
    if (source / "metadata.json").is_file():
        content = json_file(source / "metadata.json", (dict, list))
        entries = content.items() if isinstance(content, dict) else ((None, entry) for entry in content)
        for number, (name, entry) in enumerate(entries):
            where = f"{source / 'metadata.json'}: entry {number}"
            if isinstance(entry, dict):
                name = first_field(entry, ("encoded_file", "codes", *AUDIO_NAMES, "filename")) or name
                entry = first_field(entry, TEXT_NAMES)
            texts[inside(source, name, where, by_name=True).stem] = as_text(entry, "text", where)
    for file in walk(source):
        if file.suffix == ".pt":
            text = texts.get(file.stem)
            if text is not None and letters(text) == letters(file.stem):
                text = None  # the old encoder turned file names into prompts
            yield Clip(id=file.relative_to(source).with_suffix("").as_posix(), audio=file, text=text, coded=True)


def letters(text: str) -> str:
    """The words of a prompt or file name, in a form that can be compared."""
    return " ".join(re.findall(r"\w+", text.replace("_", " ").lower()))


# ---------------------------------------------------------------- Hugging Face datasets


def read_hf(source: Path, options: Options) -> Iterator[Clip]:
    """A dataset on disk (save_to_disk or parquet) or a hub id, with a column of audio or of audio_codes."""
    for split, data in open_hf(str(source)).items():
        names = data.column_names
        text = options.text_column or next((name for name in TEXT_NAMES if name in names), None)
        if (text is not None and text not in names) or hf_content(data) is None:
            raise UserError(f"--source {source} needs an audio column and a text column; it has {', '.join(names)}")
        id = next((name for name in ID_NAMES if name in names), None)
        label_names = {"speaker": ("speaker", "speaker_id"), "lang": ("lang", "language"), "group": ("group",)}
        labels = {label: next((n for n in choices if n in names), None) for label, choices in label_names.items()}
        columns = [name for name in {id, text, *labels.values()} if name]
        without_audio = data.select_columns(columns) if columns else None  # audio is read later, clip by clip
        for number in range(len(data)):
            row = without_audio[number] if without_audio else {}
            where = f"{source}, row {number}"
            yield Clip(
                id=str(row[id]) if id else f"{split}{number:08d}",
                audio=source,
                row=(split, number),
                coded=hf_content(data) == "audio_codes",
                text=as_text(row.get(text), "text", where),
                split=split or None,
                **{label: as_text(row.get(name), label, where) for label, name in labels.items()},
            )


@functools.cache
def open_hf(source: str) -> dict:
    """split -> Dataset; audio is left undecoded, because we decode it ourselves."""
    import datasets

    try:
        if any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(source)
        else:
            data = datasets.load_dataset(source)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"--source {source} cannot be opened as a dataset: {reason}") from None
    splits = data if isinstance(data, datasets.DatasetDict) else {"": data}
    for split, part in splits.items():
        for name, feature in part.features.items():
            if isinstance(feature, datasets.Audio):
                splits[split] = splits[split].cast_column(name, datasets.Audio(decode=False))
    return dict(splits)


def hf_content(data) -> str | None:
    """The column with the content: the first with audio, or audio_codes."""
    import datasets

    audio = [name for name, feature in data.features.items() if isinstance(feature, datasets.Audio)]
    return audio[0] if audio else "audio_codes" if "audio_codes" in data.column_names else None


# ---------------------------------------------------------------- Higgs chat formats


def read_chatml(source: Path, options: Options) -> Iterator[Clip]:
    """Chats with a reference turn and target turns, in either of the two layouts in use, as a JSON list or JSONL."""
    root = options.audio_root or source.parent
    pairs = []
    for number, sample in json_samples(source):
        where = f"{source}: sample {number}"
        id = as_text(sample.get("id"), "id", where) or f"{source.stem}-{number:06d}"
        labels = {"speaker": as_text(sample.get("speaker"), "speaker", where)}
        labels |= {"split": as_text(sample.get("split"), "split", where), "scene": chat_scene(sample)}
        turns = spoken_turns(sample, where)
        first = trained_turn(sample, turns, where)
        for count, turn in enumerate(turns[first:]):
            target = Clip(
                id=id if first == len(turns) - 1 else f"{id}.{count}",
                audio=inside(root, turn["audio"], where),
                text=turn["text"],
                **labels,
            )
            pairs.append((target, reference_clip(root, turns[first - 1], where) if first else None))
    yield from with_references(pairs)


def spoken_turns(sample: dict, where: str) -> list[dict]:
    """Every (text, audio) of a chat in order; the text is in the turn before its audio, or in the same turn."""
    turns, texts = [], []
    messages = sample.get("messages")
    if not isinstance(messages, list):
        raise UserError(f'{where} has no "messages" list')
    for number, message in enumerate(messages):
        if message.get("role") in ("system", "scene"):
            continue
        content = message.get("content")
        texts = texts if message["role"] == "assistant" else []
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, dict) and part.get("type") == "audio":
                turns.append({"text": texts[-1] if texts else None, "message": number})
                turns[-1]["audio"] = part.get("audio_url") or part.get("audio")
            else:
                text = part.get("text") if isinstance(part, dict) else part
                texts.append(as_text(text, "content", where))
    if not turns or messages[turns[-1]["message"]].get("role") != "assistant":
        raise UserError(f"{where} must end with an assistant turn that has audio")
    return turns


def trained_turn(sample: dict, turns: list[dict], where: str) -> int:
    """Index of the first turn to train on: the last turn, unless `start_index` names an earlier message."""
    start = sample.get("start_index")
    if start is None:
        return len(turns) - 1
    trained = [number for number, turn in enumerate(turns) if turn["message"] >= start]
    if not trained:
        raise UserError(f"{where}: start_index {start} leaves no turn to train on")
    return trained[0]


def chat_scene(sample: dict) -> str | None:
    for message in sample.get("messages") or []:
        content = message.get("content")
        if message.get("role") == "scene" and isinstance(content, str):
            return content.strip()
        if message.get("role") == "system" and isinstance(content, str):
            match = re.search(r"<\|scene_desc_start\|>(.*?)<\|scene_desc_end\|>", content, re.DOTALL)
            if match:
                return match[1].strip()
    return None


def read_metadata_json(source: Path, options: Options) -> Iterator[Clip]:
    """samples[] with audio_file, transcript_file, ref_audio_file, ref_transcript, scene, speaker_id."""
    if source.is_dir():
        source = source / "metadata.json"
    root = options.audio_root or source.parent
    pairs = []
    for number, item in json_samples(source):
        where = f"{source}: sample {number}"
        audio = inside(root, item.get("audio_file"), where)
        text = as_text(item.get("transcript"), "transcript", where)
        if text is None and item.get("transcript_file"):
            text = read_text(inside(root, item["transcript_file"], where))
        target = Clip(
            id=as_text(item.get("id"), "id", where) or clip_id(root, audio),
            audio=audio,
            text=text,
            speaker=as_text(item.get("speaker_id"), "speaker_id", where),
            scene=as_text(item.get("scene"), "scene", where),
            split=as_text(item.get("split"), "split", where),
        )
        reference = {"audio": item.get("ref_audio_file"), "text": item.get("ref_transcript")}
        pairs.append((target, reference_clip(root, reference, where) if reference["audio"] else None))
    yield from with_references(pairs)


def with_references(pairs: list[tuple[Clip, Clip | None]]) -> Iterator[Clip]:
    """All targets with the ids of their references, then each reference that is not itself a target, once."""
    ids = {(target.audio, target.start, target.end): target.id for target, _ in pairs}
    references = {}
    for target, reference in pairs:
        if reference is not None:
            span = (reference.audio, reference.start, reference.end)
            if ids.get(span) == target.id:
                raise UserError(f"clip {target.id} is its own reference: {reference.audio}")
            if span not in ids:
                ids[span] = reference.id
                references[span] = replace(reference, speaker=target.speaker, split=target.split)
            target = replace(target, ref=ids[span])
        yield target
    yield from references.values()


def reference_clip(root: Path, item: dict, where: str) -> Clip:
    audio = inside(root, item["audio"], where)
    start, end = (as_seconds(item.get(name), name, where) for name in ("start", "end"))
    span = "" if start is None and end is None else f"@{start or 0:g}-{'' if end is None else f'{end:g}'}"
    text = as_text(item.get("text"), "ref_text", where)
    return Clip(id=f"{clip_id(root, audio)}{span}@ref", audio=audio, text=text, start=start, end=end)


READERS = {
    "folder": read_folder,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "musiccaps": read_musiccaps,
    "hf": read_hf,
    "legacy-npy": read_legacy_npy,
    "legacy-pt": read_legacy_pt,
    "chatml": read_chatml,
    "metadata-json": read_metadata_json,
}


# ---------------------------------------------------------------- text


def find_texts(clips: Iterable[Clip], prompts: Path) -> list[Clip]:
    """The clips, with texts from .txt files where the manifest has none."""
    with_text, owner = [], {}
    for clip in clips:
        if clip.text is None and clip.row is None:
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


def apply_missing_text(clips: list[Clip], missing_text: str) -> list[Clip]:
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
        clips = [clip for clip in clips if clip.text]
        if not clips:
            raise UserError("--missing-text skip leaves no clip: no clip has a text")
        return clips
    return [clip if clip.text else replace(clip, text="") for clip in clips]


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
    if clip.row is not None:
        import numpy as np

        split, number = clip.row
        data = open_hf(str(clip.audio))[split]
        value = data[number][hf_content(data)]
        if clip.coded:
            stream = io.BytesIO()
            np.save(stream, np.asarray(value), allow_pickle=False)
            return stream.getvalue()
        if value.get("bytes"):
            return value["bytes"]
        file = inside(clip.audio, value.get("path"), f"{clip.audio}, row {number}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise Reject(f"unreadable file: {error.strerror}") from None


# ---------------------------------------------------------------- helpers


def walk(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders. Links to folders are not followed, as they may form a loop."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in folders:
            if os.path.islink(os.path.join(parent, name)):
                print(f"not followed: {os.path.join(parent, name)} (a link to a folder)")
        yield from (Path(parent, name) for name in sorted(files))


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


def audio_named(root: Path, name: str, where: str) -> Path:
    """The file for an id: LJSpeech has wavs/<id>.wav; others put it next to the list, or the suffix into the id."""
    for folder in ("wavs", "."):
        for suffix in ("", *AUDIO_SUFFIXES):
            path = inside(root, f"{folder}/{name}{suffix}", where)
            if path.is_file():
                return path
    return inside(root, f"wavs/{name}.wav", where)  # missing: the clip will be rejected under this name


def manifest_clip(item: dict, root: Path, where: str) -> Clip:
    if not isinstance(item.get("id"), str) or not item["id"]:
        raise UserError(f'{where} has no "id"')
    content = item.get("codes") or item.get("audio")
    if not content:
        raise UserError(f'{where} has neither "audio" nor "codes"')
    text = item.get("text")
    if text is None and item.get("text_file"):
        text = read_text(inside(root, item["text_file"], where))
    return Clip(
        id=item["id"],
        audio=inside(root, content, where),
        text=as_text(text, "text", where),
        start=as_seconds(item.get("start"), "start", where),
        end=as_seconds(item.get("end"), "end", where),
        coded="codes" in item,
        **{label: as_text(item.get(label), label, where) for label in LABELS if label != "ref"},
    )


def manifest_reference(item: dict, root: Path, where: str) -> Clip | None:
    fields = {name.removeprefix("ref_"): value for name, value in item.items() if name.startswith("ref_")}
    return reference_clip(root, fields, where) if fields.get("audio") else None


def refuse_duplicates(clips: list[Clip]) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        if clip.id in seen:
            raise UserError(f"two clips have the id {clip.id}: {seen[clip.id].recording} and {clip.recording}")
        seen[clip.id] = clip


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


def musiccaps_rows(source: Path) -> Iterator[dict]:
    for number, row in csv_rows(read_lines(source), source):
        if not row.get("ytid") or "caption" not in row:
            raise UserError(f"{source}:{number} has no ytid or no caption: is this the MusicCaps CSV?")
        yield row | {"caption": " ".join(row["caption"].split())}  # five captions hold line breaks


def first_field(item: dict, names: Iterable[str]) -> object:
    return next((item[name] for name in names if item.get(name)), None)


def as_text(value: object, field: str, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):  # speaker numbers are common
        return str(value).strip()
    raise UserError(f'{where}: "{field}" must be text, not {value!r}')


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
