"""Checkpoints that are whole or absent: temporary name, fsync, checksums, rename, then an entry in index.json.

index.json is the only source of truth for resume and retention: a folder that it does not list is never loaded and
never deleted. Checksums are verified before loading; `auto` falls back to the newest checkpoint with valid checksums.
"""

import contextlib
import copy
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map

from common import reshard
from common.errors import UserError
from common.runtime import (
    Process,
    all_sum,
    barrier,
    free_memory,
    from_main,
    gather_lists,
    on_main,
    ranks_here,
    redact,
    request_stop,
    say,
)

TAG = "state"
NAME = re.compile(r"step-\d{8,}")
VISIBLE_SECONDS = 120.0  # within which one node must see what another wrote; NFS takes up to a minute
SHAPE = {"ranks", "zero_stage", "accumulation"}  # may change on resume, within limits


def allow_list() -> None:
    """Allows the only classes besides tensors and plain containers that DeepSpeed's shards hold."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def write_json(path: Path, value) -> None:
    """Writes a JSON file durably: the old or the new content is there, never half of it."""
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
    if not path.is_file():  # lost, or the run was killed between the first rename and writing this file
        names = sorted(p.parent.name for p in folder.glob("step-*/manifest.json") if NAME.fullmatch(p.parent.name))
        return [{"name": name, "step": int(name.removeprefix("step-")), "score": None} for name in names]
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        for entry in entries:
            # Only our own names: retention deletes what is listed, and must not leave this folder.
            if not NAME.fullmatch(entry["name"]) or not {"step", "score"} <= set(entry):
                raise ValueError(entry)
        return entries
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; move it away to start over, or name a checkpoint with --resume.") from None


def save(
    folder: Path,
    engine,
    state: dict,
    ema,
    process: Process,
    keep: int,
    score: float | None,
    rank_state: dict | None = None,
    background: bool = False,
) -> "Pending":
    """Writes the checkpoint of step `state["step"]`; the one with the lowest `score` is protected from retention.

    `engine`: one, or a dict of several by name. `rank_state`: tensors that only this rank holds. `background`: copies
    everything in memory and returns; call `wait` on the result, on every rank, before relying on it.
    """
    final = folder / f"step-{state['step']:08d}"
    draft = folder / f".{final.name}.tmp"
    on_main(lambda: _start_draft(draft), process)
    files = _collect(engine, draft)
    if rank_state is not None:
        files[f"rank-{process.rank:05d}.pt"] = rank_state
    if ema.decay:
        files[f"ema-{process.rank:05d}.pt"] = ema.shadow
    size = sum(value.nbytes for value in tree_leaves(files) if isinstance(value, torch.Tensor))
    # The copies of all ranks on this machine must fit into memory besides the training.
    cramped = free_memory() < 1.2 * size * ranks_here()
    total, cramped = all_sum([size, float(cramped)], process)
    on_main(lambda: _check_space(final, draft, total), process)
    background = background and not cramped
    # In the background everything is copied first; otherwise one file at a time.
    copied, files = (lambda tree: tree, _host_copy(files)) if background else (_host_copy, files)
    pending = Pending(final, draft, process)
    entry = {"name": final.name, "step": state["step"], "score": score}
    publish = functools.partial(_publish, pending, copy.deepcopy(state), entry, keep)
    pending.thread = threading.Thread(target=_write, args=(pending, files, copied, publish), name="checkpoint")
    pending.thread.start()
    if not background:
        pending.wait()
    return pending


class Pending:
    """A checkpoint that one thread per rank is writing. The threads use no collectives, which would interleave with the
    training's: each leaves a done-RANK.json in the draft, and the main rank's thread publishes the checkpoint."""

    def __init__(self, path: Path, draft: Path, process: Process):
        self.path, self.draft, self.process = path, draft, process
        self.written, self.abandoned = threading.Event(), threading.Event()
        self.written_by_all = math.inf  # time at which that became known
        self.error = ""

    def wait(self) -> None:
        """Returns when the checkpoint is in the index; raises on all ranks if some rank could not write it."""
        self.written.wait()
        errors = gather_lists([self.error] if self.error else [], self.process)
        if errors:
            self.abandoned.set()
        self.written_by_all = time.monotonic()
        self.thread.join()
        errors = errors or from_main([self.error] if self.error else [], self.process)
        if errors:
            if self.process.is_main:
                shutil.rmtree(self.draft, ignore_errors=True)
            raise UserError(f"checkpoint {self.path} could not be written ({errors[0]}); the older ones are intact.")


def _start_draft(draft: Path) -> None:
    """Makes an empty draft. Other drafts were left by a kill, since only one checkpoint is written at a time."""
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        for old in draft.parent.glob(".step-*.tmp"):
            shutil.rmtree(old)
        draft.mkdir()
    except OSError as error:
        raise UserError(f"--out: checkpoints cannot be written to {draft.parent} ({error.strerror}).") from None


def _check_space(final: Path, draft: Path, size: float) -> None:
    free = shutil.disk_usage(draft).free
    need = 1.1 * size + 2**20  # names, shapes and the state besides the tensors
    if free < need:
        shutil.rmtree(draft)
        raise UserError(
            f"checkpoint {final} needs {need / 2**20:,.1f} MB and {free / 2**20:,.1f} MB are free: delete something or"
            " lower --keep; the older ones are intact."
        )


def _collect(engine, draft: Path) -> dict:
    """What this rank's engines would write, by file name in the draft.

    DeepSpeed writes through engine.checkpoint_engine, and has no argument for another one: it is replaced while we
    collect, so that files can be copied, written in the background and flushed our way.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    files = {}

    class Collector(TorchCheckpointEngine):
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
    """Copies every tensor to the CPU: only its own values, not its whole storage, which may be a flat buffer."""

    def is_shape(value) -> bool:
        return isinstance(value, torch.Size)  # would become a plain tuple, which DeepSpeed's converters reject

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        # Some versions of Python 3.11 pickle an enum as a call of getattr, which torch refuses to load.
        return value.value if isinstance(value, Enum) else value

    return tree_map(plain, tree, is_leaf=is_shape)


