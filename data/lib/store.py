"""Datasets on disk: Arrow files that `datasets.load_from_disk` reads, plus dataset.json.

A dataset is complete or absent: it is written to a work folder next to its final place, synced to disk and renamed.
dataset.json has a SHA-256 per Arrow file, because Arrow loads a file with a flipped bit or a missing end silently.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.errors import UserError

ROWS_PER_BATCH = 512
BYTES_PER_FILE = 500_000_000
# Column types: codes and samples, several texts; the other types have their Arrow names.
LISTS, TEXTS = "int16 list", "string list"
ARROW_TYPES = {LISTS: pa.list_(pa.int16()), TEXTS: pa.list_(pa.string())}
ARROW_TYPES |= {"string": pa.string(), "int32": pa.int32(), "float32": pa.float32()}


# ---------------------------------------------------------------- Arrow files


def arrow_batch(rows: list[dict], columns: dict[str, str]) -> pa.RecordBatch:
    arrays = []
    for name, kind in columns.items():
        values = [row[name] for row in rows]
        if kind == LISTS:  # built with NumPy, without a Python object per number
            offsets = np.zeros(len(values) + 1, dtype=np.int32)
            np.cumsum([len(value) for value in values], out=offsets[1:])
            flat = np.concatenate([np.asarray(value, dtype=np.int16) for value in values])
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)))
        else:
            arrays.append(pa.array(values, ARROW_TYPES[kind]))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def write_arrow(file: Path, rows: list[dict], columns: dict[str, str]) -> None:
    """Write one Arrow file; it gets its name only after it is synced to disk."""
    temporary = file.with_name(file.name + ".tmp")
    batch = arrow_batch(rows, columns)
    with open(temporary, "wb") as stream:
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)
    sync_folder(file.parent)


def read_arrow(file: Path) -> list[pa.RecordBatch]:
    """The record batches of a file, memory-mapped."""
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all().to_batches()


# ---------------------------------------------------------------- a dataset


def write_dataset(folder: Path, rows: Iterable[dict], columns: dict[str, str]) -> list[dict]:
    """Write the Arrow files and what `load_from_disk` needs; returns the file list for dataset.json."""
    from datasets import DatasetInfo, Features, List, Value

    kinds = {LISTS: List(Value("int16")), TEXTS: List(Value("string"))}
    features = Features({name: kinds.get(kind) or Value(kind) for name, kind in columns.items()})
    folder.mkdir(parents=True)
    drafts = []
    batches = batched(rows, ROWS_PER_BATCH)
    batch_rows = next(batches, [])
    while batch_rows:
        drafts.append(folder / f"{len(drafts)}.tmp")
        with open(drafts[-1], "wb") as stream, pa.ipc.new_stream(stream, features.arrow_schema) as writer:
            while batch_rows and stream.tell() < BYTES_PER_FILE:
                writer.write_batch(arrow_batch(batch_rows, columns).cast(features.arrow_schema))
                batch_rows = next(batches, [])
    for number, draft in enumerate(drafts):
        draft.rename(folder / f"data-{number:05d}-of-{len(drafts):05d}.arrow")
    files = list_files(folder)
    state = {
        "_data_files": [{"filename": entry["name"]} for entry in files],
        "_fingerprint": hashlib.sha256("".join(entry["sha256"] for entry in files).encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    DatasetInfo(features=features).write_to_directory(str(folder))
    return files


def list_files(folder: Path) -> list[dict]:
    """The Arrow files of a dataset, as dataset.json names them."""
    return [
        {"name": file.name, "sha256": hash_file(file), "bytes": file.stat().st_size}
        for file in sorted(folder.glob("data-*.arrow"))
    ]


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out.absolute()} already exists: choose another path or remove it")


def write_derived(out: Path, info: dict, data, settings: dict) -> None:
    """Write a token dataset that was made from another one. `info`: dataset.json of that one; `data`: what
    datasets.load_from_disk gave, with its changes."""
    out = out.absolute()
    work = out.with_name(out.name + ".work")
    with name_full_disk(out), locked(work / "lock"):
        shutil.rmtree(work / "dataset", ignore_errors=True)
        data.save_to_disk(work / "dataset", max_shard_size=BYTES_PER_FILE)
        # Without these two, encode.py does not mistake it for its own output.
        info = {name: value for name, value in info.items() if name not in ("key", "clips")}
        info |= {
            "rows": len(data),
            "frames": sum(data["frames"][:]),
            "settings": info["settings"] | settings,
            "files": list_files(work / "dataset"),
        }
        write_json(work / "dataset/dataset.json", info)
        publish(work / "dataset", out)
        shutil.rmtree(work)


def set_column(data, name: str, texts: list[str | None]):
    """A dataset of the datasets library with this column of texts, new or replaced."""
    from datasets import Value, disable_progress_bars

    disable_progress_bars()
    if name in data.column_names:
        data = data.remove_columns(name)
    return data.add_column(name, texts, feature=Value("string"))


def read_rows(folder: Path, info: dict) -> Iterator[dict]:
    """All rows of a dataset in order; lists of numbers are NumPy views."""
    for entry in info["files"]:
        for batch in read_arrow(folder / entry["name"]):
            lists = [
                field.name
                for field in batch.schema
                if pa.types.is_list(field.type) and field.type.value_type == pa.int16()
            ]
            for number, row in enumerate(batch.drop_columns(lists).to_pylist()):
                yield row | {name: batch.column(name)[number].values.to_numpy() for name in lists}


def batched(rows: Iterable[dict], size: int) -> Iterator[list[dict]]:
    group = []
    for row in rows:
        group.append(row)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def write_json(file: Path, content: object) -> None:
    """Write through a temporary file: a report may read the .json of a sample while it is rewritten."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.rename(file)


