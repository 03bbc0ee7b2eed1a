"""The Higgs demo clones: a speaker encoder hears whose reference the model was given (helpers/clone_judge.py).

Neither voice, and none of the pairs of words, was heard in training, by the demo's Higgs or by its adapter.
"""

import json

import pytest
import torch

from helpers import clone_judge, support

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def clone():
    from demo import ensure_demo

    return ensure_demo(support.ROOT / "runs" / "demo-assets-clone", "clone")


@pytest.fixture(scope="module")
def judge(clone):
    for package in ("resemblyzer", "webrtcvad"):
        pytest.importorskip(package, reason="pip install --no-deps -r requirements-scoring.txt")
    return clone_judge.Judge(clone)


@pytest.fixture(scope="module")
def base(clone):
    return clone_judge.load(clone)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """Output and run folder of `./launch.sh higgs_clone`."""
    run = tmp_path_factory.mktemp("clone") / "run"
    return support.run_demo("higgs_clone", run), run


@pytest.fixture(scope="module")
def heard(judge, clone, base, demo_run):
    """Figures of the base and the tuned model."""
    models = {"base": base, "tuned": clone_judge.load(clone, demo_run[1] / "export")}
    figures = {name: figures_of(judge, model) for name, model in models.items()}
    print(json.dumps(figures))
    return figures


def figures_of(judge, model, **options) -> dict:
    jobs = judge.jobs(**options)
    return judge.figures(judge.speak(model, jobs), [voice for *_, voice in jobs])


def assert_clones(figures: dict) -> None:
    """Of 30 samples. Measured: all right, by 0.15 to 0.18, with two seeds each before and after fine-tuning."""
    assert figures["right"] >= 0.8 and figures["margin"] >= 0.06, figures


def test_recordings_of_the_two_voices_are_told_apart(judge):
    """What a perfect model would reach: all of them, by 0.2 or more."""
    clips = [(clip["wave"], number) for number, voice in enumerate(judge.voices) for clip in judge.recorded[voice]]
    figures = judge.figures(*zip(*clips, strict=True))
    assert len(clips) == 30 and figures["right"] == 1 and figures["margin"] >= 0.15, figures


def test_the_base_speaks_with_the_voice_of_its_reference(judge, base):
    assert_clones(figures_of(judge, base))


def test_the_tuned_model_does_so_too(heard):
    """Its similarity to the voices hardly rises (measured: 0.735 to 0.745, recordings 0.818), but must not fall by more
    than other samples would move it."""
    assert_clones(heard["tuned"])
    assert heard["tuned"]["similarity"] >= heard["base"]["similarity"] - 0.03, heard


def test_with_exchanged_references_the_voices_are_exchanged(judge, base):
    figures = figures_of(judge, base, exchanged=True)
    assert figures["right"] <= 0.2 and figures["margin"] <= -0.06, figures
    with pytest.raises(AssertionError):
        assert_clones(figures)


def test_without_a_reference_no_voice_is_cloned(judge, base):
    with pytest.raises(AssertionError):
        assert_clones(figures_of(judge, base, mute=True))


def test_random_weights_clone_nothing(judge, base):
    from transformers import HiggsAudioV2ForConditionalGeneration

    torch.manual_seed(0)
    random = HiggsAudioV2ForConditionalGeneration(base.config).eval()
    random.generation_config = base.generation_config
    with pytest.raises(AssertionError):
        assert_clones(figures_of(judge, random))


def test_the_demos_own_table_says_so_too(demo_run):
    """What the run measured on its 16 samples, and on all evaluation clips."""
    output, run = demo_run
    chosen = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]["step"]
    before, after = (support.known_after(run, step) for step in (0, chosen))
    # Measured: 0.81 and 0.85, but one sample in 16 that holds an id which is no code counts as 0.
    assert chosen and after["similarity"] >= before["similarity"] - 0.05
    assert after["loss"] <= before["loss"] - 0.2  # measured: 3.13 and 2.7
    assert before["gap"] >= 0.3 and after["gap"] >= 0.2  # measured: 0.63 and 0.46
    assert after["stop_rate"] >= 0.75 and 0.7 <= after["duration_ratio"] <= 1.4
    for label in ("speaker similarity", "voice gap", "relative length"):
        assert label in output.split("before")[-1], output[-2000:]
