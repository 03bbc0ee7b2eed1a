"""Llama-3.2-1B's real configuration with MusicGen-small-sized experts, randomly initialised: one bf16 optimizer step
on 2 ranks, with the memory it took beside the prediction.

    python tests/bench/bench_mot_size.py                 about 11 GB of memory, 4 GB of disk in --scratch
    python tests/bench/bench_mot_size.py --size tiny     the same in seconds, to try it out

Clips are 3 frames long: a CPU without bf16 instructions computes the backward pass at 0.6 GFLOP/s per core.
"""

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "finetune")]
from helpers import support  # noqa: E402

ENCODEC = {"codec": "encodec", "sample_rate": 32000, "hop": 640, "codebooks": 4, "codebook_size": 2048, "channels": 4}
# Llama: width, layers, intermediate, heads, kv, head, vocabulary; MusicGen: width, layers, feed-forward.
SIZES = {
    "real": ((2048, 16, 8192, 32, 8, 64, 128256), (1024, 24, 4096)),
    "tiny": ((128, 4, 512, 4, 2, 32, 1024), (64, 6, 256)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="real")
    parser.add_argument("--ds", default="zero2", help="name in ds_configs (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/mot-size"), help="default: %(default)s")
    args = parser.parse_args()
    llama, musicgen = (args.scratch / f"{args.size}-{name}" for name in ("llama", "musicgen"))
    tokens = args.scratch / "tokens"
    if not (musicgen / "config.json").exists():
        build_models(llama, musicgen, *SIZES[args.size])
    if not tokens.exists():
        draw = np.random.default_rng(0)
        clips = [{"id": f"clip{i}", "text": "a", "codes": draw.integers(0, 2048, (3, 4))} for i in range(4)]
        support.write_tokens(tokens, clips, **ENCODEC)
    words = ["--ds", ROOT / "ds_configs" / f"{args.ds}.json", "--model", llama, "--musicgen", musicgen]
    words += ["--data", tokens, "--micro-tokens", 20, "--out", args.scratch / "run", "--dry-run"]
    began = time.monotonic()
    ranks = support.start_ranks(ROOT / "finetune" / "llama_mot.py", words)
    codes, outputs = support.finish(ranks, timeout=3600)
    if any(codes):
        sys.exit(f"failed ({codes}):\n{outputs[0][-3000:]}")
    for line in outputs[0].splitlines():
        if re.match("copied|parameters|dry run|memory", line):
            print(line)
    predicted, measured = map(float, re.search(r"predicted (\S+) GB, measured peak (\S+) GB", outputs[0]).groups())
    print(f"measured / predicted {measured / predicted:.2f}; {time.monotonic() - began:.0f} s, start included")
    shutil.rmtree(args.scratch, ignore_errors=True)


def build_models(llama: Path, musicgen: Path, sizes: tuple, donor: tuple) -> None:
    import io

    import torch
    from safetensors.torch import save_file
    from sentencepiece import SentencePieceTrainer
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, ffn, heads, kv, head, vocab = sizes
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(llama, max_shard_size="1GB")
    torch.set_default_dtype(torch.float32)
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e"] * 9),
        model_writer=content,
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (llama / "tokenizer.model").write_bytes(content.getvalue())
    # Only what is read of a MusicGen: its decoder's feed-forward blocks.
    width, layers, ffn = donor
    weights = {}
    for i in range(layers):
        name = f"decoder.model.decoder.layers.{i}."
        weights[name + "fc1.weight"] = torch.randn(ffn, width, dtype=torch.bfloat16) * 0.02
        weights[name + "fc2.weight"] = torch.randn(width, ffn, dtype=torch.bfloat16) * 0.02
        weights[name + "final_layer_norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
        weights[name + "final_layer_norm.bias"] = torch.zeros(width, dtype=torch.bfloat16)
    musicgen.mkdir()
    save_file(weights, musicgen / "model.safetensors")
    decoder = {"hidden_size": width, "ffn_dim": ffn, "num_hidden_layers": layers, "activation_function": "gelu"}
    (musicgen / "config.json").write_text(json.dumps({"model_type": "musicgen", "decoder": decoder}))


if __name__ == "__main__":
    main()
