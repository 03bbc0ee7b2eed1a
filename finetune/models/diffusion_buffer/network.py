"""The two networks of the Diffusion Buffer, under the names of the official checkpoints.

NCSNpp (the first paper's, reduced) and BlockCausal (the second paper's). Both take the buffer, the noisy frames and
what `embed` makes of the frames' diffusion times, and return one complex value per bin.
N sounds, F frequency bins, K frames, C channels.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

FOURIER_SCALE = 16.0
ALMOST_ZERO = 1e-10  # initial scale of the layers that start at zero


def init_fan_avg(weight: torch.Tensor, scale: float = 1.0) -> None:
    """Uniform with variance scale / (mean of fan-in and fan-out), the initialisation of the official networks."""
    inner = math.prod(weight.shape[2:])
    bound = math.sqrt(3 * scale / ((weight.shape[0] + weight.shape[1]) / 2 * inner))
    nn.init.uniform_(weight, -bound, bound)


class Conv(nn.Conv2d):
    """Convolves (N, C, K, F) with kernels that are stored (F, K), as in the official weights. With neighbouring bins
    adjacent in memory, a small network takes a quarter less time on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight.transpose(2, 3), self.bias, padding=self.padding)


def conv(inside: int, outside: int, size: int, scale: float = 1.0) -> Conv:
    layer = Conv(inside, outside, size, padding=size // 2)
    init_fan_avg(layer.weight.data, scale)
    nn.init.zeros_(layer.bias)
    return layer


def linear(inside: int, outside: int) -> nn.Linear:
    layer = nn.Linear(inside, outside)
    init_fan_avg(layer.weight.data)
    nn.init.zeros_(layer.bias)
    return layer


def groups_of(channels: int) -> int:
    return min(channels // 4, 32)


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups_of(channels), channels, eps=1e-6)


def fir_down(x: torch.Tensor, both: bool = True) -> torch.Tensor:
    """Halves the bins and, with `both`, the frames, with the filter [1, 3, 3, 1] / 8 per dimension.

    Written as sums of slices: as a convolution this would be half of a small network's time on a CPU.
    """
    for dim in (2, 3) if both else (2,):
        even, odd = _slices(x, dim, 0, None, 2), _slices(x, dim, 1, None, 2)
        edge = torch.zeros_like(_slices(x, dim, 0, 1))
        before = torch.cat([edge, _slices(odd, dim, 0, -1)], dim)
        after = torch.cat([_slices(even, dim, 1, None), edge], dim)
        x = (before + after) * 0.125 + (even + odd) * 0.375
    return x


def fir_up(x: torch.Tensor, both: bool = True) -> torch.Tensor:
    """Doubles the bins and, with `both`, the frames, with the same filter."""
    for dim in (2, 3) if both else (2,):
        edge = torch.zeros_like(_slices(x, dim, 0, 1))
        before = torch.cat([edge, _slices(x, dim, 0, -1)], dim)
        after = torch.cat([_slices(x, dim, 1, None), edge], dim)
        most = x * 0.75
        x = torch.stack([most + before * 0.25, most + after * 0.25], dim + 1).flatten(dim, dim + 1)
    return x


def _slices(x: torch.Tensor, dim: int, start: int, end: int | None, step: int = 1) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(start, end, step),)]


class Resample(nn.Module):
    """`fir_down` or `fir_up`; on a GPU, where every slice costs a kernel launch, as one depthwise convolution."""

    def __init__(self, up: bool = False, both: bool = True):
        super().__init__()
        self.up, self.both = up, both
        # Up: a filter for each of the 2 or 4 outputs of a place, which are then interleaved.
        filters = [[0.25, 0.75, 0.0], [0.0, 0.75, 0.25]] if up else [[0.125, 0.375, 0.375, 0.125]]
        rows = torch.tensor(filters)
        columns = rows if both else torch.ones(1, 1)
        kernels = torch.einsum("ik,jl->ijkl", rows, columns).flatten(0, 1)[:, None]
        self.register_buffer("kernels", kernels, persistent=False)  # (outputs, 1, high, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return (fir_up if self.up else fir_down)(x, self.both)
        with torch.autocast(x.device.type, enabled=False):  # in the precision of x, as the slices
            return self.convolve(x)

    def convolve(self, x: torch.Tensor) -> torch.Tensor:
        n, c, *size = x.shape
        kernels = self.kernels.to(x.dtype).repeat(c, 1, 1, 1)
        factors = (2, 2) if self.both else (2, 1)
        strides, padding = (1, 1) if self.up else factors, (1, 1 if self.both else 0)
        x = F.conv2d(x, kernels, stride=strides, padding=padding, groups=c)
        if not self.up:
            return x
        x = x.reshape(n, c, *factors, *size).permute(0, 1, 4, 2, 5, 3)
        return x.reshape(n, c, *(factor * places for factor, places in zip(factors, size, strict=True)))


