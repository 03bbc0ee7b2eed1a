"""--compile: compiled layers give the loss and the gradients of uncompiled ones, for batches of many sizes."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder

from common import compiling
from common.errors import UserError
from common.lora import base_model
from helpers import higgs_support, mot_support

DS = {"zero_optimization": {"stage": 2}}
LORA = {"precision": "fp32", "lora_rank": 4, "lora_dropout": 0.1}
# Clips of a batch. One clip alone is a special size, and so is the first batch, from which torch makes the first code.
BATCHES = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 0, 5], [2, 9], [1, 4, 8, 3, 7]]


def dia(demo, recipe, checkpointing, backend):
    import dia_full
    import dia_lora
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layers_of, layout_of

    recipe = {"dia_lora": dia_lora, "dia_full": dia_full}[recipe]
    flags = LORA if recipe is dia_lora else {"precision": "fp32"}
    config = recipe.Config(model=str(demo / "dia"), gradient_checkpointing=checkpointing, **flags)
    model = recipe.build_model(config, DS, {})
    clips = Clips(TokenDataset(str(demo / "tokens/train")), layout_of(base_model(model).config), config, {}, train=True)
    compile = functools.partial(compiling.compile_layers, layers_of(model), DS, backend)
    return model, clips.batch, functools.partial(recipe.compute_loss, clips=clips), compile


def higgs(demo, packing, checkpointing, backend):
    import higgs_clone
    from models.higgs.network import run_layer

    config = higgs_clone.Config(model=str(demo / "model"), gradient_checkpointing=checkpointing, **LORA)
    model = higgs_clone.build_model(config, DS)
    clips = higgs_support.make_clips(demo, packing=packing)

    def compile():
        base_model(model).model.run_layer = compiling.compiled(run_layer, DS, backend)

    return model, clips.batch, functools.partial(higgs_clone.compute_loss, clips=clips), compile


def mot(demo, untie, checkpointing, backend):
    from models.mot.network import run_layer

    model = mot_support.build(demo, untie=untie)
    model.recompute = checkpointing

    def compile():
        model.run_layer = compiling.compiled(run_layer, DS, backend)

    def batch(rows):
        return mot_support.batch_of(model, [5 + 3 * row for row in rows])

    return model, batch, mot_support.loss_output, compile


def results(model, loss_of, batches) -> list[dict]:
    """Loss and gradients of each batch; dropout draws the same numbers each time."""
    found = []
    for batch in batches:
        torch.manual_seed(7)
        model.zero_grad()
        loss = loss_of(model, batch).loss_sum
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach()} | gradients)
    return found


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for batch, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.keys() == e.keys() and len(f) > 10
        worst = {name: float((f[name] - e[name]).norm() / (e[name].norm() + 1e-9)) for name in e}
        name = max(worst, key=worst.get)
        assert worst[name] <= 1e-4, (batch, name, worst[name])


CASES = {  # and whether with gradient checkpointing
    "dia_lora": (dia, "demo", "dia_lora", True),
    "dia_full": (dia, "demo", "dia_full", False),
    "higgs": (higgs, "higgs_demo", False, True),
    "higgs, packing": (higgs, "higgs_demo", True, False),
    "mot": (mot, "demo_mot", "ffn", False),
    "mot, own attention": (mot, "demo_mot", "all", True),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_many_lengths(request, case):
    build, assets, kind, checkpointing = CASES[case]
    model, make_batch, loss_of, compile = build(request.getfixturevalue(assets), kind, checkpointing, "aot_eager")
    model.train()
    batches = [make_batch(rows) for rows in BATCHES]
    expected, names = results(model, loss_of, batches), list(model.state_dict())
    torch._dynamo.reset()
    compile()
    counters.clear()
    assert_same(results(model, loss_of, batches[:2]), expected[:2])
    graphs = counters["stats"]["unique_graphs"]
    # A layer whose input has a gradient or is a view, or not; one clip or several. Dia has two kinds of layers.
    assert 2 <= graphs <= (8 if build is dia else 4)
    assert_same(results(model, loss_of, batches[2:]), expected[2:])
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    assert list(model.state_dict()) == names
    model.eval()
    with torch.no_grad():
        loss_of(model, batches[0])
    assert counters["stats"]["unique_graphs"] == graphs  # evaluation is not compiled


# ---- without a model -------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


def test_layers_share_their_code_in_training_and_keep_their_names():
    model = torch.nn.Sequential(Layer(), Layer(), Layer())
    inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (5, 3, 9, 2)]
    expected, names = [model(x) for x in inputs], list(model.state_dict())
    torch._dynamo.reset()
    compiling.compile_layers(model, DS, "aot_eager")
    counters.clear()
    model.eval()
    assert torch.equal(model(inputs[0]), expected[0]) and not counters["stats"]
    model.train()
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), y)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names


def test_zero_3_is_refused():
    with pytest.raises(UserError, match="--compile does not work with ZeRO-3"):
        compiling.compile_layers([Layer()], {"zero_optimization": {"stage": 3}})


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(tmp_path / "g++"),))
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with pytest.raises(UserError, match="--compile needs a C"):
            compiling.compile_layers([Layer()], DS)
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
