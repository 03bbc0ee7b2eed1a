"""The demo of higgs_clone: a tiny Higgs that clones voices, and recordings of voices that it has never heard.

    python data/demo.py --out demo-clone --model clone

demo-clone/codec            the speech codec of data/assets/codec as a Higgs codec: the same codes, the same sound
demo-clone/model            a tiny Higgs, trained on many other voices (data/assets/higgs)
demo-clone/tokens/<split>   new voices, each clip with a reference by the same speaker; those of train and eval differ
demo-clone/grammar.jsgf     all pairs of words that are said, for a recogniser

tools/make_assets made data/assets.
"""

import json
import shutil
from pathlib import Path

from common.codec import hash_weights
from demos.speech import ASSETS, WORDS, set_paths
from lib.store import write_json

# Of the codec's nine: enough to tell voices apart (docs/log.md), and every one more makes the model larger.
CODEBOOKS = 4


def build_parts(folder: Path, final: Path) -> None:
    """Build everything in `folder`, which is then renamed to `final`: paths inside the files must name `final`."""
    shutil.copytree(ASSETS / "higgs", folder, ignore=shutil.ignore_patterns("README.md"))
    save_codec(folder / "codec", ASSETS / "codec")
    (folder / "grammar.jsgf").write_text(grammar())
    # The hash is not in the assets: another processor may round the codec's entries differently.
    digest = hash_weights(folder / "codec")
    set_paths(folder, final, "model", weights_sha256=digest)
    identity = json.loads((folder / "model" / "codec.json").read_text())
    write_json(folder / "model" / "codec.json", identity | {"place": str(final / "codec"), "sha256": digest})


def grammar() -> str:
    """Pairs of words that follow each other in the sentences of data/demos/speech.py."""
    kinds = [f"({' | '.join(words)})" for words in WORDS]
    pairs = " | ".join(" ".join(pair) for pair in zip(kinds, kinds[1:], strict=False))
    return f"#JSGF V1.0;\ngrammar parts;\npublic <part> = {pairs};\n"


def save_codec(folder: Path, dac: Path) -> None:
    """Saves a DAC codec as a Higgs codec: the same codes for sounds of whole frames, and for the same codes the same
    sound, but for DAC's final tanh, which Higgs does not have."""
    import torch
    from transformers import DacModel, HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = DacModel.from_pretrained(dac, dtype=torch.float32)
    config = source.config
    # Higgs also hears through a HuBERT, whose output counts for nothing here. Its frames must have the codec's length.
    semantic = {"model_type": "hubert", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    semantic |= {"intermediate_size": 4, "conv_dim": [4] * 7, "num_conv_pos_embeddings": 2}
    semantic |= {"num_conv_pos_embedding_groups": 1}
    bits_per_second = config.sampling_rate / config.hop_length * (config.codebook_size - 1).bit_length()
    torch.manual_seed(0)
    codec = HiggsAudioV2TokenizerModel(
        HiggsAudioV2TokenizerConfig(
            sample_rate=config.sampling_rate,
            semantic_sample_rate=config.sampling_rate,
            target_bandwidths=[CODEBOOKS * bits_per_second / 1000],
            codebook_size=config.codebook_size,
            codebook_dim=2 * config.codebook_dim,
            acoustic_model_config=config.to_dict(),
            semantic_model_config=semantic,
        )
    )
    codec.acoustic_encoder.load_state_dict(source.encoder.state_dict())
    codec.acoustic_decoder.load_state_dict(source.decoder.state_dict())
    width, size = config.hidden_size, config.codebook_dim
    # DAC chooses the entry whose direction is nearest and then uses its length too; Higgs uses the entry that is
    # nearest. So each entry here has two halves: its direction, by which it is found, and itself, made so small that it
    # does not matter in finding it, which project_out makes large again.
    small = 1e-4
    with torch.no_grad():
        for layer in (codec.fc, codec.fc2):
            layer.weight.zero_().fill_diagonal_(1)
            layer.bias.zero_()
        for target, quantizer in zip(codec.quantizer.quantizers, source.quantizer.quantizers, strict=False):
            entries = quantizer.codebook.weight
            target.codebook.embed.copy_(torch.cat([torch.nn.functional.normalize(entries), small * entries], dim=1))
            for layer in (target.project_in, target.project_out):
                layer.weight.zero_()
                layer.bias.zero_()
            target.project_in.weight[:size, :width] = quantizer.in_proj.weight[..., 0]
            target.project_in.bias[:size] = quantizer.in_proj.bias
            target.project_out.weight[:width, size:] = quantizer.out_proj.weight[..., 0] / small
            target.project_out.bias[:width] = quantizer.out_proj.bias
    codec.save_pretrained(folder)
