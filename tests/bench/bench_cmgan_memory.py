"""One training sample of CMGAN at full size: time and peak memory of the plain form and of ours.

    python tests/bench/bench_cmgan_memory.py [--seconds 2] [--channels 64] [--rounds 3] [--forms plain ours]

The plain form is the published way to write the network: einsum attention over all sequences at once with a gathered
embedding, x * sigmoid(x), every activation kept. Every measurement is a process of its own with one thread; the forms
take turns, so that a busy machine is busy for all of them. Times are the best of the rounds, by the clock and of the
processor; only their ratios mean something.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "finetune"))

FORMS = {
    "plain": (False, False),
    "ours": (True, False),
    "ours, kept activations": (False, False),
    "ours, bf16": (True, True),
}


def plain_forms(network):
    """Replaces the modules' forward passes with the published ones."""
    import torch
    from torch import einsum

    def attention(self, x):
        s, n, dim = x.shape
        q, k, v = (t.view(s, n, 4, -1).transpose(1, 2) for t in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        scale = (dim // 4) ** -0.5
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * scale
        place = torch.arange(n)
        table = self.rel_pos_emb((place[:, None] - place).clamp(-512, 512) + 512)
        dots = dots + einsum("b h n d, n r d -> b h n r", q, table) * scale
        out = einsum("b h i j, b h j d -> b h i d", dots.softmax(-1), v)
        return self.dropout(self.to_out(out.transpose(1, 2).reshape(s, n, dim)))

    def gated(self, x):
        out, gate = x.chunk(2, dim=1)
        return out * gate.sigmoid()

    network.Attention.forward = attention
    network.Swish.forward = lambda self, x: x * x.sigmoid()
    network.Glu.forward = gated


def one(form: str, seconds: float, channels: int) -> None:
    import torch

    from models.cmgan import network, signal

    if form == "plain":
        plain_forms(network)
    torch.manual_seed(0)
    generator, judge = network.TSCNet(channels), network.Discriminator()
    generator.set_compute(*FORMS[form])
    began, used = time.perf_counter(), time.process_time()
    loss = step(generator, judge, signal, seconds)
    took = {"clock": time.perf_counter() - began, "processor": time.process_time() - used}
    print(json.dumps(took | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "loss": loss}))


def step(generator, judge, signal, seconds: float) -> float:
    """Forward and backward of the generator's loss, then of the discriminator's."""
    import torch

    from cmgan import loss_terms

    torch.manual_seed(1)
    pair = signal.normalise(*torch.randn(2, 1, int(seconds * signal.RATE)))
    estimate = signal.estimate(generator(signal.spectrum(pair.noisy)), pair)
    judge.requires_grad_(False)
    loss = sum(term.sum() for term in loss_terms(estimate, judge).values())
    loss.backward()
    judge.requires_grad_(True)
    made = estimate.detach()
    real, fake = signal.magnitude(made.clean_spec), signal.magnitude(made.spec)
    ((judge(real, real) - 1).square() + (judge(real, fake) - 0.5).square()).sum().backward()
    generator.zero_grad(), judge.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--one", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.seconds, args.channels)
        return
    found = {form: [] for form in args.forms}
    for _ in range(args.rounds):
        for form, results in found.items():
            words = [sys.executable, __file__, "--one", form, "--seconds", args.seconds, "--channels", args.channels]
            done = subprocess.run(list(map(str, words)), env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
            if done.returncode:
                sys.exit(f"{form} failed: {done.stderr.decode().strip().splitlines()[-1:]}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"one sample of {args.seconds:g} s, {args.channels} channels, generator and discriminator, fp32 unless said")
    print(f"{'form':24}", *(f"{name:>8} {'x first':>8}" for name in ("clock s", "cpu s", "peak GB")), f"{'loss':>8}")
    first = None
    for form, results in found.items():
        best = {name: min(result[name] for result in results) for name in ("clock", "processor", "peak")}
        first = first or best
        cells = (f"{best[name]:8.2f} {best[name] / first[name]:8.2f}" for name in best)
        print(f"{form:24} {' '.join(cells)} {results[0]['loss']:8.4f}")


if __name__ == "__main__":
    main()
