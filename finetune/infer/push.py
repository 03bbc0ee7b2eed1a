"""Upload the export of a run to the Hugging Face hub, with a model card and samples to hear.

    HF_TOKEN=... ./launch.sh push --run runs/my-voice owner/my-voice
    ./launch.sh push --run runs/my-voice --card-only my-voice-upload owner/my-voice

The token comes from the environment only. The repository is private unless --public is given. --card-only writes what
would be uploaded into a folder instead.
"""

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.errors import UserError, command_parser, run_command
from common.report import exported_checkpoint, read_records

LOCAL_PATHS = ("ds", "model", "data", "eval_data", "test_data", "out", "tag_map", "musicgen", "resume")
LOCAL_PATHS += ("place", "weights", "audio_tokenizer_name_or_path")  # of a codec
SAMPLES = 4
RECIPES = {
    "dia_lora": ("text-to-speech", "peft", "A LoRA adapter for Dia"),
    "dia_full": ("text-to-speech", "transformers", "A fine-tuned Dia"),
    "higgs_clone": ("text-to-speech", "transformers", "A fine-tuned Higgs Audio v2"),
    "llama_mot": ("text-to-audio", "audio-finetune", "Music experts for a frozen Llama"),
    "cmgan": ("audio-to-audio", "audio-finetune", "A CMGAN speech enhancer"),
    "diffusion_buffer": ("audio-to-audio", "audio-finetune", "A Diffusion Buffer for live speech enhancement"),
}
USE = {
    "higgs_clone": "speak --{kind} {folder} --ref voice.wav --ref-text 'What it says.' --text 'Hello.' --wav hello.wav",
    "llama_mot": "generate --adapter {folder} --caption 'A slow piano.' --wav piano.wav",
    "cmgan": "enhance --model {folder} --source noisy_wavs --out enhanced",
    "diffusion_buffer": "enhance --model {folder} --source noisy_wavs --out enhanced",
}


def parse_args(argv: list[str] | None = None):
    parser = command_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("repo", metavar="owner/name", help="repository on the hub; it is created if it does not exist")
    parser.add_argument("--base", default="", help="hub id of the base model, if the run used a local folder")
    parser.add_argument("--license", default="", help="licence of the upload; default: that of a local base's card")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument(
        "--card-only", type=Path, help="write what would be uploaded to this folder, and upload nothing"
    )
    return parser.parse_args(argv)


def push(args) -> None:
    if args.repo.count("/") != 1 or not all(args.repo.split("/")):
        raise UserError(f"{args.repo} is not a name of the form owner/name.")
    if args.card_only:
        if args.card_only.exists():
            raise UserError(f"--card-only {args.card_only} exists already.")
        stage(args, args.card_only)
        print(f"card and files in {args.card_only}")
        return
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        raise UserError("HF_TOKEN is not set: make a token with write access in your hub settings and export it.")
    with tempfile.TemporaryDirectory() as folder:
        stage(args, Path(folder, "upload"))
        print(f"uploaded to {upload(Path(folder, 'upload'), args.repo, token, args.public)}")


def upload(folder: Path, repo: str, token: str, public: bool) -> str:
    """Uploads the folder in one commit; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload with audio-finetune")
        return str(commit.commit_url)
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = {401: "HF_TOKEN is not valid", 403: f"HF_TOKEN may not write to {repo}"}.get(status, str(error))
        raise UserError(f"{repo} could not be uploaded: {' '.join(reason.split())}.") from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"{repo} could not be uploaded: the hub cannot be reached ({type(error).__name__}); try again later."
        ) from None


def stage(args, folder: Path) -> None:
    """Copies what is uploaded: the export without local paths, samples and the card."""
    export = args.run / "export"
    if not export.is_dir():
        raise UserError(f"{export} does not exist: the run has not finished.")
    try:
        record = json.loads((args.run / "config.json").read_text(encoding="utf-8"))
        recipe = record["recipe"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"{args.run} is not a run folder: it holds no usable config.json.") from None
    base = args.base or record["config"].get("model", "")
    if os.path.isabs(base) or Path(base).exists():
        if (export / "adapter_config.json").exists():
            raise UserError(f"the base of this adapter is the local folder {base}: name its hub id with --base.")
        base = ""
    shutil.copytree(export, folder)
    for file in folder.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            file.write_text(json.dumps(without_paths(content, base), indent=2) + "\n", encoding="utf-8")
    samples = copy_samples(args.run / "samples", folder / "samples")
    records, checkpoint = read_records(args.run / "metrics.jsonl"), exported_checkpoint(export)
    card = model_card(recipe, record, records, checkpoint, base, samples, args)
    (folder / "README.md").write_text(card, encoding="utf-8")


def without_paths(content: dict, base: str) -> dict:
    """The same JSON with only the names of local files and folders, and the base's hub id."""
    if "base_model_name_or_path" in content:
        content["base_model_name_or_path"] = base
    for key, value in content.items():
        if isinstance(value, dict):
            content[key] = without_paths(value, base)
        elif key in LOCAL_PATHS and isinstance(value, str) and os.path.isabs(value):
            content[key] = base if key == "model" else Path(value).name
    return content


