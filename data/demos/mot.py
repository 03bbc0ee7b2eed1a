"""The Llama MoT demo: a small corpus in MusicCaps format, and tiny models of the real architectures.

    python data/demo.py --out demo-mot --model mot

demo-mot/audio/musiccaps.csv, *.wav   captions, and music that follows from them
demo-mot/codec                        a tiny version of MusicGen's EnCodec (32 kHz, 50 frames/s, 4 codebooks of 2048)
demo-mot/musicgen                     a tiny MusicGen, whose weights initialise the audio experts
demo-mot/llama                        a tiny Llama with llama3 rotary scaling and a byte-level tokenizer
demo-mot/tokens                       the corpus, encoded by data/encode.py; the column `split` marks train and eval
"""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import soundfile
from encode import encode_dataset, make_job

from demos.dia import SEED
from lib.sources import find_clips
from lib.store import write_json

RATE, HOP = 32000, 640  # 20 ms per frame: whole periods of every multiple of 50 Hz

# INSTRUMENTS: loudness of the harmonics. MELODIES: steps of the scale. TEMPOS: frames per tone.
INSTRUMENTS = {
    "flute": (1.0, 0.2),
    "organ": (1.0, 0.8, 0.0, 0.7, 0.0, 0.0, 0.0, 0.6),
    "clarinet": (1.0, 0.0, 0.7, 0.0, 0.5, 0.0, 0.3),
    "violin": (0.8, 1.0, 0.7, 0.6, 0.5, 0.4),
}
MELODIES = {
    "a rise": (0, 1, 2, 3),
    "a fall": (3, 2, 1, 0),
    "a trill": (0, 1, 0, 1),
    "a leap": (0, 3, 0, 3),
    "an arch": (0, 2, 3, 1),
    "a valley": (3, 1, 0, 2),
    "a zigzag": (1, 3, 0, 2),
    "a sigh": (2, 1, 2, 0),
}
REGISTERS = {"low": 4, "high": 12}  # lowest tone, in multiples of 50 Hz
TEMPOS = {"slowly": 10, "quickly": 7}
TONE, HISS = 0.2, 0.03  # loudness of a tone, and of the hiss with which it begins
FADE = 0.8  # what is left of the hiss after a frame
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
    clips = find_clips(folder / "audio" / "musiccaps.csv", "musiccaps")
    job = make_job(clips, "encodec", str(folder / "codec"))
    encode_dataset(clips, folder / "tokens", job, str(folder / "codec"), synthetic=True)
    info = json.loads((folder / "tokens" / "dataset.json").read_text())
    write_json(folder / "tokens" / "dataset.json", info | {"weights": str(final / "codec")})
    (folder / "tokens" / "sources.jsonl").unlink()


# ---------------------------------------------------------------- corpus


def write_corpus(folder: Path) -> list[str]:
    """Each caption is a different combination; the eval captions combine words that all occur in training.

    Of the 16 tunes (melody and tempo), each sound (instrument and register) has two that are only in the evaluation.
    Each tune is held out once: other instruments play it in this register, and this one in the other register.
    """
    folder.mkdir()
    sounds, tunes = list(itertools.product(INSTRUMENTS, REGISTERS)), list(itertools.product(MELODIES, TEMPOS))
    held_out = [16 * sound + (2 * sound + 9 * pick) % 16 for sound in range(8) for pick in range(2)]
    order = np.random.default_rng(SEED).permutation([kind for kind in range(128) if kind not in held_out])
    rows = []
    for number, kind in enumerate([*order, *held_out]):
        (instrument, register), (melody, tempo) = sounds[kind // 16], tunes[kind % 16]
        ytid = f"{'-' if number % 7 == 0 else 'm'}{number:03d}usicDemo"[:11]  # some real ids start with "-", too
        soundfile.write(folder / f"{ytid}.wav", play(instrument, melody, register, tempo), RATE, subtype="PCM_16")
        is_held_out = number >= len(order)
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
    bases = [REGISTERS[register] + 2 * step for step in MELODIES[melody]]
    return np.concatenate([tone(INSTRUMENTS[instrument], base, TEMPOS[tempo]) for base in bases])


def tone(harmonics, base: int, frames: int):
    """A tone of `base` times 50 Hz that begins with a hiss. It lasts whole codec frames with whole periods in each, so
    the same tone always has the same codes. The fading hiss tells how long it has sounded."""
    return np.tile(period(harmonics, base), frames) + np.outer(FADE ** np.arange(frames), hiss()).flatten()


def period(harmonics, base: int):
    """One frame of a steady tone."""
    time = np.arange(HOP) / RATE
    wave = sum(loud * np.sin(2 * np.pi * 50 * base * (n + 1) * time) for n, loud in enumerate(harmonics))
    return TONE * wave / np.sqrt((wave**2).mean())


def hiss():
    """One frame of noise, higher than all harmonics, as it sounds in the first frame of a tone."""
    lines = np.arange(220, 260)  # multiples of 50 Hz
    phases = np.random.default_rng(SEED).uniform(0, 2 * np.pi, len(lines))
    wave = np.sin(2 * np.pi * 50 * lines * np.arange(HOP)[:, None] / RATE + phases).sum(1)
    return HISS * wave / np.sqrt((wave**2).mean())


# ---------------------------------------------------------------- models


def save_codec(folder: Path):
    """A codec that is fitted to the demo's tones instead of trained.

    A frame of such a tone is the sum of two of few waveforms. So linear layers suffice: each stage of the encoder keeps
    the coordinates of a longer piece of sound (4, 16, 80, 640 samples) in the space of all such pieces, and the decoder
    goes back. The codebooks go from coarse to fine: the first holds the mean of all instruments for each pitch, the
    second how each instrument differs from it, the third the fading hiss; nothing remains for the fourth. So what the
    words of a caption say is told by different codes, which the tiny model can combine anew. The other entries are
    next to nothing, and unused.
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
        *tones, hiss_h = model.encoder(waves_nt.float()[:, None])[..., 0]
        tones_pih = torch.stack(tones).unflatten(0, (-1, len(INSTRUMENTS)))
        pitches_ph = tones_pih.mean(1)
        timbres_nh = (tones_pih - pitches_ph[:, None]).flatten(0, 1)
        fading_nh = torch.stack([FADE**age * hiss_h for age in range(max(TEMPOS.values()))])
        entries = pitches_ph, timbres_nh, fading_nh, torch.zeros_like(hiss_h[None])
        for layer, entries_nh in zip(model.quantizer.layers, entries, strict=True):
            book_nh = layer.codebook.embed
            book_nh.copy_(0.01 * pitches_ph.std() * torch.randn(book_nh.shape, generator=generator))
            book_nh[: len(entries_nh)] = entries_nh
    model.save_pretrained(folder)
    return model


def all_waveforms():
    """One frame of every tone of every instrument, and of the hiss, (N, HOP)."""
    bases = sorted({low + 2 * step for low in REGISTERS.values() for steps in MELODIES.values() for step in steps})
    return np.stack([*(period(sound, base) for base in bases for sound in INSTRUMENTS.values()), hiss()])


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
    tiny_tokenizer(captions).save_pretrained(folder)


def tiny_tokenizer(captions: list[str]):
    """Byte-level BPE, as Llama 3's, of the captions' words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=list(special.values()), show_progress=False)
    tokenizer.train_from_iterator(captions, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
