"""Scores of samples that arrive later: what waits for them, what they decide, and that a kill loses none."""

import dataclasses
import hashlib
import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from common import checkpoint, sample_scores
from common.errors import UserError
from common.runs import Run
from common.sample_scores import MusicFlags, SampleScores, SpeechFlags, best_score

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


@pytest.fixture
def watcher(tmp_path, monkeypatch):
    """A process that says that it is ready, notes what it sees of the machine, and then scores nothing."""
    script = tmp_path / "watch.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "scores = pathlib.Path(sys.argv[1]) / 'scores'\n"
        "(scores / 'seen').write_text(repr((os.environ['CUDA_VISIBLE_DEVICES'], os.nice(0), sys.argv[2:])))\n"
        "(scores / 'ready').touch()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(sample_scores, "WATCHER", script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


CLIPS = SimpleNamespace(
    tokens=SimpleNamespace(text=lambda i: "hello", info={"weights": "codec"}), kept=np.arange(3), config=None
)


class Clips(SimpleNamespace):
    def __len__(self):
        return 3


@pytest.fixture
def start(tmp_path, one_rank, watcher, request):
    """start(...) -> a run, resumed if it has checkpoints, and its scores."""

    def build(decide=True, score_of=lambda m, b, c: best_score(m, c.best_by), **flags):
        config = SpeechFlags(**{"out": str(tmp_path / "run"), "samples": 2, "best_by": "wer", "wer": "x", **flags})
        run = Run("dia_lora", config, DS, one_rank, {"optimizer": {}}, steps=9)
        clips = Clips(**vars(CLIPS) | {"config": config})
        scores = SampleScores(run, clips, ("recorded",), score_of, decide)
        request.addfinalizer(scores.close)
        return run, scores

    return build


def take(run, scores, step, loss):
    """One evaluation with its samples, and a checkpoint without weights."""
    run.tracker.event("eval", step, loss=loss)
    (run.folder / "samples" / f"step-{step:08d}").mkdir(parents=True)
    scores.expect(step, evaluated=True)
    run.checkpoints.mkdir(exist_ok=True)
    entries = checkpoint.read_index(run.checkpoints)
    name = f"step-{step:08d}"
    (run.checkpoints / name).mkdir(exist_ok=True)
    state = json.dumps({"step": step, "best": run.best, "identity": run.identity, "threads": 1})
    (run.checkpoints / name / "trainer_state.json").write_text(state)
    digests = {"trainer_state.json": hashlib.sha256(state.encode()).hexdigest()}
    (run.checkpoints / name / "manifest.json").write_text(json.dumps(digests))
    assert run.unscored == step, "its save marks it"
    entries.append({"name": name, "step": step, "score": None, "unscored": True})
    checkpoint._retain(run.checkpoints, entries, run.config.keep, 0)


def arrive(run, step, **means):
    (run.folder / "scores" / f"step-{step:08d}.json").write_text(json.dumps({"means": means, "samples": {}}))


def listed(run):
    return {entry["step"]: entry["score"] for entry in checkpoint.read_index(run.checkpoints)}


def test_checkpoints_wait_for_their_scores_and_the_best_stays(start, capsys):
    run, scores = start()
    for step, loss in enumerate([4.0, 3.0, 2.0, 1.0], start=1):
        take(run, scores, step, loss)
    assert listed(run) == dict.fromkeys([1, 2, 3, 4]), "none may go before its score is known"
    scores.collect()
    assert listed(run) == dict.fromkeys([1, 2, 3, 4]) and run.best is None, "and no rank waits"
    arrive(run, 1, wer=0.5)
    arrive(run, 2, wer=0.2)
    scores.collect()
    assert run.best["step"] == 2 and set(listed(run)) == {2, 3, 4}, "2 is the best, 3 and 4 are not scored"
    arrive(run, 3, wer=0.9)
    arrive(run, 4, wer=0.3)
    scores.collect(last=True)
    assert run.best["step"] == 2 and listed(run)[2] == pytest.approx(0.2, abs=1e-4)
    assert "unscored" not in (run.checkpoints / "index.json").read_text()
    noted = run.events("scores")
    assert {step: noted[step]["wer"] for step in noted} == {1: 0.5, 2: 0.2, 3: 0.9, 4: 0.3}
    warning = "loss and samples disagree about the best checkpoint (loss step 4, wer step 2); --best-by wer decides"
    assert warning in capsys.readouterr().out and run.events("alarm")[2]["message"] == warning


