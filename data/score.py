"""Score samples for voice similarity, word error rate and quality, with models of your choice; nothing is downloaded.

    python data/score.py --references runs/NAME/samples/reference --similarity resemblyzer --wer pocketsphinx \\
        runs/NAME/samples/step-00000500/*.wav

--similarity: cosine similarity of the speaker embeddings of a sample and of the file with the same name in
--references (of several folders, the first that has one). `resemblyzer` includes its weights (pip install --no-deps
resemblyzer webrtcvad-wheels); a folder must hold an x-vector model in transformers format.

--wer: word error rate against "text" in the .json next to the sample. `pocketsphinx` includes a rough English model
(pip install pocketsphinx), which is good if it knows the possible sentences: `pocketsphinx:FILE` names a JSGF grammar.
A folder must hold a speech recogniser in transformers format, such as Whisper.

--dnsmos: overall quality from 1 to 5 as DNSMOS predicts it (pip install speechmos; it includes its weights).

The scores are added to those .json files; the last line of the output has them all as one JSON object.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, command_parser, run_command
from common.speech_metrics import load_dnsmos
from lib.store import write_json
from lib.waveform import Reject, prepare, read_samples

RATE = 16000  # Hz, the rate of all supported models


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="WAV", help="samples to score")
    add_measures(parser)
    args = parser.parse_args(argv)
    if args.similarity and not args.references:
        parser.error("--similarity needs --references")
    return args


def add_measures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--references",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder with one .wav per sample, of the same name; may be given several times",
    )
    add(
        "--similarity",
        metavar="NAME_OR_FOLDER",
        help="speaker encoder: resemblyzer, or the folder of an x-vector model",
    )
    add(
        "--wer",
        metavar="NAME_OR_FOLDER",
        help="speech recogniser: pocketsphinx, pocketsphinx:GRAMMAR.jsgf, or the folder of a model",
    )
    add("--dnsmos", action="store_true", help="predicted quality from 1 to 5 (package speechmos)")


def load_measures(args: argparse.Namespace) -> dict[str, Callable]:
    """What was asked for, by the name of its score: functions of mono samples at 16 kHz."""
    measures = {}
    if args.similarity:
        measures["similarity"] = load_embedder(args.similarity)
    if args.wer:
        measures["wer"] = load_recogniser(args.wer)
    if args.dnsmos:
        measures["dnsmos"] = load_dnsmos()
    return measures


def main() -> None:
    args = parse_args()
    measures = load_measures(args)
    scores = {}
    for file in args.files:
        try:
            scores[file.stem] = score(file, args.references, measures)
        except Reject as reason:  # a silent sample is a result too
            scores[file.stem] = {"unscored": str(reason)}

    for file in args.files:
        facts = file.with_suffix(".json")
        if facts.is_file():
            write_json(facts, json.loads(facts.read_text(encoding="utf-8")) | scores[file.stem])
    print(json.dumps(scores))


def score(file: Path, references: list[Path], measures: dict[str, Callable]) -> dict:
    scores, wave = {}, read_mono(file)
    if embed := measures.get("similarity"):
        others = [folder / file.name for folder in references if folder != file.parent]
        reference = next((other for other in others if other.is_file()), None)
        if reference:
            scores["similarity"] = cosine(embed(wave), embed(read_mono(reference)))
    if "dnsmos" in measures:
        scores["dnsmos"], _ = measures["dnsmos"](wave)
    facts = file.with_suffix(".json")
    text = json.loads(facts.read_text(encoding="utf-8")).get("text", "") if facts.is_file() else ""
    if "wer" in measures and words(text):
        scores["heard"] = measures["wer"](wave)
        scores["wer"] = word_error_rate(text, scores["heard"])
    return scores


def read_mono(file: Path, target_rate: int = RATE):
    """Mono samples at 16 kHz or another rate."""
    try:
        wave, rate = read_samples(file.read_bytes(), None, None)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    return prepare(wave, rate, target_rate)[0].numpy()


def cosine(a, b) -> float:
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


# ---------------------------------------------------------------- voice similarity


def load_embedder(name: str) -> Callable:
    """A function from samples to a speaker embedding."""
    if name == "resemblyzer":
        try:
            from resemblyzer import VoiceEncoder, normalize_volume
        except ImportError:
            hint = "pip install --no-deps resemblyzer webrtcvad-wheels"
            raise UserError(f"--similarity resemblyzer is not installed: {hint}") from None
        encoder = VoiceEncoder("cpu", verbose=False)
        return lambda wave: encoder.embed_utterance(normalize_volume(wave, -30, increase_only=True))
    import torch
    from transformers import AutoFeatureExtractor, AutoModelForAudioXVector

    model, extractor = load_local("--similarity", name, AutoModelForAudioXVector, AutoFeatureExtractor)

    @torch.inference_mode()
    def embed(wave):
        return model(**extractor(wave, sampling_rate=RATE, return_tensors="pt")).embeddings[0].numpy()

    return embed


# ---------------------------------------------------------------- word error rate


def load_recogniser(name: str) -> Callable:
    """A function from samples to the recognised text."""
    engine, _, grammar = name.partition(":")
    if engine == "pocketsphinx":
        try:
            from pocketsphinx import Decoder
        except ImportError:
            raise UserError("--wer pocketsphinx is not installed: pip install pocketsphinx") from None
        if grammar and not Path(grammar).is_file():
            raise UserError(f"--wer {name}: there is no grammar {grammar}")
        try:
            decoder = Decoder(samprate=RATE, loglevel="FATAL", **({"jsgf": grammar} if grammar else {}))
        except RuntimeError:  # it says no more than that
            raise UserError(
                f"--wer {name}: pocketsphinx cannot read this JSGF grammar, or lacks one of its words"
            ) from None

        def recognise(wave) -> str:
            decoder.start_utt()
            decoder.process_raw((wave.clip(-1, 1) * 32767).astype("int16").tobytes(), full_utt=True)
            decoder.end_utt()
            return decoder.hyp().hypstr if decoder.hyp() else ""

        return recognise
    from transformers import AutoConfig, AutoModelForCTC, AutoModelForSpeechSeq2Seq, AutoProcessor, pipeline

    require_folder("--wer", name)
    try:
        encoder_decoder = AutoConfig.from_pretrained(name, local_files_only=True).is_encoder_decoder
    except (OSError, ValueError) as error:
        raise UserError(f"--wer {name} holds no recogniser that can be read: {str(error).splitlines()[0]}") from None
    model_class = AutoModelForSpeechSeq2Seq if encoder_decoder else AutoModelForCTC
    model, processor = load_local("--wer", name, model_class, AutoProcessor)
    transcribe = pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
        device="cpu",
    )
    return lambda wave: transcribe({"raw": wave, "sampling_rate": RATE})["text"]


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and without <tags> and [tags]."""
    return re.findall(r"[\w']+", re.sub(r"<[^>]*>|\[[^\]]*\]", " ", text.lower()))


def word_error_rate(text: str, heard: str) -> float:
    """Edit distance between the two, in words, divided by the number of words in `text`."""
    from torchaudio.functional import edit_distance

    return edit_distance(words(text), words(heard)) / len(words(text))


def load_local(flag: str, name: str, model_class, processor_class) -> tuple:
    require_folder(flag, name)
    try:
        model = model_class.from_pretrained(name, local_files_only=True, use_safetensors=True)
        return model.eval(), processor_class.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {name} cannot be loaded: {str(error).splitlines()[0]}") from None


def require_folder(flag: str, name: str) -> None:
    if not Path(name).is_dir():
        raise UserError(f"{flag} {name} is neither a known name nor a local folder")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    run_command(main)
