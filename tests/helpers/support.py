"""What several tests share: starting ranks, reading what they wrote, small datasets made without data/encode.py."""

import contextlib
import hashlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
VENV = str(Path(PYTHON).parents[1])
DIA = ROOT / "runs" / "demo-assets-dia"  # the fixture `demo`: a Dia with random weights, much smaller than the demo's
TINY_DIA = ["--model", str(DIA / "dia"), "--data", str(DIA / "tokens/train"), "--eval-data", str(DIA / "tokens/eval")]
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def keep_4bit_weights_as_they_are() -> None:
    """For plain loading: on CPUs with bf16 instructions bitsandbytes repacks 4-bit weights in the first evaluation,
    which fails for the narrow layers of the tests. The recipes switch it off too."""
    import bitsandbytes.nn.modules as modules

    modules.has_avx512bf16 = lambda: False


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(**more) -> dict:
    """The test's environment, on the CPU, with the tests' own Python first on the path. The test's own process may be
    a rank too, which what it starts must not join."""
    place = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    mine = {name: value for name, value in os.environ.items() if name not in place}
    return mine | CPU | {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"} | more


def rank_environment(rank: int, world: int, port: str) -> dict:
    """What a launcher sets for one rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return environment(**{name: str(number) for name, number in numbers.items()}, **addresses)


class Rank(subprocess.Popen):
    """`python script arguments`, whose output goes to a file."""

    def __init__(self, script: Path, arguments: list, environment: dict, stdin=subprocess.DEVNULL):
        self.output = Path(tempfile.mkdtemp(prefix="rank-")) / "output"
        STARTED.append(self)
        command = [PYTHON, str(script), *map(str, arguments)]
        with open(self.output, "w") as stream:
            super().__init__(
                command, cwd=ROOT, env=environment, stdin=stdin, stdout=stream, stderr=subprocess.STDOUT, text=True
            )

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.output.read_text(errors="replace"), None


STARTED: list[Rank] = []  # by the test that runs now


def start_ranks(script: Path, arguments: list, world: int = 2, **more) -> list[Rank]:
    """Starts the ranks of one job as the launcher would; `more` is added to their environment."""
    if script.parent.name == "finetune" and "--export-check" not in arguments:
        arguments = [*arguments, "--no-export-check"]  # it starts a process; test_export_check.py asks for it
    port = free_port()
    return [Rank(script, arguments, rank_environment(rank, world, port) | more) for rank in range(world)]


def patched(*patches: str) -> dict:
    """For the environment of processes that helpers/patch is to change, beside changes that are already asked for."""
    words = [*os.environ.get("TEST_PATCHES", "").split(), *patches]
    return {"PYTHONPATH": str(ROOT / "tests" / "helpers" / "patch"), "TEST_PATCHES": " ".join(words)}


def finish(ranks: list[Rank], timeout: float = 600) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of all ranks."""
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return [rank.returncode for rank in ranks], outputs


def run_recipe(*arguments, world: int = 2, recipe: str = "dia_lora") -> tuple[list[int], list[str]]:
    return finish(start_ranks(ROOT / "finetune" / f"{recipe}.py", list(arguments), world))


def run_script(name: str, *arguments) -> subprocess.CompletedProcess:
    """Runs finetune/<name>."""
    command = [PYTHON, str(ROOT / "finetune" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


def become(command: list[str], environment: dict, output: str) -> None:
    """In a forked process: does what `python COMMAND` would do in the project's folder, and prints into a file."""
    stream = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def run_demo(command: str, run: Path) -> str:
    """The output of ./launch.sh COMMAND --out RUN, as a user starts it."""
    words = [ROOT / "launch.sh", command, "--out", run]
    env = environment(AUDIO_FINETUNE_ENV=VENV)
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=run.parent, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def stage_file(folder: Path, stage: int, **zero) -> str:
    """A DeepSpeed JSON of this ZeRO stage, with further settings of it."""
    path = folder / f"zero{'-'.join(map(str, (stage, *zero)))}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage} | zero}))
    return str(path)


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step_records(run: Path) -> list[dict]:
    return [record for record in metrics(run) if "event" not in record]


def known_after(run: Path, step: int) -> dict:
    """What the events of this step say of it: evaluation, scores of samples and more."""
    events = [record for record in metrics(run) if record.get("step") == step and "event" in record]
    return {key: value for event in events for key, value in event.items()}


def wait_for_step(run: Path, step: int, timeout: float = 600) -> None:
    """Returns as soon as the run has logged this optimizer step."""
    deadline = time.time() + timeout
    while not has_reached(run, step):
        if time.time() > deadline:
            raise TimeoutError(f"{run} did not reach step {step}")
        time.sleep(0.05)


def has_reached(run: Path, step: int) -> bool:
    """The run has logged this optimizer step; its last line may be half written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return any(record.get("step", 0) >= step and "event" not in record for record in records)


def write_tokens(
    folder: Path, clips: list[dict], split: list[str] | None = None, columns: dict | None = None, **info
) -> Path:
    """A token dataset from {"id", "text", "codes" (T, C)} without the project's own writer."""
    import numpy as np
    from datasets import Dataset, Features, List, Value

    channels = info.get("channels", 9)
    rows = []
    for clip in clips:
        codes = np.asarray(clip["codes"], dtype=np.int16)
        rows.append({"id": clip["id"], "text": clip["text"], "codes": codes.ravel(), "frames": len(codes)})
    features = Features(
        {"id": Value("string"), "text": Value("string"), "codes": List(Value("int16")), "frames": Value("int32")}
    )
    dataset = Dataset.from_list(rows, features=features)
    for name, values in ((columns or {}) | ({"split": split} if split else {})).items():
        dataset = dataset.add_column(name, values)
    dataset.save_to_disk(str(folder))
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.glob("*.arrow"))
    ]
    facts = {"format": 1, "codec": "dac", "weights": "none", "sample_rate": 44100, "hop": 512, "codebooks": 9}
    facts |= {"codebook_size": 1024, "channels": channels, "layout": "frame-major", "files": files}
    (folder / "dataset.json").write_text(json.dumps(facts | info))
    return folder


def write_pairs(folder: Path, rows: list[dict], **info) -> Path:
    """Noisy/clean pairs from {"id", "noisy", "clean"} (int16) without the project's own writer."""
    from datasets import Dataset, Features, List, Value

    rows = [row | {"samples": len(row["clean"])} for row in rows]
    kinds = {"id": Value("string"), "noisy": List(Value("int16")), "clean": List(Value("int16"))}
    Dataset.from_list(rows, features=Features(kinds | {"samples": Value("int32")})).save_to_disk(str(folder))
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.glob("*.arrow"))
    ]
    facts = {"format": 1, "kind": "pairs", "sample_rate": 16000, "rows": len(rows), "files": files}
    (folder / "dataset.json").write_text(json.dumps(facts | info))
    return folder


