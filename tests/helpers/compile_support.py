"""In a rank: torch's compiler, without what makes it slow."""

from contextlib import contextmanager


@contextmanager
def scalar_code(*_):
    """The C++ that torch writes uses no vector types, whose headers take most of the time of compiling it."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1}):
        yield
