"""Llama with modality-untied music experts: text tokens pass through Llama's frozen weights, music tokens through
their own, and all of them share one causal attention.

Llama itself stays the unchanged transformers module `llama`, so "the adapter" is every parameter whose name does not
begin with `llama.`. Routing is gather -> expert -> gather. Both experts are called on every rank in every layer, with
an empty slice if need be: a rank that skipped one would hang ZeRO-3 and corrupt ZeRO-2's buckets. The route is an
argument, never state of a module: gradient checkpointing must recompute with the route of its own batch.

Shapes: B clips, L positions, H width, N selected positions, C codebooks.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from common.loss import rows_loss
from models.mot.layout import Layout

NEW_ROW_SCALE = 0.1  # times the standard deviation of Llama's own rows

# ---- routing ---------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Text and music tokens of the flattened batch."""

    order: torch.Tensor  # (N,) their indices: all text, then all music; padding is in neither
    counts: list[int]  # of text and of music
    back: torch.Tensor  # (B L,) the place of each position in `order`; 0 for padding, at which nothing real ever looks


def route_of(input_ids, mask, vocab: int) -> Route:
    audio = (input_ids[..., 0] >= vocab).flatten()
    real = mask.flatten().bool()
    text, music = (real & ~audio).nonzero().squeeze(1), (real & audio).nonzero().squeeze(1)
    order = torch.cat([text, music])
    back = torch.zeros(len(real), dtype=torch.long, device=order.device)
    back[order] = torch.arange(len(order), device=order.device)
    return Route(order, [len(text), len(music)], back)


def routed(x, route: Route, text, audio):
    """x (B, L, ...) through `text` or `audio`, whichever each position is; padding gets the values of a real one."""
    text_in, audio_in = x.flatten(0, 1).index_select(0, route.order).split(route.counts)
    out = torch.cat([text(text_in), audio(audio_in)])
    return out.index_select(0, route.back).view(*x.shape[:2], -1)


# ---- the new modules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expert:
    """What the music experts are made of; written to adapter_config.json, so that reloading needs no MusicGen."""

    kind: str  # musicgen or llama
    width: int  # of the donor (MusicGen)
    ffn: int
    activation: str = "gelu"
    layer_map: tuple[int, ...] = ()  # donor layer of each Llama layer


class MusicGenExpert(nn.Module):
    """MusicGen's feed-forward block with its own LayerNorm, between projections where the widths differ."""

    def __init__(self, hidden: int, expert: Expert):
        super().__init__()
        projected = expert.width != hidden
        self.proj_in = nn.Linear(hidden, expert.width, bias=False) if projected else None
        self.norm = nn.LayerNorm(expert.width)
        self.fc1 = nn.Linear(expert.width, expert.ffn, bias=False)
        self.fc2 = nn.Linear(expert.ffn, expert.width, bias=False)
        self.proj_out = nn.Linear(expert.width, hidden, bias=False) if projected else None
        self.gain = nn.Parameter(torch.ones(1))
        self.activation = ACT2FN[expert.activation]

    def forward(self, x_nh):
        if self.proj_in is not None:
            x_nh = self.proj_in(x_nh)
        x_nh = self.fc2(self.activation(self.fc1(self.norm(x_nh))))
        if self.proj_out is not None:
            x_nh = self.proj_out(x_nh)
        return self.gain * x_nh


class AudioAttention(nn.Module):
    """The projections of the shared attention, for music tokens."""

    def __init__(self, llama_config):
        super().__init__()
        heads, kv = llama_config.num_attention_heads, llama_config.num_key_value_heads
        width, dim = llama_config.hidden_size, llama_config.head_dim
        bias = llama_config.attention_bias
        self.q_proj = nn.Linear(width, heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, kv * dim, bias=bias)
        self.v_proj = nn.Linear(width, kv * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, width, bias=bias)


