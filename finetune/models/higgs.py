"""Higgs Audio v2: reference/target pairs, loss, evaluation.

Shapes: B rows, S positions of the text axis, F audio frames, K codebooks, T codec frames, D width, N scored positions.
The voice comes from the codec codes of the reference in the prompt; there is no other audio input to this model.
"""

import numpy as np
import torch

from common.config import UserError
from common.loss import IGNORE, codebook_loss, codebook_stats
from common.plan import Plan
from common.runtime import Ranks, all_sum, on_first, say
from common.tokens import TokenDataset
from models.higgs_layout import Layout, Row, audio_at, build_row, collate, without_delay
from models.higgs_text import Chat

CODEBOOK_WEIGHTS = {"equal": (1.0,), "first": (8.0, 8.0, 6.0, 6.0, 4.0, 4.0, 2.0, 2.0)}


# ---- pairs -----------------------------------------------------------------------------------------------------


class Pairs:
    """A token dataset seen as pairs of a reference and a target by the same speaker."""

    def __init__(self, tokens: TokenDataset, layout: Layout, chat: Chat, config, train: bool):
        self.tokens, self.layout, self.chat, self.config, self.train = tokens, layout, chat, config, train
        # The ids right after the codes are the stream's BOS and EOS: a larger codebook would reach into them.
        tokens.require(codec="higgs", channels=layout.codebooks, codebook_size=layout.bos)
        self.reference = self._references()  # row of each row's reference; -1: none
        self.kept = tokens.rows_of_split(train)
        if not config.allow_no_ref:
            self.kept = self.kept[self.reference[self.kept] >= 0]
        if not len(self.kept):
            raise UserError(f"{tokens.folder}: no clip has a reference; choose them with data/pair_speakers.py.")
        self._refuse_copies()
        frames = tokens.frames.astype(np.int64)
        ref = self.reference[self.kept]
        audio = frames[self.kept] + layout.tail + np.where(ref >= 0, frames[ref] + layout.tail, 0)
        sizes = [len(ids) for ids in self._prompts(range(len(self.kept)))]
        self.lengths = np.array(sizes) - 1 - (ref >= 0) + audio  # a placeholder becomes its frames
        self.dropped = 0
        self._limit(config.max_positions or layout.max_positions)
        weights = CODEBOOK_WEIGHTS[config.codebook_weights]
        weights = np.array([weights[min(k, len(weights) - 1)] for k in range(layout.codebooks)])
        self.weights = weights / weights.mean()
        self._swap = None

    def __len__(self) -> int:
        return len(self.kept)

    def id(self, clip: int) -> str:
        return self.tokens.id(self.kept[clip])

    def _references(self) -> np.ndarray:
        names = self.tokens.column("ref")
        if names is None:
            if self.config.allow_no_ref:
                return np.full(len(self.tokens), -1)
            raise UserError(
                f"{self.tokens.folder} names no references: give ref_audio and ref_text in the manifest, or choose them"
                " by speaker with data/pair_speakers.py."
            )
        import pyarrow.compute as pc

        ids = self.tokens.column("id")
        found = pc.fill_null(pc.index_in(names, value_set=ids.combine_chunks()), -1).to_numpy()
        named = pc.fill_null(pc.greater(pc.utf8_length(names), 0), False).to_numpy()
        lost = np.flatnonzero(named & (found < 0))
        if len(lost):
            clip, ref = self.tokens.id(lost[0]), self.tokens.value("ref", lost[0])
            raise UserError(f"{self.tokens.folder}: the reference {ref!r} of clip {clip!r} is not in the dataset.")
        return np.where(named, found, -1)

    def _refuse_copies(self) -> None:
        """A reference with the sound of its target teaches to copy, not to clone."""
        for i in self.kept[self.reference[self.kept] >= 0]:
            j = self.reference[i]
            same_size = self.tokens.frames[i] == self.tokens.frames[j]
            if i == j or (same_size and np.array_equal(self.tokens.codes(i), self.tokens.codes(j))):
                name = self.tokens.id(i)
                raise UserError(f"{self.tokens.folder}: the reference of clip {name!r} is the clip itself or its copy.")

    def _limit(self, limit: int) -> None:
        too_long = self.lengths > limit
        if not too_long.any():
            return
        if self.config.over_long == "error":
            worst = int(np.argmax(self.lengths))
            raise UserError(
                f"{self.tokens.folder}: clip {self.id(worst)!r} takes {self.lengths[worst]} positions with its"
                f" reference, over the limit of {limit} (--max-positions or the model's own); use --over-long drop."
            )
        self.kept, self.lengths, self.dropped = self.kept[~too_long], self.lengths[~too_long], int(too_long.sum())

    def _prompts(self, clips, references: np.ndarray | None = None, answer: bool = True) -> list[np.ndarray]:
        rows = self.kept[np.asarray(clips, dtype=np.int64)]
        refs = self.reference[rows] if references is None else references
        prompts = []
        for i, j in zip(rows, refs, strict=True):
            said = self.chat.text(self.tokens.text(j), self.tokens.id(j)) if j >= 0 else None
            text = self.chat.text(self.tokens.text(i), self.tokens.id(i))
            prompts.append(self.chat.prompt(text, said, self.tokens.label("scene", i), answer))
        return self.chat.ids(prompts)

    def target_weight(self, clips, epoch: int = 0) -> float:
        """Sum of the token weights of these clips' targets: known from lengths alone, on every rank."""
        rows = self.kept[np.asarray(clips, dtype=np.int64)]
        total = float(self.weights.sum() * (self.tokens.frames[rows].astype(np.int64) + 1).sum())
        if self.config.text_loss:
            for row in self.rows(clips):
                first = max(1, row.text_from)  # nothing predicts the first position of a row
                total += self.config.text_loss * (~audio_at(row.ids[first:], self.layout)).sum()
        return total

    def rows(self, clips, references: np.ndarray | None = None, answer: bool = True) -> list[Row]:
        """These clips as rows; `references`: other rows than their own, -1 for none."""
        chosen = self.kept[np.asarray(clips, dtype=np.int64)]
        refs = self.reference[chosen] if references is None else references
        rows = []
        for i, j, ids in zip(chosen, refs, self._prompts(clips, refs, answer), strict=True):
            used = ([j] if j >= 0 else []) + ([i] if answer else [])
            segments = [self._codes(u) for u in used]
            rows.append(build_row(self.tokens.id(i), ids, segments, self.layout, answer))
        return rows

    def _codes(self, i: int) -> np.ndarray:
        codes = self.tokens.codes(i)
        if codes.min() < 0 or codes.max() >= self.layout.bos:
            code = min(codes.min(), 0) or codes.max()
            raise UserError(f"{self.tokens.folder}: clip {self.tokens.id(i)!r} holds the code {code}, out of range.")
        return codes

    def batch(self, clips, references: np.ndarray | None = None) -> dict:
        rows = self.rows(clips, references)
        return collate(rows, self.layout, self.config.packing, bool(self.config.text_loss))

    def swapped(self, clips) -> np.ndarray | None:
        """For each clip the reference of another speaker, as long as its own as far as possible; None: all are one.

        Without speakers in the dataset every reference counts as one.
        """
        if self._swap is None:
            refs = self.reference[self.kept]
            names = self.tokens.column("speaker")
            voices = refs if names is None else np.array(names.to_pylist()).astype(str)[self.kept]
            _, voices = np.unique(voices, return_inverse=True)
            self._swap = np.full(len(refs), -1)
            for clip in np.flatnonzero(refs >= 0):
                others = refs[(voices != voices[clip]) & (refs >= 0)]
                if len(others):
                    apart = np.abs(self.tokens.frames[others].astype(int) - self.tokens.frames[refs[clip]])
                    self._swap[clip] = others[np.argmin(apart)]
        found = self._swap[np.asarray(clips, dtype=np.int64)]
        return found if (self._swap >= 0).any() else None

    def say_facts(self) -> None:
        info, frames = self.tokens.info, self.tokens.frames[self.kept].astype(np.int64)
        hours = frames.sum() * info["hop"] / info["sample_rate"] / 3600
        quarter, half, most = np.percentile(self.lengths, [25, 50, 100]).astype(int)
        named = self.tokens.column("speaker")
        voices = len(set(named.take(self.kept).to_pylist())) if named is not None else 0
        share = (self.reference[self.kept] >= 0).mean()
        say(
            f"{self.tokens.folder}: {len(self):,} targets, {hours:.3f} h, {voices or 'unnamed'} speakers,"
            f" {100 * share:.0f} % with a reference; positions a row {quarter} / {half} / {most} (quarter, half, most)"
        )
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and left out")


