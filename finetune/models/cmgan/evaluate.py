"""CMGAN judged by whole files that it was not trained on, and what the report and the log say about them."""

from pathlib import Path

import numpy as np
import torch

from common import samples
from common.config import UserError
from common.pairs import PairDataset, open_pairs
from common.runs import Run
from common.runtime import Ranks, all_sum, gather_names, say, still_alive
from common.scorer import Scorer, measured
from models.cmgan import signal
from models.cmgan import watch as cmgan_watch
from models.cmgan import weights as cmgan_files
from models.cmgan.enhance import enhance
from models.cmgan.labels import start_counting_anew


class Evaluation:
    """Whole held-out files, each once, in a fixed order; what they and the probe say about both networks."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, config, scorer: Scorer, ranks: Ranks):
        self.pairs, self.rows, self.config, self.scorer, self.ranks = pairs, rows, config, scorer, ranks
        self.window = int(config.window_seconds * signal.RATE)
        length = int(config.seconds * signal.RATE)
        self.probe = cmgan_watch.Probe(pairs, rows, config.probe, length, config.seed, scorer, ranks)
        self.noisy = measure_noisy(pairs, rows, scorer, ranks)
        say(f"evaluation on {len(rows)} files; the noisy input has PESQ {self.noisy['pesq']:.3f}, STOI"
            f" {self.noisy['stoi']:.3f}, SI-SDR {self.noisy['si_sdr']:.2f} dB")  # fmt: skip

    def files(self, nets: tuple, weights: list[float]) -> list[dict]:
        return measure_files(*nets, self.pairs, self.rows, weights, self.window, self.scorer, self.ranks)

    def values(self, nets: tuple, run: Run, step: int, weights: list[float]) -> dict[str, float]:
        """Everything about both networks, the generator with its averaged weights; a table a file beside it."""
        raw = {"pesq_raw": means(self.files(nets, weights))["pesq"]} if run.average.decay else {}
        with run.average.in_place():
            rows = self.files(nets, weights)
            shares = self.shares(nets, weights)
        if self.ranks.first:
            write_table(run.folder / "evaluations" / f"step-{step:08d}.csv", rows)
        found = means(rows) | raw | shares | self.probe.judge(nets[1])
        return found | {"gain_error": abs(found["gain"] - 1), "noisy_pesq": self.noisy["pesq"]}

    def shares(self, nets: tuple, weights: list[float]) -> dict[str, float]:
        few = [side[:2].to(self.ranks.device) for side in (self.probe.noisy, self.probe.clean)]
        return cmgan_watch.term_shares(*nets, *few, weights)


def evaluate(nets: tuple, evaluation: Evaluation | None, run: Run, step: int, extra: dict) -> float | None:
    """Metrics with the averaged weights, if any; returns the score (smaller is better), PESQ and never the loss."""
    if not evaluation:
        return None
    cmgan_watch.require_equal(run.ranks, *nets)
    level = extra["gate"]["level"]
    values = evaluation.values(nets, run, step, run.config.weights_at(level))
    values |= {"gan_level": level, "pesq_invalid": extra["missing"] / max(1, extra["labels"])}
    start_counting_anew(extra)
    run.tracker.event("eval", step, **values)
    say(f"evaluation at step {step}: PESQ {values['pesq']:.3f} (noisy {values['noisy_pesq']:.3f})  STOI"
        f" {values['stoi']:.3f}  SI-SDR {values['si_sdr']:.2f}  gain {values['gain']:.2f}  loss {values['loss']:.4f}"
        f"  D knows PESQ {values['d_pearson']:.2f}  missing labels {values['pesq_invalid']:.1%}")  # fmt: skip
    extra["history"] = [*extra["history"], [values["loss"], values["pesq"]]][-cmgan_watch.LOOK_BACK :]
    for message in cmgan_watch.alarms(values, evaluation.noisy, extra["history"], level):
        run.tracker.event("alarm", step, message=message)
        say(message)
    return -values["pesq"] if np.isfinite(values["pesq"]) else None


def warn_if_worse(extra: dict) -> None:
    """The export is the best of the training's evaluations, which may be worse than where it began."""
    start, best = extra.get("start"), extra["best"]
    if start is not None and best is not None and best > start:
        say(f"warning: PESQ was {-start:.3f} before the training and {-best:.3f} at its best")


def judge_discriminator(gate: cmgan_watch.Gate, evaluation: Evaluation, discriminator, run: Run, step: int) -> None:
    """Lets the GAN term in or out by what the discriminator knows now."""
    message = gate.look(evaluation.probe.judge(discriminator)["d_pearson"])
    if message:
        run.tracker.event("gate", step, message=message)
        say(message)


