"""The Dia demo: a small speech-like corpus, and a tiny codec and model of the real architectures.

    python data/demo.py --out demo

demo/audio/<split>/*.wav, *.txt   synthetic speech in several voices: each letter has its own sound
demo/codec                        a tiny DAC
demo/dia                          a tiny Dia, randomly initialised
demo/tokens/<split>               the corpus, encoded by data/encode.py like a user's audio
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from encode import encode_dataset, make_job

from lib.sources import find_clips
from lib.store import write_json, write_jsonl

SEED = 20240613
RATE, HOP = 44100, 512
CLIPS = {"train": 64, "eval": 8}
WORDS = "bada gumi lono sike tafu relu dimo nusa kobe falu gire mota".split()

# First and second formant in Hz of voiced sounds; noise band in Hz of unvoiced (hissed) sounds
VOWELS = {"a": (800, 1250), "e": (500, 1900), "i": (300, 2400), "o": (480, 850), "u": (330, 650)}
VOICED = {"b": (250, 700), "d": (250, 1600), "g": (250, 2100), "m": (220, 1000), "n": (220, 1500)}
VOICED |= {"l": (360, 1300), "r": (420, 1100)}
HISSED = {"s": (5000, 9000), "f": (2500, 7000), "t": (3500, 6500), "k": (1500, 3500)}
# Every sound lasts a whole number of codec frames and of pitch periods per frame, so that the codes follow from the
# text: a tiny model can then learn in a minute what takes a real one hours.
# Pitch in periods per frame (86 Hz each), and a factor for all formants (a short throat has high ones).
VOICES = {"ada": (2, 1.12), "ben": (1, 0.92), "cleo": (3, 1.2), "dov": (1, 0.8)}
PARTNER = {"ada": "ben", "ben": "ada", "cleo": "dov", "dov": "cleo"}  # who speaks the [S2] turns


@dataclass(frozen=True)
class Sound:
    """The codec that the voices are made for, and how many of its frames each kind of sound lasts."""

    rate: int = RATE
    hop: int = HOP
    vowel: int = 8
    consonant: int = 5
    before: int = 2  # silence at the start
    after: int = 3  # silence after each word


DAC_SOUND = Sound()


def build_parts(folder: Path, final: Path) -> None:
    """Build everything in `folder`, which is then renamed to `final`: paths inside the files must name `final`."""
    folder.mkdir(parents=True)
    clips = write_corpus(folder / "audio")
    print(f"  {len(clips)} clips synthesised", flush=True)
    save_codec(folder / "codec")
    print("  codec saved", flush=True)
    save_dia(folder / "dia", folder / "codec", final / "codec")
    print("  model saved", flush=True)
    for split in CLIPS:
        encode_split(folder, final, split, "dac")


def encode_split(folder: Path, final: Path, split: str, codec: str) -> None:
    """Encode the clips in <folder>/audio/<split>.jsonl with data/encode.py, like a user's audio."""
    tokens = folder / "tokens" / split
    clips = find_clips(folder / "audio" / f"{split}.jsonl", "jsonl")
    job = make_job(clips, codec, str(folder / "codec"))
    encode_dataset(clips, tokens, job, str(folder / "codec"), synthetic=True)
    # Replace the temporary folder by the final one.
    info = json.loads((tokens / "dataset.json").read_text())
    write_json(tokens / "dataset.json", info | {"weights": str(final / "codec")})
    sources = tokens / "sources.jsonl"
    sources.write_text(sources.read_text().replace(json.dumps(str(folder))[:-1], json.dumps(str(final))[:-1]))


# ---------------------------------------------------------------- corpus


def write_corpus(folder: Path) -> list[dict]:
    texts = demo_texts()
    items = []
    for split, count in CLIPS.items():
        (folder / split).mkdir(parents=True)
        lines = []
        for number in range(count):
            speaker = list(VOICES)[number % len(VOICES)]
            text = texts.pop()
            name = f"{split}/{speaker}_{number:03d}"
            soundfile.write(folder / f"{name}.wav", speak(text, speaker), RATE, subtype="PCM_16")
            (folder / f"{name}.txt").write_text(text + "\n")
            lines.append({"id": name.replace("/", "-"), "audio": f"{name}.wav", "speaker": speaker, "split": split})
            items.append(lines[-1])
        write_jsonl(folder / f"{split}.jsonl", lines)
    return items


def demo_texts() -> list[str]:
    """Distinct texts of 2 to 6 words, dialogues from 4 words on; eval has new texts made of the same words."""
    rng = np.random.default_rng(SEED)
    texts = {}
    while len(texts) < sum(CLIPS.values()):
        words = list(rng.choice(WORDS, size=rng.integers(2, 7)))
        text = "[S1] " + " ".join(words)
        if len(words) >= 4:
            text = "[S1] " + " ".join(words[:2]) + " [S2] " + " ".join(words[2:])
        texts[text] = None
    return list(texts)


