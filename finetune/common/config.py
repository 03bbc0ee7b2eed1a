"""A recipe's flags: one dataclass, in which every field is a flag with its default and its help text.

Precedence: default < the recipe's demo values (only if neither model nor data is named) < --config FILE < flag.
"""

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, get_args, get_origin

from common.errors import EXIT_USER_ERROR, UserError, command_parser, unknown_flag

TRACKERS = ("tensorboard", "wandb")


# ---- the flags of a recipe ---------------------------------------------------------------------------------------


def flag(
    default,
    help: str,
    *,
    group: str = "recipe",
    low: float | None = None,
    high: float | None = None,
    may_change: bool = False,
):
    """A config field. `low` and `high` bound its value.

    `may_change`: the flag may differ when a run is resumed, because no number of the training depends on it.
    """
    metadata = {"help": help, "group": group, "low": low, "high": high, "may_change": may_change}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """The flags that every recipe has; they mean the same everywhere."""

    without: ClassVar[tuple[str, ...]] = ()  # fields of this class that a recipe does not offer as flags
    model_needs_data: ClassVar[bool] = True  # False: --data alone trains from scratch
    needs_pesq: ClassVar[bool] = False  # the one required package that set-up leaves out where it cannot be compiled
    given: ClassVar[frozenset[str]] = frozenset()  # of one config: the flags that the user has set

    ds: str = flag("ds_configs/zero2.json", "DeepSpeed config file", group="run", may_change=True)
    model: str = flag("", "pretrained model: hub id or local folder; empty = the tiny demo model", group="run")
    # Data is recognised by its content, so the folder may move.
    data: str = flag("", "training data: token dataset folder; empty = the demo corpus", group="run", may_change=True)
    eval_data: str = flag(
        "", "evaluation data: token dataset folder; empty = no evaluation", group="run", may_change=True
    )
    eval_split: float = flag(
        0.0,
        "hold this fraction of --data out of training and evaluate on it, instead of --eval-data; 0 = off",
        group="run",
        low=0,
        high=0.5,
    )
    eval_split_by: Literal["group", "speaker", "clip"] = flag(
        "group",
        "what --eval-split keeps together: clips with the same group, clips by the same speaker, or nothing (clip)",
        group="run",
    )
    allow_overlap: bool = flag(
        False, "allow evaluation clips that are also trained on, for memorisation tests", group="run", may_change=True
    )
    out: str = flag("", "run folder; empty = runs/<recipe>-<date>-<time>", group="run", may_change=True)
    resume: str = flag(
        "auto", "auto = newest checkpoint in --out, never, or a checkpoint folder", group="run", may_change=True
    )
    force_resume: bool = flag(
        False, "resume even if flags, data or file owner differ from the checkpoint's", group="run", may_change=True
    )
    hang_timeout: float = flag(
        1800,
        "seconds without progress after which each rank prints its stack and exits; 0 = off",
        group="run",
        low=0,
        may_change=True,
    )
    dry_run: bool = flag(
        False,
        "take one step on the longest batch, print its time and peak memory, and exit",
        group="run",
        may_change=True,
    )

    steps: int = flag(0, "optimizer steps; 0 = as many as --epochs takes", group="schedule", low=0)
    epochs: float = flag(1.0, "passes over the training data, used when --steps is 0", group="schedule", low=0)
    # 1e-7 is what a warm-up logs at its first step; as a peak it trains nothing. Above 1e-2 Adam diverges.
    lr: float = flag(1e-4, "peak learning rate", group="schedule", low=1e-6, high=1e-2)
    warmup: float = flag(
        0.03, "learning-rate warm-up: a fraction of all steps (below 1) or a number of steps", group="schedule", low=0
    )
    micro_tokens: int = flag(8192, "maximum padded positions per micro-batch on each rank", group="schedule", low=1)
    accumulation: int = flag(
        1, "gradient accumulation: micro-batches per optimizer step on each rank", group="schedule", low=1
    )
    seed: int = flag(0, "random seed", group="schedule")

    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = flag(
        "adamw",
        "adamw8bit: 8-bit optimizer states (bitsandbytes); paged_adamw8bit: also moved to host memory when the GPU is"
        " full",
        group="optimizer",
    )
    weight_decay: float = flag(0.01, "weight decay of projection matrices; 0 = off", group="optimizer", low=0)
    max_grad_norm: float = flag(1.0, "clip gradients to this global norm", group="optimizer", low=1e-6)
    ema: float = flag(
        0.0, "decay of the moving average of the trained weights; 0 = off", group="optimizer", low=0, high=0.99999
    )
    precision: Literal["bf16", "fp32"] = flag(
        "bf16", "compute precision; master weights and loss are fp32", group="optimizer"
    )
    gradient_checkpointing: bool = flag(
        False, "recompute activations in the backward pass: less memory, slower", group="optimizer"
    )

    save_every: int = flag(
        500, "optimizer steps between checkpoints; 0 = only the last", group="output", low=0, may_change=True
    )
    keep: int = flag(
        2, "number of newest checkpoints to keep (at least 2), besides the best", group="output", low=2, may_change=True
    )
    eval_every: int = flag(
        500,
        "optimizer steps between evaluations; 0 = only before and after training",
        group="output",
        low=0,
        may_change=True,
    )
    samples: int = flag(
        4, "evaluation clips to generate at every evaluation; 0 = none", group="output", low=0, may_change=True
    )
    export_check: bool = flag(
        True,
        "check the artifact: load it in a fresh process and compare its outputs with the training engine's",
        group="output",
        may_change=True,
    )
    log_every: int = flag(
        1, "optimizer steps per line of output; metrics.jsonl has every step", group="output", low=1, may_change=True
    )
    tracker: list[str] = flag(
        ["tensorboard"], f"where to log besides metrics.jsonl: {' '.join(TRACKERS)}", group="output",
        may_change=True,
    )  # fmt: skip

    @property
    def eval_source(self) -> str:
        """The dataset that holds the evaluation clips; empty = there are none."""
        return self.eval_data or (self.data if self.eval_split else "")

    @property
    def engine_precision(self) -> str:
        """What DeepSpeed holds the weights in."""
        return self.precision


