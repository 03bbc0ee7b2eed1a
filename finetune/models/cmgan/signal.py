"""From waves to CMGAN's compressed spectra and back, and its losses.

B sounds, L samples, F bins (201), T frames (L // 100 + 1).
"""

from dataclasses import dataclass

import torch

RATE = 16000
N_FFT, HOP = 400, 100
POWER = 0.3  # magnitudes are compressed: |X|^0.3, the phase stays
TINY = 1e-12  # inside roots: their gradient at 0 is NaN
SILENT = 1e-8  # mean square below which a sound is not normalised: the factor would be infinite
TERMS = ("ri", "mag", "time", "gan")


@dataclass
class Pair:
    """A normalised pair. Nothing after `normalise` sees the recording's own level, the losses least of all."""

    noisy: torch.Tensor  # (B, L)
    clean: torch.Tensor
    scale: torch.Tensor  # (B,) what both were multiplied with

    @property
    def audible(self) -> torch.Tensor:
        """(B,) 1, and 0 where the noisy sound is silence: nothing to enhance, nothing to learn from."""
        return (self.noisy.square().mean(-1) >= SILENT).float()

    @property
    def heard(self) -> torch.Tensor:
        """(B, L) what the generator trains on: the noisy sound, or hiss for silence.

        Silence is a constant, of which every instance norm multiplies the gradient by 300. Its own loss is left out,
        but BatchNorm would still lead its neighbours' gradient through it.
        """
        hiss = torch.randn(self.noisy.shape[1], generator=torch.Generator().manual_seed(0)).to(self.noisy.device)
        return torch.where(self.audible[:, None] > 0, self.noisy, hiss)


def normalise(noisy: torch.Tensor, clean: torch.Tensor) -> Pair:
    """Both signals times the factor that gives the noisy one unit power."""
    power = noisy.square().mean(-1)
    scale = torch.where(power < SILENT, torch.ones_like(power), power.clamp(min=SILENT).rsqrt())
    return Pair(noisy * scale[:, None], clean * scale[:, None], scale)


def _window(wave: torch.Tensor) -> torch.Tensor:
    return torch.hamming_window(N_FFT, device=wave.device)


def spectrum(wave: torch.Tensor) -> torch.Tensor:
    """(B, L) -> compressed real and imaginary part (B, 2, T, F)."""
    bins = torch.stft(wave, N_FFT, HOP, window=_window(wave), return_complex=True)
    parts = torch.view_as_real(bins).permute(0, 3, 2, 1)
    power = parts.square().sum(1, keepdim=True) + TINY
    return parts * power ** ((POWER - 1) / 2)


def wave_of(compressed: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `spectrum`, exactly `length` samples: without it the last, uncovered samples would be missing."""
    power = compressed.square().sum(1, keepdim=True) + TINY
    parts = (compressed * power ** ((1 / POWER - 1) / 2)).permute(0, 3, 2, 1).contiguous()
    bins = torch.view_as_complex(parts)
    return torch.istft(bins, N_FFT, HOP, window=_window(bins), length=length)


def magnitude(compressed: torch.Tensor) -> torch.Tensor:
    """(B, 2, T, F) -> (B, 1, F, T), as the discriminator takes it."""
    return (compressed.square().sum(1, keepdim=True) + TINY).sqrt().transpose(2, 3)


@dataclass
class Estimate:
    """What the generator made of a pair, and what it is compared with."""

    spec: torch.Tensor  # (B, 2, T, F)
    wave: torch.Tensor  # (B, L)
    pair: Pair
    clean_spec: torch.Tensor

    def detach(self) -> "Estimate":
        return Estimate(self.spec.detach(), self.wave.detach(), self.pair, self.clean_spec)


def estimate(spec: torch.Tensor, pair: Pair) -> Estimate:
    wave = wave_of(spec, pair.clean.shape[-1])
    assert wave.shape == pair.clean.shape
    return Estimate(spec, wave, pair, spectrum(pair.clean))


def reconstruction(est: Estimate) -> torch.Tensor:
    """(3, B): squared error of the spectrum's parts, of its magnitude, absolute error of the wave; a mean a sound."""
    parts = (est.spec - est.clean_spec).square().mean((2, 3)).sum(1)
    size = (magnitude(est.spec) - magnitude(est.clean_spec)).square().mean((1, 2, 3))
    time = (est.wave - est.pair.clean).abs().mean(1)
    return torch.stack([parts, size, time])


def generator_terms(est: Estimate, discriminator) -> torch.Tensor:
    """(4, B): the reconstruction and how far the discriminator's opinion is from perfect."""
    opinion = discriminator(magnitude(est.clean_spec), magnitude(est.spec))
    return torch.cat([reconstruction(est), (opinion - 1).square()[None]])


def quality(pesq: torch.Tensor) -> torch.Tensor:
    """PESQ 1 to 4.5 as 0 to 1. Identical sounds score 4.64, which would be a label the sigmoid cannot reach."""
    return ((pesq - 1) / 3.5).clamp(0, 1)
