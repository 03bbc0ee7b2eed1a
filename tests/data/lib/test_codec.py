"""data/lib/codec.py: the same codes as the libraries, for every weight format and clip length."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import DacModel, EncodecConfig, EncodecModel, HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

from common.errors import UserError
from lib.codec import describe, in_chunks, load_codec


def noise(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(samples, generator=torch.Generator().manual_seed(seed)) - 0.5


def random_codebooks(model: torch.nn.Module, mean: torch.Tensor, spread: float) -> None:
    """New EnCodec and Higgs models have codebooks of zeros, so that every code would be 0."""
    generator = torch.Generator().manual_seed(0)
    books = [buffer for name, buffer in model.named_buffers() if name.endswith(".embed")]
    for number, book in enumerate(books):
        book.copy_(torch.randn(book.shape, generator=generator) * spread + (mean if number == 0 else 0))


@pytest.fixture(scope="module")
def encodec(tmp_path_factory) -> Path:
    """A tiny version of MusicGen's codec: 32 kHz, 50 frames per second, 4 codebooks of 2048."""
    torch.manual_seed(0)
    config = EncodecConfig(
        target_bandwidths=[2.2],
        sampling_rate=32000,
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
    with torch.no_grad():
        latents = model.encoder(noise(32000)[None, None])[0].T
    random_codebooks(model, latents.mean(dim=0), latents.std(dim=0).mean().item())
    folder = tmp_path_factory.mktemp("codec") / "encodec"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def higgs(tmp_path_factory) -> Path:
    """A tiny Higgs codec: 24 kHz, 25 frames per second, 8 codebooks of 1024."""
    torch.manual_seed(0)
    ratios = [8, 5, 4, 2, 3]
    acoustic = {"model_type": "dac", "encoder_hidden_size": 4, "decoder_hidden_size": 64, "hidden_size": 16}
    semantic = {"model_type": "hubert", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    semantic |= {"intermediate_size": 32, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16}
    config = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        codebook_dim=8,
        acoustic_model_config=acoustic | {"downsampling_ratios": ratios, "upsampling_ratios": ratios},
        semantic_model_config=semantic | {"num_conv_pos_embedding_groups": 2},
    )
    model = HiggsAudioV2TokenizerModel(config).eval()
    random_codebooks(model, torch.zeros(8), 0.1)
    folder = tmp_path_factory.mktemp("codec") / "higgs"
    model.save_pretrained(folder)
    return folder


def test_describe(dac, encodec, higgs):
    assert describe(dac) == {"sample_rate": 44100, "hop": 512, "codebooks": 9, "codebook_size": 1024}
    assert describe(encodec) == {"sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048}
    assert describe(higgs) == {"sample_rate": 24000, "hop": 960, "codebooks": 8, "codebook_size": 1024}


def test_encodec_equals_the_library(encodec):
    codec, model = load_codec(encodec), EncodecModel.from_pretrained(encodec).eval()
    for samples in (32000, 32001, 20333):
        codes = codec.encode(noise(samples))
        with torch.no_grad():
            expected = model.encode(noise(samples)[None, None]).audio_codes
        assert expected.shape == (1, 1, 4, -(-samples // 640))
        assert torch.equal(codes, expected[0, 0].T) and len(codes.unique()) > 10
    assert codec.decode(codes).shape == (len(codes) * 640,)


def test_encodec_inside_musicgen(encodec, tmp_path):
    """MusicGen checkpoints contain the codec as `audio_encoder`; nothing else in them is loaded."""
    from safetensors.torch import load_file, save_file

    weights = load_file(encodec / "model.safetensors")
    weights = {f"audio_encoder.{name}": value for name, value in weights.items()}
    save_file(weights | {"decoder.big": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "musicgen", "audio_encoder": json.loads((encodec / "config.json").read_text())}
    config |= {"text_encoder": {"model_type": "t5"}, "decoder": {"model_type": "musicgen_decoder"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(tmp_path) == describe(encodec)
    wave = noise(20000)
    assert torch.equal(load_codec(tmp_path).encode(wave), load_codec(encodec).encode(wave))


def test_higgs_equals_the_library(higgs):
    codec, model = load_codec(higgs), HiggsAudioV2TokenizerModel.from_pretrained(higgs).eval()
    for samples, frames in ((24000, 25), (24001, 25), (24479, 26)):
        codes = codec.encode(noise(samples))
        with torch.no_grad():
            expected = model.encode(noise(samples)[None, None]).audio_codes
        assert torch.equal(codes, expected[0].T) and codes.shape == (frames, 8) and len(codes.unique()) > 10
    assert codec.decode(codes).ndim == 1


def test_descript_and_transformers_weights_give_the_same_codes(dac, tmp_path):
    """The same tensors in descript-audio-codec's .pth file and in DacModel."""
    from dac import DAC

    hf = DacModel.from_pretrained(dac).eval()
    kwargs = {"encoder_dim": 4, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 32, "decoder_rates": [8, 8, 4, 2]}
    kwargs |= {"n_codebooks": 9, "codebook_size": 1024, "codebook_dim": 4, "sample_rate": 44100}
    other = DAC(**kwargs).eval()
    kinds = (torch.nn.Conv1d, torch.nn.ConvTranspose1d, torch.nn.Embedding)
    for part in ("encoder", "quantizer", "decoder"):
        modules = [
            [m for m in getattr(model, part).modules() if isinstance(m, kinds) or type(m).__name__ == "Snake1d"]
            for model in (hf, other)
        ]
        assert len(modules[0]) == len(modules[1])
        for ours, theirs in zip(*modules, strict=True):
            if hasattr(theirs, "weight_v"):  # weight norm: v is the direction, g the length
                theirs.weight_v.data.copy_(ours.weight.data)
                theirs.weight_g.data.copy_(torch.linalg.vector_norm(ours.weight.data, dim=(1, 2), keepdim=True))
                theirs.bias.data.copy_(ours.bias.data)
            else:
                theirs.load_state_dict(ours.state_dict())
    torch.save({"state_dict": other.state_dict(), "metadata": {"kwargs": kwargs}}, tmp_path / "weights.pth")
    assert describe(tmp_path / "weights.pth") == describe(dac)
    wave = noise(44100)
    codes = [load_codec(path).encode(wave) for path in (dac, tmp_path / "weights.pth")]
    assert torch.equal(*codes) and len(codes[0].unique()) > 100


@pytest.mark.parametrize("chunk", [16, 40, 60])
def test_chunks_give_the_codes_of_the_whole_clip(dac, chunk):
    model = DacModel.from_pretrained(dac).eval()
    wave = noise(100 * 512 - 77)
    with torch.no_grad():
        whole = model.encode(torch.nn.functional.pad(wave, (0, 77))[None, None]).audio_codes[0].T
        pieces = in_chunks(lambda w: model.encode(w[None, None]).audio_codes[0].T, 512, chunk)(wave)
    assert torch.equal(pieces, whole)


def test_encode_splits_a_long_file_into_chunks(script, clip, dac, tmp_path):
    import datasets

    wave = clip(tmp_path / "in/long.wav", seconds=6.0)[:, 0]  # longer than two chunks
    model = DacModel.from_pretrained(dac).eval()
    with torch.no_grad():
        padded = torch.nn.functional.pad(torch.from_numpy(wave), (0, -len(wave) % 512))
        whole = model.encode(padded[None, None]).audio_codes[0].T.numpy()
    arguments = ("--codec", "dac", "--codec-weights", dac, "--source", tmp_path / "in", "--out", tmp_path / "out")
    assert script("encode", *arguments)[0] == 0
    row = datasets.load_from_disk(str(tmp_path / "out"))[0]
    assert np.array_equal(np.reshape(row["codes"], (-1, 9)), whole)


@pytest.mark.parametrize("name, channels", [("encodec", 4), ("higgs", 8)])
def test_encode_and_decode_with_other_codecs(script, clip, tmp_path, request, name, channels):
    import datasets

    clip(tmp_path / "in/a.wav", rate=48000, channels=2)
    weights = request.getfixturevalue(name)
    arguments = ("--codec", name, "--codec-weights", weights, "--source", tmp_path / "in", "--out", tmp_path / "out")
    assert script("encode", *arguments)[0] == 0
    row = datasets.load_from_disk(str(tmp_path / "out"))[0]
    codes = np.reshape(row["codes"], (-1, channels)).astype(np.int16)
    assert len(codes) == row["frames"]
    np.save(tmp_path / "a.npy", codes)
    assert script("decode", "--codec-weights", weights, tmp_path / "a.npy")[0] == 0
    wave, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == describe(weights)["sample_rate"] and len(wave) == len(codes) * describe(weights)["hop"]


def test_stereo(script, clip, dac, tmp_path):
    import datasets

    both = clip(tmp_path / "in/both.wav", channels=2)
    clip(tmp_path / "in/mono.wav", seed=5)
    arguments = ("--codec", "dac", "--codec-weights", dac, "--source", tmp_path / "in", "--out", tmp_path / "out")
    assert script("encode", *arguments, "--stereo")[0] == 0
    rows = {row["id"]: np.reshape(row["codes"], (-1, 18)) for row in datasets.load_from_disk(str(tmp_path / "out"))}
    codec = load_codec(dac)
    for side in (0, 1):
        expected = codec.encode(torch.from_numpy(both[:, side].copy())).numpy()
        assert np.array_equal(rows["both"][:, 9 * side : 9 * side + 9], expected)
    assert np.array_equal(rows["mono"][:, :9], rows["mono"][:, 9:])
    assert json.loads((tmp_path / "out/dataset.json").read_text())["channels"] == 18


def test_wrong_codec_flag_and_missing_tensors(script, clip, dac, encodec, tmp_path):
    clip(tmp_path / "in/a.wav")
    common = ("--source", tmp_path / "in", "--out", tmp_path / "out")
    code, _, err = script("encode", "--codec", "higgs", "--codec-weights", dac, *common)
    assert code == 2 and "is a dac codec" in err

    from safetensors.torch import load_file, save_file

    weights = load_file(encodec / "model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((encodec / "config.json").read_bytes())
    code, _, err = script("encode", "--codec", "encodec", "--codec-weights", tmp_path, *common)
    assert code == 2 and "lacks tensors" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"normalize": True}, {"chunk_length_s": 1.0}, {"audio_channels": 2}])
def test_an_encodec_whose_codes_need_a_scale_is_refused(encodec, tmp_path, change):
    config = json.loads((encodec / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((encodec / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="use MusicGen's 32 kHz codec"):
        load_codec(tmp_path)


def test_pickle_in_codec_weights_is_not_executed(script, clip, tmp_path):
    clip(tmp_path / "in/a.wav")
    torch.save(Payload(tmp_path / "ran"), tmp_path / "evil.pth")
    arguments = ("--codec", "dac", "--codec-weights", tmp_path / "evil.pth", "--source", tmp_path / "in")
    code, _, err = script("encode", *arguments, "--out", tmp_path / "out")
    assert code == 2 and "not a plain descript-audio-codec file" in err and not (tmp_path / "ran").exists()


class Payload:
    """Unpickling this creates a file, which proves that code was executed."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_gpu_encodes_and_decodes_in_fp32_not_in_tf32(encodec, monkeypatch):
    seen, conv1d = set(), torch.nn.functional.conv1d

    def watched(*args, **kwargs):
        seen.add(torch.backends.cudnn.allow_tf32)
        return conv1d(*args, **kwargs)

    codec = load_codec(encodec)
    monkeypatch.setattr(torch.nn.functional, "conv1d", watched)
    before = torch.backends.cudnn.allow_tf32
    try:
        for default in (True, False):
            torch.backends.cudnn.allow_tf32 = default
            codec.decode(codec.encode(noise(6400)))
            assert seen == {False} and torch.backends.cudnn.allow_tf32 == default
    finally:
        torch.backends.cudnn.allow_tf32 = before
