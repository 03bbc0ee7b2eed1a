"""From checkpoints to a MoTLlama: Llama is loaded frozen, MusicGen's feed-forward blocks are copied into the experts.

MusicGen itself is never built: the tensors are read by name from its safetensors files.
"""

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from common import hub
from common.engine import gathered, shard
from common.errors import UserError
from common.hub import load_pretrained
from common.keyed_random import torch_seed
from common.runtime import say
from models.mot.layout import Layout
from models.mot.network import NEW_ROW_SCALE, AudioLayer, Expert, MoTLlama, attend, before_ffn, feed

COPIED = ("fc1.weight", "fc2.weight", "final_layer_norm.weight", "final_layer_norm.bias")
CALIBRATION_POSITIONS = 512

# What --train-parts can name, as patterns on the names of the adapter's parameters.
PARTS = {
    "embed": r"(audio|codebook)_embed\.weight",
    "head": r"head\.weight",
    "proj": r"layers\.\d+\.ffn\.proj_(in|out)\.weight",
    "expert": r"layers\.\d+\.ffn\.(fc1|fc2|norm|gate_proj|up_proj|down_proj)\..*",
    "gain": r"layers\.\d+\.ffn\.gain",
    "norm": r"layers\.\d+\.(input|post)_norm\.weight",
    "attn": r"layers\.\d+\.attn\..*",
}
PRESETS = {"all": list(PARTS), "proj_only": ["proj", "head"]}


def load_llama(path: str, dtype: torch.dtype, attn: str = "sdpa", quantization=None):
    from transformers import LlamaConfig, LlamaForCausalLM

    if Path(path, "params.json").is_file() and not Path(path, "config.json").is_file():
        raise UserError(
            f"--model {path} is in Meta's own format (params.json): use the model's Hugging Face format, such as"
            " --model meta-llama/Llama-3.2-1B, or convert it with convert_llama_weights_to_hf.py from transformers'"
            " repository."
        )
    options = {"attn_implementation": attn} | ({"quantization_config": quantization} if quantization else {})
    llama = load_pretrained(LlamaForCausalLM, LlamaConfig, path, dtype, **options)
    llama.config.use_cache = False
    return llama.requires_grad_(False)


# ---- MusicGen --------------------------------------------------------------------------------------------------


