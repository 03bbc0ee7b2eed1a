"""The evaluation of Llama MoT against sums over single clips."""

import numpy as np
import pytest
import torch

from common.runtime import Process
from common.tokens import TokenDataset
from helpers.mot_support import assets, build, loss_of
from llama_mot import Config
from models.mot.data import Clips, Tokenizer
from models.mot.evaluate import token_metrics

ONE_RANK = Process(0, 1, torch.device("cpu"))


@torch.no_grad()
def test_metrics_equal_sums_over_single_clips(demo_mot, monkeypatch):
    model = build(demo_mot)
    model.head.weight.mul_(30)  # untrained, the caption would hardly matter
    config = Config(**assets(demo_mot), micro_tokens=2000)
    clips = Clips(TokenDataset(config.data), model.layout, Tokenizer(config.model), config, train=False)
    real, seen = Clips.batch, {}

    def watched(self, rows, epoch=0, texts=None):
        for row, text in zip(rows, texts or (), strict=False):
            if len(text) > 1:
                seen[int(row)] = text
        return real(self, rows, epoch, texts)

    monkeypatch.setattr(Clips, "batch", watched)
    found = token_metrics(model, clips, [(torch.tensor([[1, 5]]), model.text_logits(torch.tensor([[1, 5]])))], ONE_RANK)
    assert sorted(seen) == list(range(len(clips)))
    own = [clips.caption(i) for i in range(len(clips))]
    assert sorted(map(bytes, seen.values())) == sorted(map(bytes, own))  # another clip's caption, each one once
    assert sum(np.array_equal(seen[i], own[i]) for i in seen) < len(own) / 4  # some clips have equal captions

    def loss_with(texts) -> float:
        total = count = 0.0
        for i, text in enumerate(texts):
            sums = loss_of(model, real(clips, [i], texts=[text]))[1]
            total, count = total + float(sums[0].sum()), count + float(sums[1].sum())
        return total / count

    own, other = loss_with(own), loss_with([seen[i] for i in range(len(clips))])
    none = loss_with([clips.tokenizer.no_text] * len(clips))
    assert found["loss"] == pytest.approx(own, rel=1e-5) and found["text_drift"] == 0
    assert found["caption_gain"] == pytest.approx(other - own, rel=1e-2, abs=1e-6)
    assert found["caption_gain_none"] == pytest.approx(none - own, rel=1e-2, abs=1e-6)
    assert abs(other - own) > 1e-4 and abs(none - own) > 1e-4

    def onset_losses(clip: int, text) -> list[float]:
        """Losses of codebook 0 at the first frame, at every frame with another code than before, and at the end."""
        codes = clips.tokens.codes(clips.kept[clip])[:, 0].tolist()
        batch = real(clips, [clip], texts=[text])
        logits = model.head(model(batch["input_ids"], batch["codebooks"], batch["mask"])[0], codebook=0)
        losses, first = -logits.log_softmax(-1), len(text)
        new = [t for t in range(len(codes) + 1) if t in (0, len(codes)) or codes[t] != codes[t - 1]]
        return [float(losses[first + 4 * t, ([*codes, 2048])[t]]) for t in new]

    own, other = (
        np.concatenate([onset_losses(i, text) for i, text in enumerate(texts)])
        for texts in ([clips.caption(i) for i in range(len(clips))], [seen[i] for i in range(len(clips))])
    )
    assert len(own) < sum(clips.frames) + len(clips)  # some codes are repeated
    assert found["caption_gain_onsets"] == pytest.approx(float((other - own).mean()), rel=1e-3, abs=1e-6)
