"""What tells a good CMGAN run from a bad one while it runs: does the discriminator know PESQ, which term leads, is the
level right, do loss and PESQ agree."""

import hashlib

import numpy as np
import torch

from common import keyed_random as keyed
from common.config import UserError
from common.pairs import PairDataset
from common.runtime import Ranks, gather_names
from common.scorer import Scorer, collect
from models.cmgan import signal

PERFECT = 1e-4  # a perfect estimate's largest loss term: what is left is the rounding of the STFT
GAIN_OK, GAIN_ALARM = (0.9, 1.1), 0.8
LOOK_BACK = 5  # evaluations
AGREEMENT = 0.6  # Spearman's rank correlation of loss and PESQ from which a common fall is no accident


# ---- losses ----------------------------------------------------------------------------------------------------


def perfect_terms(noisy: torch.Tensor, clean: torch.Tensor) -> dict[str, float]:
    """The reconstruction terms of an estimate that is the clean sound itself: 0, or the loss has another target."""
    pair = signal.normalise(noisy, clean)
    terms = signal.reconstruction(signal.estimate(signal.spectrum(pair.clean), pair)).mean(1)
    return dict(zip(signal.TERMS[:3], terms.tolist(), strict=True))


def require_perfect(noisy: torch.Tensor, clean: torch.Tensor) -> None:
    wrong = {name: value for name, value in perfect_terms(noisy, clean).items() if not value < PERFECT}
    if wrong:
        words = ", ".join(f"{name} {value:.4f}" for name, value in wrong.items())
        raise UserError(f"a perfect estimate does not score 0 ({words}): the loss would train towards another sound.")


def term_shares(
    model, discriminator, noisy: torch.Tensor, clean: torch.Tensor, weights: list[float]
) -> dict[str, float]:
    """Each weighted term's share of the loss, and of the gradient at the estimated spectrum."""
    model.eval()
    discriminator.eval()
    pair = signal.normalise(noisy, clean)
    with torch.no_grad():
        spec = model(signal.spectrum(pair.noisy))
    spec.requires_grad_(True)
    terms = signal.generator_terms(signal.estimate(spec, pair), discriminator).mean(1)
    values, norms = {}, {}
    for name, weight, term in zip(signal.TERMS, weights, terms, strict=True):
        (gradient,) = torch.autograd.grad(term, spec, retain_graph=True)
        values[name], norms[name] = weight * term.item(), weight * gradient.norm().item()
    model.train()
    discriminator.train()
    return {f"share_{name}": value / max(sum(values.values()), 1e-12) for name, value in values.items()} | {
        f"grad_share_{name}": norm / max(sum(norms.values()), 1e-12) for name, norm in norms.items()
    }


# ---- discriminator ---------------------------------------------------------------------------------------------


class Probe:
    """A fixed set of held-out sounds, degraded from hardly to badly, with their true PESQ."""

    def __init__(self, pairs: PairDataset, rows, count: int, length: int, seed: int, scorer: Scorer, ranks: Ranks):
        noisy, clean = [], []
        for number in range(count):
            row = rows[number % len(rows)]
            key = (seed, "probe", number, pairs.id(row))
            dirty, pure, _ = pairs.crop(row, length, *key)
            dirty, pure = (side.astype(np.float32) / 32768 for side in (dirty, pure))
            # The noise of the pair at 1/100 to twice its level: PESQ from hardly below 4.6 to close to 1.
            level = 10 ** (-2 + 2.3 * keyed.uniform(*key, "level"))
            noisy.append(pure + np.float32(level) * (dirty - pure))
            clean.append(pure)
        noisy, clean = np.stack(noisy), np.stack(clean)
        mine = range(ranks.rank, count, ranks.world)
        scores, _ = collect(scorer.pesq(clean[mine], noisy[mine]))
        found = dict(gather_names(list(zip(mine, scores.tolist(), strict=True)), ranks))
        kept = [number for number in range(count) if np.isfinite(found[number])]
        if len(kept) < 4:
            raise UserError(f"only {len(kept)} of {count} probe sounds of the evaluation data have a PESQ value.")
        self.ranks = ranks
        self.pesq = np.array([found[number] for number in kept])
        self.labels = signal.quality(torch.tensor(self.pesq)).numpy()
        self.noisy, self.clean = torch.from_numpy(noisy[kept]), torch.from_numpy(clean[kept])

    @torch.no_grad()
    def judge(self, discriminator) -> dict[str, float]:
        """How well the discriminator's opinion follows PESQ; the same on every rank."""
        discriminator.eval()
        mine = []
        for number in range(self.ranks.rank, len(self.labels), self.ranks.world):
            part = slice(number, number + 1)
            pair = signal.normalise(self.noisy[part].to(self.ranks.device), self.clean[part].to(self.ranks.device))
            clean, other = (signal.magnitude(signal.spectrum(wave)) for wave in (pair.clean, pair.noisy))
            mine.append((number, discriminator(clean, other).item(), discriminator(clean, clean).item()))
        discriminator.train()
        _, opinions, of_clean = map(np.array, zip(*sorted(gather_names(mine, self.ranks)), strict=True))
        return agreement(opinions, self.labels) | {
            "d_clean": float(of_clean.mean()),
            "d_std": float(opinions.std()),
            "label_std": float(self.labels.std()),
        }


