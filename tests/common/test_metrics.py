"""metrics.jsonl and TensorBoard."""

import json

import pytest

from common.metrics import Tracker
from common.runtime import Process

VALUES = {"loss": 2.5, "lr": 1e-4, "grad_norm": 0.5, "tokens_per_s": 10.0, "padding": 0.02}
VALUES |= {"data_wait_s": 0.001, "step_s": 0.1, "rss_gb": 0.5}


@pytest.fixture
def tracker(tmp_path, one_rank):
    tracker = Tracker(tmp_path, one_rank, 10)
    yield tracker
    tracker.close()


def records(tracker):
    return [json.loads(line) for line in tracker.path.read_text().splitlines()]


def test_steps_and_events_are_one_object_a_line(tracker):
    tracker.event("eval", 0, loss=3.0)
    tracker.step(1, VALUES)
    assert records(tracker) == [{"event": "eval", "step": 0, "loss": 3.0}, {"step": 1, **VALUES}]


def test_the_progress_line_shows_the_step(tracker, capsys):
    tracker.step(1, VALUES)
    tracker.step(2, VALUES)
    first, second = capsys.readouterr().out.splitlines()
    assert "1/10" in first and "loss 2.5000" in first and "wait 1.0%" in first and "0.50 GB" in second


def test_a_rate_of_the_warm_up_is_called_that(tmp_path, one_rank, capsys):
    tracker = Tracker(tmp_path, one_rank, 500, warmup=100, peak=1e-5)
    tracker.step(1, VALUES | {"lr": 1e-7})
    tracker.step(100, VALUES | {"lr": 1e-5})
    tracker.close()
    first, last = capsys.readouterr().out.splitlines()
    assert "lr 1.00e-07 (warm-up 1/100, peak 1.0e-05)" in first and "warm-up" not in last


def test_forgetting_drops_later_and_half_written_lines(tracker):
    for step in (1, 2, 3):
        tracker.step(step, VALUES)
        tracker.event("checkpoint", step)
    whole = records(tracker)
    with open(tracker.path, "a") as stream:
        stream.write('{"step": 2, "lo')
    tracker.forget_after(2)
    assert records(tracker) == [r for r in whole if r["step"] <= 2]
    tracker.event("resume", 2)
    assert records(tracker)[-1] == {"event": "resume", "step": 2}


def test_forgetting_before_anything_was_written_is_fine(tracker):
    tracker.forget_after(5)
    assert not tracker.path.exists()


def test_tensorboard_holds_the_same_values(tracker, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker.step(1, VALUES)
    tracker.event("eval", 2, loss=1.25, note="words are no curve")
    tracker.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 2.5)]
    assert [(e.step, e.value) for e in board.Scalars("eval/loss")] == [(2, 1.25)]
    assert "eval/note" not in board.Tags()["scalars"]


def test_other_ranks_write_nothing(tmp_path, one_rank):
    second = Tracker(tmp_path / "run", Process(1, 2, one_rank.device), 10)
    second.event("eval", 0, loss=3.0)
    second.forget_after(0)
    second.close()
    assert not (tmp_path / "run").exists()
