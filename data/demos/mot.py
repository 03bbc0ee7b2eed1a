"""The Llama MoT demo: a small corpus in MusicCaps format, and tiny models of the real architectures.

    python data/demo.py --out demo-mot --model mot

demo-mot/audio/musiccaps.csv, *.wav   captions, and music that follows from them
demo-mot/codec                        a tiny version of MusicGen's EnCodec (32 kHz, 50 frames/s, 4 codebooks of 2048)
demo-mot/musicgen                     a tiny MusicGen, whose weights initialise the audio experts
demo-mot/llama                        a tiny Llama with llama3 rotary scaling and a SentencePiece tokenizer
demo-mot/tokens                       the corpus, encoded by data/encode.py; the column `split` marks train and eval
"""

import csv
import io
import json
from pathlib import Path

from demos.dia import SEED
from lib.store import write_json

RATE, HOP = 32000, 640  # 20 ms per frame: a tone of a multiple of 50 Hz repeats exactly, so its codes stay the same
CLIPS = {"train": 56, "eval": 8}

# INSTRUMENTS: loudness of the harmonics. MELODIES: steps of the scale. TEMPOS: frames per tone.
INSTRUMENTS = {
    "flute": (1.0, 0.2),
    "organ": (1.0, 0.8, 0.0, 0.7, 0.0, 0.0, 0.0, 0.6),
    "clarinet": (1.0, 0.0, 0.7, 0.0, 0.5, 0.0, 0.3),
    "violin": (0.8, 1.0, 0.7, 0.6, 0.5, 0.4),
}
MELODIES = {
    "a rising line": (0, 1, 2, 3),
    "a falling line": (3, 2, 1, 0),
    "a trill": (0, 1, 0, 1),
    "a wide leap": (0, 4, 0, 4),
}
REGISTERS = {"low": 4, "high": 12}  # lowest tone, in multiples of 50 Hz
TEMPOS = {"slowly": 10, "quickly": 7}


def build_parts(folder: Path, final: Path) -> None:
    """Build everything in `folder`, which is then renamed to `final`: paths inside the files must name `final`."""
    folder.mkdir(parents=True)
    captions = write_corpus(folder / "audio")
    print(f"  {len(captions)} pieces synthesised", flush=True)
    codec = save_codec(folder / "codec")
    save_musicgen(folder / "musicgen", codec)
    save_llama(folder / "llama", captions)
    print("  models saved", flush=True)
    from encode import encode_dataset

    from lib.sources import find_clips

    clips = find_clips(folder / "audio" / "musiccaps.csv", "musiccaps")
    encode_dataset(clips, folder / "tokens", codec="encodec", weights=str(folder / "codec"), synthetic=True)
    info = json.loads((folder / "tokens" / "dataset.json").read_text())
    write_json(folder / "tokens" / "dataset.json", info | {"weights": str(final / "codec")})
    (folder / "tokens" / "sources.jsonl").unlink()


# ---------------------------------------------------------------- corpus


def write_corpus(folder: Path) -> list[str]:
    """Each caption is a different combination; the eval captions combine words that all occur in training."""
    import numpy as np
    import soundfile

    folder.mkdir()
    kinds = [(i, m, r, t) for i in INSTRUMENTS for m in MELODIES for r in REGISTERS for t in TEMPOS]
    order = np.random.default_rng(SEED).permutation(len(kinds))[: sum(CLIPS.values())]
    rows = []
    for number, choice in enumerate(order):
        instrument, melody, register, tempo = kinds[choice]
        ytid = f"{'-' if number % 7 == 0 else 'm'}{number:03d}usicDemo"[:11]  # some real ids start with "-", too
        soundfile.write(folder / f"{ytid}.wav", play(*kinds[choice]), RATE, subtype="PCM_16")
        held_out = number >= CLIPS["train"]
        row = {"ytid": ytid, "start_s": 0, "end_s": 10, "audioset_positive_labels": "/m/04rlf"}
        row |= {"aspect_list": str([instrument, register, tempo]), "author_id": 0}
        row["caption"] = f"The {instrument} {tempo} plays {melody} in the {register} register."
        rows.append(row | {"is_balanced_subset": held_out, "is_audioset_eval": held_out})
    with open(folder / "musiccaps.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [row["caption"] for row in rows]


def play(instrument: str, melody: str, register: str, tempo: str):
    """Samples in -1..1; each tone lasts whole codec frames, with whole periods in each frame."""
    import numpy as np

    frames, time = TEMPOS[tempo], np.arange(HOP) / RATE
    tones = []
    for step in MELODIES[melody]:
        base = 50 * (REGISTERS[register] + 2 * step)
        period = sum(loud * np.sin(2 * np.pi * base * (n + 1) * time) for n, loud in enumerate(INSTRUMENTS[instrument]))
        tones.append(np.tile(period / np.abs(period).max(), frames))
    return 0.5 * np.concatenate(tones)


# ---------------------------------------------------------------- models


def save_codec(folder: Path):
    import torch
    from transformers import EncodecConfig, EncodecModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # MusicGen's own special ids lie outside its vocabulary, which gives two warnings
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = EncodecConfig(
        target_bandwidths=[2.2],
        sampling_rate=RATE,
        audio_channels=1,
        normalize=False,
        num_filters=4,
        hidden_size=16,
        codebook_size=2048,
        codebook_dim=16,
        upsampling_ratios=[8, 5, 4, 4],
        use_causal_conv=False,
        num_lstm_layers=1,
    )
    model = EncodecModel(config).eval()
    # A random LSTM drowns the sound in its own transients, so its weights are set to zero: a steady tone then has
    # steady codes. New codebooks are all zeros, which would make every code 0, so they are spread over the encoder's
    # outputs.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.LSTM):
                for parameter in module.parameters():
                    parameter.zero_()
        sound = torch.cat([torch.tensor(play(i, m, "low", "quickly")) for i in INSTRUMENTS for m in MELODIES])
        latents = model.encoder(sound.float()[None, None])[0].T
    generator = torch.Generator().manual_seed(SEED)
    books = [buffer for name, buffer in model.named_buffers() if name.endswith(".embed")]
    for number, book in enumerate(books):
        book.copy_(torch.randn(book.shape, generator=generator) * latents.std(0) / 2**number)
        if number == 0:
            book.add_(latents.mean(0))
    model.save_pretrained(folder)
    return model


def save_musicgen(folder: Path, codec) -> None:
    """Narrower and deeper than the tiny Llama, so that the projections and the layer map are needed."""
    import torch
    from transformers import MusicgenConfig, MusicgenDecoderConfig, MusicgenForConditionalGeneration, T5Config

    torch.manual_seed(SEED)
    text = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    decoder = MusicgenDecoderConfig(
        hidden_size=48, num_hidden_layers=6, ffn_dim=192, num_attention_heads=4, num_codebooks=4, initializer_factor=0.1
    )
    config = MusicgenConfig(text_encoder=text, audio_encoder=codec.config, decoder=decoder)
    model = MusicgenForConditionalGeneration(config)
    model.audio_encoder.load_state_dict(codec.state_dict())
    model.save_pretrained(folder)


def save_llama(folder: Path, captions: list[str]) -> None:
    import torch
    from sentencepiece import SentencePieceTrainer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_parameters=rope,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(captions),
        model_writer=content,
        vocab_size=180,
        model_type="bpe",
        hard_vocab_limit=False,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(content.getvalue())
