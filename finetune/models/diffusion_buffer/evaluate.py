"""The Diffusion Buffer measured as it will be used: whole held-out files, streamed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import samples, speech_metrics
from common.errors import UserError
from common.evaluation import evaluating
from common.memory import try_in_memory
from common.pairs import PairDataset
from common.runs import Run
from common.runtime import Process, gather_lists, still_alive
from common.scorer import Scorer, measured
from models.diffusion_buffer import signal
from models.diffusion_buffer.data import Clips
from models.diffusion_buffer.enhance import enhance_at
from models.diffusion_buffer.signal import RATE, Spec

SNR_BIN_DB = 5.0  # width of the bins of the input's signal-to-noise ratio
# Files that are streamed together: a GPU is idle with one, and a CPU computes a narrow network twice as fast. The
# published networks take 0.15 GB per file, and are a fifth slower together on a CPU.
FILES_TOGETHER, WIDEST_ON_CPU = 16, 32
METRICS = ("loss", "pesq", "estoi", "si_sdr", "sdr", "lsd")


@dataclass(frozen=True)
class EvalClips:
    """The files to evaluate on, in a fixed order and with keyed noise: every evaluation has the same conditions."""

    pairs: PairDataset
    rows: np.ndarray
    spec: Spec
    seed: int
    scorer: Scorer

    def __len__(self) -> int:
        return len(self.rows)

    def waves(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Noisy and clean samples as float32 in -1..1."""
        noisy, clean = (side(self.rows[index]) for side in (self.pairs.noisy, self.pairs.clean))
        return noisy.astype(np.float32) / 32768, clean.astype(np.float32) / 32768

    def id(self, index: int) -> str:
        return self.pairs.id(self.rows[index])


def evaluated_delays(spec: Spec) -> list[int]:
    """1, 2, 4, ... and the whole buffer; only the whole buffer if the network estimates no clean speech before."""
    if not spec.predicts_clean:
        return [spec.buffer]
    return sorted({min(2**i, spec.buffer) for i in range(spec.buffer.bit_length() + 1)})


def files_together(spec: Spec, device: torch.device) -> int:
    return 1 if device.type == "cpu" and spec.width > WIDEST_ON_CPU else FILES_TOGETHER


def stream_files(network, clips: EvalClips, count: int, delays: list[int], process: Process) -> Iterator[tuple]:
    """(index, noisy, clean, enhanced at each delay) of this rank's share of the first `count` files.

    Some files are streamed together: of similar lengths, so that few of them wait for the longest.
    """
    mine = sorted(range(process.rank, count, process.world), key=lambda index: clips.pairs.samples[clips.rows[index]])
    together = files_together(clips.spec, process.device)
    while mine:
        still_alive()
        indices = mine[:together]
        sides = [clips.waves(index) for index in indices]
        waves = [noisy for noisy, _ in sides]
        with evaluating(network):
            enhanced, problem = try_in_memory(
                lambda waves=waves: enhance_at(network, waves, clips.spec, delays, process.device, seed=clips.seed)
            )
        if problem and together == 1:
            raise UserError(f"streaming {clips.id(indices[0])!r} does not fit into memory ({problem}).")
        if problem:  # this rank alone: it takes part in no collective here
            together = (len(indices) + 1) // 2
            continue
        mine = mine[together:]
        for index, (noisy, clean), made in zip(indices, sides, enhanced, strict=True):
            yield index, noisy, clean, made


def measure_files(network, clips: EvalClips, process: Process) -> list[dict]:
    """One row of metrics per file and delay, where delay 0 is the noisy input; the same on every rank."""
    delays, measuring = evaluated_delays(clips.spec), []
    for index, noisy, clean, enhanced in stream_files(network, clips, len(clips), delays, process):
        file = {"index": index, "id": clips.id(index), "snr": snr_db(noisy, clean)}
        for delay, wave in zip([0, *delays], [noisy, *enhanced], strict=True):
            row = file | {"delay": delay, **wave_metrics(clean, wave, clips.spec)}
            measuring.append((row, clips.scorer.measure(clean, np.nan_to_num(wave))))
    rows = [measured(score) | row for row, score in measuring]
    return sorted(gather_lists(rows, process), key=lambda row: (row["index"], row["delay"]))


def wave_metrics(clean: np.ndarray, wave: np.ndarray, spec: Spec) -> dict[str, float]:
    """What speech_metrics.measure leaves out: SDR, log-spectral distance, and the error that the loss dp trains on."""
    frames = signal.frame_count(len(clean), spec.hop)
    spectra = [signal.whole_spectrum(torch.from_numpy(side), spec, frames) for side in (wave, clean)]
    loss = (spectra[0] - spectra[1]).abs().square().mean()
    return {
        "sdr": speech_metrics.sdr(clean, wave),
        "lsd": speech_metrics.lsd(clean, wave),
        "loss": float(loss),
    }


def snr_db(noisy: np.ndarray, clean: np.ndarray) -> float:
    noise = float(np.square(noisy - clean, dtype=np.float64).sum())
    speech = float(np.square(clean, dtype=np.float64).sum())
    return 10 * math.log10(max(speech, 1e-12) / max(noise, 1e-12))


# ---- summaries of the rows of measure_files --------------------------------------------------------------------


