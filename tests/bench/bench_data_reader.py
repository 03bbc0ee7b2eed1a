"""A dataset of 1,000,000 clips: time to open it, time and memory of an epoch's plan, the first micro-batch after a
resume; random access and size against .pt files (P7, P8, P17); memory of two ranks that read the same clips (P22).

    python tests/bench/bench_data_reader.py

Targets besides those of the rows: open under 1 s, plan under 10 s with under 1 GB. The dataset is written by
data/lib/store.py, the writer of data/encode.py. Needs about 1 GB of disk for a minute.
"""

import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune"), str(ROOT / "tests")]
from helpers.bench_rows import Row, report  # noqa: E402

CLIPS, FILES = 1_000_000, 3000
FACTS = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(Path(sys.argv[2]))
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        begin = time.perf_counter()
        size = write(folder / "million", draw.integers(20, 60, CLIPS))
        print(f"wrote {CLIPS} clips, {size / 1e6:.0f} MB, in {time.perf_counter() - begin:.1f} s")
        command = [sys.executable, __file__, "--child", folder / "million"]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        write(folder / "mix", (natural_seconds(60_000) * 44100 / 512).astype(int))
        one, two = (memory_of_ranks(folder / "mix", ranks) for ranks in (1, 2))
        size = write(folder / "access", draw.integers(172, 1292, FILES))  # 2 to 15 s
        ours, pt, pt_size = random_access(folder / "access", folder / "pt")
    print(f"open          {result['open']:8.2f} s (target 1)")
    print(f"plan          {result['plan']:8.2f} s (target 10), {result['batches']} micro-batches")
    print(f"peak memory   {result['peak_mb']:8.0f} MB over {result['base_mb']:.0f} MB of imports (target 1000)")
    report(Row("P7", "item fetch, clips per CPU second", f"{ours:.0f}", ours / pt, ">= 20", f"{pt:.0f} (.pt files)"))
    mb = f"{size / 1e6:.1f} MB", f"{pt_size / 1e6:.1f} MB (.pt, int64)"
    report(Row("P8", "dataset on disk", mb[0], pt_size / size, ">= 4", mb[1]))
    early, late = result["resume"]
    ms = f"{1e3 * late:.0f} ms", f"{1e3 * early:.0f} ms at the start"
    report(Row("P17", "first micro-batch after a resume at an epoch's end", ms[0], late / early, "<= 1.1", ms[1]))
    mb = f"{two / 1e6:.0f} MB", f"{one / 1e6:.0f} MB (1 rank)"
    report(Row("P22", "memory of 2 ranks that have read all tokens", mb[0], two / one, "<= 1.1", mb[1]))
    return 0 if result["open"] < 1 and result["plan"] < 10 and result["peak_mb"] < 1000 else 1


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
    files = store.write_dataset(folder, rows(), columns, sums=("frames",))
    store.write_json(folder / "dataset.json", facts | {"rows": len(lengths), "files": files})
    return sum(entry["bytes"] for entry in files)


def child(folder: Path) -> int:
    """In a process of its own: what a rank does before its first step."""
    import datasets  # noqa: F401  imports are not what is timed

    from common.plan import Plan
    from common.tokens import TokenDataset

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    begin = time.perf_counter()
    data = TokenDataset(str(folder))
    opened = time.perf_counter() - begin
    begin = time.perf_counter()
    plan = Plan(data.frames + 17, budget=8192, seed=0)
    plan.micro_batch(0)
    planned = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    result = {"open": opened, "plan": planned, "batches": plan.per_epoch, "peak_mb": peak - base, "base_mb": base}
    times = {0: [], plan.per_epoch - 1: []}
    for _ in range(7):
        for number, spent in times.items():
            begin = time.process_time()
            resumed = Plan(data.frames + 17, budget=8192, seed=0)
            codes = [data.codes(i) for i in resumed.micro_batch(number)[1]]
            spent.append(time.process_time() - begin)
            assert sum(map(len, codes)) < 8192
    result["resume"] = [float(np.percentile(spent, 10)) for spent in times.values()]
    print(json.dumps(result))
    return 0


def memory_of_ranks(folder: Path, ranks: int) -> int:
    """Bytes by which so many processes grow together when each opens the dataset and reads every code. Pages that they
    share count once."""
    context = multiprocessing.get_context("spawn")
    together, grown = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=read_as_rank, args=(folder, together, grown)) for _ in range(ranks)]
    for process in processes:
        process.start()
    total = sum(grown.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def read_as_rank(folder: Path, together, grown) -> None:
    import datasets  # noqa: F401

    from common.plan import Plan
    from common.tokens import TokenDataset

    def memory() -> int:
        """Proportional set size: a page of two processes counts half in each. They must wait for each other."""
        together.wait()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        together.wait()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    before = memory()
    data = TokenDataset(str(folder))
    plan = Plan(data.frames + 17, budget=8192, seed=0)
    for number in range(plan.per_epoch):
        for i in plan.micro_batch(number)[1]:
            data.codes(i).sum()
    grown.put(memory() - before)


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


if __name__ == "__main__":
    sys.exit(main())
