"""Loss (of both recipes), evaluation, generation and loading on a tiny Dia."""

import contextlib
import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dia_full
from common.errors import UserError
from common.lora import base_model
from common.loss import IGNORE, loss_head
from common.runtime import Process
from models.dia import evaluate
from models.dia.evaluate import token_metrics
from models.dia.generate import speak
from models.dia.layout import text_bytes
from models.dia.weights import load_dia

RATE = 44100 / 512
ONE_RANK = Process(0, 1, torch.device("cpu"))


@pytest.fixture(params=["dia_lora", "dia_full"])
def compute_loss(request):
    """Each recipe has its own copy, which people edit: both must be right as shipped."""
    return importlib.import_module(request.param).compute_loss


def hf_output(model, batch, labels=True):
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "ids")}
    flat = batch["labels"].transpose(1, 2).reshape(-1, batch["labels"].shape[1])  # (B*C, L), as the model wants it
    return model(**inputs, labels=flat if labels else None, use_cache=False)


def hf_logits(model, batch):
    """(B, L, C, V) out of the model's (B*C, L, V)."""
    b, length, c = batch["labels"].shape
    with torch.no_grad():
        return hf_output(model, batch, labels=False).logits.view(b, c, length, -1).transpose(1, 2)


# ---- the probe of an export ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [24, 6])
def test_the_probe_holds_what_is_said_and_its_likeliest_codes(tiny_dia, make_clips, random_codes, frames, monkeypatch):
    """Also of a model that stops before the longest delay."""
    model, clips = tiny_dia(), make_clips(random_codes(12, 5))
    model.logits_dense = loss_head(model.logits_dense)
    monkeypatch.setattr(evaluate, "PROBE_FRAMES", frames)
    inputs, logits = evaluate.probe(model, clips, torch.device("cpu"))
    [(said, _)] = speak(model, [clips.text(1, 0)], frames, 0)
    positions, channels = 5 + clips.layout.tail, clips.layout.channels  # of the shorter clip
    codes = inputs["codes"].view(-1, channels)
    assert len(codes) == positions + len(said) and len(logits) == codes.numel() and (codes[:positions] == -1).all()
    for channel, delay in enumerate(clips.layout.delay):
        heard = codes[positions + delay :, channel]
        assert heard.tolist() == said[: max(0, len(said) - delay), channel].tolist()
    is_said = inputs["codes"] >= 0
    assert torch.equal(logits[is_said][:, :1024].argmax(-1), inputs["codes"][is_said])
    library = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                    decoder_input_ids=inputs["said_input_ids"], use_cache=False).logits  # fmt: skip
    assert torch.allclose(library.transpose(0, 1).flatten(0, 1), logits[positions * channels :], atol=1e-5)


def test_the_probe_of_a_model_that_says_nothing_is_the_clip_alone(tiny_dia, make_clips, random_codes, monkeypatch):
    model, clips = tiny_dia(), make_clips(random_codes(12))
    monkeypatch.setattr(evaluate, "speak", lambda *_: [(np.zeros((0, 9), np.int16), True)])
    inputs, logits = evaluate.probe(model, clips, torch.device("cpu"))
    assert (inputs["codes"] == -1).all() and len(inputs["codes"]) == len(logits)
    assert inputs["said_input_ids"].shape == (1, 0, 9)


# ---- loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_loss_sum_over_count_is_the_models_own_loss(tiny_dia, make_clips, random_codes, compute_loss, fused):
    model, clips = tiny_dia(), make_clips(random_codes(12, 5, 30))
    batch = clips.batch([0, 1, 2])
    expected = float(hf_output(model, batch).loss)
    if fused:
        model.logits_dense = loss_head(model.logits_dense)
    loss, parts, _ = compute_loss(model, batch, clips)
    count = (batch["labels"] != IGNORE).sum()
    assert float(loss / count) == pytest.approx(expected, rel=1e-6) and clips.target_weight([0, 1, 2], 0) == count
    assert list(parts) == [f"channel_{c}" for c in range(9)]
    sums, counts = torch.stack(list(parts.values())).T
    assert counts.tolist() == [13 + 6 + 31] * 9 and float(sums.sum()) == pytest.approx(float(loss), rel=1e-6)


