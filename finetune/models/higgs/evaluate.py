"""Higgs Audio v2 on held-out clips, teacher-forced. Shapes as in layout.py."""

import numpy as np
import torch

from common.evaluation import Sums, evaluating, evaluation_rows
from common.feed import to_device
from common.lora import base_model
from common.loss import IGNORE, codebook_stats
from common.runtime import Process
from models.higgs.data import VoiceClips
from models.higgs.generate import speak
from models.higgs.layout import collate, labelled_states, without_delay

PROBE_FRAMES = 16  # that the engine says for the check of an export; more than the longest delay


def token_metrics(model, clips: VoiceClips, process: Process) -> dict[str, float]:
    """Unweighted loss and accuracy per code over all clips, the same for any number of ranks.

    gap: increase of the loss with another speaker's reference; near 0 the model ignores the voice prompt. end_loss:
    loss of the ends of the streams, which decide whether the model stops.
    """
    sums, layout = Sums(), clips.layout
    with evaluating(model):
        for rows, counts in evaluation_rows(clips.lengths, clips.config.micro_tokens, process):
            batch = to_device(clips.batch(rows), process.device)
            losses_nk, best_nk, labels_nk = _token_stats(model, batch)
            is_target, is_end = labels_nk != IGNORE, labels_nk == layout.eos
            sums.add(
                counts,
                loss=losses_nk.sum(0),
                targets=is_target.sum(0),
                correct_first=((best_nk == labels_nk) & is_target)[:, 0].sum(),
                end_loss=torch.where(is_end, losses_nk, 0).sum(),
                ends=is_end.sum(),
            )
            references = clips.other_references(rows)
            if references is not None:  # for all batches or for none
                batch = to_device(clips.batch(rows, references=references), process.device)
                sums.add(counts, loss_other_voice=_token_stats(model, batch)[0].sum())
    total = sums.reduce(process)
    loss, targets = total["loss"], total["targets"]
    metrics = {
        "loss": loss.sum() / targets.sum(),
        "end_loss": total["end_loss"] / total["ends"],
        "accuracy_first": total["correct_first"] / targets[0],
    }
    if "loss_other_voice" in total:
        metrics["gap"] = (total["loss_other_voice"] - loss.sum()) / targets.sum()
    metrics |= {f"loss_channel_{k}": loss[k] / targets[k] for k in range(len(targets))}
    return {name: float(value) for name, value in metrics.items()}


def _token_stats(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, most likely ids and labels, (N, K) each."""
    hidden_nd, labels_nk, _ = labelled_states(model, batch)
    losses_nk, best_nk = codebook_stats(base_model(model).audio_lm_head, hidden_nd, labels_nk)
    return losses_nk.float(), best_nk, labels_nk


def layout_losses(model, clips: VoiceClips, device: torch.device, count: int = 8) -> tuple[float, float]:
    """Loss per code of a few targets, with and without the delay pattern. A trained base is better with it."""
    indices = np.linspace(0, len(clips) - 1, num=min(count, len(clips)), dtype=int)
    rows = clips.rows(indices)
    means = []
    with evaluating(model):
        for variant in (rows, [without_delay(row, clips.layout) for row in rows]):
            loss_sum, targets = 0.0, 0
            for row in variant:
                batch = to_device(collate([row], clips.layout), device)
                losses_nk, _, labels_nk = _token_stats(model, batch)
                loss_sum, targets = loss_sum + float(losses_nk.sum()), targets + int((labels_nk != IGNORE).sum())
            means.append(loss_sum / targets)
    with_delay, flat = means
    return with_delay, flat


def probe(model, clips: VoiceClips, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The shortest clip as the library's model takes it, what the model says to its text if it always takes the most
    likely code (names that begin with "said_"), where their N targets are predicted, and the logits (N x K, V) as
    computed in training. "codes" (N x K): what was said; -1: nothing.
    """
    clip, layout = int(clips.lengths.argmin()), clips.layout
    [said] = speak(model, clips.rows([clip], answer=False), layout, PROBE_FRAMES, 0, device, greedy=True)
    rows = clips.rows([clip]) + (clips.rows([clip], said=said.codes) if len(said.codes) else [])
    inputs, states, codes = {}, [], []
    with evaluating(model):
        for row, prefix in zip(rows, ("", "said_"), strict=False):
            batch = to_device(collate([row], layout), device)
            hidden_nd, labels_nk, _ = labelled_states(model, batch)
            states.append(hidden_nd)
            # Frames after the last one that was said have seen ends that were not.
            is_said = (torch.arange(len(labels_nk)) < len(said.codes))[:, None] & (labels_nk.cpu() < layout.bos)
            codes.append(
                torch.where(is_said, labels_nk.cpu(), -1) if prefix else torch.full_like(is_said, -1, dtype=torch.long)
            )
            names = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask")
            inputs |= {prefix + name: batch[name] for name in names}
            inputs[prefix + "target_at"] = torch.cat([batch["text_at"], batch["audio_at"]])[batch["target_at"]]
        logits = base_model(model).audio_lm_head(torch.cat(states))
    inputs |= {"codes": torch.cat(codes).flatten(), "code_count": torch.tensor(layout.bos)}
    return inputs, logits.unflatten(-1, (layout.codebooks, -1)).flatten(0, 1)
