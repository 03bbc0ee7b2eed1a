"""models/mot/network.py: routing, exactness of the text path, gradients; tiny models of the real classes."""

import copy
import math

import numpy as np
import pytest
import torch

from common.gradient_check import refuse_state
from common.loss import IGNORE
from helpers.attention_support import flex_without_compiler, pretend_flash
from helpers.mot_support import batch_of, build, loss_of, reference_loss, text_batch
from models.mot.build import calibrate, load_llama
from models.mot.data import pad, places
from models.mot.layout import music


@pytest.fixture
def make(demo_mot):
    """make(kind, untie, ...) -> a fresh, calibrated MoTLlama."""

    def call(*words, **more):
        model = build(demo_mot, *words, seed=3, **more)
        calibrate(model, batch_of(model, [12]))
        return model

    return call


def train(model, batches, steps=3, lr=1e-2, weight_decay=0.0):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay)
    model.train()
    losses = []
    for step in range(steps):
        total, stats = loss_of(model, batches[step % len(batches)])
        (total / stats[1].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / stats[1].sum()))
    return losses


# ---- the text model is untouched ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["musicgen", "llama"])
@pytest.mark.parametrize("untie", ["ffn", "ffn+norm", "all"])
def test_text_logits_are_plain_llamas_bit_for_bit_before_and_after_training(make, demo_mot, kind, untie):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(str(demo_mot / "llama"), attn_implementation="sdpa").eval()
    model = make(kind, untie).eval()
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 180, shape, generator=draw) for shape in ((1, 1), (1, 17), (3, 40))]
    for trained in (False, True):
        if trained:
            before = {name: p.detach().clone() for name, p in model.adapter().items()}
            losses = train(model, [batch_of(model, [20, 9])], steps=5, weight_decay=0.1)
            assert losses[-1] < losses[0] - 1, "it has to have learned something for this to mean anything"
            # Everything new has moved, rows of codes that occurred among them; nothing of Llama has.
            assert all(not torch.equal(before[name], p) for name, p in model.adapter().items())
            for (name, mine), (_, theirs) in zip(
                model.llama.state_dict().items(), plain.state_dict().items(), strict=True
            ):
                assert torch.equal(mine, theirs), name
        model.eval()
        with torch.no_grad():
            for ids in prompts:
                assert torch.equal(model.text_logits(ids), plain(ids).logits)


def test_a_text_prefix_in_a_mixed_batch_is_plain_llamas(make, demo_mot):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(str(demo_mot / "llama")).eval()
    model = make(untie="all").eval()
    batch = batch_of(model, [11, 5])
    with torch.no_grad():
        states = model(batch["input_ids"], batch["codebooks"], batch["mask"])
        for row, length in enumerate((7, 10)):
            expected = plain.model(batch["input_ids"][row : row + 1, :length, 0])[0]
            assert torch.allclose(states[row, :length], expected[0], atol=1e-5)


# ---- routing -----------------------------------------------------------------------------------------------------


def test_code_0_is_music(make):
    """The first id after Llama's own."""
    model = make()
    batch = pad([(np.arange(5, 9), *music(np.zeros((6, 4), dtype=int), model.layout, True))], model.layout)
    assert (batch["input_ids"] == model.layout.vocab).sum() == 6
    with torch.no_grad():
        assert float(loss_of(model, batch)[0]) == pytest.approx(float(reference_loss(model, batch)), rel=1e-6)


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.adapter().items()}


@pytest.mark.parametrize("order", ["flat", "delay"])
@pytest.mark.parametrize("untie", ["ffn", "all"])
def test_loss_and_gradients_equal_both_experts_and_a_mask(make, order, untie):
    model = make(untie=untie, order=order)
    batch = batch_of(model, [9, 4, 1])
    expected = reference_loss(model, batch)
    expected_gradients = gradients(model, expected)
    found, stats = loss_of(model, batch)
    expected, total = float(expected.detach()), float(found.detach())
    assert total == pytest.approx(expected, rel=1e-6) and float(stats[0].sum()) == pytest.approx(total)
    for name, value in gradients(model, found).items():
        scale = expected_gradients[name].abs().max()
        assert float((value - expected_gradients[name]).abs().max()) <= 1e-4 * float(scale) + 1e-6, name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("untie", ["ffn", "all"])
def test_a_batch_without_music_trains_nothing_and_breaks_nothing(make, untie, recompute):
    model = make(untie=untie).train()
    model.recompute = recompute
    total, stats = loss_of(model, text_batch(model, [[5, 6, 7], [8, 9, 10]]))
    found = gradients(model, total)
    assert float(total) == 0.0 and float(stats[1].sum()) == 0
    # Every parameter takes part: one that did not would leave another rank waiting.
    assert all(value is not None and not value.any() for value in found.values())


