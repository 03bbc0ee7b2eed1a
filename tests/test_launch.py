"""launch.sh and the real `deepspeed` command, as a user types them."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import soundfile

import dia_lora
from common.errors import UserError
from helpers import support
from infer import dispatch

LAUNCH = support.ROOT / "launch.sh"

QUICK = ["--steps", "3", "--samples", "1", "--eval-every", "0"]


def launch(*words, cwd=None, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LAUNCH, *map(str, words)],
        cwd=cwd,
        env=support.environment(**{"AUDIO_FINETUNE_ENV": support.VENV, **env}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_shell_scripts_are_clean():
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
        (["speak", "--text", "hello"], "give --run with the folder of a dia_lora, dia_full or higgs_clone run"),
        (["speak", "--model", "nari-labs/Dia-1.6B-0626", "--text", "hello"], "give --run with the folder"),
        (["report"], "RUN; --help lists the flags"),
        (["watch"], "RUN; --help lists the flags"),
        (["setup", "--with-slum"], "setup knows --with-slurm and --with-browser, not --with-slum"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    done = launch(*words)
    assert done.returncode == 2 and sentence in done.stdout and "Traceback" not in done.stdout


def test_help_is_the_header_comment():
    for word in ("help", "--help"):
        done = launch(word)
        assert done.returncode == 0 and done.stdout.startswith("The one command for everything")
        assert all(
            f"./launch.sh {command}" in done.stdout for command in (*dispatch.SCRIPTS, "report", "watch", "inspect")
        )
        assert done.stdout.rstrip().endswith("anything else is a failure.")


def test_an_environment_without_python_is_refused(tmp_path):
    done = launch("setup", AUDIO_FINETUNE_ENV=str(tmp_path))
    assert done.returncode == 2 and f"AUDIO_FINETUNE_ENV={tmp_path} has no bin/python" in done.stdout


@pytest.mark.long
def test_set_up_runs_once_per_requirements_txt(tmp_path):
    shutil.copy(LAUNCH, tmp_path)
    (tmp_path / "requirements-scoring.txt").write_text("# nothing\n")
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


@pytest.mark.long
def test_a_failed_set_up_does_not_count_as_ready(tmp_path):
    shutil.copy(LAUNCH, tmp_path)
    (tmp_path / "requirements-scoring.txt").write_text("# nothing\n")
    (tmp_path / "requirements.txt").write_text("./no-such-package\n")
    environment = {k: v for k, v in support.environment().items() if k != "AUDIO_FINETUNE_ENV"}
    for _ in range(2):
        done = subprocess.run([tmp_path / "launch.sh", "setup"], env=environment, capture_output=True, text=True)
        assert done.returncode != 0 and "ready:" not in done.stdout
    assert not list((tmp_path / ".venv").glob(".ready-*"))


TOOLS = "bash cat cut dirname du env flock grep ls mkdir mktemp rm sed sha256sum sleep touch"
# By its real path: a version manager's shim finds nothing on such a PATH.
PYTHON = f'exec "{os.path.realpath(sys.executable)}" "$@"'


def set_up_with(
    tools: dict[str, str], folder: Path, requirements: str, broken_scoring: bool = False
) -> subprocess.CompletedProcess:
    """`launch.sh setup` where only TOOLS and these scripts can be found."""
    shutil.copy(LAUNCH, folder)
    (folder / "requirements.txt").write_text(requirements)
    (folder / "requirements-scoring.txt").write_text("./no-such-package-either\n" if broken_scoring else "# nothing\n")
    (folder / "bin").mkdir()
    for tool in TOOLS.split():
        (folder / "bin" / tool).symlink_to(shutil.which(tool))
    for tool, script in {"python3": PYTHON, **tools}.items():
        (folder / "bin" / tool).write_text(f"#!/bin/bash\n{script}\n")
        (folder / "bin" / tool).chmod(0o755)
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    return subprocess.run([folder / "launch.sh", "setup"], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_without_a_compiler_set_up_leaves_out_pesq_and_says_so(tmp_path):
    done = set_up_with({}, tmp_path, "pesq==0.0.4\n")
    assert done.returncode == 0, done.stderr
    assert "pesq needs a C compiler" in done.stderr and "build-essential" in done.stderr


@pytest.mark.long
def test_set_up_uses_uv_where_it_is_installed(tmp_path):
    done = set_up_with({"cc": "", "uv": 'echo "$@" >> "$HOME/uv.log"'}, tmp_path, "./no-such-package\n")
    assert done.returncode == 0, done.stderr  # pip would have refused
    first, second = (tmp_path / "uv.log").read_text().splitlines()
    assert first.endswith(f"-r {tmp_path}/requirements.txt")
    assert second.endswith(f"--no-deps -r {tmp_path}/requirements-scoring.txt")


@pytest.mark.long
def test_what_only_scores_samples_may_be_missing(tmp_path):
    done = set_up_with({"cc": ""}, tmp_path, "# nothing\n", broken_scoring=True)
    assert done.returncode == 0 and "will not print word error rate and speaker similarity" in done.stderr
    assert list((tmp_path / ".venv").glob(".ready-*"))


@pytest.mark.long
def test_if_uv_fails_pip_installs_and_what_was_installed_stays(tmp_path):
    done = set_up_with({"cc": "", "uv": "exit 1"}, tmp_path, "./no-such-package\n")
    assert done.returncode == 2 and "the same command tries again" in done.stderr
    installed = tmp_path / ".venv" / "installed-before-the-interruption"
    installed.touch()
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    subprocess.run([tmp_path / "launch.sh", "setup"], env=environment, check=True, capture_output=True)
    assert installed.exists()


def test_another_python_is_refused_in_one_sentence(tmp_path):
    done = set_up_with({"python3": "exit 1"}, tmp_path, "# nothing\n")
    assert done.returncode == 2 and "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert "setting up" not in done.stdout


@pytest.mark.distributed
@pytest.mark.fault
def test_damage_that_rank_0_finds_is_one_sentence_on_two_ranks(demo, tmp_path):
    shutil.copytree(demo / "tokens" / "train", tmp_path / "tokens")
    [file] = (tmp_path / "tokens").glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    words = ["--model", demo / "dia", "--data", tmp_path / "tokens", "--out", tmp_path / "run"]
    done = launch("dia_lora", *words, "--precision", "fp32")
    assert done.returncode == 2, done.stdout[-2000:]
    assert done.stdout.count("is damaged: its checksum") == 1 and "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def demo_run(demo, tmp_path_factory):
    """Output and run folder of a short `./launch.sh demo`, started from another directory."""
    folder = tmp_path_factory.mktemp("demo")
    done = launch("demo", *QUICK, "--out", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout, folder / "run"


@pytest.mark.distributed
def test_demo_from_another_directory_writes_adapter_samples_and_report(demo_run):
    output, run = demo_run
    for word, path in (("adapter", "export"), ("samples", "samples"), ("report", "report.html")):
        assert re.search(rf"^{word} +{run}/{path}$", output, re.M), output[-1000:]
    assert (run / "export" / "adapter_model.safetensors").exists()
    assert "ZeRO-2 on 2 ranks" in output
    assert list((run / "samples" / "recorded").glob("*.wav"))


@pytest.mark.distributed
def test_launcher_takes_the_number_of_ranks_and_the_ds_file(demo, tmp_path):
    done = launch("dia_lora", "--ranks", "1", "--ds", "ds_configs/zero3.json", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "ZeRO-3 on 1 ranks" in done.stdout and "dry run" in done.stdout


@pytest.mark.distributed
def test_two_jobs_that_start_together_do_not_share_a_port(demo):
    """Both would find DeepSpeed's default port free; then one fails, or the ranks of one join the other."""
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(launch, "dia_lora", "--dry-run") for _ in range(2)]
    for done in (job.result() for job in jobs):
        assert done.returncode == 0 and "peak memory" in done.stdout, done.stdout[-3000:]


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
        with contextlib.suppress(OSError):  # a rank in the process of another test may hold it: busy all the same
            busy.bind(("127.0.0.1", 29500))
        busy.listen()
        words = command.replace("deepspeed", "deepspeed --num_accelerators 2").split()
        done = subprocess.run(
            [*words, "--out", str(tmp_path / "run")],
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
        env=support.environment(AUDIO_FINETUNE_ENV=support.VENV),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(2)  # the ranks are still importing
    started.terminate()
    output, _ = started.communicate(timeout=300)
    assert started.returncode != 0, output
    deadline = time.time() + 35
    while subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        assert time.time() < deadline
        time.sleep(0.2)
    assert os.listdir(tmp_path) in ([], ["run"])


# ---- using a trained run -----------------------------------------------------------------------------------------


def make_run(folder: Path, recipe: str, *exported: str) -> Path:
    """A run folder with no more than its config.json and the names of its exported files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": recipe, "config": {"ema": 0.0}}))
    for name in exported:
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export" / name).write_text("{}")
    return folder


def test_every_script_that_a_verb_runs_exists():
    for scripts in dispatch.SCRIPTS.values():
        for script in scripts.values():
            assert (support.ROOT / "finetune" / "infer" / script).is_file(), script


@pytest.mark.parametrize(
    ("verb", "recipe", "exported", "script", "flag"),
    [
        ("speak", "dia_lora", "adapter_config.json", "dia_speak.py", "--adapter"),
        ("speak", "dia_full", "config.json", "dia_speak.py", "--model"),
        ("speak", "higgs_clone", "adapter_config.json", "higgs_speak.py", "--adapter"),
        ("speak", "higgs_clone", "config.json", "higgs_speak.py", "--model"),
        ("generate", "llama_mot", "adapter_config.json", "mot_generate.py", "--adapter"),
    ],
)
def test_the_run_selects_script_and_flag(tmp_path, verb, recipe, exported, script, flag):
    run = make_run(tmp_path / "run", recipe, exported)
    words = ["--text", "a b", "--seed", "-1"]
    expected = [f"infer/{script}", flag, str(run / "export"), *words]
    for argv in (["--run", str(run), *words], [*words, f"--run={run}"]):
        assert dispatch.command_for(verb, argv) == expected


@pytest.mark.parametrize("verb", ["enhance", "diagnose"])
@pytest.mark.parametrize("recipe", ["cmgan", "diffusion_buffer"])
def test_enhancers_take_the_run_itself(tmp_path, verb, recipe):
    run = make_run(tmp_path / "run", recipe)
    command = [f"infer/{verb}.py", "--run", str(run), "--steps", "5"]
    assert dispatch.command_for(verb, ["--steps", "5", "--run", str(run)]) == command
    words = ["--model", "weights.pt", "--steps", "5"]
    assert dispatch.command_for(verb, words) == [f"infer/{verb}.py", *words]


def test_another_base_model_is_passed_on_with_the_adapter(tmp_path):
    run = make_run(tmp_path / "run", "dia_lora", "adapter_config.json")
    command = dispatch.command_for("speak", ["--run", str(run), "--model", "base", "--merge", "out"])
    assert command == ["infer/dia_speak.py", "--adapter", f"{run}/export", "--model", "base", "--merge", "out"]


def test_an_export_selects_its_script_without_the_run(tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    for recipe, script in (("dia_full", "dia_speak.py"), ("higgs_clone", "higgs_speak.py")):
        (export / "training_config.json").write_text(json.dumps({"recipe": recipe}))
        words = ["--model", str(export), "--text", "a"]
        assert dispatch.command_for("speak", words) == [f"infer/{script}", *words]


@pytest.mark.parametrize(
    ("verb", "recipe", "sentence"),
    [
        ("speak", "cmgan", "comes from cmgan, which speak does not support: use ./launch.sh enhance or ./launch.sh"),
        ("enhance", "dia_lora", "comes from dia_lora, which enhance does not support: use ./launch.sh speak."),
        ("speak", "llama_mot", "comes from llama_mot, which speak does not support: use ./launch.sh generate."),
        ("speak", "dia_lora", "export does not exist: the run has not finished"),
        ("speak", "no_recipe", "names the recipe 'no_recipe'; the recipes are cmgan, "),
    ],
)
def test_a_run_that_does_not_fit_is_one_sentence(tmp_path, verb, recipe, sentence):
    run = make_run(tmp_path / "run", recipe)
    done = launch(verb, "--run", run)
    assert done.returncode == 2 and sentence in done.stdout, done.stdout
    assert done.stdout.startswith("error: ") and done.stdout.count("\n") == 1


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="not a run folder: it holds no config.json"):
        dispatch.command_for("speak", ["--run", str(tmp_path)])
    for content in ("{", "[]", "{}"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match="names no recipe"):
            dispatch.command_for("speak", ["--run", str(tmp_path)])


def test_a_run_and_another_export_are_refused(tmp_path):
    run = make_run(tmp_path / "run", "dia_full", "config.json")
    with pytest.raises(UserError, match="give --run or --model, not both"):
        dispatch.command_for("speak", ["--run", str(run), "--model", "other"])


def test_help_of_a_verb_is_the_help_of_the_scripts_behind_it(tmp_path):
    done = launch("speak", "--help")
    assert done.returncode == 0 and "folder of a dia_lora, dia_full or higgs_clone run" in done.stdout
    run = make_run(tmp_path / "run", "dia_lora")
    done = launch("speak", "--run", run, "--help")
    assert done.returncode == 0 and "--temperature" in done.stdout
    done = launch("convert", "--help")
    assert done.returncode == 0 and "--step" in done.stdout
    done = launch("convert", "native", "--help")
    assert done.returncode == 0 and "dia_convert.py native" in done.stdout


def test_converting_a_run_without_checkpoints_is_one_sentence(tmp_path):
    run = make_run(tmp_path / "run", "dia_full")
    done = launch("convert", "--run", run, "--out", tmp_path / "model")
    assert done.returncode == 2 and f"error: {run} holds no checkpoints." in done.stdout
    assert "Traceback" not in done.stdout and not (tmp_path / "model").exists()


@pytest.mark.distributed
def test_a_trained_run_speaks_and_reports(demo_run, tmp_path):
    """Nothing but the run is named: its export, its base model and its codec are found from there."""
    _, run = demo_run
    words = ["--run", run, "--text", "[S1] bada gumi", "--seconds", "0.5"]
    done = launch("speak", *words, "--wav", tmp_path / "a.wav", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    audio, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 16000 and 0 < len(audio) <= 0.5 * rate
    done = launch("speak", *words, "--wav", tmp_path / "no-such-folder" / "a.wav")
    assert done.returncode == 2 and "no-such-folder does not exist" in done.stdout and "Traceback" not in done.stdout
    before = (run / "report.html").stat().st_mtime_ns
    done = launch("report", run)
    assert done.returncode == 0 and done.stdout.strip() == f"{run}/report.html"
    assert (run / "report.html").stat().st_mtime_ns > before
