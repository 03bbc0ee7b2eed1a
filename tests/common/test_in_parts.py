"""Micro-batches in parts: the same gradients, and a training that goes on when memory really runs out."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import engine, in_parts
from common.contracts import LossOutput
from common.errors import UserError
from common.runtime import Process
from common.single_process import PlainEngine
from helpers import support

HERE = Process(0, 1, torch.device("cpu"))


def made(fits: int = 99):
    """An engine around a small network, a batch of 5 sounds, and a loss that runs out of memory with more of them."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    network.unused = torch.nn.Parameter(torch.ones(3))
    batch = {"x": torch.randn(5, 4), "ids": list("abcde"), "positions": 20, "scalar": torch.tensor(2.0), "own": True}
    sizes = []

    def loss(model, batch):
        sizes.append(len(batch["ids"]))
        assert len(batch["x"]) == len(batch["ids"]) and batch["own"] and batch["scalar"] == 2
        error = model(batch["x"]).square().sum()
        if len(batch["ids"]) > fits:
            error.register_hook(lambda _: torch.empty(2**60, dtype=torch.uint8))  # in the backward pass, really
        count = torch.tensor([float(error.detach()), float(len(batch["ids"]))])
        return LossOutput(error, {"error": count}, extra=batch["ids"])

    config = SimpleNamespace(accumulation=1, max_grad_norm=1.0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return PlainEngine(engine.LossModule(network, loss), optimizer, config), batch, sizes


def gradients(ds_engine) -> dict:
    return {name: p.grad for name, p in ds_engine.module.model.named_parameters()}


def plain_gradients() -> tuple[dict, float]:
    ds_engine, batch, _ = made()
    output = ds_engine(batch)
    engine.backward(ds_engine, output.loss_sum, 7.0, 1)
    return gradients(ds_engine), float(output.loss_sum.detach())


@pytest.mark.parametrize(
    ("fits", "begin", "expected", "tried"),
    [(99, 1, 1, [5]), (4, 1, 2, [5, 2, 3]), (1, 1, 8, [5, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1]), (99, 2, 2, [2, 3])],
)
def test_parts_add_up_to_the_gradient_of_the_whole(fits, begin, expected, tried, capsys):
    wanted, loss = plain_gradients()
    ds_engine, batch, sizes = made(fits)
    output, parts = in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, begin, HERE)
    found = gradients(ds_engine)
    assert parts == expected and found["unused"] is None and wanted["unused"] is None
    for name in wanted:
        if name != "unused" and expected == 1:
            assert torch.equal(found[name], wanted[name])
        elif name != "unused":
            assert torch.allclose(found[name], wanted[name], atol=1e-7)
    assert sizes[: len(tried)] == tried and float(output.loss_sum) == pytest.approx(loss)
    assert output.parts["error"].tolist() == pytest.approx([loss, 5])
    assert [name for part in output.extra for name in part] == batch["ids"] and not output.loss_sum.requires_grad
    assert capsys.readouterr().out.count("runs out of memory") == np.log2(expected / begin)


def test_gradients_of_micro_batches_add_up():
    wanted, _ = plain_gradients()
    ds_engine, batch, _ = made()
    for _ in range(2):
        in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, 2, HERE)
    assert torch.allclose(gradients(ds_engine)["0.weight"], 2 * wanted["0.weight"], atol=1e-7)


def test_a_rank_that_has_room_follows_one_that_has_not(monkeypatch):
    """What this rank asks all others, and what they answer: another one ran out of memory once, in no single crop."""
    asked, answers = [], iter([True, False, False])
    monkeypatch.setattr(in_parts, "any_rank", lambda mine, process: asked.append(mine) or next(answers))
    ds_engine, batch, sizes = made()
    wanted, _ = plain_gradients()
    _, parts = in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, 1, HERE)
    assert parts == 2 and sizes == [5, 2, 3] and asked == [False, False, False]
    assert torch.allclose(gradients(ds_engine)["0.weight"], wanted["0.weight"], atol=1e-7)
    answers = iter([True, True])
    with pytest.raises(UserError, match="not even in parts of one crop"):
        in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, 8, HERE)


