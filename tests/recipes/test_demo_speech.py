"""The demo is a real fine-tuning: a recogniser and a speaker encoder judge what it says (helpers/speech_judge.py).

Every sentence is new to the models: to the demo's Dia, and to the adapter that the demo trains.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dia_full
from common.runtime import Process
from common.tokens import TokenDataset
from helpers import speech_judge, support
from models.dia.data import Clips
from models.dia.evaluate import token_metrics
from models.dia.layout import layout_of
from models.dia.weights import load_dia

pytestmark = [pytest.mark.distributed]
SENTENCES = range(40)
FEW = range(12)  # enough for what must fail


@pytest.fixture(scope="module")
def speech():
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-speech", "speech")


@pytest.fixture(scope="module")
def judge(speech):
    for package in ("pocketsphinx", "resemblyzer", "webrtcvad"):
        pytest.importorskip(package, reason="pip install --no-deps -r requirements-scoring.txt")
    return speech_judge.Judge(speech)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """Output and run folder of `./launch.sh demo`."""
    run = tmp_path_factory.mktemp("demo") / "run"
    return support.run_demo("demo", run), run


@pytest.fixture(scope="module")
def heard(judge, speech, demo_run):
    """Figures of the base, the tuned model and the recordings."""
    base, tuned = speech_judge.load(speech), speech_judge.load(speech, demo_run[1] / "export")
    figures = {"recordings": {"wer": judge.word_errors(judge.recordings)}}
    figures["recordings"]["similarity"] = judge.similarity(judge.recordings)
    figures["base"] = figures_of(judge, base, speech)
    figures["tuned"] = figures_of(judge, tuned, speech)
    print(json.dumps(figures))
    return figures | {"base model": base, "tuned model": tuned}


def figures_of(judge, model, speech, numbers=SENTENCES, **options) -> dict:
    waves, ended = speech_judge.speak(model, speech, numbers, **options)
    return {"wer": judge.word_errors(waves), "similarity": judge.similarity(waves), "ended": ended}


def assert_has_learned(after: dict, before: dict, recordings: dict) -> None:
    """The bars of the demo. Measured: word error rates of 15 % and 19 % with two seeds; another processor rounds
    differently, and training magnifies that."""
    bars = {
        "not the new voice": after["similarity"] >= before["similarity"] + 0.10,
        "not quite the new voice": after["similarity"] >= recordings["similarity"] - 0.05,
        "not understood": after["wer"] <= 0.30,
        "does not end": after["ended"] >= 0.95,
    }
    missed = [bar for bar, reached in bars.items() if not reached]
    assert not missed, f"{missed}: {after}"


def test_recordings_and_their_codes_are_understood(judge, speech):
    assert len(judge.recordings) == 8 and judge.word_errors(judge.recordings) <= 0.05
    waves = speech_judge.through_codec(speech)
    assert len(waves) == 40 and judge.word_errors(waves) <= 0.10


def test_the_base_reads_new_sentences_in_its_own_voices(judge, speech):
    model = speech_judge.load(speech)
    for tag in ("[S1]", "[S2]"):
        figures = figures_of(judge, model, speech, tag=tag, guided=True)
        assert figures["wer"] <= 0.20 and figures["ended"] >= 0.95, (tag, figures)


def test_the_tuned_model_reads_new_sentences_in_the_new_voice(heard):
    assert_has_learned(heard["tuned"], heard["base"], heard["recordings"])


def test_the_demos_own_table_says_so_too(demo_run):
    """What the run measured on its 8 samples, and on all evaluation sentences."""
    output, run = demo_run
    records = support.metrics(run)
    chosen = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]["step"]
    before, after = (support.known_after(run, step) for step in (0, chosen))
    assert after["eos_recall"] >= 0.9 and after["text_gap_onsets"] >= 3 * before["text_gap_onsets"]
    last = [record for record in records if record.get("event") == "scores"][-1]
    assert last["stop_rate"] >= 0.85 and 0.8 <= last["duration_ratio"] <= 1.25
    assert 0 <= last["wer"] <= 0.5  # 8 sentences: 6 % and 25 % with two seeds
    assert last["similarity"] >= before["similarity"] + 0.10
    for label in ("word error rate", "speaker similarity", "ends predicted", "text gap at onsets", "relative length"):
        assert label in output.split("before")[-1], output[-2000:]


def test_an_untrained_adapter_is_not_mistaken_for_the_new_voice(heard, judge, speech, tmp_path):
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
    get_peft_model(speech_judge.load(speech), LoraConfig(target_modules=modules)).save_pretrained(tmp_path / "adapter")
    figures = figures_of(judge, speech_judge.load(speech, tmp_path / "adapter"), speech, FEW)
    with pytest.raises(AssertionError, match="not the new voice"):
        assert_has_learned(figures, heard["base"], heard["recordings"])


def test_speech_without_the_text_is_not_mistaken_for_reading(heard, judge, speech):
    figures = figures_of(judge, heard["tuned model"], speech, FEW, mute=True)
    with pytest.raises(AssertionError, match="not understood"):
        assert_has_learned(figures, heard["base"], heard["recordings"])


# ---- what a trained model shows that random weights cannot --------------------------------------------------------


def loss_of(model, tokens: Path) -> float:
    clips = Clips(TokenDataset(str(tokens)), layout_of(model.config), dia_full.Config(), {}, False)
    return token_metrics(model, clips, Process(0, 1, torch.device("cpu")))["loss"]


@pytest.mark.quick
def test_the_loss_before_training_tells_right_codes_from_wrong_ones(speech, tmp_path):
    """The same frames with two channels exchanged, or with the delays applied twice, are worse than chance."""
    model, tokens = load_dia(speech / "dia", torch.float32), TokenDataset(str(speech / "tokens/eval"))
    layout = layout_of(model.config)
    rows = [(tokens.id(row), tokens.text(row), tokens.codes(row)) for row in range(8)]
    delayed_twice = [np.stack([np.roll(c, d) for c, d in zip(codes.T, layout.delay, strict=True)], 1)
                     for *_, codes in rows]  # fmt: skip
    versions = {
        "right": [codes for *_, codes in rows],
        "exchanged": [codes[:, [1, 0, *range(2, codes.shape[1])]] for *_, codes in rows],
        "delayed twice": delayed_twice,
    }
    losses = {}
    for name, version in versions.items():
        clips = [{"id": i, "text": text, "codes": codes} for (i, text, _), codes in zip(rows, version, strict=True)]
        info = {field: tokens.info[field] for field in ("sample_rate", "hop", "codebook_size")}
        losses[name] = loss_of(model, support.write_tokens(tmp_path / name, clips, **info))
    chance = math.log(tokens.info["codebook_size"])
    assert losses["right"] < 0.8 * chance < losses["exchanged"] and losses["delayed twice"] > losses["right"] + 0.5


def test_what_the_recogniser_understood_best_is_exported(judge, demo_run):
    """Its scores are computed again from the files, and decide."""
    _, run = demo_run
    scores = {record["step"]: record["wer"] for record in support.metrics(run) if record.get("event") == "scores"}
    for step, score in scores.items():
        files = sorted((run / "samples" / f"step-{step:08d}").glob("*.wav"))
        assert len(files) == 8
        assert judge.word_errors({int(f.stem[-4:]): speech_judge.read_mono(f) for f in files}) == pytest.approx(score)
    trained = {step: score for step, score in scores.items() if step}
    chosen = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]
    assert trained[chosen["step"]] == min(trained.values()) and len(trained) >= 2


def test_a_merged_model_says_the_same_as_base_and_adapter(heard, demo_run, speech, tmp_path):
    """Code for code, by transformers alone."""
    from transformers import DiaForConditionalGeneration

    words = ["--adapter", demo_run[1] / "export", "--merge", tmp_path / "merged"]
    support.run_script("infer/dia_speak.py", *words).check_returncode()
    merged = DiaForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    said, expected = (speech_judge.speak(model, speech, range(4))[0] for model in (merged, heard["tuned model"]))
    assert all(np.array_equal(said[number], expected[number]) for number in range(4))
