"""PESQ in processes of its own."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from common import scorer as scorer_module
from common.errors import UserError
from common.scorer import Scorer, collect, measured, processes_per_rank
from common.speech_metrics import measure, pesq_wb
from helpers import support
from helpers.support import voice as sounds


@pytest.fixture(scope="module")
def scorer():
    scorer = Scorer(1)
    yield scorer
    scorer.close()


def test_scores_come_in_order_and_a_bad_sound_costs_only_its_own(scorer):
    clean, noisy = sounds(1.0)
    cleans = np.stack([clean, 0 * clean, clean, clean]).astype(np.float32)
    others = np.stack([noisy, noisy, clean, np.nan * clean]).astype(np.float32)
    values, reasons = collect(scorer.pesq(cleans, others))
    assert reasons == ["", "NoUtterancesError", "", "NotFinite"]
    assert values[[0, 2]].tolist() == [pesq_wb(cleans[i], others[i])[0] for i in (0, 2)]
    assert np.isnan(values[[1, 3]]).all()
    assert scorer.measure(clean, noisy).result() == measure(clean, noisy)


def test_a_score_that_never_comes_is_a_missing_label(monkeypatch):
    monkeypatch.setattr(scorer_module, "TIMEOUT", 0.2)
    slow = Scorer(1)
    values, reasons = collect([slow.pool.submit(time.sleep, 5)])
    assert np.isnan(values).all() and reasons == ["TimeoutError"]
    slow.close()


def test_a_process_that_dies_is_a_missing_label():
    dying = Scorer(1)
    values, reasons = collect([dying.pool.submit(os._exit, 1)])
    assert np.isnan(values).all() and reasons == ["BrokenProcessPool"]
    sounds = np.zeros((2, 8000), np.float32)
    values, reasons = collect(dying.pesq(sounds, sounds))  # and so are all that come after it
    assert np.isnan(values).all() and reasons == ["BrokenProcessPool"] * 2
    with pytest.raises(UserError, match="a process that measures sounds died"):
        measured(dying.measure(sounds[0], sounds[0]))


def test_the_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    monkeypatch.setenv("LOCAL_SIZE", "8")
    assert processes_per_rank() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert processes_per_rank() == 1


def test_scorers_are_small_deaf_to_signals_and_die_with_their_rank():
    probe = (
        "import sys, time; sys.path.insert(0, 'finetune')\n"
        "from common.scorer import Scorer\n"
        "scorer = Scorer(1)\n"
        "assert 'torch' not in sys.modules\n"
        "print(*scorer.pool._processes, flush=True); time.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", probe], cwd=support.ROOT, stdout=subprocess.PIPE, text=True)
    child = int(rank.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(child, number)
    time.sleep(0.3)
    assert os.path.exists(f"/proc/{child}")
    resident = int(open(f"/proc/{child}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 100e6
    rank.kill()
    rank.wait()
    deadline = time.time() + 60
    while os.path.exists(f"/proc/{child}") and "Z" not in open(f"/proc/{child}/stat").read().split()[2]:
        assert time.time() < deadline
        time.sleep(0.05)
