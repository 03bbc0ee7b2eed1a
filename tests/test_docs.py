"""Every command that README.md and docs/ show runs, in the order of its page, from a shell without exported variables.

Hub ids become the demos' tiny folders, and trainings and speech get a few flags that end them early. Cluster commands
are run by test_multinode.py; docs/add_a_recipe.md has a test of its own.
"""

import csv
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from common.config import HF_ALIASES
from helpers import support

pytestmark = [pytest.mark.distributed]

# The README comes last: it uses the runs of all pages.
PAGES = ["docs/data.md", "docs/dia.md", "docs/higgs.md", "docs/llama_mot.md", "docs/cmgan.md"]
PAGES += ["docs/diffusion_buffer.md", "docs/inspect.md", "docs/training.md", "docs/cluster.md", "README.md"]

DEMOS = "runs/demo-assets-"
STANDS_IN = {
    "nari-labs/Dia-1.6B-0626": f"{DEMOS}dia/dia",
    "descript/dac_44khz": f"{DEMOS}dia/codec",
    "bosonai/higgs-audio-v2-tokenizer": f"{DEMOS}higgs/codec",
    "bosonai/higgs-audio-v2-generation-3B-base": f"{DEMOS}higgs/model",
    "facebook/encodec_32khz": f"{DEMOS}mot/codec",
    "meta-llama/Llama-3.2-1B": f"{DEMOS}mot/llama",
    "facebook/musicgen-small": f"{DEMOS}mot/musicgen",
    "pair_speakers tokens/train": f"pair_speakers {DEMOS}dia/tokens/train --allow-no-ref --min-seconds 0.3",
    "--data pairs --hold-out p232_02 p232_17": "--data pairs/train --hold-out p286 p287",
    "--eval-split 0.1 ": "--eval-split 0.5 --seed 2 ",  # one of four speakers
    ".venv/": "$AUDIO_FINETUNE_ENV/",
}
SPEECH = "--precision fp32 --steps 2 --micro-tokens 600 --samples 0 --eval-every 2 --save-every 2"
PAIRS = "--steps 2 --seconds 0.5 --micro-batch 1 --eval-every 2 --save-every 2 --samples 0"
SHORT = {
    "dia_lora": SPEECH,
    "dia_full": SPEECH,
    "higgs_clone": f"{SPEECH} --max-start-loss 0",  # the demo's base is untrained
    "llama_mot": SPEECH,
    "cmgan": f"{PAIRS} --channels 4 --warmup 1",
    "diffusion_buffer": "--steps 2 --spec demo --micro-batch 1 --eval-every 2 --save-every 2 --samples 0 "
    "--precision fp32",
    "speak": "--seconds 1",
    "infer": "--seconds 1",
    "generate": "--seconds 1",
}
ELSEWHERE = {
    r"launch\.sh (demo|test)": "test_launch.py, and the suite itself",
    r"launch\.sh slurm|^sbatch|--hostfile": "test_multinode.py",
    r"launch\.sh watch": "test_report_watch.py",
    r"pip install|--embedder resemblyzer|--onnx": "optional packages",
    r"launch\.sh (fetch|setup)": "test_fetch.py, test_launch.py",
    r"ruff": "needs no run folder",
}


def commands(page: str) -> list[str]:
    """The commands in a page's fenced blocks, then those with arguments in its text, each on one line."""
    content = Path(support.ROOT, page).read_text()
    fenced = r"^```(?:bash|sh)?\n(.*?)^```"
    lines = "\n".join(re.findall(fenced, content, re.S | re.M)).replace("\\\n", " ").splitlines()
    known = r"(\./launch\.sh|deepspeed|sbatch|\.venv/bin/\S+) "
    found = [re.sub(r"\s+#.*|\s{2,}", " ", line).strip() for line in lines if re.match(known, line)]
    text = re.sub(r"\s+", " ", re.sub(r"^```.*?^```", "", content, flags=re.S | re.M))
    inline = re.findall(r"`(\./launch\.sh \w+ [^`]+)`", text)
    return found + [line for line in inline if not re.search(r"\b[A-Z]+\b|\.\.\.", line)]  # which stand for something


