import os
import random
import threading
import time

import pytest

import common.runtime  # noqa: F401  sets what torch reads from the environment
from helpers import process_state, support

os.environ.update(support.CPU)


# ---- quick and long --------------------------------------------------------------------------------------------
# ./launch.sh test runs the quick tests, ./launch.sh test --long all others. A test that starts ranks is long unless it
# is marked quick; any other test is quick unless it is marked long. Tests named on the command line always run.
#
# launch.sh starts workers (pytest-xdist), each of which runs whole files: their fixtures are made once.

REMINDER_SECONDS = 60
LONGEST = ("test_multinode.py", "test_demo_speech.py", "test_demo_clone.py", "test_demo_music.py")
LONGEST += ("test_dia_lora_faults.py", "test_docs.py")
TRAINING = ("recipes", "tests", "diffusion_buffer")  # folders whose tests train, or start commands


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long tests instead of the quick ones")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of a file, in chance order")


def starts_ranks(item) -> bool:
    return any(mark.name in ("distributed", "fault") for mark in item.iter_markers())


def is_long(item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "long" in marks or (starts_ranks(item) and "quick" not in marks)


def pytest_collection_modifyitems(config, items):
    config.deselected_long = 0
    if config.args_source.name != "ARGS":
        choose(config, items)
    if config.getoption("--shuffle") is not None:
        shuffle(items, config.getoption("--shuffle"))


def shuffle(items, seed: int) -> None:
    """Tests of one file stay together, because they share what is costly to make. Every worker has the same order."""
    chance = random.Random(seed)
    chance.shuffle(items)
    files = list(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: files.index(item.path))


def choose(config, items) -> None:
    chosen = [item for item in items if is_long(item) == config.getoption("--long")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    config.deselected_long = 0 if config.getoption("--long") else len(items) - len(chosen)
    # Files that take longest come first: in the other order one worker would be left with one of them at the end.
    items[:] = sorted(chosen, key=place_in_order)


def place_in_order(item) -> tuple[bool, bool, bool]:
    return item.path.name not in LONGEST, not starts_ranks(item), item.path.parent.name not in TRAINING


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["deselected_long"] = session.config.deselected_long


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.deselected_long = getattr(node, "workeroutput", {}).get("deselected_long", 0)  # none after a crash


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter, config):
    """The last lines: what was not run, why, and how to run it."""
    yield
    reasons = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "skipped"
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if getattr(config, "deselected_long", 0):
        terminalreporter.write_line(f"{config.deselected_long} long tests were not run: ./launch.sh test --long")


# ---- signs of life ---------------------------------------------------------------------------------------------

RUNNING = {}  # the tests that run now, and since when


def pytest_runtest_logstart(nodeid):
    RUNNING[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid):
    RUNNING.pop(nodeid, None)


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        threading.Thread(target=remind, args=(session.config,), daemon=True).start()


def remind(config) -> None:
    """Says which tests are still running when one takes long."""
    while True:
        time.sleep(REMINDER_SECONDS)
        for nodeid, began in list(RUNNING.items()):
            if (seconds := time.monotonic() - began) >= REMINDER_SECONDS:
                config.pluginmanager.get_plugin("terminalreporter").write_line(f"  ... {seconds:.0f} s in {nodeid}")


# ---- what a failed test leaves -----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the last lines of the ranks that it started, and says where their output and its own files
    are: pytest keeps the folders of the last three sessions."""
    report = yield
    if report.failed:
        for rank in support.STARTED[-4:]:
            tail = rank.output.read_text(errors="replace")[-3000:]
            report.sections.append((f"end of {rank.output}", tail))
        if folder := getattr(item, "funcargs", {}).get("tmp_path"):
            report.sections.append(("files of the test", str(folder)))
    if call.when == "teardown":
        support.STARTED.clear()
    return report


# ---- fixtures --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def file_leaves_nothing():
    """Which files share a process is chance: what the fixtures of one change does not outlive it."""
    with process_state.unchanged():
        yield


@pytest.fixture(autouse=True)
def test_leaves_nothing():
    """Nothing that a test does to its process outlives it: the test that changes something is the one that fails."""
    with process_state.unchanged():
        yield


@pytest.fixture
def restored(test_leaves_nothing):
    """For tests that build a ZeRO-3 engine or call what sets up a process: what they change is put back."""
    with process_state.restored():
        yield


@pytest.fixture(scope="module")
def only_rank(file_leaves_nothing):
    """This process as the only rank of a process group, until the end of the file."""
    from common.runtime import init_process

    with process_state.restored():
        os.environ["MASTER_PORT"] = support.free_port()
        yield init_process()


@pytest.fixture(autouse=True)
def seeded(test_leaves_nothing):
    """Chance weights are the same whatever ran before, and in whichever worker."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def no_export_check(test_leaves_nothing, monkeypatch):
    """A run that a test trains in its own process does not start another one; test_export_check.py undoes this."""
    from common import export_check

    monkeypatch.setattr(export_check, "require_same", lambda *_: None)


@pytest.fixture(autouse=True)
def no_stop_wanted(test_leaves_nothing, monkeypatch):
    """A failed save asks its process to stop; the next test trains in the same process."""
    from common import runtime

    monkeypatch.setattr(runtime, "_stop_wanted", False)


def ensure_demo(folder: str, *kind: str):
    from demo import ensure_demo

    with process_state.restored():
        return ensure_demo(support.ROOT / "runs" / folder, *kind)


@pytest.fixture(scope="session")
def demo():
    """The embedded demo's model, codec and token datasets, built once where the recipes look for them."""
    return ensure_demo("demo-assets-dia")


@pytest.fixture(scope="session")
def higgs_demo():
    """The same for Higgs Audio v2."""
    return ensure_demo("demo-assets-higgs", "higgs")


@pytest.fixture(scope="session")
def demo_mot():
    """The same for Llama MoT."""
    return ensure_demo("demo-assets-mot", "mot")


@pytest.fixture(scope="session")
def pairs():
    """The enhancers' demo pairs, with little noise."""
    return ensure_demo("demo-assets-pairs", "pairs") / "mild"


@pytest.fixture(scope="session")
def two_ranks():
    """Two ranks that train whatever a test asks for, started once."""
    from helpers.rank_server import RankServer

    server = RankServer(2)
    yield server
    server.close()


@pytest.fixture(scope="session")
def one_rank_alone():
    """The same with a single rank."""
    from helpers.rank_server import RankServer

    server = RankServer(1)
    yield server
    server.close()
