"""What people get wrong: every command answers with one sentence that names the cause and the way out, without a
traceback, and exits with code 2. Downloads that fail have tests of their own in data/test_fetch.py.

{here} is a folder with the files of `here`, {dia}, {higgs}, {mot} and {pairs} are the demos' assets.
"""

import json
import multiprocessing
import os
import re
import shlex
import subprocess
from pathlib import Path

import encode
import numpy as np
import pytest
import soundfile

from common.errors import run_command
from helpers import support

TRAIN_DIA = "dia_lora --model {dia}/dia --data {dia}/tokens/train --steps 1 --precision fp32 --out {here}/new"
TRAIN_MOT = "llama_mot --model {mot}/llama --musicgen {mot}/musicgen --data {mot}/tokens --steps 1 --out {here}/new"
ENCODE = "data/encode --codec dac --codec-weights {dia}/codec --out {here}/new"
SPEAK = "infer/dia_speak --text Hi. --wav {here}/o.wav"
CLONE = "infer/higgs_speak --text Hi. --wav {here}/o.wav"
MUSIC = "infer/mot_generate --caption x --wav {here}/o.wav"
ENHANCE = "infer/enhance --source {here}/noisy --out {here}/new"

MISTAKES = {
    # ---- flags of the recipes
    "dia_lora --modle x": r"unknown flag --modle; did you mean --model\?",
    "dia_full --steps 10 20": "'20' follows a flag that does not take it; --help",
    "higgs_clone --lr abc": "--lr: invalid float value: 'abc'; --help lists the flags",
    "llama_mot --lr 5": "--lr 5.0 is out of range: it takes 1e-06 to 0.01",
    "cmgan --steps -1": "--steps -1 is out of range: it takes 0 or more",
    "diffusion_buffer --precision fp16": "--precision: invalid choice: 'fp16' .choose from",
    "dia_lora --model {dia}/dia": "--model and --data go together: give both, or neither",
    "dia_lora --tracker foo": "--tracker foo: it takes tensorboard, wandb",
    "dia_lora --eval-split 0.1": "--eval-split divides --data: it needs --data",
    "cmgan --micro-tokens 9": "unknown flag --micro-tokens",
    "dia_full --quantize 4bit": "unknown flag --quantize",
    "dia_lora --quantize 4bit --model {dia}/dia --data {dia}/tokens/train --ds ds_configs/zero3.json": "needs ZeRO-2",
    # ---- the DeepSpeed file and the config file
    "dia_lora --ds {here}/nowhere.json": "no such file; the repository's own are in ds_configs/",
    "dia_lora --ds {here}/cut.json": "is not valid JSON: Expecting",
    "dia_lora --ds {here}/list.json": "must hold a JSON object, not a list",
    "dia_lora --ds {here}/folder": "no such file; the repository's own are in ds_configs/",
    "dia_lora --ds {here}/typo.json": "'zero_optimisation', which DeepSpeed does not know: write 'zero_optimization'",
    "dia_lora --ds {here}/stage9.json": "stage to 9; it must be 0, 1, 2 or 3",
    "dia_lora --ds {here}/offload.json": 'offload_optimizer to "cpu"; it must be an object',
    TRAIN_DIA + " --ds {here}/stgae.json": "DeepSpeed refuses the file of --ds: .* stgae Extra inputs",
    "dia_lora --config {here}/nowhere": "--config .*nowhere cannot be read: .* No such file",
    "dia_lora --config {here}/run/config.json": "belongs to a higgs_clone run, not to dia_lora",
    # ---- models and data of the recipes
    "dia_lora --model {here}/nowhere --data {dia}/tokens/train": "neither a folder in the Hugging Face format nor a",
    "dia_lora --model {here}/text.txt --data {dia}/tokens/train": "neither a folder in the Hugging Face format nor a",
    "dia_lora --model some/model --data {dia}/tokens/train": "--model some/model is not in the cache, and",
    "dia_lora --model {higgs}/model --data {dia}/tokens/train": "is a 'higgs_audio_v2' model, not 'dia'",
    TRAIN_DIA + " --revision v1": "--revision v1 is for a model on the hub: --model .* is a local folder",
    "dia_lora --model {dia}/dia --data {here}/nowhere": "nowhere",
    "dia_lora --model {dia}/dia --data {here}/folder": "dataset.json",
    "dia_lora --model {dia}/dia --data {mot}/tokens": "codec has name = 'encodec' but .* needs 'dac'; encode the audio",
    "dia_full --model {dia}/dia --data {pairs}": "pairs",
    "higgs_clone --model {higgs}/model --data {dia}/tokens/train": "name = 'dac' but .* needs 'higgs'; encode",
    "llama_mot --model {mot}/llama --data {mot}/tokens": "name one with --musicgen",
    "llama_mot --model {mot}/llama --musicgen {mot}/llama --data {mot}/tokens": "is a 'llama' model, not 'musicgen'",
    TRAIN_MOT + " --adapter {here}/nowhere": "no readable adapter_config.json of llama_mot.py",
    TRAIN_MOT + " --train-parts x": "--train-parts x: choose from all, proj_only",
    TRAIN_DIA + " --lora-groups foo": "unknown LoRA group 'foo'; the groups are enc_attn",
    TRAIN_DIA + " --channels 7": "has 9 channels; it takes 9, or 18 for stereo",
    TRAIN_DIA + " --tag-map {here}/cut.json": "tag-map .*cut.json",
    TRAIN_DIA + " --eval-data {here}/nowhere": "nowhere",
    TRAIN_DIA + " --eval-data {dia}/tokens/train": "--allow-overlap",
    TRAIN_DIA + " --out {here}/text.txt": "--out .*text.txt cannot be created",
    TRAIN_DIA + " --out /proc/new": "--out /proc/new cannot be created",
    TRAIN_DIA + " --resume {here}/nowhere": "--resume",
    "cmgan --data {here}/folder": "folder",
    "cmgan --data {dia}/tokens/train": "tokens/train",
    "cmgan --data {pairs} --model {here}/text.txt": "text.txt",
    "diffusion_buffer --data {pairs} --model {here}/nowhere": "nowhere",
    "diffusion_buffer --data {here}/nowhere": "nowhere",
    # ---- data/
    "data/encode": "required: --codec, --source, --out; --help lists the flags",
    "data/encode --codec mp3": "--codec: invalid choice: 'mp3' .choose from",
    ENCODE + " --source {here}/nowhere": "--source .*nowhere does not exist",
    ENCODE + " --source {here}/text.txt": "--format folder needs a folder, but --source .* is a file",
    ENCODE + " --source {here}/folder": "no clips found in --source .* with --format folder",
    ENCODE + " --source {here}/silent --sourc x": r"unknown flag --sourc; did you mean --source\?",
    ENCODE + " --source {here}/without": "text",
    ENCODE + " --source {here}/cut.json --format jsonl": "cut.json",
    ENCODE + " --source {here}/columns.csv --format csv": "columns.csv",
    ENCODE + " --source some/dataset --format hf": "--source some/dataset is not in the cache, and HF_HUB_OFFLINE",
    ENCODE + " --source {here}/ünï --prompts {here}/nowhere": "--prompts .*nowhere does not exist",
    ENCODE + " --source {here}/ünï --workers 0": "--workers: 0 is out of range: it takes 1 or more",
    ENCODE + " --source {here}/ünï --min-seconds -1": "--min-seconds: -1 is out of range: it takes 0 or more",
    ENCODE + " --source {here}/ünï --shard 3/2": "--shard: 3/2 is not I/N with I from 0 to N-1",
    ENCODE + " --source {here}/ünï --out {here}/text.txt": "exists and is not a dataset: choose another path or remove",
    ENCODE + " --source {here}/ünï --out /proc/new": "/proc/new.work cannot be read or written",
    ENCODE
    + " --source {here}/ünï --codec-weights {mot}/codec": "--codec dac does not match .* which is a encodec codec",
    ENCODE + " --source {here}/ünï --codec-weights {dia}/dia": "is a dia model; it must be one of dac, encodec",
    "data/decode --codec-weights {dia}/codec {here}/nowhere.npy": "cannot read .*nowhere.npy",
    "data/decode --codec-weights {dia}/codec {here}/four.npy": "has 4 channels, but this codec needs 9",
    "data/decode --codec-weights {dia}/codec {here}/text.txt": "cannot read .*text.txt as a plain .npy",
    "data/decode --codec-weights some/codec {here}/four.npy": "--codec-weights some/codec is not in the cache",
    "data/check {here}/folder": "is not a dataset .no dataset.json.: make one with",
    "data/check {dia}/tokens/train --listen -1": "--listen: -1 is out of range",
    "data/pairs --clean {here}/noisy --out {here}/new": "--clean needs either --noisy or --noise",
    "data/pairs --clean {here}/noisy --noisy {here}/folder --out {here}/new": "no audio files found in --noisy",
    "data/pairs --clean {here}/text.txt --noisy {here}/noisy --out {here}/new": "--clean .*text.txt is not a folder",
    "data/pair_speakers {here}/folder --out {here}/new": "is not a dataset",
    "data/cluster_speakers {here}/folder --embedder {here}/nowhere --out {here}/new": "nowhere|is not a dataset",
    "data/score {here}/noisy/a.wav --wer {here}/folder": "cannot|--wer .*folder",
    "data/demo --model x": "--model: invalid choice",
    "data/fetch modle": "neither a path on this machine nor a hub id, which has the form owner/name",
    # ---- infer/
    "infer/dispatch nosuch": "write one of speak, generate, enhance, diagnose, convert, report, watch, inspect",
    "infer/dispatch speak": "give --run with the folder of a dia_lora",
    "infer/dispatch speak --run {here}/nowhere": "is not a run folder: it holds no config.json",
    "infer/dispatch speak --run {here}/run": "export does not exist: the run has not finished",
    "infer/dispatch generate --run {here}/run": "higgs_clone, which generate does not support: use",
    "infer/dispatch enhance --run {here}/run": "comes from higgs_clone, which enhance does not support: use",
    "infer/dispatch report {here}/run": "holds no metrics.jsonl: it has not begun to train",
    SPEAK: "give --adapter .from dia_lora.py. or --model",
    SPEAK + " --model {dia}/dia --wav {here}/no/o.wav": "the folder .*no does not exist",
    SPEAK + " --model {dia}/dia --temperature 0.5": "--temperature: 0.5 is out of range: it takes 1 or more",
    SPEAK + " --model {dia}/dia --seconds nan": "--seconds: nan is out of range: it takes above 0",
    SPEAK + " --model {dia}/dia --top-k 0": "--top-k: 0 is out of range",
    SPEAK + " --model {dia}/dia --voice {here}/noisy/a.wav": "--voice and --voice-text go together",
    SPEAK
    + " --model {dia}/dia --codec {here}/nowhere": "the codec .*nowhere is not on this machine; give it as --codec",
    SPEAK + " --model {dia}/dia --codec {here}/folder": "is not a readable DAC codec",
    SPEAK + " --model {higgs}/model": "is a 'higgs_audio_v2' model, not 'dia'",
    SPEAK + " --adapter {here}/folder": "holds no readable adapter_config.json: name an export folder",
    SPEAK + " --adapter {here}/no-base": "names no base model; export the run again",
    SPEAK + " --adapter {here}/no-weights": "has no adapter_model.safetensors: export the run again",
    SPEAK + " --adapter {here}/cut-weights": "adapter_model.safetensors is damaged .* export the run again",
    SPEAK + " --adapter {here}/other-model": "does not fit this base model; was it trained on another",
    SPEAK + " --adapter {here}/cut-flags": "training_config.json is damaged",
    "infer/dia_speak --adapter {here}/no-weights --merge {here}/folder": "--merge .*folder exists already",
    "infer/dia_speak --model {dia}/dia --merge {here}/new": "--merge needs --adapter: a model folder has no adapter",
    "infer/dia_speak --model {dia}/dia --text-file {here}/four.npy --wav {here}/o.wav": "cannot be read as UTF-8 text",
    CLONE: "give --adapter or --model",
    CLONE + " --model {higgs}/model --ref {here}/noisy/a.wav": "--ref and --ref-text go together",
    CLONE + " --model {higgs}/model --seconds -1": "--seconds: -1 is out of range",
    CLONE + " --model some/model": "--model some/model is not in the cache, and HF_HUB_OFFLINE",
    MUSIC + " --adapter {here}/folder": "no readable adapter_config.json of llama_mot.py",
    MUSIC + " --adapter {here}/folder --min-seconds 5 --seconds 1": "--min-seconds 5 is more than --seconds 1",
    ENHANCE + " --model {here}/nowhere": "nowhere does not exist",
    ENHANCE + " --model {here}/text.txt": "comes without a config.json: name its recipe with --recipe",
    ENHANCE + " --model {here}/text.txt --recipe cmgan": "text.txt",
    ENHANCE + " --run {here}/run": "was made by higgs_clone; this command takes models of cmgan and diffusion_buffer",
    "infer/diagnose": "give --run, --model or --recipe; --help lists the flags",
    "infer/convert --run {here}/nowhere": "is not a run folder: it holds no config.json",
    "infer/convert --run {here}/run": "holds no checkpoints",
    "infer/convert --run {here}/run --out {here}/folder": "exists already: name another folder with --out",
    "infer/dia_convert native {here}/text.txt {here}/new": "cannot be read as plain weights",
    "infer/dia_convert stereo some/model {here}/new": "some/model is not in the cache",
    "infer/dia_convert average {here}/new {here}/noisy": "is neither a model folder .config.json. nor a checkpoint",
    "infer/push --run {here}/run me": "me is not a name of the form owner/name",
    "infer/push --run {here}/run me/x": "HF_TOKEN is not set: make a token with write access",
    "infer/push --run {here}/run me/x --card-only {here}/new": "export does not exist: the run has not finished",
    "infer/inspect_clip": "give --recipe, or --run with a run folder",
    "infer/inspect_clip --recipe dia_lora --modle x": r"unknown flag --modle; did you mean --model\?",
    "infer/inspect_clip --recipe dia_lora --data {dia}/tokens/train --clip zzz": "has no such clip; its first is",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory, demo):
    here = tmp_path_factory.mktemp("here")
    for folder in ("folder", "noisy", "without", "ünï", "run", "no-base", "no-weights", "cut-weights", "other-model"):
        (here / folder).mkdir()
    (here / "cut-flags").mkdir()
    texts = {
        "text.txt": "hello",
        "cut.json": '{"zero_optimization": ',
        "list.json": "[1]",
        "typo.json": '{"zero_optimisation": {"stage": 2}}',
        "stage9.json": '{"zero_optimization": {"stage": 9}}',
        "stgae.json": '{"zero_optimization": {"stage": 2, "stgae": 1}}',
        "offload.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
        "columns.csv": "a,b\n1,2\n",
        "run/config.json": '{"recipe": "higgs_clone", "config": {}}',
        "no-base/adapter_config.json": "{}",
        "cut-flags/training_config.json": "{",
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    adapter = {"base_model_name_or_path": str(demo / "dia"), "peft_type": "LORA", "r": 4, "target_modules": ["nothing"]}
    for folder in ("no-weights", "cut-weights", "other-model", "cut-flags"):
        (here / folder / "adapter_config.json").write_text(json.dumps(adapter))
    (here / "cut-weights/adapter_model.safetensors").write_bytes(b"\xff" * 100)
    (here / "other-model/adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    np.save(here / "four.npy", np.zeros((20, 4), dtype=np.int16))
    wave = np.random.default_rng(0).standard_normal(16000) * 0.1
    for name in ("noisy/a.wav", "without/a.wav", "ünï/ä b.wav"):
        soundfile.write(here / name, wave, 16000)
    (here / "ünï/ä b.txt").write_text("Hello.")
    return here


def test_there_are_many():
    assert len(MISTAKES) >= 60
    assert {command.split()[0] for command in MISTAKES} >= {
        path.stem for path in Path(support.ROOT, "finetune").glob("*.py")
    }
    scripts = {path.stem for path in Path(support.ROOT, "data").glob("*.py")} - {"watch"}  # which only training starts
    assert {command.split()[0].removeprefix("data/") for command in MISTAKES if command.startswith("data/")} == scripts


# Processes forked from one that has imported the libraries: importing them takes longer than any of these mistakes.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["datasets", "deepspeed", "peft", "transformers.models.dia.modeling_dia"])


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, here, demo, higgs_demo, demo_mot, pairs, tmp_path):
    name, *words = shlex.split(mistake)
    places = {"here": here, "dia": demo, "higgs": higgs_demo, "mot": demo_mot, "pairs": pairs}
    folder = "" if name.startswith("data/") else "finetune"
    script = Path(support.ROOT, folder, f"{name}.py")
    environment = {key: value for key, value in support.environment().items() if key != "HF_TOKEN"}
    command = [str(script), *(word.format(**places) for word in words)]
    process = FORKS.Process(target=support.become, args=(command, environment, str(tmp_path / "said")))
    process.start()
    process.join(timeout=120)
    said = (tmp_path / "said").read_text()
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert process.exitcode == 2 and "Traceback" not in said and "usage:" not in said, said
    assert len(errors) == 1 and said.rstrip().endswith(errors[0]), said
    assert re.search(MISTAKES[mistake], errors[0]), errors[0]
    assert not os.path.exists(here / "new") or not any((here / "new").iterdir()), "nothing half-written is left"


# The same as people type them, and audio that no codec can use.
TYPED = {
    "./launch.sh": "no command or recipe 'spaek'; ./launch.sh help lists them",
    "./launch.sh dia_lora --ranks 0": "--ranks 0 is not a positive number",
    "./launch.sh slurm --nodes 2 spaek": "slurm: no recipe 'spaek'",
}
BROKEN = {
    "empty": (np.zeros(0), "0.00 s"),
    "not a number": (np.full(44100, np.nan), "finite|NaN"),
    "no sound": (b"\0\0\0\x18ftypmp42" + b"\0" * 500, "read|decode"),
}


@pytest.mark.parametrize("command", TYPED)
def test_a_mistake_at_the_prompt(command):
    words = shlex.split(command) + ["spaek"] * (command == "./launch.sh")
    environment = support.environment(AUDIO_FINETUNE_ENV=support.VENV)
    done = subprocess.run(
        words, cwd=support.ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and TYPED[command] in done.stderr, done.stderr


@pytest.mark.parametrize("kind", BROKEN)
def test_audio_that_cannot_be_used(kind, tmp_path, demo, monkeypatch, capsys):
    sound, said = BROKEN[kind]
    (tmp_path / "in").mkdir()
    file = tmp_path / "in/a.wav"
    if isinstance(sound, bytes):
        file.write_bytes(sound)
    else:
        soundfile.write(file, sound, 44100, subtype="FLOAT")
    file.with_suffix(".txt").write_text("Hello.")
    words = [
        "--codec",
        "dac",
        "--codec-weights",
        demo / "codec",
        "--source",
        tmp_path / "in",
        "--out",
        tmp_path / "out",
    ]
    monkeypatch.setattr("sys.argv", ["encode.py", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        run_command(encode.main)
    last = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2
    assert re.fullmatch(rf"error: all 1 clips were rejected; the first: a: .*({said}).*", last), last
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path, demo):
    tmp_path.chmod(0o500)
    command = [support.PYTHON, support.ROOT / "data/pair_speakers.py", demo / "tokens/train", "--out", tmp_path / "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "permission" in done.stderr.lower() and "Traceback" not in done.stderr
