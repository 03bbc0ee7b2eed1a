"""Speak a text with a model or adapter that dia_full.py or dia_lora.py trained, or merge an adapter into its base.

    python finetune/infer/dia_speak.py --adapter runs/my-voice/export --text "[S1] Hello." --wav hello.wav
    python finetune/infer/dia_speak.py --model runs/my-dia/export --text "[S1] Hello." --wav hello.wav
    python finetune/infer/dia_speak.py --model nari-labs/Dia-1.6B-0626 --voice me.wav --voice-text "[S1] What I say." \\
        --text-file story.txt --wav story.wav
    python finetune/infer/dia_speak.py --adapter runs/my-voice/export --merge my-voice-dia

./launch.sh speak --run runs/my-voice does the same and finds the export by itself.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.data_commands import require_folder_of
from common.errors import UserError, between, command_parser, run_command
from common.runtime import forbid_codec_imports

GUIDANCE, TEMPERATURE, TOP_P, TOP_K = 3.0, 1.8, 0.9, 45  # the defaults of the authors' release
PAUSE = 0.2  # seconds of silence between the parts of a long text


def parse_args():
    parser = command_parser(__doc__)
    parser.add_argument("--adapter", help="folder that dia_lora.py exported")
    parser.add_argument("--model", help="model folder or hub id; default: the base model of the adapter")
    parser.add_argument(
        "--revision",
        default="",
        help="revision of the base on the hub; default: the adapter's, or the newest",
    )
    parser.add_argument("--text", help="text to speak; a long one is split at sentence ends")
    parser.add_argument("--text-file", type=Path, help="file with the text, instead of --text")
    parser.add_argument("--voice", type=Path, help="recording of the voice to speak in, ideally 5 to 10 s long")
    parser.add_argument("--voice-text", help="transcript of that recording")
    parser.add_argument("--wav", type=Path, help="audio file to write")
    parser.add_argument("--codec", help="DAC codec: hub id, folder or .pth file; default: that of the training data")
    parser.add_argument(
        "--seconds",
        type=between(float, 0, above=True),
        default=20.0,
        help="maximum length of each part of the text (default: %(default)s)",
    )
    parser.add_argument("--greedy", action="store_true", help="take the most likely codes instead of sampling")
    parser.add_argument(
        "--temperature",
        type=between(float, 1),
        default=TEMPERATURE,
        help="sampling temperature, at least 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p", type=between(float, 0, 1, above=True), default=TOP_P, help="nucleus sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k",
        type=between(int, 1),
        default=TOP_K,
        help="sample from the k most likely codes (default: %(default)s)",
    )
    parser.add_argument(
        "--guidance",
        type=between(float, 1),
        default=GUIDANCE,
        help="classifier-free guidance scale; 1 = off (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=between(int, 0, 2**63 - 1), default=0, help="sampling seed (default: %(default)s)"
    )
    parser.add_argument("--merge", type=Path, help="write base + adapter as one model folder instead of speaking")
    return parser.parse_args()


def load_trained(args, dtype):
    """The model, with its adapter if there is one; its base; the tag map and flags it was trained with."""
    from common import hub, lora
    from common.artifacts import read_json
    from models.dia.layout import read_tag_map
    from models.dia.weights import load_dia, needs_widening, widen

    base, folder = args.model, Path(args.adapter or args.model)
    if args.adapter:
        adapter = lora.read_adapter(folder)
        args.revision = args.revision or ("" if base else adapter.get("revision") or "")
        base = base or adapter["base_model_name_or_path"]
    tags, training = folder / "tag_map.json", folder / "training_config.json"
    tag_map = read_tag_map(str(tags) if tags.exists() else "")
    flags = read_json(training)
    hub.fetch(base, None, args.revision)
    model = load_dia(base, dtype)
    if needs_widening(base, flags.get("channels", 0)):
        widen(model, {"zero_optimization": {"stage": 0}})
    if args.adapter:
        model = lora.load_lora(model, folder)
    return model.eval(), base, tag_map, flags


def merge(args) -> None:
    """Writes base + adapter as a folder that DiaForConditionalGeneration.from_pretrained loads; whole or absent."""
    if not args.adapter:
        raise UserError("--merge needs --adapter: a model folder has no adapter to merge.")
    if args.merge.exists():
        raise UserError(f"--merge {args.merge} exists already.")
    import torch

    from common.codec import recorded_codec
    from models.dia.weights import write_model

    model, base, tag_map, flags = load_trained(args, torch.float32)

    model = model.merge_and_unload()
    training = flags | {"recipe": "dia_lora", "merged": [base, args.adapter]}
    codec = recorded_codec(Path(args.adapter))
    write_model(args.merge, model, model.state_dict(), base, tag_map, training, codec)
    print(f"merged model in {args.merge}")


def say_text(args) -> None:
    require_folder_of(args.wav)
    if bool(args.voice) != bool(args.voice_text):
        raise UserError("--voice and --voice-text go together: the model needs the transcript of the recording.")
    import numpy as np
    import torch

    from common.codec import find_codec, recorded_codec
    from common.data_commands import encode_recording, run_data
    from common.hub import inference_dtype
    from common.lora import base_model
    from models.dia.generate import sampling, speak_parts
    from models.dia.layout import layout_of, text_bytes, with_speaker
    from models.dia.weights import expected_codec

    model, base, tag_map, training = load_trained(args, inference_dtype())
    layout = layout_of(base_model(model).config)
    mode = training.get("text_mode", "speech")
    text, before = with_speaker(read_text(args), mode), with_speaker(args.voice_text, mode) if args.voice else ""
    size, words = len(text_bytes(text, tag_map, "--text")), text.split() if mode == "speech" else [text]
    if not size or max(len(text_bytes(word, tag_map, "--text")) for word in words) > layout.max_text:
        raise UserError(f"--text has {size} bytes; the model takes 1 to {layout.max_text}, and a word is not split.")
    options = sampling(args.greedy, args.temperature, args.top_p, args.top_k, args.guidance)
    codec = find_codec(args.codec, recorded_codec(Path(args.adapter or args.model)) or expected_codec(base))
    rate = codec_frame_rate(codec)
    frames = min(int(args.seconds * rate), layout.max_positions - layout.tail - 1)  # the model has no positions beyond
    with tempfile.TemporaryDirectory() as scratch:
        scratch, files, cut = Path(scratch), [], False
        stereo = ["--stereo"] * (layout.delay.count(0) == 2)  # left and right each begin without a delay
        voice = encode_recording(args.voice, "--voice", "dac", codec, *stereo) if args.voice else None
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        parts = speak_parts(model, text, mode, tag_map, frames, rate, args.seed, voice, before, **options)
        for number, (part, codes, ended, left) in enumerate(parts, 1):
            cut |= not ended
            if left or number > 1:
                says = f"{len(codes) / rate:.2f} s" if len(codes) else f"nothing was said of {part!r}"
                print(f"part {number} of {number + left}: {says}{'' if ended else ' (cut off)'}", flush=True)
            if len(codes):
                files.append(scratch / f"part-{number:06d}.npy")
                np.save(files[-1], codes, allow_pickle=False)
        if not files:
            raise UserError("the model ended at once and said nothing; try another --seed or a longer --text.")
        run_data("decode.py", "--codec-weights", codec, *files)
        seconds = join_waves([file.with_suffix(".wav") for file in files], args.wav)
    print(f"{seconds:.2f} s in {args.wav}{' (cut off before the speech ended)' if cut else ''}")


def read_text(args) -> str:
    if not args.text_file:
        return args.text
    try:
        text = " ".join(args.text_file.read_text(encoding="utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text-file {args.text_file} cannot be read as UTF-8 text ({error}).") from None
    if not text:
        raise UserError(f"--text-file {args.text_file} is empty.")
    return text


def join_waves(files: list[Path], out: Path) -> float:
    """Writes the parts as one file, with a short silence between them; returns its seconds."""
    import numpy as np
    import soundfile

    waves = []
    for file in files:
        wave, rate = soundfile.read(file, dtype="int16", always_2d=True)
        waves += [wave, np.zeros((int(PAUSE * rate), wave.shape[1]), dtype=np.int16)]
    wave = np.concatenate(waves[:-1])
    try:
        with open(out, "wb") as stream:
            soundfile.write(stream, wave, rate, subtype="PCM_16", format="WAV")
    except OSError as error:
        raise UserError(f"--wav {out} cannot be written ({error.strerror}).") from None
    return len(wave) / rate


def codec_frame_rate(codec: Path) -> float:
    """Frames per second of a DAC: a Hugging Face folder, or the .pth file of descript-audio-codec."""
    import torch
    from transformers import DacConfig

    try:
        if codec.is_file():
            sizes = torch.load(codec, map_location="cpu", weights_only=True, mmap=True)["metadata"]["kwargs"]
            return sizes["sample_rate"] / math.prod(sizes["encoder_rates"])
        if json.loads((codec / "config.json").read_text(encoding="utf-8"))["model_type"] != "dac":
            raise ValueError("another model")
        config = DacConfig.from_pretrained(codec, local_files_only=True)
        return config.sampling_rate / config.hop_length
    except Exception as error:  # a pickle, a cut file, another model
        raise UserError(f"--codec {codec} is not a readable DAC codec ({type(error).__name__}).") from None


def speak_or_merge(args) -> None:
    if not args.adapter and not args.model:
        raise UserError("give --adapter (from dia_lora.py) or --model (from dia_full.py).")
    if args.merge:
        merge(args)
    elif bool((args.text or "").strip()) != bool(args.text_file) and args.wav:
        say_text(args)
    else:
        raise UserError("give --text and --wav to speak (--text-file for a file), or --merge to write a model folder.")


def main() -> None:
    run_command(speak_or_merge, parse_args())


if __name__ == "__main__":
    forbid_codec_imports()  # the codec runs in a process of its own
    main()
