"""Trained models are used in bf16 on a GPU, and merged in fp32 everywhere."""

import json

import numpy as np
import pytest
import torch

from common.errors import EXIT_USER_ERROR, UserError
from helpers.higgs_support import make_clips
from helpers.mot_support import build as build_mot
from infer import dia_speak, higgs_speak, mot_generate
from models.dia.generate import speak as speak_dia
from models.dia.weights import load_dia
from models.higgs.generate import speak as speak_higgs
from models.higgs.weights import load_higgs
from models.mot.build import load_llama
from models.mot.generate import generate

SCRIPTS = {
    "dia": (dia_speak, "models.dia.weights.load_dia", "--text", "--merge"),
    "higgs": (higgs_speak, "models.higgs.weights.load_higgs", "--text", "--merge"),
    "mot": (mot_generate, "models.mot.weights.load_adapter", "--caption", None),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_precision_of_inference(name, monkeypatch, tmp_path):
    script, loader, text, merge = SCRIPTS[name]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    seen = []

    def stop(*args, **_):
        seen.extend(arg for arg in args if isinstance(arg, torch.dtype))
        raise UserError("that is enough")

    monkeypatch.setattr(loader, stop)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        uses = [[text, "Hello.", "--wav", str(tmp_path / "a.wav")]]
        if merge:
            uses.append([merge, str(tmp_path / "merged")])
        for words in uses:
            monkeypatch.setattr("sys.argv", ["x", "--adapter", str(tmp_path), *words])
            with pytest.raises(SystemExit) as left:
                script.main()
            assert left.value.code == EXIT_USER_ERROR
    whole = [torch.float32] if merge else []  # merged weights are never rounded
    assert seen == [torch.bfloat16, *whole, torch.float32, *whole]


def dia_speaks(demo) -> list:
    return speak_dia(load_dia(str(demo / "dia"), torch.bfloat16), [np.arange(97, 105)], 5, seed=0)


def higgs_speaks(demo) -> list:
    """With an adapter, which PEFT loads in fp32."""
    from peft import LoraConfig, get_peft_model

    model = load_higgs(str(demo / "model"), "", torch.bfloat16)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "audio_mlp.up_proj"]))
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    clips = make_clips(demo)
    return speak_higgs(model, clips.rows([0], answer=False), clips.layout, 5, seed=0)


def mot_plays(demo) -> list:
    model = build_mot(demo, "musicgen", "all", llama=load_llama(str(demo / "llama"), torch.bfloat16)).bfloat16()
    return generate(model, [np.array([1, 5, 9])], 3, [0])


@pytest.mark.parametrize(
    ("assets", "use"), [("demo", dia_speaks), ("higgs_demo", higgs_speaks), ("demo_mot", mot_plays)]
)
def test_a_model_in_bf16_generates(assets, use, request):
    assert len(use(request.getfixturevalue(assets))) == 1
