"""python finetune/cmgan.py --diagnose DIR: what the loss, the labels, the discriminator and the machine are worth.

Every line is PASS, WARN or FAIL with its number; one FAIL makes the exit code 2.
"""

import copy
import importlib.metadata
import json
import time
from pathlib import Path

import numpy as np
import torch

from common.config import UserError
from common.pairs import Crops, open_pairs
from common.report import read_records
from common.runtime import Ranks, memory_gb, say
from common.scorer import Scorer, collect
from common.speech_metrics import pesq_wb
from models.cmgan import evaluate as cmgan_evaluate
from models.cmgan import signal
from models.cmgan import watch as cmgan_watch
from models.cmgan import weights as cmgan_files
from models.cmgan.network import Discriminator

PACKAGES = ("torch", "deepspeed", "pesq", "pystoi", "soundfile")
LENGTHS = (31_999, 32_000, 32_050, 35_184)
CROPS = 50
# Of the run that is checked; everything else is the flags'.
OF_THE_RUN = ("seconds", "probe", "window_seconds", "w_ri", "w_mag", "w_time", "w_gan", "precision")


class Findings:
    def __init__(self):
        self.failed = []

    def add(self, name: str, value: str, passed: bool, fatal: bool = True) -> None:
        word = "PASS" if passed else "FAIL" if fatal else "WARN"
        say(f"{word}  {name}: {value}")
        if word == "FAIL":
            self.failed.append(name)


