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
from models.mot.layout import Layout, code_ids, music
from models.mot.network import MoTLlama

LONGEST_SAMPLE = 1.25  # times the longest evaluation clip


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
    temperature: float = 1.0,
    top_k: int = 250,
    guidance: float = 1.0,
    prefixes: list[np.ndarray] | None = None,
    all_steps: bool = False,
) -> list[tuple[np.ndarray, bool]]:
    """New codes (T, C) for each of R prompts, and whether it ended by itself.

    `temperature`: 0 is greedy. `guidance` w: logits u + w (c - u), where u are the logits without a caption
    (`no_text`). `prefixes`: codes (T, C) to continue, not returned. `seeds`: one per prompt, whose result does not
    depend on the other prompts. `all_steps`: run all steps even if all prompts have ended: under ZeRO-3 every rank must
    run the model equally often.
    """
    layout, count = model.layout, len(texts)
    device = device or next(model.llama.parameters()).device
    prefixes = prefixes or [np.zeros((0, layout.codebooks), dtype=np.int64)] * count
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    codes = np.zeros((count, max_frames, layout.codebooks), dtype=np.int64)
    ends = np.full(count, max_frames)  # each row's first frame that is not played
    copies = 1
    if guidance != 1.0:  # every row once more, without its caption
        texts, prefixes, copies = texts + [no_text] * count, prefixes * 2, 2

    with evaluating(model), sdpa_inside(model.llama):
        rows = _Rows(model, texts, prefixes, device)
        steps = _steps(layout, max_frames)
        for step, places in enumerate(steps):
            for frame, k in places:
                logits = model.head(rows.hidden, codebook=k)
                if guidance != 1.0:
                    caption, none = logits.chunk(2)
                    logits = none + guidance * (caption - none)
                logits = logits.cpu()
                if k == 0 and frame < min_frames:
                    logits[:, layout.size] = -torch.inf  # A_EOS
                for row in np.flatnonzero(frame < ends):
                    code = _pick(logits[row], temperature, top_k, draws[row])
                    if code == layout.size:
                        ends[row] = frame
                    else:
                        codes[row, frame, k] = code
            if step + 1 == len(steps):
                break
            oldest_frame, _ = steps[step + 1][-1]
            if (ends <= oldest_frame).all() and not all_steps:
                break
            ids, books = _next_input(layout, step, codes, ends, prefixes[:count])
            rows.feed(ids.repeat(copies, 1), books.repeat(copies, 1))
    return [(codes[row, :end].astype(np.int16), bool(end < max_frames)) for row, end in enumerate(ends)]


def _pick(logits, temperature: float, top_k: int, draw) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=draw))


def _steps(layout: Layout, max_frames: int) -> list[list[tuple[int, int]]]:
    """The (frame, codebook) pairs that each step chooses: one in the flat layout; in the delay layout one per codebook,
    codebook k's k frames earlier."""
    codebooks = range(layout.codebooks)
    if layout.order == "flat":
        return [[(frame, k)] for frame in range(max_frames) for k in codebooks]
    return [
        [(step - k, k) for k in codebooks if 0 <= step - k < max_frames]
        for step in range(max_frames + layout.codebooks - 1)
    ]


def _next_input(layout: Layout, step: int, codes, ends, prefixes: list[np.ndarray]):
    """Ids and codebooks (R, channels) of the position after a step."""
    if layout.order == "flat":
        frame, k = divmod(step, layout.codebooks)
        ids = torch.from_numpy(codes[:, frame, k] + layout.first(k))[:, None]
        return ids, torch.full_like(ids, k)
    ids = np.full((len(codes), layout.codebooks), layout.bos)
    for row, prefix in enumerate(prefixes):
        for k in range(layout.codebooks):
            frame = step - k  # negative: of the prefix, counted from its end
            if frame >= ends[row]:
                ids[row, k] = layout.eos
            elif frame >= 0:
                ids[row, k] = layout.first(k) + codes[row, frame, k]
            elif -frame <= len(prefix):
                ids[row, k] = layout.first(k) + int(prefix[frame, k])
    ids = torch.from_numpy(ids)
    return ids, torch.where(ids < layout.bos, torch.arange(layout.codebooks), layout.codebooks)


# ---- samples of a run ------------------------------------------------------------------------------------------


def collapse(codes: np.ndarray) -> dict:
    """Signs of a model that repeats itself or uses only a few codes."""
    distinct = [int(len(np.unique(column))) for column in codes.T] if len(codes) else [0] * codes.shape[1]
    return {"repeats": samples.repeat_share(codes), "distinct_codes": distinct}


def sample(
    model: MoTLlama, clips: Clips, sampling: dict, folder: Path, step: int, process: Process, all_ranks_must_join: bool
) -> list[Path]:
    """Generates music for a few evaluation captions, spread over all ranks; returns the files of codes of this
    rank's share. `sampling`: see generate."""
    config = clips.config
    prompts = samples.choose_prompts(clips)
    cap = int(LONGEST_SAMPLE * clips.frames.max())
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

    return samples.make_samples(clips, prompts, generate_share, folder, step, process, all_ranks_must_join)
