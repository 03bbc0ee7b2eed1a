"""The DeepSpeed JSON: read, checked against the flags, its "auto" fields filled in."""

import difflib
import json
from pathlib import Path

from common.config import RunConfig
from common.errors import UserError

KEYS = ("zero_optimization", "gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "data_types")
REDUCE_BUCKET = 500_000_000  # DeepSpeed's default, in values
# A model that is only evaluated or exported: one process holds it whole.
WHOLE = {"zero_optimization": {"stage": 0}}


def read_ds(path: str) -> dict:
    """The JSON as a dict; a missing or malformed file is a UserError."""
    file = Path(path)
    if not file.is_file() and not file.is_absolute():
        file = Path(__file__).resolve().parents[2] / path  # ds_configs/... from any working directory
    if not file.is_file():
        raise UserError(f"--ds {path}: no such file; the repository's own are in ds_configs/.")
    try:
        ds = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"--ds {path} is not valid JSON: {error}.") from None
    if not isinstance(ds, dict):
        raise UserError(f"--ds {path} must hold a JSON object, not a {type(ds).__name__}.")
    for key in ds:
        nearest = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if nearest and nearest != [key]:  # DeepSpeed would ignore it, and train without ZeRO
            raise UserError(f"--ds {path} has the key {key!r}, which DeepSpeed does not know: write {nearest[0]!r}.")
    return ds


def resolve_ds(path: str, config: RunConfig, world_size: int) -> dict:
    """The JSON with its "auto" fields filled in from the flags; a value that contradicts a flag is an error."""
    ds = read_ds(path)
    for section in ("bf16", "fp16", "zero_optimization", "data_types"):
        if ds.get(section) == "auto":
            del ds[section]
        if not isinstance(ds.get(section, {}), dict):
            raise UserError(f"{path} sets {section} to {json.dumps(ds[section])}; it must be an object.")
    # The recipe cuts the micro-batches, so DeepSpeed's sample count is nominal: one per micro-batch.
    owned = {
        "train_micro_batch_size_per_gpu": (1, "--micro-tokens or --micro-batch, which size the micro-batches,"),
        "gradient_accumulation_steps": (config.accumulation, f"--accumulation {config.accumulation}"),
        "train_batch_size": (config.accumulation * world_size, f"--accumulation x {world_size} ranks"),
        "gradient_clipping": (config.max_grad_norm, f"--max-grad-norm {config.max_grad_norm:g}"),
        "bf16.enabled": (config.engine_precision == "bf16", f"--precision {config.precision}"),
        "fp16.enabled": (False, f"--precision {config.precision}"),
    }
    for dotted, (value, flags) in owned.items():
        *parents, key = dotted.split(".")
        section = ds
        for parent in parents:
            section = section.setdefault(parent, {})
        if section.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"{path} sets {dotted} to {json.dumps(section[key])} but {flags} says {json.dumps(value)}: make them"
                ' agree or write "auto" in the JSON.'
            )
        section[key] = value
    for section in ("optimizer", "scheduler"):
        if ds.pop(section, "auto") != "auto":
            raise UserError(f"{path} has a section {section!r}, but the recipe and its flags set that: remove it.")
    ds = _without_auto(ds)
    for key, value in ds.get("zero_optimization", {}).items():
        wanted = (
            dict if key.startswith("offload_") else (int, float) if key.endswith(("_size", "_threshold")) else object
        )
        if not isinstance(value, wanted):
            kind = "an object" if wanted is dict else "a number"
            raise UserError(f"{path} sets zero_optimization.{key} to {json.dumps(value)}; it must be {kind}.")
    stage = ds.setdefault("zero_optimization", {}).setdefault("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"{path} sets zero_optimization.stage to {json.dumps(stage)}; it must be 0, 1, 2 or 3.")
    if config.engine_precision == "bf16":
        if stage < 2:
            lacks = "has no fp32 master weights" if stage == 0 else "adds micro-batches up in bf16"
            raise UserError(f"{path} sets ZeRO stage {stage}, which {lacks}: use stage 2 or 3, or --precision fp32.")
        # A sum in bf16 loses whatever is 256 times smaller than itself. Unless told, DeepSpeed adds up micro-batches
        # and ranks in the precision of the weights.
        types = ds.setdefault("data_types", {})
        types.setdefault("grad_accum_dtype", "fp32")
        ds.setdefault("communication_data_type", "fp32")
        # Under ZeRO-3 models are built inside zero.Init, which rounds every floating tensor to bf16: the angles of RoPE
        # would be wrong by a radian after 1000 positions.
        types.setdefault("keep_in_fp32_modules", ["inv_freq"])
    ds["zero_allow_untested_optimizer"] = True  # any optimizer that a recipe builds
    ds["steps_per_print"] = 10**9  # the recipe prints its own progress
    return ds


def _without_auto(section: dict) -> dict:
    """Drops fields that are still "auto": DeepSpeed then uses its default."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


def fit_buckets(ds: dict, trained: int, device: str) -> dict:
    """A copy with what DeepSpeed leaves to the user, unless the file sets it.

    The buffer for reducing gradients holds no more than those of all trained parameters: DeepSpeed allocates it whole,
    and twice for overlap_comm in stages 1 and 2. If all gradients fit into it, there is no reduction to overlap the
    backward pass with, and overlap_comm would make the host wait for the device in every micro-batch.
    """
    zero = dict(ds["zero_optimization"])
    bucket = zero.get("reduce_bucket_size", REDUCE_BUCKET)
    zero["reduce_bucket_size"] = max(1, min(trained, bucket))
    if zero["stage"] in (1, 2):
        zero.setdefault("overlap_comm", trained > bucket)
        if device == "cpu":  # gloo copies gradients and weights several times otherwise
            zero.setdefault("reduce_scatter", False)
            zero.setdefault("allgather_partitions", False)
    return ds | {"zero_optimization": zero}


def stage_of(ds: dict) -> int:
    return ds["zero_optimization"]["stage"]


def offloads_optimizer(ds: dict) -> bool:
    return ds["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
