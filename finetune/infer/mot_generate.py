"""Generate music with an adapter that llama_mot.py trained.

python finetune/infer/mot_generate.py --adapter runs/my-music/export --caption "A slow piano." --wav piano.wav
python finetune/infer/mot_generate.py --adapter runs/my-music/export --caption "..." --continue start.npy --wav more.wav
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.data_commands import require_folder_of
from common.errors import UserError, between, command_parser, run_command
from common.runtime import forbid_codec_imports


def parse_args():
    parser = command_parser(__doc__)
    parser.add_argument("--adapter", required=True, help="folder that llama_mot.py exported")
    parser.add_argument("--model", help="Llama: hub id or local folder; default: the one in the adapter's config")
    parser.add_argument(
        "--revision", default="", help="revision of Llama on the hub; default: the adapter's, or the newest"
    )
    parser.add_argument("--caption", required=True, help="text prompt that describes the music")
    parser.add_argument(
        "--wav", required=True, help="output file; codes (.npy) and settings (.json) are written next to it"
    )
    parser.add_argument("--codec", help="EnCodec: hub id or local folder; default: that of the training data")
    parser.add_argument("--continue", dest="start", metavar="NPY", help="continue these codes (frames, codebooks)")
    parser.add_argument(
        "--seconds",
        type=between(float, 0, above=True),
        default=10.0,
        help="maximum length of the new music (default: %(default)s)",
    )
    parser.add_argument(
        "--min-seconds",
        type=between(float, 0),
        default=0.0,
        help="minimum length of the new music (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=between(float, 0),
        default=1.0,
        help="sampling temperature; 0 = greedy (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=between(int, 0), default=250, help="top-k sampling; 0 = all codes (default: %(default)s)"
    )
    parser.add_argument(
        "--guidance",
        type=between(float, 0),
        default=3.0,
        help="classifier-free guidance scale; 1 = off (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=between(int, 0, 2**63 - 1), default=0, help="sampling seed (default: %(default)s)"
    )
    return parser.parse_args()


def make_music(args) -> None:
    """Writes --wav, and the codes and settings next to it."""
    require_folder_of(Path(args.wav))
    if args.min_seconds > args.seconds:
        raise UserError(f"--min-seconds {args.min_seconds:g} is more than --seconds {args.seconds:g}.")
    import numpy as np
    import torch

    from common.codec import codec_identity, find_codec
    from common.hub import inference_dtype
    from models.mot.data import Tokenizer
    from models.mot.generate import collapse, generate
    from models.mot.layout import code_ids
    from models.mot.weights import load_adapter

    model, description = load_adapter(Path(args.adapter), args.model, inference_dtype(), revision=args.revision)
    layout, codec = model.layout, description["codec"]
    if args.guidance != 1 and not description["training"]["text_dropout"]:
        raise UserError(
            f"--guidance {args.guidance:g}: this adapter never saw music without a caption; use --guidance 1."
        )
    weights = find_codec(args.codec, codec_identity(codec))
    prefix = np.zeros((0, layout.codebooks), dtype=np.int64)
    if args.start:
        try:
            prefix = np.load(args.start, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"--continue {args.start} cannot be read: {error}.") from None
        code_ids(prefix, layout)  # raises if codes are out of range
    tokenizer = Tokenizer(args.model or description["base_model_name_or_path"])
    rate = codec["sample_rate"] / codec["hop"]
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    [(codes, ended)] = generate(
        model,
        tokenizer([args.caption]),
        max(1, int(args.seconds * rate)),
        [args.seed],
        no_text=tokenizer.no_text,
        min_frames=max(1, int(args.min_seconds * rate)),
        temperature=args.temperature,
        top_k=args.top_k,
        guidance=args.guidance,
        prefixes=[prefix],
    )
    wav = Path(args.wav)
    all_codes = np.concatenate([prefix, codes]).astype(np.int16)
    decode(all_codes, weights, wav)
    np.save(wav.with_suffix(".npy"), all_codes, allow_pickle=False)
    digest = hashlib.sha256((Path(args.adapter) / "adapter_model.safetensors").read_bytes()).hexdigest()
    settings = {"caption": args.caption, "seed": args.seed, "temperature": args.temperature, "top_k": args.top_k}
    settings |= {"guidance": args.guidance, "adapter_sha256": digest, "ended": ended, **collapse(codes)}
    wav.with_suffix(".json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print(f"{len(codes) / rate:.2f} s in {wav}{'' if ended else ' (cut at --seconds)'}")


def decode(codes, weights: Path, wav: Path) -> None:
    """Decodes codes with data/decode.py; if that fails, no file is written."""
    import numpy as np

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "music.npy"
        np.save(file, codes, allow_pickle=False)
        decoder = Path(__file__).resolve().parents[2] / "data" / "decode.py"
        if subprocess.run([sys.executable, decoder, "--codec-weights", weights, file], check=False).returncode:
            raise UserError(f"the codec {weights} could not decode the music; see the message above.")
        wav.write_bytes(file.with_suffix(".wav").read_bytes())


def main() -> None:
    run_command(make_music, parse_args())


if __name__ == "__main__":
    forbid_codec_imports()  # the codec runs in a process of its own
    main()
