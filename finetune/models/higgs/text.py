"""From texts to prompt ids, in the same way for training, evaluation, samples and inference."""

import re
from functools import lru_cache

import numpy as np

from common.config import UserError

SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."

PUNCTUATION = str.maketrans({"，": ", ", "。": ". ", "：": ": ", "；": "; ", "？": "? ", "！": "! ", "、": ", "}
                            | {"（": " ", "）": " ", "(": " ", ")": " ", "“": '"', "”": '"', "‘": "'", "’": "'"}
                            | {"【": " ", "】": " ", "《": " ", "》": " ", "－": "-", "～": "~"})  # fmt: skip
UNITS = {"°F": " degrees Fahrenheit", "°C": " degrees Celsius"}
EVENTS = {"[laugh]": "<SE>[Laughter]</SE>", "[applause]": "<SE>[Applause]</SE>", "[cough]": "<SE>[Cough]</SE>"}
EVENTS |= {"[cheering]": "<SE>[Cheering]</SE>", "[music]": "<SE>[Music]</SE>"}
for sound in ("humming", "music", "singing"):
    for place, mark in (("start", "SE_s"), ("end", "SE_e")):
        EVENTS[f"[{sound} {place}]"] = f"<{mark}>[{sound.capitalize()}]</{mark}>"
ENDINGS = (".", "!", "?", ",", ";", '"', "'", "</SE>", "</SE_e>", "</SE_s>")


def normalise(text: str) -> str:
    """The text in the form that the base was trained on: half-width punctuation, no brackets, units spelled out, events
    tagged, a full stop at the end. Idempotent."""
    text = text.translate(PUNCTUATION)
    for short, long in (UNITS | EVENTS).items():
        text = text.replace(short, long)
    text = " ".join(text.split())
    return text if not text or text.endswith(ENDINGS) else text + "."


class Chat:
    """The chat template and tokenizer of a checkpoint. The template is rendered once per scene, with marks for the
    texts."""

    MARKS = {"reference": "\ue000", "target": "\ue001"}  # private-use characters; texts with them are refused

    def __init__(self, tokenizer, normalise_texts: bool = True):
        self.tokenizer, self.normalise_texts = tokenizer, normalise_texts
        if not tokenizer.chat_template:
            raise UserError("--model has no chat template (chat_template.jinja), which the prompts need.")
        special = [token for token in tokenizer.get_added_vocab() if token.startswith("<|")]
        self.special = re.compile("|".join(map(re.escape, special)) + "|[\ue000\ue001]")
        self.frame = lru_cache(maxsize=1024)(self._frame)

    def text(self, text: str, name: str) -> str:
        """The text as it goes into the prompt; refused if it is empty or holds a control token."""
        text = normalise(text) if self.normalise_texts else text.strip()
        if not text:
            raise UserError(f"clip {name!r} has no text.")
        control = self.special.search(text)
        if control:
            raise UserError(f"the text of {name!r} holds {control[0]!r}, which is a control token of the model.")
        return text

    def _frame(self, scene: str, reference: bool, answer: bool) -> str:
        def content(text):
            return [{"type": "text", "text": text}]

        turns = [{"role": "system", "content": content(SYSTEM)}, {"role": "scene", "content": content(scene)}]
        if reference:
            turns.append({"role": "user", "content": content(self.MARKS["reference"])})
            turns.append({"role": "assistant", "content": [{"type": "audio"}]})
        turns.append({"role": "user", "content": content(self.MARKS["target"])})
        if answer:
            turns.append({"role": "assistant", "content": [{"type": "audio"}]})
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not answer)

    def prompt(self, text: str, reference: str | None, scene: str | None, answer: bool) -> str:
        """The rendered chat, one placeholder per piece of audio. Without `answer` it ends where the speech begins."""
        frame = self.frame((scene or SCENE).strip(), reference is not None, answer)
        return frame.replace(self.MARKS["reference"], reference or "").replace(self.MARKS["target"], text)

    def ids(self, prompts: list[str]) -> list[np.ndarray]:
        """Token ids. The template already has the BOS token: the tokenizer must not add it again."""
        encoded = self.tokenizer(prompts, add_special_tokens=False, return_attention_mask=False)
        return [np.array(ids, dtype=np.int64) for ids in encoded.input_ids]

    def decode(self, ids) -> tuple[str, int]:
        """The text of token ids, and how many are not in the vocabulary: the tokenizer would raise or skip them."""
        ids = [int(i) for i in ids]
        known = [i for i in ids if 0 <= i < len(self.tokenizer)]
        return self.tokenizer.decode(known), len(ids) - len(known)
