"""What is measured on held-out music: bits, what the caption is worth, and that the text model is untouched."""

import math

import numpy as np
import torch

from common import keyed_random as keyed
from common.plan import Plan
from common.runtime import Ranks, all_sum, say
from models.mot.data import Clips
from models.mot.network import MoTLlama, mot_loss

# Read by plain Llama when a run starts, and by the trained model at each evaluation: not one logit may differ.
TEXT_PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    return n if n < 2 else",
    "A slow piano melody in a minor key, with soft strings behind it.",
)
BASELINE_CLIPS = 20_000  # enough to count codes; a larger corpus would only take longer


class PlainText:
    """The logits of plain Llama on fixed prompts. Every rank must take part: ZeRO-3 gathers."""

    @torch.no_grad()
    def __init__(self, model: MoTLlama, clips: Clips, device):
        self.model = model
        self.prompts = [torch.from_numpy(ids)[None].to(device) for ids in clips.tokenizer(list(TEXT_PROMPTS))]
        self.logits = [model.llama(ids, use_cache=False).logits.cpu() for ids in self.prompts]

    @torch.no_grad()
    def drift(self) -> float:
        """Largest difference of a logit now; exactly 0 while nothing is forgotten."""
        now = [self.model.text_logits(ids).cpu() for ids in self.prompts]
        return max(float((a.float() - b.float()).abs().max()) for a, b in zip(now, self.logits, strict=True))


@torch.no_grad()
def evaluate(model: MoTLlama, clips: Clips, plain: PlainText, ranks: Ranks, to_device) -> dict[str, float]:
    """Teacher-forced metrics, the same for any number of ranks (sums are reduced, not means).

    caption_gain: how much worse the loss is with another clip's caption, and caption_gain_none without one; near 0
    the caption is ignored. kbps: what the model would need to send the codes, against codec_kbps for the raw ones.
    """
    plan = Plan(clips.lengths, clips.config.micro_tokens, seed=0, jitter=0)
    batches = [plan.micro_batch(number)[1] for number in range(plan.per_epoch)]
    books = clips.layout.codebooks
    sums = torch.zeros(3, 2, books, dtype=torch.float64)
    weights = torch.ones(books)
    other = keyed.generator(clips.config.seed, "captions").permutation(len(clips))
    swapped = dict(zip(other, np.roll(other, 1), strict=True))  # a cycle: nobody keeps its own
    was_training = model.training
    model.eval()
    for turn in range(-(-len(batches) // ranks.world)):
        number = turn * ranks.world + ranks.rank
        # Under ZeRO-3 every rank must run every turn: one without a batch repeats the first and adds nothing.
        chosen = batches[number if number < len(batches) else 0]
        captions = (None, [clips.texts[swapped[c]] for c in chosen], [clips.tokenizer.no_text] * len(chosen))
        for kind, texts in enumerate(captions):
            _, stats = mot_loss(model, to_device(clips.batch(chosen, texts=texts)), weights)
            if number < len(batches):
                sums[kind] += stats.cpu().double()
    drift = plain.drift()
    model.train(was_training)
    true, shuffled, none = all_sum(sums, ranks)
    loss = true[0].sum() / true[1].sum()
    nll = true[0] / true[1]
    info = clips.tokens.info
    rate = info["sample_rate"] / info["hop"]
    bits = nll.sum() / math.log(2)
    values = {
        "loss": loss,
        "bits_a_frame": bits,
        "kbps": rate * bits / 1000,
        "codec_kbps": rate * books * math.log2(clips.layout.size) / 1000,
        "caption_gain": shuffled[0].sum() / shuffled[1].sum() - loss,
        "caption_gain_none": none[0].sum() / none[1].sum() - loss,
        "text_drift": drift,
    }
    values |= {f"loss_channel_{k}": nll[k] for k in range(books)}
    return {name: float(value) for name, value in values.items()}


# ---- baselines -------------------------------------------------------------------------------------------------


def baselines(train: Clips, held_out: Clips) -> dict[str, float]:
    """Loss of three models that know no music, counted on the training clips and measured on the held-out ones.

    uniform; unigram (with one count added to each code); bigram given the same codebook's code one frame before,
    backed off to the unigram with one count.
    """
    size, books = train.layout.size, train.layout.codebooks
    seen = [np.asarray(train.tokens.codes(i)) for i in train.kept[:BASELINE_CLIPS]]
    asked = [np.asarray(held_out.tokens.codes(i)) for i in held_out.kept[:BASELINE_CLIPS]]
    totals, count = np.zeros(2), 0
    for k in range(books):
        counts = np.bincount(np.concatenate([codes[:, k] for codes in seen]), minlength=size)
        unigram = (counts + 1) / (counts.sum() + size)
        pairs, times = np.unique(np.concatenate([_pairs(codes[:, k], size) for codes in seen]), return_counts=True)
        before = np.bincount(pairs // size, weights=times, minlength=size)
        for codes in asked:
            code = codes[:, k].astype(np.int64)
            chance = unigram[code]
            totals[0] -= np.log(chance).sum()
            wanted = _pairs(code, size)
            place = np.minimum(np.searchsorted(pairs, wanted), max(0, len(pairs) - 1))
            hits = np.where(pairs[place] == wanted, times[place], 0) if len(pairs) else np.zeros(len(wanted))
            chance = np.concatenate([chance[:1], (hits + chance[1:]) / (before[code[:-1]] + 1)])
            totals[1] -= np.log(chance).sum()
            count += len(code)
    return {"uniform": math.log(size), "unigram": totals[0] / count, "bigram": totals[1] / count}


def _pairs(code: np.ndarray, size: int) -> np.ndarray:
    code = code.astype(np.int64)
    return code[:-1] * size + code[1:]


def say_baselines(values: dict[str, float]) -> None:
    words = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    say(f"loss of models that know no music: {words}")
