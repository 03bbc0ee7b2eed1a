"""./launch.sh convert: any checkpoint of any recipe, without ranks, is byte for byte what the run itself exports."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import dia_lora
from common.ds_config import resolve_ds
from common.errors import UserError
from helpers import dia_support, higgs_support, mot_support, support
from helpers.cmgan_support import SMALL as CMGAN
from helpers.rank_server import Runs
from infer import convert

THREE = {"steps": 3, "save_every": 1, "eval_every": 1, "samples": 0}
BEST_OF_THREE = {"around": "helpers.support:scored", "values": [9.0, 3.0, 1.0, 2.0]}  # before training, then per step
ZERO2, ZERO3 = "ds_configs/zero2.json", "ds_configs/zero3.json"


def convert_run(run: Path, step: str, out: Path) -> Path:
    convert.convert(argparse.Namespace(run=run, step=step, out=out, model=None))
    return out


def weight_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def facts_of(folder: Path) -> dict:
    for name in ("training_config.json", "config.json", "adapter_config.json"):
        if (folder / name).is_file() and "checkpoint" in (facts := json.loads((folder / name).read_text())):
            return facts["checkpoint"]
    raise AssertionError(f"{folder} does not say which checkpoint it is")


def assert_converts(run: Path, scratch: Path, by: str) -> None:
    """The run exported step 2, the best of 3; convert gives the same for --step best and 2, another for last."""
    own = weight_files(run / "export")
    assert own and facts_of(run / "export") == {"step": 2, "score": 1.0, "why": f"the best by {by}"}
    best = convert_run(run, "best", scratch / "best")
    assert weight_files(best) == own and facts_of(best) == facts_of(run / "export")
    assert sorted(path.name for path in best.iterdir()) == sorted(path.name for path in (run / "export").iterdir())
    second = convert_run(run, "2", scratch / "second")
    assert weight_files(second) == own
    assert facts_of(second) == {"step": 2, "score": 1.0, "why": "asked for with --step 2"}
    last = convert_run(run, "last", scratch / "last")
    assert facts_of(last)["step"] == 3 and set(weight_files(last)) == set(own) and weight_files(last) != own


# ---- one rank, in this process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaged(demo, only_rank, tmp_path_factory):
    """A dia_lora run with --ema, whose second step is the best."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    assets = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "out": str(out)}
    config = dia_lora.Config(**{**dia_support.SMALL, **THREE, **assets, "accumulation": 1, "ema": 0.9})
    with support.scored(dia_lora, None, BEST_OF_THREE["values"]):
        dia_lora.train(config, only_rank, resolve_ds(config.ds, config, 1))
    return out


def test_a_lora_checkpoint_is_exported_with_its_moving_average(averaged, tmp_path):
    assert_converts(averaged, tmp_path, "loss")
    from common import checkpoint

    trained = checkpoint.masters(averaged / "checkpoints" / "step-00000002")
    exported = load_file(averaged / "export" / "adapter_model.safetensors")
    assert any(not value.equal(trained[name.replace(".weight", ".default.weight")]) for name, value in exported.items())


@pytest.mark.parametrize(
    ("step", "damage", "sentence"),
    [
        ("7", None, "--step 7: {run} holds no such checkpoint; write best, last or one of 1, 2, 3."),
        ("x", None, "--step x: {run} holds no such checkpoint; write best, last or one of 1, 2, 3."),
        ("2", "ema-00000.pt", "{run}/checkpoints/step-00000002 is damaged (the checksum of ema-00000.pt is wrong)."),
        ("2", "", "{run}/checkpoints/step-00000002 is damaged (manifest.json cannot be read)."),
    ],
)
def test_a_missing_or_damaged_checkpoint_is_one_sentence(averaged, tmp_path, step, damage, sentence):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(averaged / "config.json", run)
    index = json.loads((averaged / "checkpoints" / "index.json").read_text())
    entries = [{"name": f"step-{i:08d}", "step": i, "score": None} for i in (1, 2, 3)]
    (run / "checkpoints" / "index.json").write_text(json.dumps(index | {"checkpoints": entries}))
    if damage:
        copy = run / "checkpoints" / "step-00000002"
        shutil.copytree(averaged / "checkpoints" / "step-00000002", copy)
        (copy / damage).write_bytes((copy / damage).read_bytes()[:-1])
    with pytest.raises(UserError) as error:
        convert_run(run, step, tmp_path / "out")
    assert sentence.format(run=run) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_export_is_never_overwritten(averaged):
    with pytest.raises(UserError, match="run/export exists already: name another folder with --out"):
        convert_run(averaged, "best", None)