# The Hugging Face Trainer's names, for those who have them in their fingers. Value: our field, or field=constant.
HF_ALIASES = {
    "learning-rate": "lr",
    "num-train-epochs": "epochs",
    "max-steps": "steps",
    "gradient-accumulation-steps": "accumulation",
    "warmup-steps": "warmup",
    "warmup-ratio": "warmup",
    "save-steps": "save_every",
    "eval-steps": "eval_every",
    "save-total-limit": "keep",
    "output-dir": "out",
    "resume-from-checkpoint": "resume",
    "bf16": "precision",
}
# What a repeated run must not take over from the config.json of the first: it would resume that run, or only test it.
NOT_REPEATED = ("out", "resume", "force_resume", "dry_run")


def parse_args(config_class, doc: str, argv: list[str] | None = None, demo: dict | None = None):
    """The recipe's config from the command line; ends the process with a one-sentence error on a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(config_class, doc)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            raise UserError(unknown_flag(unknown[0], parser))
        given = {k: v for k, v in vars(args).items() if v is not None and k not in ("local_rank", "config")}
        if args.config:
            given = read_config_file(args.config, config_class) | given
        set_by_user = frozenset(given)
        if not given.get("model") and not given.get("data"):
            given = (demo or {}) | given
        config = config_class(**given)
        config.given = set_by_user
        check(config)
        from common.ds_config import resolve_ds
        from common.runtime import world_size

        resolve_ds(config.ds, config, world_size())
    except UserError as error:
        from common.runtime import redact

        print(redact(f"error: {error}"), file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    return config


def build_parser(config_class, doc: str) -> argparse.ArgumentParser:
    parser = command_parser(doc)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    fields = flags_of(config_class)
    titles = dict.fromkeys(item.metadata["group"] for item in fields.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    groups["run"].add_argument(
        "--config", metavar="FILE", help="read flags from a YAML file or a run's config.json; flags given here win"
    )
    for item in fields.values():
        default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
        names = ["--" + item.name.replace("_", "-")] + (["--deepspeed_config"] if item.name == "ds" else [])
        help = f"{item.metadata['help']} (default: {default!r})"
        groups[item.metadata["group"]].add_argument(*names, dest=item.name, default=None, help=help, **_kind(item))
    aliases = parser.add_argument_group("the Hugging Face Trainer's names for some of the flags above")
    for name, target in HF_ALIASES.items():
        if target in fields:
            same_as = f"same as --{target.replace('_', '-')}" + (" bf16" if name == "bf16" else "")
            kind = {"action": "store_const", "const": "bf16"} if name == "bf16" else _kind(fields[target])
            aliases.add_argument(f"--{name}", dest=target, default=None, help=same_as, **kind)
    return parser


def parse_words(config_class, words: list[str]) -> dict:
    """The recipe's flags among these words of a command line, for commands that take them besides their own."""
    parser = build_parser(config_class, "")
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(unknown_flag(unknown[0], parser))
    if found.config:
        raise UserError("--config is for training; this command takes the flags themselves.")
    return {name: value for name, value in vars(found).items() if value is not None}


