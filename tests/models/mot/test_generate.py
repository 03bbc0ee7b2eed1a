"""models/mot/generate.py: what the decoder may choose, against slow and obvious computations."""

import numpy as np
import pytest
import torch

from helpers.mot_support import build, loss_of, reference_states
from models.mot.build import calibrate
from models.mot.data import pad
from models.mot.generate import collapse, generate
from models.mot.layout import music

NO_TEXT = np.array([1])
CAPTIONS = [np.array([1, 20, 30, 40]), np.array([1, 50]), np.array([1, 60, 61, 62, 63, 64, 65])]


def clip(frames, seed=0):
    return np.random.default_rng(seed).integers(0, 2048, (frames, 4))


@pytest.fixture(scope="module")
def memorised(demo_mot):
    """memorised(order) -> a model that has learned three clips of different lengths, and the clips."""
    made = {}

    def learn(order):
        if order not in made:
            model = build(demo_mot, untie="all", order=order)
            clips = [clip(n, seed=n) for n in (5, 9, 7)]
            batch = pad(
                [(t, *music(c, model.layout, True)) for t, c in zip(CAPTIONS, clips, strict=True)], model.layout
            )
            calibrate(model, batch)
            optimizer = torch.optim.AdamW(model.adapter().values(), lr=1e-2)
            for _ in range(120):
                total, stats = loss_of(model, batch)
                mean = total / stats[1].sum()
                optimizer.zero_grad()
                mean.backward()
                optimizer.step()
                if float(mean.detach()) < 0.01:
                    break
            made[order] = model.eval(), clips
        return made[order]

    return learn


@pytest.mark.parametrize("order", [pytest.param("flat", marks=pytest.mark.long), "delay"])
@pytest.mark.parametrize("guidance", [1.0, 1.2])
def test_memorised_clips_come_back_exactly_and_end_by_themselves(memorised, order, guidance):
    model, clips = memorised(order)
    options = {"temperature": 0.0, "guidance": guidance, "no_text": NO_TEXT}
    for (codes, ended), truth in zip(generate(model, CAPTIONS, 20, [0, 1, 2], **options), clips, strict=True):
        assert ended and np.array_equal(codes, truth)


@pytest.mark.parametrize("order", ["flat", "delay"])
def test_continuation_goes_on_from_a_prefix(memorised, order):
    model, clips = memorised(order)
    prefixes = [clips[0][:1], clips[1][:4], clips[2][:2]]
    made = generate(model, CAPTIONS, 20, [0, 1, 2], temperature=0.0, prefixes=prefixes)
    for (codes, ended), truth, prefix in zip(made, clips, prefixes, strict=True):
        assert ended and np.array_equal(np.concatenate([prefix, codes]), truth)


@pytest.mark.parametrize("order", ["flat", "delay"])
def test_every_step_runs_where_all_ranks_must(memorised, order):
    model, clips = memorised(order)
    made = generate(model, CAPTIONS, 12, [0, 1, 2], temperature=0.0, all_steps=True)
    assert all(np.array_equal(codes, truth) for (codes, _), truth in zip(made, clips, strict=True))


@pytest.mark.parametrize("order", ["flat", "delay"])
def test_greedy_codes_are_those_of_the_whole_sequence_computed_anew(demo_mot, order):
    """No cache, no batch, both experts and a mask: the most likely allowed code at each position."""
    model = build(demo_mot, untie="all", order=order).eval()
    with torch.no_grad():
        for parameter in (model.audio_embed.weight, model.head.weight):
            parameter.mul_(10)  # so that codes depend on what came before, captions included
    made = generate(model, CAPTIONS, 6, [0, 0, 0], temperature=0.0, min_frames=6)
    for text, (codes, ended) in zip(CAPTIONS, made, strict=True):
        assert codes.shape == (6, 4) and not ended
        inputs, books, labels = music(codes, model.layout, final=True)
        with torch.no_grad():
            states = reference_states(model, pad([(text, inputs, books, labels)], model.layout))[0, len(text) :]
        for k in range(4):
            rows = model.head.weight[2048 * k : 2048 * (k + 1)]
            places = np.flatnonzero((labels[:, k] >= 0) & (labels[:, k] != model.layout.eos))
            best = (states[places] @ rows.T).argmax(-1).numpy()
            assert np.array_equal(best, codes[:, k]), k
    assert len({codes.tobytes() for codes, _ in made}) == 3


