"""Another number of ranks: each reads its own part of every parameter. The recipes' tests train on with the result."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import reshard

SIZES = {"a": (7, 3), "b": (5,), "c": (64, 16)}


@pytest.fixture
def universal(tmp_path):
    """What DeepSpeed's converter writes: every parameter whole, in a file of its own."""
    values = {name: torch.arange(math.prod(size)).float().reshape(size) + ord(name) for name, size in SIZES.items()}
    for name, value in values.items():
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": value} if name == "a" else value, tmp_path / "zero" / name / "fp32.pt")
    return tmp_path, values


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 4), (3, 4), (63, 64)])
def test_a_rank_maps_the_files_and_copies_its_part(universal, monkeypatch, rank, world):
    folder, values = universal
    parameters = {name: SimpleNamespace(ds_numel=v.numel(), requires_grad=True) for name, v in values.items()}
    module = SimpleNamespace(named_parameters=parameters.items)
    engine = SimpleNamespace(module=module, zero_optimization_stage=lambda: 3, dp_world_size=world, global_rank=rank)
    found = []
    monkeypatch.setattr(reshard, "safe_set_local_fp32_param", lambda _, value: found.extend(value.tolist()))
    mapped = []

    def load(file, **options):
        value = loaded(file, **options)
        address = (value["param"] if isinstance(value, dict) else value).data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= address < high:
                mapped.append(line.split(maxsplit=5)[-1])
        return value

    loaded = torch.load
    monkeypatch.setattr(torch, "load", load)
    reshard._fill_masters(engine, folder, "fp32")
    expected = []
    for value in values.values():
        size = math.ceil(value.numel() / world)
        padded = value.flatten().tolist() + [0.0] * (size * world - value.numel())
        expected += padded[rank * size : (rank + 1) * size]
    assert found == expected
    assert mapped == [str(folder / "zero" / name / "fp32.pt") for name in SIZES], "a file was read whole"
