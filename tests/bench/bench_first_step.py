"""Time from ./launch.sh to the first optimizer step, against importing torch and DeepSpeed, which takes both.

    python tests/bench/bench_first_step.py [--rounds 3]

The demo's model and data exist already. All are started in turns; compared is the best wall time of each, because
starting is mostly waiting for imports, and the processor time of all processes stands beside it. "all imports" is what
a script without this project would import for one step of LoRA on Dia.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune"), str(ROOT / "data")]
from helpers import support  # noqa: E402
from helpers.bench_rows import Row, report  # noqa: E402

IMPORTS = "import torch, deepspeed"
ALL_IMPORTS = f"""{IMPORTS}, peft
from transformers import DiaForConditionalGeneration
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.AdamW([weight]).step()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from demo import ensure_demo

    ensure_demo(support.DIA)
    words = [*support.TINY_DIA[:4], "--precision", "fp32", "--steps", "1", "--no-export", "--save-every", "0"]
    times = {"imports": [], "all imports": [], "launch.sh": [], "deepspeed": []}
    for number in range(args.rounds):
        for name, code in (("imports", IMPORTS), ("all imports", ALL_IMPORTS)):
            times[name].append(first_line([sys.executable, "-c", f"{code}\nprint('step 1')"]))
        with tempfile.TemporaryDirectory() as folder:
            recipe = [*words, "--ds", ROOT / "ds_configs" / "zero2.json", "--out"]
            times["launch.sh"].append(first_line([ROOT / "launch.sh", "dia_lora", *recipe, f"{folder}/a{number}"]))
            script = ["deepspeed", "--num_accelerators", "2", ROOT / "finetune" / "dia_lora.py"]
            times["deepspeed"].append(first_line([*script, *recipe, f"{folder}/b{number}"]))
    print(f"{'from the command to the first step':36} {'wall s':>7} {'CPU s, all processes':>21}")
    for name, pairs in times.items():
        print(f"{name:36} {min(wall for wall, _ in pairs):7.1f} {min(cpu for _, cpu in pairs):21.1f}")
    wall = {name: min(wall for wall, _ in pairs) for name, pairs in times.items()}
    what = "first step of ./launch.sh dia_lora, 2 ranks, against importing torch and DeepSpeed"
    ratio = wall["launch.sh"] / wall["imports"]
    peer = f"{wall['all imports']:.1f} s (importing PEFT and Dia too, one step of AdamW)"
    report(Row("P21", what, f"{wall['launch.sh']:.1f} s", ratio, "<= 1.3", peer, f"{wall['imports']:.1f} s"))


def first_line(command: list) -> tuple[float, float]:
    """Seconds until the command prints a line about its first step, and its processor time until it ends."""
    environment = support.environment(AUDIO_FINETUNE_ENV=support.VENV)
    before, began, seen, output = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), None, []
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        output.append(line)
        if seen is None and re.match(r"step +1", line):
            seen = time.monotonic() - began
    if process.wait() or seen is None:
        sys.exit(f"{command} failed:\n{''.join(output)[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seen, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
