import os

import pytest

from helpers import support

os.environ.update(support.CPU)


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
