"""The stream: right with an oracle, wrong with its sign turned, indifferent to chunks, causal, as late as it says."""

import dataclasses
import json

import numpy as np
import pytest
import soundfile
import torch

from common import speech_metrics as speech
from common.errors import UserError
from helpers.diffusion_buffer_support import (
    Oracle,
    PassThrough,
    measure_latency,
    overfit,
    pair,
    randomised,
    speechlike,
)
from models.diffusion_buffer import enhance as enhance_module
from models.diffusion_buffer import signal
from models.diffusion_buffer.enhance import Buffer, Stream, Traced, enhance, enhance_at, enhance_folder, enhance_run
from models.diffusion_buffer.network import NCSNpp, build_network
from models.diffusion_buffer.signal import Spec
from models.diffusion_buffer.weights import load_network, write_export

PAPER = Spec()
SMALL = Spec(width=8, n_fft=126, hop=64, frames=16, buffer=8)


def si_sdr(clean, wave) -> float:
    return speech.si_sdr(clean.astype(np.float64), wave.astype(np.float64))


@pytest.mark.parametrize("size", [10, 20, 60])
def test_the_exact_score_gives_clean_speech(size):
    noisy, clean = pair(2.0)
    spec = dataclasses.replace(PAPER, buffer=size, loss="dsm")
    made = enhance(Oracle(noisy, clean, spec), noisy, spec)
    assert si_sdr(clean, noisy) < 6 and si_sdr(clean, made) > 35
    assert np.abs(made).max() < 1.2 * np.abs(clean).max()


def test_the_exact_score_also_satisfies_pesq():
    noisy, clean = pair(2.0)
    spec = dataclasses.replace(PAPER, loss="dsm")
    scores = [speech.pesq_wb(clean, wave)[0] for wave in (noisy, enhance(Oracle(noisy, clean, spec), noisy, spec))]
    assert scores[0] < 3 and scores[1] > 4.3  # real speech, which has no digital silence, scores above 4.5


def test_a_turned_score_ruins_it():
    noisy, clean = pair(2.0)
    spec = dataclasses.replace(PAPER, loss="dsm")
    assert si_sdr(clean, enhance(Oracle(noisy, clean, spec, sign=-1), noisy, spec)) < 0


@pytest.mark.parametrize("delay", [1, 5, 20])
def test_clean_frames_come_out_at_every_delay(delay):
    noisy, clean = pair(1.0)
    assert si_sdr(clean, enhance(Oracle(noisy, clean, PAPER), noisy, PAPER, delay=delay)) > 60


def test_no_noise_at_temperature_zero():
    noisy, clean = pair(1.0)
    spec = dataclasses.replace(PAPER, loss="dsm")
    assert si_sdr(clean, enhance(Oracle(noisy, clean, spec), noisy, spec, temperature=0.0)) > 60


OTHERS = [("ncsnpp", "dsm"), ("block_causal", "dp"), ("block_causal", "dsm")]