def diagnose(config, ranks: Ranks, scorer: Scorer) -> None:
    """All checks; raises at the end if one failed. Every rank must call it."""
    found = Findings()
    say("versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    generator, discriminator = cmgan_files.load_networks(config.diagnose)
    sizes = [sum(p.numel() for p in net.parameters()) for net in (generator, discriminator) if net]
    found.add("weights", f"{config.diagnose} loads strictly, {' and '.join(f'{size:,}' for size in sizes)}", True)
    finite = all(value.isfinite().all() for value in generator.state_dict().values())
    found.add("finite", "every weight and running statistic", bool(finite))

    path, held_out = take_from_run(config)
    pairs = open_pairs(path, signal.RATE, config.verify_data, ranks)
    rows = pairs.rows_starting(held_out or [""])[: config.eval_files or None]
    crops = Crops(pairs, rows, config.seconds, config.seed)
    batch = crops.batch(range(min(4, len(crops))))
    check_losses(found, batch)
    check_labels(found, crops, scorer)

    missing = discriminator is None
    nets = (generator.to(ranks.device), (discriminator or Discriminator(config.disc_channels)).to(ranks.device))
    check_memory(found, nets, batch, config, ranks)
    judge = cmgan_evaluate.Evaluation(pairs, rows, config, scorer, ranks)
    weights = config.weights_at(1.0)
    values = cmgan_evaluate.means(judge.files(nets, weights)) | judge.shares(nets, weights)
    check_output(found, values, judge.noisy)
    if missing:
        say("no discriminator in it: what it knows of PESQ and the shares of the GAN term are not checked")
    else:
        check_discriminator(found, judge.probe.judge(nets[1]), values)
    check_history(found, Path(config.diagnose))
    if ranks.world > 1:
        cmgan_watch.require_equal(ranks, *nets)
        found.add("ranks", f"{ranks.world} ranks loaded the same networks", True)
    if found.failed:
        raise UserError(f"--diagnose {config.diagnose}: {len(found.failed)} checks failed: {', '.join(found.failed)}.")


def take_from_run(config) -> tuple[str, list[str]]:
    """Sets the config to what the run was trained with, where that is known. --eval-data, or what the run was
    evaluated on: a dataset, and how the ids of it start."""
    for folder in (Path(config.diagnose), *Path(config.diagnose).parents[:2]):
        if (folder / "metrics.jsonl").is_file() and (folder / "config.json").is_file():
            used = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
            for name in OF_THE_RUN:
                setattr(config, name, used[name])
            if path := config.eval_data or used["eval_data"]:
                return path, []
            return used["data"], used["hold_out"]
    if config.eval_data:
        return config.eval_data, []
    raise UserError("--diagnose needs pairs to listen to: give --eval-data.")


def check_losses(found: Findings, batch: dict) -> None:
    terms = cmgan_watch.perfect_terms(batch["noisy"], batch["clean"])
    words = ", ".join(f"{name} {value:.2g}" for name, value in terms.items())
    found.add(
        "perfect estimate", f"{words} (each below {cmgan_watch.PERFECT:g})", max(terms.values()) < cmgan_watch.PERFECT
    )
    wrong = []
    for length in LENGTHS:
        wave = torch.randn(1, length)
        back = signal.wave_of(signal.spectrum(wave), length)
        if back.shape != wave.shape or float((back - wave).abs().max()) > 1e-3:
            wrong.append(length)
    found.add(
        "lengths", f"{', '.join(map(str, LENGTHS))} samples come back whole" if not wrong else str(wrong), not wrong
    )


def check_memory(found: Findings, nets: tuple, batch: dict, config, ranks: Ranks) -> None:
    """Before anything larger than a crop went through the networks: the peak is of the whole process. On copies: a
    forward in training mode would change the running statistics that are judged afterwards."""
    nets = copy.deepcopy(nets)
    nets[0].set_compute(config.gradient_checkpointing, config.precision == "bf16")
    pair = signal.normalise(batch["noisy"][:1].to(ranks.device), batch["clean"][:1].to(ranks.device))
    nets[0].train()
    signal.generator_terms(signal.estimate(nets[0](signal.spectrum(pair.noisy)), pair), nets[1]).sum().backward()
    peak = ", ".join(f"{value:.2f} GB ({name})" for name, value in memory_gb(ranks).items())
    found.add("memory", f"one crop of {config.seconds:g} s forward and backward: the process peaks at {peak}", True)


def check_labels(found: Findings, crops: Crops, scorer: Scorer) -> None:
    batches = [crops.batch([number % len(crops)], epoch=number // len(crops)) for number in range(CROPS)]
    clean, noisy = (torch.cat([batch[side] for batch in batches]).numpy() for side in ("clean", "noisy"))
    began = time.monotonic()
    for number in range(4):
        pesq_wb(clean[number], noisy[number])
    alone = (time.monotonic() - began) / 4
    began = time.monotonic()
    values, reasons = collect(scorer.pesq(clean, noisy))
    together = (time.monotonic() - began) / CROPS
    missing = 1 - np.isfinite(values).mean()
    why = ", ".join(sorted({reason for reason in reasons if reason})) or "none missing"
    found.add("PESQ labels", f"{missing:.1%} of {CROPS} crops have none ({why})", missing <= 0.02, fatal=missing > 0.2)
    words = f"{1000 * alone:.0f} ms alone, {1000 * together:.0f} ms in {scorer.processes} processes"
    found.add("PESQ speed", words, together < 1.5 * alone, fatal=False)


def check_output(found: Findings, values: dict, noisy: dict) -> None:
    low, high = cmgan_watch.GAIN_OK
    gain = values["gain"]
    found.add("gain", f"{gain:.3f} ({low} .. {high})", low <= gain <= high, fatal=gain < cmgan_watch.GAIN_ALARM)
    for name, digits in (("pesq", 3), ("stoi", 3), ("si_sdr", 2), ("ssnr", 2)):
        words = f"{values[name]:.{digits}f}, noisy {noisy[name]:.{digits}f}"
        found.add(name, words, values[name] > noisy[name], fatal=False)


def check_discriminator(found: Findings, known: dict, values: dict) -> None:
    words = f"Pearson {known['d_pearson']:.2f}, Spearman {known['d_spearman']:.2f}, MAE {known['d_mae']:.3f}"
    found.add("discriminator knows PESQ", words, known["d_pearson"] >= 0.8, fatal=False)
    spread = f"{known['d_std']:.3f} of the labels' {known['label_std']:.3f}; clean scores {known['d_clean']:.2f}"
    found.add("discriminator's spread", spread, known["d_std"] > 0.5 * known["label_std"], fatal=False)
    shares = {name: values[f"grad_share_{name}"] for name in signal.TERMS}
    words = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    found.add("gradient shares", words, max(shares.values()) <= 0.95 and shares["gan"] >= 0.005, fatal=False)


def check_history(found: Findings, run: Path) -> None:
    """The evaluations of a run folder: did loss and PESQ ever fall together?"""
    if not (run / "metrics.jsonl").is_file():
        return
    history = [[r["loss"], r["pesq"]] for r in read_records(run / "metrics.jsonl") if r.get("event") == "eval"]
    bad = [end for end in range(len(history) + 1) if cmgan_watch.diverging(history[:end])]
    words = f"{len(history)} evaluations, best PESQ {max((pesq for _, pesq in history), default=float('nan')):.3f}"
    found.add("loss and PESQ agree", words + (f", apart from evaluation {bad[0]} on" if bad else ""), not bad)
