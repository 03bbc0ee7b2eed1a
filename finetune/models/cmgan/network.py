"""CMGAN's two networks, with the parameter names of the published checkpoint: TSCNet, the generator, and the
discriminator, which predicts PESQ.

B sounds, C channels, T frames, F bins (201; 101 between encoder and decoders), S sequences of length N.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BINS = 201
HEADS = 4
MAX_DISTANCE = 512  # relative positions further apart share one embedding
# Attention logits per chunk. On a CPU a chunk fits the cache. On a GPU every chunk costs kernel launches, so 4 crops of
# 2 s are one chunk; its 1 GB bounds the memory of a long recording.
CHUNK_LOGITS_CPU, CHUNK_LOGITS_GPU = 2**20, 2**28
CHUNK_BINS_EXPORT = 26  # of 101 in an ONNX file: each chunk makes the file larger and its export longer
TINY = 1e-12  # inside roots, whose gradient at 0 is NaN


# ---- conformer ---------------------------------------------------------------------------------------------------


class Swish(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Glu(nn.Module):
    def forward(self, x):
        return F.glu(x, dim=1)


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class PreNorm(nn.Module):
    def __init__(self, dim: int, fn: nn.Module):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Half(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return 0.5 * self.fn(x)


class FeedForward(nn.Module):
    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 4 * dim), Swish(), nn.Dropout(dropout), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    """Self-attention with one learned vector per relative position: logits (q.k + q.R[i-j]) / sqrt(d)."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.rel_pos_emb = nn.Embedding(2 * MAX_DISTANCE + 1, dim // HEADS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[:, None] - place).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
        positions = self.rel_pos_emb(distance).transpose(1, 2)  # (N, d, N)
        q = self.to_q(x) * (x.shape[2] // HEADS) ** -0.5
        positions = positions.to(q.dtype)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        rows = _rows_per_chunk(x)
        parts = zip(*(side.split(rows) if rows else [side] for side in (q, k, v)), strict=True)
        mixed = [_attend(*part, positions) for part in parts]
        return self.dropout(self.to_out(torch.cat(mixed) if len(mixed) > 1 else mixed[0]))


def _rows_per_chunk(x) -> int:
    """Sequences per chunk of attention; 0 = all in one."""
    if torch.compiler.is_exporting():  # frames are not known yet: few bins at a time, or all frames, which are short
        return CHUNK_BINS_EXPORT if isinstance(x.shape[0], int) else 0
    chunk_logits = CHUNK_LOGITS_CPU if x.device.type == "cpu" else CHUNK_LOGITS_GPU
    return max(1, chunk_logits // (HEADS * x.shape[1] ** 2))


def _attend(q, k, v, positions):
    s, n, dim = q.shape
    q, k, v = (t.view(s, n, HEADS, -1).transpose(1, 2).reshape(s * HEADS, n, -1) for t in (q, k, v))
    by_position = torch.bmm(q.transpose(0, 1), positions).transpose(0, 1)
    weights = torch.baddbmm(by_position, q, k.transpose(1, 2)).softmax(-1, dtype=torch.float32)
    mixed = torch.bmm(weights.to(v.dtype), v)
    return mixed.view(s, HEADS, n, -1).transpose(1, 2).reshape(s, n, dim)


class DepthwiseConv(nn.Module):
    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel, groups=channels, padding=kernel // 2)

    def forward(self, x):
        return self.conv(x)


class StepBatchNorm(nn.BatchNorm1d):
    """BatchNorm that leaves its running statistics to `update_batch_norm`; `latest`: mean and variance of the batch
    that it saw last."""

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        self.latest = self.running_mean.new_zeros(2, self.num_features)
        return F.batch_norm(x, *self.latest, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)


class ConvModule(nn.Module):
    def __init__(self, dim: int, kernel: int = 31):
        super().__init__()
        inner = 2 * dim
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            Transpose(),
            nn.Conv1d(dim, 2 * inner, 1),
            Glu(),
            DepthwiseConv(inner, kernel),
            StepBatchNorm(inner),
            Swish(),
            nn.Conv1d(inner, dim, 1),
            Transpose(),
        )

    def forward(self, x):
        return self.net(x)


class Conformer(nn.Module):
    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.ff1 = Half(PreNorm(dim, FeedForward(dim, dropout)))
        self.attn = PreNorm(dim, Attention(dim, dropout))
        self.conv = ConvModule(dim)
        self.ff2 = Half(PreNorm(dim, FeedForward(dim, dropout)))
        self.post_norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.ff1(x)
        x = x + self.attn(x)
        x = x + self.conv(x)
        x = x + self.ff2(x)
        return self.post_norm(x)


class TwoStageConformer(nn.Module):
    """A conformer along time for every bin, then one along frequency for every frame."""

    def __init__(self, channels: int, dropout: float):
        super().__init__()
        self.time_conformer = Conformer(channels, dropout)
        self.freq_conformer = Conformer(channels, dropout)
        self.checkpointing, self.low_precision = False, False

    def forward(self, x_bctf):
        b, c, t, f = x_bctf.shape
        along_time = x_bctf.permute(0, 3, 2, 1).reshape(b * f, t, c)
        along_time = along_time + self._run(self.time_conformer, along_time)
        along_freq = along_time.view(b, f, t, c).transpose(1, 2).reshape(b * t, f, c)
        along_freq = along_freq + self._run(self.freq_conformer, along_freq)
        return along_freq.view(b, t, f, c).permute(0, 3, 1, 2)

    def _run(self, conformer, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.low_precision):
            if not (self.checkpointing and torch.is_grad_enabled()):
                return conformer(x).float()
            return checkpoint(conformer, x, use_reentrant=False).float()


# ---- generator -------------------------------------------------------------------------------------------------


class DenseBlock(nn.Module):
    """Four causal convolutions with growing dilation; each one takes the outputs of all before it."""

    def __init__(self, channels: int):
        super().__init__()
        for i in range(4):
            conv = nn.Conv2d(channels * (i + 1), channels, (2, 3), dilation=(2**i, 1))
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"norm{i + 1}", nn.InstanceNorm2d(channels, affine=True))
            self.add_module(f"prelu{i + 1}", nn.PReLU(channels))

    def forward(self, x):
        seen = x
        for i in range(4):
            x = self.get_submodule(f"conv{i + 1}")(F.pad(seen, (1, 1, 2**i, 0)))
            x = self.get_submodule(f"prelu{i + 1}")(self.get_submodule(f"norm{i + 1}")(x))
            if i < 3:
                seen = torch.cat([x, seen], dim=1)
        return x


