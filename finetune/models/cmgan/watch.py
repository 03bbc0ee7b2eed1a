"""What tells a good CMGAN run from a bad one while it runs: whether the discriminator follows PESQ, which loss term
dominates, whether the level is right, whether loss and PESQ agree."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import rankdata

from common.errors import UserError
from common.keyed_random import uniform
from common.pairs import PairDataset
from common.runtime import Process, gather_lists
from common.scorer import Scorer, collect
from models.cmgan import signal

PERFECT = 1e-4  # largest loss term of a perfect estimate: what remains is the rounding of the STFT
GAIN_OK, GAIN_ALARM = (0.9, 1.1), 0.8
LOOK_BACK = 5  # evaluations
OPENS, CLOSES = 0.8, 0.6  # correlation of the discriminator with PESQ that enables the GAN loss, or disables it again
RAMP = 500  # steps in which the GAN loss is faded in or out
PROBE = 64  # held-out sounds that measure the correlation
PROBE_EVERY = 100  # steps between two measurements, with --gan-gate
AGREEMENT = 0.6  # Spearman's rank correlation of loss and PESQ above which falling together is no accident


# ---- losses ----------------------------------------------------------------------------------------------------


def perfect_terms(noisy: torch.Tensor, clean: torch.Tensor, loss_terms: Callable) -> dict[str, float]:
    """The loss terms of an estimate that is the clean sound itself: 0, or the loss has another target.

    `loss_terms(estimate, discriminator)`: the recipe's. The GAN term has no fixed target and is left out.
    """
    normalised = signal.normalise(noisy, clean)
    estimate = signal.estimate(signal.spectrum(normalised.clean), normalised)
    terms = loss_terms(estimate, lambda clean, other: torch.ones(len(clean), device=clean.device))
    return {name: term.mean().item() for name, term in terms.items() if name != "gan"}


def require_perfect(noisy: torch.Tensor, clean: torch.Tensor, loss_terms: Callable) -> None:
    """Refuses a loss that a perfect estimate does not minimise."""
    wrong = {name: value for name, value in perfect_terms(noisy, clean, loss_terms).items() if not value < PERFECT}
    if wrong:
        listed = ", ".join(f"{name} {value:.4f}" for name, value in wrong.items())
        raise UserError(f"a perfect estimate does not score 0 ({listed}): the loss would train towards another sound.")


def term_shares(
    generator, discriminator, loss_terms: Callable, weights: dict[str, float], noisy: torch.Tensor, clean: torch.Tensor
) -> dict[str, float]:
    """Each weighted term's share of the loss, and of the gradient at the estimated spectrum."""
    generator.eval()
    discriminator.eval()
    normalised = signal.normalise(noisy, clean)
    with torch.no_grad():
        spec = generator(signal.spectrum(normalised.noisy))
    spec.requires_grad_(True)
    values, norms = {}, {}
    for name, term_b in loss_terms(signal.estimate(spec, normalised), discriminator).items():
        term = term_b.mean()
        (gradient,) = torch.autograd.grad(term, spec, retain_graph=True)
        values[name], norms[name] = weights[name] * term.item(), weights[name] * gradient.norm().item()
    generator.train()
    discriminator.train()
    return {f"share_{name}": value / max(sum(values.values()), 1e-12) for name, value in values.items()} | {
        f"grad_share_{name}": norm / max(sum(norms.values()), 1e-12) for name, norm in norms.items()
    }


# ---- discriminator ---------------------------------------------------------------------------------------------