def cut_pairs(pairs: Path, folder: Path, held_out: int = 8) -> Path:
    """Half a second of each of these noisy/clean pairs, for tests that need no more. `held_out`: how many of the
    speaker who is evaluated on."""
    from common.pairs import PairDataset

    data, part = PairDataset(str(pairs), 16000), slice(2000, 10800)
    rows = [{"id": data.id(i), "noisy": data.noisy(i)[part], "clean": data.clean(i)[part]} for i in range(len(data))]
    evaluated = [row for row in rows if row["id"].startswith("dov")]
    return write_pairs(folder, [row for row in rows if row not in evaluated] + evaluated[:held_out])


def voice(seconds=1.0, noise=0.02, seed=0):
    """A voice-like buzz with pauses, and the same with noise."""
    import math

    import numpy as np

    rng = np.random.default_rng(seed)
    time = np.arange(int(16000 * seconds)) / 16000
    voice = sum(np.sin(2 * np.pi * 130 * k * time) / k * math.exp(-((130 * k - 700) ** 2) / 8e5) for k in range(1, 40))
    clean = 0.2 * voice * (0.5 + 0.5 * np.sign(np.sin(2 * np.pi * 2.2 * time))) + 1e-4 * rng.standard_normal(len(time))
    return clean, clean + noise * rng.standard_normal(len(time))


@contextlib.contextmanager
def scored(recipe, process, values: list):
    """Inside, the evaluations of a recipe give these scores: before training, then after each evaluated step."""
    own, scores = recipe.evaluate, iter(values)
    recipe.evaluate = lambda *_, **__: next(scores)
    try:
        yield
    finally:
        recipe.evaluate = own
