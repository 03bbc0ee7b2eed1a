"""The evaluation of Higgs Audio v2 against the loss that the library itself computes, clip by clip."""

import pytest
import torch

from common.runtime import Process
from helpers.higgs_support import make_clips
from models.higgs.evaluate import token_metrics
from models.higgs.weights import load_higgs

INPUTS = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask", "audio_labels")


def test_metrics_equal_sums_over_the_models_own_logits(higgs_demo):
    clips = make_clips(higgs_demo, train=False)
    model = load_higgs(str(higgs_demo / "model"), "", torch.float32).eval()
    with torch.no_grad():  # untrained, it hardly hears the reference
        model.model.embed_audio_tokens.embed_audio_tokens.weight.mul_(4)
    found = token_metrics(model, clips, Process(0, 1, torch.device("cpu")))
    sums = {"own": 0.0, "other": 0.0}
    targets = 0
    for i in range(len(clips)):
        frames = int(clips.tokens.frames[clips.kept[i]]) + 1  # and one end per codebook
        targets += frames * clips.layout.codebooks
        for name, references in (("own", None), ("other", clips.other_references([i]))):
            batch = clips.batch([i], references=references)
            with torch.no_grad():  # the sum over the codebooks of their means
                sums[name] += float(model(**{key: batch[key] for key in INPUTS}).loss) * frames
    assert found["loss"] == pytest.approx(sums["own"] / targets, rel=1e-5)
    assert found["gap"] == pytest.approx((sums["other"] - sums["own"]) / targets, rel=1e-2)
    assert abs(found["gap"]) > 1e-4
