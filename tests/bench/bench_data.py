"""Reading clips against one .pt file per clip (S7), and starting with 10,000 hours, which are 7 million clips (S9).

    python tests/bench/bench_data.py [--rows 7000000] [--folder DIR]

Time is processor time, so that a busy machine does not change it. The 7 million clips have a few frames each, because
starting depends on their number. Needs 3 GB of disk.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune"), str(ROOT / "tests")]
from run import Row, report  # noqa: E402

FILES = 3000
FACTS = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}
ROWS_PER_BATCH = 1000  # as `datasets` and data/encode.py write them
ROWS_PER_FILE = 1_000_000
BUDGET = 500  # positions: 20 of these clips per micro-batch, as with real clips and --micro-tokens 10000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=7_000_000, help="clips to start with; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="keep their dataset here, or use the one that is there")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        size = write(Path(scratch) / "access", np.random.default_rng(0).integers(172, 1292, FILES))  # 2 to 15 s
        ours, pt, pt_size = random_access(Path(scratch) / "access", Path(scratch) / "pt")
        report(Row("S7", "clips read per CPU second", f"{ours:.0f}", ours / pt, ">= 20", f"{pt:.0f} (.pt files)"))
        mb = f"{size / 1e6:.1f} MB", f"{pt_size / 1e6:.1f} MB (.pt, int64)"
        report(Row("S7", "dataset on disk", mb[0], pt_size / size, ">= 4", mb[1]))
        folder = args.folder or Path(scratch) / "tokens"
        if not folder.exists():
            write_many(folder, args.rows)
        for name in ("first", "second"):
            report_start(name, args.rows, folder)


def report_start(name: str, rows: int, folder: Path) -> None:
    command = [sys.executable, __file__, "--start", "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"RANK": "0"})
    found = json.loads(done.stdout.splitlines()[-1])
    what = f"{name} start with {rows / 1e6:g} million clips"
    parts = ", ".join(f"{part} {found[part]:.1f} s" for part in ("open", "verify", "clips", "plan"))
    report(Row("S9", f"{what}, seconds of CPU time ({parts})", f"{found['total']:.1f} s", found["total"], "<= 60"))
    # The first start reads every file for its checksum and looks for clips that are there twice; on one rank only.
    target = "" if name == "first" else "<= 1"
    report(Row("S9", f"{what}, GB besides libraries and mapped files", f"{found['gb']:.2f} GB", found["gb"], target))


def natural_seconds(clips: int) -> np.ndarray:
    """Lengths of clips as in a speech corpus: log-normal, 1 to 20 s. Random batches of 8 are half padding."""
    return np.random.default_rng(0).lognormal(np.log(3), 0.6, clips).clip(1, 20)


def write(folder: Path, lengths: np.ndarray, text=lambda frames: "[S1] bada gumi", **facts) -> int:
    """A dataset of random codes of these lengths in frames; `text`: of a clip of so many frames."""
    from lib import store

    facts = FACTS | facts
    channels, longest = facts["channels"], int(lengths.max())
    draw = np.random.default_rng(0)
    pool = draw.integers(0, facts["codebook_size"], longest * channels * 50).astype(np.int16)
    starts = draw.integers(0, len(pool) - longest * channels, len(lengths))

    def rows():
        for number, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
            codes = pool[start : start + length * channels]
            yield {"id": f"clip-{number:07d}", "text": text(length), "codes": codes, "frames": length}

    columns = {"id": "string", "text": "string", "codes": store.LISTS, "frames": "int32"}
    files = store.write_dataset(folder, rows(), columns)
    store.write_json(folder / "dataset.json", facts | {"rows": len(lengths), "files": files})
    return sum(entry["bytes"] for entry in files)


def random_access(folder: Path, pt: Path) -> tuple[float, float, int]:
    """Clips a CPU second, both ways, the same clips in the same order, all in the page cache."""
    import torch

    from common.tokens import TokenDataset

    data = TokenDataset(str(folder))
    pt.mkdir()
    for i in range(FILES):
        torch.save(torch.from_numpy(data.codes(i).astype(np.int64)), pt / f"{i}.pt")  # as those trainers do
    order = np.random.default_rng(1).permutation(FILES)
    speeds = {"ours": [], "pt": []}
    for _ in range(3):
        begin = time.process_time()
        total = sum(int(torch.from_numpy(data.codes(i).astype(np.int64))[-1, 0]) for i in order)
        speeds["ours"].append(FILES / (time.process_time() - begin))
        begin = time.process_time()
        other = sum(int(torch.load(pt / f"{i}.pt", weights_only=True)[-1, 0]) for i in order)
        speeds["pt"].append(FILES / (time.process_time() - begin))
        assert total == other
    return max(speeds["ours"]), max(speeds["pt"]), sum(file.stat().st_size for file in pt.iterdir())


def write_many(folder: Path, rows: int) -> None:
    """A token dataset, column by column: the project's writer takes one Python row at a time."""
    import hashlib

    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import DatasetInfo, Features, List, Value

    kinds = {"id": Value("string"), "text": Value("string"), "codes": List(Value("int16")), "frames": Value("int32")}
    features = Features(kinds)
    draw = np.random.default_rng(0)
    words = np.array(["river", "stone", "winter", "a", "the", "seven", "quietly", "über"])
    pool = pa.array(["[S1] " + " ".join(words[draw.integers(0, 8, n)]) for n in draw.integers(5, 25, 4096)])
    draft, files = folder.with_name(f"{folder.name}.tmp"), []
    draft.mkdir(parents=True)
    count = -(-rows // ROWS_PER_FILE)
    for number in range(count):
        name = f"data-{number:05d}-of-{count:05d}.arrow"
        end = min(rows, (number + 1) * ROWS_PER_FILE)
        with pa.ipc.new_stream(str(draft / name), features.arrow_schema) as writer:
            for first in range(number * ROWS_PER_FILE, end, ROWS_PER_BATCH):
                size = min(ROWS_PER_BATCH, end - first)
                frames = draw.integers(2, 14, size, dtype=np.int32)
                offsets = np.concatenate([[0], np.cumsum(9 * frames)]).astype(np.int32)
                codes = draw.integers(0, 1024, offsets[-1], dtype=np.int16)
                ids = pc.cast(pa.array(np.arange(first, first + size)), pa.string())
                columns = [
                    pc.binary_join_element_wise("speaker-0001/clip", ids, "-"),
                    pool.take(pa.array(draw.integers(0, len(pool), size))),
                    pa.ListArray.from_arrays(offsets, codes),
                    pa.array(frames),
                ]
                batch = pa.RecordBatch.from_arrays(columns, list(kinds))
                writer.write_batch(batch.cast(features.arrow_schema))
        with open(draft / name, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        files.append({"name": name, "bytes": (draft / name).stat().st_size, "sha256": digest})
        os.utime(draft / name, (time.time() - 60,) * 2)  # verification remembers no file that may still change
    state = dict.fromkeys(["_format_columns", "_format_type", "_split"]) | {"_fingerprint": "0" * 16}
    state |= {"_data_files": [{"filename": file["name"]} for file in files]}
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    (draft / "state.json").write_text(json.dumps(state))
    DatasetInfo(features=features).write_to_directory(str(draft))
    (draft / "dataset.json").write_text(json.dumps(FACTS | {"files": files}))
    draft.rename(folder)


def start(folder: Path) -> dict:
    """What the main rank of dia_lora does between its imports and the first micro-batch, without a model."""
    from transformers import DiaConfig

    from common.plan import Plan
    from common.tokens import TokenDataset
    from dia_lora import Config
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    def resident_gb() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e6 for line in lines if line.startswith("RssAnon:"))

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], resident_gb())
            time.sleep(0.005)

    def timed(name, work):
        began = time.process_time()
        value = work()
        result[name] = time.process_time() - began
        return value

    result, peak, libraries = {}, [0.0], resident_gb()
    threading.Thread(target=watch, daemon=True).start()
    tokens = timed("open", lambda: TokenDataset(str(folder)))
    timed("verify", tokens.verify)
    clips = timed("clips", lambda: Clips(tokens, layout_of(DiaConfig()), Config(), {}, train=True))
    timed("plan", lambda: Plan(clips.lengths, BUDGET, 0).micro_batch(0))
    return result | {"total": sum(result.values()), "gb": peak[0] - libraries}


if __name__ == "__main__":
    main()
