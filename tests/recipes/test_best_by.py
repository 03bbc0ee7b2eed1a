"""--best-by on whole runs: each evaluation waits for the scores of its samples, which decide what is exported."""

import json
from pathlib import Path

import pytest
import soundfile
import torch
import torchaudio.functional

import dia_lora
import higgs_clone
import llama_mot
from common import checkpoint, engine, runtime
from common.ds_config import resolve_ds
from common.runtime import Stopped
from helpers import dia_support, higgs_support, mot_support, scoring_models, support
from helpers.rank_server import Runs

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    return {
        "voice": str(scoring_models.save_speaker_encoder(folder / "voice")),
        "words": str(scoring_models.save_recogniser(folder / "words")),
        "clap": str(scoring_models.save_clap(folder / "clap")),
    }


@pytest.fixture(scope="module")
def process(only_rank):
    return only_rank


def dia_flags(demo, models, out: Path) -> dict:
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}
    flags = {"steps": 6, "eval_every": 2, "accumulation": 1, "samples": 3, "lr": 8e-3}
    return (
        dia_support.SMALL | assets | flags | {"out": str(out), "best_by": "similarity", "similarity": models["voice"]}
    )


def train(recipe, process, **flags) -> Path:
    config = recipe.Config(**flags)
    recipe.train(config, process, resolve_ds(config.ds, config, 1))
    return Path(config.out)


def similarities(run: Path, folder: str) -> dict[int, float]:
    """Mean similarity of each step's samples to the recordings, by the plain model."""
    from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2ForXVector

    model, extract = Wav2Vec2ForXVector.from_pretrained(folder).eval(), Wav2Vec2FeatureExtractor.from_pretrained(folder)

    def embed(file):
        wave, rate = soundfile.read(file, dtype="float32")
        wave = torchaudio.functional.resample(torch.from_numpy(wave), rate, 16000).numpy()
        with torch.no_grad():
            return model(**extract(wave, sampling_rate=16000, return_tensors="pt")).embeddings[0]

    means = {}
    for step in sorted((run / "samples").glob("step-*")):
        files = sorted(step.glob("*.wav"))
        values = [torch.cosine_similarity(embed(f), embed(run / "samples/original" / f.name), dim=0) for f in files]
        means[int(step.name.removeprefix("step-"))] = float(torch.stack(values).mean())
        assert len(files) == 3
    return means


@pytest.mark.distributed
def test_two_ranks_export_the_checkpoint_that_speaks_best(demo, models, two_ranks, tmp_path):
    runs = Runs(two_ranks, "dia_lora", tmp_path, {"two": dia_flags(demo, models, tmp_path / "two")})
    run = runs / "two"
    expected = similarities(run, models["voice"])
    assert set(expected) == {0, 2, 4, 6}  # 0 is the base
    events = {r["step"]: r for r in support.metrics(run) if r.get("event") == "scores"}
    assert {step: events[step]["similarity"] for step in events} == pytest.approx(expected, abs=1e-4)
    del expected[0]  # there is no checkpoint of it
    facts = json.loads((run / "export" / "training_config.json").read_text())["checkpoint"]
    assert facts["step"] == max(expected, key=expected.get)
    assert facts["score"] == pytest.approx(-max(expected.values()), abs=1e-4)
    kept = {entry["step"]: entry for entry in checkpoint.read_index(run / "checkpoints")}
    assert facts["step"] in kept
    assert {step: -entry["score"] for step, entry in kept.items()} == pytest.approx(
        {step: expected[step] for step in kept}, abs=1e-4
    )
    ceilings = {r["of"]: r for r in support.metrics(run) if r.get("event") == "ceiling"}
    assert ceilings["recorded"]["similarity"] == pytest.approx(ceilings["original"]["similarity"], abs=1e-5)


