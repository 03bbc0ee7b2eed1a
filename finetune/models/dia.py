"""What both Dia recipes share: text path, sequence layout, batches, evaluation, speaking, loading.

Shapes: B clips, S text bytes, L decoder positions, C channels (9 codebooks, or 18 for stereo), T codec frames.
"""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import keyed, samples
from common.config import UserError
from common.hub import load_pretrained
from common.loss import IGNORE, codebook_loss, codebook_stats
from common.plan import Plan
from common.runs import Run
from common.runtime import Ranks, all_sum, on_first, say
from common.tokens import TokenDataset

SPEAKER_BYTES = {"[S1]": "\x01", "[S2]": "\x02"}
CHANNEL_WEIGHTS = {"equal": (1.0,), "first4x": (4.0, 1.0)}  # the last value holds for all further channels


# ---- text ------------------------------------------------------------------------------------------------------


def read_tag_map(path: str) -> dict[str, int]:
    """Tags that become one control byte each, such as {"[de]": 4}. The two speaker tags are built in."""
    if not path:
        return {}
    try:
        tag_map = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--tag-map {path} cannot be read as JSON: {error}.") from None
    if not isinstance(tag_map, dict) or not all(isinstance(byte, int) for byte in tag_map.values()):
        raise UserError(f'--tag-map {path} must be an object such as {{"[de]": 4}}.')
    tag_map = {unicodedata.normalize("NFC", tag): byte for tag, byte in tag_map.items()}  # as texts are
    for tag, byte in tag_map.items():
        if not tag or tag in SPEAKER_BYTES:
            raise UserError(f"--tag-map {path}: {tag!r} is empty or a speaker tag, which is built in.")
        # 0 is padding, 1 and 2 are the speakers, 8 to 13 are white space controls, 32 is the blank.
        if not (3 <= byte <= 7 or 14 <= byte <= 31):
            raise UserError(f"--tag-map {path}: {tag!r} has byte {byte}; use 3..7 or 14..31.")
    if len(set(tag_map.values())) != len(tag_map):
        raise UserError(f"--tag-map {path}: two tags share one byte.")
    return tag_map


def text_bytes(text: str, tag_map: dict[str, int], name: str) -> np.ndarray:
    """The one way from a text to ids, for training, evaluation, samples and generation: UTF-8 bytes."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(" " if c in "\r\n\t" else c for c in text if c != "\0")
    stray = [c for c in text if ord(c) < 32 or ord(c) == 127]
    if stray:
        raise UserError(f"the text of {name!r} holds the control character {stray[0]!r}.")
    for tag in sorted(tag_map, key=len, reverse=True):  # "[de][old]" before "[de]"
        text = text.replace(tag, chr(tag_map[tag]))
    for tag, byte in SPEAKER_BYTES.items():
        text = text.replace(tag, byte)
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def with_speaker(text: str, text_mode: str) -> str:
    """A transcript that names no speaker begins with the first one, as all that the model has read."""
    return f"[S1] {text}" if text_mode == "speech" and not any(tag in text for tag in SPEAKER_BYTES) else text


def augment_tags(text: str, drop: float, limit: int, *key) -> str:
    """Tag prompts ("calm, piano, 90 bpm"): drops each with probability `drop`, keeps at least one, shuffles."""
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    if not tags:
        return text
    draw = keyed.generator(*key, "tags")
    kept = [tag for tag in tags if draw.random() >= drop] or [tags[draw.integers(len(tags))]]
    kept = [kept[i] for i in draw.permutation(len(kept))]
    return ", ".join(kept[:limit] if limit else kept)


# ---- layout ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The facts of a Dia checkpoint that a batch depends on."""

    delay: tuple[int, ...]
    bos: int
    eos: int
    pad: int
    max_positions: int
    max_text: int

    @property
    def channels(self) -> int:
        return len(self.delay)

    @property
    def tail(self) -> int:
        """Positions beyond its frames that a whole clip takes as decoder input: BOS and the longest delay."""
        return max(self.delay) + 1


