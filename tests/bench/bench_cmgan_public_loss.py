"""The same small CMGAN trained on the same pairs twice: with the loss of the public training code, and with ours.

    python tests/bench/bench_cmgan_public_loss.py                          # the demo's pairs
    python tests/bench/bench_cmgan_public_loss.py --pairs pairs/train --hold-out p232_02 p232_17

The public code (since May 2023) compares the waveform of the normalised estimate with the clean wave before
normalisation, and trains the discriminator only on batches in which every sound has a PESQ value. Everything else is
equal: initial weights, crops, their order, optimizers, learning rates. The table shows the middle two seconds of the
held-out files: the loss that is being minimised, without its GAN term, and what it does to the sound.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))

import numpy as np
import torch
from demo import ensure_demo

from cmgan import Config, discriminator_loss, loss_terms, loss_weights
from common.keyed_random import generator as keyed
from common.keyed_random import torch_seed
from common.pairs import Crops, PairDataset
from common.runtime import Process
from common.speech_metrics import gain, pesq_wb, si_sdr
from models.cmgan import signal
from models.cmgan.enhance import enhance
from models.cmgan.evaluate import sounds
from models.cmgan.labels import Labelled
from models.cmgan.network import Discriminator, TSCNet, batch_norm_statistics, update_batch_norm

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 2 * signal.RATE
CPU = torch.device("cpu")
ALONE = Process(0, 1, CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, help="dataset of data/pairs.py (default: the demo's pairs)")
    parser.add_argument("--hold-out", nargs="+", default=["dov"], help="id prefixes to evaluate on (default: dov)")
    parser.add_argument("--steps", type=int, default=180, help="optimizer steps of each training (default: 180)")
    parser.add_argument("--every", type=int, default=60, help="steps between evaluations (default: 60)")
    parser.add_argument("--channels", type=int, default=8, help="width of the generator (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a crop (default: 0.6)")
    parser.add_argument("--batch", type=int, default=1, help="crops per step (default: 1)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of the generator (default: 2e-3)")
    args = parser.parse_args()
    folder = args.pairs or ensure_demo(ROOT / "runs" / "demo-assets-pairs", "pairs") / "mild"
    pairs = PairDataset(str(folder), signal.RATE)
    held_out = pairs.rows_starting(args.hold_out)
    crops = Crops(pairs, np.setdiff1d(np.arange(len(pairs)), held_out), args.seconds, seed=0)
    files = [tuple(map(middle, sounds(pairs, row))) for row in held_out]
    noisy = np.mean([measures(clean, noise) for noise, clean in files], axis=0)
    print(f"{len(crops)} clips to train on, {len(files)} held-out; noisy: {describe(noisy)}")
    for name in ("public", "ours"):
        train(name, crops, files, args)


def middle(wave: np.ndarray) -> np.ndarray:
    start = max(0, len(wave) - WINDOW) // 2
    return wave[start : start + WINDOW]


def train(name: str, crops: Crops, files: list, args) -> None:
    torch.manual_seed(torch_seed(0, "weights"))
    generator, discriminator = TSCNet(args.channels), Discriminator(args.channels)
    optimizers = [torch.optim.AdamW(generator.parameters(), lr=args.lr)]
    optimizers += [torch.optim.AdamW(discriminator.parameters(), lr=2 * args.lr)]
    weights, began, skipped = loss_weights(Config(), 1.0), time.process_time(), 0
    for step in range(args.steps + 1):
        if step % args.every == 0:
            loss, scores = evaluate(name, generator, files, weights)
            print(f"{name:6} step {step:4}  loss {loss:.4f}  {describe(scores)}  discriminator's batches skipped"
                  f" {skipped}  CPU {time.process_time() - began:.0f} s", flush=True)  # fmt: skip
        rows = keyed(0, step, "rows").integers(0, len(crops), args.batch)
        batch = crops.batch(rows, epoch=step)
        normalised = signal.normalise(batch["noisy"], batch["clean"])
        torch.manual_seed(torch_seed(0, step, "dropout"))
        estimate = signal.estimate(generator(signal.spectrum(normalised.model_input)), normalised)
        discriminator.requires_grad_(False)
        terms = terms_of(name, estimate, batch["clean"], discriminator)
        sum(weights[term] * value.mean() for term, value in terms.items()).backward()
        discriminator.requires_grad_(True)
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 5.0)
        take_step(optimizers[0])
        update_batch_norm(generator, [batch_norm_statistics(generator)], ALONE)

        estimate = estimate.detach()
        scores = [pesq_wb(c, e)[0] for c, e in zip(batch["clean"].numpy(), estimate.wave.numpy(), strict=True)]
        pesq = torch.tensor(scores, dtype=torch.float32)
        valid = pesq.isfinite().float()
        if name == "public" and not valid.all():
            skipped += 1
            continue
        magnitudes = [signal.magnitude(spec) for spec in (estimate.clean_spec, estimate.spec)]
        labelled = Labelled(magnitudes[0], [magnitudes[1]], [signal.quality(pesq.nan_to_num(1.0))], [valid])
        discriminator_loss(discriminator, (labelled, float(len(rows)), [float(valid.sum())])).loss_sum.backward()
        take_step(optimizers[1])
        discriminator.iterate()


def take_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def terms_of(name: str, estimate: signal.Estimate, clean: torch.Tensor, discriminator) -> dict[str, torch.Tensor]:
    """`clean`: before normalisation, which the public code compares the estimate's wave with."""
    terms = loss_terms(estimate, discriminator)
    return terms | {"time": (estimate.wave - clean).abs().mean(1)} if name == "public" else terms


@torch.no_grad()
def evaluate(name: str, generator: TSCNet, files: list, weights: dict[str, float]) -> tuple[float, np.ndarray]:
    """The loss without its GAN term, and the measures, both as means over the files."""
    generator.eval()
    losses, scores = [], []
    for noisy, clean in files:
        wave = enhance(generator, noisy, WINDOW, CPU)
        pair = signal.normalise(*(torch.from_numpy(side)[None] for side in (noisy, clean)))
        made = torch.from_numpy(wave)[None] * pair.scale[:, None]
        estimate = signal.Estimate(signal.spectrum(made), made, pair, signal.spectrum(pair.clean))
        terms = terms_of(name, estimate, torch.from_numpy(clean)[None], lambda *_: torch.ones(1))
        losses.append(sum(weights[term] * float(value) for term, value in terms.items()))
        scores.append(measures(clean, wave))
    generator.train()
    return float(np.mean(losses)), np.mean(scores, axis=0)


def measures(clean: np.ndarray, wave: np.ndarray) -> list[float]:
    return [pesq_wb(clean, wave)[0], si_sdr(clean, wave), gain(clean, wave)]


def describe(scores: np.ndarray) -> str:
    return "PESQ {:.3f}  SI-SDR {:5.2f} dB  gain {:.2f}".format(*scores)


if __name__ == "__main__":
    main()
