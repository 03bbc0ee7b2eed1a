"""bf16 as people run it: what the libraries compute in fp32 stays fp32 in every ZeRO stage, and LoRA does not."""

import importlib
import json
import shutil

import pytest
import torch
from transformers import DiaForConditionalGeneration, HiggsAudioV2ForConditionalGeneration, LlamaForCausalLM

from common import engine
from common.ds_config import resolve_ds
from common.lora import base_model
from common.runtime import init_process


@pytest.fixture(scope="module")
def one_process():
    return init_process()


@pytest.fixture
def model_of(demo, higgs_demo, demo_mot, tmp_path, one_process):
    """model_of(recipe, stage) -> the recipe's model in bf16, and a plain fp32 load of the same base."""

    def build(recipe: str, stage: int):
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
        config = module.Config(model=str(folder), data="-", ds=f"ds_configs/zero{stage}.json", precision="bf16", **more)
        model = module.build_model(config, resolve_ds(config.ds, config, 1), *arguments)
        return model, plain

    yield build
    engine.build_sharded({"zero_optimization": {"stage": 0}})  # or from_pretrained would shard in all later tests


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


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recipe", ["dia_lora", "higgs_clone"])
def test_lora_has_the_precision_of_the_run_in_every_stage(model_of, recipe, stage):
    model, _ = model_of(recipe, stage)
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert trained and set(trained.values()) == {torch.bfloat16}