def test_every_gradient_is_that_of_the_models_own_loss(tiny_dia, make_clips, random_codes, compute_loss):
    clips = make_clips(random_codes(12, 5))
    batch = clips.batch([0, 1])
    count = float((batch["labels"] != IGNORE).sum())
    theirs, ours = tiny_dia(), tiny_dia()
    hf_output(theirs, batch).loss.backward()
    ours.logits_dense = loss_head(ours.logits_dense)
    (compute_loss(ours, batch, clips).loss_sum / count).backward()
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * a.grad.abs().max() + 1e-9, name


def test_channel_and_end_weights_weigh_single_tokens(tiny_dia, make_clips, random_codes, compute_loss):
    clips = make_clips(random_codes(12, 5), channel_weights="first4x", eos_weight=3.0)
    model, batch = tiny_dia(), clips.batch([0, 1])
    labels = batch["labels"]
    losses = F.cross_entropy(
        hf_logits(model, batch).flatten(0, 2), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    weights = torch.tensor([4.0] + [1.0] * 8) * torch.where(labels == 1024, 3.0, 1.0)
    expected = float((losses.view_as(labels) * weights).sum())
    model.logits_dense = loss_head(model.logits_dense)
    assert float(compute_loss(model, batch, clips).loss_sum) == pytest.approx(expected, rel=1e-5)
    assert clips.target_weight([0, 1], 0) == pytest.approx(float((weights * (labels != IGNORE)).sum()))


def test_a_clip_has_the_same_loss_alone_and_padded_in_company(tiny_dia, make_clips, random_codes, compute_loss):
    model, clips = tiny_dia(), make_clips(random_codes(12, 5, 30), ["[S1] a", "[S1] a longer text", "[S1] abc"])
    alone = sum(float(compute_loss(model, clips.batch([i]), clips).loss_sum) for i in range(3))
    together = float(compute_loss(model, clips.batch([0, 1, 2]), clips).loss_sum)
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_clips_weight_multiplies_its_loss(tiny_dia, make_clips, random_codes, compute_loss):
    model, codes, weights = tiny_dia(), random_codes(12, 5, 30), [2.0, 0.5, 1.25]
    clips, plain = make_clips(codes, columns={"weight": weights}, eos_weight=3.0), make_clips(codes, eos_weight=3.0)
    alone = [float(compute_loss(model, plain.batch([i]), plain).loss_sum) for i in range(3)]
    together = float(compute_loss(model, clips.batch([0, 1, 2]), clips).loss_sum)
    assert together == pytest.approx(sum(w * loss for w, loss in zip(weights, alone, strict=True)), rel=1e-5)
    expected = sum(w * plain.target_weight([i]) for i, w in enumerate(weights))
    assert clips.target_weight([0, 1, 2]) == pytest.approx(expected)
    assert len(make_clips(codes, columns={"weight": [1.0, 0.0, 1.0]})) == 2


# ---- unconditional rows ----------------------------------------------------------------------------------------


def test_training_rows_without_text_are_what_generation_compares_with(tiny_dia, make_clips, random_codes):
    """generate() hands the encoder [text; zeros] with the text's mask repeated."""
    model, seen = tiny_dia(), []
    clips = make_clips(random_codes(4), ["[S1] hello"], text_dropout=1.0)
    hook = model.model.encoder.register_forward_pre_hook(lambda m, a, kw: seen.append(kw), with_kwargs=True)
    speak(model, [text_bytes("[S1] hello", {}, "x")], 4, seed=0, guidance_scale=3.0)
    hook.remove()
    batch = clips.batch([0])
    assert torch.equal(seen[0]["input_ids"][1:], batch["input_ids"])
    assert torch.equal(seen[0]["attention_mask"][1:], batch["attention_mask"])


# ---- evaluation ------------------------------------------------------------------------------------------------


def test_evaluation_equals_sums_over_the_models_own_logits(tiny_dia, make_clips, random_codes):
    codes = random_codes(12, 5, 30, 7)
    clips = make_clips(codes, train=False)
    model = tiny_dia()
    with torch.no_grad():  # let EOS win sometimes, so that recall and false alarm have something to count
        model.logits_dense.weight[1024] *= 6
    found = token_metrics(model, clips, ONE_RANK)
    total = other = correct = count = eos_loss = hits = alarms = frames = onset_gap = onsets = 0
    channel = np.zeros(9)
    for i in range(4):
        batch, following = clips.batch([i]), clips.batch([(i + 1) % 4])
        labels = batch["labels"][0]
        real = labels != IGNORE
        new = [0] + [t for t in range(1, len(codes[i])) if codes[i][t, 0] != codes[i][t - 1, 0]] + [len(codes[i])]
        for text in (batch, following):
            words = {name: text[name] for name in ("input_ids", "attention_mask")}
            logits = hf_logits(model, batch | words)[0]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
            losses = losses.view_as(labels)
            onset_gap += float(losses[new, 0].sum()) * (1 if text is following else -1)
            if text is batch:
                onsets += len(new)
                best = logits.argmax(-1)
                total, count = total + float(losses.sum()), count + int(real.sum())
                correct += int((best == labels)[real].sum())
                eos_loss += float(losses[labels == 1024].sum())
                channel += losses.sum(0).numpy()
                at_end = labels[:, 0] == 1024
                hits += int((best[at_end, 0] == 1024).sum())
                inside = real[:, 0] & ~at_end
                alarms, frames = alarms + int((best[inside, 0] == 1024).sum()), frames + int(inside.sum())
            else:
                other += float(losses.sum())
    assert alarms and frames == sum(map(len, codes))
    expected = {
        "loss": total / count,
        "accuracy": correct / count,
        "text_gap": (other - total) / count,
        "text_gap_onsets": onset_gap / onsets,
        "eos_loss": eos_loss / (4 * 9),
        "eos_recall": hits / 4,
        "eos_false_alarm": alarms / frames,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [found[f"loss_channel_{c}"] for c in range(9)] == pytest.approx(list(channel * 9 / count), rel=1e-4)


def test_evaluation_does_not_depend_on_the_batches_and_leaves_the_mode(tiny_dia, make_clips, random_codes):
    model, clips = tiny_dia(), make_clips(random_codes(12, 5, 30, 7), train=False, text_dropout=1.0)
    model.train()
    found = []
    for clips.config.micro_tokens in (46, 8192):  # a clip a batch, and all in one
        found.append(token_metrics(model, clips, ONE_RANK))
    one, other = found
    assert one == pytest.approx(other, rel=1e-5, abs=1e-6) and model.training


@pytest.mark.parametrize("recipe", ["dia_lora", "dia_full"])
def test_a_model_that_does_not_stop_has_no_score(recipe, monkeypatch):
    module, found = importlib.import_module(recipe), {"loss": 2.5, "text_gap": 0.1, "eos_false_alarm": 0.0}
    config = SimpleNamespace(min_eos_recall=0.5, best_by="loss", samples=0)
    run = SimpleNamespace(config=config, process=None, tracker=SimpleNamespace(event=lambda *_, **__: None))
    scores = SimpleNamespace(of_step=lambda step, files: {"wer": 0.25})
    ema = SimpleNamespace(applied=contextlib.nullcontext)
    for recall, score in ((0.5, 2.5), (0.49, None)):
        monkeypatch.setattr(module, "token_metrics", lambda *_, recall=recall: found | {"eos_recall": recall})
        config.best_by = "loss"
        assert module.evaluate(None, [1], run, ema, scores, 3) == score
        config.best_by = "wer"
        assert module.evaluate(None, [1], run, ema, scores, 3) == (score and pytest.approx(0.25, abs=1e-4))


# ---- speaking --------------------------------------------------------------------------------------------------


def test_the_cap_is_in_frames_and_says_that_it_was_reached(tiny_dia):
    (codes, ended), (more, _) = speak(tiny_dia(), [np.array([65, 66]), np.array([67])], 11, seed=0)
    assert codes.shape[1] == 9 and codes.dtype == np.int16 and len(codes) <= 11 and ended == (len(codes) < 11)
    assert codes.max() < 1024 and more.max() < 1024


def test_an_immediate_end_is_a_clip_without_frames(tiny_dia):
    model = tiny_dia()

    class AlwaysEnd(torch.nn.Module):
        def forward(self, x):
            logits = torch.zeros(*x.shape[:-1], 9 * 1028)
            logits[..., 1024] = 9.0  # channel 0
            return logits

    model.logits_dense = AlwaysEnd()
    ((codes, ended),) = speak(model, [np.array([65])], 11, seed=0)
    assert codes.shape == (0, 9) and ended


def test_speaking_leaves_generators_and_mode_as_they_were(tiny_dia):
    model = tiny_dia().train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = speak(model, [np.array([65])], 8, seed=1, do_sample=True, temperature=1.5)
    again = speak(model, [np.array([65])], 8, seed=1, do_sample=True, temperature=1.5)
    other = speak(model, [np.array([65])], 8, seed=2, do_sample=True, temperature=1.5)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert np.array_equal(one[0][0], again[0][0]) and not np.array_equal(one[0][0], other[0][0])


def test_a_failure_while_speaking_leaves_the_mode_too(tiny_dia):
    """Samples may fail without stopping the training, which must then still have its dropout."""
    model = tiny_dia().train()
    with pytest.raises(ValueError):
        speak(model, [np.array([65])], 8, seed=0, num_beams=3, guidance_scale=0.5)
    assert model.training


# ---- loading ---------------------------------------------------------------------------------------------------


def test_a_saved_folder_loads_in_the_wanted_type(tiny_dia, tmp_path):
    tiny_dia().save_pretrained(tmp_path)
    model = load_dia(str(tmp_path), torch.bfloat16)
    assert model.dtype == torch.bfloat16 and base_model(model) is model
    expected = tiny_dia().state_dict()
    loaded = load_dia(str(tmp_path), torch.float32).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_folders_that_hold_no_dia_are_refused_in_a_sentence(tiny_dia, tmp_path):
    from transformers import LlamaConfig

    (tmp_path / "empty").mkdir()
    LlamaConfig().save_pretrained(tmp_path / "llama")
    tiny_dia().config.save_pretrained(tmp_path / "no-weights")
    (tmp_path / "file").write_text("")
    for name, words in {
        "empty": "model.safetensors",
        "llama": "'llama' model, not 'dia'",
        "no-weights": "no-weights",
        "file": "neither a folder",
        "nowhere": "neither a folder",
    }.items():
        with pytest.raises(UserError, match=words) as error:
            load_dia(str(tmp_path / name), torch.float32)
        assert "--model" in str(error.value) and "\n" not in str(error.value)


def test_weights_that_are_pickles_are_not_opened(tiny_dia, tmp_path):
    model = tiny_dia()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_dia(str(tmp_path), torch.float32)


def test_damaged_or_missing_weights_are_a_sentence(tiny_dia, tmp_path):
    tiny_dia().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="--model"):
        load_dia(str(tmp_path), torch.float32)
    from safetensors.torch import load_file, save_file

    tiny_dia().save_pretrained(tmp_path)
    tensors = load_file(file)
    gone = next(name for name in tensors if "q_proj" in name)
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=gone):
        load_dia(str(tmp_path), torch.float32)


