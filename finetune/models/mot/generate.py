"""Generating music: constrained decoding, guidance, continuation, and the samples of a run.

Every step only chooses among the codes of the next codebook, or A_EOS at the start of a frame, so the output is whole
frames of valid codes. Shapes: R rows, T frames, C codebooks.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from common import samples
from common.attention import sdpa_inside
from common.evaluation import evaluating
from common.keyed_random import torch_seed
from common.loss import IGNORE
from common.runtime import Process
from models.mot.data import Clips, pad
from models.mot.layout import code_ids, music
from models.mot.network import MoTLlama


class _Rows:
    """Prompts in one batch with a key-value cache. They are padded on the right and continue after the longest, each
    with its own position numbers: with padding on the left, some queries would have no key to attend to."""

    def __init__(self, model: MoTLlama, texts: list, prefixes: list[np.ndarray], device):
        self.model, self.device = model, device
        start = music if model.layout.order == "flat" else _delayed
        sequences = [start(codes, model.layout, final=False) for codes in prefixes]
        batch = pad([(text, *sequence) for text, sequence in zip(texts, sequences, strict=True)], model.layout)
        ids, books, self.mask = (batch[name].to(device) for name in ("input_ids", "codebooks", "mask"))
        self.lengths = self.mask.sum(1)
        self.cache = DynamicCache(config=model.llama.config)
        hidden = model(ids, books, self.mask, cache=self.cache)
        self.hidden = hidden[torch.arange(len(texts), device=device), self.lengths - 1]

    def feed(self, ids, books) -> None:
        """Appends one position to every row; ids and codebooks are (R, channels)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        ids, books = ids[:, None].to(self.device), books[:, None].to(self.device)
        self.hidden = self.model(ids, books, self.mask, self.lengths[:, None], self.cache)[:, 0]
        self.lengths = self.lengths + 1


def _delayed(codes, layout, final: bool):
    """Positions 0 to T of a prefix: as `music`, but up to the position that predicts frame T of codebook 0."""
    c, frames = layout.codebooks, len(codes)
    ids, stream = code_ids(codes, layout), np.full((frames + 1, c), layout.bos, dtype=np.int64)
    for k in range(c):
        stream[k + 1 :, k] = ids[: max(0, frames - k), k]
    return stream, np.where(stream < layout.bos, np.arange(c), c), np.full_like(stream, IGNORE)


def generate(
    model: MoTLlama,
    texts: list[np.ndarray],
    max_frames: int,
    seeds: list[int],
    device=None,
    *,
    no_text: np.ndarray | None = None,
    min_frames: int = 1,
    temperature: float | list[float] = 1.0,
    top_k: int = 250,
    guidance: float = 1.0,
    prefixes: list[np.ndarray] | None = None,
    all_steps: bool = False,
) -> list[tuple[np.ndarray, bool]]:
    """New codes (T, C) for each prompt, and whether it ended by itself.

    `temperature`: 0 is greedy; a list has one value per codebook. `guidance` w: logits u + w (c - u), where u are the
    logits without a caption (`no_text`). `prefixes`: codes (T, C) to continue, not returned. `seeds`: one per prompt,
    whose result does not depend on the other prompts. `all_steps`: run all steps even if all prompts have ended: under
    ZeRO-3 every rank must run the model equally often.
    """
    layout, c = model.layout, model.layout.codebooks
    device = device or next(model.llama.parameters()).device
    temperatures = temperature if isinstance(temperature, list) else [temperature] * c
    prefixes = prefixes or [np.zeros((0, c), dtype=np.int64)] * len(texts)
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    guided = guidance != 1.0

    with evaluating(model), sdpa_inside(model.llama):
        rows = _Rows(model, texts + [no_text] * len(texts) * guided, prefixes * (1 + guided), device)

        def choose(k: int, frame: int) -> list[int]:
            """The next code of each prompt; `layout.size` stands for A_EOS."""
            logits = model.head(rows.hidden, codebook=k)
            if guided:
                caption, none = logits.chunk(2)
                logits = none + guidance * (caption - none)
            logits = logits.cpu()
            if k == 0 and frame < min_frames:
                logits[:, layout.size] = -torch.inf
            return [_pick(row, temperatures[k], top_k, draw) for row, draw in zip(logits, draws, strict=True)]

        loop = _flat if layout.order == "flat" else _delay
        return loop(rows, choose, layout, len(texts), max_frames, prefixes, 1 + guided, all_steps)


def _pick(logits, temperature: float, top_k: int, draw) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=draw))


