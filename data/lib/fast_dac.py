"""The residual blocks of DAC's encoder on a CPU, with 0.7 of the multiplications and fewer passes through memory.

Activations are (T, C) matrices here, so that each tap of a convolution is a matrix product.

- A residual unit multiplies 4.25 taps per sample instead of seven. Two neighbouring outputs of a filter with taps a and
  b, a x0 + b x1 and a x1 + b x2, take three products instead of four: a (x0 - x1), (a + b) x1 and b (x2 - x1). A longer
  filter is split into its even taps, as a, and its odd taps, as b; each of the three products is then such a filter
  again. Rounding errors grow by half at most, because nothing is scaled.
- The activation x + sin(alpha x)^2 / alpha is u + sin(u)^2 of u = alpha x, divided by alpha: the scales become part of
  the weights before and after it. The biases that residual units add are summed up until an activation needs them.
- A block is computed some thousand samples at a time, so that they stay in a core's cache.
"""

import torch
from torch import nn

KERNEL, REACH = 7, 39  # of the residual units; samples that the three of a block see to each side: 3 * (1 + 3 + 9)
LEVELS = 2  # how often a filter is split into even and odd taps
PHASES = 2**LEVELS
FEWEST_CHANNELS = 64  # in narrower blocks a product is over before Python has started the next one
VALUES = 2**18  # of an activation that are computed at a time


def quicken_encoder(model: nn.Module) -> None:
    """Replaces the wide encoder blocks of a DacModel, a descript DAC, or a model that contains one."""
    for module in model.modules():
        if type(module).__name__ in ("DacEncoderBlock", "EncoderBlock"):
            block = Block(module)
            if len(block.alpha) >= FEWEST_CHANNELS:
                module.forward = block


