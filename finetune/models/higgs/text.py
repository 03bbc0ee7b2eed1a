"""From texts to prompt ids, in the same way for training, evaluation, samples and inference."""

import re
from functools import lru_cache

import numpy as np

from common.errors import UserError

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
SPEAKER = re.compile(r"\[SPEAKER(\d+)\]")  # before each turn of a dialogue


def normalise(text: str) -> str:
    """The text in the form that the base was trained on: half-width punctuation, no brackets, units spelled out, events
    tagged, a full stop at the end, each turn of a dialogue on its own line. Idempotent."""
    text = text.translate(PUNCTUATION)
    for short, long in (UNITS | EVENTS).items():
        text = text.replace(short, long)
    text = " ".join(text.split())
    text = re.sub(rf" ?({SPEAKER.pattern}) ?", r"\n\1 ", text).strip()
    return text if not text or text.endswith(ENDINGS) else text + "."


def check_speakers(text: str, voices: int, name: str) -> None:
    """Refuses a dialogue whose [SPEAKER] tags do not fit its references: the model could not know who speaks."""
    spoken = [int(number) for number in SPEAKER.findall(text)]
    if voices >= len(Chat.MARKS):
        raise UserError(f"{name!r} has {voices} references; at most {len(Chat.MARKS) - 1} are supported.")
    if voices and max(spoken, default=0) >= voices:
        raise UserError(
            f"the text of {name!r} has the tag [SPEAKER{max(spoken)}], but there"
            f" {'is 1 reference' if voices == 1 else f'are {voices} references'}: [SPEAKER0] is the first one's voice."
        )
    if voices > 1 and not spoken:
        raise UserError(f"{name!r} has {voices} references but no tag such as [SPEAKER0] in its text: who speaks?")


class Chat:
    """The chat template and tokenizer of a checkpoint. The template is rendered once per scene, with marks for the
    texts. References are turns of their own, with their transcripts.
    """

    MARKS = "\ue000\ue001\ue002\ue003\ue004"  # target, references; private-use characters, refused in texts

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise UserError("--model has no chat template (chat_template.jinja), which the prompts need.")
        special = [token for token in tokenizer.get_added_vocab() if token.startswith("<|")]
        self.special = re.compile("|".join(map(re.escape, special)) + f"|[{self.MARKS}]")
        self.frame = lru_cache(maxsize=1024)(self._frame)

    def identity(self) -> str:
        """Changes with anything that the ids of a text depend on."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        form = (SYSTEM, SCENE, PUNCTUATION, UNITS, EVENTS, SPEAKER.pattern)
        return repr((tokenizer, self.tokenizer.chat_template, *form))

    def text(self, text: str, name: str) -> str:
        """The text as it goes into the prompt; refused if it is empty or holds a control token."""
        text = normalise(text)
        if not text:
            raise UserError(f"clip {name!r} has no text.")
        control = self.special.search(text)
        if control:
            raise UserError(f"the text of {name!r} holds {control[0]!r}, which is a control token of the model.")
        return text

    def _frame(self, scene: str, voices: int, answer: bool) -> str:
        target, *marks = self.MARKS[: voices + 1]
        audio = {"type": "audio"}
        turns = [("system", [_text(SYSTEM)]), ("scene", [_text(scene)])]
        for number, mark in enumerate(marks):
            said = f"[SPEAKER{number}] {mark}" if voices > 1 else mark
            turns += [("user", [_text(said)]), ("assistant", [audio])]
        turns.append(("user", [_text(target)]))
        if answer:
            turns.append(("assistant", [audio]))
        messages = [{"role": role, "content": content} for role, content in turns]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answer)

    def prompt(self, text: str, reference: str | list[str] | None, scene: str | None, answer: bool) -> str:
        """The rendered chat, one placeholder per piece of audio. Without `answer` it ends where the speech begins.

        `reference`: transcript of the reference, or those of a dialogue's references, [SPEAKER0]'s first.
        """
        references = [reference] if isinstance(reference, str) else reference or []
        prompt = self.frame((scene or SCENE).strip(), len(references), answer)
        for mark, said in zip(self.MARKS, [text, *references], strict=False):
            prompt = prompt.replace(mark, said)
        return prompt

    def ids(self, prompts: list[str]) -> list[np.ndarray]:
        """Token ids. The template already has the BOS token: the tokenizer must not add it again.

        Without transformers' wrapper, which also asks for offsets and takes half as long again."""
        encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        return [np.array(prompt.ids, dtype=np.int64) for prompt in encoded]

    def decode(self, ids) -> tuple[str, int]:
        """The text of token ids, and how many are not in the vocabulary: the tokenizer would raise or skip them."""
        ids = [int(i) for i in ids]
        known = [i for i in ids if 0 <= i < len(self.tokenizer)]
        return self.tokenizer.decode(known), len(ids) - len(known)


def _text(text: str) -> dict:
    return {"type": "text", "text": text}
