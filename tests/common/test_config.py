"""Flags to config and back."""

import argparse
import dataclasses
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from common.config import EXIT_USER_ERROR, RunConfig, flag, parse_args
from helpers import support

ROOT = Path(__file__).resolve().parents[2]

# Every flag of every recipe. A change here changes users' commands: make it on purpose, and say so in the README.
RUN_FLAGS = """
    --ds --deepspeed_config --model --data --eval-data --out --resume
    --force-resume --no-force-resume --hang-timeout --dry-run --no-dry-run
    --verify-data --no-verify-data
    --steps --epochs --lr --lr-floor-action --warmup --min-lr-ratio --micro-tokens --accumulation --seed
    --optimizer --weight-decay --clip --ema --precision --gradient-checkpointing --no-gradient-checkpointing
    --max-skips
    --save-every --async-save --no-async-save --keep --eval-every --sample-every --samples --export --no-export
"""
DIA_FLAGS = """
    --text-mode --tag-dropout --tag-limit --tag-map --allow-empty-text --no-allow-empty-text
    --over-long-text --max-seconds --over-long --uncond --uncond-scope --channel-weights --eos-weight
    --min-eos-recall --sample-frames
"""
PAIR_FLAGS = f"""
    {RUN_FLAGS.replace("--micro-tokens", "")} --test-data --enhance --micro-batch --eval-files --seconds --hold-out
    --pesq-workers
"""
NOT_OF_BUFFER = "--test-data --seconds --gradient-checkpointing --no-gradient-checkpointing".split()
BUFFER_FLAGS = " ".join(word for word in PAIR_FLAGS.split() if word not in NOT_OF_BUFFER)
FLAGS = {
    "cmgan": f"""{PAIR_FLAGS} --diagnose --disc-lr-ratio --schedule --decay-epochs --decay
        --channels --disc-channels --w-ri --w-mag --w-time --w-gan --noisy-term --no-noisy-term --replay
        --gate --gate-open --gate-close --gan-ramp --probe --probe-every --max-pesq-invalid --window-seconds
    """,
    "diffusion_buffer": f"""
        {BUFFER_FLAGS}
        --doctor --no-doctor --deep --no-deep --safe --no-safe --overfit --delay --temperature
        --refresh-context --no-refresh-context --redraw-start --no-redraw-start --schedule --patience --drop --best-by
        --network --width --block --n-fft --hop --frames --buffer --buffer-low --sde-c --sde-k --t-eps --t-max
        --reverse-start --loss --output-scale --times --context-time --context-noise --context-own --level --phase
        --gain-low
        --gain-high --pad-short --no-pad-short
    """,
    "dia_lora": f"""{RUN_FLAGS} {DIA_FLAGS}
        --lora-groups --lora-rank --lora-alpha --lora-dropout --group-ranks --rslora --no-rslora --dora --no-dora
        --load-in
    """,
    "higgs_clone": f"""{RUN_FLAGS}
        --revision --preset --io --lora-rank --lora-alpha --lora-dropout --rslora --no-rslora --dora --no-dora --load-in
        --text-loss --codebook-weights --allow-no-ref --no-allow-no-ref --normalise-text --no-normalise-text
        --max-positions --over-long --packing --no-packing --max-start-loss --promote-worse --no-promote-worse
        --greedy --no-greedy --sample-frames --similarity --wer --codec-name
    """,
    "dia_full": f"{RUN_FLAGS} {DIA_FLAGS} --channels --freeze --layer-decay --rehearsal",
    "llama_mot": f"""{RUN_FLAGS}
        --deepspeed --no-deepspeed --min-coverage --musicgen --experts --untie --gate --gate-start --train-parts
        --adapter --ids --layout --profile --max-seq --max-text --max-audio --over-long-text
        --allow-empty-text --no-allow-empty-text --caption-dropout --loss-vocab --codebook-weights --copied-lr
        --sample-frames --temperature --top-k --guidance
    """,
}


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
            assert getattr(parse(*words), item.name) == value


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


def test_a_peak_rate_that_trains_nothing_is_kept_or_replaced_only_when_told_and_never_in_silence(capsys):
    assert parse("--lr", "1e-7", "--lr-floor-action", "warn").lr == 1e-7
    assert "WARNING: --lr 1e-07 is outside" in capsys.readouterr().out
    assert parse("--lr", "1e-7", "--lr-floor-action", "default").lr == Config().lr
    assert f"this run takes {Config().lr:g}" in capsys.readouterr().out
    assert parse("--lr", "1e-5", "--warmup", "100", "--lr-floor-action", "default").lr == 1e-5
    assert capsys.readouterr().out == ""
    assert "--lr nan is outside" in refused(capsys, "--lr", "nan", "--lr-floor-action", "warn")


@pytest.mark.parametrize("lr", ["0", "1e-12", "10", "nan", "-0.1"])
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
        ("--clip", "0"),
        ("--clip", "nan"),
        ("--epochs", "0"),
        ("--ema", "1"),
        ("--min-lr-ratio", "-0.1"),
        ("--min-lr-ratio", "1.5"),
        ("--weight-decay", "nan"),
    ],
)
def test_values_that_cannot_train_are_refused_by_the_flag_name(words, capsys):
    message = refused(capsys, *words)
    assert words[0] in message and message.count("\n") == 1


@pytest.mark.parametrize("recipe", FLAGS)
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
    began = support.child_seconds()
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert support.child_seconds() - began < 2
    assert FLAGS[recipe].split()[-1] in done.stdout


@pytest.mark.parametrize("recipe", FLAGS)
def test_the_flags_are_these(recipe, monkeypatch):
    seen = []
    real = argparse.ArgumentParser.parse_args

    def spy(parser, *rest):
        seen.extend(word for action in parser._actions for word in action.option_strings)
        return real(parser, *rest)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", spy)
    parse_args(importlib.import_module(recipe).Config, "doc", [])
    hidden = {"-h", "--help", "--local_rank", "--local-rank"}
    assert [word for word in seen if word not in hidden] == FLAGS[recipe].split()