class Donor:
    """MusicGen's decoder blocks, read tensor by tensor from a folder or a hub id."""

    def __init__(self, path: str):
        self.path = path
        folder = hub.folder(path, "--musicgen")
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--musicgen {path} has no readable config.json.") from None
        if config.get("model_type") not in ("musicgen", "musicgen_decoder"):
            raise UserError(f"--musicgen {path} is a {config.get('model_type')!r} model, not 'musicgen'.")
        config = config.get("decoder", config)
        self.width, self.ffn, self.layers = (config[k] for k in ("hidden_size", "ffn_dim", "num_hidden_layers"))
        self.activation = config.get("activation_function", "gelu")
        try:
            self.files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        except SafetensorError as error:
            raise UserError(f"--musicgen {path}: {error}") from None
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118
        blocks = [name for name in self.where if re.search(r"(^|\.)decoder\.layers\.0\.fc1\.weight$", name)]
        if len(blocks) != 1:
            raise UserError(f"--musicgen {path} holds no decoder blocks (no tensor decoder.layers.0.fc1.weight).")
        self.prefix = blocks[0].removesuffix("0.fc1.weight")

    def block(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of one feed-forward block; a missing, extra or misshapen one is an error."""
        shapes = {
            "fc1.weight": (self.ffn, self.width),
            "fc2.weight": (self.width, self.ffn),
            "final_layer_norm.weight": (self.width,),
            "final_layer_norm.bias": (self.width,),
        }
        block = {}
        for name in COPIED:
            full = f"{self.prefix}{layer}.{name}"
            if full not in self.where:
                raise UserError(f"--musicgen {self.path} lacks the tensor {full}.")
            block[name] = self.where[full].get_tensor(full).float()
            shape = tuple(block[name].shape)
            if shape != shapes[name]:
                raise UserError(f"--musicgen {self.path}: {full} has shape {shape}, not {shapes[name]}.")
        for name in ("fc1.bias", "fc2.bias"):
            if f"{self.prefix}{layer}.{name}" in self.where:
                raise UserError(f"--musicgen {self.path} has a {name}, unlike MusicGen: it would be lost.")
        return block


def layer_map(layers: int, donor_layers: int) -> tuple[int, ...]:
    """The donor layer for each Llama layer, evenly spread."""
    return tuple(min(donor_layers - 1, int((i + 0.5) * donor_layers / layers)) for i in range(layers))


def expert_of(kind: str, llama_config, donor: Donor | None) -> Expert:
    if kind == "llama":
        return Expert(kind, llama_config.hidden_size, llama_config.intermediate_size, llama_config.hidden_act)
    if donor is None:
        raise UserError("--experts musicgen starts from a MusicGen checkpoint: name one with --musicgen.")
    sources = layer_map(llama_config.num_hidden_layers, donor.layers)
    return Expert(kind, donor.width, donor.ffn, donor.activation, sources)


# ---- building --------------------------------------------------------------------------------------------------


def build_mot(llama, layout: Layout, expert: Expert, untie: str, donor: Donor | None, seed: int, ds: dict):
    """The model with initialised music weights. Under ZeRO-3 each layer is sharded as soon as it is filled."""
    copied, layers = 0, []
    for i, layer in enumerate(llama.model.layers):
        audio = AudioLayer(llama.config, expert, untie)
        with gathered(layer), torch.no_grad():
            copied += fill_layer(audio, layer, expert, donor, i, seed)
        layers.append(shard(_like(audio, llama), ds))
    expected = sum(is_copied(f"layers.0.{name}") for audio in layers for name, _ in audio.named_parameters())
    say(f"copied {copied}/{expected} tensors into {len(layers)} music experts ({expert.kind}, untie {untie})")
    if copied != expected:
        raise RuntimeError(f"{copied} of {expected} tensors were copied")
    model = MoTLlama(llama, layout, expert, untie, layers)
    new_rows(model, seed)
    for table in (model.audio_embed, model.codebook_embed, model.head):
        table.weight.data = table.weight.data.to(device=_device(llama), dtype=_dtype(llama))
    return shard(model, ds)


def _dtype(llama) -> torch.dtype:
    return llama.model.norm.weight.dtype


def _device(llama) -> torch.device:
    return llama.model.norm.weight.device


def _like(module: nn.Module, llama) -> nn.Module:
    """The module in Llama's precision, on its device: DeepSpeed does not convert what is added to a sharded model."""
    return module.to(device=_device(llama), dtype=_dtype(llama))


def fill_layer(audio: AudioLayer, layer, expert: Expert, donor: Donor | None, i: int, seed: int) -> int:
    """Initialises one layer; returns how many tensors were copied."""
    copied = 0
    if expert.kind == "llama":
        copied += _copy_module(audio.ffn, layer.mlp)
    else:
        draw = torch.Generator().manual_seed(torch_seed(seed, i, "expert"))
        copied += _fill_expert(audio.ffn, donor, expert.layer_map[i], draw)
    if audio.input_norm is not None:
        copied += _copy_module(audio.input_norm, layer.input_layernorm)
        copied += _copy_module(audio.post_norm, layer.post_attention_layernorm)
    if audio.attn is not None:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            copied += _copy_module(getattr(audio.attn, name), getattr(layer.self_attn, name))
    return copied


def _copy_module(target: nn.Module, source: nn.Module) -> int:
    targets, sources = dict(target.named_parameters()), dict(source.named_parameters())
    assert targets.keys() == sources.keys(), (targets.keys(), sources.keys())
    for name, parameter in targets.items():
        value = sources[name]
        if not value.is_floating_point():  # 8 or 4 bits, possibly packed: copying the numbers would copy noise
            from peft.utils.integrations import dequantize_module_weight

            value = dequantize_module_weight(source.get_submodule(name.rpartition(".")[0]))
        parameter.copy_(value)
    return len(targets)


def _fill_expert(ffn, donor: Donor, source: int, draw: torch.Generator) -> int:
    """Copies the donor's block `source`; draws the projections around it."""
    if ffn.proj_in is not None:
        # Rows of proj_in and columns of proj_out are orthonormal, which keeps the RMS. The default initialisation of a
        # Linear would shrink the block's output four times.
        width, hidden = ffn.proj_in.weight.shape
        inward = nn.init.orthogonal_(torch.empty(width, hidden), generator=draw)
        outward = nn.init.orthogonal_(torch.empty(hidden, width), generator=draw) * (hidden / width) ** 0.5
        ffn.proj_in.weight.copy_(inward)
        ffn.proj_out.weight.copy_(outward)
    block = donor.block(source)
    ffn.fc1.weight.copy_(block["fc1.weight"])
    ffn.fc2.weight.copy_(block["fc2.weight"])
    ffn.norm.weight.copy_(block["final_layer_norm.weight"])
    ffn.norm.bias.copy_(block["final_layer_norm.bias"])
    return len(block)


@torch.no_grad()
def new_rows(model: MoTLlama, seed: int) -> None:
    """Draws the rows of the new ids from N(0, (0.1 s)^2), where s is the standard deviation of Llama's own rows.

    Zero rows would give every expert a gradient of exactly 0 at the first step, and equal rows (the mean of the old
    ones) would first have to become different.
    """
    llama = model.llama
    tables = {
        model.audio_embed.weight: llama.model.embed_tokens,
        model.codebook_embed.weight: llama.model.embed_tokens,
        model.head.weight: llama.lm_head,
    }
    for number, (rows, like) in enumerate(tables.items()):
        with gathered(like):
            spread = float(like.weight.float().std())
        draw = torch.Generator().manual_seed(torch_seed(seed, number, "rows"))
        rows.copy_(torch.randn(rows.shape, generator=draw) * (NEW_ROW_SCALE * spread))


@torch.no_grad()
def calibrate(model: MoTLlama, batch: dict) -> None:
    """Sets each gain so that the expert is as loud as the Llama block it replaces, measured on one batch."""
    device = _device(model.llama)
    ids, books, mask = (batch[k][:1, :CALIBRATION_POSITIONS].to(device) for k in ("input_ids", "codebooks", "mask"))
    with gathered(model.llama.model.embed_tokens), gathered(model.audio_embed), gathered(model.codebook_embed):
        x, route, causal, rope = model.prepare(ids, books, mask)
    music = route.order[route.counts[0] :]
    assert len(music)
    for layer, audio in zip(model.llama.model.layers, model.layers, strict=True):
        with gathered(layer), gathered(audio, write=True):
            x = attend(audio, layer, x, route, causal, rope)
            if hasattr(audio.ffn, "gain"):
                h = before_ffn(audio, layer, x, route).flatten(0, 1)[music]
                audio.ffn.gain.fill_(1.0)
                llama_rms, expert_rms = (y.float().pow(2).mean().sqrt() for y in (layer.mlp(h), audio.ffn(h)))
                audio.ffn.gain.fill_(float(llama_rms / expert_rms.clamp(min=1e-12)))
            x = feed(audio, layer, x, route)


def choose_parts(model: MoTLlama, names: list[str]) -> None:
    """Makes the named parts trainable and freezes the rest of the adapter; a part that the model lacks is an error."""
    adapter = model.adapter()
    trained = []
    for name in names:
        if name not in PARTS and name not in PRESETS:
            raise UserError(f"--train-parts {name}: choose from {', '.join([*PRESETS, *PARTS])}.")
        for part in PRESETS.get(name, [name]):
            hits = [full for full in adapter if re.fullmatch(PARTS[part], full)]
            if not hits and name != "all":
                raise UserError(f"--train-parts {name}: this model has no part {part!r}.")
            trained += hits
    if not trained:
        raise UserError("--train-parts is empty: nothing would be trained.")
    for name, parameter in adapter.items():
        parameter.requires_grad_(name in trained)


def is_copied(name: str) -> bool:
    """Whether a parameter of the adapter starts from trained weights."""
    return any(re.fullmatch(PARTS[part], name) for part in ("expert", "norm", "attn"))
