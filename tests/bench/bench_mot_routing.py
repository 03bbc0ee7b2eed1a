"""Routed feed-forward against both experts on all tokens and a mask, forward and backward, interleaved in one run; CPU
seconds, the best of each.

    OMP_NUM_THREADS=1 python tests/bench/bench_mot_routing.py

1024 tokens, 512 wide, Llama's block frozen (intermediate 2048) and a music block of the same cost, trained.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "finetune"))

TOKENS, WIDTH, ROUNDS = 1024, 512, 7


def main() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    from models.mot.network import route_of, routed

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=4 * WIDTH)
    text, audio = LlamaMLP(config).requires_grad_(False), LlamaMLP(config)
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    print(f"{'music':>6} {'mask s':>8} {'routed s':>9} {'mask / routed':>14}")
    for share in (0.5, 0.9, 0.97):
        is_audio = torch.rand(TOKENS) < share
        route = route_of(torch.where(is_audio, 1, 0)[None, :, None], torch.ones(1, TOKENS), vocab=1)
        pick = is_audio[None, :, None]
        sides = {
            "mask": lambda pick=pick: torch.where(pick, audio(x), text(x)),
            "routed": lambda route=route: routed(x, route, text, audio),
        }
        assert torch.allclose(sides["mask"](), sides["routed"](), atol=1e-5)
        times = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, work in sides.items():
                x.grad = None
                audio.zero_grad()
                began = time.process_time()
                work().square().mean().backward()
                times[side].append(time.process_time() - began)
        mask, ours = (min(found) for found in times.values())
        print(f"{share:6.0%} {mask:8.3f} {ours:9.3f} {mask / ours:14.2f}")


if __name__ == "__main__":
    main()
