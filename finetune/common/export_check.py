"""Is an export what was trained? Loaded in a fresh process, it must compute what the training engine computes.

infer/check_export.py is that process. It loads the artifact as its users do, with plain transformers and PEFT where
possible, on the CPU, and compares the outputs for one short clip.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from common.errors import UserError
from common.memory import count_parameters
from common.runs import replace_folder
from common.runtime import free_memory, on_main_for_long, say

SCRIPT = Path(__file__).resolve().parents[1] / "infer" / "check_export.py"
LIBRARIES = 2 * 2**30  # bytes that the process needs besides the weights
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def require_same(run, ema, probe, model, clips) -> None:
    """Ends the run with an error if RUN/export does not compute what the engine does. Checkpoints stay as they are.

    `probe(model, clips, device)`: one clip as tensors by name, and (rows, values) that the training code computes for
    it. Every rank must call this: under ZeRO-3 all of them compute.
    """
    if not run.config.export_check:
        return
    with exact_products(), ema.applied():
        inputs, outputs = probe(model, clips, run.process.device)
    size = 4 * count_parameters(model)[0]
    on_main_for_long(lambda tick: _compare(run, inputs, outputs, size, tick), run.process)


@contextlib.contextmanager
def exact_products():
    """Inside, a GPU computes fp32 products with all digits, as the CPU does: TF32 keeps 10 bits of 23."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def _compare(run, inputs: dict, outputs: torch.Tensor, size: int, tick) -> None:
    from safetensors.torch import save_file

    export, file = run.folder / "export", run.folder / ".export-check.safetensors"
    need = 1.3 * size + LIBRARIES
    if free_memory() < need:
        say(f"warning: the export is not checked: that takes {need / 2**30:.1f} GB of free memory")
        return
    tensors = {name: value.detach().cpu().contiguous() for name, value in inputs.items()}
    save_file(tensors | {"outputs": outputs.detach().float().cpu().contiguous()}, file)
    # The GPUs belong to the training, and so do the ranks' names; what the run has loaded is on this machine.
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command, pipe = [sys.executable, SCRIPT, export, file], subprocess.PIPE
    # In a process group of its own, Ctrl-C does not reach it: the run would take that for a failure.
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0)
    while True:
        tick()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what was read so far is kept
            printed, errors = process.communicate(timeout=0.5)
            break
    file.unlink()
    if process.returncode < 0:  # killed, perhaps for lack of memory: that says nothing about the export
        say(f"warning: the export is not checked: the process was ended by signal {-process.returncode}")
        return
    if process.returncode:
        problem = f"it cannot be loaded: {(errors.strip().splitlines() or ['no message'])[-1]}"
        facts = {}
    else:
        facts = json.loads(printed.splitlines()[-1])
        problem = facts.pop("problem")
    numbers = {name: value for name, value in facts.items() if isinstance(value, float)}
    run.tracker.event("export_check", run.tracker.steps, passed=not problem, **numbers)
    if problem:
        refused = export.with_name("export-refused")
        replace_folder(export, refused)
        raise UserError(
            f"the export is not what was trained: {problem}; it is now {refused}, and the checkpoints are intact."
        )
    say(f"the export matches the training engine: {facts['sentence']}")
