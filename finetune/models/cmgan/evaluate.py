"""Measures CMGAN on whole files that it was not trained on; samples; the test set."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import samples
from common.ema import Ema
from common.evaluation import evaluating
from common.pairs import Crops, PairDataset
from common.runs import Run
from common.runtime import Process, barrier, gather_lists, say, still_alive
from common.scorer import Scorer, measured
from models.cmgan import signal
from models.cmgan.enhance import enhance
from models.cmgan.watch import GanRamp, Probe, agreement, term_shares
from models.cmgan.weights import load_networks

WINDOW = 16 * signal.RATE  # samples; longer recordings are evaluated in overlapping windows


def sounds(pairs: PairDataset, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean as float32 in -1..1."""
    return tuple(side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))


@dataclass
class EvalFiles:
    """Whole files, each measured once, in a fixed order; the ranks share the work, and all get the results."""

    pairs: PairDataset
    rows: np.ndarray
    loss_terms: Callable  # the recipe's: (estimate, discriminator) -> unweighted terms by name
    scorer: Scorer
    process: Process

    @torch.no_grad()
    def measure(self, generator, discriminator, weights: dict[str, float]) -> list[dict]:
        """Speech metrics and loss terms of every file.

        The losses are computed from the final wave, so they include the effect of windows and overlap.
        """
        process = self.process
        generator.eval()
        discriminator.eval()
        pending = []
        for place in range(process.rank, len(self.rows), process.world):
            still_alive()
            noisy, clean = sounds(self.pairs, self.rows[place])
            wave = enhance(generator, noisy, WINDOW, process.device)
            normalised = signal.normalise(*(torch.from_numpy(side)[None].to(process.device) for side in (noisy, clean)))
            output = torch.from_numpy(wave)[None].to(process.device) * normalised.scale[:, None]
            clean_spec = signal.spectrum(normalised.clean)
            estimate = signal.Estimate(signal.spectrum(output), output, normalised, clean_spec)
            terms = {name: term.item() for name, term in self.loss_terms(estimate, discriminator).items()}
            row = {"place": place, "id": self.pairs.id(self.rows[place]), "samples": len(clean)}
            row |= {f"loss_{name}": term for name, term in terms.items()}
            row["loss"] = sum(weights[name] * term for name, term in terms.items())
            pending.append((row, self.scorer.measure(clean, wave)))
        generator.train()
        discriminator.train()
        return self._gather(pending)

    def measure_noisy(self) -> dict[str, float]:
        """Mean speech metrics of the noisy input: what doing nothing scores."""
        pending = []
        for place in range(self.process.rank, len(self.rows), self.process.world):
            noisy, clean = sounds(self.pairs, self.rows[place])
            pending.append(({"place": place}, self.scorer.measure(clean, noisy)))
        return means(self._gather(pending))

    def _gather(self, pending: list[tuple]) -> list[dict]:
        rows = [row | measured(score) for row, score in pending]
        return sorted(gather_lists(rows, self.process), key=lambda row: row["place"])


class Evaluation:
    """The evaluation files, the metrics of their noisy inputs, and the probe of the discriminator."""

    def __init__(self, files: EvalFiles, config):
        self.files = files
        length = int(config.seconds * signal.RATE)
        self.probe = Probe(files.pairs, files.rows, length, config.seed, files.scorer, files.process)
        self.noisy = files.measure_noisy()
        say(f"evaluation on {len(files.rows)} files; the noisy input has PESQ {self.noisy['pesq']:.3f}, STOI"
            f" {self.noisy['stoi']:.3f}, SI-SDR {self.noisy['si_sdr']:.2f} dB")  # fmt: skip

    def metrics(
        self, generator, discriminator, ema: Ema, weights: dict[str, float], table: Path
    ) -> tuple[dict[str, float], list[list[float]]]:
        """All metrics of both networks, the generator with its EMA weights; the metrics per file go to `table`.

        Also what the discriminator predicts for this generator's outputs, and their PESQ: pairs.
        """
        raw = {}
        if ema.decay:
            raw["pesq_raw"] = means(self.files.measure(generator, discriminator, weights))["pesq"]
        with ema.applied():
            rows = self.files.measure(generator, discriminator, weights)
            shares = self.shares(generator, discriminator, weights)
            points = self.probe.judge_outputs(generator, discriminator)
        if self.files.process.is_main:
            write_table(table, rows)
        metrics = means(rows) | raw | shares | self.probe.judge(discriminator) | of_outputs(points)
        return metrics | {"gain_error": abs(metrics["gain"] - 1), "noisy_pesq": self.noisy["pesq"]}, points

    def shares(self, generator, discriminator, weights: dict[str, float]) -> dict[str, float]:
        """Each loss term's share of loss and gradient, on two sounds."""
        two = [side[:2].to(self.files.process.device) for side in (self.probe.noisy, self.probe.clean)]
        return term_shares(generator, discriminator, self.files.loss_terms, weights, *two)


