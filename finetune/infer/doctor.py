"""Print what this machine has, and what the recipes can use: ./launch.sh doctor

Every line is a fact, or `missing` with what is lost without it.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.errors import UserError
from common.runtime import free_memory, run_main

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {
    "pesq": "cmgan and diffusion_buffer cannot train (it needs a C compiler to install)",
    "bitsandbytes": "no --quantize, no 8-bit AdamW",
    "flash_attn": "no --attn flash_attention_2",
    "resemblyzer": "no speaker similarity",
    "pocketsphinx": "no word error rate without your own recogniser",
}


def unlike_pins() -> list[str]:
    """Packages of requirements.txt that are missing, or have another version than the tested one."""
    pins = [line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    unlike = []
    for name, pin in pins:
        try:
            version = importlib.metadata.version(name).split("+")[0]  # without the build, such as +cpu
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version != pin:
            unlike.append(f"{name} {version} (tested: {pin})")
    return unlike


def devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return [f"none: training runs on {os.cpu_count()} CPU cores"]
    lines = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16: use --precision fp32"
        lines.append(f"{card.name}, {card.total_memory / 2**30:.0f} GB, {bf16}")
    return lines


def first_line(*command: str) -> str:
    """What a program says about its version; empty if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else "installed"


def attention() -> str:
    from common.attention import Attention, why_not

    names = [name for name in Attention.__args__ if name != "auto"]
    return ", ".join(name for name in names if not why_not(name, "bf16"))


def examine(_args) -> None:
    missing = [name for name in ("torch", "deepspeed", "transformers", "peft", "datasets") if not find_spec(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not installed in {sys.prefix}: nothing can train; ./launch.sh setup installs all."
        )
    print(
        f"Python       {platform.python_version()}; {', '.join(unlike_pins()) or 'all packages as in requirements.txt'}"
    )
    for line in devices():
        print(f"GPU          {line}")
    print(f"attention    {attention()}")
    print(f"memory       {free_memory() / 2**30:.1f} GB free")
    print(f"disk         {shutil.disk_usage(ROOT).free / 2**30:.0f} GB free at {ROOT}")
    compiler = first_line("c++", "--version")
    print(f"C++          {compiler or 'missing: no optimizer offload (zero2_offload, zero3_offload)'}")
    print(f"SLURM        {first_line('sbatch', '--version') or 'missing: no ./launch.sh slurm'}")
    for name, loss in OPTIONAL.items():
        print(f"{name:<12} {'installed' if find_spec(name) else f'missing: {loss}'}")


if __name__ == "__main__":
    run_main(examine, None)
