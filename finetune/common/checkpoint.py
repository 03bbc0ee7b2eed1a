"""Checkpoints that are whole or absent: temporary name, fsync, checksums, rename, then an entry in index.json.

index.json is the only source of truth for resume and retention: a folder that it does not list is never loaded and
never deleted. What is loaded has its checksums right; `auto` goes back to the newest one of which that is true.
"""

import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from common import reshard as elastic
from common.config import UserError
from common.runtime import Ranks, all_sum, free_memory, from_first, gather_names, on_first, redact, request_stop, say

TAG = "state"
NAME = re.compile(r"step-\d{8,}")
SEEN_SECONDS = 120.0  # until what one node wrote must be seen by another; NFS takes up to a minute
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
        stream.write(redact(json.dumps(value, indent=2)) + "\n")
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
    if not path.is_file():  # lost, or the first one was killed between its rename and this file
        names = sorted(p.parent.name for p in folder.glob("step-*/manifest.json") if NAME.fullmatch(p.parent.name))
        return [{"name": name, "step": int(name.removeprefix("step-")), "score": None} for name in names]
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
    folder: Path,
    engine,
    state: dict,
    average,
    ranks: Ranks,
    keep: int,
    score: float | None,
    mine: dict | None = None,
    background: bool = False,
) -> "Pending":
    """Writes step `state["step"]`; `score` (smaller is better) protects the best one from retention.

    `engine`: one, or a dict of several by name. `mine`: tensors that only this rank holds. `background`: copies
    everything in memory and returns; nothing is saved before the result's `wait`, which every rank must call.
    """
    final = folder / f"step-{state['step']:08d}"
    draft = folder / f".{final.name}.tmp"
    on_first(lambda: _start_draft(draft), ranks)
    files = _collect(engine, draft)
    if mine is not None:
        files[f"rank-{ranks.rank:05d}.pt"] = mine
    if average.decay:
        files[f"average-{ranks.rank:05d}.pt"] = average.shadow
    size = sum(value.nbytes for value in tree_leaves(files) if isinstance(value, torch.Tensor))
    # The copies of all ranks of this machine must fit beside the training.
    cramped = free_memory() < 1.2 * size * int(os.environ.get("LOCAL_SIZE", 1))
    total, cramped = all_sum([size, float(cramped)], ranks)
    on_first(lambda: _check_space(final, draft, total), ranks)
    background = background and not cramped
    # Beside the training everything is copied first; otherwise a file at a time.
    copied, files = (lambda tree: tree, _host_copy(files)) if background else (_host_copy, files)
    pending = Pending(final, draft, ranks)
    publish = functools.partial(_publish, pending, copy.deepcopy(state), keep, score)
    pending.thread = threading.Thread(target=_write, args=(pending, files, copied, publish), name="checkpoint")
    pending.thread.start()
    if not background:
        pending.wait()
    return pending


class Pending:
    """A checkpoint on its way to the disk, by a thread of each rank. The threads use no collective, which would mix
    with the training's: they leave their word in the draft, and the first rank's thread publishes it."""

    def __init__(self, path: Path, draft: Path, ranks: Ranks):
        self.path, self.draft, self.ranks = path, draft, ranks
        self.written, self.abandoned = threading.Event(), threading.Event()
        self.written_by_all = math.inf  # since when that is known
        self.error = ""

    def wait(self) -> None:
        """Returns when the checkpoint is listed; a user's error on all ranks when some rank could not write it."""
        self.written.wait()
        errors = gather_names([self.error] if self.error else [], self.ranks)
        if errors:
            self.abandoned.set()
        self.written_by_all = time.monotonic()
        self.thread.join()
        errors = errors or from_first([self.error] if self.error else [], self.ranks)
        if errors:
            if self.ranks.first:
                shutil.rmtree(self.draft, ignore_errors=True)
            raise UserError(f"checkpoint {self.path} could not be written ({errors[0]}); the older ones are intact.")


