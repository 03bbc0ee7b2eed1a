"""Samples of a run: prompts are dealt to all ranks, which write codes (.npy) and facts (.json).

A training process never loads a codec: data/watch.py makes the audio, see common/sample_scores.py.
"""

import json
from pathlib import Path

import numpy as np

from common.runtime import Process


def take_samples(prompts: list[dict], speak, folder: Path, process: Process, all_ranks_must_join: bool) -> list[Path]:
    """Generates this rank's share of `prompts` ({"name", "text", ...}); returns the files of codes it wrote.

    `speak(prompts)` returns codes and facts per prompt. A failure is printed and does not stop training. Under ZeRO-3
    every rank must run the model: a rank without a prompt generates the first one and discards it, and a failure on one
    rank would hang the others, so it is raised.
    """
    share = prompts[process.rank :: process.world]
    if not share and not all_ranks_must_join:
        return []
    try:
        spoken = speak(share or prompts[:1])
    except Exception as error:  # whatever goes wrong in generation, training continues
        if all_ranks_must_join and process.world > 1:
            raise
        print(f"warning: rank {process.rank} could not make samples: {error!r}", flush=True)
        return []
    return write_all(folder, share, spoken)


def choose_prompts(clips) -> list[dict]:
    """The evaluation clips that samples are made of, the same at every step."""
    count = min(clips.config.samples, len(clips))
    chosen = np.unique(np.linspace(0, len(clips) - 1, num=count, dtype=int))
    return [{"name": f"clip-{i:04d}", "text": clips.tokens.text(clips.kept[i]), "index": int(i)} for i in chosen]


def make_samples(
    clips, prompts: list[dict], speak, run: Path, step: int, process: Process, all_ranks_must_join: bool
) -> list[Path]:
    """Makes the samples of one step and, once per run, writes the recordings to compare them with; returns the files of
    codes of this rank's samples."""
    if process.is_main:
        write_recorded(clips, prompts, run / "samples")
    return take_samples(prompts, speak, run / "samples" / f"step-{step:08d}", process, all_ranks_must_join)


def write_recorded(clips, prompts: list[dict], folder: Path) -> None:
    """Writes the codes of the prompts' clips to recorded/, unless they are there, and copies their own files, if they
    are known, to original/."""
    tokens, truth = clips.tokens, folder / "recorded"
    if all((truth / f"{prompt['name']}.json").exists() for prompt in prompts):
        return
    sources = source_files(tokens)
    for prompt in prompts:
        source = sources.get(tokens.label("source", clips.kept[prompt["index"]]) or "")
        if source and source.suffix == ".wav" and source.is_file():
            original = folder / "original"
            original.mkdir(parents=True, exist_ok=True)
            (original / f"{prompt['name']}.json").write_text(json.dumps(prompt), encoding="utf-8")
            (original / f"{prompt['name']}.wav").write_bytes(source.read_bytes())
    write_all(truth, prompts, [(tokens.codes(clips.kept[prompt["index"]]), {}) for prompt in prompts])


def source_files(tokens) -> dict[str, Path]:
    """The file that data/encode.py read for each value of the column `source`; only for clips that are whole files."""
    path = tokens.folder / "sources.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {f"{sha256}:None:None": Path(place) for place, _, sha256 in map(json.loads, lines)}


def write_all(folder: Path, prompts: list[dict], spoken: list) -> list[Path]:
    """Writes codes and facts of each prompt; a failing disk is only a warning."""
    try:
        return [write_codes(folder, prompt, *result) for prompt, result in zip(prompts, spoken, strict=False)]
    except OSError as error:
        print(f"warning: samples could not be written to {folder}: {error}", flush=True)
        return []


def write_codes(folder: Path, prompt: dict, codes: np.ndarray, facts: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prompt['name']}.npy"
    np.save(path, codes, allow_pickle=False)
    path.with_suffix(".json").write_text(json.dumps(prompt | facts, indent=2) + "\n", encoding="utf-8")
    return path


def repeat_share(codes: np.ndarray) -> float:
    """Fraction of frames equal to the one before; near 1 the model is stuck on one sound."""
    return float((codes[1:] == codes[:-1]).all(axis=1).mean()) if len(codes) > 1 else 0.0


def write_wave(folder: Path, facts: dict, wave: np.ndarray, rate: int) -> None:
    """Writes a waveform as .wav and its facts as .json, named by facts["name"]. A failing disk is only a warning."""
    import soundfile

    path = folder / f"{facts['name']}.wav"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, wave, rate, subtype="FLOAT")
        path.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"warning: sample {path} could not be written: {error}", flush=True)
