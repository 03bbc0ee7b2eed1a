"""Speak a text with what dia_lora.py or dia_full.py trained, or merge an adapter into a plain model folder.

python finetune/infer/dia_speak.py --adapter runs/my-voice/export --text "[S1] Hello." --wav hello.wav
python finetune/infer/dia_speak.py --model runs/my-dia/export --text "[S1] Hello." --wav hello.wav
python finetune/infer/dia_speak.py --adapter runs/my-voice/export --merge my-voice-dia
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
    parser.add_argument("--model", help="model folder or hub id; default: the one the adapter names")
    parser.add_argument("--text", help="what to say")
    parser.add_argument("--wav", help="where to write the sound")
    parser.add_argument("--codec", default="descript/dac_44khz", help="DAC: hub id or folder (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest output (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="most likely codes instead of sampling")
    parser.add_argument("--temperature", type=float, default=1.3, help="at least 1 (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=45, help="default: %(default)s")
    parser.add_argument("--guidance", type=float, default=3.0, help="1 = off (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--merge", help="write base + adapter as one model folder instead of speaking")
    return parser.parse_args()


def load_tuned(args):
    """The model in fp32, with its adapter if there is one; the tag map and text mode that it was trained with."""
    import torch
    from peft import PeftModel

    from models.dia.layout import read_tag_map
    from models.dia.weights import load_dia

    base, trained = args.model, Path(args.adapter or args.model)
    if args.adapter:
        try:
            facts = json.loads((trained / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--adapter {trained} holds no readable adapter_config.json.") from None
        base = base or facts["base_model_name_or_path"]
    tags, training = trained / "tag_map.json", trained / "training_config.json"
    tag_map = read_tag_map(str(tags) if tags.exists() else "")
    flags = json.loads(training.read_text(encoding="utf-8")) if training.exists() else {}
    model = load_dia(base, torch.float32)
    if args.adapter:
        model = PeftModel.from_pretrained(model, str(trained))
    return model.eval(), base, tag_map, flags.get("text_mode", "speech")


def merge(args) -> None:
    """Base + adapter as a folder that DiaForConditionalGeneration.from_pretrained loads; whole or absent."""
    out = Path(args.merge)
    if not args.adapter:
        raise UserError("--merge needs --adapter: a model folder is already whole.")
    if out.exists():
        raise UserError(f"--merge {out} exists already.")
    model, base, tag_map, mode = load_tuned(args)
    from models.dia.weights import write_model

    model = model.merge_and_unload()
    facts = {"text_mode": mode, "merged": [base, args.adapter]}
    write_model(out, model, model.state_dict(), base, tag_map, facts)
    print(f"merged model in {out}")


def say_text(args) -> None:
    import numpy as np
    import torch

    from common.lora import base_model
    from models.dia.generate import speak
    from models.dia.layout import layout_of, text_bytes, with_speaker

    if args.temperature < 1:
        raise UserError(f"--temperature {args.temperature:g}: Dia samples at 1 or above.")
    if args.guidance < 1:
        raise UserError(f"--guidance {args.guidance:g} must be 1 (off) or above.")
    model, _, tag_map, mode = load_tuned(args)
    limit = layout_of(base_model(model).config).max_text
    ids = text_bytes(with_speaker(args.text, mode), tag_map, "--text")
    if not 0 < len(ids) <= limit:
        raise UserError(f"--text has {len(ids)} bytes; the model takes 1 to {limit}.")
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.guidance > 1:
        sampling["guidance_scale"] = args.guidance
    rate = codec_frame_rate(args.codec)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    [(codes, ended)] = speak(model, [ids], int(args.seconds * rate), args.seed, **({} if args.greedy else sampling))
    if not len(codes):
        raise UserError("the model ended at once and said nothing; try another --seed or a longer --text.")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "speech.npy"
        np.save(file, codes, allow_pickle=False)
        decoder = Path(__file__).resolve().parents[2] / "data" / "decode.py"
        done = subprocess.run([sys.executable, decoder, "--codec-weights", args.codec, file], check=False)
        if done.returncode:
            raise UserError(f"--codec {args.codec} could not decode the speech; see its message above.")
        Path(args.wav).write_bytes(file.with_suffix(".wav").read_bytes())
    print(f"{len(codes) / rate:.2f} s in {args.wav}{'' if ended else ' (cut at --seconds)'}")


def codec_frame_rate(codec: str) -> float:
    from transformers import DacConfig

    config = DacConfig.from_pretrained(codec, local_files_only=Path(codec).is_dir())
    return config.sampling_rate / config.hop_length


def main() -> None:
    args = parse_args()
    try:
        if not args.adapter and not args.model:
            raise UserError("give --adapter (of dia_lora.py) or --model (of dia_full.py).")
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