def _start_draft(draft: Path) -> None:
    """An empty draft; others are what a kill left behind, since only one checkpoint is written at a time."""
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        for old in draft.parent.glob(".step-*.tmp"):
            shutil.rmtree(old)
        draft.mkdir()
    except OSError as error:
        raise UserError(f"--out: no checkpoint can be written to {draft.parent} ({error.strerror}).") from None


def _check_space(final: Path, draft: Path, size: float) -> None:
    free = shutil.disk_usage(draft).free
    need = 1.1 * size + 2**20  # names, shapes and the state beside the tensors
    if free < need:
        shutil.rmtree(draft)
        raise UserError(
            f"checkpoint {final} needs {need / 2**20:,.1f} MB and {free / 2**20:,.1f} MB are free: make room, or lower"
            " --keep; the older ones are intact."
        )


def _collect(engine, draft: Path) -> dict:
    """What this rank's engines would write, by file name in the draft."""
    base, files = object, {}
    if sys.modules.get("deepspeed"):  # or a run without it
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine as base

    class Collector(base):
        def save(self, state_dict, path):
            files[str(Path(path).relative_to(draft))] = state_dict

    for tag, part in _by_tag(engine).items():
        own, part.checkpoint_engine = part.checkpoint_engine, Collector()
        try:
            part.save_checkpoint(
                str(draft), tag=tag, client_state={}, save_latest=False, exclude_frozen_parameters=True
            )
        finally:
            part.checkpoint_engine = own
    return files


def _host_copy(tree):
    """The same with every tensor copied; only what a tensor shows of its storage, which may be a whole flat buffer."""

    def is_shape(value) -> bool:
        return isinstance(value, torch.Size)  # would become a plain tuple, which DeepSpeed's converters do not take

    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree, is_leaf=is_shape)


def _write(pending: Pending, files: dict, copied, publish) -> None:
    try:
        digests = {}
        for name in sorted(files):
            with open(pending.draft / name, "wb") as stream:
                torch.save(copied(files.pop(name)), stream)
                stream.flush()
                os.fsync(stream.fileno())
            digests[name] = _sha256(pending.draft / name)
        write_json(pending.draft / f"done-{pending.ranks.rank:05d}.json", digests)
        pending.written.set()
        if pending.ranks.first:
            publish()
    except Exception as error:  # whatever it is, it must not die with this thread
        pending.error = str(error) or repr(error)
        request_stop()  # all ranks stop at the same step, and learn why when they wait
        with contextlib.suppress(OSError):  # not even the folder may be left
            free = shutil.disk_usage(pending.draft.parent).free
            pending.error += f"; {free / 2**20:,.1f} MB are free"
    finally:
        pending.written.set()


def _publish(pending: Pending, state: dict, keep: int, score: float | None) -> None:
    """When all ranks have written: checksums, rename, index."""
    draft, final = pending.draft, pending.path
    words = [draft / f"done-{rank:05d}.json" for rank in range(pending.ranks.world)]
    while not all(word.exists() for word in words):
        if pending.abandoned.wait(0.02):
            return
        if time.monotonic() > pending.written_by_all + SEEN_SECONDS:
            raise OSError("the first rank does not see what the others wrote: all nodes must share --out")
    write_json(draft / "trainer_state.json", state)
    manifest = {}
    for word in words:
        manifest |= json.loads(word.read_text(encoding="utf-8"))
        word.unlink()
    for path in sorted(draft.rglob("*")):
        name = str(path.relative_to(draft))
        if name not in manifest:  # folders, and what no rank has written, flushed and summed itself
            if path.is_file():
                manifest[name] = _sha256(path)
            _sync(path)
    write_json(draft / "manifest.json", manifest)
    entries = [entry for entry in read_index(final.parent) if entry["name"] != final.name]
    if final.exists():  # the same step again, after a resume from an older checkpoint
        write_json(final.parent / "index.json", {"checkpoints": entries})
        shutil.rmtree(final)
    os.replace(draft, final)
    _sync(final.parent)
    entries.append({"name": final.name, "step": state["step"], "score": score})
    _retain(final.parent, entries, keep)


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


