"""Checkpoints that are whole or absent: temporary name, fsync, checksums, rename, then an entry in index.json.

index.json is the only source of truth for resume and retention: a folder that it does not list is never loaded and
never deleted.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from common import elastic
from common.config import UserError
from common.runtime import Ranks, from_first, on_first, say

TAG = "state"
NAME = re.compile(r"step-\d{8,}")
SHAPE = {"ranks", "zero_stage", "accumulation"}  # what may change between a run and its continuation, within limits


def allow_list() -> None:
    """The only classes, beside tensors and plain containers, that DeepSpeed's own shards hold."""
    if sys.modules.get("deepspeed") is None:
        return  # a run without it has no shards
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def write_json(path: Path, value) -> None:
    """Replaces a JSON file in one durable move."""
    draft = path.with_name(f".{path.name}.tmp")
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(folder: Path) -> list[dict]:
    """The complete checkpoints, oldest first."""
    path = folder / "index.json"
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        for entry in entries:
            # Only our own names: retention deletes what is listed, which must not lead out of this folder.
            if not NAME.fullmatch(entry["name"]) or not {"step", "score"} <= set(entry):
                raise ValueError(entry)
        return entries
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; move it away to start over, or name a checkpoint with --resume.") from None


def save(
    folder: Path, engine, state: dict, average, ranks: Ranks, keep: int, score: float | None, mine: dict | None = None
) -> Path:
    """Writes step `state["step"]`; `score` (smaller is better) protects the best one from retention.

    `engine`: one, or a dict of several by name. `mine`: tensors that only this rank holds.
    """
    name = f"step-{state['step']:08d}"
    draft, final = folder / f".{name}.tmp", folder / name
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    _barrier(ranks)
    for tag, part in _by_tag(engine).items():
        part.save_checkpoint(str(draft), tag=tag, client_state={}, save_latest=False, exclude_frozen_parameters=True)
    if mine is not None:
        torch.save(mine, draft / f"rank-{ranks.rank:05d}.pt")
    if average.decay:
        torch.save(average.shadow, draft / f"average-{ranks.rank:05d}.pt")
    _barrier(ranks)
    if ranks.first:
        write_json(draft / "trainer_state.json", state)
        files = sorted(path for path in draft.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(draft)): _sha256(path) for path in files}
        for path in [*files, *(p for p in draft.rglob("*") if p.is_dir())]:
            _sync(path)
        write_json(draft / "manifest.json", manifest)
        entries = [entry for entry in read_index(folder) if entry["name"] != name]
        if final.exists():  # the same step again, after a resume from an older checkpoint
            write_json(folder / "index.json", {"checkpoints": entries})
            shutil.rmtree(final)
        os.replace(draft, final)
        _sync(folder)
        entries.append({"name": name, "step": state["step"], "score": score})
        _retain(folder, entries, keep)
    _barrier(ranks)
    return final


def _by_tag(engine) -> dict:
    return engine if isinstance(engine, dict) else {TAG: engine}


def _retain(folder: Path, entries: list[dict], keep: int) -> None:
    """Keeps the newest `keep` and the best; the index forgets a folder before it is deleted."""
    scored = [entry for entry in entries if entry["score"] is not None and math.isfinite(entry["score"])]
    kept = {entry["name"] for entry in entries[-keep:]}
    if scored:
        kept.add(min(scored, key=lambda entry: entry["score"])["name"])
    write_json(folder / "index.json", {"checkpoints": [entry for entry in entries if entry["name"] in kept]})
    for entry in entries:
        if entry["name"] not in kept:
            shutil.rmtree(folder / entry["name"], ignore_errors=True)
            say(f"removed checkpoint {folder / entry['name']}")


def choose(resume: str, folder: Path, ranks: Ranks) -> Path | None:
    """The checkpoint to go on from, the same on every rank; None to start afresh."""
    entries = on_first(lambda: read_index(folder), ranks)
    if resume == "never":
        if entries:
            raise UserError(f"{folder} already holds checkpoints: choose another --out, or --resume auto to go on.")
        return None
    if resume == "auto":
        return folder / entries[-1]["name"] if entries else None
    path = Path(resume)
    if not (path / "manifest.json").is_file():
        raise UserError(f"--resume {resume} is not a complete checkpoint (no manifest.json in it).")
    return path


