"""./launch.sh watch: the report of a run that is training, served to this machine only."""

import http.client
import json
import signal
import socket
import subprocess
import threading

import pytest

from common.errors import UserError
from helpers import support
from infer.watch import make_server, version_of


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": "dia_lora", "config": {"steps": 9}}))
    return folder


@pytest.fixture
def ask(run):
    """ask(path, host=) -> status and text."""
    server = make_server(run, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def get(path: str, host: str = "localhost"):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
        connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    get.address = server.server_address
    yield get
    server.shutdown()
    thread.join()
    server.server_close()


def add(run, **record):
    with open(run / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(record) + "\n")


def test_the_page_grows_with_the_run(run, ask):
    status, text = ask("/")
    assert status == 200 and "0 of 9 steps" in text and "<body data-live>" in text
    first = ask("/version")
    assert first == (200, version_of(run)) and ask("/version") == first
    add(run, step=1, loss=2.5)
    assert ask("/version") != first
    text = ask("/")[1]
    assert '"y":[2.5]' in text and "1 of 9 steps" in text
    add(run, step=2, loss=1.5)
    assert '"y":[2.5,1.5]' in ask("/")[1]


def test_new_samples_change_the_version(run):
    before = version_of(run)
    (run / "samples" / "step-00000002").mkdir(parents=True)
    assert version_of(run) == before
    (run / "samples" / "step-00000002" / "clip-0000.json").write_text("{}")
    assert version_of(run) != before


def test_only_this_machine_and_only_the_page(run, ask):
    assert ask.address[0] == "127.0.0.1"
    assert ask("/", host="evil.example")[0] == 403  # a site whose name was made to point here
    for path in ("/config.json", "/../run/config.json", "/metrics.jsonl", "/?x"):
        assert ask(path)[0] == 404


def test_a_file_that_is_being_replaced_is_asked_for_again(run, ask):
    whole = (run / "config.json").read_text()
    (run / "config.json").write_text(whole[:10])
    assert ask("/")[0] == 503
    (run / "config.json").write_text(whole)
    assert ask("/")[0] == 200


def test_a_port_that_is_taken_is_one_sentence(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} cannot be used .* --port 0 takes any that is free"):
            make_server(run, port)


def test_ctrl_c_ends_it_with_code_0(run):
    started = subprocess.Popen(
        [support.PYTHON, support.ROOT / "finetune/infer/dispatch.py", "watch", run, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=support.environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )
    assert started.stdout.readline().startswith("http://127.0.0.1:")
    started.send_signal(signal.SIGINT)
    rest, _ = started.communicate(timeout=600)
    assert started.returncode == 0 and not rest.strip()