def test_what_does_not_fit_one_by_one_is_said_and_an_infinite_loss_has_no_finite_gradient():
    ds_engine, batch, _ = made(fits=0)
    with pytest.raises(UserError, match="not even in parts of one crop .*allocate memory"):
        in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, 1, HERE)
    ds_engine, batch, _ = made()
    batch["x"][3] = float("inf")
    ds_engine.module.model[1] = torch.nn.Identity()
    in_parts.backward(ds_engine, batch, ds_engine.module, 7.0, 2, HERE)
    assert gradients(ds_engine)["0.weight"].isnan().any()


# ---- with a real limit -----------------------------------------------------------------------------------------

BUFFER = "--width 8 --frames 32 --buffer 8 --micro-batch 16 --precision fp32"
CMGAN = "--channels 8 --disc-channels 4 --seconds 0.5 --micro-batch 8 --pesq-workers 1"
COMMON = "--steps 2 --lr 1e-4 --samples 0 --eval-every 0 --save-every 0 --no-export"


@pytest.mark.long
@pytest.mark.parametrize(("loss", "flags"), [("diffusion_buffer.compute_loss", BUFFER), ("cmgan.compute_loss", CMGAN)])
def test_a_process_whose_memory_is_limited_trains_on(loss, flags, pairs, tmp_path):
    """To the same losses. A new batch size costs some memory of its own, which the library of convolutions keeps, hence
    not a share of one half."""
    losses = {}
    for share in (9.0, 0.75):
        run = tmp_path / str(share)
        script = support.ROOT / "tests" / "helpers" / "limited_memory.py"
        words = [sys.executable, script, str(share), loss, "--data", pairs, "--out", run, *flags.split()]
        words += ["--ds", support.ROOT / "ds_configs" / "zero2.json", *COMMON.split()]
        environment = dict(os.environ) | support.rank_environment(0, 1, support.free_port())
        environment |= {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        losses[share] = [record["loss"] for record in support.step_records(run)]
        events = [r for r in support.metrics(run) if r.get("event") == "out_of_memory"]
        if share == 9.0:
            assert not events
        else:
            assert [event["step"] for event in events] == [2] and events[0]["parts"] in (2, 4), events
    assert len(losses[0.75]) == 2 and losses[0.75][0] == pytest.approx(losses[9.0][0], rel=1e-5)
    assert losses[0.75] == pytest.approx(losses[9.0], rel=1e-5)
    assert len(set(losses[9.0])) == 2


DISCRIMINATOR = """
import resource, sys, types
sys.path.insert(0, sys.argv[1])
import torch
from cmgan import discriminator_loss
from common import engine, in_parts
from common.runtime import Process, resident_bytes
from common.single_process import PlainEngine
from models.cmgan.labels import Labelled
from models.cmgan.network import Discriminator

torch.manual_seed(0)
judge = Discriminator(16).train()
clean, made = torch.rand(16, 1, 201, 161), torch.rand(16, 1, 201, 161)
labelled = Labelled(clean, [made], [torch.rand(16)], [torch.ones(16)])
optimizer, config = torch.optim.SGD(judge.parameters()), types.SimpleNamespace(accumulation=1, max_grad_norm=1.0)
plain = PlainEngine(engine.LossModule(judge, discriminator_loss), optimizer, config)

def compute(parts):
    judge.parts = parts
    torch.manual_seed(1)
    return plain.module((labelled, 16.0, [16.0]))

found = []
for attempt in range(2):
    before = resident_bytes("VmSize")
    output, parts = in_parts.backward_whole(plain, compute, 16, 1.0, 1, Process(0, 1, torch.device("cpu")))
    needed = resident_bytes("VmPeak") - before
    found.append({name: p.grad.clone() for name, p in judge.named_parameters()})
    optimizer.zero_grad()
    print("parts", parts, "needed", needed >> 20)
    if attempt == 0:
        limit = int(resident_bytes("VmSize") + 0.6 * needed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
worst = max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])
largest = max(float(gradient.abs().max()) for gradient in found[0].values())
assert worst <= 1e-5 * largest, (worst, largest)
"""


@pytest.mark.long
def test_a_discriminator_whose_memory_is_limited_has_the_same_gradients():
    environment = dict(os.environ) | {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
    words = [sys.executable, "-c", DISCRIMINATOR, str(support.ROOT / "finetune")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("parts")]
    assert lines[0][1] == "1" and lines[1][1] in ("2", "4", "8"), done.stdout
