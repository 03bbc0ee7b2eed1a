"""data/lib/fast_dac.py: the blocks of DAC's encoder with fewer multiplications, against the libraries' own."""

import pytest
import torch
from dac.model.dac import EncoderBlock
from transformers import DacConfig, DacModel
from transformers.models.dac.modeling_dac import DacEncoderBlock

from lib import fast_dac
from lib.codec import load_codec
from lib.fast_dac import Block


def block_of(library: str, stride: int) -> torch.nn.Module:
    torch.manual_seed(stride)
    if library == "descript":
        block = EncoderBlock(32, stride)
    else:
        block = DacEncoderBlock(DacConfig(encoder_hidden_size=16), stride)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "alpha" in name:
                parameter.uniform_(0.1, 3)
                parameter[0, :3, 0] = torch.tensor([0.0, -1.0, 1e-4])
            elif "bias" in name:
                parameter.normal_()
    return block.eval().requires_grad_(False)


@pytest.mark.parametrize("library", ["transformers", "descript"])
@pytest.mark.parametrize("stride", [2, 5, 8])
@pytest.mark.parametrize("length", [40, 400, 1203])
def test_a_block_is_as_exact_as_the_librarys(library, stride, length, monkeypatch):
    """Cut into pieces or not, with lengths that no stride, dilation or piece divides."""
    block, x = block_of(library, stride), torch.randn(1, 16, length)
    exact = block_of(library, stride).double()(x.double())
    plain = (block(x) - exact).abs().max()
    for values in (2**18, 100 * 16):
        monkeypatch.setattr(fast_dac, "VALUES", values)
        found = Block(block)(x)
        assert found.shape == exact.shape
        assert (found - exact).abs().max() < 4 * plain


def test_a_wide_codec_has_the_librarys_codes(tmp_path):
    torch.manual_seed(0)
    config = DacConfig(encoder_hidden_size=64, downsampling_ratios=[2, 4], decoder_hidden_size=32, hidden_size=64)
    DacModel(config).save_pretrained(tmp_path)
    codec, model = load_codec(tmp_path), DacModel.from_pretrained(tmp_path).eval()
    wave = torch.rand(8 * 700) - 0.5
    with torch.no_grad():
        expected = model.encode(wave[None, None]).audio_codes[0].T
    found = codec.encode(wave)
    assert len(found.unique()) > 100 and (found == expected).float().mean() > 0.999


def test_four_and_a_quarter_of_seven_taps_are_multiplied():
    block = block_of("transformers", 2)
    taps = Block(block).units[0].taps
    assert sum(len(part) for parts in taps for part in parts) == 17  # for four outputs
