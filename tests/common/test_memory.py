"""The memory prediction against figures worked out by hand: 16 bytes per trained parameter, and more."""

import pytest
import torch
from torch import nn

from common.config import UserError
from common.memory import count_parameters, fit_micro_batch, predict, saved_bytes
from common.runtime import Process

DIA = 1_611_160_576
ADAM = 8  # bytes of optimizer state per weight


def ds(stage, **zero):
    return {"zero_optimization": {"stage": stage, **zero}}


def test_trainable_and_all_parameters_are_counted():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).requires_grad_(False))
    assert count_parameters(model) == (16 + 25, 16)


@pytest.mark.parametrize(
    ("stage", "world", "bytes_per_parameter"),
    # bf16 weight 2 + gradient 2 + master, its gradient and two moments 16
    [(0, 8, 20), (1, 8, 4 + 16 / 8), (2, 8, 2 + 18 / 8), (3, 8, 20 / 8), (2, 1, 20)],
)
def test_full_tuning_is_split_as_the_stage_says(stage, world, bytes_per_parameter):
    need = predict(DIA, DIA, ds(stage), 2, ADAM, world)
    assert need["device"] == pytest.approx(DIA * bytes_per_parameter) and need["host"] == 0


def test_lora_pays_the_states_of_the_trained_share_only():
    need = predict(DIA, 10_000_000, ds(2), 2, ADAM, 2)
    assert need["device"] == pytest.approx(2 * DIA + 10_000_000 * 18 / 2)
    assert need["device"] / 1e9 == pytest.approx(3.2, abs=0.15)


def test_8bit_moments_save_6_bytes():
    full, small = (predict(DIA, DIA, ds(0), 2, state, 1)["device"] for state in (8, 2))
    assert full - small == pytest.approx(6 * DIA)


def test_offload_moves_the_bytes_to_the_host():
    cpu = {"device": "cpu"}
    plain = predict(DIA, DIA, ds(3), 2, ADAM, 4)
    moved = predict(DIA, DIA, ds(3, offload_optimizer=cpu, offload_param=cpu), 2, ADAM, 4)
    assert moved["device"] == 0 and moved["host"] == pytest.approx(plain["device"])


def test_a_sub_group_of_stage_3_bounds_the_fp32_gradient():
    whole = predict(DIA, DIA, ds(3), 2, ADAM, 1)["device"]
    small = predict(DIA, DIA, ds(3, sub_group_size=10_000_000), 2, ADAM, 1)["device"]
    assert whole - small == pytest.approx(4 * (1e9 - 1e7))


def test_saved_bytes_are_what_the_backward_pass_needs_and_no_parameter():
    """x @ W.T keeps x; tanh keeps its output; the sum keeps nothing."""
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    assert saved_bytes(lambda: torch.tanh(layer(x)).sum()) == 4 * (8 * 16 + 8 * 32)


@pytest.mark.parametrize(
    ("asked", "fits", "found"), [((8, 1), 8, (8, 1)), ((8, 3), 3, (2, 12)), ((15, 1), 7, (5, 3)), ((6, 2), 1, (1, 12))]
)
def test_a_micro_batch_is_made_smaller_until_it_fits_and_the_step_stays(asked, fits, found, capsys):
    def attempt(micro_batch):
        if micro_batch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert fit_micro_batch(attempt, *asked, Process(0, 1, torch.device("cpu"))) == found
    assert ("out of memory" in capsys.readouterr().out) == (asked != found)


def test_memory_that_no_micro_batch_fits_into_is_said_and_other_errors_are_not_taken_for_it():
    def too_much(_):
        torch.empty(2**60, dtype=torch.uint8)  # more than any machine has: the CPU's own error

    with pytest.raises(UserError, match="--micro-batch 1 does not fit"):
        fit_micro_batch(too_much, 2, 1, Process(0, 1, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit_micro_batch(lambda _: torch.ones(2, 3) @ torch.ones(2, 3), 2, 1, Process(0, 1, torch.device("cpu")))
