"""The forward pass of training against the library's own: its layer, its loss, its gradients."""

import functools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.lora import add_lora, base_model
from helpers import fake_device
from helpers.attention_support import flex_without_compiler, pretend_flash
from helpers.higgs_support import for_the_library, make_clips, text_only
from higgs_clone import compute_loss
from models.higgs.generate import speak
from models.higgs.layout import Row, delayed, labelled_states
from models.higgs.weights import load_higgs

CLIPS = [0, 1, 4, 9]  # of four lengths


def build(demo, kind: str):
    """The demo's model in training mode: every weight trained, or LoRA that has already learned something."""
    model = load_higgs(str(demo / "model"), "", torch.float32, text_head=True)
    if kind == "lora":
        names = [name for name, module in model.model.named_modules(prefix="model") if name.endswith("_proj")]
        model = add_lora(model, {"all": names}, 4, seed=0, modules_to_save=["audio_lm_head"])
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def library_loss(model, batch, clips) -> torch.Tensor:
    """Sum of the losses of all codes and 0.3 x that of the text, from the model's own forward and all its logits."""
    out = base_model(model).model(**for_the_library(batch), use_cache=False).last_hidden_state
    ids, labels = batch["input_ids"], batch["labels"]
    logits = base_model(model).audio_lm_head(out).unflatten(-1, (8, 1026))
    placed = torch.full((*ids.shape, 8), -100)
    placed[(ids == clips.layout.audio) | (ids == clips.layout.delay)] = batch["audio_labels"][
        batch["audio_input_ids_mask"]
    ]
    audio = F.cross_entropy(logits[:, :-1].flatten(0, 2), placed[:, 1:].flatten(), reduction="sum")
    text = base_model(model).text_lm_head(out)[:, :-1].flatten(0, 1)
    return audio + 0.3 * F.cross_entropy(text, labels[:, 1:].flatten(), reduction="sum")


def loss_and_gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict, expected: dict, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys() and len(found) > 20
    worst = {name: float((found[name] - e).norm() / (e.norm() + 1e-12)) for name, e in expected.items()}
    assert max(worst.values()) <= tolerance, max(worst.items(), key=lambda item: item[1])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_loss_and_gradients_are_the_librarys(higgs_demo, kind, packing, checkpointing):
    clips = make_clips(higgs_demo, packing=packing, text_loss=0.3)
    model, batch = build(higgs_demo, kind), clips.batch(CLIPS)
    expected = loss_and_gradients(model, library_loss(model, batch, clips))
    if checkpointing:
        base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model, compute_loss(model, batch, clips).loss_sum), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_gpu_would_not_be_waited_for(higgs_demo, packing, checkpointing):
    clips = make_clips(higgs_demo, packing=packing, text_loss=0.3)
    model, batch = build(higgs_demo, "full"), clips.batch(CLIPS)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counts = fake_device.run(functools.partial(compute_loss, clips=clips), model, batch)
    assert counts.syncs == {} and counts.launches > 100
    grouped = model.config.num_key_value_heads < model.config.num_attention_heads
    for call in counts.attention:
        assert call.is_causal is not packing and call.dense is packing
        assert call.enable_gqa is (grouped and not packing)


def test_it_costs_less_than_the_librarys(higgs_demo):
    """Kernels and bytes for the backward pass, up to the last states: there the losses differ."""
    clips = make_clips(higgs_demo)
    ours, librarys = (
        fake_device.run(forward, build(higgs_demo, "full"), clips.batch(CLIPS))
        for forward in (
            lambda model, batch: labelled_states(model, batch)[2].sum(),
            lambda model, batch: model.model(**for_the_library(batch), use_cache=False).last_hidden_state.sum(),
        )
    )
    assert librarys.syncs.total() > 16 * 2  # per layer
    assert ours.launches < 0.9 * librarys.launches and ours.saved_bytes <= librarys.saved_bytes


def test_checkpointing_saves_activations(higgs_demo):
    clips = make_clips(higgs_demo)
    saved = []
    for checkpointing in (False, True):
        model = build(higgs_demo, "lora")
        if checkpointing:
            base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
        states = fake_device.run(lambda model, batch: labelled_states(model, batch)[2].sum(), model, clips.batch(CLIPS))
        saved.append(states.saved_bytes)
    assert saved[1] < 0.35 * saved[0]


def test_padding_passes_no_mlp(higgs_demo):
    clips = make_clips(higgs_demo)
    model, batch = build(higgs_demo, "full"), clips.batch(CLIPS)
    rows = {}
    for name in ("mlp", "audio_mlp", "input_layernorm", "audio_input_layernorm"):
        module = getattr(model.model.layers[0], name)
        module.register_forward_hook(lambda _, inputs, __, name=name: rows.update({name: inputs[0].shape[0]}))
    compute_loss(model, batch, clips)
    audio = int(batch["audio_input_ids_mask"].sum())
    text = int(batch["attention_mask"].sum()) - audio
    assert batch["attention_mask"].numel() > text + audio  # there is padding
    assert rows == {"mlp": text, "input_layernorm": text, "audio_mlp": audio, "audio_input_layernorm": audio}


def test_every_module_is_called_whatever_a_batch_holds(higgs_demo):
    """Under ZeRO-3 the other ranks would wait forever for a rank that skips a module."""
    clips = make_clips(higgs_demo)
    model, layout = build(higgs_demo, "full"), clips.layout
    frames = delayed(clips.tokens.codes(0), layout)
    audio_only = Row("x", np.full(len(frames), layout.audio), frames, np.full_like(frames, -100), 0)
    called = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and name != "text_lm_head":
            module.register_forward_hook(lambda *_, name=name: called[-1].append(name))
    for batch in (clips.batch(CLIPS), text_only(clips), clips.collate([audio_only])):
        called.append([])
        compute_loss(model, batch, clips).loss_sum.backward()
    assert called[0] == called[1] == called[2] and len(called[0]) > 20


# ---- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_flash_attention_gives_the_same(higgs_demo, packing, monkeypatch):
    pretend_flash(monkeypatch)
    clips = make_clips(higgs_demo, packing=packing)
    model, batch = build(higgs_demo, "full"), clips.batch(CLIPS)
    expected = loss_and_gradients(model, compute_loss(model, batch, clips).loss_sum)
    model.config._attn_implementation = "flash_attention_2"
    assert_same(loss_and_gradients(model, compute_loss(model, batch, clips).loss_sum), expected, 2e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_flex_attention_gives_the_same(higgs_demo, packing, monkeypatch):
    flex_without_compiler(monkeypatch)
    clips = make_clips(higgs_demo, packing=packing)
    model, batch = build(higgs_demo, "full"), clips.batch(CLIPS)
    with torch.no_grad():
        expected = labelled_states(model, batch)[2]
        model.set_attn_implementation("flex_attention")
        found = labelled_states(model, batch)[2]
    assert not torch.equal(found, expected) and torch.allclose(found, expected, atol=1e-5)


def test_samples_are_generated_with_sdpa_whatever_trains(higgs_demo):
    clips = make_clips(higgs_demo, train=False)
    model = build(higgs_demo, "full")
    rows = clips.rows([0, 1], answer=False)
    expected = speak(model, rows, clips.layout, 5, seed=0, greedy=True)
    model.set_attn_implementation("flex_attention")
    found = speak(model, rows, clips.layout, 5, seed=0, greedy=True)
    assert model.config._attn_implementation == "flex_attention"
    assert all((f.stream == e.stream).all() for f, e in zip(found, expected, strict=True))
