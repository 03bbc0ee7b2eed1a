"""Make data/assets again: a codec, a tiny Dia that speaks, a tiny Higgs that clones, and voices they never heard.

    python tools/make_assets/make_assets.py --work assets-work --out new-assets

Takes about three hours on 2 cores, most of them for the codec; --codec data/assets/codec uses the one that is there.
Stop it at any time: the same command continues. Needs flite (Debian, Ubuntu: apt-get install flite), the only
synthesiser; its voices are free (BSD-style licences). The steps:

1. voices.py: four voices say 625 sentences each
2. train_codec.py: the codec, on all of them
3. more speech: AWB and RMS, the voices of Dia, say 585 of the sentences and parts of sentences four times each, at
   different speeds; they and KAL say all of it twice with throats of other sizes, which makes other voices of them; and
   SLT, the new voice, says 256 of the sentences and the parts twice. From sentences that are said once, Dia learned
   them by heart instead of learning to read; from two voices, it could not read in a third (docs/log.md)
4. data/encode.py; AWB is tagged [S1], RMS [S2], KAL either, and SLT [S1]
5. finetune/dia_full.py, 1 rank: a tiny Dia with random weights learns to read with two voices, then with many too
6. 174 speakers, made of AWB, RMS and KAL by other throats and pitches, say 28 pairs of words each; SLT, as other
   speakers, is what the demo of Higgs learns from and is judged by
7. finetune/higgs_clone.py, 1 rank: a tiny Higgs with random weights learns to speak like its reference
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "finetune")]

from voices import speak

from common.codec import hash_weights
from common.errors import UserError, command_parser, run_command
from demos.clone import save_codec
from demos.dia import save_dia
from demos.higgs import SPECIAL, save_model
from demos.speech import WORDS, sentences
from lib.codec import describe
from lib.store import hash_file, read_jsonl, refuse_existing, write_json, write_jsonl

HERE, ENCODE = Path(__file__).resolve().parent, ROOT / "data" / "encode.py"
HOP = 320  # samples per frame of the codec
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

# Speakers to clone. How each synthesiser's voice is told its pitch, and its own pitch; f0_shift is a factor.
PITCHES = {"awb": ("f0_shift", 1.0), "rms": ("f0_shift", 1.0), "slt": ("f0_shift", 1.0)}
PITCHES |= {"kal16": ("int_f0_target_mean", 105.0)}
NEW_THROATS = {"train": (0.9, 0.95, 1.0, 1.05, 1.1, 1.3, 1.35), "eval": (0.8, 1.2)}
SIZES = {  # 1.17 M weights with embeddings and head
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
CLONING = (
    "--preset full --precision fp32 --ema 0.998 --micro-tokens 1600 --codebook-weights first --max-start-loss 0"
    " --seed 0 --steps 3000 --lr 1.5e-3 --warmup 100 --save-every 400 --keep 2"
).split()


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

    make(work / "voices", HERE / "voices.py")
    codec = (args.codec or work / "codec").absolute()
    if not args.codec:
        make(codec, HERE / "train_codec.py", "--source", work / "voices")
    for name, what in AGAIN.items():
        speak_again(work / "voices", name, *what)
    for name, voices in ONCE.items():
        clips = [clip_of(voice, number) for voice in voices for number in EVAL]
        write_jsonl(work / "voices" / f"{name}.jsonl", clips)
    # The second stage keeps half of the first stage's clips, so that the two voices are not forgotten.
    base, many = (list(read_jsonl(work / "voices" / f"{name}-train.jsonl")) for name in ("base", "many"))
    write_jsonl(work / "voices" / "second-train.jsonl", many + base[::2])
    for name in ("base-train", "second-train", "train", *ONCE):
        words = ["--format", "jsonl", "--source", work / "voices" / f"{name}.jsonl"]
        make(work / "tokens" / name, ENCODE, *words, "--codec", "dac", "--codec-weights", codec)
    train_dia(work, codec)
    train_higgs(work, codec)
    collect(work, codec, args.out)


def make(result: Path, script: Path, *words) -> None:
    if not result.exists():
        call([sys.executable, script, "--out", result, *words])


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


def speak_once(voice: str, text: str, file: Path, stretch: float, silence: int, throat: float, *options: str) -> None:
    import numpy as np
    import soundfile
    import torch
    from torchaudio.functional import resample

    speak(voice, text, file, "--setf", f"duration_stretch={stretch * throat:.3f}", *options)
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
    for folder, model, words in (
        (work / "dia-first", work / "dia-random", ["--data", tokens / "base-train", *FIRST]),
        (work / "dia", work / "dia-first" / "export", ["--data", tokens / "second-train", *SECOND]),
    ):
        if not (folder / "export" / "model.safetensors").exists():
            words = ["--model", model, *words, "--eval-data", tokens / "base-eval", "--out", folder, *TRAINING]
            call([ROOT / "launch.sh", "dia_full", "--ranks", "1", *words])


# ---- Higgs -----------------------------------------------------------------------------------------------------


def speakers() -> dict[str, list[tuple]]:
    """By dataset: name, synthesiser's voice, throat, pitch, texts and number of clips of each speaker. Only those of
    SLT's texts that are for evaluation are new to the model; all speakers of SLT are."""
    texts = [" ".join(pair) for first, second in itertools.pairwise(WORDS) for pair in itertools.product(first, second)]
    random.Random(0).shuffle(texts)
    new, known = texts[:15], texts[15:]
    base = [
        (f"{voice}-{number:03d}", voice, 0.775 + 0.025 * (number % 29), pitch_of(f"{voice}{number}"), known, 28)
        for voice in ("awb", "rms", "kal16")
        for number in range(58)
    ]
    train = [
        (f"slt-{throat}-{number}", "slt", throat, (0.9, 1.0, 1.15)[number], known, 20)
        for throat in NEW_THROATS["train"]
        for number in range(3)
    ]
    judged = [(f"slt-{throat}", "slt", throat, 1.0, new, 15) for throat in NEW_THROATS["eval"]]
    return {"clone-base": base, "clone-train": train, "clone-eval": judged}