def build_data(path: str, layout: Layout, chat: Chat, config, ranks: Ranks, train: bool) -> Pairs | None:
    """A token dataset, checked against the model and, on the first rank, for damage; None without a path."""
    if not path:
        return None
    tokens = TokenDataset(path)
    if config.verify_data:
        on_first(tokens.verify, ranks)
    pairs = Pairs(tokens, layout, chat, config, train)
    pairs.say_facts()
    return pairs


# ---- loss ------------------------------------------------------------------------------------------------------


def base_model(model):
    """The HiggsAudioV2ForConditionalGeneration inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def labelled_states(model, batch, layout: Layout):
    """States (N, D) and labels (N, K) of the positions whose next frame is scored; also all states (B, S, D)."""
    given = ("input_ids", "attention_mask", "position_ids", "audio_input_ids", "audio_input_ids_mask")
    inputs = {name: batch[name] for name in given if name in batch}
    hidden_bsd = base_model(model).model(**inputs, use_cache=False).last_hidden_state
    ids = batch["input_ids"]
    labels_bsk = ids.new_full((*ids.shape, layout.codebooks), IGNORE)
    labels_bsk[audio_at(ids, layout)] = batch["audio_labels"][batch["audio_input_ids_mask"]]
    labels_nk = labels_bsk[:, 1:].flatten(0, 1)  # position i predicts the frame at i + 1
    rows = (labels_nk != IGNORE).any(-1).nonzero().squeeze(-1)
    return hidden_bsd[:, :-1].flatten(0, 1)[rows], labels_nk[rows], hidden_bsd


def higgs_loss(model, batch, layout: Layout, weights: np.ndarray, text_loss: float = 0.0):
    """Weighted sum of the token losses; per codebook (and for the text) the plain sum and the number of targets.

    A batch without a single label gives 0 that still has a gradient, of zeros: its rank must not leave the others
    alone in the backward.
    """
    model = base_model(model)
    hidden_nd, labels_nk, hidden_bsd = labelled_states(model, batch, layout)
    real = labels_nk != IGNORE
    weights_nk = real * torch.as_tensor(weights, dtype=torch.float32, device=hidden_nd.device)
    loss, losses_nk = codebook_loss(model.audio_lm_head, hidden_nd, labels_nk, weights_nk)
    stats = torch.stack([losses_nk.sum(0), real.sum(0).float()])
    if text_loss:
        labels_n = batch["labels"][:, 1:].flatten()
        rows = (labels_n != IGNORE).nonzero().squeeze(-1)
        labels_n1 = labels_n[rows, None]
        states = hidden_bsd[:, :-1].flatten(0, 1)[rows]
        weights_n1 = torch.full(labels_n1.shape, text_loss, device=states.device)
        text, losses_n1 = codebook_loss(model.text_lm_head, states, labels_n1, weights_n1)
        text_stats = torch.stack([losses_n1.sum(), losses_n1.new_tensor(len(rows))])
        loss, stats = loss + text, torch.cat([stats, text_stats[:, None]], dim=1)
    return loss, stats.detach()


# ---- evaluation ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, pairs: Pairs, ranks: Ranks, to_device) -> dict[str, float]:
    """Teacher-forced metrics over all pairs, the same for any number of ranks (sums are reduced, not means).

    gap: how much worse the targets get with another speaker's reference. Near 0 the voice prompt is ignored.
    end_loss: of the end of the streams, which decides whether the model stops.
    """
    plan = Plan(pairs.lengths, pairs.config.micro_tokens, seed=0, jitter=0)
    batches = [plan.micro_batch(number)[1] for number in range(plan.per_epoch)]
    layout, k = pairs.layout, pairs.layout.codebooks
    sums = np.zeros(2 * k + 5)
    was_training = model.training
    model.eval()
    for turn in range(-(-len(batches) // ranks.world)):
        number = turn * ranks.world + ranks.rank
        # Under ZeRO-3 every rank must run every turn: one without a batch repeats the first and adds nothing.
        clips = batches[number if number < len(batches) else 0]
        losses, best, labels = _token_stats(model, to_device(pairs.batch(clips)), layout)
        wrong, swapped = 0.0, pairs.swapped(clips)
        if swapped is not None:
            wrong = float(_token_stats(model, to_device(pairs.batch(clips, swapped)), layout)[0].sum())
        if number < len(batches):
            real, ends = labels != IGNORE, labels == layout.eos
            hits = (best[:, 0] == labels[:, 0])[real[:, 0]].sum()
            parts = [losses.sum(0), real.sum(0), losses[ends].sum(), ends.sum(), hits, wrong, swapped is not None]
            sums += np.concatenate([np.atleast_1d(np.asarray(p.cpu() if torch.is_tensor(p) else p)) for p in parts])
    model.train(was_training)
    sums = all_sum(sums, ranks)
    loss, count = sums[: 2 * k].reshape(2, k)
    end_loss, ends, hits, wrong, swaps = sums[2 * k :]
    values = {
        "loss": loss.sum() / count.sum(),
        "end_loss": end_loss / ends,
        "accuracy_first": hits / count[0],
    }
    if swaps:
        values["gap"] = (wrong - loss.sum()) / count.sum()
    values |= {f"loss_channel_{c}": loss[c] / count[c] for c in range(k)}
    return {name: float(value) for name, value in values.items()}


def _token_stats(model, batch, layout: Layout):
    hidden_nd, labels_nk, _ = labelled_states(model, batch, layout)
    losses, best = codebook_stats(base_model(model).audio_lm_head, hidden_nd, labels_nk)
    return losses.float(), best, labels_nk


@torch.no_grad()
def layout_losses(model, pairs: Pairs, to_device, clips: int = 8) -> tuple[float, float]:
    """Loss a token of a few targets, delayed and not. A base that was trained reads the delayed layout better."""
    chosen = np.linspace(0, len(pairs) - 1, num=min(clips, len(pairs)), dtype=int)
    was_training = model.training
    model.eval()
    found = []
    rows = pairs.rows(chosen)
    for laid_out in (rows, [without_delay(row, pairs.layout) for row in rows]):
        total, count = 0.0, 0
        for row in laid_out:
            losses, _, labels = _token_stats(model, to_device(collate([row], pairs.layout)), pairs.layout)
            total, count = total + float(losses.sum()), count + int((labels != IGNORE).sum())
        found.append(total / count)
    model.train(was_training)
    return found[0], found[1]
