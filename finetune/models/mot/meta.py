"""Llama as Meta distributes it: params.json, consolidated.*.pth, and a tokenizer.model in tiktoken's format."""

import base64
import json
import re
from pathlib import Path

import torch

from common import runs
from common.errors import UserError

# Meta's name of a tensor of layer i, the Hugging Face name, and the dimension in which model parallelism splits it.
LAYER = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
NAMED = {"begin_of_text": 0, "end_of_text": 1, "finetune_right_pad_id": 4, "start_header_id": 6, "end_header_id": 7}
NAMED |= {"eom_id": 8, "eot_id": 9, "python_tag": 10}
SPECIAL_TOKENS = 256


def is_meta_folder(folder: Path) -> bool:
    return (folder / "params.json").is_file() and not (folder / "config.json").is_file()


# ---- weights ---------------------------------------------------------------------------------------------------


def convert(folder: Path, out: Path) -> None:
    """Writes a Hugging Face folder, complete or not at all, with the tokenizer if there is one."""
    from transformers import LlamaForCausalLM

    try:
        params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
        sizes = {name: int(params[name]) for name in ("dim", "n_layers", "n_heads")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} has no readable params.json with dim, n_layers and n_heads.") from None
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{folder} holds no consolidated.*.pth.")
    try:
        parts = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
    except Exception as error:  # torch raises many kinds
        raise UserError(
            f"{folder} holds a .pth that is not a plain torch checkpoint ({type(error).__name__})."
        ) from None
    parts = [{name: value for name, value in part.items() if name != "rope.freqs"} for part in parts]
    state = rename(parts, sizes, folder)
    config = config_of(params, sizes, state)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    try:
        odd = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise UserError(f"{folder}: weights and params.json disagree:{str(error).splitlines()[1]}") from None
    missing = set(odd.missing_keys) - {"lm_head.weight"} if config.tie_word_embeddings else set(odd.missing_keys)
    if missing or odd.unexpected_keys:
        name = min(missing | set(odd.unexpected_keys))
        raise UserError(f"{folder} is not a Llama text model: {name} is missing or has no place.")
    model.tie_weights()
    draft = out.with_name(f".{out.name}.tmp")
    runs.empty_folder(draft)
    model.to(model.model.norm.weight.dtype).save_pretrained(draft)
    if (folder / "tokenizer.model").is_file() and is_tiktoken(folder / "tokenizer.model"):
        read_tiktoken(folder / "tokenizer.model").save_pretrained(draft)
    elif (folder / "tokenizer.model").is_file():  # SentencePiece, which llama_mot.py reads as it is
        (draft / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    runs.replace_folder(draft, out)


def rename(parts: list[dict], sizes: dict, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors under their Hugging Face names, joined over the files of a model-parallel checkpoint."""
    state, head_dim = {}, sizes["dim"] // sizes["n_heads"]
    for name, first in parts[0].items():
        match = re.fullmatch(r"layers\.(\d+)\.(.*)\.weight", name)
        if match and match[2] in LAYER:
            target, axis = LAYER[match[2]]
            target = f"model.layers.{match[1]}.{target}.weight"
        elif name == "tok_embeddings.weight":  # split by ids since Llama 3, by channels before
            target, axis = "model.embed_tokens.weight", 0 if first.shape[1] == sizes["dim"] else 1
        elif name == "output.weight":
            target, axis = "lm_head.weight", 0
        elif name == "norm.weight":
            target, axis = "model.norm.weight", None
        else:
            raise UserError(f"{folder} is not a Llama text model: it holds {name}.")
        value = first if axis is None or len(parts) == 1 else torch.cat([part[name] for part in parts], axis)
        if name.endswith(("wq.weight", "wk.weight")):
            # Meta turns neighbouring channels of a head together, transformers channel i and i + head_dim / 2.
            pairs = value.view(-1, head_dim // 2, 2, sizes["dim"])
            value = pairs.transpose(1, 2).reshape(value.shape)
        state[target] = value
    return state


def config_of(params: dict, sizes: dict, state: dict):
    from transformers import LlamaConfig

    embed, head = state["model.embed_tokens.weight"], state.get("lm_head.weight")
    rope = {"rope_type": "default", "rope_theta": float(params.get("rope_theta", 10000.0))}
    if params.get("use_scaled_rope"):
        # params.json does not tell the factor: it is 32 for Llama 3.2 (1B and 3B), 8 for 3.1 and 3.3 (8B and larger).
        rope |= {"rope_type": "llama3", "factor": 32.0 if sizes["dim"] < 4096 else 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return LlamaConfig(
        vocab_size=len(embed),
        hidden_size=sizes["dim"],
        intermediate_size=len(state["model.layers.0.mlp.gate_proj.weight"]),
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=int(params.get("n_kv_heads") or sizes["n_heads"]),
        head_dim=sizes["dim"] // sizes["n_heads"],
        rms_norm_eps=float(params.get("norm_eps", 1e-5)),
        max_position_embeddings=131072 if params.get("use_scaled_rope") else 8192,
        rope_parameters=rope,
        tie_word_embeddings=head is None or torch.equal(head, embed),
        dtype=embed.dtype,
    )


# ---- tokenizer -------------------------------------------------------------------------------------------------


def is_tiktoken(file: Path) -> bool:
    """Whether a tokenizer.model is a list of base64 tokens with ranks; SentencePiece's is binary."""
    with open(file, "rb") as stream:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", stream.readline(4096)) is not None


def read_tiktoken(file: Path):
    """Llama 3's tokenizer as a fast tokenizer of transformers; the package tiktoken is not needed."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    try:
        lines = file.read_bytes().split(b"\n")
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    except ValueError:
        raise UserError(f"{file} is damaged: a line is not a base64 token and its rank.") from None
    numbers = {number: name for name, number in NAMED.items()}
    reserved = iter(range(SPECIAL_TOKENS))
    names = [numbers.get(i) or f"reserved_special_token_{next(reserved)}" for i in range(SPECIAL_TOKENS)]

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, _):
            return ranks

    converter = Converter(vocab_file=str(file), extra_special_tokens=[f"<|{name}|>" for name in names])
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), **special)
