"""What the discriminator learns from: PESQ of each sound by itself, a mask where there is none, and past estimates.

A label is never averaged over a batch and never made up, and a sound without one costs nothing but its own term.
"""

from dataclasses import dataclass, field

import torch

from common import keyed_random as keyed
from common.config import UserError
from common.runs import Run
from common.runtime import gather_names
from common.scorer import Scorer, collect
from models.cmgan import signal

ENOUGH = 100  # labels, to judge by the share of those that are missing


@dataclass
class Waiting:
    """A micro-batch whose sounds are being scored."""

    slot: int  # its place among the micro-batches of the step, whatever rank has it
    estimate: signal.Estimate
    ids: list[str]
    scores: list
    noisy_scores: list


@dataclass
class Labelled:
    """A micro-batch for the discriminator: magnitudes and labels, 0 and masked where PESQ gave no value."""

    clean: torch.Tensor  # (B, 1, F, T)
    others: list[torch.Tensor]  # what the generator made; then, where asked for, the noisy ones
    labels: list[torch.Tensor]  # (B,) each, 0 .. 1
    valid: list[torch.Tensor]  # (B,) each, 0 or 1
    past: list[tuple] = field(default_factory=list)  # (clean, other, labels, valid) of earlier steps
    missing: list[str] = field(default_factory=list)  # "id: reason"


class Labels:
    def __init__(self, scorer: Scorer, noisy_term: bool, memory: int, seed: int):
        self.scorer, self.noisy_term, self.memory, self.seed = scorer, noisy_term, memory, seed
        self.store: list[dict] = []  # of this rank's micro-batches, oldest first

    def submit(self, slot: int, estimate: signal.Estimate, ids: list[str]) -> Waiting:
        """Right after the generator's forward: the processes score while backward and step compute."""
        clean, made, noisy = (
            wave.float().cpu().numpy() for wave in (estimate.pair.clean, estimate.wave, estimate.pair.noisy)
        )
        noisy_scores = self.scorer.pesq(clean, noisy) if self.noisy_term else []
        return Waiting(slot, estimate, ids, self.scorer.pesq(clean, made), noisy_scores)

    def collect(self, step: int, waiting: Waiting) -> Labelled:
        """After the generator's step; whatever went wrong with a score is a 0 in the mask."""
        estimate = waiting.estimate
        labels, valid, missing = [], [], []
        for scores in filter(None, (waiting.scores, waiting.noisy_scores)):
            values, reasons = collect(scores)
            values = torch.as_tensor(values, dtype=torch.float32, device=estimate.wave.device)
            valid.append(values.isfinite().float())
            labels.append(signal.quality(values.nan_to_num(1.0)))
            if not missing:
                missing = [f"{name}: {why}" for name, why in zip(waiting.ids, reasons, strict=True) if why]
        others = [signal.magnitude(estimate.spec)]
        if self.noisy_term:
            others.append(signal.magnitude(signal.spectrum(estimate.pair.noisy)))
        made = Labelled(signal.magnitude(estimate.clean_spec), others, labels, valid, [], missing)
        if self.memory:
            made.past = self._recall(step, waiting.slot)
            self._remember(step, waiting.slot, estimate, labels[0], valid[0])
        return made

    def _recall(self, step: int, slot: int) -> list[tuple]:
        """A keyed choice among what this slot of the step made in earlier ones; the same on any number of ranks."""
        known = [item for item in self.store if item["slot"] == slot]
        if not known:
            return []
        item = known[int(keyed.uniform(self.seed, step, slot, "replay") * len(known))]
        sides = (signal.magnitude(signal.spectrum(item[name])) for name in ("clean", "made"))
        return [(*sides, item["labels"], item["valid"])]

    def _remember(self, step: int, slot: int, estimate: signal.Estimate, labels, valid) -> None:
        made = estimate.wave.nan_to_num(0.0, 0.0, 0.0)  # has no label, and its mask of 0 times NaN would be NaN
        item = {"step": step, "slot": slot, "clean": estimate.pair.clean, "made": made}
        self.store.append(item | {"labels": labels, "valid": valid})
        # Only this slot's: another one of the same rank may still want what is old by now.
        self.store = [item for item in self.store if item["slot"] != slot or item["step"] > step - self.memory]

    def state(self) -> dict | None:
        """For the checkpoint; None without a memory."""
        return {"store": self.store} if self.memory else None

    def restore(self, state: dict, device) -> None:
        self.store = [
            {name: value.to(device) if torch.is_tensor(value) else value for name, value in item.items()}
            for item in state["store"]
        ]


def discriminator_loss(discriminator, share: tuple[Labelled, float, list[float]]) -> torch.Tensor:
    """A micro-batch's share of the step's loss: (D(clean, clean) - 1)^2 and, where valid, (D(clean, other) - label)^2.

    With it come counts over all ranks and micro-batches of the step: sounds, and valid labels of what the generator
    made (with the past) and of the noisy ones. A mask of zeros is a term of 0, not another path: every rank computes
    the same graph and joins the same collectives.
    """
    batch, sounds, counts = share
    loss = (discriminator(batch.clean, batch.clean) - 1).square().sum() / sounds
    for other, labels, valid, count in zip(batch.others, batch.labels, batch.valid, counts, strict=True):
        loss = loss + (valid * (discriminator(batch.clean, other) - labels).square()).sum() / max(1.0, count)
    for clean, other, labels, valid in batch.past:
        loss = loss + (valid * (discriminator(clean, other) - labels).square()).sum() / max(1.0, counts[0])
    return loss


def valid_counts(batches: list[Labelled]) -> list[float]:
    """Labels of these micro-batches that count: of what the generator made and its past, and of the noisy ones."""
    counts = [sum(float(valid.sum()) for valid in kind) for kind in zip(*(b.valid for b in batches), strict=True)]
    counts[0] += sum(float(valid.sum()) for batch in batches for *_, valid in batch.past)
    return counts


def start_counting_anew(extra: dict) -> None:
    """At an evaluation: a good past must not hide labels that begin to miss."""
    if extra["labels"] >= ENOUGH:
        extra |= {"labels": 0, "missing": 0, "reasons": {}}


def count_missing(extra: dict, mine: list[str], missing: int, sounds: int, step: int, run: Run) -> None:
    """Counts the labels that PESQ gave no value for, by reason, since the last evaluation that had enough of them to
    judge by; too many end the run."""
    extra["labels"] += sounds
    extra["missing"] += missing
    if missing:  # of all ranks: every one of them comes here
        names = gather_names(mine, run.ranks)
        for name in names:
            reason = name.rsplit(": ", 1)[1]
            extra["reasons"][reason] = extra["reasons"].get(reason, 0) + 1
        run.tracker.event("pesq_missing", step, ids=names)
    if extra["labels"] >= ENOUGH and extra["missing"] > run.config.max_pesq_invalid * extra["labels"]:
        run.wait_for_checkpoint()
        raise UserError(
            f"{extra['missing']} of the last {extra['labels']} sounds have no PESQ ({extra['reasons']};"
            " --max-pesq-invalid): metrics.jsonl names them."
        )