class Encoder(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv_1 = nn.Sequential(
            nn.Conv2d(3, channels, 1), nn.InstanceNorm2d(channels, affine=True), nn.PReLU(channels)
        )
        self.dilated_dense = DenseBlock(channels)
        self.conv_2 = nn.Sequential(
            nn.Conv2d(channels, channels, (1, 3), (1, 2), padding=(0, 1)),
            nn.InstanceNorm2d(channels, affine=True),
            nn.PReLU(channels),
        )

    def forward(self, x):
        return self.conv_2(self.dilated_dense(self.conv_1(x)))


class SubPixel(nn.Module):
    """Twice the bins: output channel r * C + c becomes channel c of bin 2 * f + r."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, (1, 3), padding=(0, 1))

    def forward(self, x):
        x = self.conv(x)
        b, c, t, f = x.shape
        return x.view(b, 2, c // 2, t, f).permute(0, 2, 3, 4, 1).reshape(b, c // 2, t, 2 * f)


class MaskDecoder(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.dense_block = DenseBlock(channels)
        self.sub_pixel = SubPixel(channels)
        self.conv_1 = nn.Conv2d(channels, 1, (1, 2))
        self.norm = nn.InstanceNorm2d(1, affine=True)
        self.prelu = nn.PReLU(1)
        self.final_conv = nn.Conv2d(1, 1, 1)
        self.prelu_out = nn.PReLU(BINS, init=-0.25)  # one slope per bin

    def forward(self, x):
        x = self.prelu(self.norm(self.conv_1(self.sub_pixel(self.dense_block(x)))))
        x = self.final_conv(x).squeeze(1).transpose(1, 2)
        return self.prelu_out(x).transpose(1, 2).unsqueeze(1)


class ComplexDecoder(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.dense_block = DenseBlock(channels)
        self.sub_pixel = SubPixel(channels)
        self.prelu = nn.PReLU(channels)
        self.norm = nn.InstanceNorm2d(channels, affine=True)
        self.conv = nn.Conv2d(channels, 2, (1, 2))

    def forward(self, x):
        return self.conv(self.prelu(self.norm(self.sub_pixel(self.dense_block(x)))))


class TSCNet(nn.Module):
    """Compressed noisy spectrum, real and imaginary part (B, 2, T, F) -> the enhanced one, same shape."""

    def __init__(self, channels: int = 64, dropout: float = 0.2):
        super().__init__()
        self.channels = channels
        self.dense_encoder = Encoder(channels)
        for i in range(1, 5):
            self.add_module(f"TSCB_{i}", TwoStageConformer(channels, dropout))
        self.mask_decoder = MaskDecoder(channels)
        self.complex_decoder = ComplexDecoder(channels)
        for bias in self.biases_without_effect():
            # Its true gradient is 0. Adam would scale up the rounding noise that is computed instead, and the bias
            # would take a random walk, one learning rate per step.
            bias.register_hook(torch.zeros_like)

    def biases_without_effect(self) -> list[nn.Parameter]:
        """Biases that the normalisation right after them cancels."""
        biases = [self.dense_encoder.conv_1[0].bias, self.dense_encoder.conv_2[0].bias, self.mask_decoder.conv_1.bias]
        for module in self.modules():
            if isinstance(module, DenseBlock):
                biases += [module.get_submodule(f"conv{i}").bias for i in range(1, 5)]
            if isinstance(module, ConvModule):
                biases.append(module.net[4].conv.bias)
        return biases

    def set_compute(self, checkpointing: bool, low_precision: bool) -> None:
        """Sets whether conformers recompute their activations in the backward pass, and whether they use bf16."""
        for i in range(1, 5):
            block = self.get_submodule(f"TSCB_{i}")
            block.checkpointing, block.low_precision = checkpointing, low_precision

    def forward(self, x_b2tf):
        real, imag = x_b2tf[:, :1], x_b2tf[:, 1:]
        magnitude = (real.square() + imag.square() + TINY).sqrt()
        x = self.dense_encoder(torch.cat([magnitude, real, imag], dim=1))
        for i in range(1, 5):
            x = self.get_submodule(f"TSCB_{i}")(x)
        # mask x |X| with the noisy phase is mask x (real, imag); the complex decoder adds its correction
        return self.mask_decoder(x) * x_b2tf + self.complex_decoder(x)


def batch_norm_statistics(model: nn.Module) -> torch.Tensor:
    """Means and variances of the last micro-batch in all BatchNorm layers, for `update_batch_norm`."""
    return torch.cat([layer.latest.flatten() for layer in model.modules() if isinstance(layer, StepBatchNorm)])


def update_batch_norm(model: nn.Module, statistics: list[torch.Tensor], process) -> None:
    """Updates the running statistics with the mean over the micro-batches of all ranks, which makes them the same for
    any ranks x accumulation. Call it once per applied optimizer step, on every rank.

    `statistics`: of each micro-batch of this rank.
    """
    import torch.distributed as dist

    layers = [m for m in model.modules() if isinstance(m, StepBatchNorm)]
    sums = torch.stack(statistics).sum(0)
    if process.world > 1:
        dist.all_reduce(sums)
    means = (sums / (len(statistics) * process.world)).split([2 * layer.num_features for layer in layers])
    for layer, mean_var in zip(layers, means, strict=True):
        mean, var = mean_var.view(2, -1)
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(var, layer.momentum)
        layer.num_batches_tracked += 1


# ---- discriminator ---------------------------------------------------------------------------------------------


class SpectralLayer(nn.Module):
    """A convolution or linear layer whose weight is divided by its largest singular value.

    Parameter names are those of torch.nn.utils.spectral_norm, but the power iteration runs once per optimizer step
    (`iterate`), not in every forward pass: the weights would depend on ranks and accumulation.
    """

    def __init__(self, layer: nn.Module, compute):
        super().__init__()
        self.compute = compute
        self.weight_orig = nn.Parameter(layer.weight.detach())
        self.bias = nn.Parameter(layer.bias.detach()) if layer.bias is not None else None
        rows = self.weight_orig.flatten(1)
        self.register_buffer("weight_u", F.normalize(torch.randn(rows.shape[0]), dim=0))
        self.register_buffer("weight_v", F.normalize(torch.randn(rows.shape[1]), dim=0))
        for _ in range(15):
            self.iterate()

    @torch.no_grad()
    def iterate(self) -> None:
        rows = self.weight_orig.flatten(1)
        self.weight_v.copy_(F.normalize(rows.T @ self.weight_u, dim=0, eps=1e-12))
        self.weight_u.copy_(F.normalize(rows @ self.weight_v, dim=0, eps=1e-12))

    def forward(self, x):
        largest = torch.dot(self.weight_u, self.weight_orig.flatten(1) @ self.weight_v)
        return self.compute(x, self.weight_orig / largest, self.bias)


def _spectral_conv(inputs: int, outputs: int) -> SpectralLayer:
    layer = nn.Conv2d(inputs, outputs, 4, bias=False)
    return SpectralLayer(layer, lambda x, weight, bias: F.conv2d(x, weight, bias, stride=2, padding=1))


def _spectral_linear(inputs: int, outputs: int) -> SpectralLayer:
    return SpectralLayer(nn.Linear(inputs, outputs), F.linear)


class LearnableSigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.sigmoid(self.slope * x)


class Discriminator(nn.Module):
    """Compressed magnitudes of a clean and another sound (B, 1, F, T) -> (B,) the other's PESQ, 1 to 4.5 as 0 to 1."""

    def __init__(self, channels: int = 16):
        super().__init__()
        self.channels = channels
        sizes = [2, channels, 2 * channels, 4 * channels, 8 * channels]
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            layers += [
                _spectral_conv(inputs, outputs),
                nn.InstanceNorm2d(outputs, affine=True),
                nn.PReLU(outputs),
            ]
        layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), _spectral_linear(8 * channels, 4 * channels)]
        layers += [nn.Dropout(0.3), nn.PReLU(4 * channels), _spectral_linear(4 * channels, 1), LearnableSigmoid()]
        self.layers = nn.Sequential(*layers)

    def forward(self, clean, other):
        return self.layers(torch.cat([clean, other], dim=1)).squeeze(1)

    def iterate(self) -> None:
        """One power iteration of every spectral norm; call it once per optimizer step."""
        for layer in self.layers:
            if isinstance(layer, SpectralLayer):
                layer.iterate()
