"""What watches a CMGAN run, on histories and sounds made for it."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from cmgan import Config, discriminator_loss, loss_terms
from common.errors import UserError
from common.pairs import Crops, PairDataset
from common.runtime import Process
from common.scorer import Scorer
from models.cmgan import evaluate, signal, watch
from models.cmgan.labels import Labels, valid_counts
from models.cmgan.network import Discriminator, TSCNet

ONE = Process(0, 1, torch.device("cpu"))
TERMS = ("ri", "mag", "time", "gan")
FINE = {"gain": 1.0, "ssnr": 9.0, **{f"grad_share_{name}": 0.25 for name in TERMS}}
NOISY = {"ssnr": 2.0, "pesq": 2.0}


@pytest.fixture(scope="module")
def scorer():
    scorer = Scorer(1)
    yield scorer
    scorer.close()


def test_correlations_are_scipys_also_with_ties():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 6, 40).astype(float)
    b = a + rng.normal(size=40)
    found = watch.agreement(a, b)
    assert found["d_pearson"] == pytest.approx(stats.pearsonr(a, b).statistic)
    assert found["d_spearman"] == pytest.approx(stats.spearmanr(a, b).statistic)
    assert found["d_mae"] == pytest.approx(np.abs(a - b).mean())
    assert watch.agreement(np.ones(40), b)["d_pearson"] == 0.0


def test_the_seeds_collapse_raises_the_alarm_and_honest_training_does_not():
    collapse = [[0.116, 2.64], [0.113, 2.5], [0.110, 2.35], [0.106, 2.2], [0.101, 2.07]]
    assert watch.diverging(collapse)
    (message,) = watch.alarms(FINE, NOISY, [[0.12, 2.45], *collapse], 1.0)
    assert "2.640 to 2.070" in message and message.startswith("alarm")
    for history in (
        [[0.12, 2.0], [0.11, 2.2], [0.10, 2.3], [0.09, 2.4], [0.08, 2.5]],
        [[0.08, 2.5], [0.09, 2.4], [0.10, 2.3], [0.11, 2.2], [0.12, 2.1]],  # over-fitting: the loss rises
        [[0.11, 2.0], [0.14, 2.5], [0.13, 2.4], [0.12, 2.3], [0.10, 2.1]],  # together, but PESQ is higher than it was
        collapse[1:],
    ):
        assert not watch.diverging(history) and not watch.alarms(FINE, NOISY, history, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gain": 0.4}, "alarm: the output's level is 0.40"),
        ({"gain": 0.85}, "warning: the output's level is 0.85"),
        ({"gain": 1.2}, "warning: the output's level is 1.20"),
        ({"ssnr": 1.1}, "segmental SNR 1.10 dB is below the noisy input's 2.00"),
        ({"grad_share_time": 0.97, "grad_share_ri": 0.0}, "97.0% of the gradient comes from the time term"),
        ({"grad_share_gan": 0.001}, "only 0.10% of the gradient comes from the GAN term"),
    ],
)
def test_what_should_make_someone_look(change, words):
    (message,) = watch.alarms(FINE | change, NOISY, [], 1.0)
    assert words in message
    assert not watch.alarms(FINE, NOISY, [], 1.0)


def test_an_estimate_scaled_by_0_4_trips_the_gain_alarm():
    from common import speech_metrics

    clean = np.random.default_rng(0).normal(size=16000)
    gain = speech_metrics.gain(clean, 0.4 * clean)
    assert watch.alarms(FINE | {"gain": gain}, NOISY, [], 1.0)[0].startswith("alarm")


def test_the_gate_opens_ramps_and_closes(monkeypatch):
    monkeypatch.setattr(watch, "RAMP", 4)
    gate = watch.GanRamp(True)
    levels = []
    for correlation in (0.1, 0.79, 0.85, 0.7, 0.7, 0.7, 0.7, 0.59, 0.7, 0.7, 0.7, 0.7, 0.8):
        message = gate.observe(correlation)
        gate.advance()
        levels.append(gate.level)
        assert bool(message) == (correlation in (0.85, 0.59, 0.8))
    assert levels == [0, 0, 0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0.25]
    again = watch.GanRamp(True)
    again.restore(gate.state())
    assert (again.open, again.level) == (True, 0.25)
    unused = watch.GanRamp(False)
    assert unused.observe(0.0) is None and unused.level == 1.0
    unused.advance()
    assert unused.level == 1.0


# ---- a real discriminator ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(pairs):
    return PairDataset(str(pairs), 16000)


def labelled_batches(data, scorer, noisy_term: bool) -> list:
    """Crops as a trained generator makes them, with little of their noise left, and their true PESQ."""
    labels, draw = Labels(scorer, noisy_term), torch.Generator().manual_seed(0)
    crops = Crops(data, np.setdiff1d(np.arange(len(data)), data.rows_starting(["dov"])), 0.6, 0)
    waiting = []
    for first in range(0, 48, 4):
        batch = crops.batch(range(first, first + 4))
        pair = signal.normalise(batch["noisy"], batch["clean"])
        left = 0.05 + 0.15 * torch.rand(4, 1, generator=draw)
        wave = pair.clean + left * (pair.noisy - pair.clean)
        made = signal.Estimate(signal.spectrum(wave), wave, pair, signal.spectrum(pair.clean))
        waiting.append(labels.submit(made, batch["ids"]))
    return [labels.collect(one) for one in waiting]


def learn(batches: list, probe: watch.Probe) -> watch.GanRamp:
    """40 steps of the recipe's loss with a random discriminator; the gate as it is after them."""
    torch.manual_seed(5)
    discriminator = Discriminator(8).train()
    optimizer = torch.optim.AdamW(discriminator.parameters(), lr=3e-3)
    gate = watch.build_gan_ramp(Config(model="published"), held_out=8)
    for step in range(40):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        discriminator_loss(discriminator, (batch, 4.0, valid_counts([batch]))).loss_sum.backward()
        optimizer.step()
        discriminator.iterate()
        if step % 20 == 19:
            gate.observe(probe.judge(discriminator)["d_pearson"])
    return gate