def of_outputs(points: list[list[float]]) -> dict[str, float]:
    """How well the discriminator follows PESQ on the generator's outputs; NaN without any; the error in PESQ."""
    if not points:
        return dict.fromkeys(("d_made_pearson", "d_made_spearman", "d_made_mae"), float("nan"))
    return {name.replace("d_", "d_made_"): value for name, value in agreement(*np.array(points).T).items()}


def log_discriminator(run: Run, step: int, points: list[list[float]], metrics: dict[str, float]) -> None:
    """The event "discriminator" with every point, and a scatter plot of them in samples/discriminator/. The report
    shows the latest, because it is in figures/ too."""
    found = {name: value for name, value in metrics.items() if name.startswith("d_")}
    run.tracker.event("discriminator", step, points=np.round(points, 3).tolist(), **found)
    if run.process.is_main:
        every, latest = f"samples/discriminator/step-{step:08d}.png", "figures/discriminator.png"
        draw_points([run.folder / every, run.folder / latest], points, metrics)


def draw_points(paths: list[Path], points: list[list[float]], metrics: dict[str, float]) -> None:
    """A failure is only a warning."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2, 3.2))
    axis = figure.subplots()
    figure.subplots_adjust(left=0.19, right=0.97, bottom=0.14, top=0.92)
    axis.plot([1, 4.5], [1, 4.5], linewidth=0.8, color="gray")
    axis.plot([pesq for _, pesq in points], [predicted for predicted, _ in points], "o", markersize=3, alpha=0.7)
    axis.set(xlim=(0.9, 4.7), ylim=(0.9, 4.7), xlabel="PESQ of the output", ylabel="predicted")
    axis.set_title(f"correlation {metrics['d_made_pearson']:.2f}, probe {metrics['d_pearson']:.2f}", fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=80)
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.getvalue())
        except OSError as error:
            print(f"warning: {path} could not be written: {error}", flush=True)


def judge_discriminator(gan_ramp: GanRamp, evaluation: Evaluation, discriminator, run: Run, step: int) -> None:
    """Enables or disables the GAN loss, depending on how well the discriminator follows PESQ now."""
    message = gan_ramp.observe(evaluation.probe.judge(discriminator)["d_pearson"])
    if message:
        run.tracker.event("gan_gate", step, message=message)
        say(message)


def warn_if_worse(run: Run) -> None:
    """The exported checkpoint is the best one of the training, which may still be worse than the start."""
    start = run.first_eval().get("pesq")
    if start is not None and run.best and -run.best["score"] < start:
        say(f"warning: PESQ was {start:.3f} before the training and {-run.best['score']:.3f} at its best")


@torch.no_grad()
def sample(generator, evaluation: Evaluation, run: Run, ema: Ema, step: int) -> None:
    """Writes the first files, enhanced, next to their noisy and clean recordings."""
    files, process = evaluation.files, run.process
    generator.eval()
    with ema.applied():
        for place in range(process.rank, min(run.config.samples, len(files.rows)), process.world):
            row = files.rows[place]
            noisy, clean = sounds(files.pairs, row)
            wave = enhance(generator, noisy, WINDOW, process.device)
            for folder, sound in ((f"step-{step:08d}", wave), ("noisy", noisy), ("clean", clean)):
                facts = {"name": f"file-{place:04d}", "text": files.pairs.id(row)}
                facts |= measured(files.scorer.measure(clean, sound))
                samples.write_wave(run.folder / "samples" / folder, facts, sound, signal.RATE)
    generator.train()
    run.tracker.event("sample", step)


def test(files: EvalFiles, weights: dict[str, float], run: Run, step: int) -> None:
    """Measures the exported model on the test files. Nothing is selected by it."""
    barrier(run.process)  # the main rank has written the export
    networks = [network.to(run.process.device) for network in load_networks(str(run.folder / "export"))]
    rows = files.measure(*networks, weights)
    metrics = means(rows)
    if run.process.is_main:
        write_table(run.folder / "evaluations" / "test.csv", rows)
    run.tracker.event("test", step, **metrics)
    names = ("pesq", "ssnr", "stoi")
    say("test: " + "  ".join(f"{name} {metrics[name]:.3f}" for name in names))


def means(rows: list[dict]) -> dict[str, float]:
    """Mean over the files of every number, ignoring NaN; NaN where no file has a value."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in columns.items()}


def write_table(path: Path, rows: list[dict]) -> None:
    """A CSV file with one line per evaluation file."""
    names = [name for name in rows[0] if name != "place"]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({k: f"{value:.6g}" if isinstance(value, float) else value for k, value in row.items()})
    draft.replace(path)


# ---- what an export must compute -------------------------------------------------------------------------------


def probe(generator, clips: Crops, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The noisy samples of a crop, and what the generator makes of them."""
    noisy = clips.batch([0])["noisy"].to(device)
    with evaluating(generator):
        return {"noisy": noisy}, probe_outputs(generator, noisy)


def probe_outputs(generator, noisy: torch.Tensor) -> torch.Tensor:
    """The estimated spectrum, (frames, 2 F)."""
    estimate_b2tf = generator(signal.spectrum(signal.normalise(noisy, noisy).model_input))
    return estimate_b2tf[0].transpose(0, 1).flatten(1).float()