def layout_of(model_config) -> Layout:
    decoder = model_config.decoder_config
    return Layout(
        delay=tuple(model_config.delay_pattern),
        bos=decoder.bos_token_id,
        eos=decoder.eos_token_id,
        pad=decoder.pad_token_id,
        max_positions=decoder.max_position_embeddings,
        max_text=model_config.encoder_config.max_position_embeddings,
    )


def delayed(codes_tc: np.ndarray, layout: Layout, positions: int, final: bool) -> tuple[np.ndarray, np.ndarray]:
    """Decoder inputs and labels (L, C) of one clip, as the HF processor lays them out.

    Channel c: BOS up to its delay, its codes, its own EOS right after them, then padding; inputs are all but the
    last position and labels all but the first. A window that stops before the clip's end (`final` false) is the
    same stream cut at `positions`: no EOS, no tail, every label real.
    """
    frames = len(codes_tc)
    stream = np.full((frames + layout.tail + 1, layout.channels), layout.pad, dtype=np.int64)
    for channel, delay in enumerate(layout.delay):
        stream[: delay + 1, channel] = layout.bos
        stream[delay + 1 : delay + 1 + frames, channel] = codes_tc[:, channel]
        if final:
            stream[delay + 1 + frames, channel] = layout.eos
    inputs, labels = stream[:positions], stream[1 : positions + 1]
    return inputs, np.where((labels == layout.bos) | (labels == layout.pad), IGNORE, labels)


def undelayed(stream_lc: np.ndarray, layout: Layout, frames: int) -> np.ndarray:
    """Codes (T, C) out of a generated stream."""
    return np.stack([stream_lc[d + 1 : d + 1 + frames, c] for c, d in enumerate(layout.delay)], axis=1)


# ---- batches ---------------------------------------------------------------------------------------------------


