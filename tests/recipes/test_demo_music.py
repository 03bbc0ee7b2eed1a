"""The demo of Llama MoT is a real fine-tuning: a pitch tracker hears what the captions name (helpers/pitch_judge.py).

The captions are new to the model: it has been trained on all of their words, but never on this combination.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.tokens import TokenDataset
from helpers import mot_support, pitch_judge, support
from models.mot.data import Tokenizer
from models.mot.generate import generate
from models.mot.weights import load_adapter

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """Output and run folder of `./launch.sh llama_mot`."""
    run = tmp_path_factory.mktemp("demo") / "run"
    return support.run_demo("llama_mot", run), run


@pytest.fixture(scope="module")
def captions(demo_mot):
    tokens = TokenDataset(demo_mot / "tokens")
    texts = {"train": [], "eval": []}
    for row in range(len(tokens)):
        texts[tokens.label("split", row)].append(tokens.text(row))
    assert len(texts["eval"]) == 16 and not set(texts["eval"]) & set(texts["train"])
    return texts["eval"]


@pytest.fixture(scope="module")
def played(demo_run, demo_mot, captions):
    """What the exported adapter plays to each caption."""
    model, _ = load_adapter(demo_run[1] / "export", str(demo_mot / "llama"), torch.float32)
    return play(model, demo_mot, captions)


def play(model, demo: Path, captions: list[str]) -> list[np.ndarray]:
    codec, texts = pitch_judge.load_codec(demo), Tokenizer(str(demo / "llama"))(captions)
    music = generate(model, texts, max_frames=60, seeds=[0] * len(texts), temperature=0.0)
    return [pitch_judge.decode(codes, codec) for codes, _ in music]


def assert_follows(waves: list[np.ndarray], captions: list[str]) -> None:
    verdicts = [pitch_judge.follows(wave, 32000, caption) for wave, caption in zip(waves, captions, strict=True)]
    right = {name: sum(verdict[name] for verdict in verdicts) for name in ("melody", "tempo")}
    print(right)
    wrong = [name for name, count in right.items() if count < 0.75 * len(captions)]
    assert not wrong, f"not the {' and '.join(wrong)}: {right} of {len(captions)}"


def test_new_captions_are_played(played, captions):
    assert_follows(played, captions)


def test_the_demos_own_evaluation_says_so_too(demo_run):
    output, run = demo_run
    evaluations = [record for record in support.metrics(run) if record.get("event") == "eval"]
    gains = {record["step"]: record["caption_gain_onsets"] for record in evaluations}
    chosen = json.loads((run / "export" / "adapter_config.json").read_text())["checkpoint"]["step"]
    assert abs(gains[0]) < 0.1 and gains[chosen] >= 1.0, gains
    assert "caption gain at onsets" in output.split("before")[-1], output[-2000:]


# ---- what must not pass ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["melody", "tempo"])
def test_music_for_another_caption_does_not_pass(played, captions, factor):
    """All else in the caption is right."""
    words = list({"melody": pitch_judge.MELODIES, "tempo": pitch_judge.TEMPOS}[factor])

    def other(caption: str) -> str:
        [word] = [word for word in words if word in caption]
        return caption.replace(word, words[words.index(word) - 1])

    with pytest.raises(AssertionError, match=f"^not the {factor}:"):
        assert_follows(played, list(map(other, captions)))


def test_an_untrained_adapter_does_not_pass(demo_mot, captions):
    model = mot_support.build(demo_mot, untie="all", order="delay").eval()
    with pytest.raises(AssertionError, match="^not the melody and tempo:"):
        assert_follows(play(model, demo_mot, captions), captions)
