"""The batch plan against brute force."""

from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 4000
RATE = 44100 / 512


def lengths(count=700, seed=1) -> np.ndarray:
    """Lognormal 1 to 20 s, the lengths of the table in specs/performance.md 2.3."""
    seconds = np.random.default_rng(seed).lognormal(np.log(5), 0.6, count).clip(1, 20)
    return (seconds * RATE).astype(np.int64) + 16


def epoch_of(plan, epoch):
    return [plan.micro_batch(epoch * plan.per_epoch + n) for n in range(plan.per_epoch)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["lognormal", "equal", "two sizes", "tiny and one huge"])
def test_the_budget_holds_and_every_clip_comes_once_an_epoch(kind, seed):
    made = {
        "lognormal": lengths(seed=seed),
        "equal": np.full(101, 100),
        "two sizes": np.repeat([100, 103], 55),
        "tiny and one huge": np.r_[np.full(300, 1), BUDGET],
    }[kind]
    plan = Plan(made, BUDGET, seed)
    for epoch in range(4):
        batches = epoch_of(plan, epoch)
        assert {e for e, _ in batches} == {epoch} and all(len(b) for _, b in batches)
        assert all(len(b) * made[b].max() <= BUDGET for _, b in batches)
        assert sorted(np.concatenate([b for _, b in batches])) == list(range(len(made)))


@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.2])
def test_each_micro_batch_takes_as_many_clips_as_fit(jitter):
    """Cutting by length gives what filling one micro-batch after the other, clip by clip, gives."""
    draw = np.random.default_rng(5)
    for _ in range(60):
        made = draw.integers(1, draw.integers(2, 60), draw.integers(1, 300))
        budget = int(made.max() * draw.integers(1, 9) + draw.integers(0, 5))
        bounds = [min(int(length * (1 + jitter)), int(made.max())) for length in sorted(made.tolist())]
        edges, size = [0], 0
        for place, bound in enumerate(bounds):
            size += 1
            if size * bound > budget:
                edges, size = [*edges, place], 1
        assert Plan(made, budget, 0, jitter).edges.tolist() == [*edges, len(made)]


def test_clips_of_equal_keys_keep_their_order():
    """On every processor: NumPy's quick sort orders them differently with and without AVX-512."""
    made = np.random.default_rng(0).integers(5, 9, 5000)
    order, _ = Plan(made, 100, 0, jitter=0.0)._order(0)
    assert order.tolist() == sorted(range(5000), key=lambda i: made[i])  # Python's sort is stable


def test_each_epoch_has_another_order_and_other_companions():
    plan = Plan(lengths(), BUDGET, 0)
    first, second = ([b.tolist() for _, b in epoch_of(plan, epoch)] for epoch in (0, 1))
    assert first != second
    assert {frozenset(b) for b in first} != {frozenset(b) for b in second}