def test_no_page_is_forgotten():
    pages = {f"docs/{path.name}" for path in Path(support.ROOT, "docs").glob("*.md")} | {"README.md"}
    others = {"docs/add_a_recipe.md", "docs/figures.md", "docs/log.md"}
    assert pages - others == set(PAGES) and sum(len(commands(page)) for page in PAGES) > 50


@pytest.mark.quick
def test_links_lead_to_files_and_named_tests_exist():
    for page in [*Path(support.ROOT, "docs").glob("*.md"), *Path(support.ROOT).glob("*.md")]:
        for line in page.read_text().splitlines():
            links = [link for link in re.findall(r"\]\(([^)#\s]+)", line) if "://" not in link]
            assert all((page.parent / link).is_file() for link in links), (page, links)
            for name in re.findall(r"`(test_\w+)`", line):
                assert f"def {name}(" in (page.parent / links[-1]).read_text(), (page, name)
            for file, anchor in re.findall(r"\]\(([\w./]+)#([^)]+)\)", line):
                headings = re.findall(r"^#+ (.*)$", (page.parent / file).read_text().lower(), re.M)
                assert anchor in [re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in headings], (page, anchor)


# Flags of sbatch, deepspeed, pip and ruff.
FOREIGN = """--array --cpus-per-gpu --gpus-per-node --gpus-per-task --nodes --ntasks-per-node --signal --time
    --hostfile --master_addr --no_ssh --node_rank --no-deps --target --check""".split()


@pytest.mark.quick
def test_every_flag_that_a_page_names_exists():
    places = ["finetune/**/*.py", "data/**/*.py", "tests/bench/*.py", "tests/soak.py", "tests/conftest.py", "launch.sh"]
    code = "\n".join(path.read_text() for place in places for path in Path(support.ROOT).glob(place))
    known = {*FOREIGN, *re.findall(r"""(?:"| )(--[a-z][\w-]+)(?:"|\))""", code)}
    fields = [name.replace("_", "-") for name in re.findall(r"^    (\w+): [^=\n]+ = flag\(", code, re.M)]
    known |= {f"--{prefix}{name}" for name in (*fields, *HF_ALIASES) for prefix in ("", "no-")}
    for page in [*Path(support.ROOT, "docs").glob("*.md"), *Path(support.ROOT).glob("*.md")]:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
        if page.name not in ("log.md", "CHANGELOG.md"):  # these two name flags that were removed
            assert named <= known, (page, named - known)


