"""Generating speech with Dia, and the samples of a run. Shapes as in layout.py."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from common import samples
from common.attention import sdpa_inside
from common.errors import UserError
from common.keyed_random import torch_seed
from common.lora import base_model
from common.runtime import Process
from models.dia.data import Clips, pad_texts
from models.dia.layout import continue_text, delayed, layout_of, split_text, text_bytes, undelayed, with_speaker

PART_SECONDS, BYTES_PER_SECOND = 20, 15  # of speech in one go, as the authors advise; English has so many letters
GREEDY = {"do_sample": False, "guidance_scale": None, "temperature": None, "top_p": None, "top_k": None}


def sampling(greedy: bool, temperature: float, top_p: float, top_k: int, guidance: float) -> dict:
    """The options of generate(). Greedy is without guidance: the codes that the loss makes most likely."""
    options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options["guidance_scale"] = guidance if guidance > 1 else None
    return GREEDY if greedy else options


@torch.no_grad()
def speak(
    model,
    texts: list[np.ndarray],
    max_frames: int,
    seed: int,
    device: torch.device | None = None,
    voice: np.ndarray | None = None,
    **options,
) -> list[tuple[np.ndarray, bool]]:
    """Codes (T, C) for byte-id texts, and whether each ended by itself. Greedy unless `options` say otherwise.

    `voice`: codes of a recording that all continue, not part of the result; each text begins with its transcript.
    """
    dia = base_model(model)
    layout = layout_of(dia.config)
    device = device or next(dia.parameters()).device  # offloaded parameters are not where the model computes
    input_ids, attention_mask = pad_texts(texts)
    # As the HF processor primes the decoder: each channel's BOS and codes, then PAD where it is still to be generated.
    prompt = np.zeros((0, layout.channels), dtype=np.int64) if voice is None else voice
    start = len(prompt)
    primed, _ = delayed(prompt, layout, start + layout.tail, final=False)
    was_training = dia.training
    dia.eval()
    try:
        gpus = [device] if device.type == "cuda" else []  # not every GPU of the machine
        with torch.random.fork_rng(gpus), sdpa_inside(dia):
            torch.manual_seed(seed)
            streams = dia.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                decoder_input_ids=torch.from_numpy(np.stack([primed] * len(texts))).to(device),
                decoder_attention_mask=torch.ones(len(texts), len(primed), dtype=torch.long, device=device),
                max_new_tokens=max_frames + layout.tail,
                **GREEDY | options,
            )
    finally:  # a failed sample must not leave the training without its dropout
        dia.train(was_training)
    spoken = []
    for stream in streams.cpu().numpy()[:, start:]:
        ends = np.flatnonzero(stream[1:, 0] == layout.eos)
        frames = int(ends[0]) if len(ends) else max_frames
        # Reaching the cap forces EOS, so a clip of exactly max_frames did not end by itself.
        spoken.append((undelayed(stream, layout, frames).astype(np.int16), frames < max_frames))
    return spoken


def speak_parts(
    model,
    text: str,
    text_mode: str,
    tag_map: dict,
    max_frames: int,
    frame_rate: float,
    seed: int,
    voice: np.ndarray | None = None,
    voice_text: str = "",
    **options,
) -> Iterator[tuple[str, np.ndarray, bool, int]]:
    """Speaks a transcript of any length in parts with one voice: that of a recording (`voice`: its codes;
    `voice_text`: its transcript), or else of the first part, which the others continue.

    Yields each part, its codes, whether it ended by itself, and how many parts are still to come.
    """
    layout, number = layout_of(base_model(model).config), 0

    def size(text: str) -> int:
        return len(text_bytes(text, tag_map, "--text"))

    while text:
        room = layout.max_positions - layout.tail - 1 - (0 if voice is None else len(voice))
        limit = layout.max_text - size(voice_text) - 2  # a blank and a speaker between them
        if text_mode == "speech":  # tags belong together
            limit = min(limit, int(min(PART_SECONDS, room / frame_rate) * BYTES_PER_SECOND))
        if limit < BYTES_PER_SECOND:
            raise UserError(
                f"the recording of the voice takes {len(voice) / frame_rate:.1f} s and {size(voice_text)} bytes of"
                " text, which leaves too little of the model's limits; use one of 5 to 10 s."
            )
        parts = split_text(text, limit, size)
        if len(parts) > 1 and voice is None:
            parts = split_text(text, limit // 2, size)  # it is repeated before every other part, so it is short
        part, rest = parts[0], parts[1:]
        ids = text_bytes(continue_text(voice_text, part) if voice is not None else part, tag_map, "--text")
        if len(ids) > layout.max_text:
            raise UserError(f"--text has a word of {size(part)} bytes; the model takes {limit} at a time.")
        own_seed = seed if number == 0 else torch_seed(seed, number, "part")
        [(codes, ended)] = speak(model, [ids], min(max_frames, room), own_seed, voice=voice, **options)
        yield part, codes, ended, len(rest)
        if voice is None and ended and len(codes):
            voice, voice_text = codes, part
        text, number = functools.reduce(continue_text, rest) if rest else "", number + 1


def sample(model, clips: Clips, folder: Path, step: int, process: Process, all_ranks_must_join: bool) -> list[Path]:
    """Generates a few evaluation texts, spread over all ranks; returns the files of codes of this rank's share.

    They are generated as the generation_config.json of --model says, each with a seed of its own, which is the same at
    every step: what changes between two steps is the model, and the number of ranks changes nothing.
    """
    prompts = samples.choose_prompts(clips)
    info, layout = clips.tokens.info, clips.layout
    rate = info["sample_rate"] / info["hop"]
    longest = layout.max_positions - layout.tail - 1
    max_frames = min(int(1.5 * max(clips.tokens.frames)), longest)
    settings = base_model(model).generation_config
    options = {name: getattr(settings, name) for name in GREEDY}

    def speak_alone(prompt: dict) -> tuple[np.ndarray, bool]:
        seed = torch_seed(clips.config.seed, prompt["index"], "sample")
        text = clips.text(prompt["index"], 0)
        [spoken] = speak(model, [text], max_frames, seed, process.device, **options)
        return spoken

    def speak_share(share: list[dict]) -> list:
        if options["do_sample"]:
            calls = list(share)
            if all_ranks_must_join:  # every rank generates as often as the first
                calls += share[:1] * (math.ceil(len(prompts) / process.world) - len(share))
            spoken = [speak_alone(prompt) for prompt in calls][: len(share)]
        else:
            texts = [clips.text(prompt["index"], 0) for prompt in share]
            spoken = speak(model, texts, max_frames, 0, process.device, **options)
        return [(codes, facts(prompt, codes, ended)) for prompt, (codes, ended) in zip(share, spoken, strict=True)]

    def facts(prompt: dict, codes: np.ndarray, ended: bool) -> dict:
        recorded = clips.tokens.codes(clips.kept[prompt["index"]])
        text = with_speaker(prompt["text"], clips.config.text_mode)
        size = max(1, len(text_bytes(text, clips.tag_map, prompt["name"])))
        shared = min(len(codes), len(recorded))
        return {
            "seconds": len(codes) / rate,
            "seconds_per_byte": len(codes) / rate / size,
            "recorded_seconds_per_byte": len(recorded) / rate / size,
            "duration_ratio": len(codes) / len(recorded),
            "ended_by_eos": ended,
            "repeats": samples.repeat_share(codes),
            "codes_as_recorded": float((codes[:shared] == recorded[:shared]).mean()) if shared else 0.0,
        }

    return samples.make_samples(clips, prompts, speak_share, folder, step, process, all_ranks_must_join)
