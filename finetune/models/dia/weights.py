"""Dia's weights on disk: load and write model folders, widen mono to stereo, import the native release, average."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from common import checkpoint, hub, runs
from common.artifacts import read_json
from common.checkpoint import write_json
from common.codec import FILE, recorded_codec, refuse_other_codec
from common.ds_config import stage_of
from common.engine import gathered
from common.errors import UserError
from common.hub import find_file, load_pretrained
from common.runtime import Process, on_main, say
from models.dia.layout import read_tag_map

EMBED, HEAD = "model.decoder.embeddings.embed.weight", "logits_dense.weight"
SHARD = "2GB"
CODEC = {"name": "descript/dac_44khz", "sampling_rate": 44100, "hop_length": 512}  # of the native release
RATES = {"sample_rate": "sampling_rate", "hop": "hop_length"}  # our names and DiaProcessor's
# The files of a DiaProcessor; the codec is only named in them.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "vocab.json")


# ---- a model folder --------------------------------------------------------------------------------------------


def write_model(
    folder: Path,
    model,
    weights: dict[str, torch.Tensor],
    source: str | None,
    tag_map: dict,
    facts: dict,
    codec: dict | None = None,
) -> None:
    """Writes a self-contained folder for DiaForConditionalGeneration.from_pretrained; complete or absent.

    `weights`: whole tensors by their state dict names; `source`: the folder or hub id to copy the processor from, None
    for that of the native release; `codec`: the one that made the training data, if it is known.
    """
    from huggingface_hub import save_torch_state_dict

    draft = folder.with_name(f".{folder.name}.tmp")
    runs.empty_folder(draft)
    save_torch_state_dict(weights, draft, max_shard_size=SHARD, metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    if source:
        copy_processor(source, draft)
    else:
        write_processor(draft)
    write_json(draft / "tag_map.json", tag_map)
    write_json(draft / "training_config.json", facts)
    if codec:
        write_json(draft / FILE, codec)
    runs.replace_folder(draft, folder)


def copy_processor(source: str, folder: Path) -> None:
    """Copies the base's tokenizer and feature extractor, so that the folder needs no other."""
    for name in PROCESSOR_FILES:
        if found := find_file(source, name):
            (folder / name).write_bytes(found.read_bytes())


def write_processor(folder: Path) -> None:
    """Writes what DiaProcessor loads. DiaProcessor.save_pretrained would need the codec's weights to learn its name."""
    from transformers import DiaFeatureExtractor, DiaTokenizer

    DiaTokenizer().save_pretrained(str(folder))
    extractor = DiaFeatureExtractor(sampling_rate=CODEC["sampling_rate"], hop_length=CODEC["hop_length"])
    codec = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": CODEC["name"]}
    processor = {"audio_tokenizer": codec, "feature_extractor": extractor.to_dict(), "processor_class": "DiaProcessor"}
    write_json(folder / "processor_config.json", processor)


def expected_codec(model: str) -> dict:
    """The codec whose codes the model knows: the recorded one, or what its processor names."""
    if recorded := recorded_codec(Path(model)):
        return recorded
    settings = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if file := find_file(model, name):
            settings |= json.loads(file.read_text(encoding="utf-8"))
    extractor = settings.get("feature_extractor", settings)
    named = settings.get("audio_tokenizer") or CODEC["name"]
    place = named["audio_tokenizer_name_or_path"] if isinstance(named, dict) else named
    rates = {fact: extractor.get(name, CODEC[name]) for fact, name in RATES.items()}
    return {"name": "dac", "place": place} | rates


def check_codec(tokens, model: str, process: Process) -> None:
    """Refuses codes of another codec than the model's."""
    on_main(lambda: refuse_other_codec(tokens, expected_codec(model), f"--model {model}"), process)


# ---- stereo ----------------------------------------------------------------------------------------------------


