"""Models from the hub: one download per machine, then from disk, at the commit that was found first."""

import dataclasses
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from common import hub, runtime
from common.errors import UserError
from common.runtime import Process, Stopped
from helpers.hub_stand_in import serve

COMMIT = "a" * 40


class Download:
    """A process of data/fetch.py as far as hub.py sees it."""

    started, problem, commits = [], None, iter(())

    def __init__(self, command):
        words = list(map(str, command))
        folder = f"/cache-{hub.socket.gethostname()}/{next(self.commits, COMMIT)}"
        self.started.append((words[2], words[words.index("--revision") + 1]))
        outcome = {"problem": self.problem} if self.problem else {"folder": folder}
        Path(words[words.index("--result") + 1]).write_text(json.dumps(outcome))

    def poll(self):
        return 0

    def terminate(self):
        pass


@pytest.fixture
def four_ranks(monkeypatch):
    """call(path) -> what each rank found, when 2 machines with 2 ranks each call hub.fetch."""
    here, boxes = threading.Barrier(4), {}
    monkeypatch.setattr(Download, "started", [])
    monkeypatch.setattr(hub, "_folders", {})
    monkeypatch.setattr(hub.subprocess, "Popen", Download)
    monkeypatch.setattr(hub.socket, "gethostname", lambda: threading.current_thread().name)

    def gather(items, process):
        boxes[process.rank] = items
        here.wait(10)
        result = [item for rank in range(4) for item in boxes[rank]]
        here.wait(10)
        return result

    monkeypatch.setattr(hub, "gather_lists", gather)
    monkeypatch.setattr(hub, "any_rank", lambda condition, process: any(gather([condition], process)))

    def call(path, **options):
        found = {}

        def fetch(rank):
            try:
                hub.fetch(path, Process(rank, 4, "cpu", local_rank=rank // 2), **options)
                found[rank] = str(hub.folder(path))
            except (UserError, Stopped) as error:
                found[rank] = error

        # Ranks dealt in turn, as SLURM's cyclic distribution does: the first of a machine has no fixed distance.
        ranks = [threading.Thread(target=fetch, args=(rank,), name=f"machine{rank % 2}") for rank in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(20)
        return [found[rank] for rank in range(4)]

    return call


def test_one_rank_of_each_machine_downloads_and_all_load_from_disk(four_ranks):
    found = four_ranks("someone/model", revision="v1")
    assert Download.started == [("someone/model", "v1")] * 2
    assert {Path(folder).name for folder in found} == {COMMIT}


def test_a_failure_on_one_machine_is_raised_on_every_rank(four_ranks, monkeypatch):
    monkeypatch.setattr(Download, "problem", "someone/model is gated: ask for access.")
    found = four_ranks("someone/model", flag="--musicgen")
    assert [str(error) for error in found] == ["--musicgen someone/model is gated: ask for access."] * 4


def test_two_machines_never_train_on_two_revisions(four_ranks, monkeypatch):
    monkeypatch.setattr(Download, "commits", iter(["a" * 40, "b" * 40]))
    assert all("has just changed on the hub" in str(error) for error in four_ranks("someone/model"))


def test_a_signal_ends_the_download_on_every_rank(four_ranks, monkeypatch):
    monkeypatch.setattr(hub, "stop_requested", lambda: threading.current_thread().name == "machine1")
    assert [type(error) for error in four_ranks("someone/model")] == [Stopped] * 4


def test_folders_and_an_empty_flag_need_no_download(four_ranks, tmp_path):
    assert four_ranks(str(tmp_path)) == [str(tmp_path)] * 4
    assert four_ranks("") == ["."] * 4
    assert not Download.started


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "nowhere", "a/b/c", __file__])
def test_what_is_no_hub_id_is_refused_without_a_download(path, four_ranks):
    assert all("neither a folder in the Hugging Face format nor a hub id" in str(e) for e in four_ranks(path))
    assert not Download.started


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--revision v1 is for a model on the hub: --model .* is a local folder"):
        hub.fetch(str(tmp_path), None, "v1")


@dataclass
class Config:
    model: str = "someone/model"
    revision: str = ""
    out: str = ""
    resume: str = "auto"


def test_a_run_notes_the_commit_and_keeps_to_it(tmp_path, monkeypatch):
    """With the real data/fetch.py. What the hub gets later does not change a run that is resumed or repeated."""
    model, newer = tmp_path / "model", "b" * 40
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    process = Process(0, 1, "cpu")
    monkeypatch.setattr(hub, "_folders", {})
    monkeypatch.setattr(runtime, "_launchers", [])
    with serve() as (stand_in, address):
        stand_in.add_model("someone/model", model, COMMIT)
        for name, value in {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        pinned = hub.pin(Config(), process)
        assert dataclasses.asdict(pinned) == dataclasses.asdict(Config(revision=COMMIT))
        assert (hub.folder("someone/model") / "model.safetensors").read_bytes() == b"weights"
        (model / "model.safetensors").write_bytes(b"newer")
        stand_in.add_model("someone/model", model, newer)
        assert hub.pin(Config(revision=COMMIT), process).revision == COMMIT
        assert hub.find_file("someone/model", "model.safetensors").read_bytes() == b"weights"
        assert hub.find_file("someone/model", "tokenizer.json") is None
        assert hub.pin(Config(), process).revision == newer
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"config": dataclasses.asdict(pinned)}))
        assert hub.pin(Config(out=str(run)), process).revision == COMMIT
        assert hub.pin(Config(out=str(run), resume="never"), process).revision == newer
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # monkeypatch restores it
    with pytest.raises(UserError, match=r"--musicgen other/model cannot be downloaded: .* does not answer"):
        hub.fetch("other/model", process, flag="--musicgen")
