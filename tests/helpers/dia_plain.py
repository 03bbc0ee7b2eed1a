"""Dia trained in one process with torch's own AdamW, clipping and cross-entropy: what two ranks must equal."""

import math

import torch
from torch.nn import functional as F

from common.plan import Plan


def train_plain(model, clips, config, groups: list[dict]) -> tuple[dict, dict, list[float]]:
    """Trained weights, their average (decay 0.9) and the losses, for 2 ranks x 2 accumulation steps of `config`.

    `groups`: for torch's AdamW. Warm-up takes two steps, then the cosine goes down to a tenth.
    """
    model.train()
    plan = Plan(clips.lengths, config.micro_tokens, config.seed)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    averaged = {name: p.detach().clone() for name, p in weights.items()}
    losses = []
    for step in range(config.steps):
        total, count = 0.0, 0
        for number in range(4 * step, 4 * step + 4):
            epoch, chosen = plan.micro_batch(number)
            batch = clips.batch(chosen, epoch)
            labels = batch.pop("labels").transpose(1, 2).flatten(0, 1)
            batch.pop("ids")
            logits = model(**batch, use_cache=False).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        progress = (step - 2) / (config.steps - 3)
        share = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = config.lr * share
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in weights.items():
            averaged[name].mul_(decay).add_(p.detach(), alpha=1 - decay)
        losses.append(float(total.detach()) / count)
    return {name: p.detach().clone() for name, p in weights.items()}, averaged, losses
