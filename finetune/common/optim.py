"""Optimizer, its parameter groups and the learning-rate curve."""

import math

from common.config import RunConfig


def parameter_groups(model, weight_decay: float, no_decay: tuple[str, ...], rate_scale=None) -> list[dict]:
    """Groups that partition the trainable parameters: matrices with decay, everything else without.

    `no_decay`: parts of names that never decay, such as "embed" or "lora_". `rate_scale`: from a parameter's name to
    the factor on its learning rate, which its group carries as "lr_scale".
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # ZeRO-3 keeps a parameter's true shape in ds_shape; its own is empty while it is partitioned.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            exempt = not is_matrix or any(part in name for part in no_decay)
            groups.setdefault((exempt, rate_scale(name) if rate_scale else 1.0), []).append(parameter)
    assert sum(map(len, groups.values())) == sum(p.requires_grad for p in model.parameters())
    return [
        {
            "params": found,
            "weight_decay": 0.0 if exempt else weight_decay,
            "lr_scale": scale,
            "name": f"{'no_' if exempt else ''}decay" + (f" x{scale:.4g}" if rate_scale else ""),
        }
        for (exempt, scale), found in sorted(groups.items(), key=lambda item: item[0])
    ]


def build_optimizer(groups: list[dict], config: RunConfig, offload: bool, betas: tuple[float, float] = (0.9, 0.95)):
    """AdamW: torch's fused one, bitsandbytes' 8-bit one, or DeepSpeed's for optimizer offload."""
    options = {"lr": config.lr, "betas": betas, "eps": 1e-8}
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    if config.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    from torch.optim import AdamW

    return AdamW(groups, fused=True, **options)


def warmup_steps(warmup: float, steps: int) -> int:
    """`warmup` below 1 is a share of the steps, otherwise a number of optimizer steps."""
    return math.ceil(warmup * steps) if warmup < 1 else min(int(warmup), steps)


def learning_rate(step: int, steps: int, config: RunConfig) -> float:
    """Linear warm-up, then a cosine down to min_lr_ratio at the last step. `step` counts optimizer steps from 0."""
    warm = warmup_steps(config.warmup, steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, steps - 1 - warm)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def stepped_rate(step: int, steps: int, steps_an_epoch: float, config) -> float:
    """Linear warm-up, then --decay every --decay-epochs; with --schedule cosine as `learning_rate`."""
    if config.schedule == "cosine" or step < warmup_steps(config.warmup, steps):
        return learning_rate(step, steps, config)
    return config.lr * config.decay ** int(step / steps_an_epoch / config.decay_epochs)


def plateau_rate(step: int, steps: int, drops: int, config) -> float:
    """Linear warm-up, then --lr after so many drops; with --schedule cosine as `learning_rate`."""
    if config.schedule == "cosine" or step < warmup_steps(config.warmup, steps):
        return learning_rate(step, steps, config)
    return config.lr * max(config.drop**drops, config.min_lr_ratio)


def judge(state: dict, score: float | None, config) -> bool:
    """Whether this score is the best so far (smaller is better, None is none); --patience worse ones make a drop.

    `state` holds "best", "stale" and "drops", and goes into the checkpoint.
    """
    better = score is not None and (state["best"] is None or score < state["best"])
    state["best"] = score if better else state["best"]
    state["stale"] = 0 if better else state["stale"] + 1
    if state["stale"] >= config.patience:
        state["stale"], state["drops"] = 0, state["drops"] + 1
    return better


def turning_points(rate, steps: int, config) -> list[int]:
    """The steps worth printing of a schedule: the first, the end of the warm-up, up to 20 drops, the last."""
    drops = [step for step in range(1, steps) if rate(step) < rate(step - 1)] if config.schedule == "step" else []
    return sorted({0, max(0, warmup_steps(config.warmup, steps) - 1), *drops[:20], steps - 1})
