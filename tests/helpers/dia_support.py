"""What the tests of both Dia recipes share."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def probe(engine, config, process) -> None:
    """RUN/probe.npz: logits of the first evaluation clips by the training engine; RUN/modules.json: what the process
    has imported; RUN/buffers.json: what it would leave in shared memory."""
    if not config.eval_data:
        return
    from common.lora import base_model
    from common.tokens import TokenDataset
    from models.dia.data import Clips
    from models.dia.layout import layout_of

    model = engine.module.model.eval()
    layout = layout_of(base_model(model).config)
    batch = Clips(TokenDataset(config.eval_data), layout, config, {}, train=False).batch([0, 1])
    inputs = {name: value for name, value in batch.items() if name not in ("ids", "labels", "positions")}
    with torch.no_grad():
        write_probe(model(**inputs, use_cache=False).logits, config, process)


def write_probe(logits, config, process) -> None:
    if process.is_main:
        out = Path(config.out)
        np.savez(out / "probe.npz", logits=logits.float().numpy())
        modules = sorted(name for name, module in sys.modules.items() if module)
        (out / "modules.json").write_text(json.dumps(modules))
        buffers = Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")
        (out / "buffers.json").write_text(json.dumps([str(path) for path in buffers]))


SMALL = {
    "lora_groups": ["attn"],
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "precision": "fp32",
    "lr": 5e-4,
    "warmup": 2.0,
    "steps": 5,
    "micro_tokens": 400,
    "accumulation": 2,
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
}


def poison_letter_q(source: Path, target: Path) -> Path:
    """A checkpoint whose embedding of the letter q is NaN: a clip with a q in its text has a NaN loss."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights["model.encoder.embedding.weight"][ord("q")] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