def _write(pending: Pending, files: dict, copied, publish) -> None:
    try:
        digests = {}
        for name in sorted(files):
            with open(pending.draft / name, "wb") as stream:
                torch.save(copied(files.pop(name)), stream)
                stream.flush()
                os.fsync(stream.fileno())
            digests[name] = _sha256(pending.draft / name)
        write_json(pending.draft / f"done-{pending.process.rank:05d}.json", digests)
        pending.written.set()
        if pending.process.is_main:
            publish()
    except Exception as error:  # must not get lost with this thread
        pending.error = str(error) or repr(error)
        request_stop()  # all ranks stop at the same step and raise in wait()
        with contextlib.suppress(OSError):  # the folder itself may be gone
            free = shutil.disk_usage(pending.draft.parent).free
            pending.error += f"; {free / 2**20:,.1f} MB are free"
    finally:
        pending.written.set()


def _publish(pending: Pending, state: dict, entry: dict, keep: int) -> None:
    """Waits for all ranks, then writes checksums, renames and updates the index."""
    draft, final = pending.draft, pending.path
    done_files = [draft / f"done-{rank:05d}.json" for rank in range(pending.process.world)]
    while not all(file.exists() for file in done_files):
        if pending.abandoned.wait(0.02):
            return
        if time.monotonic() > pending.written_by_all + VISIBLE_SECONDS:
            raise OSError("rank 0 does not see what the other ranks wrote: all nodes must share --out")
    write_json(draft / "trainer_state.json", state)
    manifest = {}
    for file in done_files:
        manifest |= json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    for path in sorted(draft.rglob("*")):
        name = str(path.relative_to(draft))
        if name not in manifest:  # folders, and files that no rank has flushed and summed
            if path.is_file():
                manifest[name] = _sha256(path)
            _sync(path)
    write_json(draft / "manifest.json", manifest)
    entries = [other for other in read_index(final.parent) if other["name"] != final.name]
    if final.exists():  # the same step again, after a resume from an older checkpoint
        write_json(final.parent / "index.json", {"checkpoints": entries})
        shutil.rmtree(final)
    os.replace(draft, final)
    _sync(final.parent)
    _retain(final.parent, [*entries, entry], keep)


