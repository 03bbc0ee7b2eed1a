"""Speak in the voice of a recording with a model trained by higgs_clone.py, or merge an adapter into its base.

    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --ref voice.wav --ref-text "What it says." \\
        --text "Hello." --wav hello.wav
    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --merge my-higgs

--model instead of --adapter takes a whole model: the export of a full preset, a merged folder, or the base.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.config import EXIT_USER_ERROR, UserError

FRAMES_PER_SECOND = 25  # of the Higgs codec
DATA = Path(__file__).resolve().parents[2] / "data"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--adapter", help="folder that higgs_clone.py exported with a LoRA preset")
    add("--model", help="whole model: hub id or folder; with --adapter: base to use instead of the one it names")
    add("--revision", default="", help="revision of the base on the hub; empty = the adapter's, or the newest")
    add("--ref", type=Path, help="recording of the voice to clone")
    add("--ref-text", help="transcript of the recording")
    add("--text", help="text to speak")
    add("--scene", help="description of the recording scene (default: a quiet room)")
    add("--wav", help="output file")
    add("--codec", help="codec: hub id or folder (default: the one that the model names)")
    add("--seconds", type=float, default=20.0, help="maximum length of the output (default: %(default)s)")
    add("--greedy", action="store_true", help="greedy decoding instead of random sampling")
    add("--seed", type=int, default=0, help="seed of the random sampling (default: %(default)s)")
    add(
        "--merge",
        metavar="FOLDER",
        help="merge the adapter into the base and write this model folder instead of speaking",
    )
    add("--codec-name", help="hub id of the codec, written into the merged folder (default: the published one)")
    return parser.parse_args()


def load_tuned(adapter: str | None, base: str | None, revision: str):
    """The model in fp32, with its adapter if there is one; its base, the base's revision, and whether texts are
    normalised."""
    import torch

    from models.higgs.weights import load_higgs

    adapter_config, training = {}, {}
    if adapter:
        try:
            adapter_config = json.loads(Path(adapter, "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--adapter {adapter} has no readable adapter_config.json.") from None
    elif not base:
        raise UserError("give --adapter or --model.")
    source = base or adapter_config["base_model_name_or_path"]
    revision = revision or ("" if base else adapter_config.get("revision") or "")
    file = Path(adapter or base) / "training_config.json"
    if file.is_file():
        training = json.loads(file.read_text(encoding="utf-8"))
    model = load_higgs(source, revision, torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval(), source, revision, training.get("normalise_text", True)


def merge(args) -> None:
    """Writes base and adapter as one model folder; complete or absent."""
    from models.higgs.weights import CODEC, write_model

    out = Path(args.merge)
    if out.exists():
        raise UserError(f"--merge {out} exists already.")
    if not args.adapter:
        raise UserError("--merge needs --adapter.")
    model, source, revision, normalise = load_tuned(args.adapter, args.model, args.revision)
    merged = model.merge_and_unload()
    # What speaking needs to know: the recipe selects this script, and texts are prepared as in training.
    training = {"recipe": "higgs_clone", "normalise_text": normalise}
    training |= {"adapter": args.adapter, "base": source, "revision": revision}
    codec = CODEC if args.codec_name is None else args.codec_name
    write_model(out, merged, dict(merged.state_dict()), source, revision, codec, training)
    print(f"merged model in {out}")


def say_text(args) -> None:
    import numpy as np
    import torch

    from models.higgs.generate import speak
    from models.higgs.layout import build_row, layout_of
    from models.higgs.text import Chat
    from models.higgs.weights import codec_of, load_tokenizer

    if bool(args.ref) != bool(args.ref_text):
        raise UserError("--ref and --ref-text go together: the model needs the transcript of the reference.")
    model, source, revision, normalise = load_tuned(args.adapter, args.model, args.revision)
    tokenizer = load_tokenizer(source, revision)
    layout, chat = layout_of(model.config, tokenizer), Chat(tokenizer, normalise)
    codec = args.codec or codec_of(source, revision)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "speech.npy"
        segments = [encode(args.ref, codec, Path(scratch))] if args.ref else []
        ref_text = chat.text(args.ref_text, "--ref-text") if args.ref else None
        [ids] = chat.ids([chat.prompt(chat.text(args.text, "--text"), ref_text, args.scene, answer=False)])
        row = build_row("--text", ids, segments, layout, answer=False)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        frames = int(args.seconds * FRAMES_PER_SECOND)
        [spoken] = speak(model, [row], layout, frames, args.seed, greedy=args.greedy)
        if spoken.refused:
            raise UserError(f"the model generated no speech ({spoken.refused}); try another --seed or a longer --text.")
        np.save(file, spoken.codes, allow_pickle=False)
        run_data("decode.py", "--codec-weights", codec, file)
        Path(args.wav).write_bytes(file.with_suffix(".wav").read_bytes())
    print(f"{len(spoken.codes) / FRAMES_PER_SECOND:.2f} s in {args.wav}{'' if spoken.ended else ' (cut at --seconds)'}")


def encode(recording: Path, codec: str, scratch: Path):
    """Codes (T, K) of a recording, from data/encode.py, which refuses silent, broken and too short files."""
    import numpy as np

    from common.tokens import TokenDataset

    if not recording.is_file():
        raise UserError(f"--ref {recording} does not exist.")
    line = {"id": "reference", "audio": recording.name, "text": "x"}
    (scratch / "reference.jsonl").write_text(json.dumps(line))
    out = scratch / "tokens"
    paths = ["--source", scratch / "reference.jsonl", "--audio-root", recording.parent, "--out", out]
    run_data("encode.py", "--codec", "higgs", "--codec-weights", codec, "--format", "jsonl", *paths)
    return np.array(TokenDataset(str(out)).codes(0))


def run_data(script: str, *arguments) -> None:
    """Runs a command of data/ in a separate process, and passes its error message on."""
    done = subprocess.run(
        [sys.executable, DATA / script, *map(str, arguments)], capture_output=True, text=True, check=False
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