def test_a_run_that_was_stopped_ends_like_one_that_was_not(demo, models, process, tmp_path, monkeypatch):
    """The signal comes during an evaluation's step: its checkpoint has its score before the run ends."""
    flags = dia_flags(demo, models, tmp_path / "stopped")
    whole = train(dia_lora, process, **flags | {"out": str(tmp_path / "whole")})
    taken, take_step = [], engine.take_step

    def stopping(*arguments):
        taken.append(1)
        if len(taken) == 4:
            runtime.request_stop()
        return take_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "take_step", stopping)
        with pytest.raises(Stopped):
            train(dia_lora, process, **flags)
    monkeypatch.setattr(runtime, "_stop_wanted", False)
    index = checkpoint.read_index(tmp_path / "stopped" / "checkpoints")
    assert index[-1]["step"] == 4 and index[-1]["score"] < 0
    resumed = train(dia_lora, process, **flags)
    found = [checkpoint.read_index(run / "checkpoints") for run in (whole, resumed)]
    # The stopped run also saved a checkpoint at the signal, so it may keep another one of those that are not the best.
    kept = [{entry["step"]: entry for entry in entries} for entries in found]
    shared = kept[0].keys() & kept[1].keys()
    assert 6 in shared and all(kept[0][step] == kept[1][step] for step in shared)
    best = [min(entries, key=lambda entry: entry["score"]) for entries in found]
    assert best[0] == best[1]
    scores = [{r["step"]: r["similarity"] for r in support.metrics(run) if r.get("event") == "scores"}
              for run in (whole, resumed)]  # fmt: skip
    assert scores[0] == scores[1] and set(scores[0]) == {0, 2, 4, 6}


def test_higgs_is_scored_and_its_guard_still_decides(higgs_demo, models, process, tmp_path):
    flags = higgs_support.SMALL | higgs_support.assets(higgs_demo)
    flags |= {"steps": 4, "eval_every": 2, "accumulation": 1, "samples": 2}
    flags |= {"best_by": "wer", "wer": models["words"], "similarity": models["voice"], "out": str(tmp_path / "run")}
    run = train(higgs_clone, process, **flags)
    events = {r["step"]: r for r in support.metrics(run) if r.get("event") == "scores"}
    evals = {r["step"]: r for r in support.metrics(run) if r.get("event") == "eval"}
    assert set(events) == {0, 2, 4} and all({"wer", "similarity", "stop_rate"} <= set(e) for e in events.values())
    allowed = [
        step
        for step in (2, 4)
        if events[step]["wer"] - events[0]["wer"] <= 0.05
        and all(
            (evals[step] | events[step])[name] - (evals[0] | events[0])[name] >= -0.05
            for name in ("stop_rate", "similarity")
        )
    ]
    facts = json.loads((run / "export/training_config.json").read_text())["checkpoint"]
    best = min(allowed, key=lambda step: (events[step]["wer"], evals[step]["loss"]), default=4)
    assert facts["step"] == best and (facts["score"] is None) == (not allowed)
    assert {r["of"] for r in support.metrics(run) if r.get("event") == "ceiling"} == {"original", "recorded"}


def test_music_is_chosen_by_its_distance_to_the_recordings(demo_mot, models, process, tmp_path):
    flags = mot_support.SMALL | mot_support.assets(demo_mot) | {"out": str(tmp_path / "run"), "accumulation": 1}
    flags |= {"steps": 4, "eval_every": 2, "samples": 2, "best_by": "frechet", "embedder": models["clap"]}
    run = train(llama_mot, process, **flags)
    events = {r["step"]: r for r in support.metrics(run) if r.get("event") == "scores"}
    assert set(events) == {0, 2, 4} and all({"frechet", "caption", "duration_ratio"} <= set(e) for e in events.values())
    kept = {entry["step"]: entry["score"] for entry in checkpoint.read_index(run / "checkpoints")}
    assert kept == pytest.approx({step: events[step]["frechet"] for step in (2, 4)}, abs=2e-8)
    facts = json.loads((run / "export" / "adapter_config.json").read_text())["checkpoint"]
    assert facts["step"] == min(kept, key=kept.get)
