"""Cross-entropy over several codebooks that never holds all logits in memory.

Shapes: N positions, C codebooks, V ids per codebook, D width. The head maps D to C*V.
"""

import torch
from torch import nn
from torch.nn import functional as F

IGNORE = -100
# Logits in memory at a time: 8 MB in fp32 on a CPU (16 are 3 % faster); a GPU needs large matrix products (256 MB).
CHUNK_LOGITS, CHUNK_LOGITS_GPU = 2**21, 2**26


def chunk_rows(classes: int, device: torch.device) -> int:
    return max(1, (CHUNK_LOGITS if device.type == "cpu" else CHUNK_LOGITS_GPU) // classes)


def token_losses(logits_nv: torch.Tensor, labels_nc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token losses (N, C), 0 where ignored; the fp32 logits as (N, C, V) and their logsumexp (N, C)."""
    n, c = labels_nc.shape
    logits = logits_nv.float().view(n, c, logits_nv.shape[-1] // c)  # also for N = 0
    total = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, labels_nc.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (total - picked).masked_fill(labels_nc == IGNORE, 0.0), logits, total


class _GradientInForward(torch.autograd.Function):
    """Computes d(loss)/d(hidden) and d(loss)/d(head) while a chunk's logits exist, so the backward pass needs none."""

    @staticmethod
    def forward(ctx, hidden_nd, weight, labels_nc, weights_nc, rows):
        losses_nc = torch.empty(labels_nc.shape, dtype=torch.float32, device=hidden_nd.device)
        grad_hidden = torch.empty_like(hidden_nd) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_nd), rows):
            part = slice(start, start + rows)
            hidden, labels, scale = hidden_nd[part], labels_nc[part], weights_nc[part]
            losses_nc[part], logits, total = token_losses(hidden @ weight.T, labels)
            if grad_hidden is None and grad_weight is None:
                continue
            # softmax - one_hot, in place of the logits
            grad = logits.sub_(total.unsqueeze(-1)).exp_()
            grad.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), grad.new_full((*labels.shape, 1), -1.0))
            grad = grad.mul_(scale.unsqueeze(-1)).view(len(labels), -1).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                # Summed over the chunks in fp32, whatever precision the head computes in.
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.T, hidden)
                else:
                    grad_weight += grad.T @ hidden
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses_nc)
        return (losses_nc * weights_nc).sum(), losses_nc

    @staticmethod
    def backward(ctx, grad_sum, _):
        grad_hidden, grad_weight = ctx.saved_tensors  # scaled in place and returned without a copy: this runs once
        for grad in (grad_hidden, grad_weight):
            if grad is not None:
                grad.mul_(grad_sum)
        return grad_hidden, grad_weight, None, None, None


class LossHead(nn.Linear):
    """A bias-free Linear that returns the loss itself when it is given labels.

    It holds the very parameter of the Linear it replaces and is called once per batch, so ZeRO-3's hooks gather its
    weight around the call, and ranks stay in step whatever the size of their batches.
    """

    def __init__(self, head: nn.Linear):
        nn.Module.__init__(self)  # not Linear's own, which would allocate a second weight
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, None

    def forward(self, hidden_nd, labels_nc=None, weights_nc=None):
        if labels_nc is None:
            return F.linear(hidden_nd, self.weight)
        rows = chunk_rows(len(self.weight), hidden_nd.device)
        if weights_nc is not None:
            return _GradientInForward.apply(hidden_nd, self.weight, labels_nc, weights_nc, rows)
        chunks = zip(hidden_nd.split(rows), labels_nc.split(rows), strict=True)
        stats = [_stats(F.linear(hidden, self.weight), labels) for hidden, labels in chunks]
        return tuple(torch.cat(column) for column in zip(*stats, strict=True))


def loss_head(head: nn.Module) -> nn.Module:
    """The head as a LossHead where it is a plain bias-free Linear. A head that LoRA wraps costs the whole logits."""
    return LossHead(head) if type(head) is nn.Linear and head.bias is None else head


def codebook_loss(head, hidden_nd, labels_nc, weights_nc) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the token losses (differentiable) and the token losses (N, C) themselves."""
    if isinstance(head, LossHead):
        return head(hidden_nd, labels_nc, weights_nc)
    losses, *_ = token_losses(head(hidden_nd), labels_nc)
    return (losses * weights_nc).sum(), losses.detach()


def rows_loss(hidden_nd, weight, labels_nc, weights_nc) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a head given as its rows. Under ZeRO-3 call it inside the forward of the module that owns them."""
    if not torch.is_grad_enabled():
        hidden_nd, weight = hidden_nd.detach(), weight.detach()  # no gradients are formed
    rows = chunk_rows(len(weight), hidden_nd.device)
    return _GradientInForward.apply(hidden_nd, weight, labels_nc, weights_nc, rows)


@torch.no_grad()
def codebook_stats(head, hidden_nd, labels_nc) -> tuple[torch.Tensor, torch.Tensor]:
    """Token losses and most likely ids, both (N, C), for evaluation."""
    return head(hidden_nd, labels_nc) if isinstance(head, LossHead) else _stats(head(hidden_nd), labels_nc)


def _stats(logits_nv, labels_nc):
    losses, logits, _ = token_losses(logits_nv, labels_nc)
    return losses, logits.argmax(-1)
