"""Dia on held-out clips, teacher-forced. Shapes as in layout.py."""

import numpy as np
import torch

from common.evaluation import Sums, evaluating, evaluation_rows
from common.feed import to_device
from common.lora import base_model
from common.loss import IGNORE, codebook_stats
from common.runtime import Process
from models.dia.data import Clips, pad_texts
from models.dia.generate import speak
from models.dia.layout import decoder_states, delayed, labelled_states

PROBE_FRAMES = 24  # that the engine says for the check of an export; more than the longest delay


def token_metrics(model, clips: Clips, process: Process) -> dict[str, float]:
    """Unweighted loss and accuracy per token over all clips, the same for any number of ranks.

    eos_recall and eos_false_alarm predict endless and cut-off speech: generation stops exactly where EOS is the most
    likely id of channel 0. text_gap is the increase of the loss with another clip's text; near 0 the text is ignored.
    It is small even if the text rules, because most codes follow from those before them; text_gap_onsets is the same
    for channel 0 where its code changes, that is where a new sound begins.
    """
    sums, eos = Sums(), clips.layout.eos
    with evaluating(model):
        for rows, counts in evaluation_rows(clips.lengths, clips.config.micro_tokens, process):
            batch = to_device(clips.batch(rows), process.device)
            losses_nc, best_nc, labels_nc = _token_stats(model, batch)
            other_nc, *_ = _token_stats(model, batch | to_device(other_texts(clips, rows), process.device))
            is_target, is_eos = labels_nc != IGNORE, labels_nc == eos
            before_n = batch["decoder_input_ids"][..., 0].flatten().index_select(0, batch["targets"])
            is_onset = is_target[:, 0] & (labels_nc[:, 0] != before_n)
            predicts_end, is_end = best_nc[:, 0] == eos, is_eos[:, 0]
            sums.add(
                counts,
                loss=losses_nc.sum(0),
                targets=is_target.sum(0),
                correct=((best_nc == labels_nc) & is_target).sum(0),
                loss_other_text=other_nc.sum(),
                onset_gap=(other_nc - losses_nc)[is_onset, 0].sum(),
                onsets=is_onset.sum(),
                eos_loss=losses_nc[is_eos].sum(),
                ends=is_end.sum(),
                ends_predicted=(predicts_end & is_end).sum(),
                false_ends=(predicts_end & ~is_end & is_target[:, 0]).sum(),
            )
    total = sums.reduce(process)
    loss, targets, ends = total["loss"], total["targets"], total["ends"]
    metrics = {
        "loss": loss.sum() / targets.sum(),
        "accuracy": total["correct"].sum() / targets.sum(),
        "text_gap": (total["loss_other_text"] - loss.sum()) / targets.sum(),
        "text_gap_onsets": total["onset_gap"] / max(total["onsets"], 1),
        "eos_loss": total["eos_loss"] / max(ends * len(targets), 1),
        "eos_recall": total["ends_predicted"] / max(ends, 1),
        "eos_false_alarm": total["false_ends"] / max(targets[0] - ends, 1),
    }
    metrics |= {f"loss_channel_{c}": loss[c] / max(targets[c], 1) for c in range(len(targets))}
    return {name: float(value) for name, value in metrics.items()}


def other_texts(clips: Clips, rows) -> dict[str, torch.Tensor]:
    """For each of these clips the text of the next clip that has another one; no text if all are the same."""
    texts = []
    for row in rows:
        own = clips.text(row, 0)
        following = (clips.text((row + k) % len(clips), 0) for k in range(1, len(clips)))
        texts.append(next((text for text in following if not np.array_equal(text, own)), np.zeros_like(own)))
    input_ids, attention_mask = pad_texts(texts)
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _token_stats(model, batch):
    """Losses, most likely ids and labels, (N, C) each."""
    hidden_nd, labels_nc = labelled_states(model, batch)
    losses_nc, best_nc = codebook_stats(base_model(model).logits_dense, hidden_nd, labels_nc)
    return losses_nc, best_nc, labels_nc


def probe(model, clips: Clips, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The shortest clip as the library's model takes it, what the model says to its text if it always takes the most
    likely code, and the logits (L x C, V) of both as computed in training. "codes" (L x C): what was said; -1: nothing.
    """
    clip, layout, dia = int(clips.lengths.argmin()), clips.layout, base_model(model)
    batch = to_device(clips.batch([clip]), device)
    [(said_tc, _)] = speak(model, [batch["input_ids"][0].cpu().numpy()], PROBE_FRAMES, 0, device)
    # Later positions have seen an end that generation may have forced.
    ids_lc, labels_lc = delayed(said_tc, layout, len(said_tc), final=False)
    said = {"decoder_input_ids": torch.from_numpy(ids_lc)[None].to(device)}
    with evaluating(model):
        states = [decoder_states(dia.model, batch | more)[0] for more in ({}, said)[: 1 + (len(said_tc) > 0)]]
        logits = dia.logits_dense(torch.cat(states))
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    inputs = {name: batch[name] for name in names} | {"said_input_ids": said["decoder_input_ids"]}
    nothing = torch.full((states[0].shape[0] * layout.channels,), IGNORE)
    codes = torch.cat([nothing, torch.from_numpy(labels_lc).flatten()])
    inputs |= {"codes": codes.clamp(min=-1), "code_count": torch.tensor(layout.eos)}
    return inputs, logits.unflatten(-1, (layout.channels, -1)).flatten(0, 1)
