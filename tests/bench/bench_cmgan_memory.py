"""One training sample of CMGAN at full size: time and peak memory of the plain form and of ours.

    python tests/bench/bench_cmgan_memory.py [--seconds 2] [--channels 64] [--rounds 2]

The plain form is the published way to write the network: einsum attention over all sequences at once with a gathered
embedding, x * sigmoid(x), every activation kept. Each form runs in a process of its own; times are the best of the
rounds, and only their ratio means something.
"""

import argparse
import json
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


def plain_forms(cmgan):
    """Puts the published way of writing into the modules."""
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

    cmgan.Attention.forward = attention
    cmgan.Swish.forward = lambda self, x: x * x.sigmoid()
    cmgan.Glu.forward = gated


def one(form: str, seconds: float, channels: int, rounds: int) -> None:
    import torch

    from models import cmgan
    from models import cmgan_signal as signal

    if form == "plain":
        plain_forms(cmgan)
    torch.manual_seed(0)
    generator, judge = cmgan.TSCNet(channels), cmgan.Discriminator()
    generator.set_compute(*FORMS[form])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    noisy, clean = torch.randn(2, 1, int(seconds * signal.RATE))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        pair = signal.normalise(noisy, clean)
        estimate = signal.estimate(generator(signal.spectrum(pair.noisy)), pair)
        judge.requires_grad_(False)
        loss = signal.generator_terms(estimate, judge).sum()
        loss.backward()
        judge.requires_grad_(True)
        made = estimate.detach()
        real, fake = signal.magnitude(made.clean_spec), signal.magnitude(made.spec)
        ((judge(real, real) - 1).square() + (judge(real, fake) - 0.5).square()).sum().backward()
        times.append(time.perf_counter() - began)
        generator.zero_grad(), judge.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": min(times), "peak": peak, "before": before, "loss": loss.item()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--form", choices=FORMS)
    args = parser.parse_args()
    if args.form:
        one(args.form, args.seconds, args.channels, args.rounds)
        return
    print(f"one sample of {args.seconds:g} s, {args.channels} channels, generator and discriminator, fp32 unless said")
    print(f"{'form':24} {'s':>8} {'x plain':>8} {'peak GB':>8} {'x plain':>8} {'loss':>9}")
    plain = None
    for form in FORMS:
        words = [sys.executable, __file__, "--form", form, "--seconds", args.seconds, "--channels", args.channels]
        done = subprocess.run([*map(str, words), "--rounds", str(args.rounds)], capture_output=True, text=True)
        if done.returncode:
            print(f"{form:24} failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        plain = plain or found
        ratios = found["seconds"] / plain["seconds"], found["peak"] / plain["peak"]
        print(f"{form:24} {found['seconds']:8.2f} {ratios[0]:8.2f} {found['peak']:8.2f} {ratios[1]:8.2f}"
              f" {found['loss']:9.4f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
