"""Python imports this first in every process that has this folder on PYTHONPATH: it changes modules as they are
imported, so that ranks which a test starts can be changed too.

    TEST_PATCHES="torch=helpers.halts:while_saving"    calls that function with the module, right after its import
"""

import importlib
import os
import sys
from pathlib import Path

PATCHES = dict(word.split("=") for word in os.environ.get("TEST_PATCHES", "").split())


def patch(module) -> None:
    place, function = PATCHES[module.__name__].split(":")
    getattr(importlib.import_module(place), function)(module)


class Patcher:
    """Finds modules as Python's other finders do."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = execute_and_patch
        return spec


if PATCHES:
    sys.path.append(str(Path(__file__).parents[2]))
    sys.meta_path.insert(0, Patcher())
    for name in PATCHES:
        if name in sys.modules:  # in a process that was forked
            patch(sys.modules[name])
