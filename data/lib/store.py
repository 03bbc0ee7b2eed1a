"""Datasets on disk: Arrow files that `datasets.load_from_disk` reads, plus dataset.json.

A dataset is complete or absent: it is written to a work folder next to its final place, synced to disk and renamed.
dataset.json has a SHA-256 per Arrow file, because Arrow loads a file with a flipped bit or a missing end silently.
"""

import errno
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


def list_value(column: pa.ListArray, row: int) -> np.ndarray:
    """One row of a list column, without copying it."""
    start, end = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
    return column.values.slice(start, end - start).to_numpy()


# ---------------------------------------------------------------- a dataset


def write_dataset(folder: Path, rows: Iterable[dict], columns: dict[str, str], sums: tuple[str, ...]) -> list[dict]:
    """Write the Arrow files and what `load_from_disk` needs; returns the file list for dataset.json.

    `sums`: columns whose total is recorded per file (frames, samples).
    """
    from datasets import DatasetInfo, Features, List, Value

    kinds = {LISTS: List(Value("int16")), TEXTS: List(Value("string"))}
    features = Features({name: kinds.get(kind) or Value(kind) for name, kind in columns.items()})
    folder.mkdir(parents=True)
    files = []
    batches = batched(rows, ROWS_PER_BATCH)
    batch_rows = next(batches, [])
    while batch_rows:
        file = folder / f"{len(files)}.tmp"
        entry = {"name": file.name, "rows": 0} | {name: 0 for name in sums}
        with open(file, "wb") as stream:
            with pa.ipc.new_stream(stream, features.arrow_schema) as writer:
                while batch_rows and stream.tell() < BYTES_PER_FILE:
                    writer.write_batch(arrow_batch(batch_rows, columns).cast(features.arrow_schema))
                    entry["rows"] += len(batch_rows)
                    for name in sums:
                        entry[name] += sum(int(row[name]) for row in batch_rows)
                    batch_rows = next(batches, [])
        files.append(entry)
    for number, entry in enumerate(files):
        name = f"data-{number:05d}-of-{len(files):05d}.arrow"
        (folder / entry["name"]).rename(folder / name)
        entry |= {"name": name, "sha256": hash_file(folder / name), "bytes": (folder / name).stat().st_size}
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


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out.absolute()} already exists: choose another path or remove it")


def write_derived(out: Path, info: dict, rows: Iterable[dict], columns: dict[str, str], settings: dict) -> None:
    """Write a token dataset that was made from another one; `info`: dataset.json of that one."""
    out = out.absolute()
    work = out.with_name(out.name + ".work")
    with clear_disk_errors(out), locked(work / "lock"):
        shutil.rmtree(work / "dataset", ignore_errors=True)
        files = write_dataset(work / "dataset", rows, columns, sums=("frames",))
        # Without these two, encode.py does not mistake it for its own output.
        info = {name: value for name, value in info.items() if name not in ("key", "clips")}
        info |= {
            "rows": sum(entry["rows"] for entry in files),
            "frames": sum(entry["frames"] for entry in files),
            "settings": info["settings"] | settings,
            "files": files,
        }
        write_json(work / "dataset/dataset.json", info)
        publish(work / "dataset", out)
        shutil.rmtree(work)


def read_rows(folder: Path, info: dict) -> Iterator[dict]:
    """All rows of a dataset in order; lists of numbers are NumPy views."""
    for entry in info["files"]:
        for batch in read_arrow(folder / entry["name"]):
            columns = {}
            for name in batch.schema.names:
                column = batch.column(name)
                is_list = pa.types.is_list(column.type) and column.type.value_type == pa.int16()
                columns[name] = [list_value(column, i) for i in range(len(batch))] if is_list else column.to_pylist()
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


def arrow_columns(folder: Path, info: dict) -> dict[str, str]:
    """Column names and types of a dataset, as write_dataset() takes them."""
    schema = read_arrow(folder / info["files"][0]["name"])[0].schema
    names = {kind: name for name, kind in ARROW_TYPES.items()}
    lists = {pa.int16(): LISTS, pa.string(): TEXTS}
    return {
        field.name: lists[field.type.value_type] if pa.types.is_list(field.type) else names[field.type]
        for field in schema
    }


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
def clear_disk_errors(out: Path) -> Iterator[None]:
    """Turn a full disk or missing permissions into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(nearest_folder(out)).free
            raise UserError(
                f"the disk with --out {out} is full ({free / 1e6:.1f} MB free): make room and run the same "
                "command again; finished clips are kept"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(f"cannot write to --out {out}: {error.strerror} ({error.filename})") from None
        raise


def nearest_folder(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path