def test_only_the_due_codebook_can_be_chosen_and_the_end_only_at_a_frame(demo_mot):
    """Biased so that the forbidden would win: another codebook's rows, A_BOS, and A_EOS everywhere."""
    model = build(demo_mot).eval()
    logits = {}
    real = model.head.forward

    def spy(hidden, **more):
        out = real(hidden, **more)
        logits.setdefault(more["codebook"], []).append(out.shape[-1])
        if more["codebook"] == 0:
            out[:, 2048] += 1e4
        return out

    model.head.forward = spy
    [(codes, ended)] = generate(model, CAPTIONS[:1], 9, [0], min_frames=3, temperature=1.0)
    assert ended and codes.shape == (3, 4) and 0 <= codes.min() and codes.max() < 2048
    assert {k: set(sizes) for k, sizes in logits.items()} == {0: {2049}, 1: {2048}, 2: {2048}, 3: {2048}}


def test_a_prompts_outcome_depends_on_its_own_seed_alone(demo_mot):
    model = build(demo_mot).eval()
    options = {"min_frames": 5, "temperature": 1.0, "top_k": 50}
    together = generate(model, CAPTIONS, 5, [1, 2, 3], **options)
    alone = [generate(model, [text], 5, [seed], **options)[0] for text, seed in zip(CAPTIONS, (1, 2, 3), strict=True)]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(together, alone, strict=True))
    other = generate(model, CAPTIONS, 5, [4, 5, 6], **options)
    assert not np.array_equal(together[0][0], other[0][0])


def test_guidance_is_u_plus_w_times_c_minus_u(demo_mot, monkeypatch):
    model = build(demo_mot).eval()
    first, seen = [], []
    for text in (CAPTIONS[0], NO_TEXT):
        inputs, books, labels = music(np.zeros((0, 4), dtype=int), model.layout, False)
        with torch.no_grad():
            states = reference_states(model, pad([(text, inputs, books, labels)], model.layout))[0, -1]
            first.append(states @ model.head.weight[:2048].T)
    monkeypatch.setattr("models.mot.generate._pick", lambda logits, *_: seen.append(logits[:2048].clone()) or 0)
    for w in (1.0, 3.0, 7.0):
        seen.clear()
        generate(model, CAPTIONS[:1], 1, [0], guidance=w, no_text=NO_TEXT)
        assert torch.allclose(seen[0], first[1] + w * (first[0] - first[1]), atol=1e-5)
    assert not torch.allclose(first[0], first[1], atol=1e-3)


def test_only_the_likeliest_code_is_drawn_with_top_k_1(demo_mot):
    model = build(demo_mot).eval()
    greedy = generate(model, CAPTIONS[:1], 2, [0], temperature=0.0, min_frames=2)[0][0]
    assert np.array_equal(generate(model, CAPTIONS[:1], 2, [5], top_k=1, min_frames=2)[0][0], greedy)
    drawn = generate(model, CAPTIONS[:1], 2, [5], top_k=0, min_frames=2)[0][0]
    assert not np.array_equal(drawn, greedy)


def test_collapse_is_measured():
    assert collapse(np.repeat(clip(1), 20, axis=0)) == {"repeats": 1.0, "distinct_codes": [1, 1, 1, 1]}
    assert collapse(clip(20))["repeats"] == 0.0 and min(collapse(clip(20))["distinct_codes"]) > 15
    assert collapse(np.zeros((0, 4), dtype=int))["distinct_codes"] == [0, 0, 0, 0]
