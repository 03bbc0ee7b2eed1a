"""--compile with torch's real compiler, through DeepSpeed: the same losses, checkpoints and exports."""

import json

import pytest
from safetensors.torch import load_file

from helpers import dia_support, higgs_support, mot_support
from helpers.rank_server import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.long]

COMMON = {"ds": "ds_configs/zero2.json", "steps": 2, "accumulation": 3, "samples": 0, "eval_every": 0}
CASES = {
    "dia_lora": ("demo", dia_support.SMALL | {"lora_dropout": 0.1}),
    "dia_full": ("demo", {"precision": "fp32", "micro_tokens": 400, "gradient_checkpointing": True}),
    "higgs_clone": ("higgs_demo", higgs_support.SMALL | {"lora_dropout": 0.1, "gradient_checkpointing": True}),
    "llama_mot": ("demo_mot", mot_support.SMALL),
}


def dia_assets(demo) -> dict:
    return {"model": str(demo / "dia"), "data": str(demo / "tokens/train"), "eval_data": str(demo / "tokens/eval")}


ASSETS = {"demo": dia_assets, "higgs_demo": higgs_support.assets, "demo_mot": mot_support.assets}


@pytest.mark.parametrize("recipe", CASES)
def test_a_compiled_run_is_the_same_run(request, one_rank_alone, tmp_path, recipe):
    assets, flags = CASES[recipe]
    config = flags | COMMON | ASSETS[assets](request.getfixturevalue(assets))
    configs = {"plain": config, "compiled": config | {"compile": True}}
    runs = Runs(one_rank_alone, recipe, tmp_path, configs, around="helpers.compile_support:scalar_code")
    plain, compiled = runs / "plain", runs / "compiled"
    assert json.loads((compiled / "config.json").read_text())["config"]["compile"]
    assert "--compile" in (compiled / "printed.log").read_text()
    assert "--compile" not in (plain / "printed.log").read_text()
    assert steps(compiled) == pytest.approx(steps(plain), rel=1e-5)
    expected = weights(plain)
    found = weights(compiled)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm() / (value.norm() + 1e-9)) < 1e-4, name


def steps(run) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [line[name] for line in lines if "event" not in line for name in ("loss", "grad_norm")]
    assert len(values) == 4
    return values


def weights(run) -> dict:
    (file,) = (run / "export").glob("*.safetensors")
    return load_file(file)
