"""./launch.sh fetch, and every command that takes a hub id, against a stand-in for the hub."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import fetch as fetch_command
import pytest

from common.errors import run_command
from helpers import support
from helpers.hub_stand_in import serve

CHUNK = 10 * 2**20  # the hub's library hands over a download in pieces of this size
NAME, GATED = "someone/model", "someone/gated"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of 25 MB, and an older one with other weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(25_000_000))
    (folder / "original").mkdir()
    (folder / "original/model.safetensors").write_bytes(b"not asked for")
    return folder


@pytest.fixture
def hub(model):
    with serve() as (hub, address):
        hub.add_model(NAME, model, NEW)
        hub.add_model(GATED, model)
        hub.gated.add(GATED)
        hub.address = address
        yield hub


def environment(hub, home, **more) -> dict:
    named = support.environment(HF_ENDPOINT=hub.address, HF_HOME=str(home), HF_HUB_OFFLINE="0")
    named.pop("HF_TOKEN", None)
    return named | more


def fetch(hub, home, *words, **more) -> subprocess.CompletedProcess:
    command = [support.PYTHON, support.ROOT / "data/fetch.py", *words]
    return subprocess.run(
        command, env=environment(hub, home, **more), capture_output=True, text=True, timeout=600, check=False
    )


def test_a_download_that_was_killed_begins_again(hub, model, tmp_path):
    hub.stall_after = 2 * CHUNK + 1000
    command = [support.PYTHON, support.ROOT / "data/fetch.py", NAME]
    killed = subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.DEVNULL)
    for _ in range(600):
        part = next(tmp_path.rglob("*.incomplete"), None)
        if hub.downloads and part and part.stat().st_size >= CHUNK:
            break
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert part and not list(tmp_path.rglob("model.safetensors")), "half a file is no file"

    hub.stall_after = None
    done = fetch(hub, tmp_path, NAME)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.splitlines()[-1]
    assert folder.endswith(NEW)
    for name in ("config.json", "model.safetensors"):
        assert (model / name).read_bytes() == open(f"{folder}/{name}", "rb").read()
    assert not os.path.exists(f"{folder}/original")
    count = len(hub.downloads)
    assert fetch(hub, tmp_path, NAME).stdout == done.stdout and len(hub.downloads) == count, "downloaded twice"


def test_an_older_revision_stays_beside_the_newest(hub, model, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(model, older)
    (older / "config.json").write_text('{"old": 1}')
    hub.models[NAME] = {}
    hub.add_model(NAME, older, OLD)
    hub.add_model(NAME, model, NEW)
    folders = [fetch(hub, tmp_path / "home", NAME, *words).stdout.strip() for words in
               ((), ("--revision", OLD), ("--revision", "main"))]  # fmt: skip
    assert [folder[-40:] for folder in folders] == [NEW, OLD, NEW]
    assert json.loads(open(f"{folders[1]}/config.json").read()) == {"old": 1}
    assert len(hub.downloads) == 1, "the same weights are downloaded once"


TOKEN = {"HF_TOKEN": "hf_0123456789"}
ELSEWHERE = r"; run the same command again, or name a folder with its files, which \./launch\.sh fetch"
# What is asked for, what the stand-in does, the environment -> what is said.
FAILURES = {
    "gated": ((GATED,), None, {}, r"is gated: ask for access at http\S+/someone/gated, then export HF_TOKEN"),
    "gated with a token": ((GATED,), None, TOKEN, "is gated and HF_TOKEN has no access: ask for it at http"),
    "a typo": (("someone/modle",), None, {}, "neither a path on this machine nor on the hub: check the spelling"),
    "private": (("someone/modle",), None, TOKEN, "check the spelling, and that HF_TOKEN may read it"),
    "no owner": (("modle",), None, {}, "neither a path on this machine nor a hub id, which has the form owner/name"),
    "a revision that is not there": ((NAME, "--revision", "v9"), None, {}, "has no revision v9; its branches, tags"),
    "an invalid token": ((NAME,), 401, TOKEN, "HF_TOKEN is not valid; export a new one, or unset it"),
    "forbidden": ((NAME,), 403, {}, "the hub refuses access; check at http"),
    "too many requests": ((NAME,), 429, {}, "asks to wait .* again in a few minutes"),
    "the hub is down": ((NAME,), 500, {}, rf"does not answer \(HTTP 500\){ELSEWHERE} {NAME}"),
    "nothing listens": ((NAME,), None, {"HF_ENDPOINT": "http://127.0.0.1:9"}, rf"ConnectionRefusedError\){ELSEWHERE}"),
    "offline": (
        (NAME,),
        None,
        {"HF_HUB_OFFLINE": "1"},
        "HF_HUB_OFFLINE forbids a download: unset it, or name a folder",
    ),
    "an unwritable cache": ((NAME,), None, {"HF_HOME": "/proc/x"}, "cannot be stored in /proc/x .* set HF_HOME to"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_every_failure_is_one_sentence_with_the_way_out(restored, case, hub, tmp_path, monkeypatch, capsys):
    words, hub.refuse_downloads, more, said = FAILURES[case]
    # What the hub's library reads from the environment when it is imported.
    home = more.get("HF_HOME", str(tmp_path))
    endpoint = more.get("HF_ENDPOINT", hub.address)
    settings = {"ENDPOINT": endpoint, "HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub"}
    settings |= {"HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    for name, value in (settings | {"HF_HUB_OFFLINE": "HF_HUB_OFFLINE" in more}).items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["fetch.py", *words])
    with pytest.raises(SystemExit) as left:
        run_command(fetch_command.main)
    printed = capsys.readouterr().err
    assert left.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1, printed
    assert re.search(said, printed), printed


def test_a_full_disk_says_which_variable_moves_the_cache(hub, tmp_path):
    """No file may be larger than 12 MB: the disk refuses the rest, as a full one does."""
    command = ["bash", "-c", 'ulimit -f 12000; trap "" XFSZ; exec "$@"', "bash"]
    command += [support.PYTHON, support.ROOT / "data/fetch.py", NAME]
    done = subprocess.run(
        command, env=environment(hub, tmp_path), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2 and "cannot be stored in" in done.stderr and "set HF_HOME" in done.stderr, done.stderr
