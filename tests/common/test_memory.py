"""The memory prediction against figures worked out by hand: 16 bytes per trained parameter, and more."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.contracts import LossOutput
from common.memory import (
    activation_bytes,
    checkpoint_bytes,
    communication,
    count_parameters,
    loaded_bytes,
    predict,
    quantised_savings,
    saved_bytes,
    try_in_memory,
)
from common.optim import step_bytes_per_weight
from common.runtime import resident_bytes

DIA = 1_611_160_576
ADAM = 8  # bytes of optimizer state per weight


def ds(stage, sums="fp32", **zero):
    """`sums`: the precision that micro-batches are added up in; `resolve_ds` makes it fp32."""
    return {"zero_optimization": {"stage": stage, **zero}, "data_types": {"grad_accum_dtype": sums}}


def test_trainable_and_all_parameters_are_counted():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).requires_grad_(False))
    assert count_parameters(model) == (16 + 25, 16)


def test_packed_weights_count_with_their_true_size():
    """bitsandbytes packs two 4-bit values into a byte."""
    model = nn.Linear(64, 64, bias=False)
    packed = nn.Parameter(torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=torch.Size((64, 64)))
    model.weight = packed
    assert count_parameters(model) == (64 * 64, 0)
    assert quantised_savings(model, 2) == 2 * 64 * 64 - (64 * 64 // 2 + 4 * 64 + 4 * 16), "scales and codebook"


def test_weights_of_a_mapped_file_are_in_memory_once_they_are_counted(tmp_path):
    """Otherwise they would be missing from the memory in use, from which the prediction subtracts them."""
    size = 64 * 2**20
    (tmp_path / "weights").write_bytes(bytes(size))
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.from_file(str(tmp_path / "weights"), size=size // 2, dtype=torch.bfloat16))
    before = resident_bytes("VmRSS")
    assert loaded_bytes(model) == size
    assert resident_bytes("VmRSS") - before > 0.9 * size


@pytest.mark.parametrize(
    ("stage", "world", "sums", "bytes_per_parameter"),
    [
        # bf16 weight 2 + gradient 2 + master, its gradient and two moments 16
        (2, 8, "bf16", 2 + 18 / 8),
        (3, 8, "bf16", 20 / 8),
        (2, 1, "bf16", 20),
        # With fp32 sums the gradient takes 4, and is the master weight's too.
        (2, 8, "fp32", 2 + 16 / 8),
        (2, 1, "fp32", 18),
        (3, 8, "fp32", 18 / 8),
    ],
)
def test_full_tuning_is_split_as_the_stage_says(stage, world, sums, bytes_per_parameter):
    need = predict(DIA, DIA, ds(stage, sums), 2, ADAM, world)
    assert need["device"] == pytest.approx(DIA * bytes_per_parameter) and need["host"] == 0


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 16), (1, 8 + 16 / 8), (2, 4 + 20 / 8), (3, 20 / 8)])
def test_fp32_takes_4_bytes_for_weights_and_gradients(stage, bytes_per_parameter):
    need = predict(DIA, DIA, ds(stage), 4, ADAM, 8)
    assert need["device"] == pytest.approx(DIA * bytes_per_parameter)


def test_lora_pays_the_states_and_buckets_of_the_trained_share_only():
    need = predict(DIA, 10_000_000, ds(2, overlap_comm=True, reduce_bucket_size=200_000_000), 2, ADAM, 2)
    assert need["device"] == pytest.approx(2 * DIA + 10_000_000 * 16 / 2)
    assert need["device"] / 1e9 == pytest.approx(3.2, abs=0.15)
    assert need["working"] == 2 * 2 * 10_000_000, "one bucket and the copy that is sent"


def test_sums_of_micro_batches_are_whole_on_every_rank_if_gradients_are_reduced_in_one_piece():
    fits, sums = ds(2, "fp32", reduce_bucket_size=10_000_000), {"gradient_accumulation_steps": 4}
    once, often = (predict(DIA, 10_000_000, fits | more, 2, ADAM, 8)["working"] for more in ({}, sums))
    assert once == (2 + 2) * 10_000_000 and often == (2 + 2 + 4) * 10_000_000
    once, often = (communication(DIA, 10_000_000, fits, 2, 2, accumulation) for accumulation in (1, 4))
    assert once == 0.5 * 1e7 * (2 * 2 + 2) and often == 0.5 * 1e7 * (2 * 4 + 2), "sent once, in fp32"


@pytest.mark.parametrize(
    ("communication", "stage", "expected"),
    [
        # ZeRO-2: two bf16 buffers, a flat copy, and that copy in fp32; ZeRO-3: live weights and a buffer to send
        ("bf16", 2, (2 + 2 + 2) * 2e8),
        ("fp32", 2, (2 + 2 + 2 + 4) * 2e8),
        ("bf16", 3, 2 * 1e9 + 2 * 2e8),
        ("fp32", 3, 2 * 1e9 + 4 * 2e8),
    ],
)
def test_buckets_are_counted_in_the_precision_that_is_sent(communication, stage, expected):
    resolved = ds(stage, overlap_comm=True, reduce_bucket_size=200_000_000)
    resolved["communication_data_type"] = communication
    assert predict(DIA, DIA, resolved, 2, ADAM, 16)["working"] == expected


def test_a_single_rank_of_zero3_gathers_only_weights_that_are_offloaded():
    small = {"reduce_bucket_size": 1, "stage3_max_live_parameters": 100_000_000}
    assert predict(DIA, DIA, ds(3, **small), 2, ADAM, 1)["working"] == pytest.approx(0, abs=10)
    assert predict(DIA, DIA, ds(3, **small, offload_param={"device": "cpu"}), 2, ADAM, 1)["working"] >= 2e8


def test_what_the_backward_pass_has_freed_is_not_added_to_what_the_step_needs():
    """ZeRO-2 in fp32: the step's copy of the gradients, 4 bytes each, is larger than the buckets were."""
    assert predict(DIA, DIA, ds(2, reduce_bucket_size=200_000_000), 4, ADAM, 1)["working"] == 0


