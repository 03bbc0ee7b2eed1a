"""Make data/assets again: a codec, a tiny Dia that speaks, and a voice that it has never heard.

    python data/demos/make_assets.py --work assets-work --out new-assets

Takes about three hours on 2 cores, most of them for the codec; --codec data/assets/codec uses the one that is there.
Stop it at any time: the same command continues. Needs flite (Debian, Ubuntu: apt-get install flite), the only
synthesiser; its voices are free (BSD-style licences). The steps:

1. data/demos/voices.py: four voices say 625 sentences each
2. data/train_codec.py: the codec, on all of them
3. more speech: AWB and RMS, the voices of Dia, say 585 of the sentences and parts of sentences four times each, at
   different speeds; they and KAL say all of it twice with throats of other sizes, which makes other voices of them; and
   SLT, the new voice, says 256 of the sentences and the parts twice. From sentences that are said once, Dia learned
   them by heart instead of learning to read; from two voices, it could not read in a third (docs/log.md)
4. data/encode.py; AWB is tagged [S1], RMS [S2], KAL either, and SLT [S1]
5. finetune/dia_full.py, 1 rank: a tiny Dia with random weights learns to read with two voices, then with many
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # data/

from demos.dia import save_dia
from demos.voices import WORDS, sentences, speak
from lib.errors import UserError, command_parser, run
from lib.store import hash_file, refuse_existing, write_json, write_jsonl

DATA = Path(__file__).resolve().parents[1]
TAGS = {"awb": "[S1]", "rms": "[S2]", "slt": "[S1]"}
THROATS = [round(0.85 + 0.05 * number, 2) for number in range(12)]  # factors on all frequencies, 1.4 is a small throat
# The sentences of every voice have the same numbers, so those kept for evaluation are new to all models.
EVAL, TRAIN, NEW = range(40), range(40, 625), range(40, 296)
AGAIN = {  # voices, sentences, how often each text is said, and whether with other throats
    "base-train": (("awb", "rms"), TRAIN, 4, False),
    "many-train": (("awb", "rms", "kal16"), TRAIN, 2, True),
    "train": (("slt",), NEW, 2, False),
}
ONCE = {"base-eval": ("awb", "rms"), "eval": ("slt",)}
ORIGINALS = (0, 5, 11, 16, 22, 27, 33, 39)  # recordings that come with the new voice: those of the demo's 8 samples
ENCODER = {  # with the decoder 3.5 M weights
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 128,
}
DECODER = {
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "cross_num_attention_heads": 6,
    "cross_num_key_value_heads": 6,
    "cross_head_dim": 32,
    "cross_hidden_size": 128,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
TRAINING = (
    "--precision fp32 --ema 0.998 --micro-tokens 1200 --channel-weights first4x --text-dropout 0.1 --seed 0"
    " --eval-every 300 --save-every 300 --keep 3 --samples 0"
).split()
FIRST = "--steps 6000 --lr 1e-3 --warmup 100".split()
SECOND = "--steps 3600 --lr 7e-4 --warmup 50".split()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="folder for what is made on the way")
    parser.add_argument("--out", required=True, type=Path, help="folder for the assets")
    parser.add_argument("--codec", type=Path, help="use this codec instead of training one")
    args = parser.parse_args()
    refuse_existing(args.out)
    if args.codec and not (args.codec / "model.safetensors").is_file():
        raise UserError(f"--codec {args.codec} is not the folder of a codec.")
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)

    make(work / "voices", "demos/voices.py")
    codec = (args.codec or work / "codec").absolute()
    if not args.codec:
        settings = ["--batch", "4", "--steps", "6000", "--share", "0.35"]
        make(codec, "train_codec.py", "--source", work / "voices", *settings)
    for name, what in AGAIN.items():
        speak_again(work / "voices", name, *what)
    for name, voices in ONCE.items():
        clips = [clip_of(voice, number) for voice in voices for number in EVAL]
        write_jsonl(work / "voices" / f"{name}.jsonl", clips)
    for name in (*AGAIN, *ONCE):
        words = ["--format", "jsonl", "--source", work / "voices" / f"{name}.jsonl"]
        make(work / "tokens" / name, "encode.py", *words, "--codec", "dac", "--codec-weights", codec)
    train_dia(work, codec)
    collect(work, codec, args.out)


def make(result: Path, command: str, *words) -> None:
    if not result.exists():
        call([sys.executable, DATA / command, "--out", result, *words])


def call(words: list) -> None:
    words = [str(word) for word in words]
    print(" ".join(words), flush=True)
    # One thread: the same numbers on every machine with this processor, and no slower for models this small.
    if subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode:
        raise UserError(f"{words[1] if words[0] == sys.executable else words[0]} failed; see above.")


def clip_of(voice: str, number: int) -> dict:
    text = f"{TAGS[voice]} {sentences()[number]}"
    return {"id": f"{voice}-{number:03d}", "audio": f"{voice}/{number:03d}.wav", "text": text, "speaker": voice}


# ---- speech ----------------------------------------------------------------------------------------------------


def speak_again(folder: Path, name: str, voices: tuple[str, ...], numbers: range, times: int, many: bool) -> None:
    """<name>.jsonl: these voices say sentences and parts of sentences several times, each time at another speed and
    after another silence of less than two codec frames, so that no two clips have the same codes. `many`: each time
    with another throat too."""
    if (folder / f"{name}.jsonl").exists():
        return
    audio = folder / f"{name}-audio"
    audio.mkdir(exist_ok=True)
    texts = [sentences()[number] for number in numbers] + parts_of_sentences()
    clips, jobs = [], []
    for voice in voices:
        for (number, text), time in itertools.product(enumerate(texts), range(times)):
            draw = random.Random(f"{'many' if many else ''}{voice}{number}{time}")
            throat = draw.choice(THROATS) if many else 1.0
            clip, stretch, silence = f"{voice}-{number:03d}-{time}", draw.uniform(0.88, 1.15), draw.randrange(640)
            text = f"{TAGS.get(voice) or draw.choice(['[S1]', '[S2]'])} {text}"
            jobs.append((voice, text.split("] ")[1], audio / f"{clip}.wav", stretch, silence, throat))
            clips.append({"id": f"{name}-{clip}", "audio": f"{audio.name}/{clip}.wav", "text": text, "speaker": voice})
    print(f"{name}: {len(jobs)} clips", flush=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: speak_once(*job), jobs))
    write_jsonl(folder / f"{name}.jsonl", clips)


def parts_of_sentences() -> list[str]:
    """All words, all pairs of words that can follow each other, and some triples."""
    draw, texts = random.Random(1), []
    for first, end in itertools.combinations(range(len(WORDS) + 1), 2):
        parts = [" ".join(words) for words in itertools.product(*WORDS[first:end])]
        if end - first < len(WORDS):
            texts += parts if len(parts) <= 25 else draw.sample(parts, 50)
    return texts


def speak_once(voice: str, text: str, file: Path, stretch: float, silence: int, throat: float) -> None:
    import numpy as np
    import soundfile
    import torch
    from torchaudio.functional import resample

    speak(voice, text, file, "--setf", f"duration_stretch={stretch * throat:.3f}")
    wave, rate = soundfile.read(file, dtype="float32")
    if throat != 1:  # played faster: higher, and as long as before, because it was spoken slower
        wave = resample(torch.from_numpy(wave), round(rate * throat), rate).numpy()
    wave = np.concatenate([np.zeros(silence, "float32"), wave]).clip(-1, 1)
    soundfile.write(file, wave, rate, subtype="PCM_16")


# ---- Dia -------------------------------------------------------------------------------------------------------


def train_dia(work: Path, codec: Path) -> None:
    tokens = work / "tokens"
    if not (work / "dia-random").exists():
        draft = work / "dia-random.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        save_dia(draft, codec, codec, ENCODER, DECODER, {"do_sample": False, "max_length": 512}, seed=0)
        draft.rename(work / "dia-random")
    first, second = ["--data", tokens / "base-train"], ["--data", tokens / "many-train"]
    second += ["--rehearsal", f"{tokens / 'base-train'}:0.4"]
    for folder, model, words in (
        (work / "dia-first", work / "dia-random", first + FIRST),
        (work / "dia", work / "dia-first" / "export", second + SECOND),
    ):
        if not (folder / "export" / "model.safetensors").exists():
            words = ["--model", model, *words, "--eval-data", tokens / "base-eval", "--out", folder, *TRAINING]
            call([DATA.parent / "launch.sh", "dia_full", "--ranks", "1", *words])


# ---- the assets ------------------------------------------------------------------------------------------------


def collect(work: Path, codec: Path, out: Path) -> None:
    """Without absolute paths: data/demos/speech.py sets them when it builds the demo."""
    import torch
    from transformers import DiaForConditionalGeneration

    draft = out.with_name(out.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(codec, draft / "codec", ignore=shutil.ignore_patterns("README.md"))
    export = work / "dia" / "export"
    DiaForConditionalGeneration.from_pretrained(export, dtype=torch.float16).save_pretrained(draft / "dia")
    config = json.loads((draft / "dia" / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(name, None)  # those of the decoder count, and transformers warns of any others
    write_json(draft / "dia" / "config.json", config)
    processor = json.loads((export / "processor_config.json").read_text())
    processor["audio_tokenizer"]["audio_tokenizer_name_or_path"] = "codec"
    write_json(draft / "dia" / "processor_config.json", processor)
    shutil.copy(export / "tokenizer_config.json", draft / "dia")

    voice = draft / "voice"
    for split in ("train", "eval"):
        tokens = voice / "tokens" / split
        shutil.copytree(work / "tokens" / split, tokens, ignore=shutil.ignore_patterns(".*"))
        info = json.loads((tokens / "dataset.json").read_text())
        write_json(tokens / "dataset.json", info | {"weights": "codec"})
        sources = [json.loads(line) for line in (tokens / "sources.jsonl").read_text().splitlines()]
        write_jsonl(tokens / "sources.jsonl", [[Path(place).name, "", sha256] for place, _, sha256 in sources])
    (voice / "audio").mkdir()
    for number in ORIGINALS:
        shutil.copy(work / "voices" / "slt" / f"{number:03d}.wav", voice / "audio")
    shutil.copy(work / "voices" / "grammar.jsgf", voice)
    hashes = {str(file.relative_to(draft)): hash_file(file) for file in sorted(draft.rglob("*")) if file.is_file()}
    write_json(draft / "hashes.json", hashes)
    draft.rename(out)
    print(f"{out}: {sum(file.stat().st_size for file in out.rglob('*')) / 1e6:.1f} MB")


if __name__ == "__main__":
    run(main)
