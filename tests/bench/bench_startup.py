"""Start-up with 10,000 hours: opening, checking and planning 7 million clips.

    python tests/bench/bench_startup.py [--rows 7000000] [--ranks 64] [--folder DIR]

Targets: a rank opens, checks the texts and plans in under 60 s and with under 1 GB besides the libraries; the second
start reads no data file; each of 64 ranks plans in under 1 s. Time is processor time, so that a busy machine does not
change it. The clips have a few frames each, because start-up depends on their number; hashing, which depends on their
size, is timed per GB. Needs 2 GB of disk.
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

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune")]
FACTS = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}
ROWS_PER_BATCH = 1000  # as `datasets` and data/encode.py write them
ROWS_PER_FILE = 1_000_000
BUDGET = 500  # positions: 20 of these clips per micro-batch, as with real clips and --micro-tokens 10000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=7_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="keep the dataset here, or use the one that is there")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(CHILDREN[args.child](args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "tokens"
        if not folder.exists():
            write(folder, args.rows)
        first, second = run("start", folder, args), run("start", folder, args)
        planned, counted = run("plan", folder, args), run("count", folder, args)
    print(f"{args.rows:,} rows, {first['gb']:.2f} GB, {os.cpu_count()} cores; seconds of processor time\n")
    print("| | first start | second start |\n|---|---|---|")
    for name, text in (
        ("open", "open"),
        ("verify", "checksums, ids, codes (main rank only)"),
        ("clips", "texts and lengths (Dia)"),
        ("plan", "plan and first micro-batch"),
        ("total", "all"),
    ):
        print(f"| {text} | {first[name]:.2f} s | {second[name]:.2f} s |")
    for name, text in (
        ("peak", "peak memory of the rank, without mapped files"),
        ("imports", "of which libraries, before"),
        ("mapped", "pages of data files, which ranks share and the system takes back"),
    ):
        print(f"| {text} | {first[name]:.0f} MB | {second[name]:.0f} MB |")
    print(f"| read from data files for checksums | {first['hashed']:.2f} GB | {second['hashed']:.2f} GB |")
    print(
        f"\n{args.ranks} ranks: each plans in {planned['mean']:.2f} s (slowest {planned['slowest']:.2f} s); clips and"
    )
    print(f"target weight of a step of {args.ranks} micro-batches take {planned['step_ms']:.1f} ms")
    for name, rate in counted.items():
        print(f"{name}: {rate:,.0f} texts/s per core are tokenised for their length, once for a dataset and tokenizer:"
              f" {args.rows / rate / args.ranks:.1f} s on {args.ranks} ranks")  # fmt: skip


def run(child: str, folder: Path, args) -> dict:
    words = ["--child", child, "--folder", folder, "--ranks", args.ranks]
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"RANK": "0"})
    return json.loads(done.stdout.splitlines()[-1])


def write(folder: Path, rows: int) -> None:
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


def start(args) -> dict:
    """What the main rank of dia_lora does between its imports and the first micro-batch, without a model."""
    from common import arrow
    from common.plan import Plan
    from common.runtime import resident_bytes
    from common.tokens import TokenDataset
    from dia_lora import Config
    from models.dia.data import Clips

    result, hashed, peak = {"imports": resident_bytes("RssAnon") / 1e6}, [], [0.0]

    files_before = resident_bytes("RssFile") / 1e6

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], resident_bytes("RssAnon") / 1e6)
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()

    def timed(name, work):
        began = time.process_time()
        value = work()
        result[name] = time.process_time() - began
        return value

    tokens = timed("open", lambda: TokenDataset(str(args.folder)))
    arrow.open = lambda path, mode: hashed.append(path.stat().st_size) or open(path, mode)
    timed("verify", tokens.verify)
    clips = timed("clips", lambda: make_clips(Clips, tokens, Config))
    timed("plan", lambda: (made := Plan(clips.lengths, BUDGET, 0), made.micro_batch(0), made.padding()))
    total = sum(result[name] for name in ("open", "verify", "clips", "plan"))
    size = sum(file["bytes"] for file in tokens.info["files"])
    result |= {"total": total, "peak": peak[0], "mapped": resident_bytes("RssFile") / 1e6 - files_before}
    return result | {"gb": size / 1e9, "hashed": sum(hashed) / 1e9}


def make_clips(kind, tokens, config):
    """The clips as Dia 1.6B takes them."""
    from transformers import DiaConfig

    from models.dia.layout import layout_of

    clips = kind(tokens, layout_of(DiaConfig()), config(), {}, train=True)
    clips.warn()
    return clips


def plan(args) -> dict:
    """Each rank's own plan: the same on all, so that nothing is communicated."""
    from common.plan import Plan
    from common.tokens import TokenDataset
    from dia_lora import Config
    from models.dia.data import Clips

    ranks, clips = args.ranks, make_clips(Clips, TokenDataset(str(args.folder)), Config)
    seconds, firsts = [], set()
    for _ in range(ranks):
        began = time.process_time()
        made = Plan(clips.lengths, BUDGET, 0)
        _, rows = made.micro_batch(0)
        seconds.append(time.process_time() - began)
        firsts.add(rows.tobytes())
    assert len(firsts) == 1
    began = time.process_time()
    for step in range(10):
        for number in range(step * ranks, (step + 1) * ranks):
            epoch, rows = made.micro_batch(number)
            clips.target_weight(rows, epoch)
    step_ms = (time.process_time() - began) / 10 * 1000
    return {"mean": float(np.mean(seconds)), "slowest": max(seconds), "step_ms": step_ms}


def count(args) -> dict:
    """Texts per second of the two recipes that tokenise, with the small tokenizers of their demos."""
    from demo import ensure_demo
    from transformers import AutoTokenizer

    from common import text_lengths
    from common.tokens import TokenDataset
    from models.higgs.text import Chat
    from models.mot.data import Tokenizer

    tokens, rates = TokenDataset(str(args.folder)), {}
    captions = Tokenizer(str(ensure_demo(ROOT / "runs" / "demo-assets-mot", "mot") / "llama"))
    higgs = ensure_demo(ROOT / "runs" / "demo-assets-higgs", "higgs") / "model"
    chat = Chat(AutoTokenizer.from_pretrained(str(higgs), local_files_only=True))

    def prompts(texts: list[str]) -> list:
        texts = [chat.text(text, "a clip") for text in texts]
        return chat.ids([chat.prompt(text, text, None, True) for text in texts])  # as long as with a reference

    for name, tokenise in (("llama_mot", captions), ("higgs_clone", prompts)):
        rows = np.arange(min(len(tokens), 20_000))
        began = time.process_time()
        text_lengths.count_tokens(
            lambda part, tokenise=tokenise: list(map(len, tokenise([tokens.text(i) for i in part]))), tokens, rows, str
        )
        rates[name] = len(rows) / (time.process_time() - began)
    return rates


CHILDREN = {"start": start, "plan": plan, "count": count}

if __name__ == "__main__":
    main()
