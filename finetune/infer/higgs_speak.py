"""Speak in the voice of a recording with a model trained by higgs_clone.py, or merge an adapter into its base.

    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --ref voice.wav --ref-text "What it says." \\
        --text "Hello." --wav hello.wav
    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --voice a.wav --voice-text "What a says." \\
        --voice b.wav --voice-text "What b says." --text "[SPEAKER0] Hello. [SPEAKER1] Hi." --wav dialogue.wav
    python finetune/infer/higgs_speak.py --adapter runs/my-voices/export --merge my-higgs

--model instead of --adapter takes a whole model: the export of a full preset, a merged folder, or the base.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finetune/, as for the recipes

from common.data_commands import require_folder_of
from common.errors import UserError, between, command_parser, run_command
from common.runtime import forbid_codec_imports

FRAMES_PER_SECOND = 25  # of the Higgs codec


def parse_args():
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--adapter", help="folder that higgs_clone.py exported with a LoRA preset")
    add("--model", help="whole model: hub id or folder; with --adapter: base to use instead of the one it names")
    add(
        "--revision",
        default="",
        help="revision of the base on the hub; default: the adapter's, or the newest",
    )
    add(
        "--ref",
        "--voice",
        dest="ref",
        type=Path,
        action="append",
        default=[],
        help="recording of the voice to clone; give it again for each further voice of a dialogue, up to four",
    )
    add(
        "--ref-text",
        "--voice-text",
        dest="ref_text",
        action="append",
        default=[],
        help="transcript of the recording",
    )
    add("--text", help="text to speak; in a dialogue each turn begins with [SPEAKER0], [SPEAKER1], ...")
    add("--scene", help="description of the recording scene (default: a quiet room)")
    add("--wav", help="output file")
    add("--codec", help="codec: hub id or folder (default: that of the training data)")
    add(
        "--seconds", type=between(float, 0.04), default=20.0, help="maximum length of the output (default: %(default)s)"
    )
    add("--greedy", action="store_true", help="greedy decoding instead of random sampling")
    add("--seed", type=between(int, 0, 2**63 - 1), default=0, help="seed of the random sampling (default: %(default)s)")
    add(
        "--merge",
        metavar="FOLDER",
        help="merge the adapter into the base and write this model folder instead of speaking",
    )
    return parser.parse_args()


def load_tuned(adapter: str | None, base: str | None, revision: str, dtype):
    """The model, with its adapter if there is one; its base, and the base's revision."""
    from common import hub, lora
    from models.higgs.weights import load_higgs

    adapter_config = {}
    if adapter:
        adapter_config = lora.read_adapter(Path(adapter))
    elif not base:
        raise UserError("give --adapter or --model.")
    source = base or adapter_config["base_model_name_or_path"]
    revision = revision or ("" if base else adapter_config.get("revision") or "")
    hub.fetch(source, None, revision)
    model = load_higgs(source, revision, dtype)
    if adapter:
        model = lora.load_lora(model, Path(adapter))
    return model.eval(), source, revision


def merge(args) -> None:
    """Writes base and adapter as one model folder; complete or absent."""
    out = Path(args.merge)
    if out.exists():
        raise UserError(f"--merge {out} exists already.")
    if not args.adapter:
        raise UserError("--merge needs --adapter.")
    import torch

    from common.codec import recorded_codec
    from models.higgs.weights import write_model

    model, source, revision = load_tuned(args.adapter, args.model, args.revision, torch.float32)
    merged = model.merge_and_unload()
    # The recipe selects this script.
    training = {"recipe": "higgs_clone", "adapter": args.adapter, "base": source, "revision": revision}
    codec = recorded_codec(Path(args.adapter))
    write_model(out, merged, dict(merged.state_dict()), source, revision, training, codec)
    print(f"merged model in {out}")


def say_text(args) -> None:
    from models.higgs.text import Chat, check_speakers

    require_folder_of(Path(args.wav))
    if len(args.ref) != len(args.ref_text):
        raise UserError("--ref and --ref-text go together: the model needs the transcript of each reference.")
    check_speakers(args.text, len(args.ref), "--text")
    import numpy as np
    import torch

    from common.codec import find_codec, recorded_codec
    from common.data_commands import encode_recording, run_data
    from common.hub import inference_dtype
    from models.higgs.generate import speak
    from models.higgs.layout import build_row, layout_of
    from models.higgs.weights import codec_of, load_tokenizer

    model, source, revision = load_tuned(args.adapter, args.model, args.revision, inference_dtype())
    tokenizer = load_tokenizer(source, revision)
    layout, chat = layout_of(model.config, tokenizer), Chat(tokenizer)
    recorded = recorded_codec(Path(args.adapter or args.model)) or {"place": codec_of(source, revision)}
    codec = find_codec(args.codec, recorded)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "speech.npy"
        text, ref_texts = chat.text(args.text, "--text"), [chat.text(said, "--ref-text") for said in args.ref_text]
        segments = [encode_recording(voice, "--ref", "higgs", codec) for voice in args.ref]
        [ids] = chat.ids([chat.prompt(text, ref_texts, args.scene, answer=False)])
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


def speak_or_merge(args) -> None:
    if args.merge:
        merge(args)
    elif (args.text or "").strip() and args.wav:
        say_text(args)
    else:
        raise UserError("give --text and --wav to speak, or --merge to write a model folder.")


def main() -> None:
    run_command(speak_or_merge, parse_args())


if __name__ == "__main__":
    forbid_codec_imports()  # the codec runs in a process of its own
    main()
