"""Scores of samples: what waits for them, what is only logged, and that a kill loses none."""

import hashlib
import json
import math
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common import sample_scores
from common.errors import UserError
from common.runs import Run
from common.sample_scores import SampleScores, SpeechFlags, best_score

DS = {"zero_optimization": {"stage": 2}}
METRICS = {"loss": 2.0, "wer": 0.3, "similarity": 0.7, "dnsmos": 3.1, "stop_rate": 0.75, "duration_ratio": 0.5}


@pytest.mark.parametrize(
    ("best_by", "better"),
    [
        ("loss", {"loss": 1.9}),
        ("wer", {"wer": 0.2}),
        ("similarity", {"similarity": 0.8}),
        ("dnsmos", {"dnsmos": 3.2}),
        ("stop", {"stop_rate": 1.0}),
        ("duration", {"duration_ratio": 1.2}),
        ("duration", {"duration_ratio": 1.9}),
    ],
)
def test_a_better_sample_has_a_lower_score_and_the_loss_breaks_ties(best_by, better):
    score = best_score(METRICS, best_by)
    assert best_score(METRICS | better, best_by) < score
    assert best_score(METRICS | {"loss": 1.9}, best_by) < score
    worse_loss = best_score(METRICS | better | {"loss": 3.0}, best_by)
    assert best_by == "loss" or worse_loss < score, "the loss only breaks ties"
    assert best_by == "loss" or score == pytest.approx(
        {"wer": 0.3, "similarity": -0.7, "dnsmos": -3.1, "stop": -0.75, "duration": math.log(2)}[best_by], abs=1e-5
    )


def test_what_was_not_measured_has_no_score():
    assert best_score({"loss": 1.0}, "wer") is None
    assert best_score({"loss": 1.0, "wer": float("nan")}, "wer") is None
    assert best_score({"loss": 1.0, "frechet": 5.0}, "frechet") == pytest.approx(5)


# ---- a run whose watcher is played by the test ------------------------------------------------------------------

# Says that it is ready, notes what it sees and is asked, and answers with what the test has written; "die" ends it.
STAND_IN = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / "scores" / "seen").write_text(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[2:]]))
(run / "scores" / "ready").touch()
for line in sys.stdin:
    with open(run / "asked", "a") as asked:
        asked.write(line)
    folder = line.split()[0]
    while not (run / f"{folder}.answer").exists():
        time.sleep(0.01)
    answer = (run / f"{folder}.answer").read_text()
    if answer == "die":
        sys.exit(1)
    (run / "scores" / f"{folder}.tmp").write_text(json.dumps({"means": json.loads(answer), "samples": {}}))
    (run / "scores" / f"{folder}.tmp").rename(run / "scores" / f"{folder}.json")
