"""Shared by the tests of finetune/common: token datasets written by `datasets` itself, and one rank."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

DAC = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}


def write_info(folder: Path, **changes) -> None:
    """dataset.json with the true size and checksum of every Arrow file."""
    files = [
        {"name": f.name, "bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in sorted(folder.glob("*.arrow"))
    ]
    (folder / "dataset.json").write_text(json.dumps(DAC | {"files": files} | changes))


@pytest.fixture
def make_tokens(tmp_path):
    """make_tokens([codes (T, C), ...], ids=, texts=, shards=, dtype=, columns=) -> folder of a token dataset."""

    def make(clips, ids=None, texts=None, shards=1, dtype="int16", columns=None, **info) -> Path:
        from datasets import Dataset, Features, List, Value

        kinds = {"id": Value("string"), "text": Value("string"), "codes": List(Value(dtype)), "frames": Value("int32")}
        rows = {
            "id": ids or [f"clip-{i}" for i in range(len(clips))],
            "text": texts or [f"[S1] text {i}." for i in range(len(clips))],
            "codes": [np.asarray(c).reshape(-1).tolist() for c in clips],
            "frames": [len(c) for c in clips],
        } | (columns or {})
        rows = {name: values for name, values in rows.items() if values is not False}
        folder = tmp_path / "tokens"
        features = Features({name: kinds[name] for name in rows})
        Dataset.from_dict(rows, features=features).save_to_disk(folder, num_shards=shards)
        write_info(folder, **info)
        return folder

    return make


@pytest.fixture
def random_clips():
    """random_clips(3, 5, 4) -> codes of clips with 3, 5 and 4 frames."""
    rng = np.random.default_rng(7)
    return lambda *frames, channels=9: [rng.integers(0, 1024, (t, channels), dtype=np.int16) for t in frames]


@pytest.fixture
def one_rank():
    import torch

    from common.runtime import Process

    return Process(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank
