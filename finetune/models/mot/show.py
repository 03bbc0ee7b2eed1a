"""What Llama MoT is trained on for one clip, for ./launch.sh inspect. B clips, L positions, C codebooks."""

from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F

from common import hub
from common.evaluation import evaluating
from common.feed import to_device
from common.inspection import Codes, Tokens, code_tables, facts, find_clip
from common.loss import IGNORE
from common.runtime import Process
from models.mot.data import Clips, Tokenizer
from models.mot.layout import Layout
from models.mot.network import MoTLlama, Route

WHY = {
    "text": "the caption, which is given",
    "other": "the position predicts another codebook",
    "bos": "A_BOS follows, which generation forces",
    "eos": "A_EOS follows, a label of codebook 0 only",
    "cut": "the window ends before the clip",
}


def sections(recipe, config, load, ds: dict, name: str | None, epoch: int, process: Process) -> list:
    """`recipe`: llama_mot. `load` None: nothing is predicted; trained weights come with --adapter."""
    model = recipe.build_model(config, ds) if load else without_weights(config)
    clips = recipe.build_data(config.data, model, Tokenizer(config.model), config, process, train=True)
    clip = find_clip(clips.tokens, clips.kept, name)
    batch = clips.batch([clip], epoch)
    text = clips.text(clip, epoch)
    codes = codes_of(clips, batch, len(text))
    weight = clips.target_weight([clip], epoch)
    shown = clip_facts(clips, clip, epoch, batch) | {"target weight": f"{weight:g}"}
    if load:
        recipe.init_adapter(model, config, clips)
        shown["loss"] = f"{predict(model, batch, codes, recipe.compute_loss, process) / weight:.4f}"
    tokens = Tokens("Tokens", [(i, clips.tokenizer.piece(i)) for i in text.tolist()], "the caption, after BOS")
    if len(text) == 1 < len(clips.caption(clip)):
        tokens.note = f"without caption in epoch {epoch} (--text-dropout {config.text_dropout:g})"
    return [facts("Clip", shown), tokens, *code_tables(codes)]


def without_weights(config) -> SimpleNamespace:
    """What build_data reads of a model: its layout."""
    from transformers import LlamaConfig

    vocab = LlamaConfig.from_pretrained(hub.folder(config.model)).vocab_size
    return SimpleNamespace(layout=Layout(vocab, order=config.layout))


def clip_facts(clips: Clips, clip: int, epoch: int, batch: dict) -> dict:
    tokens, layout = clips.tokens, clips.layout
    start, end, final = clips.part(clip, epoch)
    rate = tokens.info["sample_rate"] / tokens.info["hop"]
    return {
        "id": tokens.id(clips.kept[clip]),
        "data": tokens.folder,
        "epoch": epoch,
        "text": tokens.text(clips.kept[clip]),
        "frames": f"{start} to {end} of {clips.frames[clip]} ({(end - start) / rate:.2f} s)"
        + ("" if final else ", cut before the end: no A_EOS"),
        "positions": batch["input_ids"].shape[1],
        "layout": layout.order,
        "ids of code 0": " ".join(str(layout.first(k)) for k in range(layout.codebooks)),
        "special ids": f"A_BOS {layout.bos}, A_EOS {layout.eos}",
    }


def codes_of(clips: Clips, batch: dict, text: int) -> Codes:
    """`text`: number of positions of the caption."""
    layout, inputs, labels = clips.layout, batch["input_ids"][0].numpy(), batch["labels"][0].numpy()
    masked = np.full(labels.shape, "text", dtype="<U5")
    masked[text:] = "other"
    masked[text:][(labels[text:] == IGNORE).all(1)] = "cut"  # nothing is predicted at the end of a window
    if layout.order == "delay":
        following = np.concatenate([inputs[1:], np.full_like(inputs[:1], layout.eos)])[text:]
        masked[text:] = np.where(following == layout.bos, "bos", np.where(following == layout.eos, "eos", "cut"))
    return Codes(
        inputs,
        [clips.tokenizer.piece(int(i)) for i in inputs[:text, 0]] + [""] * (len(inputs) - text),
        labels,
        np.where(labels == IGNORE, masked, ""),
        [f"channel_{k}" for k in range(layout.codebooks)],
        batch["codebook_weights"].tolist(),
        {layout.bos: "A_BOS", layout.eos: "A_EOS"},
        why=WHY,
    )


def predict(model: MoTLlama, batch: dict, codes: Codes, compute_loss, process: Process) -> float:
    """Adds the model's predictions and the recipe's loss to `codes`; returns the weighted sum of the loss."""
    model.to(process.device)
    batch = to_device(batch, process.device)
    codes.predicted, codes.losses = np.full_like(codes.labels, IGNORE), np.zeros(codes.labels.shape)
    with evaluating(model):
        output = compute_loss(model, batch)
        route = Route(batch["order"], batch["kind_counts"], batch["back"])
        hidden_lh = model(batch["input_ids"], batch["codebooks"], route=route)[0]
        for k, rows in enumerate(batch["targets"].split(batch["target_counts"])):
            logits, ids = logits_of(model, hidden_lh.index_select(0, rows), k)
            labels = batch["labels"][0, :, k].index_select(0, rows)
            classes = (ids[None] == labels[:, None]).int().argmax(1)
            codes.predicted[rows.cpu(), k] = ids[logits.argmax(-1)].cpu().numpy()
            codes.losses[rows.cpu(), k] = F.cross_entropy(logits, classes, reduction="none").cpu().numpy()
    codes.parts = {name: tuple(part.tolist()) for name, part in output.parts.items()}
    return float(output.loss_sum)


def logits_of(model: MoTLlama, hidden_nh: torch.Tensor, codebook: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, classes) of a codebook, and the ids of the classes."""
    layout, device = model.layout, hidden_nh.device
    ids = layout.first(codebook) + torch.arange(layout.size, device=device)
    if codebook == 0:
        ids = torch.cat([ids, torch.tensor([layout.eos], device=device)])
    return model.head(hidden_nh, codebook=codebook), ids
