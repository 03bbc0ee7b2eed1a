"""Speak a text with a model or adapter that dia_full.py or dia_lora.py trained, or merge an adapter into its base.

    python finetune/infer/dia_speak.py --adapter runs/my-voice/export --text "[S1] Hello." --wav hello.wav
    python finetune/infer/dia_speak.py --model runs/my-dia/export --text "[S1] Hello." --wav hello.wav
    python finetune/infer/dia_speak.py --adapter runs/my-voice/export --merge my-voice-dia

./launch.sh speak --run runs/my-voice does the same and finds the export by itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.config import EXIT_USER_ERROR, UserError


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--adapter", help="folder that dia_lora.py exported")
    parser.add_argument("--model", help="model folder or hub id; default: the base model of the adapter")
    parser.add_argument("--text", help="text to speak")
    parser.add_argument("--wav", type=Path, help="audio file to write")
    parser.add_argument("--codec", help="DAC codec: hub id or folder; default: the one in the model's processor")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest output (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="take the most likely codes instead of sampling")
    parser.add_argument("--temperature", type=float, default=1.3, help="at least 1 (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=45, help="sample from the k most likely (default: %(default)s)")
    parser.add_argument(
        "--guidance", type=float, default=3.0, help="classifier-free guidance scale; 1 = off (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--merge", type=Path, help="write base + adapter as one model folder instead of speaking")
    return parser.parse_args()


def load_trained(args):
    """The model in fp32, with its adapter if there is one; its base; the tag map and flags it was trained with."""
    import torch
    from peft import PeftModel

    from models.dia.layout import read_tag_map
    from models.dia.weights import load_dia

    base, folder = args.model, Path(args.adapter or args.model)
    if args.adapter:
        try:
            adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--adapter {folder} holds no readable adapter_config.json.") from None
        base = base or adapter["base_model_name_or_path"]
    tags, training = folder / "tag_map.json", folder / "training_config.json"
    tag_map = read_tag_map(str(tags) if tags.exists() else "")
    flags = json.loads(training.read_text(encoding="utf-8")) if training.exists() else {}
    model = load_dia(base, torch.float32)
    if args.adapter:
        model = PeftModel.from_pretrained(model, str(folder))
    return model.eval(), base, tag_map, flags


def merge(args) -> None:
    """Writes base + adapter as a folder that DiaForConditionalGeneration.from_pretrained loads; whole or absent."""
    if not args.adapter:
        raise UserError("--merge needs --adapter: a model folder has no adapter to merge.")
    if args.merge.exists():
        raise UserError(f"--merge {args.merge} exists already.")
    model, base, tag_map, flags = load_trained(args)
    from models.dia.weights import write_model

    model = model.merge_and_unload()
    training = flags | {"recipe": "dia_lora", "merged": [base, args.adapter]}
    write_model(args.merge, model, model.state_dict(), base, tag_map, training)
    print(f"merged model in {args.merge}")


def say_text(args) -> None:
    if not args.wav.parent.is_dir():
        raise UserError(f"--wav {args.wav}: the folder {args.wav.parent} does not exist.")
    if args.temperature < 1:
        raise UserError(f"--temperature {args.temperature:g} must be 1 or above: transformers samples Dia no lower.")
    if args.guidance < 1:
        raise UserError(f"--guidance {args.guidance:g} must be 1 (off) or above.")
    if not args.seconds > 0:
        raise UserError(f"--seconds {args.seconds:g} must be above 0.")
    import numpy as np
    import torch

    from common.lora import base_model
    from models.dia.generate import speak
    from models.dia.layout import layout_of, text_bytes, with_speaker

    model, base, tag_map, flags = load_trained(args)
    layout = layout_of(base_model(model).config)
    ids = text_bytes(with_speaker(args.text, flags.get("text_mode", "speech")), tag_map, "--text")
    if not 0 < len(ids) <= layout.max_text:
        raise UserError(f"--text has {len(ids)} bytes; the model takes 1 to {layout.max_text}.")
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.guidance > 1:
        sampling["guidance_scale"] = args.guidance
    codec = args.codec or codec_of(base)
    rate = codec_frame_rate(codec)
    frames = min(int(args.seconds * rate), layout.max_positions - layout.tail - 1)  # the model has no positions beyond
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    [(codes, ended)] = speak(model, [ids], frames, args.seed, **({} if args.greedy else sampling))
    if not len(codes):
        raise UserError("the model ended at once and said nothing; try another --seed or a longer --text.")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "speech.npy"
        np.save(file, codes, allow_pickle=False)
        decoder = Path(__file__).resolve().parents[2] / "data" / "decode.py"
        command = [sys.executable, decoder, "--codec-weights", codec, file]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise UserError(f"--codec {codec} could not decode the speech; see its message above.")
        try:
            args.wav.write_bytes(file.with_suffix(".wav").read_bytes())
        except OSError as error:
            raise UserError(f"--wav {args.wav} cannot be written ({error.strerror}).") from None
    print(f"{len(codes) / rate:.2f} s in {args.wav}{'' if ended else ' (cut off before the speech ended)'}")


def codec_of(model: str) -> str:
    """Hub id or folder of the codec that the model's processor names; else the codec of the published Dia."""
    from transformers.utils import cached_file

    from models.dia.weights import CODEC

    path = cached_file(model, "processor_config.json", _raise_exceptions_for_missing_entries=False)
    processor = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return processor.get("audio_tokenizer", {}).get("audio_tokenizer_name_or_path") or CODEC["name"]


def codec_frame_rate(codec: str) -> float:
    from transformers import DacConfig

    try:
        config = DacConfig.from_pretrained(codec, local_files_only=Path(codec).is_dir())
    except (OSError, ValueError) as error:
        raise UserError(f"--codec {codec}: no usable config.json ({str(error).splitlines()[0]})") from None
    return config.sampling_rate / config.hop_length


def main() -> None:
    args = parse_args()
    try:
        if not args.adapter and not args.model:
            raise UserError("give --adapter (from dia_lora.py) or --model (from dia_full.py).")
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
