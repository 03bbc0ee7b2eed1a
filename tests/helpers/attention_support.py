"""Attention kernels of GPUs, computed by plain torch on a CPU, behind the interfaces that transformers calls."""

import functools

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def pretend_flash(monkeypatch) -> None:
    """transformers finds FlashAttention 2."""
    from transformers import modeling_flash_attention_utils as utils

    process = utils._lazy_define_process_function(_flash_varlen)
    functions = ((_flash, _flash_varlen, None, utils._pad_input, utils._unpad_input), (process, None))
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: functions)


def _flash(q, k, v, causal, softmax_scale=None, **_):
    """Shapes: (rows, positions, heads, width)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)


def _flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale=None, **_):
    """Rows end to end: (positions of all rows, heads, width)."""
    for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert starts.dtype == torch.int32 and int(starts.diff().max()) == int(longest)
    rows = []
    for row in range(len(cu_seqlens_q) - 1):
        at_q, at_k = (slice(int(starts[row]), int(starts[row + 1])) for starts in (cu_seqlens_q, cu_seqlens_k))
        rows.append(_flash(q[None, at_q], k[None, at_k], v[None, at_k], causal, softmax_scale)[0])
    return torch.cat(rows)


def flex_without_compiler(monkeypatch) -> None:
    """Flex attention works on a CPU at once; forward only, torch has no backward pass for it there."""
    from transformers import masking_utils
    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention(False), "_compiled_flex_attention", flex_attention)
    monkeypatch.setattr(WrappedFlexAttention, "__init__", lambda self, training: None)

    def block_mask(*args, _compile, **options):
        return create_block_mask(*args, **options, _compile=False)

    monkeypatch.setattr(masking_utils, "create_block_mask", functools.wraps(create_block_mask)(block_mask))
