"""Higgs Audio v2 on held-out clips, teacher-forced. Shapes as in layout.py."""

import numpy as np
import torch

from common.evaluation import Sums, evaluating, evaluation_rows
from common.feed import to_device
from common.lora import base_model
from common.loss import IGNORE, codebook_stats
from common.runtime import Process
from models.higgs.data import VoiceClips
from models.higgs.layout import collate, labelled_states, without_delay


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
    """The shortest clip as the library's model takes it, where its N targets are predicted, and their logits (N x K, V)
    as computed in training."""
    batch = to_device(clips.batch([int(clips.lengths.argmin())]), device)
    with evaluating(model):
        hidden_nd, labels_nk, _ = labelled_states(model, batch)
        logits = base_model(model).audio_lm_head(hidden_nd)
    names = ("input_ids", "attention_mask", "position_ids", "audio_input_ids", "audio_input_ids_mask")
    inputs = {name: batch[name] for name in names if name in batch}
    inputs["target_at"] = torch.cat([batch["text_at"], batch["audio_at"]])[batch["target_at"]]
    return inputs, logits.unflatten(-1, (labels_nk.shape[1], -1)).flatten(0, 1)
