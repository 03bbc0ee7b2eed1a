"""metrics.jsonl and TensorBoard."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios

import numpy as np
import pytest
import soundfile
import torch

from common import boards, runtime
from common.config import RunConfig
from common.contracts import LossOutput
from common.metrics import Meter, Tracker
from common.runtime import Process
from helpers import support

VALUES = {"loss": 2.5, "lr": 1e-4, "grad_norm": 0.5, "tokens_per_s": 10.0, "padding": 0.02}
VALUES |= {"data_wait_s": 0.001, "step_s": 0.1, "rss_gb": 0.5}


@pytest.fixture
def tracker(tmp_path, one_rank):
    tracker = Tracker(tmp_path, one_rank, RunConfig(), 10)
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
    tracker = Tracker(tmp_path, one_rank, RunConfig(lr=1e-5), 500, warmup=100)
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


def test_tensorboard_holds_each_sample_once_in_one_file(tmp_path, one_rank):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def say_something(stage):
        (tmp_path / "samples" / stage).mkdir(parents=True)
        soundfile.write(tmp_path / "samples" / stage / "clip-0000.wav", np.ones(800) / 2, 8000)

    def sounds():
        board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        return {tag: [sound.step for sound in board.Audio(tag)] for tag in board.Tags()["audio"]}

    tracker = Tracker(tmp_path, one_rank, RunConfig(), 10)
    for stage in ("recorded", "step-00000000"):
        say_something(stage)
    tracker.event("eval", 2)
    say_something("step-00000004")
    tracker.close()
    assert sounds() == {"samples/clip-0000/recorded": [0], "samples/clip-0000": [0, 4]}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    tracker = Tracker(tmp_path, one_rank, RunConfig(), 10, start=4)
    say_something("step-00000008")
    tracker.close()
    assert sounds() == {"samples/clip-0000/recorded": [0], "samples/clip-0000": [0, 4, 8]}


def test_log_every_thins_out_the_lines_and_not_the_record(tmp_path, one_rank, capsys):
    tracker = Tracker(tmp_path, one_rank, RunConfig(log_every=3), 8)
    for step in range(1, 9):
        tracker.step(step, VALUES)
    tracker.close()
    shown = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [1, 3, 6, 8] and len(records(tracker)) == 8


def test_a_terminal_shows_a_bar_and_keeps_every_other_line(tmp_path):
    """In a process with a terminal of its own."""
    script = f"""
import sys, torch
sys.path.insert(0, {str(support.ROOT / "finetune")!r})
from common.config import RunConfig
from common.metrics import Tracker
from common.runtime import Process, say
tracker = Tracker(__import__("pathlib").Path({str(tmp_path)!r}), Process(0, 1, torch.device("cpu")), RunConfig(), 3)
for step in (1, 2, 3):
    say(f"a message before step {{step}}")
    tracker.step(step, {VALUES!r})
tracker.close()
say("the end")
"""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # lines, columns
    process = subprocess.Popen([support.PYTHON, "-c", script], stdout=inside, env=support.environment())
    os.close(inside)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side closed
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    assert process.wait() == 0
    lines = [line.split("\r")[-1].strip() for line in shown.decode().replace("\r\n", "\n").splitlines()]
    assert [line for line in lines if "message" in line] == [f"a message before step {n}" for n in (1, 2, 3)]
    assert "3/3" in shown.decode() and "loss 2.5000" in shown.decode() and lines[-1] == "the end"


class Broken:
    """A tracker that loses its connection at step 2."""

    seen = []

    def __init__(self, folder, start, config):
        pass

    def log(self, numbers, step):
        if step == 2:
            raise ConnectionError("no network")
        self.seen.append(step)


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(tmp_path, one_rank, monkeypatch, capsys):
    monkeypatch.setitem(boards.OPENERS, "wandb", Broken)
    monkeypatch.setitem(boards.OPENERS, "other", lambda *_: 1 / 0)
    tracker = Tracker(tmp_path, one_rank, RunConfig(tracker=["other", "wandb", "tensorboard"]), 3)
    for step in (1, 2, 3):
        tracker.step(step, VALUES)
    tracker.close()
    assert Broken.seen == [1] and list(tracker.boards.open) == ["tensorboard"] and len(records(tracker)) == 3
    said = capsys.readouterr().out
    assert said.count("--tracker wandb failed") == 1 and said.count("--tracker other failed") == 1


def test_wandb_offline_holds_the_same_values(tmp_path, one_rank, monkeypatch):
    pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(tmp_path, one_rank, RunConfig(tracker=["wandb"]), 3)
    tracker.step(1, VALUES)
    tracker.event("eval", 1, loss=1.25)
    tracker.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"2.5" in content and b"eval/loss" in content and b"1.25" in content
    assert list(tracker.boards.open) == ["wandb"]  # it did not fail


def test_other_ranks_write_nothing(tmp_path, one_rank):
    second = Tracker(tmp_path / "run", Process(1, 2, one_rank.device), RunConfig(), 10)
    second.event("eval", 0, loss=3.0)
    second.forget_after(0)
    second.close()
    assert not (tmp_path / "run").exists()


# ---- one optimizer step ----------------------------------------------------------------------------------------


def test_a_step_is_reduced_to_sums_means_and_the_wish_to_stop(one_rank):
    meter = Meter()
    for loss, positions, part in ((2.0, 5, [6.0, 2.0]), (3.0, 7, [1.0, 2.0])):
        parts = {"heard": torch.tensor(part), "never": torch.zeros(2)}
        meter.add({"ids": ["a"], "positions": positions}, LossOutput(torch.tensor(loss), parts))
    totals = meter.reduce(one_rank)
    assert (totals.loss_sum, totals.padded, totals.stop) == (5.0, 12, False)
    assert totals.parts == {"heard": 7 / 4}  # what no clip has is left out
    runtime.request_stop()
    assert meter.reduce(one_rank).stop


def test_only_clips_of_non_finite_losses_are_named():
    meter = Meter()
    for ids, loss in ((["a", "b"], 1.0), (["c"], float("nan")), (["d"], float("inf"))):
        meter.add({"ids": ids, "positions": 1}, LossOutput(torch.tensor(loss), {}))
    assert meter.non_finite_ids() == ["c", "d"]
