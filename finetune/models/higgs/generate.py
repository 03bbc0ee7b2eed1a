"""Generating speech with Higgs Audio v2, checking generated ids before the codec sees them, and the samples of a run.

Shapes as in layout.py.
"""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from common import samples
from common.attention import sdpa_inside
from common.keyed_random import torch_seed
from common.lora import base_model
from common.runtime import Process, all_sum
from models.higgs.data import VoiceClips
from models.higgs.layout import Layout, Row, collate, undelayed

# The official settings. At the temperature of 0.3 in the official README, users report speech that never stops.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
# Repetition-aware sampling: draws again if an id repeats too often within a window.
RAS = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
LONGEST_SAMPLE = 1.5  # times the longest evaluation clip
MIN_FRAMES = 4  # the codec cannot decode less
MAX_BAD_SHARE = 0.005  # of ids that are not codes; above it nothing is decoded


@dataclass
class Spoken:
    codes: np.ndarray  # (T, K), valid codes only
    ended: bool  # all codebooks ended by themselves, before the cap
    bad_ids: int = 0  # ids within the speech that are not codes
    refused: str = ""  # why there is nothing to decode
    stream: np.ndarray = field(default=None, repr=False)  # as generated


def read_stream(stream_fk: np.ndarray, layout: Layout) -> Spoken:
    """The codes of a generated stream.

    Ids that are not codes are counted and replaced by the code before, never clipped silently. With too many of them,
    or too few frames, nothing is decoded, which is a result and not an exception.
    """
    ends = np.flatnonzero((stream_fk == layout.eos).all(axis=1))
    stop = int(ends[0]) if len(ends) else len(stream_fk)
    frames = max(0, stop - layout.codebooks)
    codes = undelayed(stream_fk, layout, frames)
    bad = (codes < 0) | (codes >= layout.bos)
    count, refused = int(bad.sum()), ""
    if frames < MIN_FRAMES:
        refused = f"empty: {frames} frames"
    elif count > MAX_BAD_SHARE * codes.size:
        refused = f"{count} of {codes.size} ids are not codes"
    for t, k in np.argwhere(bad):
        codes[t, k] = codes[t - 1, k] if t else 0
    if refused:
        codes = codes[:0]
    return Spoken(codes.astype(np.int16), bool(len(ends)), count, refused, stream_fk)


@torch.no_grad()
def speak(
    model, rows: list[Row], layout: Layout, max_frames: int, seed: int, device=None, greedy: bool = False
) -> list[Spoken]:
    """Generates speech for these prompts (rows without an answer), as one batch that is padded on the left."""
    higgs = base_model(model)
    device = device or next(higgs.parameters()).device  # offloaded parameters are not where the model computes
    batch = collate(rows, layout)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for row, size in enumerate(mask.sum(1).tolist()):
        ids[row], mask[row] = ids[row].roll(-size), mask[row].roll(-size)
    inputs = {"input_ids": ids, "attention_mask": mask}
    before = batch["audio_input_ids"].shape[1]
    if before:  # generate() would take tensors without frames for a decoding step
        inputs |= {name: batch[name] for name in ("audio_input_ids", "audio_input_ids_mask")}
    was_training, settings = higgs.training, higgs.generation_config
    higgs.eval()
    # The checkpoint's own settings would be merged with ours: its repeat guard samples even in greedy generation.
    higgs.generation_config = copy.deepcopy(settings)
    for name in (*SAMPLING, *RAS):
        setattr(higgs.generation_config, name, None if greedy else (SAMPLING | RAS)[name])
    higgs.generation_config.do_sample = not greedy
    higgs.generation_config.max_new_tokens = max_frames + layout.tail
    try:
        gpus = [device] if device.type == "cuda" else []  # not every GPU of the machine
        with torch.random.fork_rng(gpus), sdpa_inside(higgs):
            torch.manual_seed(seed)
            streams = higgs.generate(**{name: value.to(device) for name, value in inputs.items()})
    finally:  # a failed sample must not leave the training in eval mode
        higgs.train(was_training)
        higgs.generation_config = settings
    spoken = [read_stream(stream, layout) for stream in streams[:, before:].cpu().numpy()]
    for one in spoken:
        one.codes = one.codes[:max_frames]  # a stream without an end has room for one more frame
    return spoken