def summarise(rows: list[dict], spec: Spec) -> dict[str, float]:
    """Means over the files at the full delay, next to the noisy input's. `not_finite`: how many outputs are not."""
    enhanced, noisy = (mean_metrics(rows_at(rows, delay)) for delay in (spec.buffer, 0))
    gains = {f"si_sdr_gain_{name}": metrics["si_sdr_gain"] for name, metrics in metrics_by_snr(rows, spec).items()}
    return {
        **enhanced,
        "si_sdr_gain": enhanced["si_sdr"] - noisy["si_sdr"],
        "noisy_si_sdr": noisy["si_sdr"],
        "noisy_pesq": noisy["pesq"],
        "not_finite": float(sum(not np.isfinite(row["loss"]) for row in rows)),
        **gains,
    }


def log_details(rows: list[dict], spec: Spec, run: Run, step: int) -> None:
    """Logs the metrics by input signal-to-noise ratio and by delay, and draws quality against latency."""
    by_snr = metrics_by_snr(rows, spec)
    by_delay = {delay: mean_metrics(rows_at(rows, delay)) for delay in [0, *evaluated_delays(spec)]}
    if run.process.is_main:
        draw_quality(run.folder / "figures" / "quality-latency.png", by_delay, spec)
    run.tracker.event(
        "by_snr", step, **{f"{m}_{name}": metrics[m] for name, metrics in by_snr.items() for m in metrics}
    )
    run.tracker.event(
        "latency", step, **{f"{m}_d{d}": by_delay[d][m] for d in by_delay if d for m in ("si_sdr", "pesq")}
    )


def metrics_by_snr(rows: list[dict], spec: Spec) -> dict[str, dict]:
    """Metrics at the full delay, SI-SDR gain and number of files, by the input's signal-to-noise ratio."""
    noisy = {row["index"]: row["si_sdr"] for row in rows_at(rows, 0)}
    bins = {}
    for row in rows_at(rows, spec.buffer):
        bins.setdefault(int(np.floor(row["snr"] / SNR_BIN_DB) * SNR_BIN_DB), []).append(row)
    return {
        f"{low}_{low + int(SNR_BIN_DB)}dB": mean_metrics(files)
        | {"si_sdr_gain": float(np.mean([row["si_sdr"] - noisy[row["index"]] for row in files])), "files": len(files)}
        for low, files in sorted(bins.items())
    }


def rows_at(rows: list[dict], delay: int) -> list[dict]:
    return [row for row in rows if row["delay"] == delay]


def mean_metrics(rows: list[dict]) -> dict[str, float]:
    """Means over the files for which a metric is defined; NaN if it is for none."""
    columns = {name: np.array([row[name] for row in rows]) for name in METRICS}
    return {name: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for name, v in columns.items()}


def draw_quality(path: Path, by_delay: dict[int, dict], spec: Spec) -> None:
    """Quality against latency; the noisy input as a dashed line."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    delays = [delay for delay in by_delay if delay]
    latencies_ms = [1000 * spec.latency(delay) / RATE for delay in delays]
    figure = Figure(figsize=(12, 3))
    axes = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.18, top=0.89)
    for axis, name in zip(axes, ("si_sdr", "pesq", "estoi"), strict=True):
        axis.plot(latencies_ms, [by_delay[delay][name] for delay in delays], "o-", label="stream")
        axis.axhline(by_delay[0][name], linestyle="--", color="gray", label="noisy")
        axis.set_title(name)
        axis.set_xlabel("latency in ms")
    axes[0].legend()
    figure.savefig(path, dpi=110)


# ---- samples ---------------------------------------------------------------------------------------------------


def sample(network, clips: EvalClips, folder: Path, step: int, count: int, process: Process) -> None:
    """Writes the first `count` files, enhanced, next to their noisy and clean recordings."""
    delays = [clips.spec.buffer]
    for index, noisy, clean, (wave,) in stream_files(network, clips, min(count, len(clips)), delays, process):
        for name, sound in ((f"step-{step:08d}", wave), ("noisy", noisy), ("clean", clean)):
            facts = {"name": f"file-{index:04d}", "text": clips.id(index)}
            facts |= measured(clips.scorer.measure(clean, sound))
            samples.write_wave(folder / "samples" / name, facts, sound, RATE)


# ---- what an export must compute -------------------------------------------------------------------------------


def probe(network, clips: Clips, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The noisy samples of a crop, and what the network makes of them."""
    noisy = clips.batch([(0, 0)])["noisy"].to(device)
    with evaluating(network):
        return {"noisy": noisy}, probe_outputs(network, clips.spec, noisy)


def probe_outputs(network, spec: Spec, noisy: torch.Tensor) -> torch.Tensor:
    """The network's output (frames, 2 F) for a buffer that holds the noisy sound, at the times of a stream."""
    noisy_nfk, t = signal.spectra(noisy, spec), signal.inference_times(spec)
    t_nb, sigma_nb = (torch.from_numpy(v.astype(np.float32))[None].to(noisy.device) for v in (t, signal.sigma(spec, t)))
    times, scales = network.embed(signal.frame_times(spec, t_nb)), signal.output_scales(spec, t_nb, sigma_nb)
    output_nfk = network(noisy_nfk, noisy_nfk, times, scales)
    return torch.view_as_real(output_nfk[0].T.contiguous()).flatten(1)
