"""What the discriminator learns from: the PESQ of every single sound, a mask where there is none, and past estimates.

A label is never averaged over a batch and never made up. A sound without a label only loses its own term of the loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from common.errors import UserError
from common.keyed_random import uniform
from common.runs import Run
from common.runtime import Process, gather_lists
from common.scorer import Scorer, collect
from models.cmgan import signal

ENOUGH = 100  # labels, before the fraction of missing ones means anything


@dataclass
class Waiting:
    """A micro-batch whose sounds are being scored."""

    slot: int  # its place among the micro-batches of the step, whichever rank has it
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
    past: list[tuple] = field(default_factory=list)  # (clean, other, labels, valid) from earlier steps
    missing: list[str] = field(default_factory=list)  # "id: reason"


class Labels:
    """PESQ labels for the discriminator, and with --replay the estimates of earlier steps."""

    def __init__(self, scorer: Scorer, noisy_term: bool, replay: int, seed: int):
        self.scorer, self.noisy_term, self.replay, self.seed = scorer, noisy_term, replay, seed
        self.store: list[dict] = []  # past estimates of this rank's micro-batches, oldest first

    def submit(self, slot: int, estimate: signal.Estimate, ids: list[str]) -> Waiting:
        """Starts scoring. Call it right after the generator's forward pass: other processes then score during the
        backward pass and the optimizer step."""
        clean, enhanced = (wave.float().cpu().numpy() for wave in (estimate.normalised.clean, estimate.wave))
        noisy_scores = []
        if self.noisy_term:
            noisy_scores = self.scorer.pesq(clean, estimate.normalised.noisy.float().cpu().numpy())
        return Waiting(slot, estimate, ids, self.scorer.pesq(clean, enhanced), noisy_scores)

    def collect(self, step: int, waiting: Waiting) -> Labelled:
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
        labelled = Labelled(signal.magnitude(estimate.clean_spec), others, labels, valid, [], missing)
        if self.replay:
            labelled.past = self._recall(step, waiting.slot)
            self._remember(step, waiting.slot, estimate, labels[0], valid[0])
        return labelled

    def _recall(self, step: int, slot: int) -> list[tuple]:
        """A keyed choice among the past estimates of this slot; the same for any number of ranks."""
        known = [item for item in self.store if item["slot"] == slot]
        if not known:
            return []
        item = known[int(uniform(self.seed, step, slot, "replay") * len(known))]
        sides = (signal.magnitude(signal.spectrum(item[name])) for name in ("clean", "made"))
        return [(*sides, item["labels"], item["valid"])]

    def _remember(self, step: int, slot: int, estimate: signal.Estimate, labels, valid) -> None:
        # A NaN has no label, but its mask of 0 times NaN would still be NaN.
        made = estimate.wave.nan_to_num(0.0, 0.0, 0.0)
        item = {"step": step, "slot": slot, "clean": estimate.normalised.clean, "made": made}
        self.store.append(item | {"labels": labels, "valid": valid})
        # Only this slot forgets: other slots of this rank have not had their turn in this step yet.
        self.store = [item for item in self.store if item["slot"] != slot or item["step"] > step - self.replay]

    def state(self) -> dict | None:
        """This rank's state for the checkpoint; None without --replay."""
        return {"store": self.store} if self.replay else None

    def restore(self, states: Iterable[dict], process: Process) -> None:
        """Takes what belongs to this rank's micro-batches out of the states of all ranks; they may have been more or
        fewer."""
        for state in states:
            for item in state["store"]:
                if item["slot"] % process.world == process.rank:
                    on_device = {k: v.to(process.device) if torch.is_tensor(v) else v for k, v in item.items()}
                    self.store.append(on_device)


def valid_counts(batches: list[Labelled]) -> list[float]:
    """Numbers of valid labels in these micro-batches: of estimates (past ones included), and of noisy inputs."""
    counts = [sum(float(valid.sum()) for valid in kind) for kind in zip(*(b.valid for b in batches), strict=True)]
    counts[0] += sum(float(valid.sum()) for batch in batches for *_, valid in batch.past)
    return counts


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
    if loop_state["labels"] >= ENOUGH and loop_state["missing"] > run.config.max_pesq_invalid * loop_state["labels"]:
        run.wait_for_checkpoint()
        raise UserError(
            f"{loop_state['missing']} of the last {loop_state['labels']} sounds have no PESQ"
            f" ({loop_state['reasons']}; --max-pesq-invalid): metrics.jsonl names them."
        )


def restart_count(loop_state: dict) -> None:
    """Call it at every evaluation: many good labels in the past must not hide that labels go missing now."""
    if loop_state["labels"] >= ENOUGH:
        loop_state |= {"labels": 0, "missing": 0, "reasons": {}}