class Probe:
    """A fixed set of held-out sounds with little to much noise, and their true PESQ."""

    def __init__(self, pairs: PairDataset, rows, length: int, seed: int, scorer: Scorer, process: Process):
        count = PROBE
        noisy, clean, recorded = [], [], []
        for number in range(count):
            row = rows[number % len(rows)]
            key = (seed, "probe", number, pairs.id(row))
            noisy_crop, clean_crop, _ = pairs.crop(row, length, *key)
            noisy_crop, clean_crop = (side.astype(np.float32) / 32768 for side in (noisy_crop, clean_crop))
            # The pair's noise at 1/100 to twice its level: PESQ from just below 4.6 down to about 1.
            level = 10 ** (-2 + 2.3 * uniform(*key, "level"))
            noisy.append(clean_crop + np.float32(level) * (noisy_crop - clean_crop))
            clean.append(clean_crop)
            recorded.append(noisy_crop)
        noisy, clean, recorded = np.stack(noisy), np.stack(clean), np.stack(recorded)
        numbers = range(process.rank, count, process.world)
        scores, _ = collect(scorer.pesq(clean[numbers], noisy[numbers]))
        pesq = dict(gather_lists(list(zip(numbers, scores.tolist(), strict=True)), process))
        kept = [number for number in range(count) if np.isfinite(pesq[number])]
        if len(kept) < 4:
            raise UserError(f"only {len(kept)} of {count} probe sounds of the evaluation data have a PESQ value.")
        self.process, self.scorer = process, scorer
        self.pesq = np.array([pesq[number] for number in kept])
        self.labels = signal.quality(torch.tensor(self.pesq)).numpy()
        self.noisy, self.clean = torch.from_numpy(noisy[kept]), torch.from_numpy(clean[kept])
        self.recorded = torch.from_numpy(recorded[kept])  # with the noise at its own level

    @torch.no_grad()
    def judge(self, discriminator) -> dict[str, float]:
        """How well the discriminator's predictions follow PESQ; the same on every rank."""
        discriminator.eval()
        results = []
        for number in range(self.process.rank, len(self.labels), self.process.world):
            one = slice(number, number + 1)
            pair = signal.normalise(self.noisy[one].to(self.process.device), self.clean[one].to(self.process.device))
            clean, noisy = (signal.magnitude(signal.spectrum(wave)) for wave in (pair.clean, pair.noisy))
            results.append((number, discriminator(clean, noisy).item(), discriminator(clean, clean).item()))
        discriminator.train()
        _, predictions, of_clean = map(np.array, zip(*sorted(gather_lists(results, self.process)), strict=True))
        return agreement(predictions, self.labels) | {
            "d_clean": float(of_clean.mean()),
            "d_std": float(predictions.std()),
            "label_std": float(self.labels.std()),
        }

    @torch.no_grad()
    def judge_outputs(self, generator, discriminator) -> list[list[float]]:
        """What the discriminator predicts for the generator's own outputs, and their PESQ: pairs, both 1 to 4.5.

        A discriminator may follow PESQ from clean to noisy speech and yet not tell one enhanced sound from another,
        which is what it trains the generator with. The same on every rank.
        """
        generator.eval()
        discriminator.eval()
        waiting = []
        for number in range(self.process.rank, len(self.labels), self.process.world):
            one = slice(number, number + 1)
            pair = signal.normalise(self.recorded[one].to(self.process.device), self.clean[one].to(self.process.device))
            made = signal.estimate(generator(signal.spectrum(pair.model_input)), pair)
            predicted = discriminator(signal.magnitude(made.clean_spec), signal.magnitude(made.spec)).item()
            score = self.scorer.pesq(pair.clean.float().cpu().numpy(), made.wave.float().cpu().numpy())
            waiting.append((number, 1 + 3.5 * predicted, score))
        generator.train()
        discriminator.train()
        points = [(number, predicted, float(collect(score)[0][0])) for number, predicted, score in waiting]
        points = sorted(gather_lists(points, self.process))
        return [[predicted, pesq] for _, predicted, pesq in points if np.isfinite(pesq)]