@pytest.fixture(scope="module")
def place(tmp_path_factory, demo, higgs_demo, demo_mot, pairs):
    """A folder that looks like a user's clone, with the files that the pages name."""
    import datasets
    import soundfile
    import torch

    from helpers.dia_support import native_of
    from models.cmgan.network import TSCNet
    from models.dia.weights import load_dia
    from models.diffusion_buffer.network import NCSNpp

    place = tmp_path_factory.mktemp("clone")
    for name in ("launch.sh", "finetune", "data", "ds_configs", "requirements.txt"):
        (place / name).symlink_to(support.ROOT / name)
    (place / "runs").mkdir()
    for assets in Path(support.ROOT, "runs").glob("demo-assets-*"):
        (place / "runs" / assets.name).symlink_to(assets)

    audio = demo / "audio/train"
    (place / "my_clips").mkdir()
    for wave in sorted(audio.glob("*.wav"))[:12]:
        shutil.copy(wave, place / "my_clips")
        shutil.copy(wave.with_suffix(".txt"), place / "my_clips")
    shutil.copy(wave, place / "voice.wav")
    (place / "tokens").mkdir()
    shutil.copytree(demo / "tokens/eval", place / "tokens/eval")
    torch.save(native_of(load_dia(demo / "dia", torch.float32)), place / "dia-v0_1.pth")

    shutil.copy(higgs_demo / "audio/train.jsonl", place / "pairs.jsonl")
    shutil.copytree(higgs_demo / "audio/train", place / "train")
    songs = sorted((demo_mot / "audio").glob("*.wav"))[:6]
    (place / "my_audio").symlink_to(demo_mot / "audio")
    with open(place / "musiccaps-public.csv", "w", newline="") as stream:
        header = "ytid start_s end_s caption is_balanced_subset is_audioset_eval".split()
        writer = csv.writer(stream)
        writer.writerows([header, *([song.stem, 0, 10, "A slow piano.", song == songs[0], "False"] for song in songs)])

    for folder in ("clean_train", "noisy_train", "noisy_wavs", "speech", "noises", "best_ckpt", "DN-LM/train/s0"):
        (place / folder).mkdir(parents=True)
    for number in range(4):
        clean, noisy = support.voice(1.5, seed=number)
        for name, wave in (("clean_train", clean), ("noisy_train", noisy), ("speech", clean)):
            soundfile.write(place / name / f"p{285 + number}_001.wav", wave, 16000)
    (place / "VoiceBank-DEMAND").mkdir()
    columns = {"id": sorted(path.stem for path in (place / "clean_train").iterdir())}
    for side in ("clean", "noisy"):
        (place / f"VoiceBank-DEMAND/{side}_trainset_28spk_wav").symlink_to(place / f"{side}_train")
        columns[side] = sorted(map(str, (place / f"{side}_train").iterdir()))
    vb_hf = datasets.Dataset.from_dict(columns)
    for side in ("clean", "noisy"):
        vb_hf = vb_hf.cast_column(side, datasets.Audio())
    datasets.DatasetDict({"train": vb_hf}).save_to_disk(str(place / "vb_hf"))
    soundfile.write(place / "noisy_wavs/a.wav", noisy, 16000)
    soundfile.write(place / "noises/hiss.wav", np.random.default_rng(0).standard_normal(32000) * 0.1, 16000)
    for stem, wave in (("vocals", clean), ("noise", noisy - clean), ("mixture", noisy)):
        soundfile.write(place / f"DN-LM/train/s0/{stem}.wav", wave, 16000)
    torch.save(TSCNet(4).state_dict(), place / "best_ckpt/ckpt")
    official = {f"dnn.{name}": value for name, value in NCSNpp(8).state_dict().items()}
    arguments = {"sde": "bbed", "num_frames": 16, "diff_buffer_length_inference": 8, "loss_type": "onestep"}
    torch.save({"state_dict": official, "hyper_parameters": arguments}, place / "official.ckpt")
    (place / "stream.json").write_text('{"reverse_start": 0.8}')
    return place


@pytest.fixture
def shell():
    """What is exported: nothing of ours but the environment."""
    variables = {"HOME": os.environ.get("HOME", "/"), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    return variables | {"AUDIO_FINETUNE_ENV": support.VENV}


@pytest.fixture(scope="module")
def already_run():
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_runs(page, place, shell, already_run):
    for command in commands(page):
        if command in already_run or any(re.search(pattern, command) for pattern in ELSEWHERE):
            continue
        already_run.add(command)
        tiny = command
        for name, stand_in in STANDS_IN.items():
            tiny = tiny.replace(name, stand_in)
        verb = re.search(r"(?:launch\.sh |finetune/)(\w+)", tiny)[1]
        tiny = f"{tiny} {SHORT.get(verb, '')}"
        print(tiny, flush=True)
        done = subprocess.run(["bash", "-c", tiny], cwd=place, env=shell, capture_output=True, text=True, timeout=600)
        said = done.stdout + done.stderr
        # Networks that learnt for two steps: the diagnosis may find faults, and what is generated may not be speech.
        judged = (verb == "diagnose" and "PASS" in said) or "the model generated no speech" in said
        assert done.returncode == 0 or judged, f"{shlex.quote(tiny)}\n{said[-3000:]}"
