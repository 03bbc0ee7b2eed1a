"""ZeRO-3's weights are gathered module by module, with the same gradients, and small ones stay whole. Two ranks: also
the recipes' tests of stage 3."""

import inspect
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import linear
from deepspeed.utils import nvtx
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.config import RunConfig
from common.contracts import LossOutput
from common.ds_config import resolve_ds
from common.engine import backward, full_gradient, gathered, start_engine, take_step, trainable
from common.optim import build_optimizer, parameter_groups
from common.zero3 import KeptMemory, Linear, joined, quicken_linear
from helpers import support

# Nothing stays gathered: every weight is released after its module.
STRICT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
STRICT |= {"stage3_prefetch_bucket_size": 0}


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_linear_layer_has_the_gradients_of_the_formula(shape, bias):
    x, w = torch.randn(shape, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    b = torch.randn(4, requires_grad=True) if bias else None
    tensors = [x, w, b][: 2 + bias]
    found = Linear.apply(x, w, b)
    expected = torch.einsum("...i,oi->...o", x, w) + (b if bias else 0)
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(expected)
    for mine, wanted in zip(
        torch.autograd.grad(found, tensors, seed), torch.autograd.grad(expected, tensors, seed), strict=True
    ):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_has_the_same_gradients(autocast):
    quicken_linear()
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = linear.zero3_linear_wrap(x, w), x @ w.t()
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    for mine, wanted in zip(*(torch.autograd.grad(y.float().sum(), [x, w]) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, wanted)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def network(frozen: bool, block=Block) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), block(), block(), nn.Linear(4, 1))
    net[0].requires_grad_(not frozen)
    return net


def train(folder, net, frozen: bool, blocks: list) -> int:
    """Two steps of two micro-batches, the first compared with a plain loop; returns the number of forward hooks."""
    config = RunConfig(precision="fp32", lr=1e-2, max_grad_norm=0.5, accumulation=2, weight_decay=0.1)
    ds, inputs = resolve_ds(support.stage_file(folder, 3, **STRICT), config, 1), torch.randn(4, 3, 4)
    plain = network(frozen)
    (plain(inputs[:2]).square().sum() / 6).backward()
    optimizer = build_optimizer(parameter_groups(net, 0.1, ("bias",)), config, ds)
    engine = start_engine(net, lambda net, x: LossOutput(net(x).square().sum(), {}), optimizer, ds, blocks)
    slow = mock.Mock(side_effect=AssertionError("every hook would do this"))
    for step in range(2):
        with mock.patch.object(inspect, "signature", slow), mock.patch.object(nvtx, "_range_push", slow):
            backward(engine, engine(inputs[2 * step]).loss_sum, 6.0, 1)
            engine.step()
            backward(engine, engine(inputs[2 * step + 1]).loss_sum, 6.0, 1)
        for name, parameter in trainable(engine).items() if step == 0 else ():
            found, expected = full_gradient(parameter), plain.get_parameter(name).grad
            assert found.abs().max() > 0 and torch.allclose(found, expected, atol=1e-6), name
        assert all(parameter.numel() == 0 for parameter in net.parameters()), "something stays gathered"
        assert take_step(engine)[0]
    return len(engine.optimizer.parameter_offload.forward_hooks)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("frozen", [False, True])
def test_modules_gathered_whole_have_the_gradients_of_a_plain_loop(tmp_path, frozen):
    """Also the first of them, if nothing before it is trained: DeepSpeed's own leaf modules would have none."""
    own, net = train(tmp_path, network(frozen), frozen, []), network(frozen)
    assert own - train(tmp_path, net, frozen, [net[1], net[2]]) == 2 * 2 * 3  # two around 3 parts of 2 blocks


@pytest.mark.usefixtures("ranks")
def test_layers_that_are_computed_again_have_the_same_gradients(tmp_path):
    train(tmp_path, network(False, Recomputed), False, [])


@pytest.mark.usefixtures("ranks")
def test_a_weight_that_was_released_is_gathered_for_the_backward_pass_only(tmp_path):
    net, x = network(False), torch.randn(3, 4, requires_grad=True)
    train(tmp_path, net, False, [])
    weight = net[3].weight
    with gathered(net[3]):
        expected, output = weight.detach().clone(), Linear.apply(x, weight, None)
    assert weight.numel() == 0
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], expected.expand(3, 4))
    assert weight.numel() == 0


def test_memory_is_used_again_when_nothing_else_uses_it():
    memory, like = KeptMemory(), torch.empty(3, 4)
    first = memory.like(like)
    assert (first.shape, first.dtype) == ((12,), torch.float32)
    place, row = first.data_ptr(), first.view(3, 4)[1]
    del first
    second = memory.like(like)
    row.fill_(1.0)
    second.fill_(2.0)
    assert row.tolist() == [1.0] * 4
    del row
    assert memory.like(like).data_ptr() == place != second.data_ptr()


def test_no_more_memory_is_kept_than_was_used_at_once():
    memory = KeptMemory()
    kept = lambda: sum(block.nbytes for blocks in memory.free.values() for block in blocks)  # noqa: E731
    four = [memory.like(torch.empty(100)) for _ in range(4)]
    assert kept() == 0
    del four
    assert kept() == 1600
    large = memory.like(torch.empty(300))
    assert kept() + large.nbytes <= 1600


def test_neighbours_are_joined_without_a_copy_and_others_with_one():
    buffer = torch.arange(12.0)
    neighbours = [buffer[1:4], buffer[4:4], buffer[4:10].view(2, 3)]
    others = [buffer[1:4], buffer[5:7]], [buffer[4:6], buffer[1:4]], [buffer[:4].view(2, 2).t(), buffer[4:6]]
    found = joined(neighbours)
    assert torch.equal(found, buffer[1:10]) and found.data_ptr() == buffer[1:].data_ptr()
    for tensors in (*others, [buffer[:2], torch.ones(2)]):
        found = joined(tensors)
        assert found.tolist() == [value for tensor in tensors for value in tensor.flatten().tolist()]
        assert found.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


@pytest.mark.distributed
@pytest.mark.quick
def test_small_weights_stay_whole_and_are_renewed_together(two_ranks, tmp_path):
    two_ranks.call("helpers.zero3_ranks:compare_steps", folder=str(tmp_path))


@pytest.mark.distributed
@pytest.mark.quick
def test_the_average_replaces_weights_that_are_gathered(two_ranks, tmp_path):
    two_ranks.call("helpers.zero3_ranks:compare_averages", folder=str(tmp_path))
