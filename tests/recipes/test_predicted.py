"""Predictions of --world beside what two real ranks send and write."""

import json

import pytest
import torch

from common.ds_config import resolve_ds
from common.runtime import Process
from helpers.rank_server import Runs

pytestmark = pytest.mark.distributed
ALONE = Process(0, 1, torch.device("cpu"))
WORLD = 2
# Bytes that each of N ranks sends in a ring algorithm, per byte of the message.
HOP = (WORLD - 1) / WORLD
RING = {"allreduce_": 2 * HOP, "_allgather_base_": HOP, "_reduce_scatter_base_": HOP}
RING["broadcast_"] = HOP  # one by every rank: together a gathering
ZERO3 = RING | {"allreduce_": HOP}  # reduces gradients on CPUs; on GPUs that is a reduce_scatter, which is predicted


@pytest.fixture(scope="module")
def predicted_and_found(demo, two_ranks, tmp_path_factory):
    """found(precision, ds): bytes that --world 2 predicts, and bytes sent in a step and written in a checkpoint."""
    import dia_full

    folder = tmp_path_factory.mktemp("predicted")
    flags = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "micro_tokens": 600, "accumulation": 3}
    flags |= {"steps": 2, "samples": 0, "save_every": 0, "eval_every": 0, "export": False}

    def found(precision: str, ds: str) -> tuple[dict, float, int]:
        name = f"{precision}-{ds}"
        config = flags | {"precision": precision, "ds": f"ds_configs/{ds}.json"}
        options = {"around": "helpers.traffic_ranks:counting", "note": str(folder / f"{name}.json")}
        run = Runs(two_ranks, "dia_full", folder, {name: config}, **options) / name
        on_paper = dia_full.Config(**config, world=WORLD)
        need = dia_full.train(on_paper, ALONE, resolve_ds(on_paper.ds, on_paper, WORLD)).need(on_paper.ds)
        messages = json.loads((folder / f"{name}.json").read_text())
        sent = sum((ZERO3 if ds == "zero3" else RING)[name] * size for name, size in messages.items() if size)
        [checkpoint] = (run / "checkpoints").glob("step-*")
        return need, sent, sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())

    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_send_and_write_what_is_predicted(predicted_and_found, precision):
    """1.3 million weights, all trained, 3 micro-batches per rank and step."""
    need, sent, written = predicted_and_found(precision, "zero2")
    assert sent == pytest.approx(need["sent"], rel=0.02)
    assert written == pytest.approx(need["checkpoint"], rel=0.02)


def test_a_small_model_sends_less_with_zero3_than_predicted(predicted_and_found):
    """It keeps the weights of the forward pass for the backward pass, where the prediction gathers them again."""
    need, sent, _ = predicted_and_found("bf16", "zero3")
    assert 0.5 * need["sent"] < sent < need["sent"]
