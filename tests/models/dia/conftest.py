"""Shared by the tests of finetune/models: the HF processor with a tiny codec, a tiny Dia, clips in a token dataset."""

import hashlib
import json

import numpy as np
import pytest

DAC = {"codec": "dac", "sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024, "channels": 9}


@pytest.fixture(scope="session")
def processor():
    """DiaProcessor over a tiny random DAC of the real architecture."""
    import torch
    from transformers import DacConfig, DacModel, DiaFeatureExtractor, DiaProcessor, DiaTokenizer

    torch.manual_seed(0)
    codec = DacModel(DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, codebook_dim=4, sampling_rate=44100))
    return DiaProcessor(DiaFeatureExtractor(sampling_rate=44100, hop_length=512), DiaTokenizer(), codec.eval())


@pytest.fixture(scope="session")
def tiny_dia():
    """tiny_dia(seed) -> a Dia of 2 + 2 layers, with the special ids and the delay pattern of the real one."""
    import torch
    from transformers import DiaConfig, DiaForConditionalGeneration
    from transformers.models.dia.configuration_dia import DiaDecoderConfig, DiaEncoderConfig

    def make(seed=0):
        torch.manual_seed(seed)
        sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.05}
        encoder = DiaEncoderConfig(hidden_size=32, num_attention_heads=2, intermediate_size=64, **sizes)
        decoder = DiaDecoderConfig(
            hidden_size=48,
            num_attention_heads=4,
            cross_num_attention_heads=2,
            cross_num_key_value_heads=2,
            cross_head_dim=16,
            cross_hidden_size=32,
            intermediate_size=96,
            **sizes,
        )
        return DiaForConditionalGeneration(DiaConfig(encoder_config=encoder, decoder_config=decoder)).eval()

    return make


@pytest.fixture(scope="session")
def layout(tiny_dia):
    from models.dia.layout import layout_of

    return layout_of(tiny_dia().config)


@pytest.fixture
def make_clips(tmp_path, layout):
    """make_clips([codes (T, 9), ...], texts, train=True, tag_map={}, info={}, **flags) -> Clips.

    `columns`: more columns, such as {"speaker": [...]}."""
    made = []

    def make(codes, texts=None, ids=None, train=True, tag_map=None, info=None, layout=layout, columns=None, **flags):
        from datasets import Dataset, Features, List, Value

        from common.tokens import TokenDataset
        from dia_lora import Config
        from models.dia.data import Clips

        kinds = {
            "id": Value("string"),
            "text": Value("string"),
            "codes": List(Value("int16")),
            "frames": Value("int32"),
        }
        rows = {
            "id": ids or [f"clip-{i}" for i in range(len(codes))],
            "text": [f"[S1] text {i}." for i in range(len(codes))] if texts is None else texts,
            "codes": [np.asarray(c).reshape(-1).tolist() for c in codes],
            "frames": [len(c) for c in codes],
        }
        folder = tmp_path / f"tokens-{len(made)}"
        made.append(folder)
        dataset = Dataset.from_dict(rows, features=Features(kinds))
        for name, values in (columns or {}).items():
            dataset = dataset.add_column(name, values)
        dataset.save_to_disk(folder)
        files = [
            {"name": f.name, "bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
            for f in sorted(folder.glob("*.arrow"))
        ]
        (folder / "dataset.json").write_text(json.dumps(DAC | {"files": files} | (info or {})))
        config = Config(**({"text_dropout": 0.0} | flags))
        return Clips(TokenDataset(str(folder)), layout, config, tag_map or {}, train)

    return make


@pytest.fixture
def random_codes():
    """random_codes(24, 19) -> codes of clips with 24 and 19 frames."""
    rng = np.random.default_rng(11)
    return lambda *frames: [rng.integers(0, 1024, (t, 9), dtype=np.int16) for t in frames]