@pytest.mark.long
def test_a_discriminator_that_learns_pesq_opens_the_gate_and_one_with_shuffled_labels_does_not(
    data, scorer, monkeypatch
):
    """Measured after 40 steps: correlation 0.95, and -0.01 with shuffled labels, 0.24 without noisy inputs."""
    monkeypatch.setattr(watch, "PROBE", 24)
    probe = watch.Probe(data, data.rows_starting(["dov"]), 9600, 0, scorer, ONE)
    batches = labelled_batches(data, scorer, Config(model="published").uses_noisy_term)
    assert learn(batches, probe).open
    without = [dataclasses.replace(b, others=b.others[:1], labels=b.labels[:1], valid=b.valid[:1]) for b in batches]
    assert not learn(without, probe).open
    labels = torch.cat([part for batch in batches for part in batch.labels])
    labels = iter(labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))].split(4))
    for batch in batches:
        batch.labels = [next(labels), next(labels)]
    assert not learn(batches, probe).open


def test_predictions_for_the_generators_own_outputs_are_compared_with_their_pesq(data, scorer, monkeypatch):
    """The generator passes its input on, so its outputs are the recorded noisy sounds; D knows their distance."""
    from pesq import pesq

    class Same(torch.nn.Module):
        def forward(self, spec):
            return spec

    class Distance(torch.nn.Module):
        def forward(self, clean, other):
            return torch.exp(-(clean - other).abs().mean((1, 2, 3)))

    monkeypatch.setattr(watch, "PROBE", 8)
    probe = watch.Probe(data, data.rows_starting(["dov"]), 8000, 3, scorer, ONE)
    points = probe.judge_outputs(Same(), Distance())
    assert len(points) == 8
    for number, (predicted, found) in enumerate(points):
        clean, noisy = probe.clean[number], probe.recorded[number]
        assert found == pytest.approx(pesq(16000, clean.numpy(), noisy.numpy(), "wb"), abs=0.02)
        scale = noisy.square().mean().sqrt()
        spectra = [signal.magnitude(signal.spectrum(side[None] / scale)) for side in (clean, noisy)]
        assert predicted == pytest.approx(1 + 3.5 * float(Distance()(*spectra)), abs=1e-4)
    found = evaluate.of_outputs(points)
    assert found["d_made_pearson"] == pytest.approx(np.corrcoef(np.array(points).T)[0, 1])
    assert found["d_made_mae"] == pytest.approx(np.mean([abs(a - b) for a, b in points]))
    assert np.isnan(evaluate.of_outputs([])["d_made_pearson"])


