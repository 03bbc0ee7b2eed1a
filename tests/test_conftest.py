"""What all tests rely on: no file finds in its process what another one left there."""

import subprocess

import pytest

from helpers import support

pytestmark = pytest.mark.long  # each imports the libraries anew

LEAVES = """
import os, signal, sys
import torch
from common import engine, runtime

def test_leaves_much():
    runtime.forbid_codec_imports()
    runtime.catch_signals()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.chdir("/")
    sys.path.append("/nowhere")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    torch.set_grad_enabled(False)
    engine.build_sharded({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
"""
FINDS = """
import os, signal, sys
import torch
from transformers.integrations import is_deepspeed_zero3_enabled

def test_finds_nothing():
    assert sys.modules.get("torchaudio", "not imported") is not None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ and os.getcwd() != "/" and "/nowhere" not in sys.path
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not is_deepspeed_zero3_enabled(), "every model that is loaded would be sharded"
"""


FAILS = """
from helpers import support

def test_fails(tmp_path, monkeypatch):
    for number in range(2):
        (script := tmp_path / f"{number}.py").write_text(f"print('what rank {number} said last')")
        support.Rank(script, [], {}).wait()
    assert False

def test_fails_without_ranks():
    assert False
"""


def run_tests(folder, **files) -> subprocess.CompletedProcess:
    """A session of pytest with the fixtures of all tests, on these files."""
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    paths = ":".join(str(support.ROOT / name) for name in ("tests", "finetune", "data"))
    command = [support.PYTHON, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder]
    command += [f"--basetemp={folder / 'kept'}", *(f"{name}.py" for name in files)]
    environment = support.environment(PYTHONPATH=paths)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_no_file_finds_what_another_one_left(tmp_path):
    done = run_tests(tmp_path, test_a=LEAVES, test_b=FINDS)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def test_a_failure_shows_the_end_of_its_ranks_output_and_keeps_its_folder(tmp_path):
    printed = run_tests(tmp_path, test_c=FAILS).stdout
    assert "2 failed" in printed, printed
    first, second = printed.split("test_fails_without_ranks", 1)
    for number in range(2):
        assert f"what rank {number} said last" in first
    assert str(tmp_path / "kept" / "test_fails0") in first and "said last" not in second


def test_what_was_skipped_is_said_at_the_end_with_its_reason(tmp_path):
    skips = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skips(number):
    pytest.skip("needs SLURM: ./launch.sh setup --with-slurm" if number else "needs a GPU")
"""
    *_, first, second, total = run_tests(tmp_path, test_d=skips).stdout.splitlines()
    assert first == "skipped 1: needs a GPU" and second == "skipped 2: needs SLURM: ./launch.sh setup --with-slurm"
    assert total.startswith("3 skipped")
