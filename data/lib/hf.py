"""Hugging Face datasets as a source of clips."""

import functools
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from lib.clips import ID_NAMES, TEXT_NAMES, Clip, Options, as_text, as_texts, as_weight
from lib.hub import explain


def read_hf(source: Path, options: Options) -> Iterator[Clip]:
    """A dataset on disk (save_to_disk or parquet) or a hub id, with a column of audio or of audio_codes."""
    source = Path(f"{source}@{options.revision}") if options.revision else source
    for split, data in open_hf(str(source)).items():
        names = data.column_names
        text = options.text_column or next((name for name in (*TEXT_NAMES, "texts") if name in names), None)
        if (text is not None and text not in names) or hf_content(data) is None:
            raise UserError(f"--source {source} needs an audio column and a text column; it has {', '.join(names)}")
        id = next((name for name in ID_NAMES if name in names), None)
        label_names = {"speaker": ("speaker", "speaker_id"), "lang": ("lang", "language"), "group": ("group",)}
        labels = {label: next((n for n in choices if n in names), None) for label, choices in label_names.items()}
        columns = [name for name in {id, text, "weight" if "weight" in names else None, *labels.values()} if name]
        without_audio = data.select_columns(columns) if columns else None  # audio is read later, clip by clip
        for number in range(len(data)):
            row = without_audio[number] if without_audio else {}
            where = f"{source}, row {number}"
            yield Clip(
                id=str(row[id]) if id else f"{split}{number:08d}",
                audio=source,
                row=(split, number),
                coded=hf_content(data) == "audio_codes",
                split=split or None,
                weight=as_weight(row.get("weight"), where),
                **as_texts(row.get(text), "text", where),
                **{label: as_text(row.get(name), label, where) for label, name in labels.items()},
            )


@functools.cache
def open_hf(source: str) -> dict:
    """split -> Dataset; audio is left undecoded, because we decode it ourselves. `source`: a path, or a hub id, which
    may end with @revision."""
    import datasets
    from huggingface_hub.utils import logging

    name, _, revision = (source, "", "") if Path(source).exists() else source.partition("@")
    try:
        if any((Path(source) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(source)
        else:
            logging.set_verbosity_error()  # what goes wrong is said once, below
            data = datasets.load_dataset(name, revision=revision or None)
    except Exception as error:
        if not Path(source).exists():
            raise UserError(f"--source {explain(error, name, revision)}") from None
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