def test_shares_add_up_and_a_zeroed_weight_has_none():
    torch.manual_seed(0)
    g, d = TSCNet(4), Discriminator(2)
    clean = 0.1 * torch.randn(2, 4000)
    noisy = clean + 0.02 * torch.randn(2, 4000)

    def shares(weights) -> dict:
        return watch.term_shares(g, d, loss_terms, dict(zip(TERMS, weights, strict=True)), noisy, clean)

    for weights in ([0.1, 0.9, 0.2, 0.05], [0.1, 0.9, 0.2, 0.0]):
        found = shares(weights)
        for kind in ("share_", "grad_share_"):
            assert sum(found[kind + name] for name in TERMS) == pytest.approx(1)
            assert (found[kind + "gan"] == 0) == (weights[3] == 0)
    assert shares([0.2, 1.8, 0.4, 0.1]) == pytest.approx(shares([0.1, 0.9, 0.2, 0.05]))
    assert g.training and d.training


def test_the_probe_spans_the_scale_and_judges_alike_on_any_number_of_ranks(pairs, scorer, monkeypatch):
    monkeypatch.setattr(watch, "PROBE", 12)
    data = PairDataset(str(pairs), 16000)
    rows = data.rows_starting(["dov"])
    probe = watch.Probe(data, rows, 8000, 0, scorer, ONE)
    assert probe.pesq.min() < 1.5 and probe.pesq.max() > 3.5 and len(probe.pesq) == 12
    again = watch.Probe(data, rows, 8000, 0, scorer, ONE)
    assert torch.equal(probe.noisy, again.noisy) and np.array_equal(probe.pesq, again.pesq)

    class Oracle(torch.nn.Module):
        """Knows the label by the sound's distance to the clean one."""

        def forward(self, clean, other):
            return torch.exp(-10 * (clean - other).abs().mean((1, 2, 3)))

    found = probe.judge(Oracle())
    assert found["d_spearman"] > 0.7 and found["d_clean"] == 1.0
    assert found == probe.judge(Oracle())


def test_silent_evaluation_data_is_refused(scorer, tmp_path):
    from helpers import support

    rows = [{"id": f"a_{i}", "noisy": np.zeros(9000, np.int16), "clean": np.zeros(9000, np.int16)} for i in range(2)]
    data = PairDataset(str(support.write_pairs(tmp_path / "pairs", rows)), 16000)
    with pytest.raises(UserError, match="only 0 of 64 probe sounds"):
        watch.Probe(data, np.arange(2), 8000, 0, scorer, ONE)


def test_ranks_with_unequal_networks_are_found(monkeypatch):
    """One running statistic of one of 8 BatchNorms is enough."""
    torch.manual_seed(0)
    mine, other = TSCNet(4), TSCNet(4)
    other.load_state_dict(mine.state_dict())
    of_two = [mine, other]
    monkeypatch.setattr(watch, "gather_lists", lambda *_: [watch.fingerprint(model) for model in of_two])
    watch.require_equal(ONE, mine)
    next(value for name, value in other.state_dict().items() if "running_mean" in name)[0] += 1e-6
    with pytest.raises(AssertionError, match="the ranks' networks differ"):
        watch.require_equal(ONE, mine)
