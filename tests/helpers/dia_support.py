"""What the tests of both Dia recipes share."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers import support


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


def stereo_tokens(demo: Path, target: Path, codec: bool = True) -> Path:
    """Real demo clips on the left, other ones, as long, on the right; two speakers. Without a codec no process decodes
    the samples."""
    from common.tokens import TokenDataset

    tokens = TokenDataset(str(demo / "tokens/train"))
    clips = []
    for i in range(8):
        left, right = tokens.codes(i), tokens.codes(i + 8)
        frames = min(len(left), len(right))
        codes = np.concatenate([left[:frames], right[:frames]], axis=1)
        clips.append({"id": tokens.id(i), "text": tokens.text(i), "codes": codes})
    speakers = {"speaker": ["a", "b"] * 4}
    weights = str(demo / "codec") if codec else None
    return support.write_tokens(target, clips, channels=18, weights=weights, columns=speakers)


def native_of(model) -> dict[str, torch.Tensor]:
    """The native layout, written from its definition: y[outputs...] = sum over inputs of x[inputs...] kernel."""
    encoder, decoder = model.config.encoder_config, model.config.decoder_config
    native = {}
    for name, value in model.state_dict().items():
        stack = encoder if ".encoder." in name else decoder
        short = name.removeprefix("model.")
        if name == "model.decoder.embeddings.embed.weight":
            for channel, table in enumerate(value.split(decoder.vocab_size)):
                native[f"decoder.embeddings.{channel}.weight"] = table.clone()
        elif name == "logits_dense.weight":
            kernel = value.T.reshape(decoder.hidden_size, decoder.num_channels, decoder.vocab_size)
            native["decoder.logits_dense.weight"] = kernel
        elif "gate_up_proj" in name:
            native[short.replace("gate_up_proj", "wi_fused")] = value.T.reshape(
                value.shape[1], 2, stack.intermediate_size
            )
        elif "down_proj" in name:
            native[short.replace("down_proj", "wo")] = value.T
        elif name.endswith("o_proj.weight"):
            native[short] = value.T.reshape(-1, 16, value.shape[0])  # 16: head_dim of the tiny model, everywhere
        elif "_proj.weight" in name:
            native[short] = value.T.reshape(value.shape[1], -1, 16)
        else:
            native[short] = value
    return {name: value.contiguous() for name, value in native.items()}