def test_short_and_long_batches_are_mixed():
    """Sorted batches would teach the length of the clip with the hour of the day."""
    made = lengths()
    means = [made[b].mean() for _, b in epoch_of(Plan(made, BUDGET, 0), 0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 4 / np.sqrt(len(means))


def test_the_seed_decides_the_order_and_nothing_else_does():
    made = lengths()
    same, other = (Plan(made, BUDGET, seed) for seed in (0, 1))
    np.random.seed(123)
    plan = Plan(made, BUDGET, 0)
    assert [b.tolist() for _, b in epoch_of(plan, 2)] == [b.tolist() for _, b in epoch_of(same, 2)]
    assert [b.tolist() for _, b in epoch_of(plan, 2)] != [b.tolist() for _, b in epoch_of(other, 2)]


def test_equal_ranks_times_accumulation_train_the_same_global_batches():
    """Each rank takes every world-th micro-batch, as the recipe's loop does it."""
    plan, steps = Plan(lengths(), BUDGET, 0), 40

    def global_batches(world, accumulation):
        micro = world * accumulation
        numbers = [list(range(rank, steps * micro, world)) for rank in range(world)]
        taken = [[n[s * accumulation : (s + 1) * accumulation] for n in numbers] for s in range(steps)]
        return [sorted(c for mine in step for n in mine for c in plan.micro_batch(n)[1]) for step in taken]

    assert global_batches(1, 4) == global_batches(2, 2) == global_batches(4, 1)


def test_resume_is_a_number():
    made = lengths()
    walked = Plan(made, BUDGET, 0)
    whole = [walked.micro_batch(n) for n in range(3 * walked.per_epoch)]
    start = 2 * walked.per_epoch - 3
    fresh = Plan(made, BUDGET, 0)
    for number in range(start, 3 * fresh.per_epoch):
        epoch, clips = fresh.micro_batch(number)
        assert epoch == whole[number][0] and clips.tolist() == whole[number][1].tolist()


def test_a_step_may_span_more_epochs_than_are_remembered():
    plan = Plan(np.full(3, 10), 30, 0)
    assert plan.per_epoch == 1
    assert [plan.micro_batch(n)[0] for n in range(5)] == [0, 1, 2, 3, 4]


def brute_padding(made, plan, epoch=0):
    padded = sum(len(b) * made[b].max() for _, b in epoch_of(plan, epoch))
    return 1 - made.sum() / padded


def test_padding_is_at_most_5_percent_on_lognormal_lengths():
    made = lengths(2000)
    plan = Plan(made, 8192, 0)
    assert plan.padding() == pytest.approx(brute_padding(made, plan))
    assert max(plan.padding(epoch) for epoch in range(3)) <= 0.05


def test_padding_is_at_most_5_percent_on_the_demo():
    from demo import ensure_demo

    from common.tokens import TokenDataset
    from dia_lora import DEMO

    folder = ROOT / "runs" / "demo-assets-dia"
    if not (folder / "demo.json").exists():
        ensure_demo(folder)
    made = TokenDataset(str(folder / "tokens" / "train")).frames.astype(np.int64) + 16
    plan = Plan(made, DEMO["micro_tokens"], 0)
    assert max(brute_padding(made, plan, epoch) for epoch in range(3)) <= 0.05


def test_a_clip_over_the_budget_names_flag_and_length():
    with pytest.raises(UserError, match=r"--micro-tokens 4000 is below the longest clip \(4001 positions\)"):
        Plan(np.array([5, 4001]), BUDGET, 0)


def test_no_clip_at_all_is_refused():
    with pytest.raises(UserError, match="no clip"):
        Plan(np.array([], dtype=np.int64), BUDGET, 0)


def test_the_longest_batch_is_the_one_that_takes_most_memory():
    made = lengths()
    plan = Plan(made, BUDGET, 0)
    longest = plan.longest()
    assert len(longest) * made[longest].max() <= BUDGET
    heaviest = max(len(b) * made[b].max() for epoch in range(3) for _, b in epoch_of(plan, epoch))
    assert len(longest) * made[longest].max() >= 0.97 * heaviest


@pytest.mark.parametrize(("made", "expected"), [([10] * 31, 50), ([10] * 30 + [26], 50), ([10] * 30 + [45, 50], 50)])
def test_a_clip_that_was_left_over_is_not_the_micro_batch_that_takes_most_memory(made, expected):
    """31 clips in micro-batches of 5; one clip that leaves half of the budget empty; a tie, which the longest wins."""
    plan = Plan(np.array(made), 50, 0, jitter=0.0)
    longest = plan.longest()
    assert len(longest) * plan.lengths[longest].max() == expected
    assert 50 not in made or list(longest) == [31]


@pytest.mark.parametrize(("epochs", "micro", "expected"), [(1, 1, 10), (1, 4, 3), (2.5, 4, 7), (0.01, 4, 1)])
def test_steps_cover_the_epochs(epochs, micro, expected):
    plan = Plan(np.full(10, 10), 10, 0)
    assert plan.per_epoch == 10 and plan.steps(epochs, micro) == expected
