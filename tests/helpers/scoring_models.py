"""Tiny models with random weights that score samples, saved on disk as real ones are."""

import json
from pathlib import Path

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
SIZES |= {"tdnn_dim": [16] * 5, "xvector_output_dim": 16, "vocab_size": 8, "pad_token_id": 0}


def save_speaker_encoder(folder: Path) -> Path:
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForXVector

    Wav2Vec2ForXVector(Wav2Vec2Config(**SIZES)).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def save_recogniser(folder: Path) -> Path:
    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2CTCTokenizer,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForCTC,
        Wav2Vec2Processor,
    )

    Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES)).save_pretrained(folder)
    vocabulary = folder.parent / "vocab.json"
    vocabulary.write_text(json.dumps({t: i for i, t in enumerate(["<pad>", "<unk>", "|", *"abcde"])}))
    tokenizer = Wav2Vec2CTCTokenizer(str(vocabulary), pad_token="<pad>", unk_token="<unk>")
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def save_clap(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, PreTrainedTokenizerFast

    text = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "max_position_embeddings": 40}
    audio = {"window_size": 4, "num_mel_bins": 64, "spec_size": 256, "patch_embeds_hidden_size": 16, "depths": [1, 1]}
    audio |= {"num_attention_heads": [2, 2], "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 4}
    audio |= {"patch_stride": [4, 4], "enable_fusion": False}
    ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8)).save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "one", "two"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 30}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    ClapProcessor(ClapFeatureExtractor(truncation="rand_trunc", padding="repeatpad"), fast).save_pretrained(folder)
    return folder
