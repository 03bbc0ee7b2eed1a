"""The Diffusion Buffer judged as it will be used: whole files it was not trained on, through the stream."""

from pathlib import Path

import numpy as np
import torch

from common import samples
from common import speech_metrics as speech
from common.pairs import PairDataset
from common.runs import Run
from common.runtime import Ranks, gather_names, say, still_alive
from common.scorer import Scorer, measured
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import snr_db
from models.diffusion_buffer.enhance import enhance_at
from models.diffusion_buffer.signal import RATE, Spec

BIN_DB = 5.0  # width of the bins of the input's signal-to-noise ratio
SHOWN = ("pesq", "estoi", "si_sdr", "sdr", "lsd")
HIGHER_IS_BETTER = {"pesq": True, "estoi": True, "si_sdr": True, "sdr": True, "lsd": False, "loss": False}


def delays_of(spec: Spec) -> list[int]:
    """1, 2, 4, ... and the whole buffer; only that where a network gives no clean speech before."""
    if not spec.predicts_clean:
        return [spec.buffer]
    return sorted({min(2**i, spec.buffer) for i in range(spec.buffer.bit_length() + 1)})


class Evaluation:
    """Held-out files, each once, in a fixed order, with keyed noise: the same numbers every time."""

    def __init__(self, pairs: PairDataset, rows: np.ndarray, spec: Spec, config, scorer: Scorer, ranks: Ranks):
        self.pairs, self.rows, self.spec, self.config, self.scorer, self.ranks = (
            pairs,
            rows,
            spec,
            config,
            scorer,
            ranks,
        )
        self.delays = delays_of(spec)

    @torch.no_grad()
    def files(self, network) -> list[dict]:
        """One row a file and delay, the noisy input as delay 0; the same on every rank."""
        was_training = network.training
        network.eval()
        mine = []
        for place in range(self.ranks.rank, len(self.rows), self.ranks.world):
            still_alive()
            noisy, clean = sounds(self.pairs, self.rows[place])
            facts = {"place": place, "id": self.pairs.id(self.rows[place]), "snr": snr_db(noisy, clean)}
            waves = enhance_at(network, noisy, self.spec, self.delays, self.ranks.device, seed=self.config.seed)
            for delay, wave in zip([0, *self.delays], [noisy, *waves], strict=True):
                facts = facts | {"delay": delay, **own_measures(clean, wave, self.spec)}
                mine.append((facts, self.scorer.measure(clean, np.nan_to_num(wave))))
        network.train(was_training)
        rows = [{**measured(score), **facts} for facts, score in mine]
        return sorted(gather_names(rows, self.ranks), key=lambda row: (row["place"], row["delay"]))


def own_measures(clean: np.ndarray, wave: np.ndarray, spec: Spec) -> dict[str, float]:
    """What common.speech.measure leaves out: SDR, log-spectral distance, and the error that DP trains on."""
    frames = signal.frame_count(len(clean), spec.hop)
    error = [signal.whole_spectrum(torch.from_numpy(side), spec, frames) for side in (wave, clean)]
    loss = (error[0] - error[1]).abs().square().mean()
    return {"sdr": speech.sdr(clean, wave), "lsd": speech.lsd(clean, wave), "loss": float(loss)}


