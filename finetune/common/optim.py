"""Parameter groups, the optimizer, what can be asked of any optimizer, and learning-rate schedules."""

import math
from collections import defaultdict

from common.config import RunConfig
from common.ds_config import offloads_optimizer
from common.errors import UserError

LAST_RATE = 0.1  # the learning rate at the end of a schedule, as a fraction of --lr


def parameter_groups(model, weight_decay: float, no_decay: tuple[str, ...], lr_scale=None) -> list[dict]:
    """Groups of the trainable parameters: matrices with weight decay, everything else without.

    `no_decay`: substrings of names that never decay, such as "embed" or "lora_". `lr_scale`: maps a parameter's name to
    a factor on its learning rate, which its group carries as "lr_scale".
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # ZeRO-3 keeps a parameter's true shape in ds_shape; its own shape is empty while it is partitioned.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            exempt = not is_matrix or any(part in name for part in no_decay)
            groups.setdefault((exempt, lr_scale(name) if lr_scale else 1.0), []).append(parameter)
    assert sum(map(len, groups.values())) == sum(p.requires_grad for p in model.parameters())
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if exempt else weight_decay,
            "lr_scale": scale,
            "name": f"{'no_' if exempt else ''}decay" + (f" x{scale:.4g}" if lr_scale else ""),
        }
        for (exempt, scale), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def build_optimizer(groups: list[dict], config: RunConfig, ds: dict, betas: tuple[float, float] = (0.9, 0.95)):
    """AdamW: torch's fused one, bitsandbytes' with 8-bit states, or DeepSpeed's if the JSON offloads the optimizer.

    Paged states are in memory that the GPU's driver moves to the host while the GPU is full; on a CPU they are not.
    """
    options = {"lr": config.lr, "betas": betas, "eps": 1e-8}
    if offloads_optimizer(ds):
        if config.optimizer != "adamw":
            raise UserError(
                f"{config.ds} offloads the optimizer, which --optimizer {config.optimizer} does not support."
            )
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    if config.optimizer != "adamw":
        try:
            from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
        except ImportError:
            raise UserError(f"--optimizer {config.optimizer} needs bitsandbytes: pip install bitsandbytes.") from None
        return (PagedAdamW8bit if "paged" in config.optimizer else AdamW8bit)(groups, **options)
    from torch.optim import AdamW

    return AdamW(groups, fused=True, **options)


def set_learning_rate(engine, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


# ---- questions to any optimizer --------------------------------------------------------------------------------


def describe_optimizer(optimizer) -> dict:
    """What the optimizer states in a checkpoint mean: a run only resumes with an optimizer of the same description.

    Two implementations of one algorithm, such as AdamW on the GPU and offloaded, have the same description.
    """
    settings = ("betas", "eps", "momentum", "weight_decay", "lr_scale")
    return {
        "state": {name: str(value.dtype) for name, value in optimizer_state(optimizer).items()},
        "groups": [{name: group[name] for name in settings if name in group} for group in optimizer.param_groups],
    }


def optimizer_state(optimizer) -> dict:
    """The tensors that the optimizer keeps per weight, by name, measured on a step of one small parameter.

    Each is a tensor of as many values as the parameter has; scalars such as a step counter are left out.
    """
    import torch

    # bitsandbytes keeps the states of parameters under 4096 values in 32 bits.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else "cpu"
    probe = torch.nn.Parameter(torch.zeros(128, 128, device=device))
    probe.grad = torch.zeros_like(probe)
    # The optimizer itself takes the step, on a parameter that is not its own: a second one could not be built without
    # knowing the constructor's arguments, nor copied where it owns native memory (DeepSpeedCPUAdam).
    own = dict(optimizer.__dict__)
    optimizer.param_groups = [{**own["param_groups"][0], "params": [probe]}]
    optimizer.state = defaultdict(dict)
    try:
        optimizer.step()
        state = optimizer.state[probe]
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(own)
    return {name: value for name, value in state.items() if torch.is_tensor(value) and value.numel() == probe.numel()}


# ---- schedules -------------------------------------------------------------------------------------------------


def warmup_steps(warmup: float, steps: int) -> int:
    """`warmup` below 1 is a fraction of the steps, otherwise a number of optimizer steps."""
    return math.ceil(warmup * steps) if warmup < 1 else min(int(warmup), steps)


def learning_rate(step: int, steps: int, config: RunConfig) -> float:
    """Linear warm-up, then a cosine down to LAST_RATE x --lr at the last step. `step` counts from 0."""
    warm = warmup_steps(config.warmup, steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, steps - 1 - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (LAST_RATE + (1 - LAST_RATE) * cosine)
