"""What a recogniser and a speaker encoder make of a Dia: generated and decoded by transformers and PEFT alone."""

import functools
import sys
from pathlib import Path

import numpy as np
import torch

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "data"))

from score import cosine, load_embedder, load_recogniser, read_mono, word_error_rate

from demos.speech import sentences


class Judge:
    def __init__(self, demo: Path):
        """`demo`: folder made by data/demos/speech.py."""
        self.demo = demo
        self.hear = load_recogniser(f"pocketsphinx:{demo}/grammar.jsgf")
        self.embed = load_embedder("resemblyzer")
        self.recordings = {int(file.stem): read_mono(file) for file in sorted((demo / "audio").glob("*.wav"))}
        self.voice = functools.cache(
            lambda numbers: self.embed(np.concatenate([self.recordings[number] for number in numbers]))
        )

    def word_errors(self, waves: dict[int, np.ndarray]) -> float:
        """Mean word error rate of sentences, by their numbers."""
        return float(np.mean([word_error_rate(sentences()[number], self.hear(wave)) for number, wave in waves.items()]))

    def similarity(self, waves: dict[int, np.ndarray]) -> float:
        """Mean similarity to the new voice: of each wave to all recordings of other sentences together."""
        others = {number: tuple(other for other in self.recordings if other != number) for number in waves}
        return float(np.mean([cosine(self.embed(wave), self.voice(others[n])) for n, wave in waves.items()]))


def load(demo: Path, adapter: Path | None = None):
    """The demo's Dia, with an adapter merged into it."""
    from peft import PeftModel
    from transformers import DiaForConditionalGeneration

    model = DiaForConditionalGeneration.from_pretrained(demo / "dia", dtype=torch.float32).eval()
    return PeftModel.from_pretrained(model, adapter).merge_and_unload() if adapter else model


@torch.no_grad()
def speak(
    model, demo: Path, numbers, tag: str = "[S1]", mute: bool = False, guided: bool = False
) -> tuple[dict[int, np.ndarray], float]:
    """Waves of these sentences, and the share that ended by itself. The most likely code each time, or `guided`:
    sampled with guidance. `mute`: the model gets no text."""
    from transformers import DiaProcessor

    processor, config = DiaProcessor.from_pretrained(demo / "dia"), model.config.decoder_config
    processor.audio_tokenizer.float()  # stored in half precision, in which a CPU takes 12 times as long
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    texts = [f"{tag} {sentences()[number]}" for number in numbers]
    inputs = processor(text=texts, return_tensors="pt", padding=True, **special)
    if mute:
        inputs["input_ids"] = torch.zeros_like(inputs["input_ids"])
    options = {"do_sample": guided, "guidance_scale": 2.5 if guided else None}
    options |= {"temperature": 1.0, "top_p": 0.8, "top_k": 45} if guided else {}
    torch.manual_seed(0)
    ids = model.generate(**inputs, max_new_tokens=200, **options)
    # At the cap an end is forced, and all rows are as long as the longest.
    ended = [(row[:180, 0] == config.eos_token_id).any().item() for row in ids]
    waves = [processor.batch_decode(row[None], **special)[0] for row in ids]
    return {number: wave.float().numpy().squeeze() for number, wave in zip(numbers, waves, strict=True)}, np.mean(ended)


@torch.no_grad()
def through_codec(demo: Path) -> dict[int, np.ndarray]:
    """The evaluation sentences of the new voice, decoded from their codes."""
    from transformers import DacModel

    from common.tokens import TokenDataset

    codec = DacModel.from_pretrained(demo / "codec", dtype=torch.float32).eval()
    tokens, waves = TokenDataset(demo / "tokens/eval"), {}
    for row in range(len(tokens)):
        codes = torch.from_numpy(tokens.codes(row).astype(np.int64)).T[None]
        waves[int(tokens.id(row)[-3:])] = codec.decode(audio_codes=codes).audio_values[0].numpy()
    return waves
