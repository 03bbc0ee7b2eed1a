"""Dia's loss and its evaluation on held-out clips. Shapes as in layout.py."""

import torch

from common.lora import base_model
from common.loss import IGNORE, codebook_loss, codebook_stats
from common.plan import Plan
from common.runs import Run
from common.runtime import Ranks, all_sum, say
from models.dia.data import Clips
from models.dia.layout import labelled_states


def dia_loss(model, batch, channel_weights: torch.Tensor, eos_weight: float, eos: int):
    """Weighted sum of the token losses; per channel the plain sum and the number of targets."""
    hidden_nd, labels_nc = labelled_states(model, batch)
    real = labels_nc != IGNORE
    weights_nc = real * channel_weights.to(hidden_nd.device)
    if eos_weight != 1:
        weights_nc = torch.where(labels_nc == eos, weights_nc * eos_weight, weights_nc)
    loss, losses_nc = codebook_loss(base_model(model).logits_dense, hidden_nd, labels_nc, weights_nc)
    return loss, torch.stack([losses_nc.sum(0), real.sum(0).float()]).detach()


def compute_loss(model, batch, clips: Clips):
    """Weighted loss sum over the batch's targets; per channel the plain sum and the count."""
    weights = torch.as_tensor(clips.weights, dtype=torch.float32)
    return dia_loss(model, batch, weights, clips.config.eos_weight, clips.layout.eos)


def evaluate_and_log(model, clips: Clips | None, run: Run, step: int, to_device) -> float | None:
    """Metrics with the averaged weights, if there are any; returns the score that chooses the best checkpoint.

    That is the loss, but no score for a model that would not stop speaking (--min-eos-recall).
    """
    if not clips:
        return None
    with run.average.in_place():
        values = evaluate(model, clips, run.ranks, to_device)
    run.tracker.event("eval", step, **values)
    say(f"evaluation at step {step}: loss {values['loss']:.4f}  text gap {values['text_gap']:.4f}"
        f"  end recall {values['eos_recall']:.2f}  end false alarm {values['eos_false_alarm']:.4f}")  # fmt: skip
    return values["loss"] if values["eos_recall"] >= clips.config.min_eos_recall else None


@torch.no_grad()
def evaluate(model, clips: Clips, ranks: Ranks, to_device) -> dict[str, float]:
    """Teacher-forced metrics over all clips, the same for any number of ranks (sums are reduced, not means).

    eos_recall and eos_false_alarm foretell endless and cut-off outputs: generation stops exactly where channel 0's
    most likely id is EOS. text_gap is how much worse the loss gets without the text; near 0 the text is ignored.
    """
    plan = Plan(clips.lengths, clips.config.micro_tokens, seed=0, jitter=0)
    batches = [plan.micro_batch(number)[1] for number in range(plan.per_epoch)]
    channels, eos = clips.layout.channels, clips.layout.eos
    sums = torch.zeros(3 * channels + 5, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for turn in range(-(-len(batches) // ranks.world)):
        number = turn * ranks.world + ranks.rank
        # Under ZeRO-3 every rank must run every turn: one without a batch repeats the first and adds nothing.
        batch = to_device(clips.batch(batches[number if number < len(batches) else 0]))
        losses, best, labels = _token_stats(model, batch)
        mute = batch | {"input_ids": torch.zeros_like(batch["input_ids"])}
        mute_losses, *_ = _token_stats(model, mute)
        if number < len(batches):
            real, is_eos = labels != IGNORE, labels == eos
            says_eos, at_end = best[:, 0] == eos, is_eos[:, 0]
            sums += torch.cat(
                [
                    torch.stack([losses.sum(0), real.sum(0), ((best == labels) & real).sum(0)])
                    .double()
                    .flatten()
                    .cpu(),
                    torch.tensor(
                        [
                            mute_losses.sum(),
                            losses[is_eos].sum(),
                            at_end.sum(),
                            (says_eos & at_end).sum(),
                            (says_eos & ~at_end & real[:, 0]).sum(),
                        ],
                        dtype=torch.float64,
                    ),
                ]
            )
    model.train(was_training)
    sums = all_sum(sums, ranks)
    loss, count, correct = sums[: 3 * channels].reshape(3, channels)
    mute, eos_loss, ends, hits, alarms = sums[3 * channels :]
    ends_all = max(ends * channels, 1)
    values = {
        "loss": loss.sum() / count.sum(),
        "accuracy": correct.sum() / count.sum(),
        "text_gap": (mute - loss.sum()) / count.sum(),
        "eos_loss": eos_loss / ends_all,
        "eos_recall": hits / max(ends, 1),
        "eos_false_alarm": alarms / max(count[0] - ends, 1),
    }
    values |= {f"loss_channel_{c}": loss[c] / max(count[c], 1) for c in range(channels)}
    return {name: float(value) for name, value in values.items()}


def _token_stats(model, batch):
    hidden_nd, labels_nc = labelled_states(model, batch)
    losses, best = codebook_stats(base_model(model).logits_dense, hidden_nd, labels_nc)
    return losses, best, labels_nc
