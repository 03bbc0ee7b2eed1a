"""Models from the hub: one download per machine, then from disk."""

import threading

import huggingface_hub
import pytest

from common import hub
from common.runtime import Process


@pytest.fixture
def four_ranks(monkeypatch):
    """call(path) -> which (machine, rank) downloaded what, when 2 machines with 2 ranks each call hub.fetch."""
    here, answers, lock = threading.Barrier(4), {}, threading.Lock()
    monkeypatch.setattr(hub, "_fetched", set())

    def any_rank(condition, process):
        answers[process.rank] = condition
        here.wait(10)
        result = any(answers.values())
        here.wait(10)
        return result

    def call(path, error=None, weights=True):
        seen = []

        def download(repo, **options):
            assert ("*.safetensors" in options["ignore_patterns"]) != weights
            with lock:
                seen.append((repo, options["revision"]))
            if error and len(seen) == 2:
                raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(hub, "any_rank", any_rank)
        ranks = [
            threading.Thread(target=hub.fetch, args=(path, Process(rank, 4, "cpu", local_rank=rank % 2), "v1", weights))
            for rank in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(20)
        return seen

    return call


def test_one_rank_of_each_machine_downloads_and_all_load_from_disk(four_ranks):
    assert not hub.is_local("someone/model")
    assert four_ranks("someone/model") == [("someone/model", "v1")] * 2
    assert hub.is_local("someone/model")


def test_a_model_on_paper_needs_no_weights(four_ranks):
    four_ranks("someone/model", weights=False)
    assert hub.is_local("someone/model")


def test_after_a_failure_on_one_machine_every_rank_asks_the_hub_itself(four_ranks):
    """Which then says what is wrong, in one sentence."""
    assert len(four_ranks("someone/model", error=OSError("no network"))) == 2
    assert not hub.is_local("someone/model")


def test_folders_and_an_empty_flag_need_no_download(four_ranks, tmp_path):
    for path in (str(tmp_path), "", "./nowhere"):
        assert four_ranks(path) == []
    assert hub.is_local(str(tmp_path)) and not hub.is_local("./nowhere")
