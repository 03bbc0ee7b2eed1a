"""Speaking with Higgs Audio v2: generation, the guard between generated ids and the codec, samples of a run."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from common import keyed_random as keyed
from common import samples
from common.lora import base_model
from common.runtime import Ranks, all_sum
from models.higgs.data import Pairs
from models.higgs.layout import Layout, Row, collate, undelayed

# The official settings; at the readme's temperature of 0.3 users report speech that never stops.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
RAS = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
MIN_FRAMES = 4  # the codec cannot decode less
MAX_BAD_SHARE = 0.005


@dataclass
class Spoken:
    codes: np.ndarray  # (T, K), every id a code
    ended: bool  # by itself, all codebooks, before the cap
    bad_ids: int = 0  # ids that are no codes, inside the speech
    refused: str = ""  # why there is nothing to decode
    stream: np.ndarray = field(default=None, repr=False)  # as generated


def read_stream(stream_fk: np.ndarray, layout: Layout) -> Spoken:
    """Codes of a generated stream. Stray ids are counted and mended, never clipped in silence; too many, or too few
    frames, leave nothing to decode, which is a result and no exception."""
    ends = np.flatnonzero((stream_fk == layout.eos).all(axis=1))
    stop = int(ends[0]) if len(ends) else len(stream_fk)
    frames = max(0, stop - layout.codebooks)
    codes = undelayed(stream_fk, layout, frames)
    bad = (codes < 0) | (codes >= layout.bos)
    count, refused = int(bad.sum()), ""
    if frames < MIN_FRAMES:
        refused = f"empty: {frames} frames"
    elif count > MAX_BAD_SHARE * codes.size:
        refused = f"{count} of {codes.size} ids are no codes"
    for t, k in np.argwhere(bad):
        codes[t, k] = codes[t - 1, k] if t else 0
    if refused:
        codes = codes[:0]
    return Spoken(codes.astype(np.int16), bool(len(ends)), count, refused, stream_fk)


@torch.no_grad()
def speak(
    model, rows: list[Row], layout: Layout, max_frames: int, seed: int, device=None, greedy: bool = False
) -> list[Spoken]:
    """What the model says after these prompts (rows without an answer). Prompts are padded on the left."""
    higgs = base_model(model)
    device = device or next(higgs.parameters()).device  # offloaded parameters are not where the model computes
    batch = collate(rows, layout)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for row, size in enumerate(mask.sum(1).tolist()):
        ids[row], mask[row] = ids[row].roll(-size), mask[row].roll(-size)
    inputs = {"input_ids": ids, "attention_mask": mask}
    before = batch["audio_input_ids"].shape[1]
    if before:  # generation takes tensors of no frames for the decoding of one
        inputs |= {name: batch[name] for name in ("audio_input_ids", "audio_input_ids_mask")}
    was_training, settings = higgs.training, higgs.generation_config
    higgs.eval()
    # A folder's own settings would come on top: its repeat guard draws at random, even in greedy generation.
    higgs.generation_config = copy.deepcopy(settings)
    for name in (*SAMPLING, *RAS):
        setattr(higgs.generation_config, name, None if greedy else (SAMPLING | RAS)[name])
    higgs.generation_config.do_sample = not greedy
    higgs.generation_config.max_new_tokens = max_frames + layout.tail
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            streams = higgs.generate(**{name: value.to(device) for name, value in inputs.items()})
    finally:  # a failed sample must not leave the training without its dropout
        higgs.train(was_training)
        higgs.generation_config = settings
    spoken = [read_stream(stream, layout) for stream in streams[:, before:].cpu().numpy()]
    for one in spoken:
        one.codes = one.codes[:max_frames]  # a stream that was cut has room for a frame more than one that ends
    return spoken


# ---- samples of a run ------------------------------------------------------------------------------------------


def sample(model, pairs: Pairs, folder: Path, step: int, ranks: Ranks, all_ranks_must_join: bool) -> tuple[dict, list]:
    """Speaks the fixed prompts, spread over all ranks; returns the metrics of all, and the decoders it started.

    samples/ then holds, a prompt: reference, recording (where its file is known), its codes through the codec, and
    what the base (step 0) and each later stage say. stop_rate below 1: it runs on to the cap. duration_ratio: seconds
    a letter, against the same speaker's reference.
    """
    config, tokens = pairs.config, pairs.tokens
    chosen = np.unique(np.linspace(0, len(pairs) - 1, num=min(config.samples, len(pairs)), dtype=int))
    prompts = [{"name": f"clip-{i:04d}", "text": tokens.text(pairs.kept[i]), "index": int(i)} for i in chosen]
    cap = config.sample_frames or int(1.5 * tokens.frames[pairs.kept].max())
    codec, board = tokens.info["weights"], folder / "tensorboard"

    def speak_mine(mine: list[dict]) -> list:
        clips = [prompt["index"] for prompt in mine]
        seed = keyed.key64(config.seed, "sample") % 2**63  # the same at every step: only the weights differ
        rows = pairs.rows(clips, answer=False)
        spoken = speak(model, rows, pairs.layout, cap, seed, ranks.device, config.greedy)
        return [(s.codes, facts_of(s, pairs, clip)) for s, clip in zip(spoken, clips, strict=True)]

    here = folder / "samples" / f"step-{step:08d}"
    files = samples.take_samples(prompts, speak_mine, here, ranks, all_ranks_must_join)
    decoders = [samples.start_decoder([f for f in files if len(np.load(f))], codec, board, step)]
    if ranks.first and not (folder / "samples" / "recorded").exists():
        decoders.append(write_recorded(pairs, prompts, folder, codec, board))
    values = {}
    if config.similarity or config.wer:
        samples.wait_for(decoders)
        all_sum([0.0], ranks)  # the first rank's references can be heard
        values = score(files, folder, config)
    return reduce_facts(files, values, ranks), decoders


def facts_of(spoken: Spoken, pairs: Pairs, clip: int) -> dict:
    i = pairs.kept[clip]
    j, rate = pairs.reference[i], pairs.tokens.info["sample_rate"] / pairs.tokens.info["hop"]
    truth, codes = pairs.tokens.codes(i), spoken.codes
    voice = j if j >= 0 else i
    pace = pairs.tokens.frames[voice] / max(1, len(pairs.tokens.text(voice)))  # frames a letter
    shared = min(len(codes), len(truth))
    facts = {
        "seconds": len(codes) / rate,
        "duration_ratio": len(codes) / max(1, len(pairs.tokens.text(i))) / pace,
        "ended": spoken.ended,
        "repeats": samples.repeat_share(codes),
        "bad_ids": spoken.bad_ids,
        "codes_as_recorded": float((codes[:shared] == truth[:shared]).mean()) if shared else 0.0,
    }
    return facts | ({"refused": spoken.refused} if spoken.refused else {})


def reduce_facts(files: list[Path], values: dict, ranks: Ranks) -> dict[str, float]:
    """Means over the prompts of all ranks; `values`: further ones a file."""
    names = ("ended", "duration_ratio", "bad_ids", "similarity", "wer")
    sums = np.zeros((2, len(names)))
    for file in files:
        facts = json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) | values.get(file.stem, {})
        for column, name in enumerate(names):
            if facts.get(name) is not None:
                sums[:, column] += float(facts[name]), 1
    sums = all_sum(sums.ravel(), ranks).reshape(2, -1)
    found = {name: float(total / count) for name, total, count in zip(names, *sums, strict=True) if count}
    return {"stop_rate" if name == "ended" else name: value for name, value in found.items()}


def write_recorded(pairs: Pairs, prompts: list[dict], folder: Path, codec: str | None, board: Path):
    """The reference, the target's codes through the codec, and a link to the target's own file where it is known."""
    rows = [pairs.kept[prompt["index"]] for prompt in prompts]
    files = samples.write_all(folder / "samples" / "recorded", prompts, [(pairs.tokens.codes(i), {}) for i in rows])
    voices = [(prompt, pairs.reference[i]) for prompt, i in zip(prompts, rows, strict=True) if pairs.reference[i] >= 0]
    said = [(pairs.tokens.codes(j), {"said": pairs.tokens.text(j)}) for _, j in voices]
    files += samples.write_all(folder / "samples" / "reference", [prompt for prompt, _ in voices], said)
    originals = source_files(pairs.tokens)
    for prompt, i in zip(prompts, rows, strict=True):
        source = originals.get(pairs.tokens.label("source", i) or "")
        if source and source.suffix == ".wav" and source.is_file():
            truth = folder / "samples" / "original"
            truth.mkdir(exist_ok=True)
            (truth / f"{prompt['name']}.json").write_text(json.dumps(prompt), encoding="utf-8")
            (truth / f"{prompt['name']}.wav").write_bytes(source.read_bytes())
    return samples.start_decoder(files, codec, board, 0)


def source_files(tokens) -> dict[str, Path]:
    """`source` of whole files -> the file that data/encode.py read."""
    path = tokens.folder / "sources.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {f"{sha256}:None:None": Path(place) for place, _, sha256 in map(json.loads, lines)}


def score(files: list[Path], folder: Path, config) -> dict[str, dict]:
    """Similarity and word errors of this rank's samples, by a process of its own."""
    waves = [file.with_suffix(".wav") for file in files if file.with_suffix(".wav").is_file()]
    if not waves:
        return {}
    script = Path(__file__).resolve().parents[3] / "data" / "score.py"
    command = [sys.executable, script, "--references", folder / "samples" / "reference"]
    command += ["--similarity", config.similarity] if config.similarity else []
    command += ["--wer", config.wer] if config.wer else []
    done = subprocess.run([*command, *waves], capture_output=True, text=True, check=False)
    if done.returncode:  # never stops a training
        reason = "".join(done.stderr.strip().splitlines()[-1:])
        print(f"warning: samples could not be scored: {reason}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])