def _flat(rows, choose, layout, count, max_frames, prefixes, copies, all_steps):
    """The steps of the flat layout: one code each."""
    c, ends = layout.codebooks, [None] * count
    codes = np.zeros((max_frames, c, count), dtype=np.int64)
    for frame in range(max_frames):
        for k in range(c):
            chosen = choose(k, frame)
            for row in range(count):
                if k == 0 and ends[row] is None and chosen[row] == layout.size:
                    ends[row] = frame
                # A row that has ended stays in the batch but is ignored.
                codes[frame, k, row] = 0 if ends[row] is not None else chosen[row]
            if frame + 1 == max_frames and k + 1 == c:
                break
            ids = torch.from_numpy(codes[frame, k] + layout.first(k)).repeat(copies)[:, None]
            rows.feed(ids, torch.full_like(ids, k))
        if all(end is not None for end in ends) and not all_steps:
            break
    return _finished(codes, ends, max_frames)


def _delay(rows, choose, layout, count, max_frames, prefixes, copies, all_steps):
    """The steps of the delay layout: step s chooses codebook k's code of frame s - k, counted from the prefix's end."""
    c, ends = layout.codebooks, [None] * count
    codes = np.zeros((max_frames, c, count), dtype=np.int64)
    known = [code_ids(prefix, layout) for prefix in prefixes[:count]]
    steps = max_frames + c - 1
    for step in range(steps):
        ids = np.full((count, c), layout.bos, dtype=np.int64)
        for k in range(c):
            frame = step - k
            chosen = choose(k, frame) if 0 <= frame < max_frames else None
            for row in range(count):
                if frame < 0 and -frame <= len(known[row]):
                    ids[row, k] = known[row][frame, k]
                    continue
                if chosen is not None and k == 0 and ends[row] is None and chosen[row] == layout.size:
                    ends[row] = frame
                if frame >= (max_frames if ends[row] is None else ends[row]):
                    ids[row, k] = layout.eos
                elif frame >= 0:
                    codes[frame, k, row] = chosen[row]
                    ids[row, k] = chosen[row] + layout.first(k)
        if step + 1 == steps or (not all_steps and all(e is not None and step - (c - 1) >= e - 1 for e in ends)):
            break
        ids = torch.from_numpy(ids).repeat(copies, 1)
        rows.feed(ids, torch.where(ids < layout.bos, torch.arange(c), c))
    return _finished(codes, ends, max_frames)


def _finished(codes, ends, max_frames):
    lengths = [max_frames if end is None else end for end in ends]
    return [
        (codes[:length, :, row].astype(np.int16), end is not None)
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


# ---- samples of a run ------------------------------------------------------------------------------------------


def collapse(codes: np.ndarray) -> dict:
    """Signs of a model that repeats itself or uses only a few codes."""
    distinct = [int(len(np.unique(column))) for column in codes.T] if len(codes) else [0] * codes.shape[1]
    return {"repeats": samples.repeat_share(codes), "distinct_codes": distinct}


def sample(model: MoTLlama, clips: Clips, folder: Path, step: int, process: Process, all_ranks_must_join: bool) -> list:
    """Generates music for a few evaluation captions, spread over all ranks; returns the decoders it started."""
    config = clips.config
    prompts = samples.choose_prompts(clips)
    cap = config.sample_frames or int(1.25 * clips.frames.max())
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "guidance": config.guidance}
    rate = clips.tokens.info["sample_rate"] / clips.tokens.info["hop"]

    def generate_share(prompts: list[dict]) -> list:
        texts = [clips.caption(prompt["index"]) for prompt in prompts]
        seeds = [torch_seed(config.seed, prompt["name"], "sample") for prompt in prompts]
        generated = generate(
            model,
            texts,
            cap,
            seeds,
            process.device,
            no_text=clips.tokenizer.no_text,
            all_steps=all_ranks_must_join,
            **sampling,
        )
        results = []
        for prompt, seed, (codes, ended) in zip(prompts, seeds, generated, strict=True):
            truth = clips.tokens.codes(clips.kept[prompt["index"]])
            shared = min(len(codes), len(truth))
            same = float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0
            facts = {"seconds": len(codes) / rate, "duration_ratio": len(codes) / len(truth), "ended_by_eos": ended}
            facts["codes_as_recorded"] = same
            facts |= collapse(codes) | {"seed": seed} | sampling
            if len(codes) > 10 and facts["repeats"] > 0.9:
                print(f"warning: sample {prompt['name']} repeats one frame: the model has collapsed", flush=True)
            results.append((codes, facts))
        return results

    return samples.make_and_decode(clips, prompts, generate_share, folder, step, process, all_ranks_must_join)
