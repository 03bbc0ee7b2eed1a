"""launch.sh and the real `deepspeed` command, as a user types them."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

import dia_lora
from helpers import support

LAUNCH = support.ROOT / "launch.sh"
VENV = str(Path(support.PYTHON).parent.parent)
QUICK = ["--steps", "3", "--samples", "1", "--eval-every", "0", "--sample-frames", "20"]


def launch(*words, cwd=None, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LAUNCH, *map(str, words)],
        cwd=cwd,
        env=support.environment(**{"AUDIO_FINETUNE_ENV": VENV, **env}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_scripts_are_clean():
    for script in (LAUNCH, support.ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", script], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", script], check=True)


def test_ci_calls_the_readmes_test_command():
    for place in (".ci/run", "README.md"):
        assert "./launch.sh test" in (support.ROOT / place).read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no_such_recipe"], "no command or recipe 'no_such_recipe'"),
        (["dia_lora", "--ranks", "none"], "--ranks none is not a positive number"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    done = launch(*words)
    assert done.returncode == 2 and sentence in done.stdout


def test_an_environment_without_python_is_refused(tmp_path):
    done = launch("setup", AUDIO_FINETUNE_ENV=str(tmp_path))
    assert done.returncode == 2 and f"AUDIO_FINETUNE_ENV={tmp_path} has no bin/python" in done.stdout


def test_set_up_runs_once_for_each_requirements_txt(tmp_path):
    shutil.copy(LAUNCH, tmp_path)
    (tmp_path / "requirements.txt").write_text("# nothing\n")

    def setup() -> str:
        environment = {k: v for k, v in support.environment().items() if k != "AUDIO_FINETUNE_ENV"}
        done = subprocess.run([tmp_path / "launch.sh", "setup"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "setting up" in setup()
    assert "setting up" not in setup()
    (tmp_path / "requirements.txt").write_text("# something else\n")
    assert "setting up" in setup()


def test_a_set_up_that_fails_is_not_taken_for_ready(tmp_path):
    shutil.copy(LAUNCH, tmp_path)
    (tmp_path / "requirements.txt").write_text("./no-such-package\n")
    environment = {k: v for k, v in support.environment().items() if k != "AUDIO_FINETUNE_ENV"}
    for _ in range(2):
        done = subprocess.run([tmp_path / "launch.sh", "setup"], env=environment, capture_output=True, text=True)
        assert done.returncode != 0 and "ready:" not in done.stdout
    assert not list((tmp_path / ".venv").glob(".ready-*"))


@pytest.mark.distributed
@pytest.mark.fault
def test_damage_that_the_first_rank_finds_is_one_sentence_on_two_ranks(demo, tmp_path):
    shutil.copytree(demo / "tokens" / "train", tmp_path / "tokens")
    [file] = (tmp_path / "tokens").glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    words = ["--model", demo / "dia", "--data", tmp_path / "tokens", "--out", tmp_path / "run"]
    done = launch("dia_lora", *words, "--precision", "fp32")
    assert done.returncode == 2, done.stdout[-2000:]
    assert done.stdout.count("is damaged: its checksum") == 1 and "Traceback" not in done.stdout


@pytest.mark.distributed
def test_demo_from_another_directory_writes_adapter_samples_and_report(demo, tmp_path):
    done = launch("demo", *QUICK, "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    for word, path in (("adapter", "export"), ("samples", "samples"), ("report", "report.html")):
        assert re.search(rf"^{word} +{tmp_path}/run/{path}$", done.stdout, re.M), done.stdout[-1000:]
    assert (tmp_path / "run" / "export" / "adapter_model.safetensors").exists()
    assert "ZeRO-2 on 2 ranks" in done.stdout
    assert list((tmp_path / "run" / "samples" / "recorded").glob("*.wav"))


@pytest.mark.distributed
def test_launcher_takes_the_number_of_ranks_and_the_ds_file(demo, tmp_path):
    done = launch("dia_lora", "--ranks", "1", "--ds", "ds_configs/zero3.json", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "ZeRO-3 on 1 ranks" in done.stdout and "dry run" in done.stdout


@pytest.mark.distributed
def test_a_mistake_through_the_launcher_is_one_sentence_and_code_2(tmp_path):
    done = launch("dia_lora", "--lora-groups", "attn", "typo", "--out", tmp_path / "run")
    assert done.returncode == 2, done.stdout[-2000:]
    assert done.stdout.count("error: unknown LoRA group 'typo'") == 1 and "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_the_docstrings_cpu_command_runs_while_the_default_port_is_busy(demo, tmp_path):
    [command] = re.findall(r"^    (deepspeed finetune/dia_lora.py .*--steps \d+.*)$", dia_lora.__doc__, re.M)
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # an in-process rank of another test may hold it, which is as busy
            busy.bind(("127.0.0.1", 29500))
        busy.listen()
        words = command.replace("deepspeed", "deepspeed --num_accelerators 2").split()
        done = subprocess.run(
            [*words, "--out", str(tmp_path / "run"), "--sample-frames", "20"],
            cwd=support.ROOT,
            env=support.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert len(support.step_records(tmp_path / "run")) == 20


@pytest.mark.distributed
@pytest.mark.fault
def test_a_signal_before_training_leaves_nothing_behind(tmp_path):
    started = subprocess.Popen(
        [LAUNCH, "dia_lora", "--out", str(tmp_path / "run")],
        env=support.environment(AUDIO_FINETUNE_ENV=VENV),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(2)  # DeepSpeed's runner is still importing: there is no rank yet
    started.terminate()
    output, _ = started.communicate(timeout=90)
    assert started.returncode != 0, output
    deadline = time.time() + 35
    while subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        assert time.time() < deadline
        time.sleep(0.2)
    assert os.listdir(tmp_path) in ([], ["run"])