def test_recomputation_sees_the_route_of_its_own_batch(make):
    """Two forwards before one backward: a route kept in a module would be the second batch's in both."""
    model = make().train()
    one, two = batch_of(model, [9], seed=1), batch_of(model, [3, 5], seed=2)
    expected = gradients(model, loss_of(model, one)[0] + loss_of(model, two)[0])
    model.recompute = True
    found = gradients(model, loss_of(model, one)[0] + loss_of(model, two)[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_padding_and_neighbours_do_not_change_a_clip(make):
    model = make(untie="all").eval()
    long, short = np.arange(5, 105), np.arange(9, 12)
    batch = batch_of(model, [6, 9], [long, short])
    draw = np.random.default_rng(0)
    codes = [draw.integers(0, 2048, (n, 4)) for n in (6, 9)]
    alone = [pad([(t, *music(c, model.layout, True))], model.layout) for t, c in zip((long, short), codes, strict=True)]
    with torch.no_grad():
        together = loss_of(model, batch)[1]
        apart = sum(loss_of(model, one)[1] for one in alone)
    assert torch.allclose(together, apart, rtol=1e-6)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("untie", ["ffn", "all"])
def test_gradient_of_the_last_token_reaches_earlier_codes_through_keys_and_values(make, untie):
    """Against finite differences: detached keys and values give a gradient of half the length."""
    model = make(untie=untie)
    batch = batch_of(model, [6])
    batch["labels"][:, :-1] = IGNORE
    batch |= places(*(batch[name].numpy() for name in ("input_ids", "mask", "labels")), model.layout)
    row = int(batch["input_ids"][0, 9, 0]) - model.layout.vocab  # a code of the first frame
    total, stats = loss_of(model, batch)
    assert int(stats[1].sum()) == 1
    total.backward()
    gradient = model.audio_embed.weight.grad[row]
    assert float(gradient.abs().max()) > 0
    direction, step = gradient / gradient.norm(), 2e-3
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            model.audio_embed.weight[row] += sign * step * direction
            sides.append(float(loss_of(model, batch)[0]))
            model.audio_embed.weight[row] -= sign * step * direction
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(float(gradient.norm()), rel=0.03)


def test_a_module_that_keeps_keys_across_steps_is_refused(make):
    model = make()
    train(model, [batch_of(model, [5])], steps=3)
    refuse_state(model)
    model.llama.model.layers[1].self_attn.kept_keys = model.layers[0].ffn.fc1.weight * 2
    with pytest.raises(RuntimeError, match="layers.1.self_attn.kept_keys keeps its graph"):
        refuse_state(model)


# ---- new rows and the loss -----------------------------------------------------------------------------------------


def test_new_rows_are_small_distinct_and_cost_ln_classes(make):
    model = make()
    spread = float(model.llama.model.embed_tokens.weight.std())
    for rows in (model.audio_embed.weight, model.head.weight):
        assert float(rows.std()) == pytest.approx(0.1 * spread, rel=0.05)
        assert len(rows.unique(dim=0)) == len(rows)
    total, stats = loss_of(model, batch_of(model, [40, 30]))
    assert float(total / stats[1].sum()) == pytest.approx(math.log(2048), abs=0.05)
    assert model.head.uniform_loss() == pytest.approx(math.log(2048))
    for name, value in gradients(model, total).items():
        assert value.isfinite().all() and value.any(), name


def test_codebook_weights_scale_the_loss_but_not_the_log(make):
    model = make()
    batch = batch_of(model, [9])
    _, plain = loss_of(model, batch)
    total, stats = loss_of(model, batch, [2.0, 0.0, 1.0, 0.5])
    assert torch.equal(stats, plain)
    assert float(total) == pytest.approx(float(2 * plain[0, 0] + plain[0, 2] + 0.5 * plain[0, 3]), rel=1e-6)


def test_a_clips_weight_multiplies_its_loss(make):
    model, draw = make(), np.random.default_rng(4)
    rows = [(draw.integers(5, 150, n), *music(draw.integers(0, 2048, (n, 4)), model.layout, True)) for n in (6, 11)]
    alone = [float(loss_of(model, pad([row], model.layout), [2.0, 0.5, 1.0, 1.0])[0]) for row in rows]
    batch = pad(rows, model.layout)
    weights = torch.tensor([0.25, 3.0]).repeat_interleave(batch["mask"].shape[1])
    total, stats = loss_of(model, batch | {"position_weights": weights}, [2.0, 0.5, 1.0, 1.0])
    assert float(total) == pytest.approx(0.25 * alone[0] + 3 * alone[1], rel=1e-5)
    assert torch.equal(stats, loss_of(model, batch)[1])  # the log is not weighted


def test_rotary_frequencies_stay_fp32_in_bf16(demo_mot):
    llama = load_llama(str(demo_mot / "llama"), torch.bfloat16)
    reference = copy.deepcopy(load_llama(str(demo_mot / "llama"), torch.float32).model.rotary_emb.inv_freq)
    assert llama.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(llama.model.rotary_emb.inv_freq, reference)
    # "llama3" scaling is in: without it the slow frequencies would be 32 times faster.
    plain = 1 / 500000 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(reference[:3], plain[:3]) and float(plain[-1] / reference[-1]) == pytest.approx(32)


# ---- other attention kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("untie", ["ffn", "all"])
def test_flash_and_flex_attention_give_the_same(make, untie, monkeypatch):
    pretend_flash(monkeypatch)
    flex_without_compiler(monkeypatch)
    model = make("musicgen", untie)
    batch = batch_of(model, [20, 9])

    def gradients():
        model.zero_grad()
        loss_of(model, batch)[0].backward()
        return {name: p.grad.clone() for name, p in model.adapter().items() if p.grad is not None}

    expected, (total, _) = gradients(), loss_of(model, batch)
    model.llama.config._attn_implementation = "flash_attention_2"  # the setter asks for the package
    assert float(loss_of(model, batch)[0]) == pytest.approx(float(total), rel=1e-6)
    for name, found in gradients().items():
        assert float((found - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()), name
    model.llama.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert float(loss_of(model, batch)[0]) == pytest.approx(float(total), rel=1e-6)
