"""Whose voice a speaker encoder hears in what a Higgs says: generated and decoded by transformers and PEFT alone."""

import sys
from pathlib import Path

import datasets
import numpy as np
import torch

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "data"))

from score import cosine, load_embedder

LONGEST = 75  # frames; the longest recording has 64


class Judge:
    """Two voices that no model was trained on, and 15 recordings of each. Both say the same pairs of words."""

    def __init__(self, demo: Path):
        """`demo`: folder made by data/demos/clone.py. The recordings are decoded from their codes."""
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(demo / "model", local_files_only=True)
        self.embed = load_embedder("resemblyzer")
        self.clips = {clip["id"]: clip for clip in datasets.load_from_disk(str(demo / "tokens/eval"))}
        for clip in self.clips.values():
            clip["codes"] = torch.tensor(clip["codes"]).view(1, clip["frames"], -1).transpose(1, 2)
            with torch.no_grad():
                clip["wave"] = self.processor.audio_tokenizer.decode(clip["codes"]).audio_values[0, 0].numpy()
        self.voices = sorted({clip["speaker"] for clip in self.clips.values()})
        clips = self.clips.values()
        self.recorded = {voice: [clip for clip in clips if clip["speaker"] == voice] for voice in self.voices}
        self.sounds = [self.embed(np.concatenate([clip["wave"] for clip in self.recorded[v]])) for v in self.voices]

    def jobs(self, exchanged: bool = False, mute: bool = False) -> list[tuple[str, dict | None, int]]:
        """For every recording its text, its reference and the number of its voice. `exchanged`: the reference is one of
        the other voice; `mute`: there is none."""
        jobs = []
        for number, voice in enumerate(self.voices):
            for clip in self.recorded[voice]:
                reference = self.clips[clip["ref"]]
                if exchanged:
                    other = self.recorded[self.voices[1 - number]]
                    reference = next(one for one in other if one["text"] == reference["text"])
                jobs.append((clip["text"], None if mute else reference, number))
        return jobs

    @torch.no_grad()
    def speak(self, model, jobs: list[tuple], seed: int = 0) -> list[np.ndarray]:
        """Sampled with the settings of the official code, as the recipe samples. The processor would encode waves; here
        the references' codes are known, and the rest is what it does."""
        processor, prompts, streams = self.processor, [], []
        bos, eos = processor.audio_stream_bos_id, processor.audio_stream_eos_id
        for text, reference, _ in jobs:
            chat = [turn("system", "Generate audio following instruction.")]
            chat += [turn("scene", "Audio is recorded from a quiet room.")]
            if reference:
                chat += [turn("user", reference["text"] + "."), {"role": "assistant", "content": [{"type": "audio"}]}]
                padded = torch.nn.functional.pad(reference["codes"], (1, 0), value=bos)
                padded = torch.nn.functional.pad(padded, (0, 1), value=eos)
                streams.append(processor.build_delay_pattern(padded)[0].T)
            chat.append(turn("user", text + "."))
            prompt = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            if reference:
                prompt = prompt.replace(processor.audio_token, processor.get_audio_tokens(len(streams[-1])))
            prompts.append(prompt)
        options = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}
        inputs = dict(processor.tokenizer(prompts, **options))
        if streams:
            frames = torch.nn.utils.rnn.pad_sequence(streams, batch_first=True, padding_value=eos)
            lengths = torch.tensor([len(stream) for stream in streams])
            is_real = torch.arange(frames.shape[1]) < lengths[:, None]
            inputs |= {"audio_input_ids": frames, "audio_input_ids_mask": is_real}
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "max_new_tokens": LONGEST}
        waves = processor.batch_decode(model.generate(**inputs, **options))
        return [wave.numpy() for wave in waves]

    def figures(self, waves: list[np.ndarray], voices: list[int]) -> dict[str, float]:
        """Of waves that should have these voices: how many are closer to theirs than to the other (all
        recordings of a voice together), and on average how similar they are to it and how much closer."""
        own, other = [], []
        for wave, number in zip(waves, voices, strict=True):
            sound = self.embed(wave)
            own.append(cosine(sound, self.sounds[number]))
            other.append(cosine(sound, self.sounds[1 - number]))
        closer = np.subtract(own, other)
        return {"right": np.mean(closer > 0), "similarity": np.mean(own), "margin": np.mean(closer)}


def turn(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def load(demo: Path, adapter: Path | None = None):
    """The demo's Higgs, with an adapter merged into it."""
    from peft import PeftModel
    from transformers import HiggsAudioV2ForConditionalGeneration

    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(demo / "model", dtype=torch.float32).eval()
    return PeftModel.from_pretrained(model, adapter).merge_and_unload() if adapter else model
