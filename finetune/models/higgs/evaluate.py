"""The loss of Higgs Audio v2 and its evaluation on held-out pairs.

Shapes: B rows, S positions of the text axis, F audio frames, K codebooks, T codec frames, D width, N scored positions.
"""

import numpy as np
import torch

from common.lora import base_model
from common.loss import IGNORE, codebook_loss, codebook_stats
from common.plan import Plan
from common.runtime import Ranks, all_sum
from models.higgs.data import Pairs
from models.higgs.layout import Layout, collate, labelled_states, without_delay


def higgs_loss(model, batch, layout: Layout, weights: np.ndarray, text_loss: float = 0.0):
    """Weighted sum of the token losses; per codebook (and for the text) the plain sum and the number of targets.

    A batch without a single label gives 0 that still has a gradient, of zeros: its rank must not leave the others
    alone in the backward.
    """
    model = base_model(model)
    hidden_nd, labels_nk, hidden_bsd = labelled_states(model, batch, layout)
    real = labels_nk != IGNORE
    weights_nk = real * torch.as_tensor(weights, dtype=torch.float32, device=hidden_nd.device)
    loss, losses_nk = codebook_loss(model.audio_lm_head, hidden_nd, labels_nk, weights_nk)
    stats = torch.stack([losses_nk.sum(0), real.sum(0).float()])
    if text_loss:
        labels_n = batch["labels"][:, 1:].flatten()
        rows = (labels_n != IGNORE).nonzero().squeeze(-1)
        labels_n1 = labels_n[rows, None]
        states = hidden_bsd[:, :-1].flatten(0, 1)[rows]
        weights_n1 = torch.full(labels_n1.shape, text_loss, device=states.device)
        text, losses_n1 = codebook_loss(model.text_lm_head, states, labels_n1, weights_n1)
        text_stats = torch.stack([losses_n1.sum(), losses_n1.new_tensor(len(rows))])
        loss, stats = loss + text, torch.cat([stats, text_stats[:, None]], dim=1)
    return loss, stats.detach()


# ---- evaluation ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, pairs: Pairs, ranks: Ranks, to_device) -> dict[str, float]:
    """Teacher-forced metrics over all pairs, the same for any number of ranks (sums are reduced, not means).

    gap: how much worse the targets get with another speaker's reference. Near 0 the voice prompt is ignored.
    end_loss: of the end of the streams, which decides whether the model stops.
    """
    plan = Plan(pairs.lengths, pairs.config.micro_tokens, seed=0, jitter=0)
    batches = [plan.micro_batch(number)[1] for number in range(plan.per_epoch)]
    layout, k = pairs.layout, pairs.layout.codebooks
    sums = np.zeros(2 * k + 5)
    was_training = model.training
    model.eval()
    for turn in range(-(-len(batches) // ranks.world)):
        number = turn * ranks.world + ranks.rank
        # Under ZeRO-3 every rank must run every turn: one without a batch repeats the first and adds nothing.
        clips = batches[number if number < len(batches) else 0]
        losses, best, labels = _token_stats(model, to_device(pairs.batch(clips)), layout)
        wrong, swapped = 0.0, pairs.swapped(clips)
        if swapped is not None:
            wrong = float(_token_stats(model, to_device(pairs.batch(clips, swapped)), layout)[0].sum())
        if number < len(batches):
            real, ends = labels != IGNORE, labels == layout.eos
            hits = (best[:, 0] == labels[:, 0])[real[:, 0]].sum()
            parts = [losses.sum(0), real.sum(0), losses[ends].sum(), ends.sum(), hits, wrong, swapped is not None]
            sums += np.concatenate([np.atleast_1d(np.asarray(p.cpu() if torch.is_tensor(p) else p)) for p in parts])
    model.train(was_training)
    sums = all_sum(sums, ranks)
    loss, count = sums[: 2 * k].reshape(2, k)
    end_loss, ends, hits, wrong, swaps = sums[2 * k :]
    values = {
        "loss": loss.sum() / count.sum(),
        "end_loss": end_loss / ends,
        "accuracy_first": hits / count[0],
    }
    if swaps:
        values["gap"] = (wrong - loss.sum()) / count.sum()
    values |= {f"loss_channel_{c}": loss[c] / count[c] for c in range(k)}
    return {name: float(value) for name, value in values.items()}


def _token_stats(model, batch, layout: Layout):
    hidden_nd, labels_nk, _ = labelled_states(model, batch, layout)
    losses, best = codebook_stats(base_model(model).audio_lm_head, hidden_nd, labels_nk)
    return losses.float(), best, labels_nk


@torch.no_grad()
def layout_losses(model, pairs: Pairs, to_device, clips: int = 8) -> tuple[float, float]:
    """Loss a token of a few targets, delayed and not. A base that was trained reads the delayed layout better."""
    chosen = np.linspace(0, len(pairs) - 1, num=min(clips, len(pairs)), dtype=int)
    was_training = model.training
    model.eval()
    found = []
    rows = pairs.rows(chosen)
    for laid_out in (rows, [without_delay(row, pairs.layout) for row in rows]):
        total, count = 0.0, 0
        for row in laid_out:
            losses, _, labels = _token_stats(model, to_device(collate([row], pairs.layout)), pairs.layout)
            total, count = total + float(losses.sum()), count + int((labels != IGNORE).sum())
        found.append(total / count)
    model.train(was_training)
    return found[0], found[1]