def speak(text: str, speaker: str, sound: Sound = DAC_SOUND, voices: dict = VOICES):
    """Samples in -1..1; each letter has its own spectrum, each voice its own pitch and formants."""
    pieces, voice = [np.zeros(sound.before * sound.hop)], voices[speaker]
    for word in text.split():
        if word in ("[S1]", "[S2]"):
            voice = voices[speaker if word == "[S1]" else PARTNER[speaker]]
            continue
        pieces += [letter_sound(letter, *voice, sound) for letter in word]
        pieces.append(np.zeros(sound.after * sound.hop))
    wave = np.concatenate(pieces)
    return 0.5 * wave / np.abs(wave).max()


def letter_sound(letter: str, pitch: int, throat: float, sound: Sound):
    """The same period, exactly one codec frame long, repeated: while a letter sounds, its codes stay the same."""
    hop = sound.hop
    frequency = np.arange(hop // 2 + 1) * sound.rate / hop
    if letter in HISSED:
        low, high = HISSED[letter]
        noise = np.random.default_rng([SEED, ord(letter)]).standard_normal(hop)
        spectrum = np.fft.rfft(noise) * ((frequency >= throat * low) & (frequency <= throat * high))
        loudness = 0.35
    else:
        formants = (VOWELS | VOICED)[letter]
        gain = sum(np.exp(-(((frequency - throat * f) / 160) ** 2)) / (1 + i) for i, f in enumerate(formants))
        gain = (gain + 1.7 / np.maximum(frequency, 1)) * (frequency < 4500)
        voiced = (np.arange(len(gain)) % pitch == 0) & (frequency > 0)
        spectrum = -1j * gain * voiced
        loudness = 0.9 if letter in VOWELS else 0.45
    period = np.fft.irfft(spectrum, hop)
    frames = sound.vowel if letter in VOWELS else sound.consonant
    wave = np.tile(loudness * period / np.abs(period).max(), frames)
    ramp = hop // 2
    wave[:ramp] *= np.linspace(0, 1, ramp)
    wave[-ramp:] *= np.linspace(1, 0, ramp)
    return wave


# ---------------------------------------------------------------- models


def save_codec(folder: Path) -> None:
    import torch
    from transformers import DacConfig, DacFeatureExtractor, DacModel

    torch.manual_seed(SEED)
    config = DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, codebook_dim=4, sampling_rate=RATE)
    DacModel(config).eval().save_pretrained(folder)
    DacFeatureExtractor(sampling_rate=RATE, hop_length=config.hop_length).save_pretrained(folder)


# LoRA on a frozen random base depends on the spread of the base's activations: after 300 steps the loss was 3.1 with an
# initializer_range of 0.04, 1.8 with 0.1 and 2.4 with 0.15 (one run each).
ENCODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "initializer_range": 0.1,
}
DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "cross_num_attention_heads": 4,
    "cross_num_key_value_heads": 4,
    "cross_head_dim": 16,
    "cross_hidden_size": 32,
    "intermediate_size": 160,
    "initializer_range": 0.1,
}
# as the real model generates
SAMPLING = {"do_sample": True, "temperature": 1.8, "top_p": 0.9, "top_k": 50, "guidance_scale": 3.0, "max_length": 3072}


def save_dia(
    folder: Path,
    codec: Path,
    final_codec: Path,
    encoder: dict = ENCODER,
    decoder: dict = DECODER,
    generation: dict = SAMPLING,
    seed: int = SEED,
) -> None:
    """A Dia with random weights that speaks through `codec`, which its processor calls `final_codec`. The delays are
    those of the real model; the special ids follow the codec's own, which gives the real ids with a real codec."""
    import torch
    from transformers import (
        DacModel,
        DiaConfig,
        DiaFeatureExtractor,
        DiaForConditionalGeneration,
        DiaProcessor,
        DiaTokenizer,
        GenerationConfig,
    )
    from transformers.models.dia.configuration_dia import DiaDecoderConfig, DiaEncoderConfig

    audio_tokenizer = DacModel.from_pretrained(codec)
    audio_tokenizer.name_or_path = str(final_codec)  # only the name is saved, and the folder may be renamed
    codes = audio_tokenizer.config.codebook_size
    special = {"eos_token_id": codes, "pad_token_id": codes + 1, "bos_token_id": codes + 2}
    torch.manual_seed(seed)
    config = DiaConfig(
        encoder_config=DiaEncoderConfig(**encoder),
        decoder_config=DiaDecoderConfig(**decoder, **special, vocab_size=codes + 4),
        initializer_range=decoder.get("initializer_range", 0.02),
    )
    model = DiaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**generation, **special)
    model.save_pretrained(folder)
    sound = audio_tokenizer.config
    extractor = DiaFeatureExtractor(sampling_rate=sound.sampling_rate, hop_length=sound.hop_length)
    DiaProcessor(extractor, DiaTokenizer(), audio_tokenizer).save_pretrained(folder)
