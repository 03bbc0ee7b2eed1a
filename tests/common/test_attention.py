"""--attn on machines that are not there."""

import pytest
import torch
from transformers import utils

from common.attention import choose_attention
from common.errors import UserError

FLASH2, FLASH3, FLEX = "flash_attention_2", "flash_attention_3", "flex_attention"


@pytest.fixture
def machine(monkeypatch):
    """machine(generation, packages): the GPU's compute capability, None without a GPU, and what is installed."""

    def pretend(generation: int | None, *installed: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: generation is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
        monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: FLASH2 in installed)
        monkeypatch.setattr(utils, "is_flash_attn_3_available", lambda: FLASH3 in installed)
        monkeypatch.setattr(utils, "is_triton_available", lambda: FLEX in installed)

    return pretend


@pytest.mark.parametrize(
    ("generation", "installed", "options", "expected"),
    [
        (None, (FLASH2, FLASH3, FLEX), {"packing": True}, "sdpa"),
        (8, (), {}, "sdpa"),
        (8, (FLEX,), {}, "sdpa"),
        (8, (FLEX,), {"packing": True}, FLEX),
        (8, (FLEX, FLASH2, FLASH3), {"packing": True}, FLASH2),
        (9, (FLEX, FLASH2, FLASH3), {}, FLASH3),
        (10, (FLEX, FLASH2, FLASH3), {}, FLASH2),
        (9, (FLEX, FLASH2, FLASH3), {"masks": True}, "sdpa"),
        (7, (FLASH2,), {}, "sdpa"),
    ],
)
def test_auto_takes_the_best_that_works(machine, generation, installed, options, expected):
    machine(generation, *installed)
    assert choose_attention("auto", "bf16", **options) == expected


def test_flash_attention_has_no_fp32(machine):
    machine(9, FLASH2, FLASH3, FLEX)
    assert choose_attention("auto", "fp32") == "sdpa"
    assert choose_attention("auto", "fp32", packing=True) == FLEX
    with pytest.raises(UserError, match="--attn flash_attention_2 cannot be used: it needs --precision bf16"):
        choose_attention(FLASH2, "fp32")


@pytest.mark.parametrize("name", [FLASH2, FLASH3, FLEX])
def test_a_choice_that_cannot_run_is_one_sentence(machine, name):
    for generation, installed, reason in [
        (None, (name,), "an NVIDIA GPU"),
        (9, (), "package"),
        *([(7, (name,), "generation")] if name != FLEX else []),
    ]:
        machine(generation, *installed)
        with pytest.raises(UserError, match=f"--attn {name} cannot be used: .*{reason}"):
            choose_attention(name, "bf16")
    machine(9, name)
    assert choose_attention(name, "bf16", masks=True) == name
    machine(None)
    assert choose_attention("sdpa", "bf16") == "sdpa"
