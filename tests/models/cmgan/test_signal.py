"""Spectra and losses of CMGAN against plain formulas, and the wrong loss that the start-up check refuses."""

import numpy as np
import pytest
import torch
from scipy import signal as scipy_signal

import cmgan
from common.errors import UserError
from models.cmgan import signal, watch
from models.cmgan.network import Discriminator, TSCNet


def speech_like(seconds=1.0, level=0.05, seed=0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    wave = torch.randn(2, int(16000 * seconds), generator=draw)
    return level * wave * (1 + torch.sin(torch.linspace(0, 20, wave.shape[1])))


def stacked_terms(estimate, judge) -> torch.Tensor:
    return torch.stack(list(cmgan.loss_terms(estimate, judge).values()))


@pytest.fixture
def pair():
    clean = speech_like()
    return clean + speech_like(seed=1, level=0.01), clean


def test_the_spectrum_is_the_plain_one_compressed():
    wave = speech_like()[0]
    _, _, bins = scipy_signal.stft(
        np.pad(wave.double().numpy(), 200, mode="reflect"), window=scipy_signal.get_window("hamming", 400),
        nperseg=400, noverlap=300, boundary=None, padded=False, scaling="spectrum",
    )  # fmt: skip
    bins = bins * scipy_signal.get_window("hamming", 400).sum()
    expected = np.abs(bins) ** 0.3 * np.exp(1j * np.angle(bins))
    found = signal.spectrum(wave[None])[0]
    assert found.shape == (2, 161, 201)
    assert np.allclose(found[0].numpy().T, expected.real, atol=2e-3)
    assert np.allclose(found[1].numpy().T, expected.imag, atol=2e-3)
    size = signal.magnitude(signal.spectrum(wave[None]))[0, 0]
    assert size.shape == (201, 161) and np.allclose(size.numpy(), np.abs(expected), atol=1e-3)


@pytest.mark.parametrize("length", [31_999, 32_000, 32_001, 32_050, 32_099, 35_184])
def test_every_length_comes_back_whole(length):
    wave = torch.randn(1, length, generator=torch.Generator().manual_seed(length))
    back = signal.wave_of(signal.spectrum(wave), length)
    assert back.shape == wave.shape and float((back - wave).abs().max()) < 1e-4


@pytest.mark.parametrize("length", [400, 8000, 8050])
def test_waves_and_their_gradients_are_those_of_istft(length):
    draw = torch.Generator().manual_seed(length)
    spec = signal.spectrum(torch.randn(2, length, generator=draw))
    spec = (spec + 0.3 * torch.randn(spec.shape, generator=draw)).requires_grad_()
    power = spec.square().sum(1) ** (1 / 0.3)
    bins = torch.polar(power.sqrt(), torch.atan2(spec[:, 1], spec[:, 0])).transpose(1, 2)
    expected = torch.istft(bins, 400, 100, window=torch.hamming_window(400), length=length)
    weights = torch.randn(2, length, generator=draw)
    slope = torch.autograd.grad(expected, spec, weights, retain_graph=True)[0]
    for found in (signal.wave_of(spec, length), signal.istft_without_wait(bins, length)):  # on a CPU, on a GPU
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        found_slope = torch.autograd.grad(found, spec, weights, retain_graph=True)[0]
        assert torch.allclose(found_slope, slope, rtol=1e-4, atol=1e-5)


def test_silence_is_replaced_by_the_same_hiss_in_every_step():
    silence, sound = torch.zeros(8000), torch.randn(8000)
    shown = [signal.normalise(torch.stack([silence, sound]), torch.zeros(2, 8000)).model_input for _ in range(2)]
    assert torch.equal(shown[0][0], torch.randn(8000, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(shown[0][1], sound / sound.square().mean().sqrt(), rtol=1e-5)
    assert torch.equal(*shown)
    assert signal._hiss(8000, torch.device("cpu")) is signal._hiss(8000, torch.device("cpu"))  # drawn and copied once


def test_losses_are_the_published_formulas_on_the_normalised_pair(pair):
    noisy, clean = pair
    normal = signal.normalise(noisy, clean)
    factor = np.sqrt(noisy.shape[1] / (noisy.numpy() ** 2).sum(1))
    assert np.allclose(normal.scale.numpy(), factor, rtol=1e-5)
    assert np.allclose(normal.clean.numpy(), clean.numpy() * factor[:, None], rtol=1e-4)
    torch.manual_seed(0)
    judge = Discriminator(4).eval()
    spec = signal.spectrum(normal.noisy)
    terms = stacked_terms(signal.estimate(spec, normal), judge)
    target = signal.spectrum(normal.clean)
    sizes = [s.square().sum(1).sqrt() for s in (spec, target)]
    opinion = judge(sizes[1].transpose(1, 2)[:, None], sizes[0].transpose(1, 2)[:, None])
    for i in range(2):
        parts = sum(float(((spec[i, side] - target[i, side]) ** 2).mean()) for side in (0, 1))
        expected = [
            parts,
            float(((sizes[0][i] - sizes[1][i]) ** 2).mean()),
            float((normal.noisy[i] - normal.clean[i]).abs().mean()),
            float((opinion[i] - 1) ** 2),
        ]
        assert terms[:, i].tolist() == pytest.approx(expected, rel=1e-3)


def test_a_perfect_estimate_scores_zero_in_every_term(pair):
    terms = watch.perfect_terms(*pair, cmgan.loss_terms)
    assert terms["ri"] == terms["mag"] == 0.0 and terms["time"] < 1e-6
    watch.require_perfect(*pair, cmgan.loss_terms)


def test_mutation_the_scale_bug_is_refused(pair):
    """The public code compares the normalised estimate with the recording's own level."""

    def wrong(est, judge):
        own_level = est.normalised.clean / est.normalised.scale[:, None]
        return cmgan.loss_terms(est, judge) | {"time": (est.wave - own_level).abs().mean(1)}

    normal = signal.normalise(*pair)
    expected = float((normal.clean - pair[1]).abs().mean())
    assert expected > 0.3
    with pytest.raises(UserError, match=f"does not score 0 \\(time {expected:.4f}\\)"):
        watch.require_perfect(*pair, wrong)


def test_silence_is_finite_and_so_are_its_gradients():
    zero = torch.zeros(1, 8000)
    normal = signal.normalise(zero, zero)
    assert float(normal.scale) == 1.0
    spec = torch.zeros_like(signal.spectrum(normal.noisy)).requires_grad_(True)
    torch.manual_seed(0)
    terms = stacked_terms(signal.estimate(spec, normal), Discriminator(4))
    terms.sum().backward()
    assert terms.isfinite().all() and spec.grad.isfinite().all()


def test_silence_teaches_the_generator_nothing_and_leaves_its_neighbours_gradient_in_bounds(pair):
    torch.manual_seed(0)
    model, judge = TSCNet(8, dropout=0.0), Discriminator(4)
    gan_ramp = watch.GanRamp(False)
    noisy, clean = (side[:1, :8000] for side in pair)
    silence = torch.zeros(1, 8000)

    def gradient(noisy, clean):
        model.zero_grad()
        loss, parts, _ = cmgan.compute_loss(model, {"noisy": noisy, "clean": clean}, judge, cmgan.Config(), gan_ramp)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        return float(loss), float(norm), [float(count) for _, count in parts.values()]

    assert gradient(silence, silence) == (0.0, 0.0, [1.0] * 4)
    loss, norm, _ = gradient(noisy, clean)
    assert loss > 0.1 and 0.01 < norm < 100
    both = gradient(torch.cat([noisy, silence]), torch.cat([clean, silence]))
    assert both[2] == [2.0] * 4 and both[0] == pytest.approx(loss, rel=0.1) and 0.01 < both[1] < 5 * norm
    assert signal.normalise(noisy, clean).audible.tolist() == [1.0]


def test_labels_are_clamped_to_what_a_sigmoid_can_say():
    assert signal.quality(torch.tensor([1.0, 2.75, 4.5, 4.644, 0.9])).tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


# ---- what higher-scoring enhancers add ---------------------------------------------------------------------------
