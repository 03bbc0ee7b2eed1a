"""Flags to config and back."""

import dataclasses
import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from common.config import HF_ALIASES, RunConfig, build_parser, flag, parse_args
from common.errors import EXIT_USER_ERROR

ROOT = Path(__file__).resolve().parents[2]

RECIPES = ("dia_lora", "dia_full", "higgs_clone", "llama_mot", "cmgan", "diffusion_buffer")


@dataclass
class Config(RunConfig):
    groups: list[str] = flag(["a", "b"], "a list")
    sizes: list[int] = flag([], "a list of numbers")
    mode: Literal["one", "two"] = flag("one", "a choice")
    count: Literal[16, 32] = flag(32, "a choice of numbers")
    fast: bool = flag(True, "a switch that is on")


def parse(*argv, **options) -> Config:
    return parse_args(Config, "doc", list(argv), **options)


def refused(capsys, *argv, code=EXIT_USER_ERROR) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == code
    return capsys.readouterr().err


def test_no_flags_give_the_dataclass_defaults():
    assert parse() == Config()


def test_every_field_is_a_flag_that_sets_it():
    other = {str: "x", int: 7, float: 0.5, bool: True}
    special = {"lr": 2e-4, "ds": "ds_configs/zero3.json"}
    for item in dataclasses.fields(Config):
        if item.type in other and item.name not in ("model", "data"):
            value = special.get(item.name, other[item.type])
            name = item.name.replace("_", "-")
            words = [f"--{name}"] if value is True else [f"--{name}", str(value)]
            words += ["--model", "m", "--data", "d"] if item.name == "eval_split" else []
            assert getattr(parse(*words), item.name) == value


def test_a_split_takes_the_place_of_evaluation_data(capsys):
    both = ["--model", "m", "--data", "d", "--eval-split", "0.1"]
    assert parse(*both).eval_source == "d" and parse(*both[:4]).eval_source == ""
    assert parse(*both[:4], "--eval-data", "e").eval_source == "e"
    for words in ([*both, "--eval-data", "e"], both[4:]):
        assert "--eval-split divides --data" in refused(capsys, *words)


def test_lists_take_several_values_none_or_their_default():
    assert parse("--groups", "x", "y", "z").groups == ["x", "y", "z"]
    assert parse("--groups").groups == []
    assert parse("--sizes", "1", "20").sizes == [1, 20]
    changed = parse()
    changed.groups.append("c")
    assert parse().groups == ["a", "b"], "one config's list must not be another's default"


def test_a_switch_can_be_turned_on_and_off():
    assert parse("--no-fast").fast is False
    assert parse("--dry-run").dry_run is True
    assert parse("--dry-run", "--no-dry-run").dry_run is False


def test_a_choice_outside_the_list_is_refused_with_the_list(capsys):
    assert parse("--mode", "two").mode == "two"
    message = refused(capsys, "--mode", "three")
    assert "one" in message and "two" in message
    assert parse("--count", "16").count == 16
    assert "32" in refused(capsys, "--count", "17")


@pytest.mark.parametrize("name", ["--ds", "--deepspeed_config"])
def test_the_ds_file_has_two_names(name):
    assert parse(name, "ds_configs/zero3.json").ds == "ds_configs/zero3.json"


def test_a_missing_ds_file_is_refused_before_anything_heavy(capsys):
    assert refused(capsys, "--ds", "nowhere.json").startswith("error: --ds nowhere.json: no such file")


@pytest.mark.parametrize("word", ["--local_rank=1", "--local-rank=1"])
def test_local_rank_of_old_launchers_is_ignored(word, capsys):
    assert parse(word) == Config()
    assert "local" not in refused(capsys, "--help", code=0)


@pytest.mark.parametrize("word", ["--accum=2", "--nonsense", "stray"])
def test_unknown_and_abbreviated_flags_are_refused(word, capsys):
    assert word.split("=")[0] in refused(capsys, word)