# ---- memorise and regenerate -----------------------------------------------------------------------------------


def memorise(model, batch, clips, steps):
    model.logits_dense = loss_head(model.logits_dense)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95), weight_decay=0.0)
    count = float((batch["labels"] != IGNORE).sum())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * min(1, (step + 1) / 10) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = dia_full.compute_loss(model, batch, clips).loss_sum / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


def test_memorised_clips_are_spoken_exactly_with_their_ends(tiny_dia, make_clips, random_codes):
    codes, texts = random_codes(24, 19), ["[S1] bada gumi.", "[S1] lono [S2] sike."]
    clips = make_clips(codes, texts)
    model = tiny_dia()
    loss = memorise(model, clips.batch([0, 1]), clips, 150)
    spoken = speak(model, [clips.text(i, 0) for i in (0, 1)], 40, seed=0)
    for (found, ended), expected in zip(spoken, codes, strict=True):
        assert ended and found.shape == expected.shape, f"stopped at {len(found)}, not {len(expected)}; loss {loss}"
        assert np.array_equal(found, expected)


@pytest.mark.long
def test_without_the_delayed_tail_in_the_labels_the_ends_are_lost(tiny_dia, make_clips, random_codes):
    """What other trainers do: the delayed stream is cut at T, with EOS in all channels at once."""
    codes, texts = random_codes(24, 19), ["[S1] bada gumi.", "[S1] lono [S2] sike."]
    clips = make_clips(codes, texts)
    batch = clips.batch([0, 1])
    for row, clip in enumerate(codes):
        batch["labels"][row, len(clip) + 1 :] = IGNORE
        batch["labels"][row, len(clip)] = 1024
    model = tiny_dia()
    memorise(model, batch, clips, 150)
    spoken = speak(model, [clips.text(i, 0) for i in (0, 1)], 40, seed=0)
    for (found, _), expected in zip(spoken, codes, strict=True):
        frames = min(len(found), len(expected))
        right = (found[:frames] == expected[:frames]).mean(0)
        assert right[0] > 0.9, "the first channel has no delay and is learned"
        assert right[8] <= (len(expected) - 15) / len(expected) + 0.05, "channel 8 has lost its last 15 frames"
