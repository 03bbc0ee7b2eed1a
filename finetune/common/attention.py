"""--attn: which attention kernels a language model trains with. Imports nothing heavy: recipes read flags first."""

from contextlib import contextmanager
from typing import Literal

from common.errors import UserError

Attention = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
HELP = "attention kernels; auto = the best for this model and machine, sdpa on a CPU"


def choose_attention(wanted: str, precision: str, packing: bool = False, masks: bool = False) -> str:
    """The implementation for transformers. `masks`: the model attends to padded texts, which FlashAttention could only
    cut out by waiting for the GPU in every layer; so it is used only if asked for."""
    if wanted != "auto":
        reason = why_not(wanted, precision)
        if reason:
            raise UserError(f"--attn {wanted} cannot be used: {reason}.")
        return wanted
    # Without a mask SDPA is fast too; for packed rows it needs one of positions x positions.
    flash = [] if masks else ["flash_attention_3", "flash_attention_2"]
    candidates = [*flash, *(["flex_attention"] if packing else []), "sdpa"]
    return next(name for name in candidates if not why_not(name, precision))


def why_not(name: str, precision: str) -> str:
    """Why this implementation cannot train here; empty if it can."""
    if name == "sdpa":
        return ""
    import torch
    from transformers import utils

    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    if name == "flex_attention":
        return "" if utils.is_triton_available() else "it needs the package triton"
    if precision != "bf16":
        return "it needs --precision bf16"
    generation, _ = torch.cuda.get_device_capability()
    if name == "flash_attention_3":
        if generation != 9:
            return "it needs a GPU of the Hopper generation"
        return "" if utils.is_flash_attn_3_available() else "the package flash-attn-3 is not installed"
    if generation < 8:
        return "it needs a GPU of the Ampere generation or newer"
    return "" if utils.is_flash_attn_2_available() else "the package flash-attn is not installed"


@contextmanager
def sdpa_inside(model):
    """Inside, a transformers model computes attention with SDPA, whatever it trains with: generation has other masks
    at every step, for which flex attention would compile again and again."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
