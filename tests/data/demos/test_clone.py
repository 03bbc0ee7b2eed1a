"""data/demos/clone.py: the DAC codec as a Higgs codec, and a demo whose files belong together."""

import datasets
import pytest
import soundfile
import torch

from common.codec import codec_identity, recorded_codec, refuse_other_codec
from common.tokens import TokenDataset
from demos import clone
from helpers import support

ASSETS = support.ROOT / "data" / "assets"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    from demo import ensure_demo

    return ensure_demo(tmp_path_factory.mktemp("clone") / "demo", "clone")


@pytest.fixture(scope="module")
def codecs(demo):
    from transformers import DacModel, HiggsAudioV2TokenizerModel

    dac = DacModel.from_pretrained(ASSETS / "codec", dtype=torch.float32).eval()
    return dac, HiggsAudioV2TokenizerModel.from_pretrained(demo / "codec").eval()


@torch.no_grad()
def test_the_codec_has_the_codes_and_the_sound_of_the_dac(codecs):
    dac, higgs = codecs
    wave, _ = soundfile.read(ASSETS / "voice/audio/000.wav", dtype="float32")
    wave = torch.from_numpy(wave[: len(wave) // 320 * 320])[None, None]
    codes = dac.encode(wave).audio_codes
    own = higgs.encode(wave).audio_codes
    assert own.shape == codes[:, : clone.CODEBOOKS].shape
    assert (own == codes[:, : clone.CODEBOOKS]).float().mean() >= 0.99  # all of them here; a tie may fall otherwise
    rest = dac.quantizer.from_codes(codes[:, : clone.CODEBOOKS])[0]
    expected, found = dac.decoder(rest)[0, 0], higgs.decode(codes[:, : clone.CODEBOOKS]).audio_values[0, 0]
    # The last samples differ, because Higgs' decoder makes one sample more than DAC's.
    assert len(found) == len(expected) + 1 == wave.shape[-1] and expected.abs().max() > 0.1
    assert torch.allclose(found.tanh()[:-100], expected[:-99], atol=1e-4)


def test_the_demos_files_name_each_other(demo):
    from transformers import AutoProcessor, HiggsAudioV2ForConditionalGeneration

    identity = recorded_codec(demo / "model")
    assert identity["place"] == str(demo / "codec")
    for split in ("train", "eval"):
        tokens = TokenDataset(demo / "tokens" / split)
        assert codec_identity(tokens.info) == identity
        refuse_other_codec(tokens, identity, "the demo")
    processor = AutoProcessor.from_pretrained(demo / "model", local_files_only=True)
    config = HiggsAudioV2ForConditionalGeneration.from_pretrained(demo / "model").config
    assert processor.audio_tokenizer.config.num_quantizers == config.num_codebooks == clone.CODEBOOKS
    for name in ("audio_stream_bos_id", "audio_stream_eos_id"):
        assert getattr(processor, name) == getattr(config, name) >= processor.audio_tokenizer.config.codebook_size


def test_the_voices_and_words_that_are_judged_are_new(demo):
    train, judged = (datasets.load_from_disk(str(demo / "tokens" / split)) for split in ("train", "eval"))
    assert len(set(judged["speaker"])) == 2 and not set(train["speaker"]) & set(judged["speaker"])
    assert not set(train["text"]) & set(judged["text"])
    for clips in (train, judged):
        speakers = dict(zip(clips["id"], clips["speaker"], strict=True))
        for clip in clips:
            assert clip["ref"] != clip["id"] and speakers[clip["ref"]] == clip["speaker"]


def test_a_prompt_is_short(demo):
    """Every word is one token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo / "model", local_files_only=True)
    for text in datasets.load_from_disk(str(demo / "tokens/train"))["text"]:
        assert len(tokenizer(f"{text}.")["input_ids"]) == 3
    assert len(tokenizer("anything else")["input_ids"]) > 8, "all other words are spelled"
    assert tokenizer.decode(tokenizer("Größe!")["input_ids"]) == "Größe!"
