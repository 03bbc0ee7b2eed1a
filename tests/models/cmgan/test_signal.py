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
    gan_ramp = watch.GanRamp(False, 0.8, 0.6, 1)
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


def test_phases_are_compared_without_their_turns_and_a_silent_bin_has_none():
    draw = np.random.default_rng(0)
    phases = draw.uniform(-np.pi, np.pi, (2, 2, 5, 7))  # of both, B T F
    sizes = draw.uniform(0.5, 2, (2, 2, 5, 7))
    spec, target = (
        torch.tensor(np.stack([size * np.cos(phase), size * np.sin(phase)], 1), dtype=torch.float32)
        for size, phase in zip(sizes, phases, strict=True)
    )

    def wrapped(x):
        return np.abs((x + np.pi) % (2 * np.pi) - np.pi).mean((1, 2))

    differences = phases[0] - phases[1]
    expected = wrapped(differences) + wrapped(np.diff(differences, axis=2)) + wrapped(np.diff(differences, axis=1))
    assert signal.phase_distance(spec, target).numpy() == pytest.approx(expected, abs=1e-5)
    assert signal.phase_distance(target, target).abs().max() < 1e-6
    silent = torch.zeros_like(spec).requires_grad_()
    distance = signal.phase_distance(silent, target).sum() + signal.phase_distance(spec, silent).sum()
    distance.backward()
    assert float(distance) == 0 and silent.grad.isfinite().all()


def test_extra_terms_are_zero_for_a_perfect_estimate_and_count_only_with_a_weight(pair):
    config = cmgan.Config(w_phase=0.3, w_consistency=0.1)
    both = cmgan.chosen_terms(config)
    perfect = watch.perfect_terms(*pair, both)
    assert set(perfect) == {"ri", "mag", "time", "phase", "consistency"} and max(perfect.values()) < 1e-4
    assert cmgan.chosen_terms(cmgan.Config()) is cmgan.loss_terms
    normalised = signal.normalise(*pair)
    spec = signal.spectrum(normalised.noisy)
    spec = (spec * torch.rand(spec.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    made = signal.estimate(spec, normalised)
    terms = both(made, lambda clean, other: torch.ones(2))
    again = torch.stft(made.wave, 400, 100, window=torch.hamming_window(400), return_complex=True).transpose(1, 2)
    again = torch.polar(again.abs() ** 0.3, again.angle())
    found = torch.complex(spec[:, 0], spec[:, 1]) - again
    assert torch.allclose(terms["consistency"], found.abs().square().mean((1, 2)), rtol=1e-4)
    assert terms["consistency"].min() > 0.01 and terms["phase"].min() > 0.5
    (terms["phase"] + terms["consistency"]).sum().backward()
    assert spec.grad.isfinite().all()


def test_a_weighted_term_is_part_of_the_loss(pair):
    torch.manual_seed(0)
    model, judge = TSCNet(4).eval(), Discriminator(2).eval()
    batch, gan_ramp = dict(zip(("noisy", "clean"), pair, strict=True)), watch.GanRamp(False, 0.8, 0.6, 1)
    plain, more = (
        cmgan.compute_loss(model, batch, judge, cmgan.Config(**flags), gan_ramp)
        for flags in ({}, {"w_phase": 0.3, "w_consistency": 0.1})
    )
    extra = [more.parts[name][0] for name in ("phase", "consistency")]
    assert min(extra) > 0 and "phase" not in plain.parts
    assert float(more.loss_sum) == pytest.approx(float(plain.loss_sum + sum(extra)), rel=1e-5)


def test_contrast_is_stretched_as_published_at_the_same_power():
    """Against scipy's spectrum and the published factors, bin by bin."""
    wave = speech_like()[:1]
    window = scipy_signal.get_window("hamming", 400)
    frames = scipy_signal.ShortTimeFFT(window, 100, 16000, mfft=400)
    bins = frames.stft(wave[0].double().numpy())
    factors = np.ones(201)
    for first, end, factor in (
        (3, 5, 1.070175439), (5, 8, 1.182456140), (8, 10, 1.287719298), (10, 110, 1.4), (110, 130, 1.322807018),
        (130, 160, 1.238596491), (160, 190, 1.161403509), (190, 201, 1.077192982),
    ):  # fmt: skip
        factors[first:end] = factor
    size = np.expm1(factors[:, None] * np.log1p(np.abs(bins)))
    expected = frames.istft(size * np.exp(1j * np.angle(bins)), k1=wave.shape[1])
    expected *= np.sqrt(np.mean(wave[0].numpy() ** 2) / np.mean(expected**2))
    found = signal.stretch_contrast(wave)[0].numpy()
    inside = slice(800, -800)  # the edges are padded in another way
    error = np.square(found - expected)[inside].mean() / np.square(expected)[inside].mean()
    assert error < 1e-4 and np.square(found).mean() == pytest.approx(np.square(wave[0].numpy()).mean(), rel=1e-4)
    assert np.abs(found - wave[0].numpy()).max() > 0.005
    assert signal.stretch_contrast(torch.zeros(1, 8000)).isfinite().all()