def test_8bit_moments_save_6_bytes():
    full, small = (predict(DIA, DIA, ds(2), 2, state, 1)["device"] for state in (8, 2))
    assert full - small == pytest.approx(6 * DIA)


def test_offload_moves_the_bytes_to_the_host():
    cpu = {"device": "cpu"}
    plain = predict(DIA, DIA, ds(3, "bf16"), 2, ADAM, 4)
    moved = predict(DIA, DIA, ds(3, "bf16", offload_optimizer=cpu, offload_param=cpu), 2, ADAM, 4)
    assert moved["device"] == 0 and moved["host"] == pytest.approx(plain["device"])
    # Sums in fp32 are not used as they are on the host: weight 2, gradient 4, its copy 4, master weight 4, moments 8.
    moved = predict(DIA, DIA, ds(3, offload_optimizer=cpu, offload_param=cpu), 2, ADAM, 4)
    assert moved["host"] == pytest.approx(22 * DIA / 4)


def test_zero2_offload_keeps_fp32_sums_of_gradients_on_the_device():
    """DeepSpeed's stage_1_and_2.py allocates the partition of fp32 gradients on the accelerator."""
    cpu = {"device": "cpu"}
    fp32, bf16 = (predict(DIA, DIA, ds(2, sums, offload_optimizer=cpu), 2, ADAM, 4) for sums in ("fp32", "bf16"))
    assert fp32["device"] == pytest.approx(DIA * (2 + 4 / 4)) and bf16["device"] == pytest.approx(DIA * 2)
    assert fp32["host"] == pytest.approx(DIA * 16 / 4) and bf16["host"] == pytest.approx(DIA * 18 / 4)


