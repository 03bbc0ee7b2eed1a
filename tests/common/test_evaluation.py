"""The skeleton of an evaluation: every clip once, whatever the number of ranks, and ranks in step."""

import numpy as np
import pytest
import torch
from torch import nn

from common import evaluation
from common.evaluation import Sums, evaluating, evaluation_rows
from common.runtime import Process

LENGTHS = np.array([5, 9, 3, 7, 7, 2, 8])


def shares(world: int, micro_tokens: int = 10) -> list[list]:
    return [
        list(evaluation_rows(LENGTHS, micro_tokens, Process(rank, world, torch.device("cpu")))) for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 11])
def test_every_clip_counts_once_and_all_ranks_run_equally_often(world):
    ranks = shares(world)
    assert len({len(batches) for batches in ranks}) == 1
    counted = [int(row) for batches in ranks for rows, counts in batches if counts for row in rows]
    assert sorted(counted) == list(range(len(LENGTHS)))
    assert all(len(rows) for batches in ranks for rows, _ in batches), "a rank without a batch still runs the model"


def test_sums_are_by_name_and_skip_what_does_not_count():
    sums, one = Sums(), Process(0, 1, torch.device("cpu"))
    sums.add(True, loss=torch.tensor([1.0, 2.0]), count=3)
    sums.add(False, loss=torch.tensor([100.0, 100.0]), count=100)
    sums.add(True, loss=torch.tensor([0.5, 0.25]), count=torch.tensor(4))
    total = sums.reduce(one)
    assert total["loss"].tolist() == [1.5, 2.25] and total["count"] == 7


def test_a_rank_whose_batches_do_not_count_adds_zeros_of_the_same_shape(monkeypatch):
    """Otherwise the ranks would reduce vectors of different lengths."""
    sent = []
    monkeypatch.setattr(evaluation, "all_sum", lambda vector, process: sent.append(vector) or vector.numpy())
    for counts in (True, False):
        sums = Sums()
        sums.add(counts, loss=torch.tensor([float("nan"), 2.0]), count=3)
        sums.reduce(Process(0, 2, torch.device("cpu")))
    assert len(sent[0]) == len(sent[1]) == 3 and sent[1].tolist() == [0, 0, 0]


def test_the_mode_comes_back_even_after_an_error():
    model = nn.Dropout().train()
    with pytest.raises(ValueError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise ValueError
    assert model.training and torch.is_grad_enabled()