def pitch_of(key: str) -> float:
    return round(random.Random(key).uniform(0.85, 1.5), 3)


def speak_pairs(folder: Path, name: str, voices: list[tuple]) -> None:
    """<name>.jsonl: what these speakers say; the reference of each clip is another one by the same speaker."""
    if (folder / f"{name}.jsonl").exists():
        return
    audio = folder / f"{name}-audio"
    audio.mkdir(exist_ok=True)
    lines, jobs = [], []
    for speaker, voice, throat, pitch, texts, count in voices:
        draw = random.Random(speaker)
        said = draw.sample(texts, count)
        for number, text in enumerate(said):
            file, stretch = f"{audio.name}/{speaker}-{number:02d}.wav", draw.uniform(0.9, 1.12)
            other = (number + draw.randrange(1, count)) % count
            jobs.append((voice, text, folder / file, stretch, throat, pitch))
            line = {"id": f"{speaker}-{number:02d}", "target_audio": file, "target_text": text, "speaker": speaker}
            reference = {"ref_audio": f"{audio.name}/{speaker}-{other:02d}.wav", "ref_text": said[other]}
            lines.append(line | reference)
    print(f"{name}: {len(jobs)} clips", flush=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: speak_pair(*job), jobs))
    write_jsonl(folder / f"{name}.jsonl", lines)


