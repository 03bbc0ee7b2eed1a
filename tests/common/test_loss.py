"""The codebook loss against autograd of plain F.cross_entropy."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import common.loss as loss_module
from common.loss import IGNORE, chunk_rows, codebook_loss, codebook_stats, loss_head, rows_loss

N, C, V, D = 37, 3, 19, 8


def problem(dtype=torch.float32, seed=0):
    """Head, hidden states, labels (a fifth ignored, one row wholly) and weights of every size, 0 among them."""
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(D, C * V, bias=False)
    head.weight.data = torch.randn(C * V, D, generator=draw)
    hidden = torch.randn(N, D, generator=draw)
    labels = torch.randint(0, V, (N, C), generator=draw)
    labels[torch.rand(N, C, generator=draw) < 0.2] = IGNORE
    labels[5] = IGNORE
    labels[0, 0], labels[1, 1] = 0, V - 1
    weights = torch.rand(N, C, generator=draw) * 4 * (labels != IGNORE)
    weights[7] = 0
    return head.to(dtype), hidden.to(dtype).requires_grad_(), labels, weights


def plain(head, hidden, labels, weights):
    logits = F.linear(hidden, head.weight).float().view(N, C, V)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return (losses.view(N, C) * weights).sum(), losses.view(N, C)


def gradients(loss, head, hidden, scale=0.37):
    (loss * scale).backward()
    return hidden.grad, head.weight.grad


def close(found, expected, tolerance):
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
def test_loss_and_gradients_equal_plain_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", rows * C * V)
    head, hidden, labels, weights = problem()
    expected, expected_losses = plain(head, hidden, labels, weights)
    expected_grads = gradients(expected, head, hidden)
    head, hidden, labels, weights = problem()
    head = loss_head(head)
    found, losses = codebook_loss(head, hidden, labels, weights)
    close(found, expected, 1e-6)
    close(losses, expected_losses, 1e-6)
    for mine, theirs in zip(gradients(found, head, hidden), expected_grads, strict=True):
        close(mine, theirs, 1e-6)
    assert not hidden.grad[5].any() and not hidden.grad[7].any(), "ignored and weightless rows have no gradient"


def test_a_gpu_gets_larger_chunks_than_a_cpu(monkeypatch):
    assert [chunk_rows(130_000, torch.device(name)) for name in ("cpu", "cuda")] == [16, 516]
    assert chunk_rows(2**30, torch.device("cuda")) == 1


def test_gradients_equal_numerical_ones():
    head, hidden, labels, weights = problem(torch.float64)
    head = loss_head(head)

    def loss(hidden, weight):
        logits = (hidden @ weight.T).view(N, C, V)
        return (F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none") * weights).sum()

    found, _ = codebook_loss(head, hidden, labels, weights)
    found.backward()
    direction = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step = 1e-5
    with torch.no_grad():
        ahead, behind = (loss(hidden + s * direction, head.weight) for s in (step, -step))
    assert float((hidden.grad * direction).sum()) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("rows", [5, 1000])
def test_bf16_stays_near_fp32(rows, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", rows * C * V)
    head, hidden, labels, weights = problem(torch.bfloat16)
    reference = nn.Linear(D, C * V, bias=False)
    reference.weight.data = head.weight.detach().float()
    wide = hidden.detach().float().requires_grad_()
    expected, _ = plain(reference, wide, labels, weights)
    expected_grads = gradients(expected, reference, wide)
    head = loss_head(head)
    found, losses = codebook_loss(head, hidden, labels, weights)
    assert losses.dtype == torch.float32
    close(found, expected, 1e-2)
    for mine, theirs in zip(gradients(found, head, hidden), expected_grads, strict=True):
        assert mine.dtype == torch.bfloat16
        close(mine.float(), theirs, 2e-2)


def test_a_frozen_head_gets_no_gradient_and_frozen_states_neither():
    head, hidden, labels, weights = problem()
    expected = gradients(plain(head, hidden, labels, weights)[0], head, hidden)
    head, hidden, labels, weights = problem()
    head = loss_head(head)
    head.weight.requires_grad_(False)
    codebook_loss(head, hidden, labels, weights)[0].mul(0.37).backward()
    assert head.weight.grad is None
    close(hidden.grad, expected[0], 1e-6)
    head, hidden, labels, weights = problem()
    head = loss_head(head)
    codebook_loss(head, hidden.detach(), labels, weights)[0].mul(0.37).backward()
    close(head.weight.grad, expected[1], 1e-6)


def test_no_position_at_all_costs_nothing_and_still_has_gradients():
    """A rank whose micro-batch has no target must not leave the others waiting."""
    head, hidden, labels, weights = problem()
    head = loss_head(head)
    loss, _ = codebook_loss(head, hidden[:0], labels[:0], weights[:0])
    loss.backward()
    assert loss == 0 and not head.weight.grad.any()


def test_a_loss_that_is_not_finite_stays_so():
    head, hidden, labels, weights = problem()
    head = loss_head(head)
    with torch.no_grad():
        hidden[3] = float("nan")
    assert codebook_loss(head, hidden, labels, weights)[0].isnan()


def test_a_loss_head_is_the_same_linear_with_the_same_parameter():
    head, hidden, *_ = problem()
    expected = head(hidden)
    fused = loss_head(head)
    assert torch.equal(fused(hidden), expected) and list(fused.state_dict()) == list(head.state_dict())
    assert fused.weight is head.weight and isinstance(fused, nn.Linear)


def test_a_lora_wrapped_head_trains_its_matrices_as_plain_cross_entropy_does():
    from peft import LoraConfig, get_peft_model

    head, hidden, labels, weights = problem()
    head = loss_head(head)
    holder = nn.Module()
    holder.head = head
    torch.manual_seed(0)
    get_peft_model(holder, LoraConfig(r=2, target_modules=["head"], init_lora_weights=False))
    lora = holder.head
    found, losses = codebook_loss(lora, hidden, labels, weights)
    found.backward()
    mine = [p.grad.clone() for p in lora.parameters() if p.requires_grad]
    assert len(mine) == 2
    lora.zero_grad()
    down, up = (module["default"].weight for module in (lora.lora_A, lora.lora_B))
    logits = hidden @ head.weight.T + hidden @ down.T @ up.T * lora.scaling["default"]
    expected = F.cross_entropy(logits.view(N, C, V).transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    (expected * weights).sum().backward()
    close(losses, expected, 1e-5)
    for found_grad, parameter in zip(mine, [p for p in lora.parameters() if p.requires_grad], strict=True):
        close(found_grad, parameter.grad, 1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_evaluation_gives_token_losses_and_most_likely_ids(fused, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 5 * C * V)
    head, hidden, labels, weights = problem()
    if fused:
        head = loss_head(head)
    losses, best = codebook_stats(head, hidden, labels)
    _, expected = plain(head, hidden, labels, weights)
    close(losses, expected, 1e-6)
    assert torch.equal(best, (hidden @ head.weight.T).view(N, C, V).argmax(-1))
    assert not losses.requires_grad


@pytest.mark.parametrize("n", [0, 1, 37])
def test_a_head_given_as_rows_is_torchs_cross_entropy(n, monkeypatch):
    """In chunks of a few rows; of one codebook."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 5 * 20)
    torch.manual_seed(0)
    hidden, head = (torch.randn(size, 16, dtype=torch.float64, requires_grad=True) for size in (n, 20))
    labels, weights = torch.randint(0, 20, (n, 1)), torch.rand(n, 1, dtype=torch.float64)
    labels[3:5], weights[3:5] = IGNORE, 0.0
    each = F.cross_entropy(hidden @ head.T, labels[:, 0], reduction="none", ignore_index=IGNORE)
    expected = torch.autograd.grad((each * weights[:, 0]).sum(), [hidden, head])
    total, losses = rows_loss(hidden.float(), head.float(), labels, weights.float())
    found = torch.autograd.grad(total, [hidden, head])
    assert torch.allclose(losses[:, 0].double(), each, atol=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
