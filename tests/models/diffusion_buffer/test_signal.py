"""Spectra, diffusion and losses of the Diffusion Buffer against formulas and numbers from elsewhere."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import UserError
from diffusion_buffer import compute_loss
from helpers.diffusion_buffer_support import batch_of, clips_of, pair
from models.diffusion_buffer import data, signal
from models.diffusion_buffer.data import Clips, cut
from models.diffusion_buffer.network import NCSNpp
from models.diffusion_buffer.signal import Spec

SPEC = Spec(width=8, n_fft=126, hop=64, frames=16, buffer=8)
# sigma at 0.03, 0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 0.999 for k = 2.6, to four places
TIMES = [0.03, 0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 0.999]
GOLDEN = {
    0.08: [0.0490, 0.0892, 0.1402, 0.1929, 0.2064, 0.1773, 0.1404, 0.0231],
    0.52: [0.1248, 0.2275, 0.3576, 0.4917, 0.5261, 0.4519, 0.3579, 0.0589],
}


@pytest.mark.parametrize("c", GOLDEN)
def test_sigma_is_the_golden_table(c):
    spec = dataclasses.replace(SPEC, sde_c=c)
    assert signal.sigma(spec, TIMES) == pytest.approx(GOLDEN[c], abs=1e-4)
    assert signal.g(spec, 0) ** 2 == pytest.approx(c)
    if c == 0.08:
        assert signal.g(spec, [0.03, 0.5, 0.8, 0.999]) == pytest.approx([0.291, 0.456, 0.608, 0.735], abs=1e-3)
        grid = np.linspace(0.01, 0.99, 981)
        values = signal.sigma(spec, grid)
        assert values.max() == pytest.approx(0.2117, abs=1e-4) and grid[values.argmax()] == pytest.approx(
            0.713, abs=2e-3
        )


@pytest.mark.parametrize("changes", [{}, {"sde_c": 0.52, "sde_k": 3.0}])
def test_sigma_is_the_integral_and_where_the_forward_process_ends(changes):
    """The closed form against c (1-t)^2 int k^2s / (1-s)^2 ds, and against Euler steps from 1 towards -1."""
    from scipy.integrate import quad

    spec = dataclasses.replace(SPEC, **changes)
    for t in (0.001, 0.03, 0.25, 0.5, 0.8, 0.999):
        area, _ = quad(lambda s: spec.sde_k ** (2 * s) / (1 - s) ** 2, 0, t, epsabs=0, epsrel=1e-11)
        assert float(signal.sigma(spec, t)) == pytest.approx(math.sqrt(spec.sde_c * area) * (1 - t), rel=1e-6)
    draw, steps, end, x = np.random.default_rng(0), 400, 0.7, np.ones(20000)
    for t in np.arange(steps) * end / steps:
        step = end / steps
        x = x + (-1 - x) / (1 - t) * step + signal.g(spec, t) * math.sqrt(step) * draw.standard_normal(len(x))
    assert x.mean() == pytest.approx(1 - 2 * end, abs=0.02)
    assert x.std() == pytest.approx(float(signal.sigma(spec, end)), rel=0.02)


def test_noise_has_unit_power():
    power = np.square(np.abs(signal.complex_noise(np.random.default_rng(0), 100000))).mean()
    assert power == pytest.approx(1, abs=0.02)


def test_one_second_is_63_frames_and_they_are_those_of_torch():
    spec = Spec()
    assert signal.frame_count(16000, 256) == 63 and spec.bins == 256
    wave = torch.randn(16000)
    bins = torch.stft(wave, 510, 256, window=torch.hann_window(510), pad_mode="constant", return_complex=True)
    expected = 0.15 * bins.abs() ** 0.5 * torch.exp(1j * bins.angle())
    assert bins.shape[1] == 63
    assert torch.allclose(signal.whole_spectrum(wave, spec, 63), expected, atol=1e-5)
    assert torch.allclose(signal.analyse(wave[: 510], spec), signal.whole_spectrum(wave[255:], spec, 1)[:, 0] * 0
                          + signal.compress(torch.fft.rfft(wave[:510] * torch.hann_window(510))))  # fmt: skip
    assert torch.allclose(signal.expand(expected), bins, atol=1e-4)


def test_a_window_is_a_cut_of_the_whole_spectrum_with_silence_before():
    wave = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    whole = signal.whole_spectrum(torch.from_numpy(wave), SPEC, signal.frame_count(2000, SPEC.hop))
    for last in (0, 5, 20, 31):
        found = signal.spectra(torch.from_numpy(cut(wave, last, SPEC))[None], SPEC)[0]
        expected = torch.zeros(SPEC.bins, SPEC.frames) + 0j
        first = last - SPEC.frames + 1
        expected[:, max(0, -first) :] = whole[:, max(0, first) : last + 1]
        before = max(0, -first)
        assert torch.allclose(found[:, before:], expected[:, before:], atol=1e-5)
        assert not found[:, : max(0, before - 1)].any()  # the frame just before the start reaches into the sound


# ---- times and crops -------------------------------------------------------------------------------------------


def test_jittered_times_ascend_one_in_each_cell():
    """Around the times of the stream: a frame is never asked about at a time that its place was not trained at."""
    grid = signal.inference_times(SPEC)
    assert grid[-1] == SPEC.reverse_start
    draws = np.array([signal.training_times(SPEC, 0, 0, i) for i in range(500)])
    assert (np.diff(draws) > 0).all() and (draws[:, 0] == SPEC.t_eps).all() and draws.max() <= SPEC.t_max
    assert (np.abs(draws - grid) <= (grid[1] - grid[0]) / 2 + 1e-9).all()
    assert draws.mean(0)[1:] == pytest.approx(grid[1:], abs=0.01)
    assert len(np.unique(draws[:, 3])) == 500


def clips() -> Clips:
    return clips_of(*pair(1.0), SPEC)


def test_a_crop_depends_on_its_key_alone():
    one, two = clips(), clips()
    batch, again = one.batch([(3, 0), (4, 0)]), two.batch([(4, 0)])
    for name in ("t", "sigma", "z", "noisy", "clean"):
        assert torch.equal(batch[name][1], again[name][0])
        assert not torch.equal(batch[name][0], batch[name][1])


def test_the_silence_before_a_clip_is_not_counted_as_heard():
    found, silent = clips(), 0
    for epoch in range(20):
        wave = found.batch([(epoch, 0)])["noisy"][0].numpy()
        start = int(np.flatnonzero(wave)[0]) if wave[0] == 0 else 0
        before = sum(k * SPEC.hop + SPEC.n_fft // 2 < start for k in range(SPEC.frames))
        assert found.real_frames(epoch, 0) == SPEC.frames - before
        silent += before
    assert silent > 0


def test_the_gain_is_the_same_on_both_sides_and_in_its_range(monkeypatch):
    batches = {}
    for decibels in (0.0, 6.0):
        monkeypatch.setattr(data, "GAINS_DB", (decibels, decibels))
        batches[decibels] = clips_of(*pair(1.0), SPEC, gains=True).batch([(0, 0)])
    for side in ("noisy", "clean"):
        assert torch.allclose(batches[6.0][side], batches[0.0][side] * 10 ** (6 / 20), rtol=1e-5)


# ---- levels ---------------------------------------------------------------------------------------------------


TRACKED = dataclasses.replace(SPEC, level="track")


def test_a_tracked_level_is_the_mean_of_what_was_heard_and_pauses_do_not_count():
    level, factors = signal.LoudnessTracker(TRACKED), []
    draw = np.random.default_rng(0)
    loud, soft = ([torch.from_numpy(draw.standard_normal(126).astype(np.float32)) * r for _ in range(2000)]
                  for r in (0.2, 0.02))  # fmt: skip
    for sound in [*[torch.zeros(126)] * 3, *loud, *[torch.zeros(126)] * 500, *soft]:
        factors.append(level.push(signal.analyse(sound, TRACKED)))
    assert factors[:3] == [1.0] * 3  # nothing heard yet
    assert factors[2002] == pytest.approx((0.05 / 0.2) ** 0.5, rel=0.05) and factors[2502] == factors[2002]
    assert factors[2502] < factors[2600] < factors[2900] < factors[-1]  # it forgets, over seconds
    weights = math.exp(-64 / 16000 / 2.0) ** np.arange(4000)[::-1]
    power = (weights * np.repeat([0.04, 0.0004], 2000)).sum() / weights.sum()
    assert factors[-1] == pytest.approx((0.05 / math.sqrt(power)) ** 0.5, rel=0.05)


def test_training_and_stream_give_a_frame_the_same_level():
    noisy, clean = pair(1.0)
    found = clips_of(noisy, clean, TRACKED)
    network, level = Seen(lambda x, y: x), signal.LoudnessTracker(TRACKED)
    wave = (np.clip(noisy, -1, 1) * 32767).astype(np.int16).astype(np.float32) / 32768
    whole = signal.whole_spectrum(torch.from_numpy(wave), TRACKED, 251)
    heard = [level.push(frame) for frame in whole.T]
    scales = [np.array(([1.0] * 16 + heard[: last + 1])[-16:]) for last in range(251)]
    batch = found.batch([(epoch, 0) for epoch in range(6)]) | {"autocast": False}
    for scale in batch["loudness"].numpy():
        assert min(np.abs(scale - row).max() for row in scales) < 1e-5
    compute_loss(network, batch, TRACKED)
    _, spectrum = spectra_of(batch)
    assert torch.allclose(network.y, spectrum * batch["loudness"][:, None], atol=1e-5)


@pytest.mark.parametrize("gain", [1.0, 0.01, 1e-4])  # with less gain more frames are pauses, in the end all of them
def test_levels_of_all_frames_at_once_are_those_of_the_tracker_frame_by_frame(gain):
    noisy = torch.from_numpy(pair(1.0)[0] * np.repeat([1, 0.003, 0, 0.3], 4000).astype(np.float32))
    level = signal.LoudnessTracker(TRACKED)
    expected = [level.push(frame) for frame in signal.whole_spectrum(noisy * gain, TRACKED, 251).T]
    found = signal.loudness_factors(signal.frame_powers(noisy, 251, TRACKED) * gain**2, TRACKED)
    assert found == pytest.approx(expected, rel=1e-5)
    assert (len(set(expected)) == 1) == (gain == 1e-4)


def test_a_crop_s_level_has_its_gain_and_the_powers_of_a_clip_are_computed_once(monkeypatch):
    computed, powers = [], signal.frame_powers
    monkeypatch.setattr(signal, "frame_powers", lambda *a: computed.append(1) or powers(*a))
    noisy, clean = pair(1.0)
    training_set = clips_of(noisy, clean, TRACKED, gains=True)
    monkeypatch.setattr(data, "GAINS_DB", (-50.0, -20.0))
    wave = torch.from_numpy((np.clip(noisy, -1, 1) * 32767).astype(np.int16).astype(np.float32) / 32768)
    for epoch in range(4):
        key = (0, epoch, "clip")
        gain, last = 10 ** (training_set.gain(key) / 20), training_set.last_frame(0, key)
        level = signal.LoudnessTracker(TRACKED)
        heard = [level.push(frame) for frame in signal.whole_spectrum(wave * gain, TRACKED, last + 1).T]
        found = training_set.batch([(epoch, 0)])["loudness"][0]
        assert found.numpy() == pytest.approx(([1.0] * 16 + heard)[-16:], rel=1e-5)
    assert computed == [1]


# ---- losses ----------------------------------------------------------------------------------------------------


class Seen(torch.nn.Module):
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def embed(self, t):
        self.t = t
        return []

    def forward(self, x, y, times, scale):
        self.x, self.y, self.scale = x, y, scale
        return self.answer(x, y)


def made_batch(count=3):
    return batch_of(SPEC, count)


def spectra_of(batch):
    window = torch.hann_window(SPEC.n_fft)
    found = []
    for side in ("clean", "noisy"):
        bins = torch.stft(batch[side], SPEC.n_fft, SPEC.hop, window=window, center=False, return_complex=True)
        found.append(0.15 * bins.abs() ** 0.5 * torch.exp(1j * bins.angle()))
    return found


def test_the_network_is_shown_the_buffer_of_the_paper():
    batch, network = made_batch(), Seen(lambda x, y: x)
    compute_loss(network, batch, SPEC)
    clean, noisy = spectra_of(batch)
    t = batch["t"][:, None]
    expected = clean.clone()
    expected[..., -8:] = (1 - t) * clean[..., -8:] + t * noisy[..., -8:] + batch["sigma"][:, None] * batch["z"]
    assert torch.allclose(network.x, expected, atol=1e-5) and torch.allclose(network.y, noisy, atol=1e-5)
    assert not network.t[:, :8].any() and torch.equal(network.t[:, 8:], batch["t"])
    labelled = dataclasses.replace(SPEC, context_time=1.0, output_scale="time")
    compute_loss(network, batch, labelled)
    assert (network.t[:, :8] == 1).all() and torch.equal(network.scale[:, 8:], batch["t"])


def test_the_losses_are_zero_for_the_right_answer_and_known_for_a_wrong_one():
    batch = made_batch()
    clean, _ = spectra_of(batch)
    z = torch.cat([torch.zeros(3, SPEC.bins, 8), batch["z"]], dim=-1)
    std = torch.cat([torch.ones(3, 8), batch["sigma"]], dim=1)[:, None]
    bins = 3 * SPEC.bins * 8
    for loss, right in (("dp", clean), ("dsm", -z / std), ("dsm_unweighted", -z / std)):
        spec = dataclasses.replace(SPEC, loss=loss)
        total = compute_loss(Seen(lambda x, y, right=right: right), batch, spec).loss_sum
        assert float(total) / bins < 1e-9
        total, parts, watch = compute_loss(Seen(lambda x, y, right=right: right + 0.1), batch, spec)
        assert list(parts) == ["t1", "t2", "t3", "t4"]
        stats = torch.stack(list(parts.values()), dim=1)
        off = {"dp": 0.01, "dsm": 0.01 * float(batch["sigma"].square().mean()), "dsm_unweighted": 0.01}[loss]
        assert float(total) / bins == pytest.approx(off, rel=1e-3)
        assert float(stats[0].sum()) == pytest.approx(float(total), rel=1e-5)
        assert stats[1].tolist() == [bins / 4] * 4
        assert float((stats[0] / stats[1]).mean()) == pytest.approx(float(total) / bins, rel=1e-5)
        assert all(math.isfinite(float(value)) for value in watch.values())


@pytest.mark.parametrize("scale", ["sigma", "none"])
def test_an_untrained_network_has_a_dsm_loss_of_one(scale):
    spec = dataclasses.replace(SPEC, loss="dsm", output_scale=scale)
    torch.manual_seed(1)
    stats = torch.stack(list(compute_loss(NCSNpp(8), made_batch(8), spec).parts.values()), dim=1)
    assert float(stats[0].sum() / stats[1].sum()) == pytest.approx(1.0, abs=0.1)


# ---- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t_eps": 0.0}, "0 < t_eps < t_max < 1"),
        ({"t_max": 1.0}, "0 < t_eps < t_max < 1"),
        ({"t_eps": 0.9, "t_max": 0.5}, "0 < t_eps < t_max < 1"),
        ({"t_eps": 1e-6}, "raise t_eps"),
        ({"buffer": 200}, "buffer 200 does not fit into 128 frames"),
        ({"n_fft": 500}, "n_fft 500 gives 251 bins"),
        ({"hop": 400}, "hop 400 is not between"),
        ({"width": 10}, "width 10 does not fit"),
        ({"width": 48}, "width 48 does not fit"),  # 144 channels in 32 groups
        ({"width": 0}, "width 0 does not fit"),
        ({"sde_k": 1.0}, "sde_k 1 above 1"),
        ({"network": "unet"}, "network unet is not one of ncsnpp"),
        ({"frames": "many"}, "frames 'many' is not a whole number"),
        ({"bufer": 9}, "bufer is no setting"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        signal.build_spec(changes)


def test_what_is_not_given_is_as_published_and_frames_are_rounded_up():
    assert signal.build_spec({}) == Spec()
    assert signal.build_spec({"frames": 63}).frames == 64
    causal = signal.build_spec({"frames": 63, "network": "block_causal"})
    assert (causal.frames, causal.width, causal.phase) == (63, 128, "middle")
    assert signal.build_spec({"loss": "dsm"}).output_scale == "sigma"
    assert all(signal.build_spec(dataclasses.asdict(spec)) == spec for spec in signal.SPECS.values())


@pytest.mark.parametrize(
    ("samples", "message"),
    [(100, "100 samples, less than half"), (255, "less than half a window"), (1000, "4 frames of 256, .* has 20")],
)
def test_clips_without_a_frame_or_shorter_than_the_buffer_are_refused(samples, message):
    pairs = SimpleNamespace(samples=np.array([5000, samples]), id=lambda i: f"clip{i}", folder="pairs")
    with pytest.raises(UserError, match=f"clip 'clip1' of pairs has {samples} samples.*"[:-2]) as error:
        Clips(pairs, np.array([0, 1]), Spec(), seed=0)
    assert error.match(message)
