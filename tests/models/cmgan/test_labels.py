"""The labels of the discriminator: one a sound, masked where there is none, never averaged and never skipped."""

import math

import numpy as np
import pytest
import torch

from cmgan import discriminator_loss
from common.keyed_random import generator
from common.pairs import PairDataset
from common.scorer import Scorer
from models.cmgan import signal, watch
from models.cmgan.labels import Labelled, Labels, valid_counts
from models.cmgan.network import Discriminator


@pytest.fixture(scope="module")
def scorer():
    scorer = Scorer(1)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def sounds(pairs):
    """Noisy and clean (16, 8000), the noise from hardly audible to loud."""
    data = PairDataset(str(pairs), 16000)
    noisy, clean = [], []
    for i in range(16):
        dirty, pure, _ = data.crop(3 * i, 8000, 0, i)
        dirty, pure = dirty / 32768, pure / 32768
        noisy.append(pure + 10 ** (-2 + 2.3 * i / 15) * (dirty - pure))
        clean.append(pure)
    return (torch.tensor(np.stack(side), dtype=torch.float32) for side in (noisy, clean))


@pytest.fixture(scope="module")
def estimate(sounds):
    noisy, clean = sounds
    pair = signal.normalise(noisy, clean)
    return signal.estimate(signal.spectrum(pair.noisy), pair)


def part(estimate, rows) -> signal.Estimate:
    pair = signal.Normalised(*(t[rows] for t in vars(estimate.normalised).values()))
    return signal.Estimate(estimate.spec[rows], estimate.wave[rows], pair, estimate.clean_spec[rows])


def test_a_silent_sound_is_masked_and_the_others_keep_their_own_labels(estimate, scorer):
    from pesq import pesq

    some = part(estimate, [0, 5, 15])
    some.normalised.clean[1] = 0
    labels = Labels(scorer, False)
    made = labels.collect(labels.submit(some, ["a", "b", "c"]))
    assert made.valid[0].tolist() == [1, 0, 1] and made.missing == ["b: NoUtterancesError"]
    for i in (0, 2):
        value = pesq(16000, some.normalised.clean[i].numpy(), some.wave[i].numpy(), "wb")
        assert float(made.labels[0][i]) == pytest.approx(min(1, max(0, (value - 1) / 3.5)), abs=1e-5)
    assert float(made.labels[0][0]) != float(made.labels[0][2])
    torch.manual_seed(0)
    judge = Discriminator(2).eval()
    counts = valid_counts([made])
    assert counts == [2.0]
    loss = discriminator_loss(judge, (made, 3.0, counts)).loss_sum
    with torch.no_grad():
        opinions, of_clean = judge(made.clean, made.others[0]), judge(made.clean, made.clean)
    wanted = ((of_clean - 1) ** 2).mean() + ((opinions[[0, 2]] - made.labels[0][[0, 2]]) ** 2).mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    terms = discriminator_loss(judge, (made, 3.0, counts)).extra
    assert float(terms["clean"]) == pytest.approx(float(((of_clean - 1) ** 2).mean()), rel=1e-5)
    assert float(terms["made"]) == pytest.approx(float(wanted - terms["clean"]), rel=1e-4)
    assert terms["noisy"] == 0
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in judge.parameters())


def test_without_any_label_there_is_still_a_graph_and_a_finite_loss(estimate):
    some = part(estimate, [0, 1])
    nothing = Labelled(
        signal.magnitude(some.clean_spec), [signal.magnitude(some.spec)], [torch.zeros(2)], [torch.zeros(2)]
    )
    judge = Discriminator(2)
    loss = discriminator_loss(judge, (nothing, 2.0, valid_counts([nothing]))).loss_sum
    loss.backward()
    assert math.isfinite(float(loss)) and judge.layers[0].weight_orig.grad.any()


def learn(estimate, pesq, policy: str) -> dict[str, float]:
    """A discriminator alone, 60 steps of 4 sounds, with one way to label them; judged on what it saw."""
    torch.manual_seed(1)
    judge = Discriminator(8).train()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3)
    label = signal.quality(torch.tensor(pesq, dtype=torch.float32))
    clean, other = signal.magnitude(estimate.clean_spec), signal.magnitude(estimate.spec)
    for step in range(60):
        rows = generator(0, step, "rows").permutation(16)[:4]
        valid = torch.ones(4)
        labels = label[rows]
        if policy == "averaged":
            labels = labels.mean().expand(4)
        if policy == "skipped" and generator(0, step, "skip").random() < 0.56:
            continue
        batch = Labelled(clean[rows], [other[rows]], [labels], [valid])
        torch.manual_seed(step)
        loss = discriminator_loss(judge, (batch, 4.0, valid_counts([batch]))).loss_sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        judge.iterate()
    judge.eval()
    with torch.no_grad():
        return watch.agreement(judge(clean, other).numpy(), label.numpy())


@pytest.mark.long
def test_mutation_averaged_labels_and_skipped_batches_teach_less(estimate, scorer):
    from common.scorer import collect

    pesq, _ = collect(scorer.pesq(estimate.normalised.clean.numpy(), estimate.wave.numpy()))
    assert np.isfinite(pesq).all() and pesq.max() - pesq.min() > 2
    own, averaged, skipped = (learn(estimate, pesq, policy) for policy in ("own", "averaged", "skipped"))
    assert own["d_mae"] < 0.8 * averaged["d_mae"], (own, averaged)
    assert own["d_mae"] < 0.95 * skipped["d_mae"], (own, skipped)
