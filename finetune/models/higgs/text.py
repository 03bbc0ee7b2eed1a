"""From texts to prompt ids, the one way for training, evaluation, samples and speaking."""

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
    """The texts the base was trained on: half-width punctuation, no brackets, units spelled, events tagged, a full
    stop at the end. Twice is the same as once."""
    text = text.translate(PUNCTUATION)
    for short, long in (UNITS | EVENTS).items():
        text = text.replace(short, long)
    text = " ".join(text.split())
    return text if not text or text.endswith(ENDINGS) else text + "."


class Chat:
    """The chat template and tokenizer of a checkpoint. The template is rendered once a scene, around two marks."""

    MARKS = {"reference": "\ue000", "target": "\ue001"}  # private-use characters: no text holds them

    def __init__(self, tokenizer, normalise_texts: bool = True):
        self.tokenizer, self.normalise_texts = tokenizer, normalise_texts
        if not tokenizer.chat_template:
            raise UserError("the model's folder has no chat template (chat_template.jinja), which its prompts need.")
        special = [token for token in tokenizer.get_added_vocab() if token.startswith("<|")]
        self.special = re.compile("|".join(map(re.escape, special)) + "|[\ue000\ue001]")
        self.frame = lru_cache(maxsize=1024)(self._frame)

    def text(self, text: str, name: str) -> str:
        """A text as the prompt takes it; one that is empty or would end its own turn is refused."""
        text = normalise(text) if self.normalise_texts else text.strip()
        if not text:
            raise UserError(f"clip {name!r} has no text.")
        found = self.special.search(text)
        if found:
            raise UserError(f"the text of {name!r} holds {found[0]!r}, which is a control token of the model.")
        return text

    def _frame(self, scene: str, reference: bool, answer: bool) -> str:
        def words(text):
            return [{"type": "text", "text": text}]

        turns = [{"role": "system", "content": words(SYSTEM)}, {"role": "scene", "content": words(scene)}]
        if reference:
            turns.append({"role": "user", "content": words(self.MARKS["reference"])})
            turns.append({"role": "assistant", "content": [{"type": "audio"}]})
        turns.append({"role": "user", "content": words(self.MARKS["target"])})
        if answer:
            turns.append({"role": "assistant", "content": [{"type": "audio"}]})
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not answer)

    def prompt(self, text: str, reference: str | None, scene: str | None, answer: bool) -> str:
        """The rendered chat. Each audio is one placeholder. `answer` false: it ends where the model begins to speak."""
        frame = self.frame((scene or SCENE).strip(), reference is not None, answer)
        return frame.replace(self.MARKS["reference"], reference or "").replace(self.MARKS["target"], text)

    def ids(self, prompts: list[str]) -> list[np.ndarray]:
        """Token ids. The template writes the first token itself: the tokenizer must not add it again."""
        found = self.tokenizer(prompts, add_special_tokens=False, return_attention_mask=False).input_ids
        return [np.array(ids, dtype=np.int64) for ids in found]

    def decode(self, ids) -> tuple[str, int]:
        """Text of token ids, and how many were none: the tokenizer raises at -100 and leaves out what is too large."""
        ids = [int(i) for i in ids]
        real = [i for i in ids if 0 <= i < len(self.tokenizer)]
        return self.tokenizer.decode(real), len(ids) - len(real)
