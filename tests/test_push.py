"""./launch.sh push, against a stand-in for the hub's HTTP API."""

import json
import os
import subprocess

import pytest
import yaml

from helpers import support
from helpers.hub_stand_in import serve
from infer import push


def make_run(folder, recipe="dia_lora", **flags):
    """A finished run as far as push looks at it."""
    config = {"model": "nari-labs/Dia-1.6B-0626", "data": "/home/me/tokens/train", "lr": 1e-4, "precision": "bf16"}
    config |= {"out": str(folder), **flags}
    (folder / "export").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"recipe": recipe, "config": config, "ranks": 2}))
    training = config | {"recipe": recipe, "checkpoint": {"step": 20, "score": 2.5}}
    (folder / "export" / "training_config.json").write_text(json.dumps(training))
    if recipe == "dia_lora":
        adapter = {"base_model_name_or_path": config["model"], "r": 16}
        (folder / "export" / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "export" / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 8)
    records = [{"event": "eval", "step": 0, "loss": 7.0}, {"step": 20, "loss": 3.0}]
    records += [{"event": "eval", "step": 20, "loss": 2.5, "eos_recall": 0.75}, {"event": "done", "step": 40}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sounds = folder / "samples" / "step-00000040"
    sounds.mkdir(parents=True)
    (sounds / "a.wav").write_bytes(b"RIFF")
    (sounds / "a.json").write_text(json.dumps({"text": "[S1] Hello."}))
    return folder


def run_push(*words, **env) -> subprocess.CompletedProcess:
    command = [support.PYTHON, support.ROOT / "finetune" / "infer" / "push.py", *map(str, words)]
    environment = support.environment(HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", **env)
    if "HF_TOKEN" not in env:
        environment.pop("HF_TOKEN", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_everything_arrives_with_a_card_and_without_local_paths(tmp_path):
    run = make_run(tmp_path / "run")
    with serve() as (hub, address):
        done = run_push("--run", run, "me/my-voice", HF_TOKEN="hf_secret_token", HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {address}" in done.stdout and "hf_secret_token" not in done.stdout + done.stderr
    assert hub.tokens == {"Bearer hf_secret_token"} and hub.repos["me/my-voice"]["visibility"] == "private"
    assert hub.files["adapter_model.safetensors"] == bytes(range(256)) * 8
    assert hub.files["samples/a.wav"] == b"RIFF"
    assert not [name for name, data in hub.files.items() if str(tmp_path).encode() in data or b"/home/me" in data]
    assert json.loads(hub.files["training_config.json"])["data"] == "train"
    _, front, card = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "nari-labs/Dia-1.6B-0626"
    assert yaml.safe_load(front)["library_name"] == "peft"
    assert "| loss | 7 | 2.5 |" in card and "exported step | 20 of 40" in card and "[S1] Hello." in card
    assert 'PeftModel.from_pretrained(model, "me/my-voice")' in card


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(401, "HF_TOKEN is not valid"), (403, "HF_TOKEN may not write to me/my-voice")],
)
def test_a_refused_token_is_one_sentence(tmp_path, status, sentence):
    with serve() as (hub, address):
        hub.refuse = status
        done = run_push("--run", make_run(tmp_path / "run"), "me/my-voice", HF_TOKEN="hf_x", HF_ENDPOINT=address)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path):
    nobody = f"http://127.0.0.1:{support.free_port()}"
    done = run_push("--run", make_run(tmp_path / "run"), "me/my-voice", HF_TOKEN="hf_x", HF_ENDPOINT=nobody)
    assert done.returncode == 2 and "the hub cannot be reached" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "change", "sentence"),
    [
        (["me/v"], {}, "HF_TOKEN is not set"),
        (["v"], {}, "v is not a name of the form owner/name"),
        (["me/v", "--card-only", "."], {}, "exists already"),
        (["me/v", "--card-only", "new"], {"model": "/data/dia"}, "name its hub id with --base"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, change, sentence):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", **change)
    with pytest.raises(push.UserError, match=sentence):
        push.push(push.parse_args(["--run", str(run), *words]))


def test_a_folder_that_is_no_finished_run_is_refused(tmp_path):
    with pytest.raises(push.UserError, match="has not finished"):
        push.push(push.parse_args(["--run", str(tmp_path), "me/v", "--card-only", str(tmp_path / "new")]))


@pytest.mark.parametrize("recipe", sorted(push.RECIPES))
def test_every_recipe_has_a_card_whose_command_names_its_verb(tmp_path, recipe):
    from infer.dispatch import SCRIPTS

    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: in the text\n")
    run = make_run(tmp_path / "run", recipe, model=str(base))
    words = ["--run", str(run), "me/v", "--base", "owner/base", "--card-only", str(tmp_path / "new")]
    push.push(push.parse_args(words))
    card = (tmp_path / "new" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"
    if not recipe.startswith("dia"):
        [verb] = [verb for verb in ("speak", "generate", "enhance") if recipe in SCRIPTS[verb]]
        assert f"./launch.sh {verb} --" in card
    assert not any(os.fsencode(tmp_path) in file.read_bytes() for file in (tmp_path / "new").rglob("*.json"))


def test_a_licence_is_named_by_a_cards_metadata_alone(tmp_path):
    assert push.license_of("") is push.license_of(str(tmp_path)) is None
    for text, licence in (("# Dia\nlicense: in the text\n", None), ("---\nlicense: mit\n---\n", "mit")):
        (tmp_path / "README.md").write_text(text)
        assert push.license_of(str(tmp_path)) == licence
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.raises(push.UserError, match="no readable metadata .*--license"):
        push.license_of(str(tmp_path))
