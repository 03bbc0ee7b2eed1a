"""A dataset of 1,000,000 clips: time to open it, time and memory of an epoch's plan, random access against .pt.

    python tests/bench/bench_data_reader.py

Targets: open under 1 s, plan under 10 s with under 1 GB, random access at least 20 times the per-file .pt way.
The dataset is written by data/lib/store.py, the writer of data/encode.py. Needs about 1 GB of disk for a minute.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune")]
CLIPS, FILES = 1_000_000, 3000
FACTS = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        begin = time.perf_counter()
        size = write(folder / "million", CLIPS, frames=(20, 60))
        print(f"wrote {CLIPS} clips, {size / 1e6:.0f} MB, in {time.perf_counter() - begin:.1f} s")
        command = [sys.executable, __file__, "--child", folder / "million"]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        size = write(folder / "access", FILES, frames=(172, 1292))  # 2 to 15 s
        ours, pt, pt_size = random_access(folder / "access", folder / "pt")
    print(f"open          {result['open']:8.2f} s (target 1)")
    print(f"plan          {result['plan']:8.2f} s (target 10), {result['batches']} micro-batches")
    print(f"peak memory   {result['peak_mb']:8.0f} MB over {result['base_mb']:.0f} MB of imports (target 1000)")
    print(f"random access {ours:8.0f} clips/s, .pt files {pt:.0f} clips/s: {ours / pt:.1f} x (target 20)")
    print(f"on disk       {size / 1e6:8.1f} MB, .pt files {pt_size / 1e6:.1f} MB: {pt_size / size:.1f} x")
    good = result["open"] < 1 and result["plan"] < 10 and result["peak_mb"] < 1000 and ours / pt >= 20
    return 0 if good else 1


def write(folder: Path, clips: int, frames: tuple[int, int]) -> int:
    from lib import store

    draw = np.random.default_rng(0)
    lengths = draw.integers(*frames, clips)
    pool = draw.integers(0, 1024, frames[1] * 9 * 50).astype(np.int16)
    starts = draw.integers(0, len(pool) - frames[1] * 9, clips)

    def rows():
        for number, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
            codes = pool[start : start + length * 9]
            yield {"id": f"clip-{number:07d}", "text": "[S1] bada gumi", "codes": codes, "frames": length}

    columns = {"id": "string", "text": "string", "codes": store.LISTS, "frames": "int32"}
    files = store.write_dataset(folder, rows(), columns, sums=("frames",))
    store.write_json(folder / "dataset.json", FACTS | {"rows": clips, "files": files})
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
    print(json.dumps(result))
    return 0


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