class Clips:
    """A token dataset seen by one recipe: which clips, which part of each, with which text."""

    def __init__(self, tokens: TokenDataset, layout: Layout, config, tag_map: dict[str, int], train: bool):
        self.tokens, self.layout, self.config, self.tag_map, self.train = (
            tokens,
            layout,
            config,
            tag_map,
            train,
        )
        # The ids right after the codes are EOS, PAD and BOS: a larger codebook would reach into them.
        tokens.require(codec="dac", channels=layout.channels, codebook_size=layout.eos)
        if config.over_long == "crop" and config.text_mode == "speech":
            raise UserError("--over-long crop is for --text-mode tags: a transcript belongs to its whole clip.")
        if not config.max_seconds >= 0:
            raise UserError(f"--max-seconds {config.max_seconds:g} is negative or no number.")
        window = layout.max_positions
        if config.max_seconds:
            # frames a second come from the dataset's codec: never a literal
            rate = tokens.info["sample_rate"] / tokens.info["hop"]
            window = int(min(window, config.max_seconds * rate + layout.tail))
            if window <= layout.tail:
                raise UserError(f"--max-seconds {config.max_seconds:g} is less than one frame ({1 / rate:.3f} s).")
        self.window = window
        whole = tokens.frames.astype(np.int64) + layout.tail
        self.kept = tokens.rows_of_split(train)
        self.dropped = 0
        too_long = whole[self.kept] > window
        if too_long.any() and config.over_long != "crop":
            longest = int(self.kept[np.argmax(whole[self.kept])])
            if config.over_long == "error":
                raise UserError(
                    f"{tokens.folder}: clip {tokens.id(longest)!r} takes {whole[longest]} positions, over the limit"
                    f" of {window} (--max-seconds and the model's own); use --over-long drop, or crop for tag prompts."
                )
            self.kept, self.dropped = self.kept[~too_long], int(too_long.sum())
        self._check_texts()
        self.lengths = np.minimum(whole[self.kept], window)
        self.weights = _channel_weights(config.channel_weights, layout.channels)

    def __len__(self) -> int:
        return len(self.kept)

    def _check_texts(self) -> None:
        """Finds over-long, missing and broken texts before training. NFC can at most triple a text's bytes."""
        limit, too_long = self.layout.max_text, []
        for i in np.intersect1d(self.kept, self.tokens.texts_matching(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")):
            text_bytes(self._text(i), self.tag_map, self.tokens.id(i))  # says which character it is
        for i in np.intersect1d(self.kept, self.tokens.long_texts(limit // 3)):
            text = self._text(i)
            if self.config.text_mode == "tags":
                text = max(text, augment_tags(text, 0.0, 0), key=len)  # "a,b" is longer as "a, b"
            size = len(text_bytes(text, self.tag_map, self.tokens.id(i)))
            if size > limit:
                if self.config.over_long_text == "error":
                    raise UserError(
                        f"{self.tokens.folder}: the text of clip {self.tokens.id(i)!r} has {size} bytes, the model"
                        f" takes {limit}; shorten it or use --over-long-text drop."
                    )
                too_long.append(i)
        empty = np.setdiff1d(self.kept, self.tokens.long_texts(0))
        if len(empty) and not self.config.allow_empty_text:
            raise UserError(
                f"{self.tokens.folder}: clip {self.tokens.id(int(empty[0]))!r} has no text ({len(empty)} in all);"
                " add texts, or use --allow-empty-text."
            )
        self.kept = np.setdiff1d(self.kept, too_long)
        self.dropped += len(too_long)

    def _text(self, i: int) -> str:
        return with_speaker(self.tokens.text(i), self.config.text_mode)

    def part(self, clip: int, epoch: int) -> tuple[int, int, int, bool]:
        """First frame, end frame, decoder positions and whether the clip's true end is in."""
        i = self.kept[clip]
        frames, tail = int(self.tokens.frames[i]), self.layout.tail
        if frames + tail <= self.window:
            return 0, frames, frames + tail, True
        last = frames - (self.window - tail)  # from here the rest of the clip and its EOS fit
        start = 0
        if self.train:
            start = int(keyed.uniform(self.config.seed, epoch, self.tokens.id(i), "window") * (last + 1))
        if start + self.window > frames:
            return last, frames, self.window, True
        return start, start + self.window, self.window, False

    def target_weight(self, clips, epoch: int) -> float:
        """Sum of the token weights of these clips' targets: known from lengths alone, on every rank."""
        total = 0.0
        eos_extra = self.config.eos_weight - 1
        for clip in clips:
            start, end, positions, final = self.part(clip, epoch)
            if final:
                total += self.weights.sum() * (end - start + 1 + eos_extra)
            else:
                total += (self.weights * np.maximum(0, positions - np.array(self.layout.delay))).sum()
        return total

    def text(self, clip: int, epoch: int, step: int) -> np.ndarray:
        """Byte ids; all zero for a keyed share of the samples, which is what guidance compares with."""
        i, config = self.kept[clip], self.config
        name, text = self.tokens.id(i), self._text(i)
        if self.train and config.text_mode == "tags":
            text = augment_tags(text, config.tag_dropout, config.tag_limit, config.seed, epoch, name)
        ids = text_bytes(text, self.tag_map, name)
        if self.train:
            key = (config.seed, step) if config.uncond_scope == "step" else (config.seed, epoch, name)
            if keyed.uniform(*key, "uncond") < config.uncond:
                # Zero ids with the mask kept, as generation does it; a zero mask is another thing to the model.
                ids = np.zeros(len(ids), dtype=np.uint8)
        return ids if len(ids) else np.zeros(1, dtype=np.uint8)

    def batch(self, clips, epoch: int = 0, step: int = 0) -> dict:
        """Right-padded tensors of these clips."""
        layout = self.layout
        texts, sequences, names = [], [], []
        for clip in clips:
            start, end, positions, final = self.part(clip, epoch)
            codes = self.tokens.codes(self.kept[clip])[start:end]
            name = self.tokens.id(self.kept[clip])
            # An id of another channel's range would silently read that channel's embedding.
            if codes.min() < 0 or codes.max() >= self.tokens.info["codebook_size"]:
                code = min(codes.min(), 0) or codes.max()
                raise UserError(f"{self.tokens.folder}: clip {name!r} holds the code {code}, out of range.")
            texts.append(self.text(clip, epoch, step))
            sequences.append(delayed(codes, layout, positions, final))
            names.append(name)
        input_ids, attention_mask = pad_texts(texts)
        longest = max(len(inputs) for inputs, _ in sequences)
        ids = np.full((len(clips), longest, layout.channels), layout.pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORE)
        mask = np.zeros((len(clips), longest), dtype=np.int64)
        for row, (inputs, targets) in enumerate(sequences):
            ids[row, : len(inputs)], labels[row, : len(targets)], mask[row, : len(inputs)] = (
                inputs,
                targets,
                1,
            )
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": torch.from_numpy(ids),
            "decoder_attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
            "ids": names,
            "positions": mask.size,
        }

    def id(self, clip: int) -> str:
        return self.tokens.id(self.kept[clip])

    def fingerprint(self) -> dict:
        return {"data": self.tokens.fingerprint()}

    def warn(self) -> None:
        """Says what trains but is probably not meant."""
        if self.dropped:
            say(f"warning: {self.dropped} clips of {self.tokens.folder} are too long and left out")
        if self.config.uncond == 0 and self.train:
            say("warning: --uncond 0 trains no unconditional rows: guidance above 1 will sound worse")
        if self.config.text_mode == "speech":
            odd = self.tokens.texts_matching(r"^\s*\[S2\]|\[S1\][^\[]*\[S1\]|\[S2\][^\[]*\[S2\]")
            if len(odd):
                say(f"warning: in {len(odd)} texts the speakers do not begin with [S1] or do not alternate")


class WithRehearsal:
    """Clips to learn and, counted on after them, clips not to forget. A micro-batch holds only one kind (plan.Mix)."""

    def __init__(self, clips: Clips, rehearsal: Clips):
        self.parts = (clips, rehearsal)
        self.config, self.layout, self.weights = clips.config, clips.layout, clips.weights
        self.lengths = np.concatenate([clips.lengths, rehearsal.lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def _own(self, chosen) -> tuple[Clips, np.ndarray]:
        chosen, first = np.asarray(chosen), len(self.parts[0])
        return (self.parts[1], chosen - first) if chosen[0] >= first else (self.parts[0], chosen)

    def batch(self, chosen, epoch: int = 0, step: int = 0) -> dict:
        clips, own = self._own(chosen)
        return clips.batch(own, epoch, step)

    def target_weight(self, chosen, epoch: int) -> float:
        clips, own = self._own(chosen)
        return clips.target_weight(own, epoch)

    def id(self, clip: int) -> str:
        clips, (own,) = self._own([clip])
        return clips.id(own)

    def fingerprint(self) -> dict:
        return {"data": self.parts[0].tokens.fingerprint(), "rehearsal": self.parts[1].tokens.fingerprint()}


def _channel_weights(name: str, channels: int) -> np.ndarray:
    values = CHANNEL_WEIGHTS[name]
    return np.array([values[min(c, len(values) - 1)] for c in range(channels)])


def build_data(path: str, model, config, tag_map: dict[str, int], ranks: Ranks, train: bool) -> Clips | None:
    """A token dataset, checked against the model and, on the first rank, for damage; None without a path."""
    if not path:
        return None
    tokens = TokenDataset(path)
    if config.verify_data:
        on_first(tokens.verify, ranks)
    clips = Clips(tokens, layout_of(base_model(model).config), config, tag_map, train)
    if not len(clips):
        raise UserError(f"{path} holds no clip to {'train' if train else 'evaluate'} on.")
    clips.warn()
    return clips


def pad_texts(texts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, S) padded right with 0, and the mask: from lengths, because unconditional rows are all 0 too."""
    longest = max(1, max(map(len, texts)))
    ids = np.zeros((len(texts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


# ---- loss and evaluation ---------------------------------------------------------------------------------------


def base_model(model):
    """The DiaForConditionalGeneration inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def labelled_states(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoder states (N, D) and labels (N, C) of the positions that have at least one target."""
    hidden_bld = base_model(model).model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=batch["decoder_input_ids"],
        decoder_attention_mask=batch["decoder_attention_mask"],
        use_cache=False,
    )[0]
    labels_nc = batch["labels"].flatten(0, 1)
    rows = (labels_nc != IGNORE).any(-1).nonzero().squeeze(-1)
    return hidden_bld.flatten(0, 1)[rows], labels_nc[rows]


def dia_loss(model, batch, channel_weights: torch.Tensor, eos_weight: float, eos: int):
    """Weighted sum of the token losses; per channel the plain sum and the number of targets."""
    hidden_nd, labels_nc = labelled_states(model, batch)
    real = labels_nc != IGNORE
    weights_nc = real * channel_weights.to(hidden_nd.device)
    if eos_weight != 1:
        weights_nc = torch.where(labels_nc == eos, weights_nc * eos_weight, weights_nc)
    loss, losses_nc = codebook_loss(base_model(model).logits_dense, hidden_nd, labels_nc, weights_nc)
    return loss, torch.stack([losses_nc.sum(0), real.sum(0).float()]).detach()


def compute_loss(model, batch, clips: Clips):
    """Weighted loss sum over the batch's targets; per channel the plain sum and the count."""
    weights = torch.as_tensor(clips.weights, dtype=torch.float32)
    return dia_loss(model, batch, weights, clips.config.eos_weight, clips.layout.eos)


def evaluate_and_log(model, clips: Clips | None, run: Run, step: int, to_device) -> float | None:
    """Metrics with the averaged weights, if there are any; returns the score that chooses the best checkpoint.

    That is the loss, but no score for a model that would not stop speaking (--min-eos-recall).
    """
    if not clips:
        return None
    with run.average.in_place():
        values = evaluate(model, clips, run.ranks, to_device)
    run.tracker.event("eval", step, **values)
    say(f"evaluation at step {step}: loss {values['loss']:.4f}  text gap {values['text_gap']:.4f}"
        f"  end recall {values['eos_recall']:.2f}  end false alarm {values['eos_false_alarm']:.4f}")  # fmt: skip
    return values["loss"] if values["eos_recall"] >= clips.config.min_eos_recall else None


@torch.no_grad()
def evaluate(model, clips: Clips, ranks: Ranks, to_device) -> dict[str, float]:
    """Teacher-forced metrics over all clips, the same for any number of ranks (sums are reduced, not means).

    eos_recall and eos_false_alarm foretell endless and cut-off outputs: generation stops exactly where channel 0's
    most likely id is EOS. text_gap is how much worse the loss gets without the text; near 0 the text is ignored.
    """
    plan = Plan(clips.lengths, clips.config.micro_tokens, seed=0, jitter=0)
    batches = [plan.micro_batch(number)[1] for number in range(plan.per_epoch)]
    channels, eos = clips.layout.channels, clips.layout.eos
    sums = torch.zeros(3 * channels + 5, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for turn in range(-(-len(batches) // ranks.world)):
        number = turn * ranks.world + ranks.rank
        # Under ZeRO-3 every rank must run every turn: one without a batch repeats the first and adds nothing.
        batch = to_device(clips.batch(batches[number if number < len(batches) else 0]))
        losses, best, labels = _token_stats(model, batch)
        mute = batch | {"input_ids": torch.zeros_like(batch["input_ids"])}
        mute_losses, *_ = _token_stats(model, mute)
        if number < len(batches):
            real, is_eos = labels != IGNORE, labels == eos
            says_eos, at_end = best[:, 0] == eos, is_eos[:, 0]
            sums += torch.cat(
                [
                    torch.stack([losses.sum(0), real.sum(0), ((best == labels) & real).sum(0)])
                    .double()
                    .flatten()
                    .cpu(),
                    torch.tensor(
                        [
                            mute_losses.sum(),
                            losses[is_eos].sum(),
                            at_end.sum(),
                            (says_eos & at_end).sum(),
                            (says_eos & ~at_end & real[:, 0]).sum(),
                        ],
                        dtype=torch.float64,
                    ),
                ]
            )
    model.train(was_training)
    sums = all_sum(sums, ranks)
    loss, count, correct = sums[: 3 * channels].reshape(3, channels)
    mute, eos_loss, ends, hits, alarms = sums[3 * channels :]
    ends_all = max(ends * channels, 1)
    values = {
        "loss": loss.sum() / count.sum(),
        "accuracy": correct.sum() / count.sum(),
        "text_gap": (mute - loss.sum()) / count.sum(),
        "eos_loss": eos_loss / ends_all,
        "eos_recall": hits / max(ends, 1),
        "eos_false_alarm": alarms / max(count[0] - ends, 1),
    }
    values |= {f"loss_channel_{c}": loss[c] / max(count[c], 1) for c in range(channels)}
    return {name: float(value) for name, value in values.items()}


def _token_stats(model, batch):
    hidden_nd, labels_nc = labelled_states(model, batch)
    losses, best = codebook_stats(base_model(model).logits_dense, hidden_nd, labels_nc)
    return losses, best, labels_nc


# ---- speaking --------------------------------------------------------------------------------------------------


@torch.no_grad()
def speak(
    model, texts: list[np.ndarray], max_frames: int, seed: int, device: torch.device | None = None, **sampling
) -> list[tuple[np.ndarray, bool]]:
    """Codes (T, C) for byte-id texts, and whether each ended by itself. Greedy unless `sampling` says otherwise."""
    dia = base_model(model)
    layout = layout_of(dia.config)
    device = device or next(dia.parameters()).device  # offloaded parameters are not where the model computes
    input_ids, attention_mask = pad_texts(texts)
    # The delay is primed as the processor does it: BOS up to each channel's delay, PAD (= free) after it.
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


def sample(model, clips: Clips, folder: Path, step: int, ranks: Ranks, all_ranks_must_join: bool) -> list:
    """Speaks a few evaluation texts greedily, spread over all ranks; returns the decoders it started."""
    config = clips.config
    chosen = np.unique(np.linspace(0, len(clips) - 1, num=min(config.samples, len(clips)), dtype=int))
    prompts = [{"name": f"clip-{i:04d}", "text": clips.tokens.text(clips.kept[i]), "index": int(i)} for i in chosen]
    cap = config.sample_frames or int(1.5 * max(clips.tokens.frames))
    cap = min(cap, clips.layout.max_positions - clips.layout.tail - 1)
    codec = clips.tokens.info["weights"]
    rate = clips.tokens.info["sample_rate"] / clips.tokens.info["hop"]

    def speak_mine(mine: list[dict]) -> list:
        texts = [clips.text(prompt["index"], 0, 0) for prompt in mine]
        seed = keyed.key64(config.seed, step, "sample") % 2**63
        spoken = speak(model, texts, cap, seed, ranks.device)
        results = []
        for prompt, text, (codes, ended) in zip(mine, texts, spoken, strict=True):
            truth = clips.tokens.codes(clips.kept[prompt["index"]])
            shared = min(len(codes), len(truth))
            facts = {
                "seconds": len(codes) / rate,
                "seconds_a_byte": len(codes) / rate / max(1, len(text)),
                "recorded_seconds_a_byte": len(truth) / rate / max(1, len(text)),
                "ended_by_eos": ended,
                "repeats": samples.repeat_share(codes),
                "codes_as_recorded": float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0,
            }
            results.append((codes, facts))
        return results

    def recorded(prompt: dict) -> np.ndarray:
        return clips.tokens.codes(clips.kept[prompt["index"]])

    return samples.make_and_decode(prompts, speak_mine, recorded, codec, folder, step, ranks, all_ranks_must_join)


# ---- loading ---------------------------------------------------------------------------------------------------


def load_dia(path: str, dtype: torch.dtype, quantization=None):
    """DiaForConditionalGeneration from a hub id or a local folder."""
    from transformers import DiaConfig, DiaForConditionalGeneration

    options = {"quantization_config": quantization} if quantization else {}
    return load_pretrained(DiaForConditionalGeneration, DiaConfig, path, dtype, **options)