def evaluate(network, evaluation: Evaluation | None, run: Run, step: int) -> float | None:
    """Logs the averaged network's metrics; returns the score of --best-by, smaller is better."""
    if not evaluation:
        return None
    with run.average.in_place():
        rows = evaluation.files(network)
    spec = evaluation.spec
    at = {delay: mean_of([row for row in rows if row["delay"] == delay]) for delay in [0, *evaluation.delays]}
    last, noisy = at[spec.buffer], at[0]
    values = {name: last[name] for name in ("loss", *SHOWN)}
    values |= {"si_sdr_gain": last["si_sdr"] - noisy["si_sdr"], "noisy_pesq": noisy["pesq"]}
    values |= {"not_finite": float(sum(not np.isfinite(row["loss"]) for row in rows))}
    bins = by_snr(rows, spec.buffer)
    values |= {f"si_sdr_gain_{name}": found["si_sdr_gain"] for name, found in bins.items()}
    run.tracker.event("eval", step, **values)
    say(f"evaluation at step {step}: SI-SDR {last['si_sdr']:.2f} dB (noisy {noisy['si_sdr']:.2f})  PESQ"
        f" {last['pesq']:.3f} (noisy {noisy['pesq']:.3f})  ESTOI {last['estoi']:.3f}  LSD {last['lsd']:.2f} dB"
        f"  loss {last['loss']:.5f}")  # fmt: skip
    if run.ranks.first:
        draw_curve(run.folder / "figures" / "quality-latency.png", at, spec)
    run.tracker.event("by_snr", step, **{f"{m}_{name}": found[m] for name, found in bins.items() for m in found})
    run.tracker.event("latency", step, **{f"{m}_d{d}": at[d][m] for d in evaluation.delays for m in ("si_sdr", "pesq")})
    score = values[evaluation.config.best_by]
    if not np.isfinite(score) or values["not_finite"]:
        return None
    return shown_score(score, evaluation.config.best_by)


def shown_score(score: float, metric: str) -> float:
    """From a metric to a score, of which the smaller is better, and back."""
    return -score if HIGHER_IS_BETTER[metric] else score


def by_snr(rows: list[dict], delay: int) -> dict[str, dict]:
    """All metrics, the SI-SDR gained and the number of files, by the bin of the input's signal-to-noise ratio."""
    noisy = {row["place"]: row["si_sdr"] for row in rows if row["delay"] == 0}
    bins = {}
    for row in rows:
        if row["delay"] == delay:
            bins.setdefault(int(np.floor(row["snr"] / BIN_DB) * BIN_DB), []).append(row)
    return {
        f"{low}_{low + int(BIN_DB)}dB": mean_of(found)
        | {"si_sdr_gain": float(np.mean([row["si_sdr"] - noisy[row["place"]] for row in found])), "files": len(found)}
        for low, found in sorted(bins.items())
    }


def mean_of(rows: list[dict]) -> dict[str, float]:
    found = {name: np.array([row[name] for row in rows]) for name in ("loss", *SHOWN)}
    return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in found.items()}


def draw_curve(path: Path, at: dict[int, dict], spec: Spec) -> None:
    """Quality against latency; the noisy input as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    delays = [delay for delay in at if delay]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    for axis, name in zip(axes, ("si_sdr", "pesq", "estoi"), strict=True):
        axis.plot([1000 * spec.latency(d) / RATE for d in delays], [at[d][name] for d in delays], "o-", label="stream")
        axis.axhline(at[0][name], linestyle="--", color="gray", label="noisy")
        axis.set_title(name)
        axis.set_xlabel("latency in ms")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@torch.no_grad()
def sample(network, evaluation: Evaluation, run: Run, step: int) -> None:
    """The first files, enhanced, beside their noisy and clean recordings."""
    network.eval()
    with run.average.in_place():
        for place in range(run.ranks.rank, min(run.config.samples, len(evaluation.rows)), run.ranks.world):
            row, spec = evaluation.rows[place], evaluation.spec
            noisy, clean = sounds(evaluation.pairs, row)
            (wave,) = enhance_at(network, noisy, spec, [spec.buffer], run.ranks.device, seed=run.config.seed)
            for folder, sound in ((f"step-{step:08d}", wave), ("noisy", noisy), ("clean", clean)):
                facts = {"name": f"file-{place:04d}", "text": evaluation.pairs.id(row)}
                facts |= measured(evaluation.scorer.measure(clean, sound))
                samples.write_wave(run.folder / "samples" / folder, facts, sound, RATE)
    network.train()
    run.tracker.event("sample", step)


def sounds(pairs: PairDataset, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy and clean as float32 in -1..1."""
    return tuple(side(row).astype(np.float32) / 32768 for side in (pairs.noisy, pairs.clean))