@torch.no_grad()
def sample(nets: tuple, evaluation: Evaluation, run: Run, step: int) -> None:
    """The first files, enhanced, beside their noisy and clean recordings."""
    nets[0].eval()
    with run.average.in_place():
        for place in range(run.ranks.rank, min(run.config.samples, len(evaluation.rows)), run.ranks.world):
            row = evaluation.rows[place]
            noisy, clean = sounds(evaluation.pairs, row)
            wave = enhance(nets[0], noisy, evaluation.window, run.ranks.device)
            for folder, sound in ((f"step-{step:08d}", wave), ("noisy", noisy), ("clean", clean)):
                facts = {"name": f"file-{place:04d}", "text": evaluation.pairs.id(row)}
                facts |= measured(evaluation.scorer.measure(clean, sound))
                samples.write_wave(run.folder / "samples" / folder, facts, sound, signal.RATE)
    nets[0].train()
    run.tracker.event("sample", step)


def open_test(config, ranks: Ranks) -> PairDataset | None:
    """--test-data, opened before the training that it will judge: a mistake in it must not wait until then."""
    if config.test_data and not config.export:
        raise UserError("--test-data measures the export: not with --no-export.")
    return open_pairs(config.test_data, signal.RATE, config.verify_data, ranks) if config.test_data else None


def test(pairs: PairDataset, run: Run, scorer: Scorer, step: int) -> None:
    """The exported model on the test data. Nothing is chosen by it."""
    all_sum([0.0], run.ranks)  # the first rank's export is there
    generator, discriminator = cmgan_files.load_networks(str(run.folder / "export"))
    generator.to(run.ranks.device), discriminator.to(run.ranks.device)
    window = int(run.config.window_seconds * signal.RATE)
    options = (run.config.weights_at(1.0), window, scorer, run.ranks)
    rows = measure_files(generator, discriminator, pairs, np.arange(len(pairs)), *options)
    values = means(rows)
    if run.ranks.first:
        write_table(run.folder / "evaluations" / "test.csv", rows)
    run.tracker.event("test", step, **values)
    say("test: " + "  ".join(f"{name} {values[name]:.3f}" for name in ("pesq", "csig", "cbak", "covl", "ssnr", "stoi")))


# ---- measuring -------------------------------------------------------------------------------------------------


def sounds(pairs: PairDataset, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean as float32 in -1..1."""
    return tuple(side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))


@torch.no_grad()
def measure_files(
    model, discriminator, pairs: PairDataset, rows, weights: list[float], window: int, scorer: Scorer, ranks: Ranks
) -> list[dict]:
    """Every measure and loss term of every file, once, in order, the same on every rank.

    The losses are of the wave that is heard, so that windows and overlap are part of them.
    """
    model.eval()
    discriminator.eval()
    mine = []
    for place in range(ranks.rank, len(rows), ranks.world):
        still_alive()
        noisy, clean = sounds(pairs, rows[place])
        wave = enhance(model, noisy, window, ranks.device)
        pair = signal.normalise(*(torch.from_numpy(side)[None].to(ranks.device) for side in (noisy, clean)))
        heard = torch.from_numpy(wave)[None].to(ranks.device) * pair.scale[:, None]
        estimate = signal.Estimate(signal.spectrum(heard), heard, pair, signal.spectrum(pair.clean))
        terms = signal.generator_terms(estimate, discriminator)[:, 0].tolist()
        row = {"place": place, "id": pairs.id(rows[place]), "samples": len(clean)}
        row |= {f"loss_{name}": term for name, term in zip(signal.TERMS, terms, strict=True)}
        row["loss"] = sum(weight * term for weight, term in zip(weights, terms, strict=True))
        mine.append((row, scorer.measure(clean, wave)))
    model.train()
    discriminator.train()
    rows_here = [row | measured(score) for row, score in mine]
    return sorted(gather_names(rows_here, ranks), key=lambda row: row["place"])


def measure_noisy(pairs: PairDataset, rows, scorer: Scorer, ranks: Ranks) -> dict[str, float]:
    """The measures of doing nothing."""
    waiting = []
    for place in range(ranks.rank, len(rows), ranks.world):
        noisy, clean = sounds(pairs, rows[place])
        waiting.append((place, scorer.measure(clean, noisy)))
    rows_here = [{"place": place, **measured(score)} for place, score in waiting]
    return means(sorted(gather_names(rows_here, ranks), key=lambda row: row["place"]))


def means(rows: list[dict]) -> dict[str, float]:
    """Mean over the files of every number that is defined; NaN where none is."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    found = {name: np.array([row[name] for row in rows]) for name in names}
    return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in found.items()}


def write_table(path: Path, rows: list[dict]) -> None:
    """One row a file."""
    names = [name for name in rows[0] if name != "place"]
    lines = [",".join(names)] + [",".join(_cell(row[name]) for name in names) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(path)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text
