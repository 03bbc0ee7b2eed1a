"""The evaluation of the Diffusion Buffer: the same numbers however many files are streamed together."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.runtime import Process
from common.speech_metrics import si_sdr
from helpers.diffusion_buffer_support import pair
from models.diffusion_buffer import evaluate
from models.diffusion_buffer.enhance import enhance
from models.diffusion_buffer.signal import Spec

SPEC = Spec(width=8, n_fft=126, hop=64, frames=16, buffer=4)
HERE = Process(0, 1, torch.device("cpu"))


class Blend(torch.nn.Module):
    """A network whose answer for a sound has the same bits whatever other sounds are in the batch."""

    def embed(self, t):
        assert not self.training
        return []

    def forward(self, x, y, times, scale):
        return 0.6 * y + 0.3 * x.roll(1, -1)


def measure_level(clean, wave) -> Future:
    done = Future()
    done.set_result(dict.fromkeys(("pesq", "estoi"), 1.0) | {"si_sdr": si_sdr(*np.float64([clean, wave]))})
    return done


def test_files_streamed_together_score_as_one_by_one(monkeypatch):
    noisy, clean = ((32767 * np.clip(side, -1, 1)).astype(np.int16) for side in pair(0.3))
    lengths = [3000, 1000, 4800, 2000, 2500]
    pairs = SimpleNamespace(
        samples=np.array(lengths),
        id=lambda row: f"clip {row}",
        noisy=lambda row: noisy[: lengths[row]],
        clean=lambda row: clean[: lengths[row]],
    )
    scorer = SimpleNamespace(measure=measure_level)
    clips = evaluate.EvalClips(pairs, np.array([4, 0, 1, 2, 3]), SPEC, 7, scorer)
    found = {}
    for together in (1, 2, 5):
        monkeypatch.setattr(evaluate, "FILES_TOGETHER", together)
        found[together] = evaluate.measure_files(Blend().train(), clips, HERE)
    assert found[1] == found[2] == found[5]
    rows = found[5]
    assert [(row["index"], row["delay"]) for row in rows] == [(i, delay) for i in range(5) for delay in (0, 1, 2, 4)]
    assert [row["id"] for row in rows[::4]] == ["clip 4", "clip 0", "clip 1", "clip 2", "clip 3"]
    wave, target = clips.waves(3)
    alone = enhance(Blend().eval(), wave, SPEC, delay=2, seed=7)
    assert rows[3 * 4 + 2]["si_sdr"] == si_sdr(*np.float64([target, alone]))


def test_files_that_do_not_fit_into_memory_together_are_streamed_fewer_at_a_time(monkeypatch):
    noisy, _ = pair(0.3)
    samples = (32767 * np.clip(noisy, -1, 1)).astype(np.int16)
    pairs = SimpleNamespace(samples=np.full(7, 900), id=lambda row: f"clip {row}", noisy=lambda row: samples[:900])
    pairs.clean = pairs.noisy
    clips = evaluate.EvalClips(pairs, np.arange(7), SPEC, 7, None)
    sizes = []

    class Large(Blend):
        def forward(self, x, y, times, scale):
            sizes.append(len(x))
            return super().forward(x, y, times, scale) if len(x) <= fits else torch.empty(2**60, dtype=torch.uint8)

    fits = 2
    found = list(evaluate.stream_files(Large(), clips, 7, [4], HERE))
    assert [index for index, *_ in found] == list(range(7)) and list(dict.fromkeys(sizes)) == [7, 4, 2, 1]
    fits = 0
    with pytest.raises(UserError, match="streaming 'clip 0' does not fit into memory"):
        list(evaluate.stream_files(Large(), clips, 7, [4], HERE))


def test_a_wide_network_streams_one_file_at_a_time_on_a_cpu():
    for width, device, expected in ((8, "cpu", 16), (32, "cpu", 16), (96, "cpu", 1), (96, "cuda", 16)):
        assert evaluate.files_together(Spec(width=width), torch.device(device)) == expected
