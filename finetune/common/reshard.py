"""Resuming with another number of ranks or another ZeRO stage, through DeepSpeed's universal checkpoints.

The converter is DeepSpeed's: one folder per parameter with its whole fp32 master weight and Adam moments. The loader is
ours: DeepSpeed 0.19.8's own gives every parameter group the hyperparameters of the first one under ZeRO-3 (weight decay
on norms, one learning rate for all layers), and cannot change the stage.

    cd finetune && python -m common.reshard SHARDS OUT        converts, in a process of its own
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

from common.ema import masters, masters_changed
from common.engine import trainable
from common.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse_optimizer(description: dict, checkpoint: Path) -> None:
    """Raises for an optimizer whose states DeepSpeed's converter does not know: it handles two fp32 Adam moments.

    `description`: what optim.describe_optimizer returned.
    """
    if description["state"] != dict.fromkeys(MOMENTS, "torch.float32"):
        raise UserError(
            f"checkpoint {checkpoint}: the states of this optimizer ({', '.join(description['state'])}) cannot be split"
            " again: resume with the same number of ranks and the same ZeRO stage."
        )


def convert(checkpoint: Path, tag: str, out: Path, has_ema: bool) -> None:
    """Writes OUT/weights and, with an EMA, OUT/ema: universal checkpoints of the master weights and their average."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    shards = {"weights": checkpoint / tag}
    if has_ema:
        shards["ema"] = out / "ema-shards"
        _with_ema_as_masters(checkpoint, checkpoint / tag, shards["ema"])
    for name, folder in shards.items():
        command = [sys.executable, "-m", "common.reshard", folder, out / name]
        done = subprocess.run(
            list(map(str, command)), cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise UserError(
                f"checkpoint {checkpoint} cannot be converted to another number of ranks or ZeRO stage: {lines[-1]}"
            )


def _with_ema_as_masters(checkpoint: Path, shards: Path, out: Path) -> None:
    """Copies the shards with the EMA, which is split like the master weights, in place of the master weights."""
    out.mkdir()
    for file in shards.iterdir():
        if not file.name.endswith("_optim_states.pt"):
            shutil.copy2(file, out)
            continue
        rank = int(file.name.split("zero_pp_rank_")[1].split("_")[0])
        state = torch.load(file, map_location="cpu", weights_only=True)
        ema = torch.load(checkpoint / f"ema-{rank:05d}.pt", map_location="cpu", weights_only=True)
        inner = state["optimizer_state_dict"]
        inner["fp32_flat_groups" if "fp32_flat_groups" in inner else "single_partition_of_fp32_groups"] = ema
        torch.save(state, out / file.name)


@torch.no_grad()
def load(folder: Path, engine, averaged: list[torch.Tensor]) -> None:
    """Loads this rank's shard of what `convert` wrote. `averaged`: the tensors of its EMA, none without one.

    Moments and averages are split like the master weights: each is put in their place, and copied from there.
    """
    if averaged:
        _fill_masters(engine, folder / "ema", "fp32")
        for shadow, master in zip(averaged, masters(engine), strict=True):
            shadow.copy_(master)
    step = _steps_taken(folder / "weights" / "zero")
    for key in MOMENTS:
        _fill_masters(engine, folder / "weights", key)
        for master in masters(engine):
            engine.optimizer.state[master][key] = master.detach().clone()
    for master in masters(engine):
        # Fused AdamW needs its step counter on the device of the parameter; DeepSpeed's on the CPU counts in an int.
        steps = step if engine.zero_offload_optimizer() else torch.tensor(float(step), device=master.device)
        engine.optimizer.state[master]["step"] = steps
    _fill_masters(engine, folder / "weights", "fp32")
    masters_changed(engine)


def _fill_masters(engine, folder: Path, key: str) -> None:
    """Sets this rank's master weights to the values that a universal checkpoint has under this key."""
    for name, parameter in trainable(engine.module).items():
        # Mapped, not read: only the part that this rank holds comes from the disk.
        value = torch.load(folder / "zero" / name / f"{key}.pt", weights_only=True, mmap=True)
        value = (value["param"] if isinstance(value, dict) else value).flatten()
        if engine.zero_optimization_stage() == 3:
            # Every parameter is cut into equal parts, one per rank; the last is filled up with zeros. DeepSpeed's call
            # for whole values (0.19.8) cannot take one whose size is not a multiple of the number of ranks.
            size = math.ceil(parameter.ds_numel / engine.dp_world_size)
            value = value[engine.global_rank * size :][:size]
            safe_set_local_fp32_param(parameter, torch.nn.functional.pad(value, (0, size - len(value))))
        else:
            safe_set_full_fp32_param(parameter, value)


def load_buffers(shards: Path, engine) -> None:
    """Loads what a model holds besides its parameters (running statistics), which every rank has whole."""
    file = sorted(shards.glob("*model_states.pt"))[0]
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    buffers = dict(engine.module.named_buffers(remove_duplicate=False))
    for name in saved["buffer_names"]:
        buffers[name].copy_(saved["module"][name])


def _steps_taken(folder: Path) -> int:
    for file in sorted(folder.glob("*/step.pt")):
        return int(torch.load(file, weights_only=True))
    state = torch.load(folder / "optimizer_state.pt", weights_only=True, map_location="cpu")
    return int(state["optimizer_state_dict"]["state"][0]["step"])


def main() -> None:
    from deepspeed.checkpoint import ds_to_universal

    from common.checkpoint import allow_list

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    allow_list()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(
        argparse.Namespace(input_folder=sys.argv[1], output_folder=sys.argv[2], inject_missing_state=True, **options)
    )


if __name__ == "__main__":
    main()