def widen(model, ds: dict) -> None:
    """Widens mono to stereo in place: left channels, then right channels. For left = right the function is unchanged.

    The embeddings of the channels are summed, so both halves get half of each row; the rows of the head are copied.
    Under ZeRO-3 every rank must call it, and only these two tables are ever whole.
    """
    sharded = stage_of(ds) == 3
    if sharded:
        import deepspeed
    embeddings, config = model.model.decoder.embeddings, model.config
    old_embed, old_head = embeddings.embed.weight, model.logits_dense.weight
    rows, width = getattr(old_embed, "ds_shape", old_embed.shape)
    options = {"dtype": old_embed.dtype, "device": None if sharded else old_embed.device}
    with deepspeed.zero.Init(config_dict_or_path=ds) if sharded else nullcontext():
        embed = nn.Embedding(2 * rows, width, **options)
        head = nn.Linear(width, 2 * rows, bias=False, **options)
    for new, old, scale in ((embed.weight, old_embed, 0.5), (head.weight, old_head, 1.0)):
        with gathered([new, old], write=True), torch.no_grad():
            new.copy_(torch.cat([old * scale, old * scale]))
    embeddings.embed, model.logits_dense = embed, head
    config.delay_pattern = [*config.delay_pattern, *config.delay_pattern]
    channels = len(config.delay_pattern)
    config.decoder_config.num_channels = channels
    for module in (embeddings, model.model.decoder, model):
        module.num_channels = channels
    embeddings.offsets = torch.arange(channels, device=embeddings.offsets.device) * config.decoder_config.vocab_size
    say(f"stereo: {channels // 2} channels widened to {channels}; with left = right the model is still the same")


def needs_widening(path: str, channels: int) -> bool:
    """Whether --channels is twice what the checkpoint has; 0 and the same number keep it, others are refused."""
    from transformers import DiaConfig

    if not channels:
        return False
    try:
        own = DiaConfig.from_pretrained(hub.folder(path), local_files_only=True).decoder_config.num_channels
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no usable config.json ({str(error).splitlines()[0]})") from None
    if channels not in (own, 2 * own):
        raise UserError(f"--channels {channels}: {path} has {own} channels; it takes {own}, or {2 * own} for stereo.")
    return channels == 2 * own


# ---- the native release ----------------------------------------------------------------------------------------


def import_native(file: Path, out: Path) -> None:
    """The authors' own .pth (or .safetensors) as a model folder. All sizes are read off the weights themselves."""
    from transformers import DiaForConditionalGeneration, GenerationConfig

    native = read_native(file)
    config = config_of(native)
    with torch.device("meta"):
        model = DiaForConditionalGeneration(config)
    weights = native_weights(native, {name: p.shape for name, p in model.named_parameters()})
    decoder = config.decoder_config
    # The sampling that the authors ship with the Hugging Face release.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.8, top_p=0.9, top_k=45, guidance_scale=3.0,
        max_length=decoder.max_position_embeddings, bos_token_id=decoder.bos_token_id,
        eos_token_id=decoder.eos_token_id, pad_token_id=decoder.pad_token_id,
    )  # fmt: skip
    write_model(out, model, weights, None, {}, {"imported_from": file.name})