"""


@pytest.fixture
def watcher(tmp_path, monkeypatch):
    script = tmp_path / "watch.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(sample_scores, "WATCHER", script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return script


class Clips(SimpleNamespace):
    tokens = SimpleNamespace(text=lambda i: "hello", info={"weights": "codec"})
    kept = np.arange(3)

    def __len__(self):
        return 3


@pytest.fixture
def start(tmp_path, one_rank, watcher, request):
    """start(...) -> a run, resumed if it has checkpoints, and its scores."""

    def build(**flags):
        config = SpeechFlags(**{"out": str(tmp_path / "run"), "samples": 2, "best_by": "wer", "wer": "x", **flags})
        run = Run("dia_lora", config, DS, one_rank, {"optimizer": {}}, steps=9)
        scores = SampleScores(run, Clips(config=config), ("recorded",))
        request.addfinalizer(lambda: scores.watcher and scores.watcher.kill())
        return run, scores

    return build


NAMES = ("clip-0000", "clip-0002")


def take(run, scores, step, loss, names=NAMES):
    """The scores of one evaluation that made these samples."""
    run.tracker.event("eval", step, loss=loss)
    for folder in ("recorded", f"step-{step:08d}"):
        (run.folder / "samples" / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (run.folder / "samples" / folder / f"{name}.json").write_text("{}")
    return scores.of_step(step, [Path(f"{name}.npy") for name in names])


def answer(run, step, **means):
    folder = step if isinstance(step, str) else f"step-{step:08d}"
    draft = run.folder / f"{folder}.draft"
    draft.write_text(json.dumps(means))
    draft.rename(draft.with_suffix(".answer"))


def noted(run, event="scores", key="step", name="wer"):
    return {place: values[name] for place, values in run.events(event, key).items()}


def test_an_evaluation_waits_for_the_scores_that_decide(start):
    run, scores = start()
    answer(run, "recorded", wer=0.02)
    later = threading.Timer(0.5, lambda: answer(run, 1, wer=0.5))
    later.start()
    assert take(run, scores, 1, loss=4.0) == {"wer": 0.5} and not later.is_alive()
    answer(run, 2, wer=0.9)
    assert take(run, scores, 2, loss=3.0) == {"wer": 0.9}
    assert noted(run) == {1: 0.5, 2: 0.9} and noted(run, "ceiling", "of") == {"recorded": 0.02}
    asked = (run.folder / "asked").read_text().splitlines()
    assert asked == [f"{folder} clip-0000 clip-0002" for folder in ("recorded", "step-00000001", "step-00000002")]
    scores.finish()
    assert scores.watcher.poll() == 0, "it ends with the run"


def test_scores_for_the_log_are_noted_when_they_are_there(start):
    run, scores = start(best_by="loss")
    answer(run, "recorded")
    assert take(run, scores, 1, loss=4.0) == {} == take(run, scores, 2, loss=3.0), "no rank waits"
    answer(run, 1, wer=0.5)
    while not (run.folder / "scores" / "step-00000001.json").exists():
        time.sleep(0.01)
    assert take(run, scores, 3, loss=3.0) == {} and noted(run) == {1: 0.5}
    answer(run, 2, wer=0.9)
    later = threading.Timer(0.5, lambda: answer(run, 3, wer=0.2))
    later.start()
    scores.finish()
    assert noted(run) == {1: 0.5, 2: 0.9, 3: 0.2}, "the end of the run waits for all"


@pytest.mark.parametrize("best_by", ["wer", "loss"])
def test_the_watcher_sees_no_gpu_and_yields_to_a_training_that_does_not_wait(start, best_by):
    run, scores = start(best_by=best_by)
    gpus, words = json.loads((run.folder / "scores" / "seen").read_text())
    assert gpus == "" and words == ["--wer", "x", "--references", "samples/recorded", "--codec-weights", "codec"]
    lower = min(19, os.nice(0) + (10 if best_by == "loss" else 0))
    assert os.getpriority(os.PRIO_PROCESS, scores.watcher.pid) == lower


def test_a_watcher_that_dies_does_not_stop_or_hang_the_training(start, capsys):
    run, scores = start()
    answer(run, "recorded", wer=0.02)
    later = threading.Timer(0.5, lambda: (run.folder / "step-00000001.answer").write_text("die"))
    later.start()
    assert take(run, scores, 1, loss=4.0) == {}
    assert "no scores for step-00000001" in capsys.readouterr().out
    assert take(run, scores, 2, loss=3.0) == {} == take(run, scores, 3, loss=2.0)
    scores.finish()
    assert noted(run) == {} and "step-00000003" in capsys.readouterr().out


def test_a_step_that_lacks_a_sample_has_no_score(start):
    run, scores = start()
    answer(run, "recorded", wer=0.02)
    answer(run, 1, wer=0.0)
    assert take(run, scores, 1, loss=4.0, names=NAMES[:1]) == {}
    answer(run, 2, wer=0.3)
    assert take(run, scores, 2, loss=3.0) == {"wer": 0.3}


def save(run, step):
    """A checkpoint without weights."""
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    state = json.dumps({"step": step, "best": run.best, "identity": run.identity, "threads": 1})
    (folder / "trainer_state.json").write_text(state)
    digests = {"trainer_state.json": hashlib.sha256(state.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(digests))


def test_a_killed_run_scores_what_it_had_not_and_forgets_what_it_takes_again(start):
    run, scores = start(best_by="loss")
    answer(run, "recorded", wer=0.02)
    for step in (1, 2, 3):
        take(run, scores, step, loss=1.0)
    answer(run, 1, wer=0.5)
    while not noted(run):
        scores._note(lambda: None, wait=False)
    save(run, 2)
    scores.watcher.kill()
    run, scores = start(best_by="loss")
    assert not (run.folder / "samples" / "step-00000003").exists()
    answer(run, 2, wer=0.4)
    answer(run, 3, wer=0.3)
    (run.folder / "asked").unlink()
    take(run, scores, 3, loss=1.0)
    scores.finish()
    assert noted(run) == {1: 0.5, 2: 0.4, 3: 0.3} and noted(run, "ceiling", "of") == {"recorded": 0.02}
    asked = [line.split()[0] for line in (run.folder / "asked").read_text().splitlines()]
    assert asked == ["recorded", "step-00000002", "step-00000003"]
    records = [json.loads(line) for line in run.tracker.path.read_text().splitlines()]
    assert sum(record.get("event") == "ceiling" for record in records) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"best_by": "wer", "wer": ""}, "--best-by wer needs --wer"),
        ({"best_by": "dnsmos"}, "--best-by dnsmos needs --dnsmos"),
        ({"best_by": "stop", "samples": 0}, "--best-by stop needs samples"),
    ],
)
def test_what_cannot_decide_is_refused(start, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        start(**flags)


def test_a_model_that_cannot_be_loaded_ends_the_run_before_it_begins(start, watcher):
    watcher.write_text("print('error: --wer x is no folder'); raise SystemExit(2)")
    with pytest.raises(UserError, match="samples cannot be scored: --wer x is no folder"):
        start()


def test_a_codec_that_cannot_be_loaded_does_not(start, watcher, capsys):
    watcher.write_text("raise SystemExit(2)")
    run, scores = start(best_by="loss", wer="")
    assert take(run, scores, 1, loss=4.0) == {}
    scores.finish()
    assert "no scores for" in capsys.readouterr().out


def test_nothing_is_started_without_samples(start, tmp_path):
    _, scores = start(best_by="loss", samples=0)
    assert scores.of_step(1, []) == {}
    scores.finish()
    assert scores.watcher is None and not (tmp_path / "run" / "scores").exists()
