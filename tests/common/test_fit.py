"""--fit: the first settings, from fast to frugal, whose prediction fits; what the user has set stays."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from common import memory
from common.config import RunConfig, flag, parse_args
from common.ds_config import resolve_ds, stage_of
from common.errors import UserError
from common.fit import ROOM, card_bytes, fit
from common.runtime import Process

ALONE = Process(0, 1, torch.device("cpu"))
GB = 2**30


@dataclass
class Lora(RunConfig):
    quantize: Literal["none", "8bit", "4bit"] = flag("none", "of a frozen base")


class Recipe:
    """A model of 4 G weights, 8 GB in bf16; 1.25 MB of activations per position, with checkpointing a tenth."""

    def __init__(self, trained=10**7, longest=900):
        self.trained, self.longest, self.predictions = trained, longest, 0

    def train(self, config, process, ds):
        self.predictions += 1
        quantize = getattr(config, "quantize", "none")
        if quantize != "none" and stage_of(ds) == 3:
            raise UserError("--quantize needs ZeRO-2")
        if config.micro_tokens < self.longest:
            raise UserError("--micro-tokens is below the longest clip")
        total = 4 * GB
        packed = {"none": 0, "8bit": 1.0 * total, "4bit": 1.4 * total}[quantize]
        activations = config.micro_tokens * 1.25 * 2**20 * (0.1 if config.gradient_checkpointing else 1)
        print("noise of a paper run")
        return memory.Paper(config, total, self.trained, int(packed), 0, int(activations))

    def fit(self, card, *words, config_class=Lora, world=1):
        config = parse_args(config_class, "", ["--fit", card, "--world", str(world), *words])
        return fit(config, self.train, ALONE)


def chosen(config):
    quantize = getattr(config, "quantize", "none")
    return config.ds[11:-5], quantize, config.gradient_checkpointing, config.micro_tokens, config.accumulation


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        # 8 GB of weights, 0.2 of the adapter, 10 of activations; 9 tenths of the card count
        ("24GB", ("zero2", "none", False, 8192, 1)),
        ("16GB", ("zero2", "none", False, 4096, 2)),
        ("12 GiB", ("zero2", "none", False, 2048, 4)),
        ("11gb", ("zero2", "none", True, 8192, 1)),
        ("9.5", ("zero2", "none", True, 2048, 4)),
        # Only the weights themselves are left: 8 bits, 4 bits, then host memory
        ("8GB", ("zero2", "8bit", False, 2048, 4)),
        ("5GB", ("zero2", "8bit", True, 2048, 4)),
        ("4GB", ("zero2", "4bit", True, 8192, 1)),
        ("2.3GB", ("zero3_offload", "none", True, 1024, 8)),
    ],
)
def test_smaller_cards_get_more_frugal_settings_and_the_same_batch(card, expected, capsys):
    config = Recipe().fit(card)
    assert chosen(config) == expected and config.micro_tokens * config.accumulation == 8192
    printed = capsys.readouterr().out
    assert f"--micro-tokens {config.micro_tokens} --accumulation {config.accumulation}; predicted" in printed
    assert "noise" not in printed and float(printed.split("predicted ")[1].split()[0]) <= ROOM * card_bytes(card) / GB


def test_the_choice_is_the_first_that_fits_of_all_that_can_be_trained():
    """Every combination is predicted here by itself; `fit` skips what it need not ask for."""
    order = ["zero2", "zero3", "zero2_offload", "zero3_offload"]
    for world, trained in ((1, 4 * GB), (8, 4 * GB), (64, GB), (8, 10**7)):
        sizes = {}
        for file in order:
            for checkpointing in (False, True):
                for parts in (1, 2, 4, 8) if checkpointing else (1, 2, 4):
                    flags = {"gradient_checkpointing": checkpointing, "micro_tokens": 8192 // parts}
                    config = RunConfig(ds=f"ds_configs/{file}.json", world=world, accumulation=parts, **flags)
                    paper = Recipe(trained).train(config, ALONE, resolve_ds(config.ds, config, world))
                    need = paper.need(config.ds)
                    sizes[chosen(config)] = need["device"] + need["working"] + paper.activations
        for card in (6, 10, 16, 24, 40, 48, 80, 141):
            fitting = [settings for settings, size in sizes.items() if size <= ROOM * card * GB]
            recipe = Recipe(trained)
            if fitting:
                assert chosen(recipe.fit(f"{card}GB", config_class=RunConfig, world=world)) == fitting[0]
            else:
                with pytest.raises(UserError, match=f"smallest prediction is {min(sizes.values()) / GB:.2f} GB"):
                    recipe.fit(f"{card}GB", config_class=RunConfig, world=world)
            assert recipe.predictions <= len(sizes) / 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--micro-tokens", "8192"], ("zero2", "none", True, 8192, 1)),
        (["--accumulation", "3"], ("zero2", "none", True, 8192, 3)),
        (["--no-gradient-checkpointing", "--micro-tokens", "4096"], ("zero2", "8bit", False, 4096, 1)),
        (["--quantize", "4bit"], ("zero2", "4bit", False, 4096, 2)),
        (["--ds", "ds_configs/zero3.json"], ("zero3", "none", False, 2048, 4)),
        (["--gradient-checkpointing"], ("zero2", "none", True, 8192, 1)),
        (["--optimizer", "adamw8bit"], ("zero2", "none", False, 2048, 4)),
    ],
)
def test_what_the_user_has_set_stays(words, expected):
    assert chosen(Recipe().fit("12GB", *words)) == expected


def test_flags_of_a_config_file_stay_and_the_values_of_the_demo_do_not(tmp_path):
    (tmp_path / "mine.yaml").write_text("micro_tokens: 8192\n")
    assert parse_args(Lora, "", ["--config", str(tmp_path / "mine.yaml")]).given == {"micro_tokens"}
    config = parse_args(Lora, "", ["--fit", "16GB"], demo={"micro_tokens": 8192})
    assert chosen(fit(config, Recipe().train, ALONE)) == ("zero2", "none", False, 4096, 2)


def test_the_longest_clip_bounds_the_micro_batch_and_the_smallest_prediction_is_told():
    with pytest.raises(UserError, match=r"--fit 6GB: nothing fits .* is 8\.\d\d GB per GPU, .*--micro-tokens 4096"):
        Recipe(longest=3000).fit("6GB", "--quantize", "none", "--ds", "ds_configs/zero2.json")


def test_a_run_is_predicted_for_its_own_ranks_and_then_trains():
    config = parse_args(Lora, "", ["--fit", "11GB"])
    config = fit(config, Recipe(trained=4 * GB).train, Process(0, 64, torch.device("cpu")))
    assert config.world == 0 and config.ds == "ds_configs/zero3.json"


def test_mistakes_are_told_and_without_the_flag_nothing_is_predicted(capsys):
    recipe = Recipe(longest=9000)
    with pytest.raises(UserError, match="below the longest clip"):
        recipe.fit("24GB")
    assert recipe.predictions == 1
    config = RunConfig()
    assert fit(config, None, ALONE) is config
    for word in ("24MB", "big", "0", "-3"):
        with pytest.raises(SystemExit):
            parse_args(Lora, "", [f"--fit={word}"])
        assert f"--fit {word}: write the memory of one GPU" in capsys.readouterr().err