def real_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(N, F, K) complex buffer and noisy frames -> (N, 4, F, K)."""
    assert x.shape == y.shape and x.dim() == 3, f"buffer {tuple(x.shape)}, noisy frames {tuple(y.shape)}"
    return torch.stack([x.real, x.imag, y.real, y.imag], dim=1)


def complex_output(h: torch.Tensor) -> torch.Tensor:
    """(N, 2, F, K) -> (N, F, K) complex."""
    return torch.complex(h[:, 0].float(), h[:, 1].float())


class Fourier(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        # A generator of its own: W is frozen, so no checkpoint of a run holds it, and it must be the same on resume.
        draw = torch.Generator().manual_seed(0)
        self.W = nn.Parameter(torch.randn(size, generator=draw) * FOURIER_SCALE, requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        angle = value[:, :, None] * self.W * (2 * math.pi)
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


# ---- the first paper's network ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Residual block. The diffusion time enters through a convolution with the stride of the block's frame rate."""

    def __init__(self, inside: int, outside: int, time_size: int, factor: int, resample: str = ""):
        super().__init__()
        self.resample = Resample(resample == "up") if resample else None
        self.GroupNorm_0 = norm(inside)
        self.Conv_0 = conv(inside, outside, 3)
        self.Conv_time = nn.Conv1d(time_size, outside, 3, stride=factor, padding=1)
        self.GroupNorm_1 = norm(outside)
        self.Conv_1 = conv(outside, outside, 3, ALMOST_ZERO)
        self.Conv_2 = conv(inside, outside, 1) if inside != outside or resample else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.GroupNorm_0(x))
        if self.resample:
            h, x = self.resample(h), self.resample(x)
        h = self.Conv_0(h) + time
        h = self.Conv_1(F.silu(self.GroupNorm_1(h)))
        return (self.Conv_2(x) + h) * math.sqrt(0.5)


