"""The Higgs Audio v2 demo for voice cloning: the Dia demo's voices at 24 kHz, each clip with a reference.

    python data/demo.py --out demo-higgs --model higgs

demo-higgs/audio/<split>.jsonl   manifest of targets and references, as a user would write it
demo-higgs/codec                 a tiny Higgs codec of the real architecture
demo-higgs/model                 a tiny model, randomly initialised, with tokenizer, processor and chat template
demo-higgs/tokens/<split>        the corpus, encoded by data/encode.py
"""

import json
from pathlib import Path

import numpy as np
import soundfile

from demos.dia import SEED, WORDS, Sound, encode_split, speak
from lib.store import write_jsonl

CLIPS = {"train": 64, "eval": 8}
SOUND = Sound(rate=24000, hop=960, vowel=3, consonant=2, before=1, after=1)
# Pitch in periods per frame (25 Hz each), and a factor for all formants.
VOICES = {"ada": (9, 1.12), "ben": (4, 0.92), "cleo": (12, 1.25), "dov": (5, 0.78)}

# The special tokens of the real tokenizer that a prompt needs, in the order of their real ids.
SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|audio_out_bos|>",
    "<|reserved_special_token_6|>",
    "<|AUDIO|>",
    "<|AUDIO_OUT|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
]

# Renders the same as the published template for a system turn, a scene with voices, and turns of text or audio.
CHAT_TEMPLATE = """
{%- macro words(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for part in content if part.type == 'text' -%}{{ part.text | trim }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{ raise_exception('a system message is needed') }}{%- endif -%}
{{- bos_token -}}
{%- for message in messages if message.role != 'scene' -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{%- if message.role == 'assistant' -%}
{{- '<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' -}}
{%- else -%}
{{- words(message.content) -}}
{%- endif -%}
{%- if message.role == 'system' and messages | length > 1 and messages[1].role == 'scene' -%}
{{- '\n\n<|scene_desc_start|>\n' -}}
{%- for part in ([{'text': messages[1].content}] if messages[1].content is string else messages[1].content) -%}
{%- if part.type == 'audio' -%}
{{- ' <|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' -}}
{%- else -%}
{{- ('' if loop.first else '\n\n' if loop.index == 2 else '\n') + part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{{- '\n<|scene_desc_end|>' -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>' -}}
{%- endif -%}
"""


def build_parts(folder: Path, final: Path) -> None:
    folder.mkdir(parents=True)
    write_corpus(folder / "audio")
    print(f"  {sum(CLIPS.values())} clips synthesised", flush=True)
    save_codec(folder / "codec")
    save_model(folder / "model", folder / "codec", final / "codec")
    print("  codec and model saved", flush=True)
    for split in CLIPS:
        encode_split(folder, final, split, "higgs")


def write_corpus(folder: Path) -> None:
    """The reference of each clip is the speaker's next clip in the same split."""
    texts = demo_texts()
    for split, count in CLIPS.items():
        (folder / split).mkdir(parents=True)
        clips = []
        for number in range(count):
            speaker, text = list(VOICES)[number % len(VOICES)], texts.pop()
            clips.append({"audio": f"{split}/{speaker}_{number:03d}.wav", "text": text, "speaker": speaker})
            wave = speak(text, speaker, SOUND, VOICES)
            soundfile.write(folder / clips[-1]["audio"], wave, SOUND.rate, subtype="PCM_16")
        lines = []
        for number, clip in enumerate(clips):
            reference = clips[(number + len(VOICES)) % count]
            # Speakers and numbers are the same in both splits, but no evaluation clip may have a training clip's id.
            prefix = "" if split == "train" else f"{split}-"
            line = {
                "id": prefix + Path(clip["audio"]).stem,
                "target_audio": clip["audio"],
                "target_text": clip["text"],
            }
            line |= {"ref_audio": reference["audio"], "ref_text": reference["text"]}
            lines.append(line | {"speaker": clip["speaker"], "split": split})
        write_jsonl(folder / f"{split}.jsonl", lines)


