"""One dataclass is the whole interface of a recipe: every field is a flag, with its default and its meaning."""

import argparse
import dataclasses
import math
import os
import sys
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args, get_origin

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # stopped early by a signal, everything saved: start the same command again to go on


class UserError(Exception):
    """The user's mistake: shown as one sentence that names the flag, file or sample, without a traceback."""


def flag(
    default,
    meaning: str,
    *,
    group: str = "recipe",
    low: float | None = None,
    high: float | None = None,
    free: bool = False,
):
    """A config field whose meaning becomes its --help text; `low` and `high` are the values it may take.

    `free`: it may change between a run and its continuation, because no number of the training depends on it.
    """
    metadata = {"help": meaning, "group": group, "low": low, "high": high, "free": free}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """The flags every recipe has; they mean the same everywhere."""

    without: ClassVar[tuple[str, ...]] = ()  # fields of this class that a recipe has no use for
    model_with_data: ClassVar[bool] = True  # false: a recipe can also train from scratch

    ds: str = flag("ds_configs/zero2.json", "DeepSpeed JSON (also --deepspeed_config)", group="run")
    model: str = flag("", "hub id or local folder; empty = the tiny demo model", group="run")
    data: str = flag("", "token dataset folder; empty = the demo corpus", group="run")
    eval_data: str = flag("", "token dataset to evaluate on; empty = none (demo: its own)", group="run")
    out: str = flag("", "run folder; empty = runs/<recipe>-<date>-<time>", group="run")
    resume: str = flag("auto", "auto = newest checkpoint in --out, never, or a checkpoint folder", group="run")
    force_resume: bool = flag(False, "go on though flags, data or owner are not the checkpoint's", group="run")
    hang_timeout: float = flag(
        1800,
        "seconds without a sign of life until each rank prints its stack and ends; 0 = off",
        group="run",
        low=0,
    )
    dry_run: bool = flag(False, "print sizes, plan and memory, take one step on the longest batch, stop", group="run")
    verify_data: bool = flag(True, "check the dataset's checksums and id ranges before training", group="run")

    steps: int = flag(0, "optimizer steps; 0 = as many as --epochs need", group="schedule", low=0)
    epochs: float = flag(1.0, "passes over the data, used when --steps is 0", group="schedule", low=0)
    lr: float = flag(1e-4, "peak learning rate", group="schedule")
    lr_floor_action: Literal["error", "warn", "default"] = flag(
        "error", "a peak --lr outside what trains: refuse it, keep it, or take the recipe's own", group="schedule"
    )
    warmup: float = flag(
        0.03, "warm-up, as a share of the steps (below 1) or in optimizer steps", group="schedule", low=0
    )
    min_lr_ratio: float = flag(0.1, "the cosine ends at this share of --lr", group="schedule", low=0, high=1)
    micro_tokens: int = flag(8192, "padded decoder positions a rank and micro-batch, at most", group="schedule", low=1)
    accumulation: int = flag(1, "micro-batches a rank and optimizer step", group="schedule", low=1)
    seed: int = flag(0, "key of every random decision", group="schedule")

    optimizer: Literal["adamw", "adamw8bit"] = flag("adamw", "adamw8bit is bitsandbytes'", group="optimizer")
    weight_decay: float = flag(0.01, "on projection matrices only; 0 = off", group="optimizer", low=0)
    clip: float = flag(1.0, "largest global gradient norm", group="optimizer", low=1e-6)
    ema: float = flag(
        0.0, "decay of the average of the trained weights; 0 = off", group="optimizer", low=0, high=0.99999
    )
    precision: Literal["bf16", "fp32"] = flag("bf16", "compute; masters and loss are fp32", group="optimizer")
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, slower", group="optimizer")
    max_skips: int = flag(3, "abort after this many non-finite steps in a row", group="optimizer", low=1)

    save_every: int = flag(500, "optimizer steps between checkpoints; 0 = only at the end", group="output", low=0)
    async_save: bool = flag(True, "write checkpoints beside the training, from a copy in memory", group="output")
    keep: int = flag(2, "newest checkpoints to keep (at least 2); the best is kept too", group="output", low=2)
    eval_every: int = flag(
        500, "optimizer steps between evaluations; 0 = only at the start and end", group="output", low=0
    )
    sample_every: int = flag(0, "optimizer steps between samples; 0 = only at the end", group="output", low=0)
    samples: int = flag(4, "texts of the evaluation data to speak at each sampling; 0 = none", group="output", low=0)
    export: bool = flag(True, "write the trained artifact at the end", group="output")

    @property
    def engine_precision(self) -> str:
        """What DeepSpeed holds the weights in."""
        return self.precision


