"""In the ranks (rank_server.py): what collectives send in one optimizer step."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Bytes and number of the messages of every collective, by its name."""

    def __init__(self):
        super().__init__()
        self.sizes, self.messages = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # Inputs and outputs, each a tensor or a list of lists; the larger side is the message.
            sides = [[t.numel() * t.element_size() for t in tree_leaves(side) if torch.is_tensor(t)] for side in args]
            name = func._schema.name.removeprefix("c10d::")
            self.sizes[name] += max(map(sum, sides), default=0)
            self.messages[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(module, process, note: str):
    """Counts from the end of the first optimizer step to the end of the second; the main rank writes NOTE."""
    take_step, steps = module.engine.take_step, []
    with Traffic() as traffic:

        def noting(*args):
            result = take_step(*args)
            steps.append(dict(traffic.sizes))
            return result

        module.engine.take_step = noting
        try:
            yield
        finally:
            module.engine.take_step = take_step
    sizes = {name: size - steps[0].get(name, 0) for name, size in steps[1].items()}
    if process.is_main:
        Path(note).write_text(json.dumps(sizes))