def demo_texts() -> list[str]:
    """Distinct texts of 2 or 3 words; eval has new texts made of the same words."""
    rng = np.random.default_rng(SEED)
    texts = {}
    while len(texts) < sum(CLIPS.values()):
        texts[" ".join(rng.choice(WORDS, size=rng.integers(2, 4)))] = None
    return list(texts)


def save_codec(folder: Path) -> None:
    """A tiny codec; hop, rate and codebooks are the real ones."""
    import torch
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    torch.manual_seed(SEED)
    ratios = [8, 5, 4, 2, 3]
    acoustic = {"model_type": "dac", "encoder_hidden_size": 4, "decoder_hidden_size": 32, "hidden_size": 16}
    acoustic |= {"downsampling_ratios": ratios, "upsampling_ratios": ratios}
    semantic = {"model_type": "hubert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    semantic |= {"intermediate_size": 32, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16}
    semantic |= {"num_conv_pos_embedding_groups": 4}
    config = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        codebook_dim=8,
        acoustic_model_config=acoustic,
        semantic_model_config=semantic,
    )
    model = HiggsAudioV2TokenizerModel(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("codebook.embed"):  # initialised to zeros, which would make every code 0
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder)


def tiny_tokenizer():
    """A fast tokenizer of bytes and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    return fast


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}


def save_model(
    folder: Path,
    codec: Path,
    final_codec: Path,
    tokenizer=None,
    sizes: dict = SIZES,
    text_head: bool = True,
    seed: int = SEED,
) -> None:
    """All files of a hub folder in transformers format, with random weights. The model speaks through `codec`, which
    its processor calls `final_codec`; the stream ids follow the codec's own: the real ids for a real codec.

    `text_head`: the published weights include one, though generating speech never uses it."""
    import torch
    from transformers import (
        DacFeatureExtractor,
        GenerationConfig,
        HiggsAudioV2Config,
        HiggsAudioV2ForConditionalGeneration,
        HiggsAudioV2Processor,
        HiggsAudioV2TokenizerModel,
    )

    tokenizer = tokenizer or tiny_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    audio_tokenizer = HiggsAudioV2TokenizerModel.from_pretrained(codec)
    audio_tokenizer.name_or_path = str(final_codec)  # only the name is saved, and the folder may be renamed
    sound = audio_tokenizer.config
    torch.manual_seed(seed)
    config = HiggsAudioV2Config(
        **sizes,
        vocab_size=len(tokenizer),
        num_codebooks=sound.num_quantizers,
        codebook_size=sound.codebook_size + 2,
        audio_stream_bos_id=sound.codebook_size,
        audio_stream_eos_id=sound.codebook_size + 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=token("<|end_of_text|>"),
        eos_token_id=token("<|eot_id|>"),
        audio_token_id=token("<|AUDIO_OUT|>"),
        audio_bos_token_id=token("<|audio_out_bos|>"),
        audio_delay_token_id=token("<|reserved_special_token_6|>"),
    )
    model = HiggsAudioV2ForConditionalGeneration(config, use_text_head=text_head)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, ras_win_len=7, ras_win_max_num_repeat=2
    )
    model.save_pretrained(folder)
    extractor = DacFeatureExtractor(feature_size=1, hop_length=1, sampling_rate=sound.sample_rate, padding_side="right")
    processor = HiggsAudioV2Processor(
        extractor,
        tokenizer,
        audio_tokenizer,
        chat_template=CHAT_TEMPLATE.strip(),
        audio_stream_bos_id=config.audio_stream_bos_id,
        audio_stream_eos_id=config.audio_stream_eos_id,
    )
    processor.save_pretrained(folder)
    saved = json.loads((folder / "processor_config.json").read_text())["audio_tokenizer"]
    assert saved["audio_tokenizer_name_or_path"] == str(final_codec), saved