def flags_of(config_class) -> dict[str, dataclasses.Field]:
    return {item.name: item for item in dataclasses.fields(config_class) if item.name not in config_class.without}


def _kind(item: dataclasses.Field) -> dict:
    """How argparse reads a field of this type."""
    if item.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(item.type) is Literal:
        return {"choices": get_args(item.type), "type": type(get_args(item.type)[0])}
    if get_origin(item.type) is list:
        return {"nargs": "*", "type": get_args(item.type)[0]}
    return {"type": item.type, "metavar": item.type.__name__.upper()}


def read_config_file(path: str, config_class) -> dict:
    """Flags from a YAML or JSON file, or from the config.json of a run, which repeats that run in a new folder."""
    import yaml

    from common.runtime import say, world_size

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold flags and their values, one per line, such as `lr: 1e-4`.")
    if isinstance(content.get("config"), dict) and "recipe" in content:
        recipe = Path(sys.modules[config_class.__module__].__file__).stem
        if content["recipe"] != recipe:
            raise UserError(f"--config {path} belongs to a {content['recipe']} run, not to {recipe}.")
        if content.get("ranks", world_size()) != world_size():
            say(f"warning: {path} ran on {content['ranks']} ranks, this run has {world_size()}: losses may differ")
        content = {name: value for name, value in content["config"].items() if name not in NOT_REPEATED}
    fields, flags = flags_of(config_class), {}
    for name, value in content.items():
        item = fields.get(str(name).replace("-", "_"))
        if item is None:
            if any(f.name == name for f in dataclasses.fields(config_class)):
                continue  # config.json also holds the fields that are no flags of this recipe
            raise UserError(f"--config {path}: {unknown_flag(f'--{name}', build_parser(config_class, ''))}")
        flags[item.name] = _value(item, value, path)
    return flags


def _value(item: dataclasses.Field, value, path: str):
    """A value of a config file as the field's type. YAML reads 1e-4 as text: it wants 1.0e-4."""
    kind = _kind(item)
    try:
        if item.type is bool:
            if not isinstance(value, bool):
                raise ValueError
            return value
        if isinstance(value, (dict, bool)) or value is None or isinstance(value, list) != ("nargs" in kind):
            raise ValueError
        if "nargs" in kind:
            return [kind["type"](each) for each in value]
        if kind["type"] is int and float(value) != int(float(value)):
            raise ValueError
        converted = kind["type"](value)
        if converted not in kind.get("choices", [converted]):
            raise ValueError
        return converted
    except (TypeError, ValueError):
        takes = (
            " or ".join(map(str, kind["choices"])) if "choices" in kind else getattr(item.type, "__name__", item.type)
        )
        raise UserError(f"--config {path}: {item.name} is {json.dumps(value)}; it takes {takes}.") from None


def check(config: RunConfig) -> None:
    """Refuses what cannot train, before anything heavy is loaded."""
    if config.needs_pesq and find_spec("pesq") is None:
        raise UserError(
            "the package pesq is not installed: install a C compiler and Python's headers (Debian: apt-get install"
            f" build-essential python3-dev), then run {sys.executable} -m pip install pesq==0.0.4"
        )
    if bool(config.model) != bool(config.data) and config.model_needs_data:
        raise UserError("--model and --data go together: give both, or neither for the embedded demo.")
    for item in dataclasses.fields(config):
        low, high, value = item.metadata["low"], item.metadata["high"], getattr(config, item.name)
        if low is not None and not low <= value <= (math.inf if high is None else high):  # refuses NaN too
            bounds = f"{low:g} or more" if high is None else f"{low:g} to {high:g}"
            raise UserError(f"--{item.name.replace('_', '-')} {value} is out of range: it takes {bounds}.")
    for name in config.tracker:
        if name not in TRACKERS:
            raise UserError(f"--tracker {name}: it takes {', '.join(TRACKERS)}.")
        if find_spec(name) is None:
            raise UserError(f"--tracker {name}: the package {name} is not installed (pip install {name}).")
    if config.eval_split and (config.eval_data or not config.data):
        raise UserError("--eval-split divides --data: it needs --data, and takes the place of --eval-data.")
    if config.steps == 0 and not 0 < config.epochs < math.inf:
        raise UserError(f"--epochs {config.epochs:g} gives no steps; set --steps or --epochs above 0.")
