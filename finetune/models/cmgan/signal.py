"""From waves to CMGAN's compressed spectra and back: what must match the published checkpoint.

B sounds, L samples, F bins (201), T frames (L // 100 + 1).
"""

import functools
from dataclasses import dataclass

import torch

RATE = 16000
N_FFT, HOP = 400, 100
POWER = 0.3  # magnitudes are compressed to |X|^0.3, the phase stays
TINY = 1e-12  # inside roots, whose gradient at 0 is NaN
SILENT = 1e-8  # mean square below which a sound is not normalised: the factor would be infinite


@dataclass
class Normalised:
    """A noisy/clean pair at unit power. Nothing after `normalise` depends on the level of the recording, least of all
    the losses."""

    noisy: torch.Tensor  # (B, L)
    clean: torch.Tensor  # (B, L)
    scale: torch.Tensor  # (B,) factor that both were multiplied with

    @property
    def audible(self) -> torch.Tensor:
        """(B,) 1, or 0 where the noisy sound is silence: nothing to enhance, nothing to learn from."""
        return (self.noisy.square().mean(-1) >= SILENT).float()

    @property
    def model_input(self) -> torch.Tensor:
        """(B, L) what the generator trains on: the noisy sound, or hiss instead of silence.

        Silence is a constant, for which every instance norm multiplies the gradient by 300. Its own loss is masked out,
        but BatchNorm would still pass the gradient of the other sounds through it.
        """
        return torch.where(self.audible[:, None] > 0, self.noisy, _hiss(self.noisy.shape[1], self.noisy.device))


@functools.lru_cache(maxsize=4)
def _hiss(length: int, device: torch.device) -> torch.Tensor:
    """(length,) always the same. Remembered: to copy it to a GPU in every step would make the step wait."""
    return torch.randn(length, generator=torch.Generator().manual_seed(0)).to(device)


def normalise(noisy: torch.Tensor, clean: torch.Tensor) -> Normalised:
    """Both signals (B, L), multiplied with the factor that gives the noisy one unit power."""
    power = noisy.square().mean(-1)
    scale = torch.where(power < SILENT, torch.ones_like(power), power.clamp(min=SILENT).rsqrt())
    return Normalised(noisy * scale[:, None], clean * scale[:, None], scale)


def _window(wave: torch.Tensor) -> torch.Tensor:
    return torch.hamming_window(N_FFT, device=wave.device)


def spectrum(wave: torch.Tensor) -> torch.Tensor:
    """(B, L) -> compressed real and imaginary part (B, 2, T, F)."""
    bins = torch.stft(wave, N_FFT, HOP, window=_window(wave), return_complex=True)
    real_imag = torch.view_as_real(bins).permute(0, 3, 2, 1)
    power = real_imag.square().sum(1, keepdim=True) + TINY
    return real_imag * power ** ((POWER - 1) / 2)


def wave_of(compressed: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `spectrum`: (B, length), the last samples included, which no whole window covers."""
    power = compressed.square().sum(1, keepdim=True) + TINY
    real_imag = (compressed * power ** ((1 / POWER - 1) / 2)).permute(0, 3, 2, 1).contiguous()
    bins = torch.view_as_complex(real_imag)
    if bins.device.type == "cpu":
        return torch.istft(bins, N_FFT, HOP, window=_window(bins), length=length)
    return istft_without_wait(bins, length)


def istft_without_wait(bins: torch.Tensor, length: int) -> torch.Tensor:
    """As torch.istft, which makes the host wait for a GPU's answer whether the windows leave a gap."""
    window = _window(bins)[:, None]
    frames = torch.fft.irfft(bins, N_FFT, dim=1) * window
    overlap = _overlap_add(window.square().expand(N_FFT, frames.shape[2])[None])
    middle = slice(N_FFT // 2, N_FFT // 2 + length)
    return _overlap_add(frames)[:, middle] / overlap[:, middle]


def _overlap_add(frames: torch.Tensor) -> torch.Tensor:
    """(B, N_FFT, T) -> (B, N_FFT + HOP (T - 1))"""
    samples = N_FFT + HOP * (frames.shape[2] - 1)
    return torch.nn.functional.fold(frames, (1, samples), (1, N_FFT), stride=(1, HOP)).flatten(1)


def magnitude(compressed: torch.Tensor) -> torch.Tensor:
    """(B, 2, T, F) -> (B, 1, F, T), as the discriminator takes it."""
    return (compressed.square().sum(1, keepdim=True) + TINY).sqrt().transpose(2, 3)


@dataclass
class Estimate:
    """What the generator made of a pair, and what it is compared with."""

    spec: torch.Tensor  # (B, 2, T, F)
    wave: torch.Tensor  # (B, L)
    normalised: Normalised
    clean_spec: torch.Tensor  # (B, 2, T, F)

    def detach(self) -> "Estimate":
        return Estimate(self.spec.detach(), self.wave.detach(), self.normalised, self.clean_spec)


def estimate(spec: torch.Tensor, normalised: Normalised) -> Estimate:
    """The generator's output (B, 2, T, F), with its wave and its target."""
    wave = wave_of(spec, normalised.clean.shape[-1])
    assert wave.shape == normalised.clean.shape
    return Estimate(spec, wave, normalised, spectrum(normalised.clean))


def quality(pesq: torch.Tensor) -> torch.Tensor:
    """PESQ 1 to 4.5 as 0 to 1. Identical sounds score 4.64, a label that a sigmoid could not reach."""
    return ((pesq - 1) / 3.5).clamp(0, 1)