def test_8_bit_adamw_unpacks_what_it_updates_on_a_cpu_and_nothing_on_a_gpu():
    """Of 20 bytes per weight, counted by torch's profiler in a step of bitsandbytes' own optimizer."""
    from bitsandbytes.optim import AdamW8bit
    from torch.profiler import ProfilerActivity, profile

    def step_peak(make, weights):
        parameter = nn.Parameter(torch.zeros(weights))
        optimizer = make([parameter])
        parameter.grad = torch.ones(weights)
        optimizer.step()  # makes the states
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            optimizer.step()
        sizes = [event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(itertools.accumulate(sizes)), optimizer

    weights = 2**18
    for make in (lambda p: AdamW8bit(p, lr=1e-3), lambda p: torch.optim.AdamW(p, fused=True)):
        peak, optimizer = step_peak(make, weights)
        assert peak / weights == pytest.approx(step_bytes_per_weight(optimizer, "cpu"), abs=0.1)
        assert step_bytes_per_weight(optimizer, "cuda") == 0


@pytest.mark.parametrize(("stage", "updated"), [(2, DIA / 4), (3, 1e8 + 33_554_432 / 4), (0, 33_554_432)])
def test_a_step_unpacks_a_partition_a_sub_group_or_a_parameter(stage, updated):
    """`updated`: weights per rank of 4. A sub-group ends with the parameter that makes it large enough."""
    zero = ds(stage, sub_group_size=100_000_000, reduce_bucket_size=1)
    plain, unpacked = (predict(DIA, DIA, zero, 4, 2, 4, extra, 33_554_432)["device"] for extra in (0, 20))
    assert unpacked - plain == pytest.approx(20 * updated)


def test_a_sub_group_of_stage_3_bounds_the_fp32_gradient():
    """Unless gradients are added up in fp32: then the step uses those."""
    for sums, copied in (("bf16", 4), ("fp32", 0)):
        whole = predict(DIA, DIA, ds(3, sums), 2, ADAM, 1)["device"]
        small = predict(DIA, DIA, ds(3, sums, sub_group_size=10_000_000), 2, ADAM, 1)["device"]
        assert whole - small == pytest.approx(copied * (1e9 - 1e7))


@pytest.mark.parametrize(
    ("stage", "expected"),
    # 4 ranks, 3 micro-batches, bf16: 3/4 of each message leaves the rank, a sum over all ranks goes round twice
    [(1, 0.75 * (2 * 2 + 2)), (2, 0.75 * (3 * 2 * 2 + 2)), (3, 0.75 * 3 * (2 * 2 + 2))],
)
def test_what_a_rank_sends_per_step(stage, expected):
    assert communication(DIA, DIA, ds(stage), 2, 4, 3) == pytest.approx(DIA * expected)
    assert communication(DIA, DIA, ds(stage), 2, 1, 3) == 0


def test_fp32_messages_are_twice_as_large_and_frozen_weights_are_only_sent_by_zero3():
    fp32 = ds(2) | {"communication_data_type": "fp32"}
    assert communication(DIA, 1_000_000, fp32, 2, 2, 1) == pytest.approx(0.5 * 1e6 * (2 * 4 + 2))
    assert communication(DIA, 1_000_000, ds(3), 2, 2, 1) == pytest.approx(0.5 * (2 * 2 * DIA + 2e6))


def test_a_checkpoint_holds_masters_moments_and_compute_weights():
    assert checkpoint_bytes(DIA, ds(2), 2, ADAM, ema=False) == DIA * 14
    assert checkpoint_bytes(DIA, ds(3), 2, ADAM, ema=True) == DIA * 16


def test_saved_bytes_are_what_the_backward_pass_needs_and_no_parameter():
    """x @ W.T keeps x; tanh keeps its output; the sum keeps nothing."""
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    assert saved_bytes(lambda: torch.tanh(layer(x)).sum()) == 4 * (8 * 16 + 8 * 32)


def test_an_allocation_that_fails_is_told_from_other_errors():
    def too_much():
        torch.empty(2**60, dtype=torch.uint8)  # more than any machine has: the CPU's own error

    def on_a_gpu():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert try_in_memory(lambda: 3) == (3, None)
    for work in (too_much, on_a_gpu):
        result, problem = try_in_memory(work)
        assert result is None and "memory" in problem and "\n" not in problem
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        try_in_memory(lambda: torch.ones(2, 3) @ torch.ones(2, 3))


def mlp(checkpointed: bool):
    """Two layers of 64 x 64 as a loss function; 256 positions, so that an activation takes 64 KiB."""
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU())

    def loss(model, batch):
        run = (lambda x: checkpoint(model, x, use_reentrant=False)) if checkpointed else model
        return LossOutput(run(batch["x"]).sum(), {})

    return layers, loss, {"x": torch.zeros(256, 64), "ids": ["a"]}


def test_activations_on_paper_are_counted_by_hand():
    """At the peak there are two outputs of ReLU (which linear layers and ReLUs share), a gradient and its successor."""
    model, loss, batch = mlp(False)
    activation = 256 * 64 * 4
    peak = activation_bytes(model.to("meta"), loss, batch)
    assert 2 * activation <= peak <= 5 * activation
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_activations_on_paper_grow_with_the_batch_and_shrink_with_checkpointing(device):
    deep = nn.Sequential(*(mlp(False)[0] for _ in range(8))).to(device)

    def peak(positions, checkpointed):
        def loss(model, batch):
            x = batch["x"]
            for block in model:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            return LossOutput(x.sum(), {})

        return activation_bytes(deep, loss, {"x": torch.zeros(positions, 64)})

    assert peak(512, False) / peak(256, False) == pytest.approx(2, rel=0.02)
    assert peak(256, True) < 0.75 * peak(256, False)
    # 8 inputs of blocks, and what a block saves and computes while it is recomputed
    assert 8 * 256 * 64 * 4 < peak(256, True) < (8 + 6) * 256 * 64 * 4
