"""What the tests of Llama MoT share: tiny models on the demo's checkpoints, and random batches."""

import numpy as np
import torch

from models.mot import mot_loss
from models.mot_build import Donor, build_mot, choose_parts, expert_of, load_llama
from models.mot_clips import pad
from models.mot_layout import Layout, music

DS = {"zero_optimization": {"stage": 0}}


def build(demo, kind="musicgen", untie="ffn", gate="scalar", full=False, donor=None, llama=None, seed=0, **layout):
    """A fresh MoTLlama on the demo's tiny Llama and MusicGen, all of it trained."""
    llama = llama or load_llama(str(demo / "llama"), torch.float32)
    donor = donor or Donor(str(demo / "musicgen"))
    layout = Layout(llama.config.vocab_size, **layout)
    model = build_mot(llama, layout, expert_of(kind, gate, llama.config, donor), untie, full, donor, seed, DS)
    choose_parts(model, ["all"])
    return model


def batch_of(model, frames, texts=None, seed=0, final=True):
    """Random clips of so many frames with random captions."""
    draw = np.random.default_rng(seed)
    texts = texts or [draw.integers(5, 150, 7 + 3 * i) for i in range(len(frames))]
    codes = [draw.integers(0, 2048, (n, 4)) for n in frames]
    return pad([(t, *music(c, model.layout, final)) for c, t in zip(codes, texts, strict=True)], model.layout)


def loss_of(model, batch):
    return mot_loss(model, batch, torch.ones(4))
