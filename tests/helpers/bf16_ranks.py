"""The language-model recipes in bf16: long batches, what ranks compute on them, and the training loop they must follow.

`prepare` builds a recipe's model and clips as its train() does, with or without DeepSpeed.
"""

import contextlib
import functools
import importlib
import inspect
import json
import zlib
from pathlib import Path

import numpy as np
import torch

from common import engine, optim
from common.ds_config import resolve_ds
from common.lora import base_model
from common.plan import Plan
from common.runtime import Process
from helpers import support

NO_DEEPSPEED = {"zero_optimization": {"stage": 0}}


def prepare(recipe: str, config, ds: dict, process: Process):
    """The recipe's loss function, model and training clips."""
    module = importlib.import_module(recipe)
    if recipe == "llama_mot":
        model = module.build_model(config, ds)
        clips = module.build_data(config.data, model, module.Tokenizer(config.model), config, process, train=True)
        module.init_adapter(model, config, clips)
    elif recipe == "higgs_clone":
        model = module.build_model(config, ds)
        tokenizer = module.load_tokenizer(config.model, config.revision)
        layout = module.layout_of(base_model(model).config, tokenizer)
        clips = module.build_data(config.data, layout, module.Chat(tokenizer), config, process, train=True)
    else:
        model = module.build_model(config, ds, {})
        clips = module.build_data(config.data, model, config, {}, process, train=True)
    takes_clips = "clips" in inspect.signature(module.compute_loss).parameters
    return functools.partial(module.compute_loss, **({"clips": clips} if takes_clips else {})), model, clips


# ---- sequences as long as real ones ------------------------------------------------------------------------------


def long_tokens(recipe: str, folder: Path) -> Path:
    """A clip about as long as a real recording: over 1,900 positions in every recipe's layout."""
    draw = np.random.default_rng(0)

    def clips(frames, channels, size, text):
        return [
            {"id": f"clip{i}", "text": text, "codes": draw.integers(0, size, (n, channels))}
            for i, n in enumerate(frames)
        ]

    text = "[S1] bada gumi. " * 12
    if recipe == "higgs_clone":
        info = {"codec": "higgs", "sample_rate": 24000, "hop": 960, "codebooks": 8, "channels": 8}
        return support.write_tokens(
            folder, clips([1300, 450], 8, 1024, text[:48]), columns={"ref": ["clip1", ""]}, **info
        )
    if recipe == "llama_mot":
        info = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "channels": 4}
        return support.write_tokens(folder, clips([600], 4, 2048, text[:60]), codebook_size=2048, **info)
    return support.write_tokens(folder, clips([2100], 9, 1024, text))


def long_forward(process, scorer, recipe: str, config: dict, out: str) -> None:
    """OUT/forward.npz: the states that the recipe's own forward pass gives to the head, and the loss, of the long clip;
    OUT/facts.json: what precision the engine holds trained parameters and buffers in, and the clip's positions."""
    config = importlib.import_module(recipe).Config(**config)
    ds = resolve_ds(config.ds, config, process.world)
    loss_fn, model, clips = prepare(recipe, config, ds, process)
    fill_lora(model)
    optimizer = optim.build_optimizer(optim.parameter_groups(model, 0.0, ()), config, ds)
    ds_engine = engine.start_engine(model, loss_fn, optimizer, ds)
    model.eval()
    batch = clips.batch([0])
    inner = model.llama if recipe == "llama_mot" else base_model(model)
    head = {"llama_mot": "head", "higgs_clone": "audio_lm_head"}.get(recipe, "logits_dense")
    seen = []
    getattr(model if recipe == "llama_mot" else inner, head).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    with torch.no_grad():
        loss = float(ds_engine(batch).loss_sum) / clips.target_weight([0])
    facts = {
        "trained": sorted({str(p.dtype) for p in engine.trainable(ds_engine.module.model).values()}),
        "buffers": {name: str(b.dtype) for name, b in inner.named_buffers() if b.is_floating_point()},
        "positions": batch["positions"],
    }
    if process.is_main:
        Path(out).mkdir()
        np.savez(Path(out) / "forward.npz", states=torch.cat(seen).float().numpy(), loss=loss)
        (Path(out) / "facts.json").write_text(json.dumps(facts))


def fill_lora(model) -> None:
    """LoRA's B matrices start at zero, which would hide what LoRA computes: other values, the same in every stage."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            with engine.gathered([parameter], write=True), torch.no_grad():
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))


# ---- training ----------------------------------------------------------------------------------------------------


_gradients = {}  # of this rank's current run, at its first optimizer step


@contextlib.contextmanager
def noting_gradients(module, process):
    """Inside, the first optimizer step of a run leaves its gradients, as they are before clipping, in _gradients."""
    take_step = engine.take_step

    def noting(ds_engine):
        if not _gradients:
            parameters = engine.trainable(ds_engine.module.model)
            _gradients.update((name, engine.full_gradient(p).float().clone()) for name, p in parameters.items())
        return take_step(ds_engine)

    _gradients.clear()
    engine.take_step = noting
    try:
        yield
    finally:
        engine.take_step = take_step


def write_training(ds_engine, config, process) -> None:
    """RUN/training.pt: the gradients of the first step and the fp32 master weights after the last."""
    weights = engine.full_weights(ds_engine.module.model)
    if process.is_main:
        torch.save({"gradients": _gradients, "weights": weights}, Path(config.out) / "training.pt")


def train_plain(recipe: str, config, ranks: int) -> dict:
    """The same and the losses of a plain PyTorch loop in bf16: weights and the gradients of a micro-batch in bf16;
    their sum over ranks and micro-batches, master weights, clipping and AdamW in fp32."""
    loss_fn, model, clips = prepare(recipe, config, NO_DEEPSPEED, Process(0, 1, torch.device("cpu")))
    model.train()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float() for name, p in weights.items()}
    before, first = {name: master.clone() for name, master in masters.items()}, None
    optimizer = torch.optim.AdamW(masters.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    plan, per_step, losses = Plan(clips.lengths, config.micro_tokens, config.seed), ranks * config.accumulation, []
    for step in range(config.steps):
        micro_batches = [plan.micro_batch(step * per_step + i) for i in range(per_step)]
        step_weight = sum(clips.target_weight(rows, epoch) for epoch, rows in micro_batches)
        sums, total = {name: torch.zeros_like(master) for name, master in masters.items()}, 0.0
        for epoch, rows in micro_batches:
            loss = loss_fn(model, clips.batch(rows, epoch)).loss_sum / step_weight
            loss.backward()
            total += float(loss.detach())
            for name, p in weights.items():
                if p.grad is not None:
                    sums[name] += p.grad.float()
                    p.grad = None
        first = first or {name: gradient.clone() for name, gradient in sums.items()}
        for name, master in masters.items():
            master.grad = sums[name]
        torch.nn.utils.clip_grad_norm_(masters.values(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(step, config.steps, config)
        optimizer.step()
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(masters[name])
        losses.append(total)
    return {"before": before, "gradients": first, "weights": masters, "losses": losses}