def load(path: Path, engine, average, ranks: Ranks, identity: dict) -> dict:
    """Restores the engine and returns the trainer state. Refuses damage, and a run that is not the same."""
    damage = from_first(_damage(path) if ranks.first else None, ranks)
    if damage:
        raise UserError(f"checkpoint {path} is damaged ({damage}): remove it from index.json or name another.")
    state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    then = state["identity"]
    changed = {
        key: f"{key}: {then.get(key)!r} then, {now!r} now" for key, now in identity.items() if then.get(key) != now
    }
    if set(changed) - SHAPE:
        raise UserError(f"checkpoint {path} is of another run ({'; '.join(changed.values())}): use another --out.")
    allow_list()
    if changed:
        _refuse_other_steps(path, then, identity)
        if isinstance(engine, dict):  # the buffers of its networks would have to be cut and joined too
            words = "; ".join(changed.values())
            raise UserError(f"checkpoint {path} has another shape ({words}), in which this recipe cannot go on.")
        say(f"the run changes its shape ({'; '.join(changed.values())})")
        _load_reshaped(path, engine, average, ranks)
        engine.global_steps = state["step"]
        return state
    for tag, part in _by_tag(engine).items():
        loaded, _ = part.load_checkpoint(str(path), tag=tag, load_module_strict=False, load_lr_scheduler_states=False)
        if loaded is None:
            raise UserError(f"DeepSpeed found no state in checkpoint {path}.")
    if average.decay:
        shadow = torch.load(path / f"average-{ranks.rank:05d}.pt", map_location="cpu", weights_only=True)
        for mine, saved in zip(average.shadow, shadow, strict=True):
            mine.copy_(saved)
    return state


def _refuse_other_steps(path: Path, then: dict, now: dict) -> None:
    """Other ranks are fine if an optimizer step still holds the same micro-batches, and all states can be cut anew."""
    sizes = [identity["ranks"] * identity["accumulation"] for identity in (then, now)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"checkpoint {path}: ranks x --accumulation was {sizes[0]} and is {sizes[1]}; keep the product, so that"
            " every step trains the same micro-batches."
        )
    if now["optimizer"] != "adamw":
        raise UserError(f"checkpoint {path}: --optimizer {now['optimizer']} cannot go on with other ranks or stages.")
    if 0 in (then["zero_stage"], now["zero_stage"]):
        raise UserError(f"checkpoint {path}: ZeRO-0 checkpoints go on with ZeRO-0 and as many ranks only.")


def _load_reshaped(path: Path, engine, average, ranks: Ranks) -> None:
    scratch = path.parent / f".{path.name}.universal.tmp"
    on_first(lambda: elastic.convert(path, TAG, scratch, bool(average.decay)), ranks)
    elastic.load(scratch, engine, average)
    _barrier(ranks)
    if ranks.first:
        shutil.rmtree(scratch)


def masters(path: Path) -> dict[str, torch.Tensor]:
    """The trained fp32 weights of a checkpoint, whole, by their names in the recipe's model; in any one process."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    damage = _damage(path)
    if damage:
        raise UserError(f"checkpoint {path} is damaged ({damage}).")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    allow_list()
    weights = get_fp32_state_dict_from_zero_checkpoint(str(path), TAG, exclude_frozen_parameters=True)
    return {name.removeprefix("model."): value.clone() for name, value in weights.items()}


def load_mine(path: Path, ranks: Ranks) -> dict:
    """What `save` was given as this rank's own."""
    return torch.load(path / f"rank-{ranks.rank:05d}.pt", map_location="cpu", weights_only=True)


def _damage(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "manifest.json cannot be read"
    if not isinstance(manifest, dict) or "trainer_state.json" not in manifest:
        return "manifest.json does not list its files"
    for name, digest in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != digest:
            return f"the checksum of {name} is wrong"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _barrier(ranks: Ranks) -> None:
    if ranks.world > 1:
        dist.barrier()
