"""Decode and score the samples of a run. Recipes start it and write a line to its input for each folder of samples:

    echo step-00000500 clip-0000 clip-0007 | python data/watch.py runs/NAME --codec-weights DIR --wer pocketsphinx

The codes of these samples in runs/NAME/samples/FOLDER become audio (as by data/decode.py) and are scored (as by
data/score.py); runs/NAME/scores/FOLDER.json then holds the means and the scores of each sample. It ends with its input.

--embedder DIR: a local audio model in transformers format. `frechet` is the distance between its embeddings of the
samples and of the folder `recorded`, which comes first; `caption`, with a model such as CLAP, how well samples match
their captions.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import decode
import numpy as np
import score

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from common.errors import UserError, command_parser, run_command
from lib.codec import find_weights, load_codec
from lib.embedding import agreement, frechet, load_embedder
from lib.store import write_json

VISIBLE_SECONDS = 60.0  # within which files of other nodes must be visible; NFS takes up to a minute
# What a sample gets that is silent or cannot be decoded: leaving it out would make a silent model the best.
WORST = {"wer": 1.0, "similarity": 0.0, "dnsmos": 1.0, "caption": 0.0}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("--codec-weights", metavar="PATH_OR_ID", help="codec of the samples; without it, none are decoded")
    add("--embedder", metavar="FOLDER", help="audio embedding model, such as CLAP, for frechet and caption")
    score.add_measures(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    if not args.run.is_dir():
        raise UserError(f"{args.run} is not a run folder")
    watcher = Watcher(args)
    (args.run / "scores").mkdir(parents=True, exist_ok=True)
    (args.run / "scores" / "ready").touch()  # everything could be loaded
    for line in sys.stdin:
        folder, *names = line.split()
        watcher.work(args.run / "samples" / folder, names)


class Watcher:
    """The loaded codec and models."""

    def __init__(self, args: argparse.Namespace):
        self.run, self.references = args.run, [args.run / path for path in args.references]
        self.measures = score.load_measures(args)
        self.embedder = load_embedder(args.embedder) if args.embedder else None
        self.codec = load_codec(find_weights(args.codec_weights)) if args.codec_weights else None
        self.recorded = None  # embeddings of the recorded clips

    def work(self, folder: Path, names: list[str]) -> None:
        """Decodes and scores one folder; scores/FOLDER.json appears whole."""
        until = time.monotonic() + VISIBLE_SECONDS
        while not all(read_facts(folder / f"{name}.json") for name in names) and time.monotonic() < until:
            time.sleep(0.1)
        if folder.name == "recorded" and (folder.parent / "reference").is_dir():
            self.decode(folder.parent / "reference")
        self.decode(folder)
        scores, embeddings = {}, []
        for name in names:
            scores[name] = self.score(folder / f"{name}.wav", embeddings)
        means = self.means(folder, scores)
        if folder.name == "recorded" and embeddings:
            self.recorded = np.concatenate(embeddings)
        # Without its silent samples, a step's set would seem too good.
        elif self.recorded is not None and len(embeddings) == len(scores):
            means["frechet"] = frechet(np.concatenate(embeddings), self.recorded)
        write_json(self.run / "scores" / f"{folder.name}.json", {"means": means, "samples": scores})
        print(f"{folder.name}: {json.dumps(means)}", flush=True)

    def decode(self, folder: Path) -> None:
        files = [file for file in sorted(folder.glob("*.npy")) if not file.with_suffix(".wav").exists()]
        for file in files if self.codec else []:
            try:
                codes = decode.read_codes(file)
                if not len(codes):
                    continue
                wave = decode.decode_codes(self.codec, codes, str(file))
            except UserError as error:  # the others can be heard
                print(f"warning: {error}", flush=True)
                continue
            decode.write_sound(file.with_suffix(".wav"), wave, self.codec.sample_rate)

    def score(self, file: Path, embeddings: list) -> dict:
        """Scores of one sample, also added to the .json next to it. Its embeddings are appended to `embeddings`."""
        facts = read_facts(file.with_suffix(".json")) or {}
        try:
            if not file.is_file():
                raise UserError("no sound")
            scores = score.score(file, self.references, self.measures)
            if self.embedder:
                windows = self.embedder.sound(score.read_mono(file, self.embedder.rate))
                embeddings.append(windows)
                if self.embedder.caption and facts.get("text"):
                    scores["caption"] = agreement(windows, self.embedder.caption(facts["text"]))
        except Exception as error:  # silence is a result too, and no sample may end the scoring of the others
            asked = {*self.measures, *(["caption"] if self.embedder and self.embedder.caption else [])}
            scores = {"unscored": str(error)} | {name: WORST[name] for name in WORST if name in asked}
        if facts:
            write_json(file.with_suffix(".json"), facts | scores)
        return scores

    def means(self, folder: Path, scores: dict[str, dict]) -> dict[str, float]:
        """Means over the samples, of their scores and of what the run noted when it generated them."""
        columns: dict[str, list[float]] = {}
        for name, values in scores.items():
            facts = read_facts(folder / f"{name}.json") or {}
            stopped = facts.get("ended", facts.get("ended_by_eos"))
            # An end before the first frame is silence, not a stop: else a model that says nothing would stop best.
            stopped = None if stopped is None else stopped and facts.get("seconds") != 0
            noted = {"stop_rate": stopped, "duration_ratio": facts.get("duration_ratio")}
            for key, value in ({key: values.get(key) for key in WORST} | noted).items():
                if value is not None:
                    columns.setdefault(key, []).append(float(value))
        return {key: sum(column) / len(column) for key, column in columns.items()}


def read_facts(file: Path) -> dict | None:
    """The JSON object in a file; None if it is not there, or not yet whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # the run handles those, and may wait for scores
        signal.signal(number, signal.SIG_IGN)
    run_command(main)