class AudioLayer(nn.Module):
    """The weights of one Llama layer that music does not share with text; None where it does."""

    def __init__(self, llama_config, expert: Expert, untie: str):
        super().__init__()
        llama_like = expert.kind == "llama"
        self.ffn = LlamaMLP(llama_config) if llama_like else MusicGenExpert(llama_config.hidden_size, expert)
        norm = functools.partial(LlamaRMSNorm, llama_config.hidden_size, llama_config.rms_norm_eps)
        self.input_norm = norm() if untie != "ffn" else None
        self.post_norm = norm() if untie != "ffn" else None
        self.attn = AudioAttention(llama_config) if untie == "all" else None


class AudioHead(nn.Module):
    """Output rows of the music ids, and the loss over them. Only forward reads weights: there ZeRO-3 gathers them.

    The classes of a softmax are the rows of the predicted codebook (and A_EOS for codebook 0), because generation only
    ever chooses among these.
    """

    def __init__(self, layout: Layout, hidden: int):
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(torch.empty(layout.rows, hidden))

    def _classes(self, codebook: int):
        first = self.layout.first(codebook) - self.layout.vocab
        rows = self.weight[first : first + self.layout.size]
        return torch.cat([rows, self.weight[-1:]]) if codebook == 0 else rows

    def forward(
        self, hidden_nh, labels_nc=None, targets=None, weights_c=None, weights_n=None, codebook: int | None = None
    ):
        """With `codebook`: its logits; the last one of codebook 0 is A_EOS.

        With labels: the weighted loss sum, and per codebook the unweighted sum and the number of targets, (2, C).
        `targets`: for each codebook the positions that have a label. Weights, of codebooks and of
        positions, default to 1.
        """
        if codebook is not None:
            return F.linear(hidden_nh, self._classes(codebook)).float()
        layout, loss_sum, sums = self.layout, 0.0, []
        if weights_c is None:
            weights_c = torch.ones(layout.codebooks, device=hidden_nh.device)
        for k, rows in enumerate(targets):
            ids = labels_nc[:, k].index_select(0, rows)
            classes = ids - layout.first(k)
            if k == 0:
                classes = classes.masked_fill(ids == layout.eos, layout.size)
            weights = weights_c[k].expand(len(rows), 1)
            if weights_n is not None:
                weights = weights * weights_n.index_select(0, rows)[:, None]
            hidden = hidden_nh.index_select(0, rows)
            loss, losses = rows_loss(hidden, self._classes(k), classes[:, None], weights)
            loss_sum = loss_sum + loss
            sums += [losses.sum(), losses.new_full((), len(rows))]
        return loss_sum, torch.stack(sums).view(-1, 2).T

    def uniform_loss(self) -> float:
        """ln(classes): the loss of a head that has learned nothing yet."""
        return math.log(self.layout.size)


# ---- one layer -------------------------------------------------------------------------------------------------


