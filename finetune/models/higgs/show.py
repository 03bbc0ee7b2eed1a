"""What Higgs Audio is trained on for one clip, for ./launch.sh inspect. Shapes as in layout.py."""

import functools

import numpy as np

from common import hub
from common.evaluation import evaluating
from common.feed import to_device
from common.inspection import NOTHING, Codes, Tokens, code_tables, facts, find_clip
from common.lora import base_model
from common.loss import IGNORE, codebook_stats
from common.runtime import Process
from models.higgs.data import VoiceClips
from models.higgs.layout import Layout, audio_at, labelled_states, labelled_text_states, layout_of
from models.higgs.text import Chat
from models.higgs.weights import load_tokenizer

WHY = {
    "text": "text follows, which is given",
    "ctx": "context: the reference, which is heard, not predicted",
    "bos": "BOS follows, which generation forces",
    "pad": "after the end of the codebook",
    "audio": "audio follows",
}


def sections(recipe, config, load, ds: dict, name: str | None, epoch: int, process: Process) -> list:
    """`recipe`: higgs_clone. `load(model)` fills in trained weights; None: nothing is predicted."""
    model = recipe.build_model(config, ds) if load else None
    tokenizer = load_tokenizer(config.model, config.revision)
    layout = layout_of(base_model(model).config if load else config_of(config.model), tokenizer)
    chat = Chat(tokenizer)
    clips = recipe.build_data(config.data, layout, chat, config, process, train=True)
    clip = find_clip(clips.tokens, clips.kept, name)
    batch = clips.batch([clip], epoch)
    codes = codes_of(clips, batch)
    weight = clips.target_weight([clip], epoch)
    shown = clip_facts(clips, clip, epoch, batch) | {"target weight": f"{weight:g}"}
    if load:
        load(model)
        shown["loss"] = f"{predict(model, clips, batch, codes, recipe.compute_loss, process) / weight:.4f}"
    items = prompt_tokens(batch["input_ids"][0].tolist(), layout, chat)
    tokens = Tokens("Tokens", items, "the chat; audio has one placeholder per frame")
    return [facts("Clip", shown), tokens, *code_tables(codes)]


def config_of(model: str):
    from transformers import HiggsAudioV2Config

    return HiggsAudioV2Config.from_pretrained(hub.folder(model))


def clip_facts(clips: VoiceClips, clip: int, epoch: int, batch: dict) -> dict:
    row, tokens, layout = clips.kept[clip], clips.tokens, clips.layout
    rate = tokens.info["sample_rate"] / tokens.info["hop"]
    shown = {"id": tokens.id(row), "data": tokens.folder, "epoch": epoch, "text": tokens.text(row)}
    shown["text in the prompt"] = clips.chat.text(tokens.text(row), tokens.id(row))
    for number, reference in enumerate(clips.references[row]):
        if reference >= 0:
            length, which = tokens.frames[reference], f" of [SPEAKER{number}]" if number else ""
            shown[f"reference{which}"] = f"{tokens.id(reference)}, {length} frames ({length / rate:.2f} s)"
            shown[f"its text{which}"] = tokens.text(reference)
    return shown | {
        "frames": f"{tokens.frames[row]} ({tokens.frames[row] / rate:.2f} s)",
        "positions": batch["input_ids"].shape[1],
        "delays": " ".join(map(str, range(layout.codebooks))),
        "special ids": f"BOS {layout.bos}, EOS {layout.eos}",
    }


def prompt_tokens(ids: list[int], layout: Layout, chat: Chat) -> list[tuple[int, str]]:
    """Ids and pieces, with a run of placeholders as one item."""
    items = []
    for place, number in enumerate(ids):
        if audio_at(number, layout):
            if place and ids[place - 1] == number:
                continue
            end = next((i for i in range(place, len(ids)) if ids[i] != number), len(ids))
            items.append((number, f"{chat.decode([number])[0]} x {end - place}"))
        else:
            items.append((number, chat.decode([number])[0]))
    return items


def codes_of(clips: VoiceClips, batch: dict) -> Codes:
    layout, ids = clips.layout, batch["input_ids"][0].numpy()
    frames, labels = batch["audio_input_ids"][0].numpy(), batch["audio_labels"][0].numpy()
    at = np.flatnonzero(audio_at(ids, layout))  # the positions of the frames
    inputs = np.full((len(ids), layout.codebooks), NOTHING)
    inputs[at] = frames
    # A frame is predicted at the position before it.
    shifted = np.full(inputs.shape, IGNORE)
    shifted[at - 1] = labels
    masked = np.full(inputs.shape, "text", dtype="<U5")
    target_from = int(np.flatnonzero((labels != IGNORE).any(1))[0]) - 1  # the all-BOS frame of the target
    why = np.where(frames == layout.bos, "bos", np.where(frames == layout.eos, "pad", "ctx"))
    why[:target_from] = "ctx"
    masked[at - 1] = why
    columns, weights = [f"channel_{k}" for k in range(layout.codebooks)], batch["codebook_weights"].tolist()
    if "labels" in batch:  # --text-loss
        text = np.append(batch["labels"][0].numpy()[1:], IGNORE)
        follows = np.append(audio_at(ids, layout)[1:], False)
        shifted = np.concatenate([shifted, text[:, None]], axis=1)
        masked = np.concatenate([masked, np.where(follows, "audio", "text")[:, None]], axis=1)
        columns, weights = [*columns, "text"], [*weights, clips.config.text_loss]
    return Codes(
        inputs,
        ["" if audio_at(number, layout) else clips.chat.decode([number])[0] for number in ids],
        shifted,
        np.where(shifted == IGNORE, masked, ""),
        columns,
        weights,
        {layout.bos: "BOS", layout.eos: "EOS"},
        why=WHY,
    )


def predict(model, clips: VoiceClips, batch: dict, codes: Codes, compute_loss, process: Process) -> float:
    """Adds the model's predictions and the recipe's loss to `codes`; returns the weighted sum of the loss."""
    model.to(process.device)
    batch, base = to_device(batch, process.device), base_model(model)
    count = clips.layout.codebooks
    with evaluating(model):
        output = functools.partial(compute_loss, clips=clips)(model, batch)
        hidden_nd, labels_nk, hidden_rd = labelled_states(model, batch)
        losses_nk, best_nk = codebook_stats(base.audio_lm_head, hidden_nd, labels_nk)
        found = [(audio_rows(batch, clips.layout), slice(0, count), best_nk, losses_nk)]
        if "text_label_at" in batch:
            text_nd, labels_n1 = labelled_text_states(hidden_rd, batch)
            losses_n1, best_n1 = codebook_stats(base.text_lm_head, text_nd, labels_n1)
            found.append((batch["text_label_at"].cpu().numpy() - 1, slice(count, None), best_n1, losses_n1))
    codes.parts = {name: tuple(part.tolist()) for name, part in output.parts.items()}
    codes.predicted, codes.losses = np.full_like(codes.labels, IGNORE), np.zeros(codes.labels.shape)
    for rows, columns, best, losses in found:
        codes.predicted[rows, columns] = best.cpu().numpy()
        codes.losses[rows, columns] = losses.float().cpu().numpy()
    return float(output.loss_sum)


def audio_rows(batch: dict, layout: Layout) -> np.ndarray:
    """The positions that predict a frame of the target, in the order of batch["label_at"]."""
    at = np.flatnonzero(audio_at(batch["input_ids"][0].cpu().numpy(), layout))
    return at[batch["label_at"].cpu().numpy()] - 1
