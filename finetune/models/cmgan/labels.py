"""What the discriminator learns from: the PESQ of every single sound, and a mask where there is none.

A label is never averaged over a batch and never made up. A sound without a label only loses its own term of the loss.
"""

from dataclasses import dataclass, field

import torch

from common.errors import UserError
from common.runs import Run
from common.runtime import gather_lists
from common.scorer import Scorer, collect
from models.cmgan import signal

ENOUGH = 100  # labels, before the fraction of missing ones means anything
MOST_MISSING = 0.2  # of the labels; more end the run


@dataclass
class Waiting:
    """A micro-batch whose sounds are being scored."""

    estimate: signal.Estimate
    ids: list[str]
    scores: list
    noisy_scores: list


@dataclass
class Labelled:
    """A micro-batch for the discriminator: magnitudes and labels, 0 and masked where PESQ gave no value."""

    clean: torch.Tensor  # (B, 1, F, T)
    others: list[torch.Tensor]  # the generator's estimates; with --noisy-term also the noisy inputs
    labels: list[torch.Tensor]  # (B,) each, 0 .. 1
    valid: list[torch.Tensor]  # (B,) each, 0 or 1
    missing: list[str] = field(default_factory=list)  # "id: reason"


class Labels:
    """PESQ labels for the discriminator. `noisy_term`: of the noisy inputs too."""

    def __init__(self, scorer: Scorer, noisy_term: bool):
        self.scorer, self.noisy_term = scorer, noisy_term

    def submit(self, estimate: signal.Estimate, ids: list[str]) -> Waiting:
        """Starts scoring. Call it right after the generator's forward pass: other processes then score during the
        backward pass and the optimizer step."""
        clean, enhanced = (wave.float().cpu().numpy() for wave in (estimate.normalised.clean, estimate.wave))
        noisy_scores = []
        if self.noisy_term:
            noisy_scores = self.scorer.pesq(clean, estimate.normalised.noisy.float().cpu().numpy())
        return Waiting(estimate, ids, self.scorer.pesq(clean, enhanced), noisy_scores)

    def collect(self, waiting: Waiting) -> Labelled:
        """Waits for the scores. A score that failed for any reason becomes a 0 in the mask."""
        estimate = waiting.estimate
        labels, valid, missing = [], [], []
        for scores in filter(None, (waiting.scores, waiting.noisy_scores)):
            pesq, reasons = collect(scores)
            pesq = torch.as_tensor(pesq, dtype=torch.float32, device=estimate.wave.device)
            valid.append(pesq.isfinite().float())
            labels.append(signal.quality(pesq.nan_to_num(1.0)))
            if not missing:
                missing = [f"{name}: {why}" for name, why in zip(waiting.ids, reasons, strict=True) if why]
        others = [signal.magnitude(estimate.spec)]
        if self.noisy_term:
            others.append(signal.magnitude(signal.spectrum(estimate.normalised.noisy)))
        return Labelled(signal.magnitude(estimate.clean_spec), others, labels, valid, missing)


def valid_counts(batches: list[Labelled]) -> list[float]:
    """Numbers of valid labels in these micro-batches: of estimates, and of noisy inputs."""
    return [sum(float(valid.sum()) for valid in kind) for kind in zip(*(b.valid for b in batches), strict=True)]


# ---- missing labels --------------------------------------------------------------------------------------------


def count_missing(loop_state: dict, missing_here: list[str], missing: int, sounds: int, step: int, run: Run) -> None:
    """Counts the sounds without a PESQ value, by reason; too many end the run. Every rank must call it.

    `missing_here`: those of this rank, "id: reason"; `missing`: their number on all ranks.
    """
    loop_state["labels"] += sounds
    loop_state["missing"] += missing
    if missing:  # on any rank, so that all of them gather
        names = gather_lists(missing_here, run.process)
        for name in names:
            reason = name.rsplit(": ", 1)[1]
            loop_state["reasons"][reason] = loop_state["reasons"].get(reason, 0) + 1
        run.tracker.event("pesq_missing", step, ids=names)
    if loop_state["labels"] >= ENOUGH and loop_state["missing"] > MOST_MISSING * loop_state["labels"]:
        run.wait_for_checkpoint()
        raise UserError(
            f"{loop_state['missing']} of the last {loop_state['labels']} sounds have no PESQ"
            f" ({loop_state['reasons']}), more than {MOST_MISSING:.0%}: metrics.jsonl names them."
        )


def restart_count(loop_state: dict) -> None:
    """Call it at every evaluation: many good labels in the past must not hide that labels go missing now."""
    if loop_state["labels"] >= ENOUGH:
        loop_state |= {"labels": 0, "missing": 0, "reasons": {}}