class Block:
    """Three residual units, an activation, and a convolution that keeps every `stride`-th sample."""

    def __init__(self, module: nn.Module):
        parts = [part for part in module.modules() if type(part).__name__ in ("Snake1d", "Conv1d")]
        *units, snake, conv = parts
        self.units = [ResidualUnit(*units[first : first + 4]) for first in range(0, len(units), 4)]
        self.alpha, self.bias = alpha_of(snake), conv.bias
        (self.stride,), (self.padding,), (kernel,) = conv.stride, conv.padding, conv.kernel_size
        assert kernel == 2 * self.stride and len(self.units) == 3
        # A row of `stride` samples is multiplied with the first half of the taps, the next row with the second.
        weight = (weight_of(conv) / self.alpha.double()[:, None]).permute(2, 1, 0)  # (tap, in, out)
        self.halves = [half.flatten(0, 1).float() for half in weight.split(self.stride)]

    def __call__(self, x):
        """(1, C, T) -> (1, C', T / stride)"""
        (rows,) = x.mT
        size = max(1, VALUES // rows.shape[1] // self.stride) * self.stride
        context = -(-(REACH + self.stride) // self.stride) * self.stride
        pieces = []
        for start in range(0, len(rows), size):
            first = max(0, start - context)
            piece = self.compute(rows[first : start + size + context].clone())
            left = (start - first) // self.stride
            pieces.append(piece[left : left + size // self.stride] if start + size < len(rows) else piece[left:])
        return torch.cat(pieces)[None].mT

    def compute(self, rows):
        bias = torch.zeros_like(self.alpha)
        for unit in self.units:
            bias = unit.add_to(rows, bias)
        count = (len(rows) + 2 * self.padding) // self.stride - 1
        total = (count + 1) * self.stride
        padded = activate(rows, bias, self.alpha, self.padding, max(total, self.padding + len(rows)))
        padded = padded[:total].view(count + 1, -1)
        return torch.addmm(self.bias, padded[:-1], self.halves[0]).addmm_(padded[1:], self.halves[1])


class ResidualUnit:
    """x + conv(activation(dilated conv(activation(x))))"""

    def __init__(self, snake: nn.Module, conv: nn.Conv1d, second_snake: nn.Module, second_conv: nn.Conv1d):
        assert conv.kernel_size == (KERNEL,) and second_conv.kernel_size == (1,)
        (self.dilation,), self.alpha, second_alpha = conv.dilation, alpha_of(snake), alpha_of(second_snake).double()
        taps = weight_of(conv) / self.alpha.double()[:, None] * second_alpha[:, None, None]
        self.taps = split_taps(list(taps.permute(2, 1, 0)), LEVELS)
        self.tap_bias = (conv.bias * second_alpha).float()
        self.weight = (weight_of(second_conv)[:, :, 0] / second_alpha).T.float().contiguous()
        self.bias = second_conv.bias

    def add_to(self, rows, bias):
        """Adds everything but its last bias to `rows`, to which `bias` is still to be added. Returns the next one."""
        (length, channels), step = rows.shape, PHASES * self.dilation
        count = -(-length // step)
        edge, total = KERNEL // 2 * self.dilation, (count + -(-KERNEL // PHASES)) * step
        padded = activate(rows, bias, self.alpha, edge, total)
        # Sample number ((q * PHASES + phase) * dilation + r) is at [phase, q, r], with the bits of the phase reversed.
        filtered = self.tap_bias.expand(PHASES, count, self.dilation, channels).contiguous()
        add_filtered(filtered, padded.view(-1, self.dilation, channels), self.taps)
        add_square_of_sine(filtered)
        change = (filtered.view(-1, channels) @ self.weight).view(*[2] * LEVELS, count, self.dilation, channels)
        change = change.permute(LEVELS, *reversed(range(LEVELS)), LEVELS + 1, LEVELS + 2)
        whole = length // step
        rows[: whole * step].view(whole, *change.shape[1:]).add_(change[:whole])
        if whole < count:
            rows[whole * step :].add_(change[whole].reshape(-1, channels)[: length - whole * step])
        return bias + self.bias


def activate(rows, bias, alpha, left: int, total: int):
    """u + sin(u)^2 of u = alpha (rows + bias), with `left` zeros before and zeros behind up to `total` rows."""
    padded = rows.new_empty(total, rows.shape[1])
    padded[:left] = padded[left + len(rows) :] = 0
    inner = padded[left : left + len(rows)]
    torch.addcmul(bias * alpha, rows, alpha, out=inner)
    add_square_of_sine(inner)
    return padded


def add_square_of_sine(u) -> None:
    sine = u.sin()
    u.addcmul_(sine, sine)


def add_filtered(y, x, taps) -> None:
    """Adds sum_k x[i + k] @ taps[k] to output i, which is y[0, i] if y has one phase. Of several, those in the first
    half have the even outputs."""
    if len(y) == 1:
        (y,) = y
        for k, tap in enumerate(taps):
            y.view(-1, y.shape[-1]).addmm_(x[k : k + len(y)].reshape(-1, len(tap)), tap)
        return
    even, odd, next_even = x[0::2], x[1::2], x[2::2]
    taps_even, taps_both, taps_odd = taps
    y_even, y_odd = y.chunk(2)
    both = torch.zeros_like(y_even)
    add_filtered(both, odd, taps_both)
    y_even += both
    y_odd += both
    add_filtered(y_even, even[: len(odd)] - odd[: len(even)], taps_even)
    add_filtered(y_odd, next_even[: len(odd)] - odd[: len(next_even)], taps_odd)


def split_taps(taps: list, levels: int):
    """What add_filtered takes: `levels` times the even taps, the sums of neighbours, and the odd taps."""
    if levels == 0:
        return [tap.float().contiguous() for tap in taps]
    even, odd = taps[0::2], taps[1::2]
    both = [tap + (odd[k] if k < len(odd) else 0) for k, tap in enumerate(even)]
    return tuple(split_taps(part, levels - 1) for part in (even, both, odd))


def alpha_of(snake: nn.Module):
    """(C,), as the codec divides by it: never 0."""
    return snake.alpha.flatten() + 1e-9


def weight_of(conv: nn.Conv1d):
    """(out, in, tap) in fp64; descript's convolutions hold theirs as lengths and directions."""
    if hasattr(conv, "weight_g"):
        return torch._weight_norm(conv.weight_v.double(), conv.weight_g.double(), 0)
    return conv.weight.double()
