"""bf16 as people run it: what the libraries compute in fp32 stays fp32 in every ZeRO stage, and LoRA does not; ZeRO-2
and ZeRO-3 compute the same on sequences as long as real ones; gradients are added up in fp32."""

import importlib
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import DiaForConditionalGeneration, HiggsAudioV2ForConditionalGeneration, LlamaForCausalLM

from common.ds_config import resolve_ds
from common.lora import base_model
from helpers import bf16_ranks, support
from helpers.rank_server import Runs


@pytest.fixture(scope="module")
def one_process(only_rank):
    return only_rank


@pytest.fixture
def model_of(demo, higgs_demo, demo_mot, tmp_path, one_process, restored):
    """model_of(recipe, stage) -> the recipe's model in bf16, and a plain fp32 load of the same base."""

    def build(recipe: str, stage: int, precision: str = "bf16"):
        module, _, rope = recipe.partition(" ")
        module = importlib.import_module(module)
        folder, plain_class, more, arguments = {
            "dia_lora": (demo / "dia", DiaForConditionalGeneration, {}, [{}]),
            "dia_full": (demo / "dia", DiaForConditionalGeneration, {}, [{}]),
            "higgs_clone": (higgs_demo / "model", HiggsAudioV2ForConditionalGeneration, {}, []),
            "llama_mot": (demo_mot / "llama", LlamaForCausalLM, {"musicgen": str(demo_mot / "musicgen")}, []),
        }[module.__name__]
        if rope:  # as Meta-Llama-3-8B has it
            shutil.copytree(folder, tmp_path / "llama", dirs_exist_ok=True)
            folder = tmp_path / "llama"
            config = json.loads((folder / "config.json").read_text())
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
            (folder / "config.json").write_text(json.dumps(config))
        plain = plain_class.from_pretrained(folder, dtype=torch.float32)
        flags = {"model": str(folder), "data": "-", "ds": f"ds_configs/zero{stage}.json", "precision": precision}
        config = module.Config(**flags, **more)
        model = module.build_model(config, resolve_ds(config.ds, config, 1), *arguments)
        return model, plain

    return build


