"""Each recipe's own loss, forward and backward, on a device that is not there: nothing is left on the CPU, the host
never waits, attention gets no mask it can do without."""

import functools

import pytest
import torch
from torch import nn

from helpers import fake_device, mot_support

DS = {"zero_optimization": {"stage": 2}}
FLAGS = {"precision": "fp32", "data": "x"}


def dia(demo, name, **flags):
    """Model, ragged batch and loss of a Dia recipe."""
    import dia_full
    import dia_lora
    from common.lora import base_model
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    recipe = {"dia_lora": dia_lora, "dia_full": dia_full}[name]
    config = recipe.Config(model=str(demo / "dia"), **FLAGS | flags)
    model = recipe.build_model(config, DS, {}).train()
    clips = Clips(TokenDataset(str(demo / "tokens/train")), layout_of(base_model(model).config), config, {}, train=True)
    rows = clips.lengths.argsort()[[0, -1]]
    return model, clips.batch(rows), functools.partial(recipe.compute_loss, clips=clips)


def mot(demo, untie, recompute=False, **layout):
    import llama_mot

    model = mot_support.build(demo, untie=untie, **layout).train()
    model.recompute = recompute
    batch = mot_support.batch_of(model, [9, 4]) | {"codebook_weights": torch.ones(4)}
    return model, batch, llama_mot.compute_loss


def higgs(demo):
    import higgs_clone
    from helpers import higgs_support

    clips = higgs_support.make_clips(demo)
    config = higgs_clone.Config(**higgs_support.SMALL | higgs_support.assets(demo))
    rows = clips.lengths.argsort()[[0, -1]]
    loss = functools.partial(higgs_clone.compute_loss, clips=clips)
    return higgs_clone.build_model(config, DS).train(), clips.batch(rows), loss


def is_ragged(batch: dict, mask: str) -> bool:
    return not batch[mask].all()


@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("recipe", ["dia_lora", "dia_full"])
def test_dia(demo, recipe, flags):
    model, batch, loss = dia(demo, recipe, **flags)
    assert is_ragged(batch, "attention_mask")
    counts = fake_device.run(loss, model, batch)
    assert not counts.syncs
    positions = batch["decoder_input_ids"].shape[1]
    own = [call for call in counts.attention if call.queries == call.keys == positions]
    others = [call for call in counts.attention if call not in own]
    assert len(own) == len(others) / 2 == 2 * (1 + len(flags))
    assert all(call.mask is None and call.is_causal for call in own)
    # Texts are padded too and everything attends to them: their mask stays, one value per key.
    assert all(call.mask == (2, 1, 1, batch["input_ids"].shape[1]) for call in others)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("untie, order", [("ffn", "flat"), ("all", "delay"), ("ffn+norm", "flat")])
def test_llama_mot(demo_mot, untie, order, recompute):
    model, batch, loss = mot(demo_mot, untie, recompute, order=order)
    assert is_ragged(batch, "mask")
    counts = fake_device.run(loss, model, batch)
    assert not counts.syncs
    assert len(counts.attention) == 4 * (1 + recompute)
    assert all(call.mask is None and call.is_causal for call in counts.attention)
    kv_heads = model.llama.config.num_key_value_heads
    assert all(call.kv_heads == kv_heads for call in counts.attention), "K and V are not repeated"


def test_higgs(higgs_demo):
    model, batch, loss = higgs(higgs_demo)
    assert is_ragged(batch, "attention_mask")
    counts = fake_device.run(loss, model, batch)
    assert not counts.syncs
    assert len(counts.attention) == len(model.base_model.model.model.layers)
    assert all(call.mask is None and call.is_causal for call in counts.attention)
    kv_heads = model.base_model.model.config.num_key_value_heads
    assert all(call.kv_heads == kv_heads for call in counts.attention), "K and V are not repeated"


# ---- the device itself -------------------------------------------------------------------------------------------


def moved(tensor: str):
    """The mutation: one tensor stays on the CPU."""

    def change(loss):
        return lambda model, batch: loss(model, batch | {tensor: batch[tensor].cpu()})

    return change


@pytest.mark.parametrize(
    "name", ["input_ids", "attention_mask", "decoder_input_ids", "labels", "targets", "channel_weights"]
)
def test_one_tensor_of_the_batch_on_the_cpu_fails(demo, name):
    model, batch, loss = dia(demo, "dia_full")
    with pytest.raises(RuntimeError, match="device"):
        fake_device.run(moved(name)(loss), model, batch)


def test_one_parameter_on_the_cpu_fails(demo_mot):
    model, batch, loss = mot(demo_mot, "ffn")

    def with_cpu_norm(model, batch):
        norm = model.llama.model.layers[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight.cpu())
        return loss(model, batch)

    with pytest.raises(RuntimeError, match="device"):
        fake_device.run(with_cpu_norm, model, batch)


class Known(nn.Module):
    """A network whose counts can be told by hand."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Buffer(torch.ones(4))


def test_counts_of_a_known_network():
    """ids (2, 3) -> embedding (96 B), times a buffer (96 B), head (240 B), squared and summed."""
    model = Known()
    counts = fake_device.run(
        lambda m, b: m.head(m.table(b["ids"]) * m.scale).square().sum(), model, {"ids": torch.zeros(2, 3).long()}
    )
    assert model.head.weight is model.table.weight, "what is shared stays shared"
    assert not counts.syncs and not counts.attention
    forward = {"embedding": 1, "mul": 1, "mm": 1, "pow": 1, "sum": 1}
    assert all(counts.kernels[name] >= number for name, number in forward.items())
    # Saved: the input of the head and the input of the square; the table, the ids and the buffer were there before.
    assert counts.saved_bytes == 96 + 240


def test_every_way_to_make_the_host_wait_is_counted():
    mask = torch.tensor([True, False, True])

    def loss(model, batch):
        x, m = model.table.weight[:3], batch["mask"]
        assert x[m].shape == (2, 4) and m.nonzero().shape == (2, 1), "sizes are those of the true values"
        assert bool(m.any()) and int(m.sum()) == 2
        y = x * torch.as_tensor([1.0, 2.0, 3.0, 4.0], device=m.device)
        y[:, torch.zeros(1, dtype=torch.long)]  # an index on the CPU
        m.cpu()
        return y.masked_select(m[:, None]).sum()

    counts = fake_device.run(loss, Known(), {"mask": mask})
    assert counts.syncs == {"boolean index": 1, "nonzero": 1, "item": 2, "copy to device": 2, "copy to host": 1} | {
        "masked_select": 1
    }
