"""Voice cloning: chats with audio turns, Higgs' metadata.json, and the references of any manifest."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import UserError
from lib.clips import (
    REFERENCES,
    Clip,
    Options,
    as_seconds,
    as_text,
    as_weight,
    clip_id,
    inside,
    json_samples,
    read_text,
)


def read_chatml(source: Path, options: Options) -> Iterator[Clip]:
    """Chats with a reference turn and target turns, in either of the two layouts in use, as a JSON list or JSONL."""
    root = options.audio_root or source.parent
    pairs = []
    for number, sample in json_samples(source):
        where = f"{source}: sample {number}"
        id = as_text(sample.get("id"), "id", where) or f"{source.stem}-{number:06d}"
        labels = {"speaker": as_text(sample.get("speaker"), "speaker", where)}
        labels |= {"split": as_text(sample.get("split"), "split", where), "scene": chat_scene(sample)}
        labels |= {"weight": as_weight(sample.get("weight"), where)}
        turns = spoken_turns(sample, where)
        first = trained_turn(sample, turns, where)
        for count, turn in enumerate(turns[first:]):
            target = Clip(
                id=id if first == len(turns) - 1 else f"{id}.{count}",
                audio=inside(root, turn["audio"], where),
                text=turn["text"],
                **labels,
            )
            pairs.append((target, [reference_clip(root, turn, where) for turn in reference_turns(turns[:first])]))
    yield from with_references(pairs)


def reference_turns(before: list[dict]) -> list[dict]:
    """The references among the turns before the target: the last one, or in a dialogue the last of each speaker, whose
    texts begin with [SPEAKER0], [SPEAKER1] and so on; the tags are removed."""
    tagged = {}
    for turn in before:
        match = re.match(r"\[SPEAKER(\d)\]\s*(.*)", turn["text"] or "", re.DOTALL)
        if match:
            tagged[int(match[1])] = turn | {"text": match[2]}
    return [tagged[number] for number in sorted(tagged)] if is_dialogue(tagged) else before[-1:]


def is_dialogue(tagged) -> bool:
    """Whether these numbers are those of two or more speakers, from [SPEAKER0] on without a gap."""
    return 2 <= len(tagged) <= len(REFERENCES) and sorted(tagged) == list(range(len(tagged)))


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
            weight=as_weight(item.get("weight"), where),
        )
        reference = {"audio": item.get("ref_audio_file"), "text": item.get("ref_transcript")}
        pairs.append((target, [reference_clip(root, reference, where)] if reference["audio"] else []))
    yield from with_references(pairs)


def with_references(pairs: list[tuple[Clip, list[Clip | None]]]) -> Iterator[Clip]:
    """All targets with the ids of their references, then each reference that is not itself a target, once."""
    ids = {content_span(target): target.id for target, _ in pairs}
    extra = {}
    for target, references in pairs:
        voices = [reference for reference in references if reference is not None]
        missing = next((number for number, reference in enumerate(references) if reference is None), len(references))
        if missing < len(voices):
            later = next(number for number in range(missing, len(references)) if references[number] is not None)
            raise UserError(f"clip {target.id} has a reference for [SPEAKER{later}] but none for [SPEAKER{missing}]")
        for label, reference in zip(REFERENCES, voices, strict=False):
            span = content_span(reference)
            if ids.get(span) == target.id:
                raise UserError(f"clip {target.id} is its own reference: {reference.recording}")
            if span not in ids:
                ids[span] = reference.id
                # A dialogue's speaker is not that of each of its references.
                speaker = reference.speaker or (target.speaker if len(voices) == 1 else None)
                extra[span] = replace(reference, speaker=speaker, split=target.split)
            target = replace(target, **{label: ids[span]})
        yield target
    yield from extra.values()


def content_span(clip: Clip) -> tuple:
    return clip.recording, clip.start, clip.end


def reference_clip(root: Path, item: dict, where: str) -> Clip:
    audio = inside(root, item["audio"], where)
    start, end = (as_seconds(item.get(name), name, where) for name in ("start", "end"))
    span = "" if start is None and end is None else f"@{start or 0:g}-{'' if end is None else f'{end:g}'}"
    text, speaker = as_text(item.get("text"), "ref_text", where), as_text(item.get("speaker"), "ref_speaker", where)
    id = f"{clip_id(root, audio)}{span}@ref"
    return Clip(id=id, audio=audio, text=text, start=start, end=end, speaker=speaker)
