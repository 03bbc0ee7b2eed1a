"""LoRA on modules that are named one by one: a group that matches fewer modules than the model has is an error."""

import re

from common.config import UserError


def resolve_groups(model, groups: dict[str, tuple[str, int]], wanted: list[str]) -> dict[str, list[str]]:
    """Module names a group. `groups`: name -> (full-match pattern, how many modules it must match).

    PEFT alone complains only when nothing at all matches: a typo beside a right name passes without a word.
    """
    if not wanted:
        raise UserError(f"no LoRA group is named; there are {', '.join(groups)}.")
    unknown = [name for name in wanted if name not in groups]
    if unknown:
        raise UserError(f"unknown LoRA group {unknown[0]!r}; there are {', '.join(groups)}.")
    names = [name for name, _ in model.named_modules()]
    found = {group: [name for name in names if re.fullmatch(groups[group][0], name)] for group in dict.fromkeys(wanted)}
    wrong = {group: len(hits) for group, hits in found.items() if len(hits) != groups[group][1]}
    if wrong:
        table = ", ".join(f"{group}: found {count}, expected {groups[group][1]}" for group, count in wrong.items())
        raise UserError(f"LoRA groups do not fit this model ({table}); its modules are named differently.")
    return found


def add_lora(model, found: dict[str, list[str]], rank: int, seed: int, group_ranks: dict[str, int], **options):
    """Wraps the named modules with PEFT; returns the PEFT model. Every rank draws the same initial matrices."""
    import torch
    from peft import LoraConfig, get_peft_model

    targets = [name for hits in found.values() for name in hits]
    # PEFT matches rank_pattern keys as regular expressions at the end of a module's name.
    ranks = {
        re.escape(name): group_ranks[group] for group, hits in found.items() if group in group_ranks for name in hits
    }
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, target_modules=targets, rank_pattern=ranks, **options)
    peft_model = get_peft_model(model, config)
    wrapped = {
        name
        for name, module in model.named_modules()
        if len(getattr(module, "lora_A", ())) or len(getattr(module, "lora_embedding_A", ()))
    }
    if wrapped != set(targets):
        raise RuntimeError(f"PEFT wrapped {len(wrapped)} modules instead of the {len(targets)} named ones")
    return peft_model


def base_model(model):
    """The model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
