"""models/mot/meta.py: Llama as Meta distributes it, compared with Meta's own arithmetic and with tiktoken's rule."""

import base64
import json
import math
import sys

import numpy as np
import pytest
import regex
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.errors import UserError
from infer import llama_convert
from models.mot.build import load_llama
from models.mot.data import Tokenizer
from models.mot.meta import config_of, convert

PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 600, "norm_eps": 1e-5}
PARAMS |= {"rope_theta": 500000.0, "use_scaled_rope": True, "multiple_of": 32, "ffn_dim_multiplier": 1.5}
SPLIT_BY_COLUMN = ("attention.wo.weight", "feed_forward.w2.weight")


def meta_weights(tied=False) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"tok_embeddings": (600, 64), "norm": (64,)} | ({} if tied else {"output": (600, 64)})
    layer = {"attention.wq": (64, 64), "attention.wk": (32, 64), "attention.wv": (32, 64), "attention.wo": (64, 64)}
    layer |= {"feed_forward.w1": (96, 64), "feed_forward.w3": (96, 64), "feed_forward.w2": (64, 96)}
    layer |= {"attention_norm": (64,), "ffn_norm": (64,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    return {f"{name}.weight": torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}


def write(folder, weights, shards=1, params=PARAMS):
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for shard in range(shards):
        part = {"rope.freqs": torch.zeros(8)}
        for name, value in weights.items():
            axis = 1 if name.endswith(SPLIT_BY_COLUMN) else 0
            part[name] = value if value.ndim == 1 else value.chunk(shards, axis)[shard].clone()
        torch.save(part, folder / f"consolidated.{shard:02d}.pth")
    return folder


def angles_of(factor):
    """Radians per position of each pair of channels: slow ones are slowed down further."""
    angles = []
    for freq in (500000.0 ** (-2 * k / 16) for k in range(8)):
        length = 2 * math.pi / freq
        smooth = min(max((8192 / length - 1) / 3, 0), 1)  # 0 beyond 8192 / 1, 1 below 8192 / 4
        angles.append((1 - smooth) * freq / factor + smooth * freq)
    return torch.tensor(angles)


def meta_logits(w, ids):
    """Llama 3 with neighbouring channels as complex numbers that turn with the position."""
    rms = lambda x, name: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w[name]  # noqa: E731
    turn = torch.polar(torch.ones(len(ids), 8), torch.outer(torch.arange(len(ids)).float(), angles_of(32)))
    x = w["tok_embeddings.weight"][ids]
    for i in range(2):
        here = lambda name, i=i: w[f"layers.{i}.{name}.weight"]  # noqa: E731
        h = rms(x, f"layers.{i}.attention_norm.weight")
        q, k, v = ((h @ here(f"attention.{n}").T).view(len(ids), -1, 16) for n in ("wq", "wk", "wv"))
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (8, 2))) * turn[:, None]) for t in (q, k))
        q, k, v = (t.flatten(2).transpose(0, 1) if t.ndim == 4 else t.transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ here("attention.wo").T
        h = rms(x, f"layers.{i}.ffn_norm.weight")
        gate, up = (h @ here(f"feed_forward.{n}").T for n in ("w1", "w3"))
        x = x + (F.silu(gate) * up) @ here("feed_forward.w2").T
    return rms(x, "norm.weight") @ w.get("output.weight", w["tok_embeddings.weight"]).T


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (1, False), (2, False)])
def test_a_converted_llama_computes_what_metas_does(tmp_path, shards, tied):
    weights = meta_weights(tied)
    convert(write(tmp_path / "meta", weights, shards), tmp_path / "hf")
    llama = load_llama(str(tmp_path / "hf"), torch.float32)
    assert llama.config.tie_word_embeddings == tied
    ids = torch.randint(0, 600, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = llama(ids[None]).logits[0]
    assert torch.allclose(found, meta_logits(weights, ids), atol=1e-4)
    assert torch.allclose(llama.model.rotary_emb.inv_freq, angles_of(32), rtol=1e-5)
    large = config_of(
        PARAMS | {"rope_theta": 500000.0}, {"dim": 4096, "n_layers": 2, "n_heads": 256}, llama.state_dict()
    )
    assert torch.allclose(LlamaRotaryEmbedding(large).inv_freq, angles_of(8), rtol=1e-5)  # Llama 3.1


def test_what_is_no_llama_of_meta_is_refused(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "meta", meta_weights())
    with pytest.raises(UserError, match=r"is in Meta's own format: convert it once with 'python finetune/infer/llama_"):
        load_llama(str(folder), torch.float32)
    strange = write(tmp_path / "vision", meta_weights() | {"vision_model.weight": torch.zeros(2, 2)})
    short = write(tmp_path / "short", meta_weights(), params=PARAMS | {"n_layers": 3})
    narrow = write(tmp_path / "narrow", meta_weights(), params=PARAMS | {"n_kv_heads": 4})
    (tmp_path / "empty").mkdir()
    for source, sentence in (
        (strange, "it holds vision_model.weight"),
        (short, "model.layers.2.input_layernorm.weight is missing or has no place"),
        (narrow, "weights and params.json disagree"),
        (tmp_path / "empty", "no readable params.json"),
    ):
        monkeypatch.setattr(sys, "argv", ["llama_convert.py", str(source), str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stop:
            llama_convert.main()
        assert stop.value.code == 2 and sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- tokenizer -----------------------------------------------------------------------------------------------------

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "A slow piano's 12345 notes,\n  played slowly in the café!"


def tiktoken_file(file) -> dict[bytes, int]:
    """Bytes, and merges learnt from the text by joining the most frequent neighbours."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(SPLIT, TEXT)]
    while len(ranks) < 280:
        pairs = [(a, b) for word in words for a, b in zip(word, word[1:], strict=False)]
        best = max(sorted(set(pairs)), key=pairs.count)
        ranks[b"".join(best)] = len(ranks)
        words = [join(word, best) for word in words]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    file.write_text("".join(lines))
    return ranks


def join(word, pair):
    joined, i = [], 0
    while i < len(word):
        size = 2 if tuple(word[i : i + 2]) == pair else 1
        joined.append(b"".join(word[i : i + size]))
        i += size
    return joined


def encode(text, ranks) -> list[int]:
    """tiktoken's rule: in each word, join the two neighbours whose union has the lowest rank, until none has one."""
    ids = []
    for word in regex.findall(SPLIT, text):
        word = [bytes([byte]) for byte in word.encode()]
        while known := [(ranks[a + b], (a, b)) for a, b in zip(word, word[1:], strict=False) if a + b in ranks]:
            word = join(word, min(known)[1])
        ids += [ranks[token] for token in word]
    return ids


def test_metas_tokenizer_gives_the_ids_of_tiktoken(tmp_path):
    folder = write(tmp_path / "meta", meta_weights())
    ranks = tiktoken_file(folder / "tokenizer.model")
    convert(folder, tmp_path / "hf")
    texts = [TEXT, "notes notes 99", "<i>ø\tlow</i>"]
    for place in (folder, tmp_path / "hf"):  # as it is, and as the conversion writes it
        tokenizer = Tokenizer(str(place))
        assert tokenizer.bos == 280 and tokenizer.size == 280 + 256
        for text, ids in zip(texts, tokenizer(texts), strict=True):
            assert np.array_equal(ids, [280, *encode(text, ranks)])
    assert max(len(token) for token in ranks) > 2
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    assert plain.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_247|>"]) == [
        281,
        289,
        535,
    ]
    (folder / "tokenizer.model").write_text("YQ== 0\nb\n")
    with pytest.raises(UserError, match="is damaged"):
        Tokenizer(str(folder))
