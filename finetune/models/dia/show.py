"""What Dia is trained on for one clip, for ./launch.sh inspect. Shapes as in layout.py."""

import functools
from types import SimpleNamespace

import numpy as np

from common import hub
from common.evaluation import evaluating
from common.feed import to_device
from common.inspection import Codes, Tokens, code_tables, facts, find_clip
from common.lora import base_model
from common.loss import IGNORE, codebook_stats
from common.runtime import Process
from models.dia.data import Clips
from models.dia.layout import SPEAKER_BYTES, labelled_states, read_tag_map

WHY = {
    "bos": "BOS follows, which generation forces",
    "pad": "after the end of the channel",
}


def sections(recipe, config, load, ds: dict, name: str | None, epoch: int, process: Process) -> list:
    """`recipe`: dia_lora or dia_full. `load(model)` fills in trained weights; None: nothing is predicted."""
    tag_map = read_tag_map(config.tag_map)
    model = recipe.build_model(config, ds, tag_map) if load else without_weights(config)
    clips = recipe.build_data(config.data, model, config, tag_map, process, train=True)
    clip = find_clip(clips.tokens, clips.kept, name)
    batch = clips.batch([clip], epoch)
    codes = codes_of(clips, batch)
    weight = clips.target_weight([clip], epoch)
    shown = clip_facts(clips, clip, epoch) | {"positions": len(codes.labels), "target weight": f"{weight:g}"}
    if load:
        load(model)
        shown["loss"] = f"{predict(model, clips, batch, codes, recipe.compute_loss, process) / weight:.4f}"
    ids = batch["input_ids"][0].tolist()
    tokens = Tokens("Tokens", [(i, piece(i, tag_map)) for i in ids], "the bytes that the encoder reads")
    if not any(ids):
        tokens.note = (
            f"without text in epoch {epoch} (--text-dropout {config.text_dropout:g}): zeros, of the same length"
        )
    return [facts("Clip", shown), tokens, *code_tables(codes)]


def without_weights(config) -> SimpleNamespace:
    """What build_data reads of a model: its configuration; without --model the published one."""
    from transformers import DiaConfig

    model_config = DiaConfig.from_pretrained(hub.folder(config.model)) if config.model else DiaConfig()
    if config.channels == 2 * len(model_config.delay_pattern):  # as models/dia/weights.py widens it
        model_config.delay_pattern = 2 * model_config.delay_pattern
    return SimpleNamespace(config=model_config)


def clip_facts(clips: Clips, clip: int, epoch: int) -> dict:
    row, tokens, layout = clips.kept[clip], clips.tokens, clips.layout
    start, end, _, final = clips.part(clip, epoch)
    rate = tokens.info["sample_rate"] / tokens.info["hop"]
    return {
        "id": tokens.id(row),
        "data": tokens.folder,
        "epoch": epoch,
        "text": tokens.text(row),
        "frames": f"{start} to {end} of {tokens.frames[row]} ({(end - start) / rate:.2f} s)"
        + ("" if final else ", cut before the end: no EOS"),
        "delays": " ".join(map(str, layout.delay)),
        "special ids": f"EOS {layout.eos}, PAD {layout.pad}, BOS {layout.bos}",
    }


def piece(number: int, tag_map: dict[str, int]) -> str:
    """What a byte stands for."""
    tags = {byte: tag for tag, byte in tag_map.items()} | {ord(byte): tag for tag, byte in SPEAKER_BYTES.items()}
    return tags.get(number) or (chr(number) if 32 <= number < 127 else f"\\x{number:02x}")


def codes_of(clips: Clips, batch: dict) -> Codes:
    layout = clips.layout
    inputs, labels = batch["decoder_input_ids"][0].numpy(), batch["labels"][0].numpy()
    following = np.concatenate([inputs[1:], np.full_like(inputs[:1], layout.pad)])
    masked = np.where(following == layout.bos, "bos", "pad")
    return Codes(
        inputs,
        [],
        labels,
        np.where(labels == IGNORE, masked, ""),
        [f"channel_{c}" for c in range(layout.channels)],
        batch["channel_weights"].tolist(),
        {layout.bos: "BOS", layout.eos: "EOS", layout.pad: "PAD"},
        why=WHY,
    )


def predict(model, clips: Clips, batch: dict, codes: Codes, compute_loss, process: Process) -> float:
    """Adds the model's predictions and the recipe's loss to `codes`; returns the weighted sum of the loss."""
    model.to(process.device)
    batch = to_device(batch, process.device)
    with evaluating(model):
        output = functools.partial(compute_loss, clips=clips)(model, batch)
        hidden_nd, labels_nc = labelled_states(model, batch)
        losses_nc, best_nc = codebook_stats(base_model(model).logits_dense, hidden_nd, labels_nc)
    codes.parts = {name: tuple(part.tolist()) for name, part in output.parts.items()}
    codes.predicted, codes.losses = np.full_like(codes.labels, IGNORE), np.zeros(codes.labels.shape)
    rows = batch["targets"].cpu().numpy()
    codes.predicted[rows], codes.losses[rows] = best_nc.cpu().numpy(), losses_nc.float().cpu().numpy()
    return float(output.loss_sum)