def _add_flag(parser, item):
    names = ["--" + item.name.replace("_", "-")]
    if item.name == "ds":
        names.append("--deepspeed_config")
    default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
    options = {"dest": item.name, "default": None, "help": f"{item.metadata['help']} (default: {default!r})"}
    if item.type is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(item.type) is Literal:
        options |= {"choices": get_args(item.type), "type": type(get_args(item.type)[0])}
    elif get_origin(item.type) is list:
        options |= {"nargs": "*", "type": get_args(item.type)[0]}
    else:
        options |= {"type": item.type, "metavar": item.type.__name__.upper()}
    parser.add_argument(*names, **options)


def parse_args(config_class, doc: str, argv: list[str] | None = None, demo: dict | None = None):
    """Flags to config. Precedence: default < `demo` (when nothing of the user's own is named) < flag."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    groups = {}
    for item in dataclasses.fields(config_class):
        if item.name in config_class.without:
            continue
        title = item.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], item)
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None and k != "local_rank"}
    if not any(given.get(name) for name in ("model", "data", "diagnose")):
        given = (demo or {}) | given
    config = config_class(**given)
    from common.ds_config import resolve_ds

    try:
        check(config)
        resolve_ds(config.ds, config, int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        from common.runtime import redact

        print(redact(f"error: {error}"), file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    return config


def check(config: RunConfig) -> None:
    """Refuses what cannot train, before anything heavy is loaded."""
    if bool(config.model) != bool(config.data) and config.model_with_data:
        raise UserError("--model and --data go together: give both, or neither for the embedded demo.")
    check_peak_rate(config)
    for item in dataclasses.fields(config):
        low, high, value = item.metadata["low"], item.metadata["high"], getattr(config, item.name)
        if low is not None and not low <= value <= (math.inf if high is None else high):  # NaN is refused too
            bounds = f"{low:g} or more" if high is None else f"{low:g} .. {high:g}"
            raise UserError(f"--{item.name.replace('_', '-')} {value} is refused: it takes {bounds}.")
    if config.steps == 0 and not 0 < config.epochs < math.inf:
        raise UserError(f"--epochs {config.epochs:g} gives no steps; set --steps or --epochs above 0.")


def check_peak_rate(config: RunConfig) -> None:
    """--lr is the peak: 1e-7 is what a warm-up prints at its first step; as a peak it trains nothing."""
    low, high = 1e-6, 1e-2  # above, Adam diverges
    if low <= config.lr <= high:
        return
    usual = next(item.default for item in dataclasses.fields(config) if item.name == "lr")
    outside = f"--lr {config.lr:g} is outside {low:g} .. {high:g}"
    if config.lr_floor_action == "error" or not 0 < config.lr < math.inf:
        raise UserError(
            f"{outside}; LoRA usually takes 1e-4, full tuning 1e-5. --lr-floor-action warn keeps it,"
            f" --lr-floor-action default takes {usual:g}."
        )
    if config.lr_floor_action == "default":
        config.lr = usual
    if os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {outside}; this run takes {config.lr:g} (--lr-floor-action {config.lr_floor_action})")
