"""What the ranks of the Llama MoT tests do besides training (rank_server.py)."""

import json
import sys
from pathlib import Path

UNEVEN_STEPS = 4


def uneven_batch(model, step: int, rank: int) -> dict:
    """Rank 1 has no music in the first two steps."""
    from helpers.mot_support import batch_of, text_batch

    if rank == 1 and step < 2:
        return text_batch(model, [[5, 6, 7, 8 + step]])
    return batch_of(model, [6 + step, 3 + rank], seed=10 * step + rank)


def targets(batch) -> int:
    return int((batch["labels"] != -100).sum())


def write_modules(engine, config, process) -> None:
    """RUN/modules.json: what the process has imported."""
    if process.is_main:
        modules = sorted(name for name, module in sys.modules.items() if module)
        (Path(config.out) / "modules.json").write_text(json.dumps(modules))


def uneven(process, scorer, demo: str, out: str, ds: str, untie: str, recompute: bool) -> None:
    """OUT/RANK.safetensors: the adapter after a few steps in which the second rank has no music at first."""
    demo, out = Path(demo), Path(out)
    import torch
    from safetensors.torch import save_file

    import llama_mot
    from common import engine, optim
    from common.ds_config import resolve_ds
    from helpers.mot_support import loss_output, text_batch
    from models.mot.weights import adapter_weights

    config = llama_mot.Config(
        ds=ds,
        model=str(demo / "llama"),
        data="-",
        musicgen=str(demo / "musicgen"),
        untie=untie,
        precision="fp32",
        lr=5e-4,
        gradient_checkpointing=recompute,
    )
    ds = resolve_ds(config.ds, config, process.world)
    model = llama_mot.build_model(config, ds)
    groups = optim.parameter_groups(model, config.weight_decay, no_decay=("embed",))
    ds_engine = engine.start_engine(model, loss_output, optim.build_optimizer(groups, config, ds), ds)
    model.train()
    for step in range(UNEVEN_STEPS):
        batches = [uneven_batch(model, step, rank) for rank in range(process.world)]
        output = ds_engine(batches[process.rank])
        engine.backward(ds_engine, output.loss_sum, sum(map(targets, batches)), process.world, last=True)
        optim.set_learning_rate(ds_engine, config.lr)
        engine.take_step(ds_engine)
    weights = adapter_weights(model)
    # No rank has music: nothing of an earlier step may come back as a gradient.
    output = ds_engine(text_batch(model, [[5, 6, 7 + process.rank]]))
    engine.backward(ds_engine, output.loss_sum, 1.0, process.world, last=True)
    stale = max(float(engine.full_gradient(p).abs().max()) for p in engine.trainable(ds_engine.module.model).values())
    out.mkdir(exist_ok=True)
    save_file(weights | {"stale": torch.tensor(stale)}, out / f"{process.rank}.safetensors")