@pytest.mark.parametrize(
    ("scores", "best"),
    [([0.5, 0.3, None], 2), ([None, None], 2), ([float("nan"), 0.7, 0.9], 2), ([0.4, 0.3, 0.3], 2)],
)
def test_the_best_checkpoint_has_the_lowest_score_or_is_the_newest(tmp_path, scores, best):
    entries = [{"name": f"step-{i:08d}", "step": i, "score": score} for i, score in enumerate(scores, start=1)]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "index.json").write_text(json.dumps({"checkpoints": entries}))
    assert convert.choose(tmp_path, "best")["step"] == best
    assert convert.choose(tmp_path, "last")["step"] == len(scores)


# ---- two ranks, all recipes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(demo, higgs_demo, demo_mot, pairs, two_ranks, tmp_path_factory):
    """runs(recipe, name): the folder of a two-rank run whose second step is the best."""
    folder = tmp_path_factory.mktemp("runs")
    zero0 = support.stage_file(folder, 0)
    dia = {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "precision": "fp32", "micro_tokens": 400}
    lora = {**dia_support.SMALL, **dia}
    higgs = {**higgs_support.SMALL, **higgs_support.assets(higgs_demo)}
    mot = {**mot_support.SMALL, **mot_support.assets(demo_mot)}
    buffer = {
        "spec": '{"width": 8, "frames": 16, "buffer": 4}',
        "micro_batch": 2,
        "precision": "fp32",
        "ema": 0.9,
        "lr": 1e-3,
    }
    configs = {
        "dia_lora": {
            "zero0": {**lora, "ds": zero0, "ema": 0.9},
            "bf16_zero3": {**lora, "ds": ZERO3, "ema": 0.9, "precision": "bf16"},
        },
        "dia_full": {
            "frozen_bf16_zero3": {
                **dia,
                "ds": ZERO3,
                "freeze": ["encoder"],
                "ema": 0.9,
                "precision": "bf16",
                "lr": 1e-3,
            },
        },
        "higgs_clone": {
            "io_train": {**higgs, "ds": ZERO2, "ema": 0.9, "io": "train"},
            "audio_path": {**higgs, "ds": ZERO3, "ema": 0.9, "preset": "audio_path"},
        },
        "llama_mot": {
            "parts": {**mot, "ds": ZERO3, "ema": 0.9, "untie": "ffn", "train_parts": ["proj_only"]},
        },
        "diffusion_buffer": {"zero2": {**buffer, "ds": ZERO2, "data": str(pairs), "best_by": "si_sdr"}},
        "cmgan": {"zero2": {**CMGAN, "ds": ZERO2, "ema": 0.9, "data": str(pairs)}},
    }
    trained = {
        recipe: Runs(two_ranks, recipe, folder, {f"{recipe}-{n}": c | THREE for n, c in named.items()}, **BEST_OF_THREE)
        for recipe, named in configs.items()
    }
    return lambda recipe, name: trained[recipe] / f"{recipe}-{name}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "name", "by"),
    [
        ("dia_lora", "zero0", "loss"),
        ("dia_lora", "bf16_zero3", "loss"),
        ("dia_full", "frozen_bf16_zero3", "loss"),
        ("higgs_clone", "io_train", "loss"),
        ("higgs_clone", "audio_path", "loss"),
        ("llama_mot", "parts", "loss"),
        ("diffusion_buffer", "zero2", "si_sdr"),
        ("cmgan", "zero2", "pesq"),
    ],
)
def test_every_recipe_converts_to_what_it_exported(runs, recipe, name, by, tmp_path):
    assert_converts(runs(recipe, name), tmp_path, by)
