"""The forward pass of Higgs Audio v2 in training: the library's own modules, with positions routed by index.

The library's layer selects text and audio with boolean masks. On a GPU each of them makes the host wait for the number
of hits, 17 times per layer, and padding passes through the text MLP. Here `collate` finds the positions on the CPU. The
real ones are kept in one list, text first, then audio, so a norm or an MLP takes a slice of it; only attention sees
rows. The model itself stays as it is: generation and exports use the library's layer.

Text and audio modules are called on every rank in every layer, with an empty slice if need be: under ZeRO-3 the other
ranks would wait forever for one that skipped them.

Shapes: B rows, S positions, R real positions of all rows, D width.
"""

import torch
from torch.utils.checkpoint import checkpoint

from common.lora import base_model


def hidden_states(model, batch: dict) -> torch.Tensor:
    """States (R, D) after the last norm, in the order of batch["text_at"], batch["audio_at"]."""
    higgs = base_model(model).model
    ids_bs, text_at = batch["input_ids"], batch["text_at"]
    codes = batch["audio_input_ids"].flatten(0, 1).index_select(0, batch["frame_at"])
    text = higgs.embed_tokens(ids_bs.flatten().index_select(0, text_at))
    x_rd = torch.cat([text, higgs.embed_audio_tokens(codes)])
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids_bs.shape[1], device=ids_bs.device)[None]
    places = torch.cat([text_at, batch["audio_at"]]), len(text_at), ids_bs.shape
    attention = attention_inputs(higgs.config._attn_implementation, batch)
    attention["position_embeddings"] = higgs.rotary_emb(x_rd, positions)
    run = getattr(higgs, "run_layer", run_layer)  # --compile sets its compiled form
    for layer in higgs.layers:
        if layer.gradient_checkpointing and layer.training:
            x_rd = checkpoint(run, layer, x_rd, places, attention, use_reentrant=False)
        else:
            x_rd = run(layer, x_rd, places, attention)
    return higgs.norm(x_rd)


def run_layer(layer, x_rd: torch.Tensor, places: tuple, attention: dict) -> torch.Tensor:
    """What HiggsAudioV2DecoderLayer computes. `places`: where the R positions are in B x S, and how many are text."""
    place_r, texts, shape_bs = places
    h_rd = torch.cat([layer.input_layernorm(x_rd[:texts]), layer.audio_input_layernorm(x_rd[texts:])])
    # Padding is 0. It comes after everything real in its row, where causal attention never looks. index_copy would keep
    # its source for the backward pass.
    h_bsd = h_rd.new_zeros(shape_bs.numel(), h_rd.shape[-1]).index_put_((place_r,), h_rd).view(*shape_bs, -1)
    h_bsd, _ = layer.self_attn(h_bsd, **attention)
    x_rd = x_rd + h_bsd.flatten(0, 1).index_select(0, place_r)
    text, audio = x_rd[:texts], x_rd[texts:]
    text_out = layer.mlp(layer.post_attention_layernorm(text))
    audio_out = layer.audio_mlp(layer.audio_post_attention_layernorm(audio))
    return x_rd + torch.cat([text_out, audio_out])


def attention_inputs(implementation: str, batch: dict) -> dict:
    """The arguments that keep attention causal and, in a packed batch, within its row.

    Without a mask SDPA and FlashAttention are causal. Packed rows need one, which is S x S for SDPA, blocks for flex
    attention, and only the rows' boundaries for FlashAttention.
    """
    row_of = batch.get("row_of")  # (S,), packed batches only
    if implementation.startswith("flash_attention"):
        if row_of is None:
            return {"attention_mask": None}
        starts, longest = batch["row_starts"], batch["longest_row"]
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return {"attention_mask": None} | lengths
    if implementation == "flex_attention":
        return {"attention_mask": _block_mask(row_of, batch["input_ids"])}
    if row_of is None:
        return {"attention_mask": None}
    return {"attention_mask": (row_of[:, None] == row_of).tril()[None, None]}


def _block_mask(row_of: torch.Tensor | None, ids_bs: torch.Tensor):
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch, head, query, key):
        return query >= key

    def causal_in_row(batch, head, query, key):
        return (query >= key) & (row_of[query] == row_of[key])

    size, device = ids_bs.shape[1], ids_bs.device
    allowed = causal if row_of is None else causal_in_row
    # Compiled, it never holds the S x S mask; on a CPU compiling costs more than that.
    return create_block_mask(allowed, None, None, size, size, device=device, _compile=device.type != "cpu")