RECIPES = ["dia_lora", "dia_full", "higgs_clone", "llama_mot", "llama_mot default-rope"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_floating_buffer_is_that_of_a_plain_fp32_load(model_of, recipe, stage):
    """RoPE frequencies above all: rounded to bf16 they are wrong by a radian after 1000 positions."""
    model, plain = model_of(recipe, stage)
    model = model.llama if recipe.startswith("llama") else base_model(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    expected = {name: buffer for name, buffer in plain.named_buffers() if buffer.is_floating_point()}
    assert set(buffers) == set(expected) and any("inv_freq" in name for name in buffers)
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recipe", ["dia_lora", "higgs_clone"])
def test_lora_has_the_precision_of_the_run_in_every_stage(model_of, recipe, stage, precision):
    model, _ = model_of(recipe, stage, precision)
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert trained and set(trained.values()) == {torch.bfloat16 if precision == "bf16" else torch.float32}


# ---- two ranks ---------------------------------------------------------------------------------------------------

SHARDING = ["dia_lora", "dia_full", "higgs_clone", "llama_mot"]
NO_DROPOUT = {"lora_rank": 4, "lora_dropout": 0.0}
SETTINGS = {
    "dia_lora": {**NO_DROPOUT, "lora_groups": ["attn"], "lr": 5e-4},
    "dia_full": {"lr": 3e-5},
    "higgs_clone": {**NO_DROPOUT, "lr": 5e-4, "max_start_loss": 0.0},
    "llama_mot": {"lr": 5e-4, "copied_lr": 1.0},
}
# 2 ranks x 4 micro-batches per optimizer step. Decay and rates per group are the fp32 tests' business.
TRAINING = {"precision": "bf16", "accumulation": 4, "steps": 3, "warmup": 1.0, "micro_tokens": 400, "weight_decay": 0.0}
TRAINING |= {"samples": 0, "eval_every": 0, "save_every": 0}


@pytest.fixture(scope="module")
def assets(demo, higgs_demo, demo_mot):
    """Model and training data of each recipe."""
    dia = {"model": str(demo / "dia"), "data": str(demo / "tokens/train")}
    higgs = {"model": str(higgs_demo / "model"), "data": str(higgs_demo / "tokens/train")}
    mot = {"model": str(demo_mot / "llama"), "musicgen": str(demo_mot / "musicgen"), "data": str(demo_mot / "tokens")}
    return {"dia_lora": dia, "dia_full": dia, "higgs_clone": higgs, "llama_mot": mot}


@pytest.fixture(scope="module")
def long_runs(assets, two_ranks, tmp_path_factory):
    """long_runs(recipe, name): what the recipe's engine computes on a long clip, in zero2, zero3 or fp32."""
    folder = tmp_path_factory.mktemp("long")
    tokens = {recipe: bf16_ranks.long_tokens(recipe, folder / f"{recipe}-tokens") for recipe in SHARDING}
    configs = {}
    for recipe in SHARDING:
        for name, ds, precision in (("zero2", 2, "bf16"), ("zero3", 3, "bf16"), ("fp32", 2, "fp32")):
            config = assets[recipe] | SETTINGS[recipe] | {"data": str(tokens[recipe]), "precision": precision}
            config |= {"ds": f"ds_configs/zero{ds}.json", "samples": 0, "text_dropout": 0.0}
            if recipe == "higgs_clone":
                del config["text_dropout"]
            call = {"recipe": recipe, "config": config}
            configs[f"{recipe}-{name}"] = ("helpers.bf16_ranks:long_forward", call)
    runs = Runs(two_ranks, "", folder, configs)

    def read(recipe: str, name: str):
        run = runs / f"{recipe}-{name}"
        return np.load(run / "forward.npz"), json.loads((run / "facts.json").read_text())

    return read


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", SHARDING)
def test_zero2_and_zero3_compute_the_same_on_sequences_as_long_as_real_ones(long_runs, recipe):
    """Both hold the same bf16 weights and run the same operations, so they agree to the bit.

    bf16 itself rounds every operation by up to 2^-9, 0.2 %. Some dozens of them in a row, as random as roundings are,
    stay within 2 % of what fp32 gives; RoPE frequencies in bf16, whose angles are wrong by radians at these positions,
    do not even agree between the stages.
    """
    (second, facts2), (third, facts3), (exact, _) = (long_runs(recipe, name) for name in ("zero2", "zero3", "fp32"))
    assert facts2["positions"] == facts3["positions"] > 1900
    assert np.array_equal(second["states"], third["states"]) and second["loss"] == third["loss"]
    for found in (second, third):
        away = np.linalg.norm(found["states"] - exact["states"]) / np.linalg.norm(exact["states"])
        assert away < 0.02
        assert abs(found["loss"] - exact["loss"]) < 0.01


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", SHARDING)
def test_deepspeed_leaves_buffers_in_fp32_and_trains_what_precision_says(long_runs, recipe):
    for name, trained in (("zero2", "torch.bfloat16"), ("zero3", "torch.bfloat16"), ("fp32", "torch.float32")):
        _, facts = long_runs(recipe, name)
        assert facts["trained"] == [trained]
        assert facts["buffers"] and set(facts["buffers"].values()) == {"torch.float32"}


@pytest.fixture(scope="module")
def trained(assets, two_ranks, tmp_path_factory):
    """trained(recipe, name): the folder of a run with 2 ranks, whose name says the DeepSpeed file."""
    folder = tmp_path_factory.mktemp("trained")
    # Between two ranks DeepSpeed rounds each sum of gradients to bf16 once, unless told otherwise.
    exact = {"communication_data_type": "fp32"}
    for stage in (2, 3):
        zero = {"zero_optimization": {"stage": stage}}
        (folder / f"zero{stage}.json").write_text(json.dumps(zero | exact))
        sums = {"data_types": {"grad_accum_dtype": "bf16"}}
        (folder / f"bf16-sums{stage}.json").write_text(json.dumps(zero | exact | sums))
    files = {
        f"{name}{stage}": str(folder / f"{name}{stage}.json") for name in ("zero", "bf16-sums") for stage in (2, 3)
    }
    files |= {f"shipped{stage}": f"ds_configs/zero{stage}.json" for stage in (2, 3)}
    runs = {}
    for recipe in SHARDING:
        settings = assets[recipe] | SETTINGS[recipe] | TRAINING
        configs = {f"{recipe}-{name}": settings | {"ds": ds} for name, ds in files.items()}
        hooks = {"around": "helpers.bf16_ranks:noting_gradients", "after": "helpers.bf16_ranks:write_training"}
        runs[recipe] = Runs(two_ranks, recipe, folder, configs, **hooks)
    return lambda recipe, name: runs[recipe] / f"{recipe}-{name}"


@pytest.fixture(scope="module")
def plain(assets):
    """plain(recipe): what a plain PyTorch loop with the same micro-batches gives."""
    found = {}

    def train(recipe: str):
        if recipe not in found:
            config = importlib.import_module(recipe).Config(**(assets[recipe] | SETTINGS[recipe] | TRAINING))
            found[recipe] = bf16_ranks.train_plain(recipe, config, ranks=2)
        return found[recipe]

    return train


def away(run, plain: dict, what: str, chosen=lambda name: True) -> float:
    """How far the run's "gradients" or "weights" are from the plain loop's, relative to those, or to their movement."""
    found, expected = torch.load(run / "training.pt", weights_only=True)[what], plain[what]
    start = plain["before"] if what == "weights" else {name: 0.0 for name in expected}
    assert set(found) == set(expected)
    names = [name for name in expected if chosen(name)]
    wrong = sum(float((found[name] - expected[name]).square().sum()) for name in names)
    size = sum(float((expected[name] - start[name]).square().sum()) for name in names)
    assert size > 0
    return (wrong / size) ** 0.5


def in_encoder(name: str) -> bool:
    return ".encoder." in name


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recipe", SHARDING)
def test_two_ranks_with_accumulation_follow_a_plain_loop_that_adds_up_in_fp32(trained, plain, recipe, stage):
    """Each micro-batch has the same bf16 gradients, bit for bit, so their fp32 sums over 2 ranks x 4 micro-batches
    agree to 1e-6, and three steps with them lead to the same weights, up to what Adam makes of that: it divides by
    gradients of any size, and most rows of MoT's code tables have tiny ones (weights 2e-5). A master weight that
    differs in its last bit may become another bf16 weight, 2^-9 away, which the third loss shows (4e-6 and 1.2e-5 on
    two machines; gradients added up wrongly: over 2e-3).

    There is one exception. Where the forward pass branches, autograd adds up the gradients of the branches in bf16, in
    an order that ZeRO-3's hooks change; each addition rounds by up to 2^-9. In the first step only Dia's encoder is
    behind such a place (all decoder layers read it); later ones bring LoRA's branches, hence the wide limit for
    ZeRO-3's weights.
    """
    run, expected = trained(recipe, f"zero{stage}"), plain(recipe)
    losses = [record["loss"] for record in support.step_records(run)]
    assert away(run, expected, "gradients", lambda name: stage == 2 or not in_encoder(name)) < 1e-6
    assert away(run, expected, "gradients") < (1e-6 if stage == 2 else 2**-7)
    assert away(run, expected, "weights") < (1e-4 if stage == 2 else 0.1)
    first, second, third = np.abs(np.array(losses) - expected["losses"])
    assert max(first, second) < (1e-6 if stage == 2 else 1e-3) and third < (1e-4 if stage == 2 else 1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_added_up_in_bf16_would_be_noticed_and_the_shipped_files_do_not(trained, plain, stage):
    """Three more roundings of a growing sum. The shipped files have none in ZeRO-2, which sends the sums in one piece
    and in fp32, and one in ZeRO-3, by at most 2^-9, in each sum over two ranks: only above ds_config.BF16_RANKS are the
    ranks' gradients sent in fp32."""
    expected = plain("dia_full")
    errors = [
        away(trained("dia_full", f"{name}{stage}"), expected, "gradients", lambda name: not in_encoder(name))
        for name in ("zero", "shipped", "bf16-sums")
    ]
    assert errors[0] < 1e-6 and errors[1] < (1e-6 if stage == 2 else 2**-9) and errors[2] > 2**-9
