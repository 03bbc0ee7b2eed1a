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
import itertools
import json
from pathlib import Path

from demos.dia import SEED
from lib.store import write_json

RATE, HOP = 32000, 640  # 20 ms per frame: whole periods of every multiple of 50 Hz
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
    "a wide leap": (0, 3, 0, 3),
}
REGISTERS = {"low": 4, "high": 12}  # lowest tone, in multiples of 50 Hz
TEMPOS = {"slowly": 10, "quickly": 7}
FADE = 0.9  # what is left of a tone's loudness after a frame
QUIET = 1e-4  # loudness inside the codec


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
    """Each caption is a different combination; the eval captions combine words that all occur in training.

    Of the 8 tunes (melody and tempo), each sound (instrument and register) has one that is only in the evaluation.
    """
    import numpy as np
    import soundfile

    folder.mkdir()
    sounds, tunes = list(itertools.product(INSTRUMENTS, REGISTERS)), list(itertools.product(MELODIES, TEMPOS))
    held_out = [8 * sound + 3 * sound % 8 for sound in range(8)]
    order = np.random.default_rng(SEED).permutation([kind for kind in range(64) if kind not in held_out])
    rows = []
    for number, kind in enumerate([*order, *held_out]):
        (instrument, register), (melody, tempo) = sounds[kind // 8], tunes[kind % 8]
        ytid = f"{'-' if number % 7 == 0 else 'm'}{number:03d}usicDemo"[:11]  # some real ids start with "-", too
        soundfile.write(folder / f"{ytid}.wav", play(instrument, melody, register, tempo), RATE, subtype="PCM_16")
        is_held_out = number >= CLIPS["train"]
        row = {"ytid": ytid, "start_s": 0, "end_s": 10, "audioset_positive_labels": "/m/04rlf"}
        row |= {"aspect_list": str([instrument, register, tempo]), "author_id": 0}
        row["caption"] = f"The {instrument} {tempo} plays {melody} in the {register} register."
        rows.append(row | {"is_balanced_subset": is_held_out, "is_audioset_eval": is_held_out})
    with open(folder / "musiccaps.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [row["caption"] for row in rows]


def play(instrument: str, melody: str, register: str, tempo: str):
    """Samples in -1..1."""
    import numpy as np

    bases = [REGISTERS[register] + 2 * step for step in MELODIES[melody]]
    return np.concatenate([tone(INSTRUMENTS[instrument], base, TEMPOS[tempo]) for base in bases])


def tone(harmonics, base: int, frames: int):
    """A plucked tone of `base` times 50 Hz. It lasts whole codec frames with whole periods in each, so the same tone
    always has the same codes, and it fades, so that they tell how long it has sounded."""
    import numpy as np

    time = np.arange(HOP) / RATE
    period = sum(loud * np.sin(2 * np.pi * 50 * base * (n + 1) * time) for n, loud in enumerate(harmonics))
    wave = np.tile(period / np.sqrt((period**2).mean()), frames)
    return 0.2 * wave * FADE ** (np.arange(len(wave)) / HOP)


# ---------------------------------------------------------------- models


def save_codec(folder: Path):
    """A codec that is fitted to the demo's tones instead of trained.

    A frame of such a tone is a multiple of one of few waveforms. So linear layers suffice: each stage of the encoder
    keeps the coordinates of a longer piece of sound (4, 16, 80, 640 samples) in the space of all such pieces, and the
    decoder goes back. The first codebook holds these waveforms, and near silence: its code tells instrument and pitch.
    The others hold random remainders: their codes tell how much of the tone is left.
    """
    import torch
    from transformers import EncodecConfig, EncodecModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # MusicGen's own special ids lie outside its vocabulary, which gives two warnings
    logging.disable_progress_bar()
    waves_nt = torch.tensor(all_waveforms(), dtype=torch.float64)
    config = EncodecConfig(
        target_bandwidths=[2.2],
        sampling_rate=RATE,
        audio_channels=1,
        normalize=False,
        num_filters=8,
        hidden_size=len(waves_nt),
        codebook_size=2048,
        codebook_dim=len(waves_nt),
        upsampling_ratios=[8, 5, 4, 4],
        use_causal_conv=False,
        num_lstm_layers=1,
        num_residual_layers=0,
    )
    model = EncodecModel(config).eval()
    for name, parameter in model.named_parameters():
        if "lstm" in name or name.endswith("bias"):
            torch.nn.init.zeros_(parameter)  # an LSTM of zeros adds nothing
    encoder = [layer.conv for layer in model.encoder.layers if hasattr(layer, "conv")]
    decoder = [layer.conv for layer in model.decoder.layers if hasattr(layer, "conv")]
    # ELU is linear near 0: inside, the sound is very quiet.
    set_taps(encoder[0], torch.full((1, 1, 1), QUIET))
    set_taps(decoder[-1], torch.full((1, 1, 1), 1 / QUIET))
    space_tr, length = torch.ones(1, 1, dtype=torch.float64), 1
    for number, stride in enumerate((4, 4, 5, 8)):
        pieces_nt = waves_nt.reshape(-1, stride * length)
        channels = encoder[1 + number].out_channels
        directions_rt = torch.linalg.svd(pieces_nt, full_matrices=False).Vh[:channels]
        taps_rck = torch.einsum("rkt,tc->rck", directions_rt.unflatten(1, (stride, length)), space_tr)
        set_taps(encoder[1 + number], taps_rck)
        set_taps(decoder[-2 - number], taps_rck)
        space_tr, length = directions_rt.T, stride * length
    same = torch.eye(len(waves_nt))[..., None]
    set_taps(encoder[-1], same / QUIET)
    set_taps(decoder[0], same * QUIET)

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        latents = model.encoder(random_frames(waves_nt, generator)[:, None])[..., 0]
        for number, layer in enumerate(model.quantizer.layers):
            book, size = layer.codebook, config.codebook_size
            latents = latents[torch.randperm(len(latents), generator=generator)]
            if number == 0:
                book.embed.copy_(0.01 * latents[:size])
                middle = FADE ** (max(TEMPOS.values()) / 2)
                book.embed[: len(waves_nt)] = middle * model.encoder(waves_nt.float()[:, None])[..., 0]
            else:
                book.embed.copy_(latents[:size])
                latents = latents[size:]  # of the others, nothing would remain
            latents = latents - book.decode(book.encode(latents))
    model.save_pretrained(folder)
    return model


def all_waveforms():
    """One frame of every tone of every instrument, (N, HOP)."""
    import numpy as np

    bases = sorted({low + 2 * step for low in REGISTERS.values() for steps in MELODIES.values() for step in steps})
    return np.stack([tone(sound, base, 1) for base in bases for sound in INSTRUMENTS.values()])


def random_frames(waves_nt, generator):
    """Tones of two instruments together, in all mixtures and of all loudnesses."""
    import torch

    count, kinds = 8192, len(INSTRUMENTS)

    def draw(end: int):
        return torch.randint(end, (count,), generator=generator)

    base = kinds * draw(len(waves_nt) // kinds)
    share, loudness = torch.rand(2, count, 1, generator=generator)
    share = share**3  # mostly one of the two
    frames = share * waves_nt[base + draw(kinds)] + (1 - share) * waves_nt[base + draw(kinds)]
    return ((0.3 + 0.7 * loudness) * frames).float()


def set_taps(convolution, taps_oik) -> None:
    """Sets the middle of the kernel between the first channels. For a transposed convolution, `taps_oik` is
    (in, out, taps)."""
    import torch

    # The rest is next to nothing instead of 0: weight normalisation divides by the length of each row.
    weight = torch.full(convolution.weight.shape, 1e-9)
    outputs, inputs, count = taps_oik.shape
    first = (weight.shape[-1] - count + 1) // 2
    weight[:outputs, :inputs, first : first + count] = taps_oik
    with torch.no_grad():
        convolution.weight = weight


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
    model = LlamaForCausalLM(config)
    # As in a trained Llama, words must stay apart: random layers of full strength would blend those of a caption.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
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