def attend(audio: AudioLayer, layer, x, route: Route, mask, rope, cache=None):
    """The attention half of a layer; `layer` is Llama's own."""
    if audio.input_norm is None:
        h = layer.input_layernorm(x)
    else:
        h = routed(x, route, layer.input_layernorm, audio.input_norm)
    if audio.attn is None:
        h, _ = layer.self_attn(h, position_embeddings=rope, attention_mask=mask, past_key_values=cache)
        return x + h
    attn, own = layer.self_attn, audio.attn
    shape = (*h.shape[:2], -1, attn.head_dim)
    pairs = ((attn.q_proj, own.q_proj), (attn.k_proj, own.k_proj), (attn.v_proj, own.v_proj))
    q, k, v = (routed(h, route, *pair).view(shape).transpose(1, 2) for pair in pairs)
    q, k = apply_rotary_pos_emb(q, k, *rope)
    if cache is not None:
        k, v = cache.update(k, v, attn.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(attn.config._attn_implementation, eager_attention_forward)
    h, _ = attention(attn, q, k, v, mask, dropout=0.0, scaling=attn.scaling)
    return x + routed(h.reshape(*h.shape[:2], -1), route, attn.o_proj, own.o_proj)


def before_ffn(audio: AudioLayer, layer, x, route: Route):
    if audio.post_norm is None:
        return layer.post_attention_layernorm(x)
    return routed(x, route, layer.post_attention_layernorm, audio.post_norm)


def feed(audio: AudioLayer, layer, x, route: Route):
    """The feed-forward half of a layer."""
    return x + routed(before_ffn(audio, layer, x, route), route, layer.mlp, audio.ffn)


def run_layer(audio: AudioLayer, layer, x, route: Route, mask, rope, cache=None):
    return feed(audio, layer, attend(audio, layer, x, route, mask, rope, cache), route)


# ---- the model -------------------------------------------------------------------------------------------------


class MoTLlama(nn.Module):
    def __init__(self, llama, layout: Layout, expert: Expert, untie: str, layers: list[AudioLayer]):
        super().__init__()
        hidden = llama.config.hidden_size
        self.layout, self.expert, self.untie = layout, expert, untie
        self.llama = llama
        self.audio_embed = nn.Embedding(layout.rows, hidden)
        self.codebook_embed = nn.Embedding(layout.codebooks + 1, hidden)
        self.head = AudioHead(layout, hidden)
        self.layers = nn.ModuleList(layers)
        self.recompute = False  # gradient checkpointing
        self.run_layer = run_layer  # or its compiled form

    def adapter(self) -> dict[str, nn.Parameter]:
        """All parameters that are not Llama's own."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("llama.")}

    # -- forward --

    def embed(self, input_ids, codebooks, route: Route):
        vocab, channels = self.layout.vocab, self.layout.channels

        def audio(packed):
            ids, books = packed[:, :channels], packed[:, channels:]
            return (self.audio_embed(ids - vocab) + self.codebook_embed(books)).sum(1)

        packed = torch.cat([input_ids, codebooks], dim=-1)
        return routed(packed, route, lambda ids: self.llama.model.embed_tokens(ids[:, 0]), audio)

    def prepare(self, input_ids, codebooks, mask=None, positions=None, cache=None, route=None):
        """Embedded input, its route, the attention mask and the rotary angles."""
        step = input_ids.shape[1]
        if route is None:
            route = route_of(input_ids, mask[:, -step:], self.layout.vocab)
        x = self.embed(input_ids, codebooks, route)
        if positions is None:
            positions = torch.arange(step, device=x.device)[None]
        # Without a cache, clips are padded on the right and no real position ever sees padding. Their mask would make
        # the host wait for the GPU and keep attention from its fast kernels.
        causal = create_causal_mask(self.llama.config, x, mask if cache is not None else None, past_key_values=cache)
        return x, route, causal, self.llama.model.rotary_emb(x, position_ids=positions)

    def forward(self, input_ids, codebooks, mask=None, positions=None, cache=None, route: Route | None = None):
        """Hidden states (B, L, H) after the last norm. `cache`: for generation only. A batch of the training set has
        its `route`; otherwise it is found from the `mask` of real positions."""
        x, route, causal, rope = self.prepare(input_ids, codebooks, mask, positions, cache, route)
        for audio, layer in zip(self.layers, self.llama.model.layers, strict=True):
            if self.recompute and self.training:
                x = checkpoint(self.run_layer, audio, layer, x, route, causal, rope, use_reentrant=False)
            else:
                x = self.run_layer(audio, layer, x, route, causal, rope, cache)
        return self.llama.model.norm(x)

    def text_logits(self, text_ids):
        """Logits of text-only input through the routed layers: bit-identical to the original Llama's."""
        ids = text_ids[..., None].expand(*text_ids.shape, self.layout.channels)
        return self.llama.lm_head(self(ids, torch.zeros_like(ids), torch.ones_like(text_ids)))