def agreement(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation (0 for constant predictions) and the mean absolute error."""
    return {
        "d_pearson": correlation(predictions, labels),
        "d_spearman": correlation(rankdata(predictions), rankdata(labels)),
        "d_mae": float(np.abs(predictions - labels).mean()),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


class GanRamp:
    """The factor on the weight of the GAN loss, 0 to 1: `level`.

    A discriminator that starts at random next to a trained generator would pull it away. With `used`, the level is 0
    until the discriminator's correlation with PESQ reaches OPENS, then rises over RAMP steps; it falls again when the
    correlation drops below CLOSES. Without it, the level is always 1.
    """

    def __init__(self, used: bool):
        self.used = used
        self.open, self.level = not used, 0.0 if used else 1.0

    def observe(self, correlation: float) -> str | None:
        """Opens or closes the gate; returns a message if that changed."""
        if not self.used:
            return None
        if not self.open and correlation >= OPENS:
            self.open = True
            return f"the discriminator follows PESQ (correlation {correlation:.2f}): the GAN loss is enabled"
        if self.open and correlation < CLOSES:
            self.open = False
            return f"the discriminator lost track of PESQ (correlation {correlation:.2f}): the GAN loss is disabled"
        return None

    def advance(self) -> None:
        """Call it once per optimizer step."""
        self.level = min(1.0, max(0.0, self.level + (1 if self.open else -1) / RAMP))

    def state(self) -> dict:
        return {"open": self.open, "level": self.level}

    def restore(self, state: dict) -> None:
        self.open, self.level = state["open"], state["level"]


def build_gan_ramp(config, held_out: int) -> GanRamp:
    """The GanRamp of --gan-gate; `held_out`: number of files to judge the discriminator by."""
    used = config.gan_gate == "on" or (config.gan_gate == "auto" and bool(config.model))
    if used and not held_out:
        raise UserError("--gan-gate needs held-out sounds to judge the discriminator: give --eval-data or --hold-out.")
    return GanRamp(used)


# ---- alarms ----------------------------------------------------------------------------------------------------


def alarms(
    metrics: dict[str, float], noisy: dict[str, float], history: list[list[float]], gan_level: float
) -> list[str]:
    """Sentences about what someone should look at. `history`: (loss, PESQ) of the evaluations, this one last."""
    messages = []
    gain = metrics["gain"]
    if not GAIN_OK[0] <= gain <= GAIN_OK[1]:
        severity = "alarm" if gain < GAIN_ALARM else "warning"
        messages.append(
            f"{severity}: the output's level is {gain:.2f} of the clean speech's, which PESQ and SI-SDR cannot detect"
        )
    if metrics["ssnr"] < noisy["ssnr"]:
        messages.append(
            f"warning: segmental SNR {metrics['ssnr']:.2f} dB is below the noisy input's {noisy['ssnr']:.2f}"
        )
    if diverging(history):
        (loss, pesq), (loss_now, pesq_now) = history[-LOOK_BACK], history[-1]
        messages.append(
            f"alarm: over {LOOK_BACK} evaluations the loss fell ({loss:.4f} to {loss_now:.4f}) and PESQ fell with it"
            f" ({pesq:.3f} to {pesq_now:.3f}): the loss no longer measures quality"
        )
    shares = {name.removeprefix("grad_share_"): v for name, v in metrics.items() if name.startswith("grad_share_")}
    largest = max(shares, key=shares.get)
    if shares[largest] > 0.95:
        messages.append(f"warning: {shares[largest]:.1%} of the gradient comes from the {largest} term")
    if gan_level == 1.0 and shares["gan"] < 0.005:
        messages.append(f"warning: only {shares['gan']:.2%} of the gradient comes from the GAN term")
    return messages


def diverging(history: list[list[float]]) -> bool:
    """Whether loss and PESQ both fell over the last evaluations, and together."""
    if len(history) < LOOK_BACK:
        return False
    losses, scores = np.array(history[-LOOK_BACK:]).T
    together = correlation(rankdata(losses), rankdata(scores)) > AGREEMENT
    return bool(together and losses[-1] < losses[0] and scores[-1] < scores[0])


def fingerprint(*models) -> str:
    """A hash of all weights and buffers."""
    digest = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def require_equal(process: Process, *models) -> None:
    """Asserts that every rank holds the same networks, bit for bit."""
    fingerprints = set(gather_lists([fingerprint(*models)], process))
    assert len(fingerprints) == 1, "the ranks' networks differ"