def speak_pair(voice: str, text: str, file: Path, stretch: float, throat: float, pitch: float) -> None:
    """Without the silence around it, and whole frames of the codec long, so that every codec sees the same frames."""
    import numpy as np
    import soundfile

    name, own = PITCHES[voice]
    speak_once(voice, text, file, stretch, 0, throat, "--setf", f"{name}={own * pitch:.3f}")
    wave, rate = soundfile.read(file, dtype="float32")
    frames = wave[: len(wave) // HOP * HOP].reshape(-1, HOP)
    loud = np.flatnonzero(np.sqrt((frames**2).mean(axis=1)) > 0.01)
    wave = wave[max(0, loud[0] - 2) * HOP : (loud[-1] + 3) * HOP]
    soundfile.write(file, np.pad(wave, (0, -len(wave) % HOP)), rate, subtype="PCM_16")


def word_tokenizer():
    """The tiny tokenizer's bytes, and a token for every word that occurs: short prompts, and nothing to spell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from models.higgs.text import SCENE, SYSTEM

    words = [word for kind in WORDS for word in kind]
    texts = [SYSTEM, SCENE, "system\n\n", "user\n\n", "assistant\n\n", *words, *(f"a {word}." for word in words)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(2 * texts, trainer)
    ends = {"eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", **ends)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    return fast


def train_higgs(work: Path, codec: Path) -> None:
    own_codec, tokens = work / "higgs-codec", work / "tokens"
    if not own_codec.exists():
        shutil.rmtree(work / "higgs-codec.tmp", ignore_errors=True)
        save_codec(work / "higgs-codec.tmp", codec)
        (work / "higgs-codec.tmp").rename(own_codec)
    for name, voices in speakers().items():
        speak_pairs(work / "voices", name, voices)
        words = ["--format", "jsonl", "--source", work / "voices" / f"{name}.jsonl", "--min-seconds", "0.2"]
        make(tokens / name, ENCODE, *words, "--codec", "higgs", "--codec-weights", own_codec)
    if not (work / "higgs-random").exists():
        draft = work / "higgs-random.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        save_model(draft, own_codec, own_codec, word_tokenizer(), SIZES, text_head=False, seed=0)
        facts = describe(own_codec)
        identity = {"name": "higgs", "place": str(own_codec), "sha256": hash_weights(own_codec)}
        write_json(draft / "codec.json", identity | {name: facts[name] for name in ("sample_rate", "hop")})
        draft.rename(work / "higgs-random")
    if not (work / "higgs" / "export" / "model.safetensors").exists():
        # Without evaluation the last weights are exported. They clone and read best, long after the loss of new voices
        # was lowest.
        words = ["--model", work / "higgs-random", "--data", tokens / "clone-base", "--out", work / "higgs", *CLONING]
        call([ROOT / "launch.sh", "higgs_clone", "--ranks", "1", *words])


# ---- the assets ------------------------------------------------------------------------------------------------


def collect(work: Path, codec: Path, out: Path) -> None:
    """Without absolute paths: data/demos/speech.py and clone.py set them when they build the demos."""
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
        copy_tokens(work / "tokens" / split, voice / "tokens" / split)
    (voice / "audio").mkdir()
    for number in ORIGINALS:
        shutil.copy(work / "voices" / "slt" / f"{number:03d}.wav", voice / "audio")
    shutil.copy(work / "voices" / "grammar.jsgf", voice)
    collect_higgs(work, draft / "higgs")
    hashes = {str(file.relative_to(draft)): hash_file(file) for file in sorted(draft.rglob("*")) if file.is_file()}
    write_json(draft / "hashes.json", hashes)
    draft.rename(out)
    print(f"{out}: {sum(file.stat().st_size for file in out.rglob('*')) / 1e6:.1f} MB")


def collect_higgs(work: Path, folder: Path) -> None:
    import torch
    from transformers import HiggsAudioV2ForConditionalGeneration

    export, model = work / "higgs" / "export", folder / "model"
    HiggsAudioV2ForConditionalGeneration.from_pretrained(export, dtype=torch.float16).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(export / name, model)
    processor = json.loads((export / "processor_config.json").read_text())
    processor["audio_tokenizer"]["audio_tokenizer_name_or_path"] = "codec"
    write_json(model / "processor_config.json", processor)
    identity = json.loads((export / "codec.json").read_text())
    write_json(model / "codec.json", identity | {"place": "codec", "sha256": ""})
    for split in ("train", "eval"):
        copy_tokens(work / "tokens" / f"clone-{split}", folder / "tokens" / split)


def copy_tokens(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    info = json.loads((target / "dataset.json").read_text())
    write_json(target / "dataset.json", info | {"weights": "codec"})
    sources = [json.loads(line) for line in (target / "sources.jsonl").read_text().splitlines()]
    write_jsonl(target / "sources.jsonl", [[Path(place).name, "", sha256] for place, _, sha256 in sources])


if __name__ == "__main__":
    run_command(main)
