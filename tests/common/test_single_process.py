"""The engine of --no-deepspeed against a plain PyTorch loop."""

import torch
from torch import nn

from common.config import RunConfig
from common.contracts import LossOutput
from common.engine import backward, take_step
from common.runtime import Process
from common.single_process import start_engine


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed, rows):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=draw), torch.randn(rows, 3, generator=draw)


def loss_sum(net, data):
    return (net(data[0]) - data[1]).square().sum()


def test_the_plain_engine_equals_a_plain_loop():
    config = RunConfig(precision="fp32", accumulation=2, max_grad_norm=0.1)
    mine, net = network(), network()
    optimizer, plain = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (mine, net))
    one = Process(0, 1, torch.device("cpu"))
    engine = start_engine(mine, lambda model, data: LossOutput(loss_sum(model, data), {}), optimizer, config, one)
    for step in range(3):
        micro_batches = batch(2 * step, 3), batch(2 * step + 1, 7)
        backward(engine, engine(micro_batches[0]).loss_sum, 10.0, 1)
        engine.step()
        backward(engine, engine(micro_batches[1]).loss_sum, 10.0, 1)
        applied, norm = take_step(engine)
        (sum(loss_sum(net, data) for data in micro_batches) / 10).backward()
        expected = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        assert applied and torch.isclose(torch.tensor(norm), expected) and norm > 0.1
        plain.step()
        plain.zero_grad()
    assert engine.global_steps == 3
    for mine_now, expected in zip(mine.parameters(), net.parameters(), strict=True):
        assert torch.allclose(mine_now, expected, atol=1e-6)
