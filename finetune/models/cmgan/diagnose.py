"""Checks of a CMGAN model on a user's data and machine: weights, PESQ labels, memory, output, discriminator.

Every line is PASS, WARN or FAIL with its number; one FAIL makes the exit code 2.
"""

import copy
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.memory import peak_memory
from common.pairs import Crops, open_pairs
from common.report import read_records
from common.runtime import Process, say
from common.scorer import Scorer, collect
from common.speech_metrics import pesq_wb
from models.cmgan import signal, watch
from models.cmgan.evaluate import EvalFiles, Evaluation, means, of_outputs
from models.cmgan.network import Discriminator, TSCNet
from models.cmgan.weights import load_networks

PACKAGES = ("torch", "deepspeed", "pesq", "pystoi", "soundfile")
CROPS = 50


class Findings:
    def __init__(self):
        self.failed = []

    def add(self, name: str, value: str, passed: bool, fatal: bool = True) -> None:
        verdict = "PASS" if passed else "FAIL" if fatal else "WARN"
        say(f"{verdict}  {name}: {value}")
        if verdict == "FAIL":
            self.failed.append(name)


def diagnose(
    model: str, config, loss_terms: Callable, weights: dict[str, float], process: Process, scorer: Scorer
) -> None:
    """Runs all checks; raises at the end if one failed. Every rank must call it.

    `model`: a run, a checkpoint, an export or a file of weights; empty: only the checks that need no trained weights.
    `config`: the settings it was trained with, and the data to check it on; `loss_terms`, `weights`: the recipe's.
    """
    findings = Findings()
    say("versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    generator, discriminator = TSCNet(config.channels), None
    if model:
        generator, discriminator = load_networks(model)
        sizes = [sum(p.numel() for p in net.parameters()) for net in (generator, discriminator) if net]
        findings.add("weights", f"{model} loads strictly, {' and '.join(f'{size:,}' for size in sizes)}", True)
        finite = all(value.isfinite().all() for value in generator.state_dict().values())
        findings.add("finite", "every weight and running statistic", bool(finite))
    has_discriminator = discriminator is not None

    path, prefixes = evaluation_data(config)
    pairs = open_pairs(path, signal.RATE, process)
    rows = pairs.rows_starting(prefixes)
    crops = Crops(pairs, rows, config.seconds, config.seed)
    check_labels(findings, crops, scorer)

    networks = [generator, discriminator or Discriminator(generator.channels // 4)]
    networks = [network.to(process.device) for network in networks]
    check_memory(findings, networks, crops, loss_terms, config, process)
    if model:
        evaluation = Evaluation(EvalFiles(pairs, rows, loss_terms, scorer, process), config)
        metrics = means(evaluation.files.measure(*networks, weights)) | evaluation.shares(*networks, weights)
        findings.add("memory of the evaluation", f"the process peaks at {peak_memory(process)}", True)
        check_output(findings, metrics, evaluation.noisy)
        if has_discriminator:
            points = evaluation.probe.judge_outputs(*networks)
            check_discriminator(findings, evaluation.probe.judge(networks[1]) | of_outputs(points), metrics)
        else:
            say("it has no discriminator: its correlation with PESQ and the gradient shares are not checked")
        check_history(findings, Path(model))
    if findings.failed:
        failed = ", ".join(findings.failed)
        raise UserError(f"{model or 'cmgan'}: {len(findings.failed)} checks failed: {failed}.")


def evaluation_data(config) -> tuple[str, list[str]]:
    """A dataset, and the id prefixes to use of it: --eval-data, or what the run held out of --data."""
    if config.eval_data:
        return config.eval_data, [""]
    if config.data:
        return config.data, config.hold_out or [""]
    raise UserError("there are no noisy/clean pairs to check it on: give --eval-data.")


def check_memory(
    findings: Findings, networks: list, crops: Crops, loss_terms: Callable, config, process: Process
) -> None:
    """A step on a whole micro-batch. Runs before the evaluation, because the peak is that of the whole process.

    Works on copies: a forward pass in training mode would change the running statistics that are checked afterwards.
    """
    generator, discriminator = copy.deepcopy(networks)
    generator.set_compute(config.gradient_checkpointing, config.precision == "bf16")
    generator.train()
    batch = crops.batch([number % len(crops) for number in range(config.micro_batch)])
    text = f"one step on {config.micro_batch} crops of {config.seconds:g} s with optimizer states and EMA"
    try:
        # Copies of the size of what a training keeps: two moments per weight, and the EMA.
        kept = [copy.deepcopy(network) for network in (generator, discriminator) for _ in range(2)]
        kept += [copy.deepcopy(generator)] if config.ema else []
        pair = signal.normalise(batch["noisy"].to(process.device), batch["clean"].to(process.device))
        terms = loss_terms(signal.estimate(generator(signal.spectrum(pair.model_input)), pair), discriminator)
        sum(term.sum() for term in terms.values()).backward()
    except torch.OutOfMemoryError:
        findings.add("memory", f"{text} does not fit: use a smaller --micro-batch, with more --accumulation", False)
        return
    del kept
    findings.add("memory", f"{text}: the process peaks at {peak_memory(process)}", True)


def check_labels(findings: Findings, crops: Crops, scorer: Scorer) -> None:
    batches = [crops.batch([number % len(crops)], epoch=number // len(crops)) for number in range(CROPS)]
    clean, noisy = (torch.cat([batch[side] for batch in batches]).numpy() for side in ("clean", "noisy"))
    began = time.monotonic()
    for number in range(4):
        pesq_wb(clean[number], noisy[number])
    alone = (time.monotonic() - began) / 4
    began = time.monotonic()
    pesq, reasons = collect(scorer.pesq(clean, noisy))
    together = (time.monotonic() - began) / CROPS
    valid = np.isfinite(pesq).mean()
    why = ", ".join(sorted({reason for reason in reasons if reason})) or "none missing"
    text = f"{1 - valid:.1%} of {CROPS} crops have none ({why})"
    findings.add("PESQ labels", text, valid >= 0.98, fatal=valid < 0.8)
    text = f"{1000 * alone:.0f} ms alone, {1000 * together:.0f} ms in {scorer.processes} processes"
    findings.add("PESQ speed", text, together < 1.5 * alone, fatal=False)


def check_output(findings: Findings, metrics: dict, noisy: dict) -> None:
    low, high = watch.GAIN_OK
    gain = metrics["gain"]
    findings.add("gain", f"{gain:.3f} ({low} .. {high})", low <= gain <= high, fatal=gain < watch.GAIN_ALARM)
    for name, digits in (("pesq", 3), ("stoi", 3), ("si_sdr", 2), ("ssnr", 2)):
        text = f"{metrics[name]:.{digits}f}, noisy {noisy[name]:.{digits}f}"
        findings.add(name, text, metrics[name] > noisy[name], fatal=False)


def check_discriminator(findings: Findings, judged: dict, metrics: dict) -> None:
    text = f"Pearson {judged['d_pearson']:.2f}, Spearman {judged['d_spearman']:.2f}, MAE {judged['d_mae']:.3f}"
    findings.add("discriminator follows PESQ", text, judged["d_pearson"] >= 0.8, fatal=False)
    text = f"Pearson {judged['d_made_pearson']:.2f}, Spearman {judged['d_made_spearman']:.2f},"
    text += f" mean error {judged['d_made_mae']:.2f} PESQ"
    findings.add("and on the generator's outputs", text, judged["d_made_pearson"] >= 0.5, fatal=False)
    text = f"{judged['d_std']:.3f} of the labels' {judged['label_std']:.3f}; clean scores {judged['d_clean']:.2f}"
    findings.add("discriminator's spread", text, judged["d_std"] > 0.5 * judged["label_std"], fatal=False)
    prefix = "grad_share_"
    shares = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    findings.add("gradient shares", text, max(shares.values()) <= 0.95 and shares["gan"] >= 0.005, fatal=False)


def check_history(findings: Findings, run: Path) -> None:
    """Whether loss and PESQ ever fell together in the evaluations of a run folder."""
    if not (run / "metrics.jsonl").is_file():
        return
    history = [[r["loss"], r["pesq"]] for r in read_records(run / "metrics.jsonl") if r.get("event") == "eval"]
    diverged = [end for end in range(len(history) + 1) if watch.diverging(history[:end])]
    text = f"{len(history)} evaluations, best PESQ {max((pesq for _, pesq in history), default=float('nan')):.3f}"
    text += f", diverging from evaluation {diverged[0]} on" if diverged else ""
    findings.add("loss and PESQ agree", text, not diverged)