def test_demo_values_lie_between_default_and_flag():
    demo = {"steps": 120, "lr": 1e-3, "groups": ["demo"]}
    config = parse("--steps", "5", demo=demo)
    assert (config.steps, config.lr, config.groups, config.warmup) == (5, 1e-3, ["demo"], Config().warmup)
    real = parse("--model", "m", "--data", "d", demo=demo)
    assert (real.steps, real.lr, real.groups) == (0, Config().lr, ["a", "b"])


@pytest.mark.parametrize("lr", ["0", "1e-12", "1e-7", "10", "nan", "-0.1"])
def test_a_learning_rate_that_cannot_train_is_refused_in_one_sentence(lr, capsys):
    message = refused(capsys, "--lr", lr)
    assert message.startswith("error: --lr ") and message.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "m"),
        ("--data", "d"),
        ("--accumulation", "0"),
        ("--micro-tokens", "0"),
        ("--keep", "1"),
        ("--steps", "-1"),
        ("--warmup", "-1"),
        ("--max-grad-norm", "0"),
        ("--max-grad-norm", "nan"),
        ("--epochs", "0"),
        ("--ema", "1"),
        ("--min-lr-ratio", "-0.1"),
        ("--min-lr-ratio", "1.5"),
        ("--weight-decay", "nan"),
        ("--tracker", "tensorbord"),
    ],
)
def test_values_that_cannot_train_are_refused_by_the_flag_name(words, capsys):
    message = refused(capsys, *words)
    assert words[0] in message and message.count("\n") == 1


@pytest.mark.parametrize("recipe", ["cmgan", "diffusion_buffer", "dia_lora"])
def test_without_pesq_the_enhancers_say_how_to_get_it(recipe, monkeypatch, capsys):
    monkeypatch.setattr("common.config.find_spec", lambda name: None if name == "pesq" else find_spec(name))
    module = importlib.import_module(recipe)
    if recipe == "dia_lora":
        parse_args(module.Config, "", [], module.DEMO)
        return
    with pytest.raises(SystemExit) as exit_info:
        parse_args(module.Config, "", [], module.DEMO)
    assert exit_info.value.code == EXIT_USER_ERROR and "build-essential" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("common.config.find_spec", lambda name: None)
    assert "--tracker wandb: the package wandb is not installed" in refused(capsys, "--tracker", "wandb")


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_is_quick_and_loads_no_torch(recipe):
    probe = (
        "import runpy, sys\n"
        f"sys.argv = ['{recipe}.py', '--help']\n"
        "sys.path.insert(0, 'finetune')\n"
        f"try:\n    runpy.run_path('finetune/{recipe}.py', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "loaded = {name for name, module in sys.modules.items() if module}\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'numpy', 'dac', 'torchaudio'} & loaded\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--ds" in done.stdout


# ---- the Hugging Face Trainer's names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--learning-rate", "2e-5"), "lr", 2e-5),
        (("--num-train-epochs", "3"), "epochs", 3.0),
        (("--max-steps", "7"), "steps", 7),
        (("--gradient-accumulation-steps", "4"), "accumulation", 4),
        (("--max-grad-norm", "0.5"), "max_grad_norm", 0.5),
        (("--weight-decay", "0.1"), "weight_decay", 0.1),
        (("--warmup-steps", "100"), "warmup", 100.0),
        (("--warmup-ratio", "0.1"), "warmup", 0.1),
        (("--save-steps", "50"), "save_every", 50),
        (("--eval-steps", "60"), "eval_every", 60),
        (("--save-total-limit", "5"), "keep", 5),
        (("--output-dir", "there"), "out", "there"),
        (
            ("--resume-from-checkpoint", "runs/x/checkpoints/step-00000010"),
            "resume",
            "runs/x/checkpoints/step-00000010",
        ),
        (("--seed", "3"), "seed", 3),
        (("--precision", "fp32", "--bf16"), "precision", "bf16"),
    ],
)
def test_the_trainers_names_set_the_same_fields(words, field, value):
    assert getattr(parse(*words), field) == value


