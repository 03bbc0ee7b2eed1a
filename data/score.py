"""How well samples clone the voice and say the words, by models of your choice; nothing is downloaded.

    python data/score.py --references runs/NAME/samples/reference --similarity resemblyzer --wer pocketsphinx \\
        runs/NAME/samples/step-00000500/*.wav

--similarity: cosine of speaker embeddings of a sample and of the file of the same name in --references. `resemblyzer`
brings its weights (pip install --no-deps resemblyzer webrtcvad-wheels); a folder holds an x-vector model as
transformers saves it. --wer: word errors against "text" in the .json beside the sample. `pocketsphinx` brings a rough
English one (pip install pocketsphinx); a folder holds a recogniser as transformers saves it, such as Whisper.
What is found goes into those .json files, and as one JSON object into the last line of the output.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from lib.errors import UsageError, run

RATE = 16000  # of all the models here


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="WAV")
    add("--references", type=Path, help="folder with a .wav of the same name a sample")
    add("--similarity", metavar="NAME_OR_FOLDER", help="resemblyzer, or a folder with an x-vector model")
    add("--wer", metavar="NAME_OR_FOLDER", help="pocketsphinx, or a folder with a speech recogniser")
    args = parser.parse_args(argv)
    if args.similarity and not args.references:
        parser.error("--similarity needs --references")
    return args


def main() -> None:
    args = parse_args()
    embed = load_embedder(args.similarity) if args.similarity else None
    recognise = load_recogniser(args.wer) if args.wer else None
    from lib.store import write_json
    from lib.waveform import Reject

    found = {}
    for file in args.files:
        try:
            found[file.stem] = score(file, args.references, embed, recognise)
        except Reject as reason:  # a sample can be silent, which is a result
            found[file.stem] = {"unscored": str(reason)}

    for file in args.files:
        facts = file.with_suffix(".json")
        if facts.is_file():
            write_json(facts, json.loads(facts.read_text(encoding="utf-8")) | found[file.stem])
    print(json.dumps(found))


def score(file: Path, references: Path | None, embed: Callable | None, recognise: Callable | None) -> dict:
    facts, wave = {}, read(file)
    if embed and (references / file.name).is_file():
        facts["similarity"] = cosine(embed(wave), embed(read(references / file.name)))
    beside = file.with_suffix(".json")
    text = json.loads(beside.read_text(encoding="utf-8")).get("text", "") if beside.is_file() else ""
    if recognise and words(text):
        facts["heard"] = recognise(wave)
        facts["wer"] = word_errors(text, facts["heard"])
    return facts


def read(file: Path):
    """Mono samples at 16 kHz."""
    from lib.waveform import prepare, read_samples

    try:
        wave, rate = read_samples(file.read_bytes(), None, None)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    return prepare(wave, rate, RATE, False, 0.0, float("inf"))[0].numpy()


def cosine(a, b) -> float:
    import numpy as np

    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


# ---------------------------------------------------------------- speakers


def load_embedder(name: str) -> Callable:
    """A function from samples to a vector."""
    if name == "resemblyzer":
        try:
            from resemblyzer import VoiceEncoder, normalize_volume
        except ImportError:
            hint = "pip install --no-deps resemblyzer webrtcvad-wheels"
            raise UsageError(f"--similarity resemblyzer is not installed: {hint}") from None
        encoder = VoiceEncoder("cpu", verbose=False)
        return lambda wave: encoder.embed_utterance(normalize_volume(wave, -30, increase_only=True))
    import torch
    from transformers import AutoFeatureExtractor, AutoModelForAudioXVector

    model, extractor = load_local("--similarity", name, AutoModelForAudioXVector, AutoFeatureExtractor)

    @torch.inference_mode()
    def embed(wave):
        return model(**extractor(wave, sampling_rate=RATE, return_tensors="pt")).embeddings[0].numpy()

    return embed


# ---------------------------------------------------------------- words


def load_recogniser(name: str) -> Callable:
    """A function from samples to a text."""
    if name == "pocketsphinx":
        try:
            from pocketsphinx import Decoder
        except ImportError:
            raise UsageError("--wer pocketsphinx is not installed: pip install pocketsphinx") from None
        decoder = Decoder(samprate=RATE, loglevel="FATAL")

        def hear(wave) -> str:
            decoder.start_utt()
            decoder.process_raw((wave.clip(-1, 1) * 32767).astype("int16").tobytes(), full_utt=True)
            decoder.end_utt()
            return decoder.hyp().hypstr if decoder.hyp() else ""

        return hear
    from transformers import AutoConfig, AutoModelForCTC, AutoModelForSpeechSeq2Seq, AutoProcessor, pipeline

    folder(name, "--wer")
    encoder_decoder = AutoConfig.from_pretrained(name, local_files_only=True).is_encoder_decoder
    kind = AutoModelForSpeechSeq2Seq if encoder_decoder else AutoModelForCTC
    model, processor = load_local("--wer", name, kind, AutoProcessor)
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    transcribe = pipeline("automatic-speech-recognition", model=model, device="cpu", **parts)
    return lambda wave: transcribe({"raw": wave, "sampling_rate": RATE})["text"]


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", re.sub(r"<[^>]*>|\[[^\]]*\]", " ", text.lower()))


def word_errors(text: str, heard: str) -> float:
    """Edit distance a word of the text."""
    wanted, found = words(text), words(heard)
    row = list(range(len(found) + 1))
    for i, word in enumerate(wanted, 1):
        above, row = row, [i]
        for j, other in enumerate(found, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return row[-1] / len(wanted)


def load_local(flag: str, name: str, model_class, processor_class) -> tuple:
    folder(name, flag)
    try:
        model = model_class.from_pretrained(name, local_files_only=True, use_safetensors=True)
        return model.eval(), processor_class.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {name} cannot be loaded: {str(error).splitlines()[0]}") from None


def folder(name: str, flag: str) -> None:
    if not Path(name).is_dir():
        raise UsageError(f"{flag} {name} is neither a known name nor a folder here")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    run(main)
