"""What the tests of Higgs Audio v2 share."""

import functools

from common.tokens import TokenDataset
from higgs_clone import Config
from models.higgs.data import Pairs
from models.higgs.layout import layout_of
from models.higgs.text import Chat

SMALL = {
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "precision": "fp32",
    "lr": 5e-4,
    "warmup": 2.0,
    "steps": 5,
    "micro_tokens": 800,
    "accumulation": 2,
    "samples": 0,
    "eval_every": 0,
    "save_every": 0,
    "max_start_loss": 0.0,
    "greedy": True,
}


def assets(demo) -> dict:
    tokens = {"data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}
    return {"model": str(demo / "model"), **tokens}


@functools.cache
def tokenizer_of(demo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo / "model"), local_files_only=True)


def make_pairs(demo, folder=None, train=True, **flags) -> Pairs:
    """The demo's pairs, or a dataset's, with these flags."""
    from transformers import HiggsAudioV2Config

    config = HiggsAudioV2Config.from_pretrained(str(demo / "model"))
    tokenizer = tokenizer_of(demo)
    tokens = TokenDataset(str(folder or demo / "tokens" / ("train" if train else "eval")))
    return Pairs(tokens, layout_of(config, tokenizer), Chat(tokenizer), Config(**flags), train)


def logits_of(model, config, clips=(0, 1)):
    """Logits of the first evaluation pairs, by the model's own forward."""
    from pathlib import Path

    pairs = make_pairs(Path(config.model).parent, config.eval_data, train=False)
    batch = pairs.batch(list(clips))
    for name in ("ids", "positions", "audio_labels"):
        batch.pop(name)
    return model(**batch, use_cache=False).logits


def text_only_rank(ranks, model: str, ds: str, out: str) -> None:
    """Three optimizer steps in which the second rank has a chat without any audio."""
    import json
    from pathlib import Path

    from safetensors.torch import save_file

    from common import engine
    from common.ds_config import resolve_ds
    from higgs_clone import build_model

    config = Config(model=model, data="x", ds=ds, preset="audio_path+attn", precision="fp32", lr=5e-5)
    resolved = resolve_ds(ds, config, ranks.world)
    trained = build_model(config, resolved)
    pairs = make_pairs(Path(model).parent)
    loss_of = functools.partial(_loss, pairs=pairs)
    ds_engine = engine.start_engine(trained, loss_of, config, resolved, no_decay=("embed", "norm"))
    losses = []
    for step in range(3):
        batch = text_only(pairs) if ranks.rank else pairs.batch([step, step + 1])
        loss_sum, stats = ds_engine(batch)
        engine.backward(ds_engine, loss_sum, pairs.target_weight([step, step + 1]), ranks.world)
        engine.take_step(ds_engine)
        losses.append(float(stats[0].sum()))
    weights = engine.full_weights(ds_engine)
    if ranks.first:
        Path(out).mkdir()
        save_file(weights, f"{out}/weights.safetensors")
        Path(out, "losses.json").write_text(json.dumps(losses))


def _loss(model, batch, pairs):
    from models.higgs.evaluate import higgs_loss

    return higgs_loss(model, batch, pairs.layout, pairs.weights)


def text_only(pairs) -> dict:
    from models.higgs.layout import build_row, collate

    [ids] = pairs.chat.ids([pairs.chat.prompt("bada gumi.", None, None, answer=False)])
    return collate([build_row("text only", ids, [], pairs.layout, answer=False)], pairs.layout)


def start_from(ranks, source: str, target: str, name: str) -> None:
    """A run folder that holds only this checkpoint of another run."""
    import json
    import shutil
    from pathlib import Path

    from common.runtime import on_first

    def copy() -> None:
        shutil.copytree(Path(source, "checkpoints", name), Path(target, "checkpoints", name))
        entries = json.loads(Path(source, "checkpoints/index.json").read_text())["checkpoints"]
        kept = [entry for entry in entries if entry["name"] == name]
        Path(target, "checkpoints/index.json").write_text(json.dumps({"checkpoints": kept}))

    on_first(copy, ranks)
