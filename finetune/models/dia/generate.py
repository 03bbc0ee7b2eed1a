"""Generating speech with Dia, and the samples of a run. Shapes as in layout.py."""

from pathlib import Path

import numpy as np
import torch

from common import samples
from common.keyed_random import torch_seed
from common.lora import base_model
from common.runtime import Process
from models.dia.data import Clips, pad_texts
from models.dia.layout import layout_of, undelayed


@torch.no_grad()
def speak(
    model, texts: list[np.ndarray], max_frames: int, seed: int, device: torch.device | None = None, **sampling
) -> list[tuple[np.ndarray, bool]]:
    """Codes (T, C) for byte-id texts, and whether each ended by itself. Greedy unless `sampling` is given."""
    dia = base_model(model)
    layout = layout_of(dia.config)
    device = device or next(dia.parameters()).device  # offloaded parameters are not where the model computes
    input_ids, attention_mask = pad_texts(texts)
    # The delay is primed as the HF processor does: BOS up to each channel's delay, PAD (to be generated) after it.
    prefill = np.full((len(texts), layout.tail, layout.channels), layout.pad, dtype=np.int64)
    for channel, delay in enumerate(layout.delay):
        prefill[:, : delay + 1, channel] = layout.bos
    was_training = dia.training
    dia.eval()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            streams = dia.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                decoder_input_ids=torch.from_numpy(prefill).to(device),
                decoder_attention_mask=torch.ones(len(texts), layout.tail, dtype=torch.long, device=device),
                max_new_tokens=max_frames + layout.tail,
                **(
                    {
                        "do_sample": False,
                        "guidance_scale": None,
                        "temperature": None,
                        "top_p": None,
                        "top_k": None,
                    }
                    | sampling
                ),
            )
    finally:  # a failed sample must not leave the training without its dropout
        dia.train(was_training)
    spoken = []
    for stream in streams.cpu().numpy():
        ends = np.flatnonzero(stream[1:, 0] == layout.eos)
        frames = int(ends[0]) if len(ends) else max_frames
        # Reaching the cap forces EOS, so a clip of exactly max_frames did not end by itself.
        spoken.append((undelayed(stream, layout, frames).astype(np.int16), frames < max_frames))
    return spoken


def sample(model, clips: Clips, folder: Path, step: int, process: Process, all_ranks_must_join: bool) -> list:
    """Generates a few evaluation texts greedily, spread over all ranks; returns the decoder processes it started."""
    config = clips.config
    chosen = np.unique(np.linspace(0, len(clips) - 1, num=min(config.samples, len(clips)), dtype=int))
    prompts = [{"name": f"clip-{i:04d}", "text": clips.tokens.text(clips.kept[i]), "index": int(i)} for i in chosen]
    cap = config.sample_frames or int(1.5 * max(clips.tokens.frames))
    cap = min(cap, clips.layout.max_positions - clips.layout.tail - 1)
    codec = clips.tokens.info["weights"]
    rate = clips.tokens.info["sample_rate"] / clips.tokens.info["hop"]

    def speak_share(prompts: list[dict]) -> list:
        texts = [clips.text(prompt["index"], 0) for prompt in prompts]
        seed = torch_seed(config.seed, step, "sample")
        spoken = speak(model, texts, cap, seed, process.device)
        results = []
        for prompt, text, (codes, ended) in zip(prompts, texts, spoken, strict=True):
            truth = clips.tokens.codes(clips.kept[prompt["index"]])
            shared = min(len(codes), len(truth))
            facts = {
                "seconds": len(codes) / rate,
                "seconds_per_byte": len(codes) / rate / max(1, len(text)),
                "recorded_seconds_per_byte": len(truth) / rate / max(1, len(text)),
                "ended_by_eos": ended,
                "repeats": samples.repeat_share(codes),
                "codes_as_recorded": float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0,
            }
            results.append((codes, facts))
        return results

    def recorded(prompt: dict) -> np.ndarray:
        return clips.tokens.codes(clips.kept[prompt["index"]])

    return samples.make_and_decode(prompts, speak_share, recorded, codec, folder, step, process, all_ranks_must_join)