def read_native(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(file)
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a pickle that holds more than tensors, a cut file, no file
        raise UserError(f"{file} cannot be read as plain weights: {str(error).splitlines()[0]}") from None
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    if "decoder.embeddings.0.weight" not in weights:
        raise UserError(f"{file} is not a native Dia checkpoint: it has no decoder.embeddings.0.weight.")
    return weights


def config_of(native: dict[str, torch.Tensor]):
    """The sizes of a native checkpoint. Its kernels are (inputs..., outputs...), heads and head size kept apart."""
    from transformers import DiaConfig
    from transformers.models.dia.configuration_dia import DiaDecoderConfig, DiaEncoderConfig

    def layers(stack: str) -> int:
        return 1 + max(int(m[1]) for name in native if (m := re.match(rf"{stack}\.layers\.(\d+)\.", name)))

    def shape(name: str) -> torch.Size:
        if f"{name}.weight" not in native:
            raise UserError(f"the native checkpoint lacks {name}.weight.")
        return native[f"{name}.weight"].shape

    encoder, decoder = "encoder.layers.0.self_attention", "decoder.layers.0.self_attention"
    cross = "decoder.layers.0.cross_attention"
    return DiaConfig(
        encoder_config=DiaEncoderConfig(
            num_hidden_layers=layers("encoder"),
            hidden_size=shape("encoder.embedding")[1],
            vocab_size=shape("encoder.embedding")[0],
            num_attention_heads=shape(f"{encoder}.q_proj")[1],
            num_key_value_heads=shape(f"{encoder}.k_proj")[1],
            head_dim=shape(f"{encoder}.q_proj")[2],
            intermediate_size=shape("encoder.layers.0.mlp.wi_fused")[2],
        ),
        decoder_config=DiaDecoderConfig(
            num_hidden_layers=layers("decoder"),
            hidden_size=shape("decoder.embeddings.0")[1],
            vocab_size=shape("decoder.embeddings.0")[0],
            num_channels=shape("decoder.logits_dense")[1],
            num_attention_heads=shape(f"{decoder}.q_proj")[1],
            num_key_value_heads=shape(f"{decoder}.k_proj")[1],
            head_dim=shape(f"{decoder}.q_proj")[2],
            cross_num_attention_heads=shape(f"{cross}.q_proj")[1],
            cross_num_key_value_heads=shape(f"{cross}.k_proj")[1],
            cross_head_dim=shape(f"{cross}.q_proj")[2],
            cross_hidden_size=shape(f"{cross}.k_proj")[0],
            intermediate_size=shape("decoder.layers.0.mlp.wi_fused")[2],
        ),
    )


def native_weights(native: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The native tensors with the names and shapes of the Hugging Face model; none left over, none missing."""
    tables = sorted(
        (name for name in native if name.startswith("decoder.embeddings.")), key=lambda n: int(n.split(".")[2])
    )
    weights = {EMBED: torch.cat([native[name] for name in tables])}
    for name, value in native.items():
        if name in tables or name.endswith("rotary_emb.timescale"):  # computed from the config
            continue
        name = name.replace("mlp.wi_fused", "mlp.gate_up_proj").replace("mlp.wo", "mlp.down_proj")
        name = HEAD if name == "decoder.logits_dense.weight" else f"model.{name}"
        if name in shapes and value.dim() > 1 and "embedding" not in name:
            outputs, inputs = shapes[name]
            value = value.reshape(inputs, outputs).T
        weights[name] = value
    odd = set(weights) ^ set(shapes)
    if odd:
        raise UserError(f"the native checkpoint and the model differ in {len(odd)} weights, such as {min(odd)}.")
    for name, value in weights.items():
        if value.shape != shapes[name]:
            raise UserError(f"native weight {name} has shape {tuple(value.shape)}, not {tuple(shapes[name])}.")
    return {name: value.float().contiguous() for name, value in weights.items()}


# ---- average ---------------------------------------------------------------------------------------------------


def average(sources: list[Path], out: Path) -> None:
    """Writes the mean of model folders or of dia_full checkpoints; a single checkpoint is simply exported."""
    total, model, base, tags, training = {}, None, "", {}, {}
    for source in sources:
        base, channels, trained, tags, training = read_source(source)
        if model is None:
            model = load_dia(base, torch.float32)
            if needs_widening(base, channels):
                widen(model, {"zero_optimization": {"stage": 0}})
        own = dict(model.state_dict()) | trained if trained else load_dia(base, torch.float32).state_dict()
        if total and {n: v.shape for n, v in own.items()} != {n: v.shape for n, v in total.items()}:
            raise UserError(f"{source} has other weights than {sources[0]}: they cannot be averaged.")
        for name, value in own.items():
            total[name] = total.get(name, 0) + value.double() / len(sources)
    weights = {name: value.float().contiguous() for name, value in total.items()}
    # Speaking needs the recipe and the text mode that the weights were trained with.
    training |= {"recipe": "dia_full", "average_of": [str(source) for source in sources]}
    write_model(out, model, weights, base, tags, training, recorded_codec(sources[0]))


def read_source(source: Path) -> tuple[str, int, dict[str, torch.Tensor], dict[str, int], dict]:
    """Base model, --channels, trained fp32 weights (none for a model folder), tag map and flags of a source."""
    if (source / "config.json").is_file():
        tags, training = source / "tag_map.json", source / "training_config.json"
        flags = read_json(training)
        return str(source), 0, {}, read_tag_map(str(tags) if tags.is_file() else ""), flags
    if not (source / "manifest.json").is_file():
        raise UserError(f"{source} is neither a model folder (config.json) nor a checkpoint (manifest.json).")
    config = json.loads((source.parents[1] / "config.json").read_text(encoding="utf-8"))
    if config["recipe"] != "dia_full":
        raise UserError(f"{source} is a checkpoint of {config['recipe']}; dia_speak.py --merge is for adapters.")
    flags = config["config"]
    hub.fetch(flags["model"], None, flags.get("revision", ""))
    tags = config["identity"]["fingerprint"]["tag_map"]
    return flags["model"], flags["channels"], checkpoint.masters(source), tags, flags


# ---- loading ---------------------------------------------------------------------------------------------------


def load_dia(path: str, dtype: torch.dtype, quantization=None, attn: str = "sdpa"):
    """DiaForConditionalGeneration from a hub id or a local folder."""
    from transformers import DiaConfig, DiaForConditionalGeneration

    options = {"attn_implementation": attn} | ({"quantization_config": quantization} if quantization else {})
    return load_pretrained(DiaForConditionalGeneration, DiaConfig, path, dtype, **options)
