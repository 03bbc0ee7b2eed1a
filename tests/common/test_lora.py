"""LoRA on modules named one by one."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.lora import add_lora, resolve_groups

GROUPS = {
    "attn": (r"layers\.\d+\.(q|k|v|o)_proj", 8),
    "mlp": (r"layers\.\d+\.(up|down)", 4),
    "head": (r"head", 1),
}
WIDTH, INNER, OUT = 6, 10, 14


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.o_proj(self.q_proj(x) * self.k_proj(x) + self.v_proj(x)) + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, OUT, bias=False)
        self.q_proj = nn.Linear(WIDTH, WIDTH)  # same last name, outside every group
        self.overhead = nn.Linear(WIDTH, WIDTH)  # a name that contains the name of a group

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def renamed(model):
    layer = model.layers[1]
    layer.query = layer.q_proj
    del layer.q_proj
    return model


def wrap(wanted=("attn",), rank=4, **options):
    model = Model()
    options = {"lora_alpha": 8, "lora_dropout": 0.0} | options
    found = resolve_groups(model, GROUPS, list(wanted))
    return add_lora(model, found, rank, seed=3, **options)


def test_groups_resolve_to_the_full_names():
    found = resolve_groups(Model(), GROUPS, ["attn", "head"])
    expected = [f"layers.{i}.{p}_proj" for i in (0, 1) for p in "qkvo"]
    assert sorted(found["attn"]) == sorted(expected) and found["head"] == ["head"]


def test_a_renamed_projection_gives_found_and_expected_of_its_group_only():
    with pytest.raises(UserError) as error:
        resolve_groups(renamed(Model()), GROUPS, ["attn", "mlp"])
    assert "attn: found 7, expected 8" in str(error.value) and "mlp" not in str(error.value)


def test_a_typo_in_one_of_two_groups_is_refused():
    with pytest.raises(UserError, match="'atn'; the groups are attn, mlp, head"):
        resolve_groups(Model(), GROUPS, ["mlp", "atn"])


def test_no_group_at_all_is_refused():
    with pytest.raises(UserError, match="no LoRA group"):
        resolve_groups(Model(), GROUPS, [])


def test_exactly_the_named_modules_are_wrapped_and_nothing_else_trains():
    model = wrap(["attn", "attn", "head"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 9 and all(".lora_" in name for name in trained)
    assert not any("up" in name or name.startswith("base_model.model.q_proj") for name in trained)


@pytest.mark.parametrize(("wanted", "rank"), [(["attn"], 4), (["attn", "mlp", "head"], 2), (["head"], 1)])
def test_the_trained_count_is_the_formula(wanted, rank):
    sizes = {"attn": 8 * [2 * WIDTH], "mlp": 4 * [WIDTH + INNER], "head": [WIDTH + OUT]}
    expected = sum(rank * size for group in wanted for size in sizes[group])
    assert sum(p.numel() for p in wrap(wanted, rank).parameters() if p.requires_grad) == expected


@pytest.mark.parametrize("option", ["use_dora", "use_rslora"])
def test_a_variant_of_lora_reaches_peft_and_survives_saving(option, tmp_path):
    from peft import PeftModel

    model = wrap(["attn", "mlp"], **{option: True})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    model.save_pretrained(tmp_path)
    x = torch.randn(3, WIDTH)
    again = PeftModel.from_pretrained(Model(), tmp_path)
    assert getattr(again.peft_config["default"], option)
    assert torch.equal(again(x), model(x)) and not torch.equal(Model()(x), model(x))


def test_the_first_matrices_depend_on_the_seed_alone():
    states = []
    for global_seed in (1, 2):
        model = Model()  # sets the global generator: disturb it afterwards
        torch.manual_seed(global_seed)
        found = resolve_groups(model, GROUPS, ["attn"])
        states.append(add_lora(model, found, 4, seed=3, lora_alpha=8).state_dict())
    one, two = states
    assert all(torch.equal(one[name], two[name]) for name in one)