def copy_samples(source: Path, target: Path) -> list[tuple[str, str]]:
    """Copies sounds of the last step; returns file names and texts."""
    steps = sorted(source.glob("step-*"))
    sounds = sorted(steps[-1].glob("*.wav"))[:SAMPLES] if steps else []
    copied = []
    for sound in sounds:
        target.mkdir(exist_ok=True)
        shutil.copy(sound, target)
        facts = sound.with_suffix(".json")
        text = json.loads(facts.read_text(encoding="utf-8")).get("text", "") if facts.is_file() else ""
        copied.append((sound.name, text))
    return copied


def license_of(base: str) -> str | None:
    """The licence that the card of a local base names."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    card = Path(base, "README.md")
    if not base or not card.is_file():
        return None
    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{card} has no readable metadata ({reason}): name the licence with --license.") from None


def model_card(recipe: str, record: dict, records: list[dict], checkpoint: dict, base: str, samples: list, args) -> str:
    from huggingface_hub import ModelCardData

    task, library, title = RECIPES[recipe]
    config = record["config"]
    licence = args.license or license_of(config.get("model", ""))
    front = ModelCardData(
        base_model=base or None,
        pipeline_tag=task,
        library_name=library,
        tags=["audio-finetune", "deepspeed"],
        license=licence,
    )
    lines = ["---", front.to_yaml(), "---", "", f"# {args.repo.split('/')[1]}", ""]
    lines += [f"{title}{f' ({base})' if base else ''}, trained with audio-finetune (`{recipe}`)."]
    if not licence:
        lines += ["", "No licence was named: that of the base model and of the training data apply."]
    lines += ["", "## Training", "", "| | |", "|---|---|"]
    steps = max((entry["step"] for entry in records), default=0)
    facts = {
        "exported step": f"{checkpoint.get('step', steps)} of {steps}",
        "data": Path(config["data"]).name or "the embedded demo",
        "learning rate": f"{config['lr']:g}",
        "precision": config["precision"],
        "ranks": record["ranks"],
    }
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += metrics_table(records, checkpoint.get("step", steps))
    if samples:
        lines += ["", "## Samples", ""]
        lines += [f'- {text or name}<br><audio controls src="samples/{name}"></audio>' for name, text in samples]
    return "\n".join([*lines, "", "## Use", "", *usage(recipe, base, args.repo), ""])


def metrics_table(records: list[dict], step: int) -> list[str]:
    """The evaluation of the exported step beside the one before training."""
    evals = {entry["step"]: entry for entry in records if entry.get("event") == "eval"}
    if step not in evals:
        return []
    before, after = evals.get(0, {}), evals[step]
    lines = ["", "## Evaluation", "", "| | before | exported |", "|---|---|---|"]
    for name, value in after.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        first = before.get(name)
        lines.append(f"| {name} | {'' if first is None else f'{first:.4g}'} | {value:.4g} |")
    return lines


def usage(recipe: str, base: str, repo: str) -> list[str]:
    name = repo.split("/")[1]
    if recipe == "dia_lora":
        return [
            "```python",
            "from peft import PeftModel",
            "from transformers import DiaForConditionalGeneration",
            "",
            f'model = DiaForConditionalGeneration.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(model, "{repo}")',
            "```",
        ]
    if recipe == "dia_full":
        return [
            "```python",
            "from transformers import DiaForConditionalGeneration",
            "",
            f'model = DiaForConditionalGeneration.from_pretrained("{repo}")',
            "```",
        ]
    command = USE[recipe].format(folder=name, kind="adapter" if base else "model")
    return ["```", f"hf download {repo} --local-dir {name}", f"./launch.sh {command}", "```"]


if __name__ == "__main__":
    run_command(push, parse_args())