def test_every_alias_is_one_line_of_help(capsys):
    text = " ".join(build_parser(Config, "doc").format_help().split())
    for name, field in HF_ALIASES.items():
        assert f"same as --{field.replace('_', '-')}" in text.split(f"--{name} ")[-1][:90], name


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("--learning-rat", "--learning-rate"), ("--accumulations=2", "--accumulation"), ("--zzz", None)],
)
def test_an_unknown_flag_names_the_nearest_known_one(word, nearest, capsys):
    message = refused(capsys, word)
    assert message.startswith(f"error: unknown flag {word.split('=')[0]}") and message.count("\n") == 1
    assert (f"did you mean {nearest}?" in message) if nearest else ("--help lists" in message)


# ---- --config ----------------------------------------------------------------------------------------------------


def written(tmp_path, content: str) -> str:
    (tmp_path / "flags.yaml").write_text(content)
    return str(tmp_path / "flags.yaml")


def test_a_yaml_file_gives_flags_and_the_command_line_wins(tmp_path):
    file = written(tmp_path, "lr: 2e-5\nwarmup: 10\nsave-every: 7\ngroups: [x, y]\nfast: false\nmode: two\ncount: 16\n")
    config = parse("--config", file, "--warmup", "20")
    assert (config.lr, config.warmup, config.save_every, config.groups) == (2e-5, 20.0, 7, ["x", "y"])
    assert (config.fast, config.mode, config.count) == (False, "two", 16)


def test_a_config_file_lies_between_demo_and_flag(tmp_path):
    config = parse("--config", written(tmp_path, "steps: 5\n"), demo={"steps": 120, "lr": 1e-3})
    assert (config.steps, config.lr) == (5, 1e-3)
    named = parse("--config", written(tmp_path, "model: m\ndata: d\n"), demo={"steps": 120})
    assert named.steps == 0, "with a model and data of the user's own there is no demo"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("learning_rte: 1e-4", "unknown flag --learning_rte; did you mean --learning-rate?"),
        ("steps: many", 'steps is "many"; it takes int'),
        ("steps: 1.5", "steps is 1.5; it takes int"),
        ("fast: 1", "fast is 1; it takes bool"),
        ("mode: three", 'mode is "three"; it takes one or two'),
        ("groups: a", 'groups is "a"'),
        ("lr: 5", "--lr 5.0 is out of range"),
        ("- lr", "must hold flags and their values"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_bad_config_file_is_one_sentence(tmp_path, capsys, content, words):
    message = refused(capsys, "--config", written(tmp_path, content))
    assert message.startswith("error: ") and words in message and message.count("\n") == 1


def test_a_missing_config_file_is_one_sentence(capsys):
    assert "--config nowhere.yaml cannot be read" in refused(capsys, "--config", "nowhere.yaml")


def test_the_config_json_of_a_run_repeats_it_elsewhere(tmp_path, capsys):
    first = Config(seed=5, lr=2e-5, groups=["x"], model="m", data="d", out="runs/first", resume="never")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"recipe": "test_config", "config": dataclasses.asdict(first), "ranks": 1}))
    again = parse("--config", str(file), "--out", "runs/second")
    assert again == dataclasses.replace(first, out="runs/second", resume="auto")
    assert parse("--config", str(file)).out == "", "it would resume the first run"
    file.write_text(file.read_text().replace('"ranks": 1', '"ranks": 8'))
    parse("--config", str(file))
    assert "ran on 8 ranks, this run has 1" in capsys.readouterr().out
    file.write_text(file.read_text().replace("test_config", "dia_full"))
    assert "belongs to a dia_full run" in refused(capsys, "--config", str(file))