def test_the_watcher_sees_no_gpu_and_yields_to_the_training(start):
    run, scores = start()
    gpus, nice, words = eval((run.folder / "scores" / "seen").read_text())
    assert (gpus, nice) == ("", min(19, os.nice(0) + 10))
    assert words == ["--wer", "x", "--names", "clip-0000", "clip-0002", "--references", "samples/recorded",
                     "--codec-weights", "codec"]  # fmt: skip
    run.finish(9)
    assert scores.watcher.poll() is not None, "it ends with the run"


def test_a_killed_run_finds_what_it_waited_for_and_forgets_what_it_takes_again(start):
    run, scores = start()
    for step in (1, 2, 3):
        take(run, scores, step, loss=1.0 / step)
    arrive(run, 1, wer=0.1)
    scores.collect()
    arrive(run, 2, wer=0.05)
    arrive(run, 3, wer=0.01)
    scores.close()
    index = run.checkpoints / "index.json"
    entries = [entry for entry in checkpoint.read_index(run.checkpoints) if entry["step"] < 3]
    index.write_text(json.dumps({"checkpoints": entries}))  # killed while it wrote the checkpoint of step 3
    run, scores = start()
    assert run.best["step"] == 1, "from the index: the checkpoint of step 2 was saved before this score came"
    assert scores.expected == [2] and not (run.folder / "samples" / "step-00000003").exists()
    assert not (run.folder / "scores" / "step-00000003.json").exists()
    scores.collect()
    assert run.best["step"] == 2 and listed(run).keys() == {1, 2}


def test_without_scores_a_checkpoint_is_never_the_best_and_no_rank_waits_for_a_dead_process(start, capsys):
    run, scores = start()
    take(run, scores, 1, 1.0)
    scores.watcher.kill()
    scores.watcher.wait()
    scores.collect(last=True)
    assert run.best is None and listed(run) == {1: None}
    assert "the samples of step 1 have no scores" in capsys.readouterr().out


def test_the_base_is_what_a_score_can_be_compared_with(start):
    seen = []
    run, scores = start(score_of=lambda metrics, base, config: seen.append((metrics["wer"], base["wer"])))
    run.tracker.event("eval", 0, loss=9.0)
    (run.folder / "samples" / "step-00000000").mkdir(parents=True)
    scores.expect(0, evaluated=True)
    take(run, scores, 1, 1.0)
    arrive(run, 0, wer=0.4)
    arrive(run, 1, wer=0.3)
    scores.collect()
    assert seen == [(0.3, 0.4)] and run.best is None


def test_scores_that_decide_nothing_are_only_recorded(start):
    run, scores = start(decide=False, best_by="loss")
    (run.folder / "samples" / "step-00000001").mkdir(parents=True)
    scores.expect(1, evaluated=True)
    assert run.unscored is None
    arrive(run, 1, wer=0.3)
    scores.collect()
    assert run.events("scores")[1]["wer"] == 0.3 and run.best is None


def test_ceilings_are_noted_once(start):
    run, scores = start()
    (run.folder / "scores" / "recorded.json").write_text(json.dumps({"means": {"wer": 0.02}, "samples": {}}))
    scores.collect()
    scores.collect()
    lines = [json.loads(line) for line in run.tracker.path.read_text().splitlines()]
    assert [r for r in lines if r.get("event") == "ceiling"] == [
        {"event": "ceiling", "step": 0, "of": "recorded", "wer": 0.02}
    ]


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


def test_a_model_that_cannot_be_loaded_ends_the_run_before_it_begins(start, tmp_path):
    sample_scores.WATCHER.write_text("print('error: --wer x is no folder'); raise SystemExit(2)")
    with pytest.raises(UserError, match="samples cannot be scored: --wer x is no folder"):
        start()


def test_nothing_is_started_unless_asked_for(start, tmp_path):
    _, scores = start(best_by="loss", wer="")
    scores.expect(1, evaluated=True)
    scores.collect(last=True)
    assert scores.watcher is None and not scores.decide and not (tmp_path / "run" / "scores").exists()
    assert dataclasses.fields(MusicFlags) and not sample_scores.asked(MusicFlags())
