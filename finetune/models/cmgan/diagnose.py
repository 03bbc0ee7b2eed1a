"""Checks of a CMGAN model on a user's data and machine: weights, PESQ labels, memory, output, discriminator.

Every line is PASS, WARN or FAIL with its number; one FAIL makes the exit code 2.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch

from common.errors import UserError
from common.memory import out_of_memory, peak_memory
from common.pairs import Crops, open_pairs
from common.runtime import Process, say
from common.scorer import Scorer, collect
from models.cmgan import signal, watch
from models.cmgan.evaluate import EvalFiles, Evaluation, means, of_outputs
from models.cmgan.network import Discriminator, TSCNet
from models.cmgan.weights import load_networks

CROPS = 50  # whose PESQ is tried


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
    if not (config.eval_data or config.data):
        raise UserError("there are no noisy/clean pairs to check it on: give --eval-data.")
    findings = Findings()
    generator, discriminator = load_networks(model) if model else (TSCNet(config.channels), None)
    if model:
        size = sum(p.numel() for p in generator.parameters())
        finite = all(bool(value.isfinite().all()) for value in generator.state_dict().values())
        text = f"{model} holds {size:,} weights" + ("" if finite else ", not all of them finite")
        findings.add("weights", text, finite)
    pairs = open_pairs(config.eval_data or config.data, signal.RATE, process)
    rows = np.arange(len(pairs)) if config.eval_data else pairs.rows_starting(config.hold_out or [""])
    crops = Crops(pairs, rows, config.seconds, config.seed)
    check_labels(findings, crops, scorer)
    networks = [generator, discriminator or Discriminator(generator.channels // 4)]
    networks = [network.to(process.device) for network in networks]
    check_memory(findings, networks, crops, loss_terms, config, process)
    if model:
        evaluation = Evaluation(EvalFiles(pairs, rows, loss_terms, scorer, process), config)
        check_output(findings, means(evaluation.files.measure(*networks, weights)), evaluation.noisy)
        if discriminator:
            points = evaluation.probe.judge_outputs(*networks)
            check_discriminator(findings, evaluation.probe.judge(discriminator) | of_outputs(points))
        else:
            say("it has no discriminator, whose correlation with PESQ is not checked")
    if findings.failed:
        raise UserError(f"{model or 'cmgan'}: some checks failed: {', '.join(findings.failed)}.")


def check_labels(findings: Findings, crops: Crops, scorer: Scorer) -> None:
    batches = [crops.batch([number % len(crops)], epoch=number // len(crops)) for number in range(CROPS)]
    clean, noisy = (torch.cat([batch[side] for batch in batches]).numpy() for side in ("clean", "noisy"))
    pesq, reasons = collect(scorer.pesq(clean, noisy))
    valid = np.isfinite(pesq).mean()
    why = ", ".join(sorted({reason for reason in reasons if reason})) or "none missing"
    findings.add("PESQ labels", f"{1 - valid:.1%} of {CROPS} crops have none ({why})", valid >= 0.98, fatal=valid < 0.8)


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
    text = f"a step of --micro-batch {config.micro_batch} on crops of {config.seconds:g} s"
    try:
        # Copies of the size of what a training keeps: two moments per weight, and the EMA.
        kept = [copy.deepcopy(network) for network in (generator, discriminator) for _ in range(2)]
        kept += [copy.deepcopy(generator)] if config.ema else []
        pair = signal.normalise(batch["noisy"].to(process.device), batch["clean"].to(process.device))
        terms = loss_terms(signal.estimate(generator(signal.spectrum(pair.model_input)), pair), discriminator)
        sum(term.sum() for term in terms.values()).backward()
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error)
        if not message:
            raise
        findings.add("memory", f"{text} does not fit ({message}): lower --micro-batch", False)
        return
    del kept
    findings.add("memory", f"{text} fits; the process peaks at {peak_memory(process)}", True)


def check_output(findings: Findings, metrics: dict, noisy: dict) -> None:
    low, high = watch.GAIN_OK
    gain = metrics["gain"]
    findings.add("gain", f"{gain:.3f} ({low} .. {high})", low <= gain <= high, fatal=gain < watch.GAIN_ALARM)
    for name, digits in (("pesq", 3), ("stoi", 3), ("si_sdr", 2), ("ssnr", 2)):
        text = f"{metrics[name]:.{digits}f}, noisy {noisy[name]:.{digits}f}"
        findings.add(name, text, metrics[name] > noisy[name], fatal=False)


def check_discriminator(findings: Findings, judged: dict) -> None:
    for name, prefix, least in (("on noisy speech", "d_", 0.8), ("on the generator's outputs", "d_made_", 0.5)):
        pearson, spearman = judged[f"{prefix}pearson"], judged[f"{prefix}spearman"]
        text = f"Pearson {pearson:.2f}, Spearman {spearman:.2f}"
        findings.add(f"discriminator follows PESQ {name}", text, pearson >= least, fatal=False)
