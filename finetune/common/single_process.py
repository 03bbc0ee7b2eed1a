"""One process without DeepSpeed: what a recipe needs of an engine, on a CPU, an Apple or an NVIDIA GPU.

The losses are those of a DeepSpeed run with one rank; there is no sharding, no offload and no bf16.
"""

from pathlib import Path

import torch

from common.config import RunConfig, UserError
from common.engine import LossModule
from common.optim import build_optimizer, parameter_groups
from common.runtime import Ranks

DS = {"zero_optimization": {"stage": 0}}  # what stage_of and the memory table ask


def one_process(config: RunConfig) -> Ranks:
    if config.precision != "fp32":
        raise UserError("--no-deepspeed has no fp32 masters beside bf16 weights: add --precision fp32.")
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return Ranks(0, 1, torch.device(next(kind for kind, there in kinds.items() if there)))


class PlainEngine:
    """The methods of a DeepSpeed engine that the recipes call, with the same meaning."""

    def __init__(self, module: LossModule, optimizer, config: RunConfig):
        self.module, self.optimizer, self.config, self.micro_steps = module, optimizer, config, 0
        self.checkpoint_engine = None  # common/checkpoint.py lends one

    def __call__(self, batch):
        return self.module(batch)

    def zero_optimization_stage(self) -> int:
        return 0

    def gradient_accumulation_steps(self) -> int:
        return self.config.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.config.accumulation == 0

    def backward(self, loss, scale_wrt_gas: bool = False) -> None:
        loss.backward()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            trained = [p for p in self.module.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, self.config.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_steps += 1

    def save_checkpoint(self, folder: str, tag: str, **_) -> None:
        place = Path(folder) / tag
        place.mkdir(parents=True)
        weights = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.checkpoint_engine.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, place / "plain.pt")

    def load_checkpoint(self, folder: str, tag: str, **_) -> tuple[str, dict]:
        file = Path(folder) / tag / "plain.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        mine = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        return str(file), {}


def start_engine(model, compute_loss, config: RunConfig, ranks: Ranks, no_decay: tuple[str, ...], rate_scale=None):
    """As engine.start_engine, without DeepSpeed."""
    model.to(ranks.device)
    groups = parameter_groups(model, config.weight_decay, no_decay, rate_scale)
    return PlainEngine(LossModule(model, compute_loss), build_optimizer(groups, config, False), config)
