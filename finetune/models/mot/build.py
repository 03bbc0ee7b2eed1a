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
from common.codec import hash_weights, local_codec
from common.engine import gathered, shard
from common.errors import UserError
from common.hub import load_pretrained
from common.keyed_random import torch_seed
from common.runtime import say
from models.mot.layout import Layout
from models.mot.meta import is_meta_folder
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

    if is_meta_folder(Path(path)):
        raise UserError(
            f"--model {path} is in Meta's own format: convert it once with 'python finetune/infer/llama_convert.py"
            f" {path} OUT', then use --model OUT."
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


def legacy_layer_map(layers: int, donor_layers: int) -> tuple[int, ...]:
    """The donor layer for each Llama layer as the first MoT trainer chose it: the one with the same number."""
    if layers > donor_layers:
        say(
            f"warning: the first MoT trainer left the experts of layers {donor_layers} to {layers - 1} random and did"
            f" not save them: they start from MusicGen's last layer, which their projections were not trained with"
        )
    return tuple(min(i, donor_layers - 1) for i in range(layers))


def expert_of(kind: str, gain: str, llama_config, donor: Donor | None, legacy: bool = False) -> Expert:
    """`legacy`: the experts whose projections are in a .pt of the first MoT trainer."""
    if kind == "llama":
        return Expert(kind, llama_config.hidden_size, llama_config.intermediate_size, llama_config.hidden_act)
    if donor is None:
        raise UserError(f"--experts {kind} takes its sizes from a MusicGen checkpoint: name one with --musicgen.")
    spread = legacy_layer_map if legacy else layer_map
    sources = spread(llama_config.num_hidden_layers, donor.layers) if kind != "random" else ()
    return Expert(kind, donor.width, donor.ffn, donor.activation, gain, sources)


# ---- building --------------------------------------------------------------------------------------------------


def build_mot(llama, layout: Layout, expert: Expert, untie: str, full_vocab: bool, donor, seed: int, ds: dict):
    """The model with initialised music weights. Under ZeRO-3 each layer is sharded as soon as it is filled."""
    copied, layers = 0, []
    for i, layer in enumerate(llama.model.layers):
        audio = AudioLayer(llama.config, expert, untie)
        with gathered(layer), torch.no_grad():
            copied += fill_layer(audio, layer, expert, donor, i, seed)
        layers.append(shard(_like(audio, llama), ds))
    expected = sum(
        is_copied(f"layers.0.{name}") and not (expert.kind == "random" and name.startswith("ffn."))
        for audio in layers
        for name, _ in audio.named_parameters()
    )
    say(f"copied {copied}/{expected} tensors into {len(layers)} music experts ({expert.kind}, untie {untie})")
    if copied != expected:
        raise RuntimeError(f"{copied} of {expected} tensors were copied")
    model = MoTLlama(llama, layout, expert, untie, layers, full_vocab)
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
        copied += _fill_expert(audio.ffn, expert, donor, i, seed)
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


def _fill_expert(ffn, expert: Expert, donor: Donor | None, i: int, seed: int) -> int:
    width = expert.width
    hidden = ffn.proj_in.in_features if ffn.proj_in is not None else ffn.fc1.in_features
    draw = torch.Generator().manual_seed(torch_seed(seed, i, "expert"))
    inward, outward = None, None
    if width != hidden:
        # Rows of proj_in and columns of proj_out are orthonormal, which keeps the RMS. The default initialisation of a
        # Linear would shrink the block's output four times.
        inward = nn.init.orthogonal_(torch.empty(width, hidden), generator=draw)
        outward = nn.init.orthogonal_(torch.empty(hidden, width), generator=draw) * (hidden / width) ** 0.5
    if expert.kind == "random":
        block = {
            "fc1.weight": torch.randn(expert.ffn, width, generator=draw) * 0.02,
            "fc2.weight": torch.randn(width, expert.ffn, generator=draw) * 0.02,
        }
    else:
        block = donor.block(expert.layer_map[i])
    if expert.kind == "musicgen_absorbed" and inward is not None:
        block["fc1.weight"], block["fc2.weight"] = block["fc1.weight"] @ inward, outward @ block["fc2.weight"]
    elif inward is not None:
        ffn.proj_in.weight.copy_(inward)
        ffn.proj_out.weight.copy_(outward)
    ffn.fc1.weight.copy_(block["fc1.weight"])
    ffn.fc2.weight.copy_(block["fc2.weight"])
    if expert.kind == "random":
        return 0
    if ffn.norm is None:
        return 2
    ffn.norm.weight.copy_(block["final_layer_norm.weight"])
    ffn.norm.bias.copy_(block["final_layer_norm.bias"])
    return 4


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
def codec_rows(model: MoTLlama, info: dict, seed: int) -> None:
    """Replaces the embeddings of the codes by the code vectors of the dataset's codec: codes that sound alike start
    alike. One random orthonormal map to Llama's width keeps their distances; the scale is that of `new_rows`.

    `info`: dataset.json, which names the codec. Its weights are only read; the codec itself is not loaded.
    """
    layout = model.layout
    if layout.ids != "offset":
        raise UserError("--codec-rows needs --ids offset: with shared ids a code has one embedding for all codebooks.")
    place, path = info.get("weights"), local_codec(info.get("weights"))
    if path is None or info.get("weights_sha256") not in (None, hash_weights(path)):
        raise UserError(f"--codec-rows: the codec of the dataset ({place}) is not on this machine, or has changed.")
    file = path / "model.safetensors"
    names = [f"quantizer.layers.{k}.codebook.embed" for k in range(layout.codebooks)]
    try:
        with safe_open(file, "pt") as weights:
            vectors = torch.cat([weights.get_tensor(name).float() for name in names])
    except (OSError, SafetensorError) as error:
        raise UserError(f"--codec-rows: {file} holds no code vectors of an EnCodec ({error}).") from None
    if len(vectors) != layout.code_ids:
        raise UserError(f"--codec-rows: {file} has {len(vectors)} code vectors, not {layout.code_ids}.")
    with gathered(model.audio_embed, write=True):
        rows = model.audio_embed.weight[: layout.code_ids]
        draw = torch.Generator().manual_seed(torch_seed(seed, "codec rows"))
        width = vectors.shape[1]
        outward = nn.init.orthogonal_(torch.empty(model.audio_embed.weight.shape[1], width), generator=draw)
        drawn = vectors @ outward.T
        with gathered(model.llama.model.embed_tokens):
            spread = float(model.llama.model.embed_tokens.weight.float().std())
        rows.copy_(drawn * (NEW_ROW_SCALE * spread / drawn.std()))


@torch.no_grad()
def calibrate(model: MoTLlama, batch: dict, zero: bool) -> None:
    """Sets each gain so that the expert is as loud as the Llama block it replaces, measured on one batch; or to 0."""
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
                audio.ffn.gain.fill_(0.0 if zero else float(llama_rms / expert_rms.clamp(min=1e-12)))
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