def choose(resume: str, folder: Path, ranks: Ranks, force: bool = False) -> Path | None:
    """The checkpoint to go on from, whole and the same on every rank; None to start afresh."""
    return on_first(lambda: _choose(resume, folder, force), ranks)


def _choose(resume: str, folder: Path, force: bool) -> Path | None:
    if resume not in ("auto", "never"):
        path = Path(resume)
        if not (path / "manifest.json").is_file():
            raise UserError(f"--resume {resume} is not a complete checkpoint (no manifest.json in it).")
        if damage := _refuse_foreign(path, force) or _damage(path):
            raise UserError(f"checkpoint {path} is damaged ({damage}): name another with --resume.")
        return path
    entries = read_index(folder)
    if resume == "never" and entries:
        raise UserError(f"{folder} already holds checkpoints: choose another --out, or --resume auto to go on.")
    for age, entry in enumerate(reversed(entries)):
        path = folder / entry["name"]
        damage = _refuse_foreign(path, force) or _damage(path)
        if not damage:
            if age:  # the damaged ones must not count as newest when old ones are removed
                write_json(folder / "index.json", {"checkpoints": entries[:-age]})
            return path
        say(f"warning: checkpoint {path} is damaged ({damage}): going back to the one before it")
    if entries:
        raise UserError(f"every checkpoint in {folder} is damaged; to start over, choose another --out.")
    return None


def _refuse_foreign(path: Path, force: bool) -> None:
    """What another user could have written is not loaded unasked."""
    for file in [path, *path.rglob("*")] if path.exists() and not force else []:
        facts = file.lstat()
        strange = f"belongs to user {facts.st_uid}" if facts.st_uid != os.getuid() else ""
        if strange or stat.S_ISLNK(facts.st_mode):
            raise UserError(
                f"checkpoint {path}: {file} {strange or 'is a symbolic link'}; --force-resume loads it all the same."
            )


def load(path: Path, engine, average, ranks: Ranks, identity: dict, force: bool = False) -> dict:
    """Restores the engine from what `choose` found and returns the trainer state. Refuses another run, with what
    differs; `force` goes on with the differences."""
    state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    then = state["identity"]
    changed = {
        key: f"{key}: {then.get(key)!r} then, {now!r} now" for key, now in identity.items() if then.get(key) != now
    }
    if foreign := set(changed) - SHAPE:
        words = "; ".join(changed.values())
        if not force:
            raise UserError(
                f"checkpoint {path} is of another run ({words}): use another --out, or --force-resume to go on."
            )
        say(f"warning: --force-resume goes on with another run's checkpoint ({words})")
        changed = {key: words for key, words in changed.items() if key not in foreign}
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
        try:
            loaded, _ = part.load_checkpoint(
                str(path), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
            )
        except RuntimeError as error:
            if not foreign:
                raise
            raise UserError(f"checkpoint {path} does not fit this model ({str(error).splitlines()[0]}).") from None
        if loaded is None:
            raise UserError(f"DeepSpeed found no state in checkpoint {path}.")
    if average.decay:
        shadow = torch.load(path / f"average-{ranks.rank:05d}.pt", map_location="cpu", weights_only=True)
        for mine, saved in zip(average.shadow, shadow, strict=True):
            mine.copy_(saved)
    return state


def _refuse_other_steps(path: Path, then: dict, now: dict) -> None:
    """Other ranks are fine if an optimizer step still holds the same micro-batches, and all states can be cut anew."""
    # Where --accumulation may change from run to resume, the fingerprint holds the size of a step.
    sizes = [identity["ranks"] * identity["accumulation"] for identity in (then, now) if "accumulation" in identity]
    if len(set(sizes)) > 1:
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


def load_mine(path: Path, ranks: Ranks) -> dict | None:
    """What `save` was given as this rank's own; None if it was given nothing."""
    file = path / f"rank-{ranks.rank:05d}.pt"
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None


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