def write_jsonl(file: Path, objects: Iterable[object]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        for item in objects:
            stream.write(json.dumps(item, ensure_ascii=False) + "\n")


def read_jsonl(file: Path) -> Iterator[dict]:
    """Objects of a JSONL file, none if it is missing; a last line cut off by a kill is ignored."""
    if file.exists():
        with open(file, encoding="utf-8") as stream:
            for line in stream:
                if line.endswith("\n"):
                    yield json.loads(line)


def open_dataset(folder: Path) -> dict:
    """dataset.json of a dataset that must exist."""
    try:
        return json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"{folder} is not a dataset (no dataset.json): make one with data/encode.py or data/pairs.py"
        ) from None
    except ValueError:
        raise UserError(f"{folder}/dataset.json is damaged: make the dataset again") from None


def read_dataset_json(folder: Path) -> dict | None:
    """dataset.json of the dataset at --out, or None if there is none; refuses a folder that holds anything else."""
    if not folder.exists():
        return None
    try:
        return json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        raise UserError(f"--out {folder} exists and is not a dataset: choose another path or remove it") from None


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


# ---------------------------------------------------------------- complete or absent


def publish(folder: Path, out: Path) -> None:
    """Move a finished folder to its final name, replacing an older one."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    sync_folder(folder)
    old = previous(out)
    if out.exists():
        out.rename(old)
    folder.rename(out)
    sync_folder(out.parent)
    if old.exists():
        shutil.rmtree(old)


def previous(out: Path) -> Path:
    return out.with_name(out.name + ".previous")


def restore_interrupted_publish(out: Path) -> None:
    """Undo a publish() that was killed between its two renames: the old dataset returns, and its codes are reused."""
    old = previous(out)
    if old.exists():
        if out.exists():
            shutil.rmtree(old)
        else:
            old.rename(out)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(file: Path, waiting: str | None = None, shared: bool = False) -> Iterator[None]:
    """Hold a lock file. A second process is refused, or prints the message `waiting` and waits if there is one.

    `shared`: several processes may hold the lock together, but not while one holds it exclusively.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as stream:
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise UserError(f"another process is writing here (it holds {file}): wait for it or stop it") from None
            print(waiting, flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if waiting is None and not shared:  # no process waits on this file: remove it, to leave nothing behind
                file.unlink(missing_ok=True)
                with suppress(OSError):
                    file.parent.rmdir()


@contextmanager
def name_full_disk(out: Path) -> Iterator[None]:
    """The error of a full disk names no file: here it gets the one of --out."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(out)
        raise
