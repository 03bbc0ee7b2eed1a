"""--fit: the fastest settings whose predicted memory leaves a tenth of the card free."""

import contextlib
import dataclasses
import io
import math
import re

from common.config import RunConfig
from common.ds_config import resolve_ds
from common.errors import UserError
from common.runtime import Process, say, still_alive

ROOM = 0.9  # of the card: CUDA itself and the allocator's fragments take the rest
FILES = ("zero2", "zero3", "zero2_offload", "zero3_offload")  # in ds_configs/, from fast to frugal
# DeepSpeed file and precision of a frozen base, from fast to frugal. A quantised base trains worse than a whole one,
# and much faster than weights that come from host memory for every layer.
ROUTES = [*((file, "none") for file in FILES[:3]), ("zero2", "8bit"), ("zero2", "4bit"), (FILES[3], "none")]
BUSY = 2048  # positions below which a micro-batch no longer keeps a GPU busy; checkpointing then costs less


def card_bytes(text: str) -> int:
    """The memory that --fit names."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:GB?|GiB)?", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise UserError(f"--fit {text}: write the memory of one GPU, such as 24GB.")
    return int(float(match[1]) * 2**30)


def fit(config, train, process: Process):
    """The config with --ds, --quantize, --gradient-checkpointing, --micro-tokens and --accumulation chosen for --fit.

    What the user has set stays. `train(config, process, ds)` is the recipe's: with --world it only predicts.
    """
    if not config.fit:
        return config
    if not getattr(config, "deepspeed", True):
        raise UserError("--fit chooses a DeepSpeed config: use it without --no-deepspeed.")
    room, world, batches = ROOM * card_bytes(config.fit), config.world or process.world, _batches(config)
    found, known = [], {}  # bytes of states by route; activations by batch, which are the same on every route

    def settings(route: dict, batch: dict):
        return dataclasses.replace(config, world=world, **route, **batch)

    def activations(route: dict, batch: dict) -> float:
        key = (*batch.values(),)
        if key not in known:
            try:
                known[key] = _predict(train, settings(route, batch), process).activations
            except UserError:  # the longest clip does not fit into so few positions
                known[key] = math.inf
        return known[key]

    for route in _routes(config):
        first = settings(route, batches[0])
        try:
            paper = _predict(train, first, process)
        except UserError:
            if not found:
                raise  # the user's own settings are wrong
            continue  # the recipe cannot train this way
        known[(*batches[0].values(),)] = paper.activations
        need = paper.need(first.ds)
        states = need["device"] + need["working"]
        found.append((states, route))
        for batch in batches if states <= room else []:
            on_gpu = states + activations(route, batch)
            if on_gpu <= room:
                say(f"--fit {config.fit}: {_flags(settings(route, batch))}; predicted {on_gpu / 2**30:.2f} GB per GPU"
                    f" on {world} rank(s), and {need['host'] / 2**30:.2f} GB of host memory for each")  # fmt: skip
                return dataclasses.replace(config, **route, **batch)
    states, route = min(found, key=lambda pair: pair[0])
    batch = min(batches, key=lambda batch: activations(route, batch))
    raise UserError(
        f"--fit {config.fit}: nothing fits on {world} rank(s) with a tenth of the card left free; the smallest"
        f" prediction is {(states + activations(route, batch)) / 2**30:.2f} GB per GPU, with"
        f" {_flags(settings(route, batch))}."
    )


def _routes(config: RunConfig) -> list[dict]:
    """--ds and, where the recipe has it, --quantize: from fast to frugal."""
    routes = []
    for file, quantize in ROUTES:
        route = {"ds": f"ds_configs/{file}.json"} | ({"quantize": quantize} if hasattr(config, "quantize") else {})
        route |= {name: getattr(config, name) for name in route if name in config.given}
        if "offload" in route["ds"] and config.optimizer != "adamw" and "ds" not in config.given:
            continue  # only AdamW runs in host memory
        routes.append(route)
    return [route for i, route in enumerate(routes) if route not in routes[:i]]


def _batches(config: RunConfig) -> list[dict]:
    """--gradient-checkpointing, --micro-tokens and --accumulation: from fast to frugal, with the same positions per
    optimizer step."""
    is_given = {"micro_tokens", "accumulation"} & set(config.given)
    parts = [1] if is_given else [2**i for i in range(config.micro_tokens.bit_length())]
    batches = []
    for checkpointing in (False, True):
        if "gradient_checkpointing" in config.given and checkpointing != config.gradient_checkpointing:
            continue
        for part in parts:
            micro_tokens = config.micro_tokens // part
            if part == 1 or checkpointing or micro_tokens >= BUSY:
                batch = {"micro_tokens": micro_tokens, "accumulation": config.accumulation * part}
                batches.append({"gradient_checkpointing": checkpointing, **batch})
    return batches


def _predict(train, config: RunConfig, process: Process):
    """What `train` predicts for these settings, without its output: the run prints it again."""
    still_alive()
    with contextlib.redirect_stdout(io.StringIO()):
        return train(config, process, resolve_ds(config.ds, config, config.world))


def _flags(config: RunConfig) -> str:
    words = [f"--ds {config.ds}"]
    if hasattr(config, "quantize"):
        words.append(f"--quantize {config.quantize}")
    words.append("--gradient-checkpointing" if config.gradient_checkpointing else "--no-gradient-checkpointing")
    return " ".join([*words, f"--micro-tokens {config.micro_tokens} --accumulation {config.accumulation}"])
