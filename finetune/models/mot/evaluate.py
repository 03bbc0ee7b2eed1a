"""Llama MoT on held-out music, teacher-forced: loss, what the caption is worth, and that text output is unchanged."""

import math

import numpy as np
import torch

from common import keyed_random
from common.evaluation import Sums, evaluating, evaluation_rows
from common.feed import to_device
from common.loss import IGNORE
from common.runtime import Process
from models.mot.data import Clips, pad
from models.mot.generate import generate
from models.mot.layout import music
from models.mot.network import MoTLlama, Route

# Text that the original Llama reads when a run starts, and the trained model at each evaluation: no logit may differ.
TEXT_PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    return n if n < 2 else",
    "A slow piano melody in a minor key, with soft strings behind it.",
)
BASELINE_CLIPS = 20_000  # enough to count codes; a larger corpus would only take longer


@torch.no_grad()
def llama_text_logits(model: MoTLlama, clips: Clips, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each text prompt's ids and its logits, as the original Llama computes them. Every rank must call it (ZeRO-3)."""
    prompts = [torch.from_numpy(ids)[None].to(device) for ids in clips.tokenizer(list(TEXT_PROMPTS))]
    return [(ids, model.llama(ids, use_cache=False).logits.cpu()) for ids in prompts]


@torch.no_grad()
def text_drift(model: MoTLlama, text_reference: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Largest difference between a text logit now and in `text_reference`; exactly 0 unless something is wrong."""
    differences = [model.text_logits(ids).cpu().float() - logits.float() for ids, logits in text_reference]
    return max(float(difference.abs().max()) for difference in differences)


def token_metrics(model: MoTLlama, clips: Clips, text_reference: list, process: Process) -> dict[str, float]:
    """Unweighted loss per code over all clips, the same for any number of ranks.

    caption_gain is the increase of the loss with another clip's caption, caption_gain_none the one without any caption;
    near 0 the caption is ignored. Both are small even if the caption rules, because most codes follow from those before
    them; caption_gain_onsets is caption_gain for codebook 0 where its code changes. kbps is what the codes would take
    if compressed with this model, codec_kbps what they take uncompressed. `text_reference`: see llama_text_logits.
    """
    sums = Sums()
    order = keyed_random.generator(clips.config.seed, "captions").permutation(len(clips))
    other_clip = dict(zip(order, np.roll(order, 1), strict=True))  # one cycle: no clip keeps its own caption
    with evaluating(model):
        for rows, counts in evaluation_rows(clips.lengths, clips.config.micro_tokens, process):
            other_captions = [clips.caption(other_clip[row]) for row in rows]
            no_captions = [clips.tokenizer.no_text] * len(rows)
            (loss_c, targets_c), (onset_loss, onsets) = _code_losses(model, clips.batch(rows), process)
            (other_c, _), (onset_other, _) = _code_losses(model, clips.batch(rows, texts=other_captions), process)
            (none_c, _), _ = _code_losses(model, clips.batch(rows, texts=no_captions), process)
            sums.add(counts, loss=loss_c, targets=targets_c, loss_other=other_c, loss_none=none_c)
            sums.add(counts, onset_gain=onset_other - onset_loss, onsets=onsets)
        drift = text_drift(model, text_reference)
    total = sums.reduce(process)
    targets = total["targets"].sum()
    loss = total["loss"].sum() / targets
    nats_per_code = total["loss"] / total["targets"]  # (C,)
    frames_per_second = clips.tokens.info["sample_rate"] / clips.tokens.info["hop"]
    bits_per_frame = nats_per_code.sum() / math.log(2)
    codec_bits_per_frame = len(nats_per_code) * math.log2(clips.layout.size)
    metrics = {
        "loss": loss,
        "bits_per_frame": bits_per_frame,
        "kbps": frames_per_second * bits_per_frame / 1000,
        "codec_kbps": frames_per_second * codec_bits_per_frame / 1000,
        "caption_gain": total["loss_other"].sum() / targets - loss,
        "caption_gain_onsets": total["onset_gain"] / max(total["onsets"], 1),
        "caption_gain_none": total["loss_none"].sum() / targets - loss,
        "text_drift": drift,
    }
    metrics |= {f"loss_channel_{c}": nats for c, nats in enumerate(nats_per_code)}
    return {name: float(value) for name, value in metrics.items()}


def _code_losses(model: MoTLlama, batch: dict, process: Process) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses and number of targets: per codebook (2, C), and of codebook 0 where its code changes (2,)."""
    batch = to_device(batch, process.device)
    route = Route(batch["order"], batch["kind_counts"], batch["back"])
    hidden_nh = model(batch["input_ids"], batch["codebooks"], route=route).flatten(0, 1)
    labels_nc, targets = batch["labels"].flatten(0, 1), batch["targets"].split(batch["target_counts"])
    _, sums_2c = model.head(hidden_nh, labels_nc, targets)
    first = targets[0]
    codes, clips = labels_nc[:, 0].index_select(0, first), first // batch["labels"].shape[1]
    changes = torch.ones_like(first, dtype=torch.bool)
    changes[1:] = (codes[1:] != codes[:-1]) | (clips[1:] != clips[:-1])
    _, onsets_2c = model.head(hidden_nh, labels_nc, [first[changes], *(part[:0] for part in targets[1:])])
    return sums_2c, onsets_2c[:, 0]


# ---- baselines -------------------------------------------------------------------------------------------------


def baselines(train: Clips, held_out: Clips) -> dict[str, float]:
    """Evaluation loss of three trivial models, counted on the training clips and measured on the held-out ones.

    uniform; unigram (with one count added to each code); bigram given the same codebook's code one frame before,
    backed off to the unigram with one count.
    """
    size, codebooks = train.layout.size, train.layout.codebooks
    train_codes = [np.asarray(train.tokens.codes(i)) for i in train.kept[:BASELINE_CLIPS]]
    eval_codes = [np.asarray(held_out.tokens.codes(i)) for i in held_out.kept[:BASELINE_CLIPS]]
    unigram_loss, bigram_loss, targets = 0.0, 0.0, 0
    for k in range(codebooks):
        code_counts = np.bincount(np.concatenate([codes[:, k] for codes in train_codes]), minlength=size)
        unigram = (code_counts + 1) / (code_counts.sum() + size)
        pairs, pair_counts = np.unique(
            np.concatenate([_pairs(codes[:, k], size) for codes in train_codes]), return_counts=True
        )
        pairs_starting_with = np.bincount(pairs // size, weights=pair_counts, minlength=size)
        for codes in eval_codes:
            code = codes[:, k].astype(np.int64)
            probability = unigram[code]
            unigram_loss -= np.log(probability).sum()
            wanted = _pairs(code, size)
            place = np.minimum(np.searchsorted(pairs, wanted), max(0, len(pairs) - 1))
            hits = np.where(pairs[place] == wanted, pair_counts[place], 0) if len(pairs) else np.zeros(len(wanted))
            given_previous = (hits + probability[1:]) / (pairs_starting_with[code[:-1]] + 1)
            bigram_loss -= np.log(np.concatenate([probability[:1], given_previous])).sum()
            targets += len(code)
    return {"uniform": math.log(size), "unigram": unigram_loss / targets, "bigram": bigram_loss / targets}


def _pairs(code: np.ndarray, size: int) -> np.ndarray:
    """One number per pair of consecutive codes."""
    code = code.astype(np.int64)
    return code[:-1] * size + code[1:]


# ---- what an export must compute -------------------------------------------------------------------------------


PROBE_FRAMES = 8  # that the engine plays for the check


def probe(model: MoTLlama, clips: Clips, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The shortest clip, what the model plays to its caption if it always takes the most likely code (names that begin
    with "said_"), and the logits of all their positions as computed in training; see probe_outputs. "codes": what was
    played; -1: nothing."""
    clip, layout = int(clips.lengths.argmin()), model.layout
    caption, options = clips.caption(clip), {"temperature": 0.0, "min_frames": PROBE_FRAMES}
    [(said_tc, _)] = generate(model, [caption], PROBE_FRAMES, [0], device, **options)
    said = pad([(caption, *music(said_tc, layout, final=False))], layout)
    inputs, outputs = {}, []
    with evaluating(model):
        for batch, prefix in ((clips.batch([clip]), ""), (said, "said_")):
            batch = to_device(batch, device)
            route = Route(batch["order"], batch["kind_counts"], batch["back"])
            outputs.append(_all_logits(model, model(batch["input_ids"], batch["codebooks"], route=route)[0]))
            inputs |= {prefix + name: batch[name] for name in ("input_ids", "codebooks", "mask")}
    labels_lc = said["labels"][0]
    codes_lc = torch.where(labels_lc == IGNORE, -1, labels_lc - layout.first(torch.arange(layout.codebooks)))
    codes = torch.full((len(outputs[0]) + len(outputs[1]),), -1)
    codes[len(outputs[0]) :][: codes_lc.numel()] = codes_lc.T.flatten()
    return inputs | {"codes": codes, "code_count": torch.tensor(layout.size)}, torch.cat(outputs)


def probe_outputs(model: MoTLlama, inputs: dict) -> torch.Tensor:
    """Logits of every codebook at every position, and of A_EOS (in all columns), ((C + 1) x L, codes) per sequence."""
    sequences = ([inputs[prefix + name] for name in ("input_ids", "codebooks", "mask")] for prefix in ("", "said_"))
    return torch.cat([_all_logits(model, model(*sequence)[0]) for sequence in sequences])


def _all_logits(model: MoTLlama, hidden_lh: torch.Tensor) -> torch.Tensor:
    codebooks, codes = model.layout.codebooks, model.layout.size
    logits = [model.head(hidden_lh, codebook=k) for k in range(codebooks)]
    return torch.cat([rows[:, :codes] for rows in logits] + [logits[0][:, codes:].expand(-1, codes)])