def _by_tag(engine) -> dict:
    return engine if isinstance(engine, dict) else {TAG: engine}


def _retain(folder: Path, entries: list[dict], keep: int) -> None:
    """Keeps the newest `keep` and the best. The index drops a checkpoint before its folder is deleted."""
    scored = [entry for entry in entries if entry["score"] is not None and math.isfinite(entry["score"])]
    kept = {entry["name"] for entry in entries[-keep:]}
    if scored:
        kept.add(min(scored, key=lambda entry: entry["score"])["name"])
    write_json(folder / "index.json", {"checkpoints": [entry for entry in entries if entry["name"] in kept]})
    for entry in entries:
        if entry["name"] not in kept:
            shutil.rmtree(folder / entry["name"], ignore_errors=True)
            say(f"removed checkpoint {folder / entry['name']}")


def choose(resume: str, folder: Path, process: Process, force: bool = False) -> Path | None:
    """The checkpoint to resume from, complete and the same on every rank; None for a fresh start."""
    return on_main(lambda: _choose(resume, folder, force), process)


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
        raise UserError(f"{folder} already holds checkpoints: choose another --out, or --resume auto to continue.")
    for age, entry in enumerate(reversed(entries)):
        path = folder / entry["name"]
        damage = _refuse_foreign(path, force) or _damage(path)
        if not damage:
            if age:  # damaged ones must not count as newest in retention
                write_json(folder / "index.json", {"checkpoints": entries[:-age]})
            return path
        say(f"warning: checkpoint {path} is damaged ({damage}): falling back to the one before it")
    if entries:
        raise UserError(f"every checkpoint in {folder} is damaged; to start over, choose another --out.")
    return None


def _refuse_foreign(path: Path, force: bool) -> None:
    """Refuses files that another user could have written."""
    for file in [path, *path.rglob("*")] if path.exists() and not force else []:
        facts = file.lstat()
        strange = f"belongs to user {facts.st_uid}" if facts.st_uid != os.getuid() else ""
        if strange or stat.S_ISLNK(facts.st_mode):
            raise UserError(
                f"checkpoint {path}: {file} {strange or 'is a symbolic link'}; --force-resume loads it anyway."
            )


def read_state(path: Path, identity: dict, force: bool = False) -> dict:
    """The trainer state of a checkpoint. Raises if it belongs to another run, naming what differs, unless `force`."""
    state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    differences = _differences(state["identity"], identity)
    if set(differences) - SHAPE and not force:
        listed = "; ".join(differences.values())
        raise UserError(f"checkpoint {path} belongs to another run ({listed}): use another --out, or --force-resume.")
    if set(differences) & SHAPE:
        _refuse_other_steps(path, state["identity"], identity)
    return state


def warn_of_another_run(state: dict, identity: dict) -> None:
    """Says what --force-resume overlooks."""
    differences = _differences(state["identity"], identity)
    if set(differences) - SHAPE:
        say(f"warning: --force-resume uses the checkpoint of another run ({'; '.join(differences.values())})")


def _differences(then: dict, now: dict) -> dict[str, str]:
    """What differs between two identities, by key, in words."""
    return {
        key: f"{key}: {then.get(key)!r} then, {value!r} now" for key, value in now.items() if then.get(key) != value
    }


def load(path: Path, engine, ema, process: Process, identity: dict, force: bool = False) -> dict:
    """Restores the engine and the EMA; returns the trainer state. Refuses what `read_state` refuses."""
    state = read_state(path, identity, force)
    differences = _differences(state["identity"], identity)
    foreign = set(differences) - SHAPE
    changed_shape = [text for key, text in differences.items() if key in SHAPE]
    allow_list()
    if changed_shape:
        say(f"resharding the checkpoint ({'; '.join(changed_shape)})")
        for tag, part in _by_tag(engine).items():
            _load_resharded(path, tag, part, ema, process)
            part.global_steps = state["step"]
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
    if ema.decay:
        saved_shadow = torch.load(path / f"ema-{process.rank:05d}.pt", map_location="cpu", weights_only=True)
        for shadow, saved in zip(ema.shadow, saved_shadow, strict=True):
            shadow.copy_(saved)
    return state


