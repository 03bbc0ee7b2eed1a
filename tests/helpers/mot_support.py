"""What the tests of Llama MoT share: tiny models on the demo's checkpoints, and random batches."""

import numpy as np
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from common.contracts import LossOutput
from common.loss import IGNORE
from helpers import support
from llama_mot import compute_loss
from models.mot.build import Donor, build_mot, choose_parts, expert_of, load_llama
from models.mot.data import pad, places
from models.mot.layout import Layout, music

DS = {"zero_optimization": {"stage": 0}}
# Clipping is active, decay is on, rates differ by group, captions are dropped: each could be wrong on two ranks.
SMALL = {
    "untie": "all",
    "precision": "fp32",
    "lr": 5e-4,
    "copied_lr": 0.5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "warmup": 2.0,
    "steps": 4,
    "micro_tokens": 500,
    "accumulation": 2,
    "text_dropout": 0.3,
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
}


def assets(demo) -> dict:
    tokens = str(demo / "tokens")
    return {"model": str(demo / "llama"), "musicgen": str(demo / "musicgen"), "data": tokens, "eval_data": tokens}


def build(demo, kind="musicgen", untie="ffn", donor=None, llama=None, seed=0, order="flat"):
    """A fresh MoTLlama on the demo's tiny Llama and MusicGen, all of it trained."""
    llama = llama or load_llama(str(demo / "llama"), torch.float32)
    donor = donor or Donor(str(demo / "musicgen"))
    layout = Layout(llama.config.vocab_size, order=order)
    model = build_mot(llama, layout, expert_of(kind, llama.config, donor), untie, donor, seed, DS)
    choose_parts(model, ["all"])
    return model


def quantised_llama(demo, bits: str):
    """The demo's Llama as plain transformers and bitsandbytes load it, frozen."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    options = {}
    if bits == "4bit":
        support.keep_4bit_weights_as_they_are()
        how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **how)
    elif bits == "8bit":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    llama = LlamaForCausalLM.from_pretrained(str(demo / "llama"), dtype=torch.float32, **options)
    return llama.requires_grad_(False)


def text_batch(model, ids):
    """A batch without any music."""
    ids = torch.as_tensor(ids)
    shape = (*ids.shape, model.layout.channels)
    labels = torch.full((*ids.shape, 4), IGNORE)
    ids, mask = ids[..., None].expand(shape), torch.ones(shape[:2])
    batch = {"input_ids": ids, "codebooks": torch.zeros_like(ids), "mask": mask, "labels": labels}
    return batch | places(ids.numpy(), mask.numpy(), labels.numpy(), model.layout)


def batch_of(model, frames, texts=None, seed=0, final=True):
    """Random clips of so many frames with random captions."""
    draw = np.random.default_rng(seed)
    texts = texts or [draw.integers(5, 150, 7 + 3 * i) for i in range(len(frames))]
    codes = [draw.integers(0, 2048, (n, 4)) for n in frames]
    return pad([(t, *music(c, model.layout, final)) for c, t in zip(codes, texts, strict=True)], model.layout)


def loss_output(model, batch, weights=(1.0, 1.0, 1.0, 1.0)) -> LossOutput:
    """The recipe's loss with these codebook weights."""
    return compute_loss(model, batch | {"codebook_weights": torch.tensor(weights)})


def loss_of(model, batch, weights=(1.0, 1.0, 1.0, 1.0)) -> tuple[torch.Tensor, torch.Tensor]:
    """Its loss sum, and per codebook the unweighted sum and the number of targets, (2, C)."""
    output = loss_output(model, batch, weights)
    return output.loss_sum, torch.stack(list(output.parts.values()), dim=1)


# ---- the reference: both experts on every token, then a mask -----------------------------------------------------


def reference_states(model, batch):
    ids, books, mask = batch["input_ids"], batch["codebooks"], batch["mask"].bool()
    vocab = model.layout.vocab
    audio = (ids[..., 0] >= vocab) & mask
    pick = audio[..., None]
    text_embed = model.llama.model.embed_tokens(ids[..., 0].clamp(max=vocab - 1))
    audio_embed = (model.audio_embed((ids - vocab).clamp(min=0)) + model.codebook_embed(books)).sum(-2)
    x = torch.where(pick, audio_embed, text_embed) * mask[..., None]
    rope = model.llama.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    length = ids.shape[1]
    causal = torch.ones(length, length).tril().bool()[None, None] & mask[:, None, None]
    for layer, own in zip(model.llama.model.layers, model.layers, strict=True):
        h = layer.input_layernorm(x)
        if own.input_norm is not None:
            h = torch.where(pick, own.input_norm(x), h)
        if own.attn is None:
            h, _ = layer.self_attn(h, position_embeddings=rope, attention_mask=causal)
        else:
            heads = []
            for name in ("q_proj", "k_proj", "v_proj"):
                both = [getattr(module, name)(h) for module in (own.attn, layer.self_attn)]
                heads.append(torch.where(pick, *both).unflatten(-1, (-1, 16)).transpose(1, 2))
            q, k = apply_rotary_pos_emb(heads[0], heads[1], *rope)
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, heads[2]))
            h = F.scaled_dot_product_attention(q, k, v, causal).transpose(1, 2).flatten(2)
            h = torch.where(pick, own.attn.o_proj(h), layer.self_attn.o_proj(h))
        x = x + h
        h = layer.post_attention_layernorm(x)
        if own.post_norm is not None:
            h = torch.where(pick, own.post_norm(x), h)
        x = x + torch.where(pick, own.ffn(h), layer.mlp(h))
    return model.llama.model.norm(x)


def reference_loss(model, batch):
    """Sum of plain cross-entropies, over the classes of the predicted codebook."""
    states, layout, total = reference_states(model, batch), model.layout, 0.0
    for k in range(4):
        labels = batch["labels"][..., k]
        real = labels != IGNORE
        rows = model.head.weight[layout.first(k) - layout.vocab :][: layout.size]
        classes = labels[real] - layout.first(k)
        if k == 0:
            rows = torch.cat([rows, model.head.weight[-1:]])
            classes[labels[real] == layout.eos] = layout.size
        total = total + F.cross_entropy(states[real] @ rows.T, classes, reduction="sum")
    return total
