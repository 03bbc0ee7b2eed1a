"""What the evaluation of the Diffusion Buffer says about a checkpoint."""

import contextlib
from types import SimpleNamespace

import pytest

import diffusion_buffer as recipe
from common import optim

METRICS = {"si_sdr": 9.0, "noisy_si_sdr": 5.0, "pesq": 2.5, "noisy_pesq": 1.5, "estoi": 0.8, "lsd": 3.0, "loss": 0.1}


@pytest.mark.parametrize(
    ("best_by", "changes", "score"),
    [
        ("si_sdr", {}, -9.0),
        ("pesq", {}, -2.5),
        ("lsd", {}, 3.0),
        ("loss", {}, 0.1),
        ("pesq", {"pesq": float("nan")}, None),
        ("si_sdr", {"not_finite": 1}, None),
    ],
)
def test_a_higher_metric_is_a_better_score_and_broken_output_has_none(best_by, changes, score, monkeypatch):
    monkeypatch.setattr(recipe, "measure_files", lambda *_: [])
    monkeypatch.setattr(recipe, "log_details", lambda *_: None)
    monkeypatch.setattr(recipe, "summarise", lambda *_: METRICS | {"not_finite": 0} | changes)
    run = SimpleNamespace(process=None, config=SimpleNamespace(best_by=best_by))
    run.tracker = SimpleNamespace(event=lambda *_, **__: None)
    ema = SimpleNamespace(applied=contextlib.nullcontext)
    assert recipe.evaluate(None, SimpleNamespace(spec=None), run, ema, 1) == score


def test_a_warm_up_and_a_cosine_know_no_drops():
    config = recipe.Config(lr=1e-3, warmup=4.0, schedule="plateau")
    rates = [recipe.learning_rate(step, 10, 1, config) for step in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 5e-4])
    config.schedule = "cosine"
    usual = [optim.learning_rate(step, 10, config) for step in range(10)]
    assert [recipe.learning_rate(step, 10, 3, config) for step in range(10)] == usual