def _refuse_other_steps(path: Path, then: dict, now: dict) -> None:
    """Another number of ranks is fine if every optimizer step still trains the same micro-batches."""
    # In a recipe whose --accumulation may change on resume, the fingerprint holds the size of a step.
    sizes = [identity["ranks"] * identity["accumulation"] for identity in (then, now) if "accumulation" in identity]
    if len(set(sizes)) > 1:
        raise UserError(
            f"checkpoint {path}: ranks x --accumulation was {sizes[0]} and is {sizes[1]}; keep the product, so that"
            " every step trains the same micro-batches."
        )
    if 0 in (then["zero_stage"], now["zero_stage"]):
        raise UserError(f"checkpoint {path}: ZeRO-0 checkpoints resume only with ZeRO-0 and the same number of ranks.")
    optimizers = now["fingerprint"]["optimizer"]
    for description in optimizers if isinstance(optimizers, list) else [optimizers]:
        reshard.refuse_optimizer(description, path)


def _load_resharded(path: Path, tag: str, engine, ema, process: Process) -> None:
    scratch = path.parent / f".{path.name}.universal.tmp"
    shadow = ema.shadow if ema.engine is engine else []  # of several engines one has an average
    on_main(lambda: reshard.convert(path, tag, scratch, bool(shadow)), process)
    reshard.load(scratch, engine, shadow)
    reshard.load_buffers(path / tag, engine)
    barrier(process)
    if process.is_main:
        shutil.rmtree(scratch)


def masters(path: Path, tag: str = TAG, ema: bool = False) -> dict[str, torch.Tensor]:
    """The trained fp32 weights of a checkpoint, or their moving average, whole, and the model's buffers, by their names
    in the recipe's model. Needs no ranks."""
    damage = _damage(path)
    if damage:
        raise UserError(f"checkpoint {path} is damaged ({damage}).")
    allow_list()
    files = sorted(path.glob("ema-*.pt")) if ema else []
    averages = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    if list((path / tag).glob("*_optim_states.pt")):
        weights = _merge_shards(path / tag, averages)
    else:
        weights = _whole_weights(path / tag, averages)
    return {name.removeprefix("model."): value.contiguous().clone() for name, value in weights.items()}


def _merge_shards(folder: Path, averages: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The shards of all ranks put together, as DeepSpeed's zero_to_fp32 does; with the averages, which are split like
    the master weights, in place of these."""
    from deepspeed.utils import zero_to_fp32

    with (
        _no_pickled_code(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),  # a progress bar
    ):
        states = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(folder))
        optimizers = zero_to_fp32.get_optim_files(folder)
        stage, world, shards, paddings = zero_to_fp32.parse_optim_states(optimizers, folder)
        if averages:  # padding at the end of a shard is not saved
            pairs = zip(averages, shards, strict=True)
            shards = [[a[: len(m)] for a, m in zip(*pair, strict=True)] for pair in pairs]
        if stage == 3:
            return zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(world, shards, states, True)
        return zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(world, shards, states, True, paddings)


@contextlib.contextmanager
def _no_pickled_code():
    """Inside, torch.load refuses everything that weights_only refuses, whatever DeepSpeed asks it for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _whole_weights(folder: Path, averages: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights of a run with ZeRO-0, where every rank holds all of them."""
    [file] = folder.glob("*.pt")
    state = torch.load(file, map_location="cpu", weights_only=True)
    weights = state["module"]
    if averages:
        trained = [name for name in weights if name not in state.get("buffer_names", ())]
        weights = weights | dict(zip(trained, averages[0], strict=True))
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def rank_states(path: Path) -> Iterator[dict]:
    """What `save` was given as `rank_state`, rank by rank; the number of ranks may have been another."""
    for file in sorted(path.glob("rank-*.pt")):
        yield torch.load(file, map_location="cpu", weights_only=True)


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
