"""--dry-run --world N: memory, communication and checkpoint size for any number of ranks, without weights."""

import dataclasses
import importlib
import re

import pytest
import torch

from common import memory
from common.ds_config import resolve_ds
from common.errors import UserError
from common.runtime import Process

ALONE = Process(0, 1, torch.device("cpu"))
RECIPES = {
    "dia_lora": {"lora_rank": 4},
    "dia_full": {},
    "higgs_clone": {"io": "train"},
    "llama_mot": {"untie": "all"},
}

OTHERS = [name for name in RECIPES if name != "dia_lora"]
ONE_QUICK = ["dia_lora", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@pytest.fixture
def config_of(demo, higgs_demo, demo_mot):
    dia = {"model": str(demo / "dia"), "data": str(demo / "tokens/train")}
    higgs = {"model": str(higgs_demo / "model"), "data": str(higgs_demo / "tokens/train")}
    mot = {"model": str(demo_mot / "llama"), "musicgen": str(demo_mot / "musicgen"), "data": str(demo_mot / "tokens")}
    assets = {"dia_lora": dia, "dia_full": dia, "higgs_clone": higgs, "llama_mot": mot}

    def config(recipe: str, **flags):
        module = importlib.import_module(recipe)
        return module, module.Config(**(assets[recipe] | RECIPES[recipe] | {"samples": 0} | flags))

    return config


def build(module, config):
    ds = resolve_ds(config.ds, config, 1)
    with memory.unallocated(config):
        return module.build_model(config, ds, *([{}] if "dia" in module.__name__ else []))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_paper_has_the_parameters_of_the_real_one_and_no_memory(config_of, recipe):
    """Also with --ds zero3.json, which would shard a real one."""
    module, config = config_of(recipe, world=64, dry_run=True, ds="ds_configs/zero3.json")
    paper, real = build(module, config), build(*config_of(recipe))
    described = [
        {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()} for model in (paper, real)
    ]
    assert described[0] == described[1] and memory.count_parameters(paper) == memory.count_parameters(real)
    assert {p.device.type for p in paper.parameters()} == {"meta"}


@pytest.mark.parametrize("recipe", ONE_QUICK)
def test_the_table_has_a_line_for_every_deepspeed_file(config_of, recipe, capsys):
    flags = {"world": 64, "dry_run": True, "accumulation": 4, "ema": 0.9}
    module, config = config_of(recipe, **flags)
    module.train(config, ALONE, resolve_ds(config.ds, config, 1))
    printed = capsys.readouterr().out
    assert set(re.findall(r"ds_configs/\w+\.json", printed)) == {f"ds_configs/{file.name}" for file in memory.DS_FILES}
    assert f"trained {memory.count_parameters(build(module, config))[1]:,}; predicted for 64 ranks" in printed


@pytest.mark.long
def test_a_real_configuration_needs_no_weights(config_of, tmp_path, capsys):
    """Dia 1.6B on 64 ranks: figures worked out by hand."""
    from transformers import DiaConfig

    DiaConfig().save_pretrained(tmp_path)
    module, config = config_of("dia_full", model=str(tmp_path), world=64, dry_run=True, accumulation=2)
    module.train(config, ALONE, resolve_ds(config.ds, config, 1))
    printed = capsys.readouterr().out
    size = 1_611_160_576
    assert f"parameters {size:,}, trained {size:,}" in printed
    zero2, zero3 = (re.search(rf"{name}\.json +(.*)", printed)[1].split() for name in ("zero2", "zero3"))
    # Weights 2; master, its gradient and moments 16 / 64. Sent in fp32 by 64 ranks: twice 2 x 4, then the weights.
    assert zero2[0] == f"{size * (2 + 16 / 64) / 2**30:.2f}"
    assert zero2[3] == f"{size * (2 * 2 * 4 + 2) * 63 / 64 / 2**30:.2f}" and zero2[4] == f"{size * 14 / 2**30:.2f}"
    assert zero3[0] == f"{size * (2 + 16) / 64 / 2**30:.2f}"
    assert zero3[3] == f"{size * 2 * (2 * 2 + 4) * 63 / 64 / 2**30:.2f}" and zero3[4] == f"{size * 12 / 2**30:.2f}"


@pytest.mark.parametrize("bits", ["4bit", pytest.param("8bit", marks=pytest.mark.long)])
@pytest.mark.parametrize("recipe", ["dia_lora", "higgs_clone", "llama_mot"])
def test_a_quantised_base_on_paper_takes_the_bytes_that_bitsandbytes_allocates(config_of, recipe, bits):
    """On paper a weight is only marked; here every tensor that bitsandbytes makes of it is counted."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    paper = build(*config_of(recipe, world=1, dry_run=True, quantize=bits))
    real = build(*config_of(recipe, quantize=bits))
    marked = {name for name, p in paper.named_parameters() if memory.packed_bytes(p)}
    assert marked == {name for name, p in real.named_parameters() if not p.is_floating_point()} != set()
    held = whole = 0
    for module in real.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            scales = [weight.quant_state.absmax, weight.quant_state.code] if bits == "4bit" else [weight.SCB]
            held += sum(t.numel() * t.element_size() for t in (weight, *scales))
            whole += 2 * module.in_features * module.out_features
    assert memory.quantised_savings(paper, 2) == memory.quantised_savings(real, 2) == whole - held


@pytest.mark.long
def test_a_quantised_base_shrinks_the_prediction_and_is_not_sharded(config_of, capsys):
    papers = {}
    for bits in ("none", "8bit", "4bit"):
        module, config = config_of("dia_lora", world=8, dry_run=True, quantize=bits)
        papers[bits] = module.train(config, ALONE, resolve_ds(config.ds, config, 1))
        assert ("zero3.json" in capsys.readouterr().out) == (bits == "none")
    device = {bits: paper.need("ds_configs/zero2.json")["device"] for bits, paper in papers.items()}
    assert device["4bit"] < device["8bit"] < device["none"]
    assert device["none"] - device["4bit"] == papers["4bit"].packed
    assert papers["none"].activations == papers["4bit"].activations


def test_the_experts_on_paper_need_no_weights_of_musicgen(config_of, demo_mot, tmp_path):
    """Only its config.json: a download would be 2 GB."""
    (tmp_path / "config.json").write_text((demo_mot / "musicgen/config.json").read_text())
    described = [
        {name: tuple(p.shape) for name, p in build(*config_of("llama_mot", **flags)).named_parameters()}
        for flags in ({}, {"world": 8, "dry_run": True, "musicgen": str(tmp_path)})
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("recipe", ONE_QUICK)
def test_activations_on_paper_are_those_of_a_real_step(config_of, recipe, monkeypatch):
    """Forward and backward pass in fp32, with and without gradient checkpointing, on tensors that exist."""
    found = []
    monkeypatch.setattr(memory, "predict_on_paper", lambda *args: found.append(args))
    flags = {"world": 2, "dry_run": True, "precision": "fp32", "micro_tokens": 1000}
    for checkpointing in (False, True):
        module, config = config_of(recipe, gradient_checkpointing=checkpointing, **flags)
        module.train(config, ALONE, resolve_ds(config.ds, config, 1))
        model, config, loss_fn, batch = found.pop()
        real = build(module, dataclasses.replace(config, world=0))
        on_paper, measured = memory.activation_bytes(model, loss_fn, batch), memory.peak_bytes(real, loss_fn, batch)
        assert on_paper == pytest.approx(measured, rel=0.02)
        if not checkpointing:
            saved = memory.saved_bytes(lambda: loss_fn(real, batch))  # noqa: B023
            assert on_paper > saved


@pytest.mark.parametrize("recipe", ONE_QUICK)
def test_fit_asks_the_recipe_itself(config_of, recipe, capsys):
    """A card that gradient checkpointing just fits into: nothing more frugal is chosen, and the recipe predicts it."""
    from common.fit import ROOM, fit

    flags = {"world": 2, "dry_run": True, "precision": "fp32", "micro_tokens": 1000}
    sizes = {}
    for checkpointing in (False, True):
        module, config = config_of(recipe, gradient_checkpointing=checkpointing, **flags)
        paper = module.train(config, ALONE, resolve_ds(config.ds, config, 2))
        need = paper.need(config.ds)
        sizes[checkpointing] = need["device"] + need["working"] + paper.activations
    assert sizes[True] < sizes[False]
    _, config = config_of(recipe, **flags, fit=f"{(sizes[True] + 1000) / ROOM / 2**30:.9f}GB")
    capsys.readouterr()
    found = fit(config, module.train, ALONE)
    assert found.gradient_checkpointing and (found.micro_tokens, found.accumulation) == (1000, 1)
    assert found.ds == "ds_configs/zero2.json" and getattr(found, "quantize", "none") == "none"
    assert f"predicted {sizes[True] / 2**30:.2f} GB per GPU" in capsys.readouterr().out


def test_fit_needs_deepspeed(config_of):
    from common.fit import fit

    module, config = config_of("llama_mot", deepspeed=False, fit="24GB")
    with pytest.raises(UserError, match="use it without --no-deepspeed"):
        fit(config, module.train, ALONE)


# ---- enhancers -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("cmgan", {"channels": 8, "disc_channels": 4, "micro_batch": 1, "seconds": 0.5}),
        ("diffusion_buffer", {"network": "ncsnpp", "width": 8, "micro_batch": 2, "frames": 32, "buffer": 8}),
    ],
)
def test_enhancers_on_paper(pairs, recipe, flags, monkeypatch, capsys):
    """Activations are those of a real step; the table has no ZeRO-3."""
    from models.cmgan import signal

    monkeypatch.setattr(signal, "_hiss", signal._hiss.__wrapped__)  # or this process would remember one without values
    module, found, predict = importlib.import_module(recipe), [], memory.predict_on_paper
    monkeypatch.setattr(memory, "predict_on_paper", lambda *args, **more: found.append((args, more)))
    papers = []
    for _ in range(2):
        config = module.Config(data=str(pairs), samples=0, world=8, dry_run=True, **flags)
        module.train(config, ALONE, resolve_ds(config.ds, config, 1), scorer=None)
        (model, config, loss_fn, batch), more = found.pop()
        papers.append((model, config, loss_fn, batch, more))
    model, config, loss_fn, batch, more = papers[0]
    paper = predict(model, config, loss_fn, batch, **more)
    printed = capsys.readouterr().out
    assert "ds_configs/zero2.json" in printed and "zero3" not in printed
    real, _, loss_fn, batch, _ = papers[1]
    assert paper.activations == pytest.approx(memory.peak_bytes(real, loss_fn, batch), rel=0.05)
    assert (paper.total, paper.trained) == memory.count_parameters(real)
