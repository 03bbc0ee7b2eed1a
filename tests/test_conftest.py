"""What all tests rely on: none finds in its process what another one left there, whatever the order."""

import re
import subprocess

import pytest

from helpers import support

pytestmark = pytest.mark.long  # each imports the libraries anew

LEAKS = """
import logging, os, random, signal, sys
import pytest
import torch

def environment(): os.environ["RANK"] = "1"
def signal_handler(): signal.signal(signal.SIGTERM, signal.SIG_IGN)
def folder(): os.chdir("/")
def path(): sys.path.append("/nowhere")
def forbidden_module(): sys.modules["torchaudio"] = None
def log_level(): logging.getLogger("transformers").setLevel(1)
def log_handler(): logging.getLogger().addHandler(logging.NullHandler())
def dtype(): torch.set_default_dtype(torch.bfloat16)
def device(): torch.set_default_device("meta")
def gradients(): torch.set_grad_enabled(False)
def precision(): torch.set_float32_matmul_precision("high")
def determinism(): torch.use_deterministic_algorithms(True)
def autocast(): torch.autocast("cpu", dtype=torch.bfloat16).__enter__()

def linear():
    process_group()
    import deepspeed
    deepspeed.zero.Init(enabled=True, config_dict_or_path={"train_batch_size": 1}).__enter__()

def sharded_models():
    from transformers.integrations import HfDeepSpeedConfig
    global kept
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})

def process_group():
    from common.runtime import init_process
    from helpers import support
    os.environ["MASTER_PORT"] = support.free_port()
    init_process()

def engine_with_nothing_put_back():
    process_group()
    import deepspeed
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)

LEAKS = [value for name, value in dict(globals()).items() if getattr(value, "__module__", "") == __name__]

@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_leaks(leak):
    leak()

@pytest.fixture(scope="module")
def of_the_file():
    os.environ["OF_THE_FILE"] = "1"

@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_restores(leak, of_the_file):
    from helpers import process_state
    with process_state.restored():
        leak()
"""
FINDS = """
import logging, os, signal, sys
import torch
from transformers.integrations import is_deepspeed_zero3_enabled

def test_finds_nothing():
    assert not {"RANK", "MASTER_PORT", "OF_THE_FILE"} & set(os.environ)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and os.getcwd() != "/" and "/nowhere" not in sys.path
    assert sys.modules.get("torchaudio", "not imported") is not None
    assert logging.getLogger("transformers").level != 1
    assert torch.empty(1).dtype == torch.float32 and torch.empty(1).device.type == "cpu" and torch.is_grad_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.nn.functional.linear is torch._C._nn.linear
    assert not torch.distributed.is_initialized() and not is_deepspeed_zero3_enabled()
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


def run_tests(folder, *words, **files) -> subprocess.CompletedProcess:
    """A session of pytest with the fixtures of all tests, on these files."""
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    paths = ":".join(str(support.ROOT / name) for name in ("tests", "finetune", "data"))
    command = [support.PYTHON, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder]
    command += [f"--basetemp={folder / 'kept'}", *words, *(f"{name}.py" for name in files)]
    environment = support.environment(PYTHONPATH=paths)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_what_a_test_does_to_the_process_fails_it_and_is_put_back(tmp_path):
    done = run_tests(tmp_path, test_a=LEAKS, test_b=FINDS)
    summary = done.stdout.split("short test summary")[-1]
    leaks = re.findall(r"^def (\w+)\(\): ?", LEAKS.split("@pytest")[0], re.MULTILINE)
    assert len(leaks) == 17
    for leak in leaks:
        assert f"test_leaks[{leak}]" in summary, f"{leak} was not noticed:\n{done.stdout[-3000:]}"
    assert "test_restores[engine_with_nothing_put_back]" in summary, "of_the_file is the last test's to tell"
    assert f"{2 * len(leaks) + 1} passed, {len(leaks) + 1} errors" in done.stdout, done.stdout[-3000:]
    for name in ("torch.nn.functional.linear", "autocast", "SIGTERM", "transformers", "RANK", "OF_THE_FILE"):
        assert name in done.stdout


ORDER = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    pass
"""


def test_a_shuffled_order_is_that_of_its_seed_and_keeps_files_together(tmp_path):
    files = {f"test_{letter}": ORDER for letter in "abcdef"}
    first, again, other = (order_of(run_tests(tmp_path, "-vv", f"--shuffle={n}", **files)) for n in (1, 1, 2))
    plain = order_of(run_tests(tmp_path, "-vv", **files))
    assert first == again and first != other and plain not in (first, other)
    assert sorted(first) == sorted(other) == sorted(plain)
    places = [name.split("::")[0] for name in first]
    assert len([i for i in range(1, len(places)) if places[i] != places[i - 1]]) == len(files) - 1
    with_workers = run_tests(tmp_path, "--shuffle=1", "-n=2", "--dist=loadfile", **files)
    assert "36 passed" in with_workers.stdout, with_workers.stdout[-3000:]


def order_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^(test_\w\.py::\S+) PASSED", done.stdout, re.MULTILINE)


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
