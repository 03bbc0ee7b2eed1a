import os
import threading

import pytest

from helpers import support

os.environ.update(support.CPU)


# ---- quick and long --------------------------------------------------------------------------------------------
# ./launch.sh test runs the quick tests, ./launch.sh test --long all others. A test that starts ranks is long unless it
# is marked quick; any other test is quick unless it is marked long. Tests named on the command line always run.

REMINDER_SECONDS = 60


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long tests instead of the quick ones")


def is_long(item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "long" in marks or (bool(marks & {"distributed", "fault"}) and "quick" not in marks)


def pytest_collection_modifyitems(config, items):
    config.deselected_long = 0
    if config.args_source.name == "ARGS":
        return
    chosen = [item for item in items if is_long(item) == config.getoption("--long")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    config.deselected_long = 0 if config.getoption("--long") else len(items) - len(chosen)
    items[:] = chosen


def pytest_terminal_summary(terminalreporter, config):
    """The last lines: what was not run, why, and how to run it."""
    reasons = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "skipped"
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    if config.deselected_long:
        terminalreporter.write_line(f"{config.deselected_long} long tests were not run: ./launch.sh test --long")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Says which test is still running when one takes long."""
    writer, done = item.config.pluginmanager.get_plugin("terminalreporter"), threading.Event()

    def remind():
        seconds = 0
        while not done.wait(REMINDER_SECONDS):
            seconds += REMINDER_SECONDS
            writer.write_line(f"  ... {seconds} s in {item.nodeid}")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        return (yield)
    finally:
        done.set()


# ---- fixtures --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_stop_wanted(monkeypatch):
    """A failed save asks its process to stop; the next test trains in the same process."""
    from common import runtime

    monkeypatch.setattr(runtime, "_stop_wanted", False)


@pytest.fixture(scope="session")
def higgs_demo():
    """The same for Higgs Audio v2."""
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-higgs", "higgs")


@pytest.fixture(scope="session")
def demo():
    """The embedded demo's model, codec and token datasets, built once where the recipes look for them."""
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-dia")


@pytest.fixture(scope="session")
def pairs():
    """The enhancers' demo pairs, with little noise."""
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-pairs", "pairs") / "mild"


@pytest.fixture(scope="session")
def demo_mot():
    """The same for Llama MoT."""
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-mot", "mot")


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
