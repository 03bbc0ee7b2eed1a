"""docs/add_a_recipe.md: its recipe is taken out of the page and trained, so that the page cannot go stale."""

import json
import math
import re
import shutil

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from common.plan import Plan
from common.tokens import TokenDataset
from helpers import support

pytestmark = pytest.mark.distributed

FLAGS = (
    "--precision fp32 --lr 3e-3 --warmup 2 --steps 6 --micro-tokens 700 --accumulation 2 "
    "--weight-decay 0 --eval-every 0 --max-grad-norm 100"
).split()


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of finetune/ with the page's two files in their places."""
    page = (support.ROOT / "docs" / "add_a_recipe.md").read_text()
    house = tmp_path_factory.mktemp("house")
    shutil.copytree(support.ROOT / "finetune", house / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(support.ROOT / "ds_configs", house / "ds_configs")
    files = re.findall(r"## `(finetune/\S+)`\n\n```python\n(.*?)```", page, re.S)
    assert len(files) == 2
    for name, code in files:
        (house / name).parent.mkdir(exist_ok=True)
        (house / name).write_text(code)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=258 + 1024, tie_word_embeddings=False, **sizes)).save_pretrained(
        house / "model"
    )
    return house


def run(house, demo, out, *more) -> None:
    data = ["--model", house / "model", "--data", demo / "tokens/train", "--eval-data", demo / "tokens/eval"]
    ranks = support.start_ranks(house / "finetune" / "my_tts.py", [*FLAGS, *data, "--out", out, *more])
    codes, outputs = support.finish(ranks)
    assert codes == [0, 0], outputs[0][-3000:]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_follow_a_plain_loop_and_a_resumed_run_the_uninterrupted_one(house, demo, tmp_path, stage):
    ds = ["--ds", house / "ds_configs" / f"zero{stage}.json"]
    run(house, demo, tmp_path / "whole", *ds)
    found = [record["loss"] for record in support.step_records(tmp_path / "whole")]
    assert found == pytest.approx(plain_losses(house, demo), rel=1e-5) and found[-1] < found[0]
    run(house, demo, tmp_path / "parts", *ds, "--save-every", "3")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    index = tmp_path / "parts" / "checkpoints" / "index.json"
    entries = [entry for entry in json.loads(index.read_text())["checkpoints"] if entry["step"] == 3]
    index.write_text(json.dumps({"checkpoints": entries}))
    run(house, demo, tmp_path / "parts", *ds, "--save-every", "3")
    assert any(record.get("event") == "resume" for record in support.metrics(tmp_path / "parts"))
    assert [record["loss"] for record in support.step_records(tmp_path / "parts")] == found
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "export")
    assert exported.config.hidden_size == 32
    assert json.loads((tmp_path / "whole/export/training_config.json").read_text())["checkpoint"]["step"] == 6


def plain_losses(house, demo) -> list[float]:
    """The same training in one process with torch's own AdamW, without common/engine or the recipe's loss."""
    tokens = TokenDataset(str(demo / "tokens/train"))
    model = LlamaForCausalLM.from_pretrained(house / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    texts = [tokens.text(i).encode() for i in range(len(tokens))]
    lengths = torch.tensor([len(text) + 1 for text in texts]).numpy() + tokens.frames
    plan, losses = Plan(lengths, 700, 0), []
    for step in range(6):
        total, count = 0.0, 0
        for number in range(4 * step, 4 * step + 4):
            for i in plan.micro_batch(number)[1]:
                stream = torch.tensor([*texts[i], 256, *(tokens.codes(i)[:, 0].astype(int) + 258), 257])
                logits = model(stream[None, :-1], use_cache=False).logits[0, len(texts[i]) :]
                total = total + F.cross_entropy(logits, stream[len(texts[i]) + 1 :], reduction="sum")
                count += len(logits)
        (total / count).backward()
        share = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 3))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * share
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / count)
    return losses