# ---- samples of a run ------------------------------------------------------------------------------------------


def sample(
    model, clips: VoiceClips, folder: Path, step: int, process: Process, all_ranks_must_join: bool
) -> list[Path]:
    """Generates a few fixed evaluation clips, spread over all ranks; returns the files of codes of this rank's share.

    For every prompt, samples/ then holds the reference, the recording (if its file is known), its codes decoded, and
    what the model generates at step 0 and later. stop_rate below 1: some samples run on to the cap. duration_ratio:
    seconds per character, relative to the reference by the same speaker.
    """
    config, tokens = clips.config, clips.tokens
    prompts = samples.choose_prompts(clips)
    cap = int(LONGEST_SAMPLE * tokens.frames[clips.kept].max())

    def speak_share(prompts: list[dict]) -> list:
        indices = [prompt["index"] for prompt in prompts]
        seed = torch_seed(config.seed, "sample")  # the same at every step: only the weights differ
        rows = clips.rows(indices, answer=False)
        spoken = speak(model, rows, clips.layout, cap, seed, process.device)
        return [(s.codes, sample_facts(s, clips, index)) for s, index in zip(spoken, indices, strict=True)]

    if process.is_main:
        write_references(clips, prompts, folder / "samples")
    return samples.make_samples(clips, prompts, speak_share, folder, step, process, all_ranks_must_join)


def sample_facts(spoken: Spoken, clips: VoiceClips, index: int) -> dict:
    """What is recorded about one sample."""
    tokens, i = clips.tokens, clips.kept[index]
    j, rate = clips.reference[i], tokens.info["sample_rate"] / tokens.info["hop"]
    truth, codes = tokens.codes(i), spoken.codes
    voice = j if j >= 0 else i
    pace = tokens.frames[voice] / max(1, len(tokens.text(voice)))  # frames per character
    shared = min(len(codes), len(truth))
    facts = {
        "seconds": len(codes) / rate,
        "duration_ratio": len(codes) / max(1, len(tokens.text(i))) / pace,
        # A stream that ends before it says anything has not stopped by itself: a base that says nothing would else
        # have a stop rate of 1, and no checkpoint that speaks could be better.
        "ended": spoken.ended and not spoken.refused,
        "repeats": samples.repeat_share(codes),
        "bad_ids": spoken.bad_ids,
        "codes_as_recorded": float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0,
    }
    return facts | ({"refused": spoken.refused} if spoken.refused else {})


def sample_metrics(files: list[Path], process: Process) -> dict[str, float]:
    """Means over the samples of all ranks of what generating them showed."""
    names = ("ended", "duration_ratio", "bad_ids")
    sums = np.zeros((2, len(names)))  # sums and counts
    for file in files:
        facts = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        for column, name in enumerate(names):
            if facts.get(name) is not None:
                sums[:, column] += float(facts[name]), 1
    sums = all_sum(sums.ravel(), process).reshape(2, -1)
    means = {name: float(total / count) for name, total, count in zip(names, *sums, strict=True) if count}
    return {"stop_rate" if name == "ended" else name: mean for name, mean in means.items()}


def write_references(clips: VoiceClips, prompts: list[dict], folder: Path) -> None:
    """Writes the codes of the prompts' references, unless they are there."""
    if (folder / "reference").exists():
        return
    voices = [(prompt, clips.reference[clips.kept[prompt["index"]]]) for prompt in prompts]
    voices = [(prompt, j) for prompt, j in voices if j >= 0]
    spoken = [(clips.tokens.codes(j), {"said": clips.tokens.text(j)}) for _, j in voices]
    samples.write_all(folder / "reference", [prompt for prompt, _ in voices], spoken)