class Channels(nn.Module):
    """Linear layer over the channels, stored (in, out)."""

    def __init__(self, size: int, scale: float = 0.1):
        super().__init__()
        self.W = nn.Parameter(torch.empty(size, size))
        self.b = nn.Parameter(torch.zeros(size))
        init_fan_avg(self.W.data, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.W + self.b


class Attention(nn.Module):
    """Single-head attention over all positions."""

    def __init__(self, size: int):
        super().__init__()
        self.GroupNorm_0 = norm(size)
        self.NIN_0, self.NIN_1, self.NIN_2 = (Channels(size) for _ in range(3))
        self.NIN_3 = Channels(size, ALMOST_ZERO)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.GroupNorm_0(x).flatten(2).transpose(1, 2)
        q, k, v = (part(h)[:, None] for part in (self.NIN_0, self.NIN_1, self.NIN_2))
        h = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return (x + self.NIN_3(h).transpose(1, 2).reshape(x.shape)) * math.sqrt(0.5)


class Combine(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.Conv_0 = conv(4, size, 1)

    def forward(self, small: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.Conv_0(small) + h


ATTENTION_LEVEL = 4  # the scale of 16 bins of 256, where the official network has attention if it gets that far


class NCSNpp(nn.Module):
    """U-Net with attention in the bottleneck. F and K must be multiples of 2^(scales - 1).

    `widths`: of each scale, in multiples of `width`; `blocks`: residual blocks per scale.
    """

    def __init__(self, width: int, widths: tuple[int, ...] = (1, 2, 2, 2), blocks: int = 1):
        super().__init__()
        self.width, self.levels, self.blocks, time_size = width, len(widths), blocks, 4 * width
        self.down, self.up = Resample(), Resample(up=True)
        sizes, levels = [width * factor for factor in widths], len(widths)
        self.output_layer = nn.Conv2d(4, 2, 1)
        nn.init.zeros_(self.output_layer.bias)  # an untrained network then outputs 0, and its DSM loss is 1
        modules = [Fourier(width), linear(2 * width, time_size), linear(time_size, time_size), conv(4, width, 3)]
        inside, skips = width, [width]
        for level, size in enumerate(sizes):
            for _ in range(blocks):
                modules.append(Block(inside, size, time_size, 2**level))
                inside = size
                skips.append(inside)
                if level == ATTENTION_LEVEL:
                    modules.append(Attention(inside))
            if level + 1 < levels:
                modules += [Block(inside, inside, time_size, 2 ** (level + 1), "down"), Combine(inside)]
                skips.append(inside)
        factor = 2 ** (levels - 1)
        modules += [
            Block(inside, inside, time_size, factor),
            Attention(inside),
            Block(inside, inside, time_size, factor),
        ]
        for level, size in reversed(list(enumerate(sizes))):
            for _ in range(blocks + 1):
                modules.append(Block(inside + skips.pop(), size, time_size, 2**level))
                inside = size
            if level == ATTENTION_LEVEL:
                modules.append(Attention(inside))
            modules += [norm(inside), conv(inside, 4, 3, ALMOST_ZERO)]
            if level:
                modules.append(Block(inside, inside, time_size, 2 ** (level - 1), "up"))
        self.all_modules = nn.ModuleList(modules)

    def embed(self, t: torch.Tensor) -> list[torch.Tensor]:
        """(N, K) diffusion times -> the bias that they add in each block. A stream computes it once."""
        fourier, first, second = self.all_modules[:3]
        time = second(F.silu(first(fourier(torch.log(t + 0.01))))).transpose(1, 2)
        return [part.Conv_time(time)[..., None] for part in self.all_modules if isinstance(part, Block)]

    def forward(self, x: torch.Tensor, y: torch.Tensor, times: list[torch.Tensor], scale: torch.Tensor):
        """(N, F, K) complex -> (N, F, K) complex, divided by `scale` (N or 1, K) before the last layer."""
        return complex_output(self.real_forward(real_input(x, y), times, scale))

    def real_forward(self, xy: torch.Tensor, times: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        """(N, 4, F, K) -> (N, 2, F, K): real and imaginary parts."""
        small = xy.transpose(2, 3).contiguous()
        multiple = 2 ** (self.levels - 1)
        assert all(size % multiple == 0 for size in small.shape[2:]), f"frames and bins {tuple(small.shape[2:])}"
        parts, times = iter(self.all_modules[4:]), iter(times)
        skips = [self.all_modules[3](small)]
        for level in range(self.levels):
            for _ in range(self.blocks):
                h = next(parts)(skips[-1], next(times))
                skips.append(next(parts)(h) if level == ATTENTION_LEVEL else h)
            if level + 1 < self.levels:
                h = next(parts)(skips[-1], next(times))
                small = self.down(small)
                skips.append(next(parts)(small, h))
        h = next(parts)(skips[-1], next(times))
        h = next(parts)(h)
        h = next(parts)(h, next(times))
        pyramid = None
        for level in reversed(range(self.levels)):
            for _ in range(self.blocks + 1):
                h = next(parts)(torch.cat([h, skips.pop()], dim=1), next(times))
            if level == ATTENTION_LEVEL:
                h = next(parts)(h)
            grown = next(parts)(h)
            grown = next(parts)(F.silu(grown))
            pyramid = grown if pyramid is None else self.up(pyramid) + grown
            if level:
                h = next(parts)(h, next(times))
        return self.output_layer(pyramid / scale[:, None, :, None]).transpose(2, 3)


# ---- the second paper's network --------------------------------------------------------------------------------


class CumulativeNorm(nn.Module):
    """Group norm with the mean and variance of all frames up to the current one."""

    def __init__(self, channels: int):
        super().__init__()
        self.groups = groups_of(channels)
        self.gain = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):  # bf16 has too few digits for a sum of thousands of values
            n, c, f, k = x.shape
            grouped = x.float().reshape(n, self.groups, c // self.groups * f, k)
            count = torch.arange(1, k + 1, device=x.device) * grouped.shape[2]
            mean = grouped.sum(2).cumsum(-1) / count
            variance = grouped.square().sum(2).cumsum(-1) / count - mean.square()
            grouped = (grouped - mean[:, :, None]) * torch.rsqrt(variance.clamp(min=0) + 1e-6)[:, :, None]
            return grouped.reshape(n, c, f, k) * self.gain + self.bias


class PastConv(nn.Conv2d):
    """Causal convolution: zero padding in the past, replicate padding in frequency; the newest frame stays the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high, wide = self.kernel_size
        if (high, wide) == (1, 1):
            return super().forward(x)
        steps = -(-x.shape[-1] // self.stride[1])
        past = (steps - 1) * self.stride[1] + wide - x.shape[-1]
        x = F.pad(F.pad(x, (past, 0)), (0, 0, high // 2, high // 2), mode="replicate")
        return super().forward(x)


class PastConvTranspose(nn.ConvTranspose2d):
    """Causal transposed convolution to `frames` at the finer rate, none of which depends on a later coarse frame."""

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        y = super().forward(x)[:, :, 1:-1]
        y = y[..., : x.shape[-1] * self.stride[1]]
        return y[..., y.shape[-1] - frames :]


class CausalBlock(nn.Module):
    """`stride`: of the last convolutions, in frames. `factor`: network input frames per frame of the block's input."""

    def __init__(self, inside: int, outside: int, time_size: int, factor: int, stride: int = 1, resample: str = ""):
        super().__init__()
        self.up = resample == "up"
        self.resample = Resample(self.up, both=False) if resample else None
        size = (3, max(3, stride + 1))
        layer = PastConvTranspose if self.up else PastConv
        self.GroupNorm_0 = CumulativeNorm(inside)
        self.Conv_0 = layer(inside, outside, 3)
        self.Conv_time = nn.Conv1d(time_size, outside, 3, stride=factor, padding=1)
        self.GroupNorm_1 = CumulativeNorm(outside)
        self.Conv_1 = layer(outside, outside, size, stride=(1, stride))
        self.Conv_2 = layer(inside, outside, size, stride=(1, stride))

    def forward(self, x: torch.Tensor, time: torch.Tensor, frames: int = 0) -> torch.Tensor:
        """`frames`: number of output frames, if the block upsamples."""
        same, more = ((x.shape[-1],), (frames,)) if self.up else ((), ())
        h = F.silu(self.GroupNorm_0(x))
        if self.resample:
            h, x = self.resample(h), self.resample(x)
        h = self.Conv_0(h, *same) + time
        h = self.Conv_1(F.silu(self.GroupNorm_1(h)), *more)
        return (self.Conv_2(x, *more) + h) * math.sqrt(0.5)


class Wrapped(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.lin_layer = linear(inside, outside)


class TimeEncoding(Fourier):
    def __init__(self, width: int):
        super().__init__(width)
        self.lin_layer1, self.lin_layer2 = Wrapped(2 * width, 4 * width), Wrapped(4 * width, 4 * width)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return F.silu(self.lin_layer2.lin_layer(self.lin_layer1.lin_layer(super().forward(t))))


class BlockCausal(nn.Module):
    """U-Net in which a frame that is d frames old sees the d frames after it, up to block - 1. F: multiple of 16."""

    def __init__(self, width: int, block: int = 32):
        super().__init__()
        self.width, self.block = width, block
        sizes = [width, *[2 * width] * 4]
        strides = {32: (2, 2, 2, 4), 16: (2, 2, 2, 2)}[block]
        factors = [math.prod(strides[:i]) for i in range(5)]
        time_size = 4 * width
        self.temp_enc = TimeEncoding(width)
        self.in_layer = PastConv(4, width, 3)
        self.down_layers = nn.ModuleList(
            CausalBlock(sizes[i], sizes[i + 1], time_size, factors[i], strides[i], "down") for i in range(4)
        )
        self.bottleneck_layers = nn.ModuleList(CausalBlock(sizes[4], sizes[4], time_size, factors[4]) for _ in range(2))
        self.up_layers = nn.ModuleList(
            CausalBlock(2 * sizes[i], sizes[i - 1], time_size, factors[i], strides[i - 1], "up") for i in (4, 3, 2, 1)
        )
        self.out_layers = nn.ModuleList([CumulativeNorm(width), nn.SiLU(), PastConv(width, 4, 3), PastConv(4, 2, 1)])
        self.initialise()

    def initialise(self) -> None:
        """The initialisation of the first network. With torch's default the biases drown out the signal, norm after
        norm, and a narrow network outputs 0 forever."""
        for name, layer in self.named_modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
                starts_at_zero = name.endswith("Conv_1") or name == "out_layers.2"
                init_fan_avg(layer.weight.data, ALMOST_ZERO if starts_at_zero else 1.0)
                nn.init.zeros_(layer.bias)

    def embed(self, t: torch.Tensor) -> list[torch.Tensor]:
        time = self.temp_enc(t).transpose(1, 2)  # not its logarithm: the official code computes one and discards it
        blocks = [*self.down_layers, *self.bottleneck_layers, *self.up_layers]
        return [block.Conv_time(time)[:, :, None] for block in blocks]

    def forward(self, x: torch.Tensor, y: torch.Tensor, times: list[torch.Tensor], scale: torch.Tensor):
        return complex_output(self.real_forward(real_input(x, y), times, scale))

    def real_forward(self, xy: torch.Tensor, times: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        times = iter(times)
        h = self.in_layer(xy)
        skips, frames = [], [h.shape[-1]]
        for block in self.down_layers:
            h = block(h, next(times))
            skips.append(h)
            frames.append(h.shape[-1])
        for block in self.bottleneck_layers:
            h = block(h, next(times))
        for block in self.up_layers:
            frames.pop()
            h = block(torch.cat([h, skips.pop()], dim=1), next(times), frames[-1])
        for layer in self.out_layers:
            h = layer(h)
        return h / scale[:, None, None, :]


LARGE = {"widths": (2, 2, 2, 2, 2), "blocks": 2}  # of ncsnpp_large, the size that the official trainer has by default
MULTIPLES = {"ncsnpp": (8, 8), "ncsnpp_large": (16, 16), "block_causal": (16, 1)}  # of F and K


def build_network(network: str, width: int, block: int) -> nn.Module:
    if network == "block_causal":
        return BlockCausal(width, block)
    return NCSNpp(width, **LARGE) if network == "ncsnpp_large" else NCSNpp(width)
