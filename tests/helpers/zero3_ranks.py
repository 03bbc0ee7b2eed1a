"""In the ranks (rank_server.py): ZeRO-3 steps of a network with weights below and above the threshold for sharding."""

from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from common import zero3
from common.config import RunConfig
from common.contracts import LossOutput
from common.ds_config import resolve_ds
from common.engine import Ema, backward, full_weights, gathered, start_engine, take_step
from common.optim import build_optimizer, parameter_groups
from helpers import support
from helpers.traffic_ranks import Traffic

THRESHOLD = 20  # of the network's weights of 5, 15 and 25 values, two odd ones stay whole: one shard of each is padded

LR = 1e-2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def start(process, folder: str):
    """An engine of the network, not clipped and without weight decay."""
    config = RunConfig(precision="fp32", lr=LR, max_grad_norm=0.0, weight_decay=0.0)
    folder = Path(folder, str(process.rank))
    folder.mkdir()
    # Not obeyed: views of buffers that are gathered into other memory would hold anything.
    settings = {"stage3_param_persistence_threshold": THRESHOLD, "stage3_allgather_sequential": False}
    ds = resolve_ds(support.stage_file(folder, 3, **settings), config, process.world)
    net = network()
    optimizer = build_optimizer(parameter_groups(net, 0.0, ()), config, ds)
    return start_engine(net, lambda net, x: LossOutput(F.silu(net(x)).sum(), {}), optimizer, ds)


def compare_steps(process, _, folder: str) -> None:
    """Four steps as in plain PyTorch, of which the third is skipped. Small weights are the new ones, whole on every
    rank, right after the step, and all that the second and later ones take is one message. Large weights are gathered
    by broadcasts into memory that is kept for them, and the gradients of small ones reduced together."""
    engine, plain = start(process, folder), network()
    net, optimizer = engine.module.model, engine.optimizer.optimizer
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0, betas=optimizer.defaults["betas"])
    inputs = torch.randn(4, process.world, 3, 5, generator=torch.Generator().manual_seed(1))
    places = []  # of the only large weight, while it is gathered
    net[0].register_forward_hook(lambda layer, *_: places.append(layer.weight.data_ptr()))
    for step, both in enumerate(inputs):
        skipped = step == 2
        with Traffic() as passes, mock.patch.object(zero3, "TOGETHER", THRESHOLD):
            loss_sum = engine(both[process.rank]).loss_sum
            backward(engine, loss_sum * (float("inf") if skipped else 1.0), 6.0, process.world)
        with Traffic() as traffic:
            assert take_step(engine)[0] is not skipped
        if step > 1:  # until then DeepSpeed gathers weights as they are met
            large = sum(p.numel() > THRESHOLD for p in plain.parameters())
            assert passes.messages == {"broadcast_": process.world * large, "allreduce_": large + 1}, (
                step,
                passes.messages,
            )
        if step > 0:
            traffic.messages.pop("allreduce_")  # decides whether the step is taken
            assert traffic.messages == ({} if skipped else {"_allgather_base_": 1}), (step, traffic.messages)
        if not skipped:
            theirs.zero_grad()
            (F.silu(plain(both.flatten(0, 1))).sum() / 6.0).backward()
            theirs.step()
        for name, expected in plain.named_parameters():
            found = net.get_parameter(name)
            if expected.numel() <= THRESHOLD:
                torch.testing.assert_close(found.data, expected.data, rtol=1e-5, atol=1e-6)
            else:
                assert found.numel() == 0, f"{name} stays gathered"
    kept = {block.ctypes.data for blocks in zero3.Broadcasts.memory.free.values() for block in blocks}
    places = set(places[1:])  # in the first step small weights are gathered too, and take turns with it
    assert len(places) == 1 and places <= kept, (places, kept)
    for name, value in full_weights(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)


def compare_averages(process, _, folder: str) -> None:
    """Also weights that are still gathered are exchanged for their average, and back."""
    engine, before = start(process, folder), network()
    net, average = engine.module.model, Ema(engine, 0.5)
    backward(engine, engine(torch.ones(3, 5)).loss_sum, 3.0, process.world)
    assert take_step(engine)[0]
    average.update(0)  # a tenth of the old weights is kept
    after = full_weights(engine)
    for p in net.parameters():
        p.all_gather()
    with average.applied(), gathered(net):
        for name, old in before.named_parameters():
            expected = old.lerp(after[name], 0.9)
            torch.testing.assert_close(net.get_parameter(name).data, expected.data, rtol=1e-5, atol=1e-6)
    with gathered(net):
        for name, expected in after.items():
            torch.testing.assert_close(net.get_parameter(name).data, expected, rtol=1e-5, atol=1e-6)
