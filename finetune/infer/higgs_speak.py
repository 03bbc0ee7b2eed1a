"""Speak with a voice that a recording shows, by a model that higgs_clone.py trained; or merge an adapter.

    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --ref voice.wav --ref-text "What it says." \\
        --text "Hello." --wav hello.wav
    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --merge my-higgs

--model instead of --adapter takes a whole folder: a full preset's export, a merged one, or the base.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.config import EXIT_USER_ERROR, UserError

FRAMES_A_SECOND = 25  # of the Higgs codec
DATA = Path(__file__).resolve().parents[2] / "data"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--adapter", help="folder that higgs_clone.py exported with a LoRA preset")
    add("--model", help="whole model; with --adapter: another base than the one it names")
    add("--revision", default="", help="revision of the base on the hub")
    add("--ref", type=Path, help="recording of the voice")
    add("--ref-text", help="what the recording says")
    add("--text", help="what to say")
    add("--scene", help="where it is said (default: a quiet room)")
    add("--wav", help="where to write the sound")
    add("--codec", help="codec: hub id or folder; default: the one the model names")
    add("--seconds", type=float, default=20.0, help="longest output (default: %(default)s)")
    add("--greedy", action="store_true", help="most likely codes instead of sampling")
    add("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    add("--merge", help="write base + adapter as one model folder instead of speaking")
    add("--codec-name", help="codec that the merged folder names (default: the published one's hub id)")
    return parser.parse_args()


def load_tuned(adapter: str | None, base: str | None, revision: str):
    """Base model, with its adapter if there is one, fp32; where it came from, revision and how texts are taken."""
    import torch

    from models.higgs.weights import load_higgs

    facts, training = {}, {}
    if adapter:
        try:
            facts = json.loads(Path(adapter, "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--adapter {adapter} holds no readable adapter_config.json.") from None
    elif not base:
        raise UserError("give --adapter or --model.")
    source = base or facts["base_model_name_or_path"]
    revision = revision or ("" if base else facts.get("revision") or "")
    settings = Path(adapter or base) / "training_config.json"
    if settings.is_file():
        training = json.loads(settings.read_text(encoding="utf-8"))
    model = load_higgs(source, revision, torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval(), source, revision, training.get("normalise_text", True)


def merge(args) -> None:
    """Base + adapter as a folder in the native format; whole or absent."""
    from models.higgs.weights import CODEC, write_model

    out = Path(args.merge)
    if out.exists():
        raise UserError(f"--merge {out} exists already.")
    if not args.adapter:
        raise UserError("--merge needs --adapter.")
    model, source, revision, _ = load_tuned(args.adapter, args.model, args.revision)
    merged = model.merge_and_unload()
    facts = {"adapter": args.adapter, "base": source, "revision": revision}
    codec = CODEC if args.codec_name is None else args.codec_name
    write_model(out, merged, dict(merged.state_dict()), source, revision, codec, facts)
    print(f"merged model in {out}")


def say_text(args) -> None:
    import numpy as np
    import torch

    from models.higgs.generate import speak
    from models.higgs.layout import build_row, layout_of
    from models.higgs.text import Chat
    from models.higgs.weights import codec_of, load_tokenizer

    if bool(args.ref) != bool(args.ref_text):
        raise UserError("--ref and --ref-text go together: the model reads what the voice says.")
    model, source, revision, normalise = load_tuned(args.adapter, args.model, args.revision)
    tokenizer = load_tokenizer(source, revision)
    layout, chat = layout_of(model.config, tokenizer), Chat(tokenizer, normalise)
    codec = args.codec or codec_of(source, revision)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "speech.npy"
        segments = [encode(args.ref, codec, Path(scratch))] if args.ref else []
        said = chat.text(args.ref_text, "--ref-text") if args.ref else None
        [ids] = chat.ids([chat.prompt(chat.text(args.text, "--text"), said, args.scene, answer=False)])
        row = build_row("--text", ids, segments, layout, answer=False)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        frames = int(args.seconds * FRAMES_A_SECOND)
        [spoken] = speak(model, [row], layout, frames, args.seed, greedy=args.greedy)
        if spoken.refused:
            raise UserError(f"nothing to hear ({spoken.refused}); try another --seed or a longer --text.")
        np.save(file, spoken.codes, allow_pickle=False)
        run_data("decode.py", "--codec-weights", codec, file)
        Path(args.wav).write_bytes(file.with_suffix(".wav").read_bytes())
    print(f"{len(spoken.codes) / FRAMES_A_SECOND:.2f} s in {args.wav}{'' if spoken.ended else ' (cut at --seconds)'}")


def encode(recording: Path, codec: str, scratch: Path):
    """Codes (T, K) of a recording, by data/encode.py, which refuses what is silent, broken or too short."""
    import numpy as np

    from common.tokens import TokenDataset

    if not recording.is_file():
        raise UserError(f"--ref {recording} does not exist.")
    line = {"id": "reference", "audio": recording.name, "text": "x"}
    (scratch / "reference.jsonl").write_text(json.dumps(line))
    out = scratch / "tokens"
    place = ["--source", scratch / "reference.jsonl", "--audio-root", recording.parent, "--out", out]
    run_data("encode.py", "--codec", "higgs", "--codec-weights", codec, "--format", "jsonl", *place)
    return np.array(TokenDataset(str(out)).codes(0))


def run_data(script: str, *words) -> None:
    done = subprocess.run(
        [sys.executable, DATA / script, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"data/{script} failed: {''.join(reason).removeprefix('error: ')}")


def main() -> None:
    args = parse_args()
    try:
        if args.merge:
            merge(args)
        elif args.text and args.wav:
            say_text(args)
        else:
            raise UserError("give --text and --wav to speak, or --merge to write a model folder.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