@pytest.mark.parametrize(
    ("network", "loss"), [("ncsnpp", "dp"), *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_output_does_not_depend_on_the_chunks(network, loss):
    torch.manual_seed(0)
    net = randomised(build_network(network, 8, 16)).eval()
    spec = dataclasses.replace(SMALL, network=network, block=16, loss=loss)
    noisy, _ = pair(0.15)
    outputs = []
    for size in (1, 160, 1000, len(noisy)):
        stream = Stream(net, spec)
        parts = [stream.push(noisy[i : i + size]) for i in range(0, len(noisy), size)]
        outputs.append(np.concatenate([*parts, stream.flush()]))
    assert len(outputs[0]) == len(noisy) and np.abs(outputs[0]).max() > 0
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def test_one_pass_gives_what_a_stream_of_each_delay_gives():
    torch.manual_seed(0)
    net, (noisy, _) = randomised(NCSNpp(8)).eval(), pair(0.2)
    for delay, wave in zip((1, 3, 8), enhance_at(net, [noisy], SMALL, [1, 3, 8], seed=5)[0], strict=True):
        assert np.array_equal(wave, enhance(net, noisy, SMALL, delay=delay, seed=5))


class Blend:
    """A network whose answer for a sound has the same bits whatever other sounds are in the batch."""

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        return 0.6 * y + 0.3 * x.roll(1, -1)


@pytest.mark.parametrize("change", [{}, {"loss": "dsm"}, {"level": "track"}, {"phase": "middle", "hop": 40}])
def test_recordings_enhanced_together_give_what_each_gives_alone(change):
    spec, noisy = dataclasses.replace(SMALL, **change), pair(0.3)[0]
    waves = [noisy[:1500], noisy, noisy[2000:2001], 0.2 * noisy[700:4000]]
    delays = [1, 3, 8] if spec.predicts_clean else [8]
    for wave, found in zip(waves, enhance_at(Blend(), waves, spec, delays, seed=5), strict=True):
        for delay, made in zip(delays, found, strict=True):
            alone = enhance(Blend(), wave, spec, delay=delay, seed=5)
            # A tracked level comes from the spectrum of the whole file, whose last digits differ from a frame's.
            assert made.shape == wave.shape
            assert np.array_equal(made, alone) if spec.level == "none" else np.allclose(made, alone, atol=1e-6)


def test_a_network_enhances_recordings_together_as_alone():
    torch.manual_seed(0)
    net, noisy = randomised(build_network("block_causal", 8, 16)).eval(), pair(0.2)[0]
    waves, spec = [noisy[:2000], noisy], dataclasses.replace(SMALL, network="block_causal", block=16)
    for wave, found in zip(waves, enhance_at(net, waves, spec, [1, 8]), strict=True):
        for delay, made in zip((1, 8), found, strict=True):
            alone = enhance(net, wave, spec, delay=delay)
            assert np.abs(made - alone).max() < 1e-4 * np.abs(alone).max()


def test_noise_drawn_ahead_is_that_of_its_frame(monkeypatch):
    noisy = pair(0.1)[0]
    one_by_one = enhance(Blend(), noisy, SMALL, delay=2, seed=3)
    assert not np.array_equal(one_by_one, enhance(Blend(), noisy, SMALL, delay=2, seed=4))
    monkeypatch.setattr(enhance_module, "NOISE_ON_CPU", 7)
    assert np.array_equal(one_by_one, enhance(Blend(), noisy, SMALL, delay=2, seed=3))


@pytest.mark.parametrize("network", ["ncsnpp", pytest.param("block_causal", marks=pytest.mark.long)])
def test_a_traced_network_streams_the_same_bits(network):
    torch.manual_seed(0)
    spec = dataclasses.replace(SMALL, network=network, block=16)
    net, (noisy, _) = randomised(build_network(network, 8, 16)).eval(), pair(0.2)
    assert np.array_equal(enhance(Traced(net, spec), noisy, spec, delay=3), enhance(net, noisy, spec, delay=3))


def test_a_tracked_level_makes_the_stream_indifferent_to_how_loud_it_is():
    torch.manual_seed(0)
    net, (noisy, _) = randomised(NCSNpp(8)).eval(), pair(0.3)
    for level, same in (("track", True), ("none", False)):
        spec = dataclasses.replace(SMALL, level=level)
        soft, loud = (enhance(net, noisy * gain, spec) for gain in (1, 4))  # a power of two: the same digits
        assert (np.abs(loud - 4 * soft).max() < 1e-4 * np.abs(soft).max()) == same
    made = enhance(PassThrough(), noisy, dataclasses.replace(SMALL, level="track"))
    assert np.abs(made - noisy).max() < 1e-5  # what went in comes out at its own level


# ---- the official stream ---------------------------------------------------------------------------------------


def official_loop(network, noisy_ft, spec):
    """The clean frames of a spectrum (F, T), by the formulas of the two papers and without noise; written out.

    Until B frames have come, every frame but these is empty. With DP all K frames are estimated again each time."""
    noisy_ft = torch.nn.functional.pad(noisy_ft, (spec.frames - 1, spec.buffer))
    t = torch.cat([torch.zeros(spec.frames - spec.buffer), torch.linspace(spec.t_eps, spec.reverse_start, spec.buffer)])
    t_before = torch.cat([torch.zeros(1), t[:-1]])
    inside = torch.arange(spec.frames) >= spec.frames - spec.buffer
    shown_times = torch.where(inside, t, torch.tensor(spec.context_time))
    scale = torch.where(inside, t, torch.ones(())) if spec.output_scale == "time" else torch.ones(spec.frames)
    times, x, clean = network.embed(shown_times[None]), torch.zeros(spec.bins, spec.frames) + 0j, []
    for n in range(noisy_ft.shape[1] - spec.frames + 1):
        y = noisy_ft[:, n : n + spec.frames]
        x = torch.cat([x[:, 1:], y[:, -1:]], dim=1)
        if n < spec.buffer:
            x = torch.where(torch.arange(spec.frames) >= spec.frames - 1 - n, x, 0)
        answer = network(x[None], y[None], times, scale[None])[0]
        if spec.loss == "dp":
            x = (1 - t_before) * answer + t_before * y
        else:
            g_squared = spec.sde_c * spec.sde_k ** (2 * t)
            moved = x - ((y - x) / (1 - t) - g_squared * answer) * (t - t_before)
            x = torch.where(inside, moved, x)
        if n >= spec.buffer - 1:
            clean.append(x[:, -spec.buffer])
    return torch.stack(clean, dim=1)


@pytest.mark.parametrize("network", ["ncsnpp", pytest.param("block_causal", marks=pytest.mark.long)])
@pytest.mark.parametrize("change", [{"loss": "dp"}, {"loss": "dsm", "output_scale": "time", "context_time": 1.0}])
@torch.no_grad()
def test_the_official_stream_is_the_official_loop(network, change):
    torch.manual_seed(0)
    net = randomised(build_network(network, 8, 16)).eval()
    spec = dataclasses.replace(SMALL, network=network, block=16, stream="official", **change)
    frames = 0.1 * torch.randn(SMALL.bins, 30, dtype=torch.complex64)
    expected = official_loop(net, frames, spec)
    found = {}
    for stream in ("official", "own"):
        buffer = Buffer(net, dataclasses.replace(spec, stream=stream), temperature=0.0)
        padded = torch.cat([frames, torch.zeros(SMALL.bins, SMALL.buffer)], dim=1)
        outs = [buffer.push(frame[None])[0, :, 0] for frame in padded.T]
        found[stream] = torch.stack(outs[SMALL.buffer - 1 :], dim=1)
    size = float(expected.abs().max())
    assert 0.01 < size < 100 and found["official"].shape == expected.shape
    assert float((found["official"] - expected).abs().max()) < 1e-6 * max(1.0, size)
    assert float((found["own"] - expected).abs().max()) > 1e-3 * size  # they differ


def test_places_without_a_frame_hold_fresh_noise_of_their_time_in_the_official_stream():
    network, spec = Watching(), dataclasses.replace(SMALL, stream="official")
    buffer = Buffer(network, spec)
    for _ in range(12):
        buffer.push(torch.randn(1, SMALL.bins) + 0j)
    sigmas = signal.sigma(spec, signal.inference_times(spec))
    for n in range(7):
        empty = network.shown[n][:, 8 : 15 - n].abs().square().mean(0).sqrt().numpy()
        assert not network.shown[n][:, :8].any() and empty == pytest.approx(sigmas[: 7 - n], rel=0.4)
    assert not torch.equal(network.shown[0][:, 8], network.shown[1][:, 8])
    assert torch.equal(network.shown[11][:, :8], network.said[10][0, :, 1:9])  # the context is estimated again


class Watching:
    """Says something of its own, and remembers what it was shown."""

    def __init__(self):
        self.shown, self.conditions, self.said = [], [], []

    def embed(self, t):
        return []

    def __call__(self, x, y, times, scale):
        self.shown.append(x[0].clone())
        self.conditions.append(y[0].clone())
        self.said.append(torch.randn_like(x))
        return self.said[-1]


def test_the_context_is_what_was_given_out():
    network = Watching()
    buffer = Buffer(network, SMALL)
    outs = [buffer.push(torch.randn(1, SMALL.bins) + 0j)[0] for _ in range(20)]
    context = network.shown[19][:, :8]  # 8 of context, 8 in the buffer
    assert torch.equal(context[:, -1], outs[18][:, 0])  # the newest of the context has just left the buffer
    assert torch.equal(context, torch.stack([out[:, 0] for out in outs[11:19]], dim=1))


def test_the_noisy_frames_move_with_the_buffer_also_those_of_the_context():
    """A network that ignores them, or asks only for what it is shown, would not notice."""
    network, (noisy, _) = Watching(), pair(0.2)
    enhance(network, noisy, SMALL)
    frames = signal.whole_spectrum(torch.from_numpy(noisy), SMALL, len(network.conditions))
    frames = torch.cat([torch.zeros(SMALL.bins, SMALL.frames - 1), frames], dim=1)
    for n, shown in enumerate(network.conditions):
        assert torch.allclose(shown, frames[:, n : n + SMALL.frames], atol=1e-6), n


class Stuck(Buffer):
    """A buffer whose noisy frames stay where they are, except the newest."""

    def push(self, frame):
        self.y = self.y.roll(1, dims=-1)  # against the move to the left that follows
        return super().push(frame)


@pytest.mark.parametrize("loss", ["dp", "dsm"])
def test_the_oracle_hears_noisy_frames_that_do_not_move(loss, monkeypatch):
    noisy, clean = pair(1.0)
    spec = dataclasses.replace(PAPER, loss=loss)
    assert si_sdr(clean, enhance(Oracle(noisy, clean, spec), noisy, spec)) > 35
    monkeypatch.setattr(enhance_module, "Buffer", Stuck)
    assert si_sdr(clean, enhance(Oracle(noisy, clean, spec), noisy, spec)) < 15


@pytest.mark.parametrize("delay", [1, 2, 5, 20])
def test_an_impulse_takes_as_long_as_is_printed(delay):
    assert PAPER.latency(delay) == 510 + 256 * (delay - 1)
    assert measure_latency(PAPER, delay) == PAPER.latency(delay)


def test_no_sample_takes_longer_than_is_printed():
    stream, given, worst = Stream(PassThrough(), SMALL, 3), 0, 0
    for i in range(2000):
        made = stream.push(np.zeros(1))
        if len(made):
            worst = max(worst, i + 1 - given)
        given += len(made)
    assert worst == SMALL.latency(3)


def test_nothing_given_out_depends_on_what_comes_later():
    for loss in ("dp", "dsm"):
        torch.manual_seed(0)
        spec = dataclasses.replace(SMALL, loss=loss)
        frames = torch.randn(SMALL.bins, 20, dtype=torch.complex64, requires_grad=True)
        buffer, outs = Buffer(randomised(NCSNpp(8)), spec), []
        for i in range(20):
            outs.append(buffer.push(frames[None, :, i])[..., 0])
        (slope,) = torch.autograd.grad(outs[12].abs().square().sum(), frames)
        seen = (slope.abs().sum(0) > 0).tolist()
        assert seen[5] and seen[12] and not any(seen[13:])


@pytest.mark.parametrize("length", [15999, 16000, 16001, 16255, 16256, 16257, 1, 200])
def test_as_many_samples_come_out_as_went_in(length):
    wave = speechlike(1.1)[:length]
    made = enhance(PassThrough(), wave, PAPER)
    assert len(made) == length and np.abs(made - wave).max() < 1e-5


def test_the_last_frames_are_denoised_too():
    noisy, clean = pair(1.0)
    made = enhance(Oracle(noisy, clean, PAPER), noisy, PAPER)
    assert si_sdr(clean[-2000:], made[-2000:]) > 60


def test_the_work_a_frame_does_not_grow_with_the_clip():
    calls = []

    class Counting(PassThrough):
        def __call__(self, x, y, times, scale):
            calls.append(x.shape)
            return y

    for seconds in (1, 4):
        calls.clear()
        stream = Stream(Counting(), SMALL, delay=1)
        stream.push(np.zeros(seconds * 16000, np.float32))
        assert set(calls) == {(1, SMALL.bins, SMALL.frames)}
        assert len(calls) == (seconds * 16000 + 63 - 126) // 64 + 1
        assert len(stream.waiting) < 126 and stream.buffer.x.shape == (1, 64, 16)


def test_impossible_delays_are_refused():
    with pytest.raises(UserError, match="--delay 9 is more than the buffer's 8"):
        Stream(PassThrough(), SMALL, delay=9)
    with pytest.raises(UserError, match="loss dsm has its only clean frame at --delay 8"):
        Stream(PassThrough(), dataclasses.replace(SMALL, loss="dsm"), delay=2)


@pytest.mark.parametrize(("steps", "decibels"), [(70, 4), pytest.param(150, 8, marks=pytest.mark.long)])
def test_one_clip_by_heart_gains_decibels_when_streamed(steps, decibels):
    """DP learned by a narrow network."""
    spec = Spec(width=8, n_fft=510, hop=256, frames=16, buffer=8, t_max=0.8)
    noisy, clean = pair(1.0, 0.0)
    network, losses = overfit(spec, noisy, clean, steps=steps)
    made = enhance(network.eval(), noisy, spec)
    assert steps < 150 or losses[-1] < losses[0] / 3
    assert si_sdr(clean, made) - si_sdr(clean, noisy) > decibels


@pytest.mark.long
def test_block_causal_learns_where_neighbouring_bins_agree():
    """Its low-pass over the bins leaves hardly any speech whose phase counts from the window's start."""
    losses = {}
    for phase in ("start", "middle"):
        spec = Spec(network="block_causal", block=16, width=8, frames=16, buffer=8, t_max=0.8, phase=phase)
        losses[phase] = np.mean(overfit(spec, *pair(1.0, 0.0), steps=70, lr=3e-3)[1][-10:])
    assert losses["middle"] < 0.8 * losses["start"], losses


@pytest.mark.parametrize("n_fft", [126, 510])
def test_a_phase_from_the_middle_is_that_of_the_turned_window(n_fft):
    spec = Spec(n_fft=n_fft, hop=n_fft // 2 + 1, phase="middle", frames=8, buffer=4)
    wave = torch.from_numpy(pair(0.5)[0])
    window = torch.hann_window(n_fft)
    rolled = torch.fft.rfft(torch.roll(wave[:n_fft] * window, n_fft // 2))
    assert torch.allclose(signal.expand(signal.analyse(wave[:n_fft], spec)), rolled, atol=1e-4)
    assert torch.allclose(
        signal.spectra(wave[None, :n_fft], spec)[0, :, 0], signal.analyse(wave[:n_fft], spec), atol=1e-6
    )
    noisy, clean = pair(0.5)
    assert si_sdr(clean, enhance(Oracle(noisy, clean, spec), noisy, spec)) > 60


def test_a_broken_sample_is_a_click_and_no_end():
    noisy, clean = pair(0.5)
    broken = noisy.copy()
    broken[1000:1003] = np.nan, np.inf, -np.inf
    torch.manual_seed(0)
    network = randomised(NCSNpp(8)).eval()
    made, whole = (enhance(network, wave, SMALL) for wave in (broken, noisy))
    assert np.isfinite(made).all() and np.abs(made).max() < 2 * np.abs(whole).max()


# ---- files -----------------------------------------------------------------------------------------------------


def test_an_exported_network_streams_the_same_from_its_folder_alone(tmp_path):
    torch.manual_seed(0)
    net, (noisy, _) = randomised(NCSNpp(8)).eval(), pair(0.2)
    write_export(tmp_path / "export", net, SMALL, {"best": -3.0, "loss": 0.1})  # facts never replace the spec
    again, spec = load_network(str(tmp_path / "export"))
    assert spec == SMALL and np.array_equal(enhance(net, noisy, SMALL), enhance(again.eval(), noisy, spec))


def test_a_folder_is_enhanced_file_by_file(tmp_path, capsys):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    noisy, _ = pair(0.3)
    soundfile.write(tmp_path / "in" / "sub" / "a.flac", noisy, 16000)
    enhance_folder(PassThrough(), SMALL, tmp_path / "in", tmp_path / "out", 2)
    made, rate = soundfile.read(tmp_path / "out" / "sub" / "a.wav", dtype="float32")
    assert rate == 16000 and len(made) == len(noisy) and np.abs(made - noisy).max() < 1e-4
    printed = capsys.readouterr().out
    assert "latency at --delay 2: 11.9 ms" in printed and "real-time factor" in printed
    both = np.stack([noisy, 0.5 * noisy], axis=1)
    soundfile.write(tmp_path / "in" / "stereo.wav", both, 16000)
    enhance_folder(PassThrough(), SMALL, tmp_path / "in", tmp_path / "out", 2)  # each channel is a stream
    made, rate = soundfile.read(tmp_path / "out" / "stereo.wav", dtype="float32")
    assert made.shape == both.shape and np.abs(made - both).max() < 1e-4


@pytest.mark.long
def test_an_exported_run_enhances_a_folder(tmp_path):
    torch.manual_seed(0)
    net, (noisy, _) = randomised(NCSNpp(8)).eval(), pair(0.2)
    write_export(tmp_path / "run" / "export", net, SMALL, {})
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "a.wav", noisy, 16000, subtype="FLOAT")
    run, options = str(tmp_path / "run"), {"delay": 3, "temperature": 0.5, "seed": 2}
    for given in ({}, {"buffer": 6, "stream": "official"}):
        enhance_run(run, tmp_path / "in", tmp_path / "out", json.dumps(given), **options)
        made, _ = soundfile.read(tmp_path / "out" / "a.wav", dtype="float32")
        assert np.array_equal(made, enhance(net, noisy, dataclasses.replace(SMALL, **given), **options))