def agreement(opinions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation (0 for constant opinions) and the mean absolute error."""
    return {
        "d_pearson": correlation(opinions, labels),
        "d_spearman": correlation(ranking(opinions), ranking(labels)),
        "d_mae": float(np.abs(opinions - labels).mean()),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a) - np.mean(a), np.asarray(b) - np.mean(b)
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 1e-12 else 0.0


def ranking(values: np.ndarray) -> np.ndarray:
    """Places in ascending order, ties sharing their mean."""
    values = np.asarray(values)
    below = (values[:, None] > values).sum(1)
    return below + ((values[:, None] == values).sum(1) - 1) / 2


class Gate:
    """The share of the GAN weight that a discriminator has earned by knowing PESQ.

    One that starts at random beside a trained generator would pull it away: its weight is 0 until the correlation
    with PESQ reaches `opens`, grows over `ramp` steps, and shrinks again when the correlation falls below `closes`.
    """

    def __init__(self, used: bool, opens: float, closes: float, ramp: int):
        self.used, self.opens, self.closes, self.ramp = used, opens, closes, max(1, ramp)
        self.open, self.level = not used, 0.0 if used else 1.0

    def look(self, correlation: float) -> str | None:
        """What changed, in words."""
        if not self.used:
            return None
        if not self.open and correlation >= self.opens:
            self.open = True
            return f"the discriminator knows PESQ (correlation {correlation:.2f}): the GAN term comes in"
        if self.open and correlation < self.closes:
            self.open = False
            return f"the discriminator lost PESQ (correlation {correlation:.2f}): the GAN term goes out"
        return None

    def advance(self) -> None:
        """Once an optimizer step."""
        self.level = min(1.0, max(0.0, self.level + (1 if self.open else -1) / self.ramp))

    def state(self) -> dict:
        return {"open": self.open, "level": self.level}

    def restore(self, state: dict) -> None:
        self.open, self.level = state["open"], state["level"]


def gate_of(config, held_out: int) -> Gate:
    """--gate and its levels; `held_out`: sounds to judge the discriminator by."""
    used = config.gate == "on" or (config.gate == "auto" and bool(config.model))
    if used and not held_out:
        raise UserError("--gate needs held-out sounds to judge the discriminator: give --eval-data or --hold-out.")
    if config.gate_close > config.gate_open:
        raise UserError(f"--gate-close {config.gate_close:g} is above --gate-open {config.gate_open:g}.")
    return Gate(used, config.gate_open, config.gate_close, config.gan_ramp)


# ---- alarms ----------------------------------------------------------------------------------------------------


def alarms(
    values: dict[str, float], noisy: dict[str, float], history: list[list[float]], gan_level: float
) -> list[str]:
    """What should make someone look, in sentences. `history`: (loss, PESQ) of the evaluations, this one last."""
    found = []
    gain = values["gain"]
    if not GAIN_OK[0] <= gain <= GAIN_OK[1]:
        word = "alarm" if gain < GAIN_ALARM else "warning"
        found.append(
            f"{word}: the output's level is {gain:.2f} of the clean speech's, which PESQ and SI-SDR cannot see"
        )
    if values["ssnr"] < noisy["ssnr"]:
        found.append(f"warning: segmental SNR {values['ssnr']:.2f} dB is below the noisy input's {noisy['ssnr']:.2f}")
    if diverging(history):
        (loss, pesq), (loss_now, pesq_now) = history[-LOOK_BACK], history[-1]
        found.append(
            f"alarm: over {LOOK_BACK} evaluations the loss fell ({loss:.4f} to {loss_now:.4f}) and PESQ fell with it"
            f" ({pesq:.3f} to {pesq_now:.3f}): the loss has another target than the ear"
        )
    leading = max(signal.TERMS, key=lambda name: values[f"grad_share_{name}"])
    if values[f"grad_share_{leading}"] > 0.95:
        found.append(f"warning: {values[f'grad_share_{leading}']:.1%} of the gradient is the {leading} term's")
    if gan_level == 1.0 and values["grad_share_gan"] < 0.005:
        found.append(f"warning: only {values['grad_share_gan']:.2%} of the gradient is the GAN term's")
    return found


def diverging(history: list[list[float]]) -> bool:
    """Loss and PESQ both fell over the last evaluations, and together."""
    if len(history) < LOOK_BACK:
        return False
    losses, scores = np.array(history[-LOOK_BACK:]).T
    together = correlation(ranking(losses), ranking(scores)) > AGREEMENT
    return bool(together and losses[-1] < losses[0] and scores[-1] < scores[0])


def fingerprint(*models) -> str:
    """Of all weights and buffers."""
    digest = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def require_equal(ranks: Ranks, *models) -> None:
    """Every rank holds the same networks, bit for bit, or something of ours is broken."""
    found = set(gather_names([fingerprint(*models)], ranks))
    assert len(found) == 1, "the ranks' networks differ"
