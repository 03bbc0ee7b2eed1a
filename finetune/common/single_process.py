"""--no-deepspeed: the part of a DeepSpeed engine that the recipes use, in one process on a CPU, Apple or NVIDIA GPU.

The losses equal those of a DeepSpeed run with one rank. No sharding, no offload, no bf16.
"""

from pathlib import Path

import torch

from common.config import RunConfig
from common.engine import LossModule
from common.errors import UserError
from common.runtime import Process, let_segments_grow

DS = {"zero_optimization": {"stage": 0}}  # all that stage_of, build_optimizer and the memory prediction read


def one_process(config: RunConfig) -> Process:
    """This process as the only rank, on the best device there is."""
    if config.precision != "fp32":
        raise UserError("--no-deepspeed keeps no fp32 master weights next to bf16 ones: add --precision fp32.")
    let_segments_grow()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "mps" if torch.backends.mps.is_available() else "cpu"
    return Process(0, 1, torch.device(device))


class PlainEngine:
    """The methods and attributes of a DeepSpeed engine that the recipes and common/ use, with the same meaning."""

    def __init__(self, module: LossModule, optimizer, config: RunConfig):
        self.module, self.optimizer, self.config = module, optimizer, config
        self.micro_steps = self.global_steps = 0
        self.checkpoint_engine = None  # common/checkpoint.py sets one while it saves

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

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            trained = [p for p in self.module.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, self.config.max_grad_norm)
            self.optimizer.step()
            self.zero_grad()
            self.global_steps += 1
        self.micro_steps += 1

    def save_checkpoint(self, folder: str, tag: str, **_) -> None:
        place = Path(folder) / tag
        place.mkdir(parents=True)
        weights = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.checkpoint_engine.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, place / "plain.pt")

    def load_checkpoint(self, folder: str, tag: str, **_) -> tuple[str, dict]:
        file = Path(folder) / tag / "plain.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        return str(file), {}


def start_engine(model, loss_fn, optimizer, config: RunConfig, process: Process) -> PlainEngine:
    """As engine.start_engine, without DeepSpeed. Parameters are moved to the device in place, so the optimizer that was
    built on them stays valid."""
    return PlainEngine(LossModule(model.to(process.device), loss_fn), optimizer, config)
