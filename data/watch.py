"""Decode and score the samples of a run while it trains.

    python data/watch.py runs/NAME --once --codec-weights DIR --wer pocketsphinx --names clip-0000 clip-0007

The recipes start it for --wer, --similarity, --dnsmos, --embedder and --best-by. It watches runs/NAME/samples: as soon
as a folder holds the codes of all --names, they become audio (as by data/decode.py) and are scored (as by
data/score.py). runs/NAME/scores/FOLDER.json then holds their means and each sample's own scores. The recordings and
their codec resynthesis (original, recorded) are scored once, as the best that a model can be expected to reach.

--embedder DIR: a local audio model in transformers format. `frechet` is the distance between its embeddings of the
samples and of the recorded clips; `caption`, with a model such as CLAP, how well samples and their captions agree.
"""

import argparse
import json
import os
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

POLL_SECONDS = 1.0
# What a sample gets that is silent or cannot be decoded: leaving it out would make a silent model the best.
WORST = {"wer": 1.0, "similarity": 0.0, "dnsmos": 1.0, "caption": 0.0}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("--names", nargs="+", required=True, metavar="NAME", help="names of the samples that every step has")
    add("--codec-weights", metavar="PATH_OR_ID", help="codec of the samples; without it, none are decoded")
    add("--embedder", metavar="FOLDER", help="audio embedding model, such as CLAP, for frechet and caption")
    add("--once", action="store_true", help="score what is there and exit")
    score.add_measures(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    if not args.run.is_dir():
        raise UserError(f"{args.run} is not a run folder")
    watcher = Watcher(args)
    (args.run / "scores").mkdir(parents=True, exist_ok=True)
    (args.run / "scores" / "ready").touch()  # everything could be loaded
    while True:
        folder = watcher.next_folder()
        if folder:
            watcher.work(folder)
        elif args.once:
            return
        else:
            time.sleep(POLL_SECONDS)


class Watcher:
    """The loaded codec and models, and what is left to do."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.samples, self.scores = args, args.run / "samples", args.run / "scores"
        self.measures = score.load_measures(args)
        self.embedder = load_embedder(args.embedder) if args.embedder else None
        self.codec = load_codec(find_weights(args.codec_weights)) if args.codec_weights else None
        self.recorded = None  # embeddings of the recorded clips

    def next_folder(self) -> Path | None:
        """The next complete folder without scores. A run writes `recorded` last of all that is compared with."""
        recorded = self.samples / "recorded"
        if not self.complete(recorded):
            return None
        for folder in [recorded, self.samples / "original", *sorted(self.samples.glob("step-*"))]:
            ready = folder.is_dir() if folder.name == "original" else self.complete(folder)
            if ready and not (self.scores / f"{folder.name}.json").exists():
                return folder
        return None

    def complete(self, folder: Path) -> bool:
        return all(
            read_facts(folder / f"{name}.json") and (folder / f"{name}.npy").exists() for name in self.args.names
        )

    def work(self, folder: Path) -> None:
        """Decodes and scores one folder; scores/FOLDER.json appears whole."""
        if folder.name == "recorded" and (self.samples / "reference").is_dir():
            self.decode(self.samples / "reference")
        self.decode(folder)
        scores, embeddings = {}, []
        for name in self.args.names:
            file = folder / f"{name}.wav"
            if folder.name == "original" and not file.is_file():
                continue
            scores[name] = self.score(file, embeddings)
        means = self.means(folder, scores)
        # Without its silent samples, a step's set would seem too good.
        if embeddings and (folder.name == "recorded" or len(embeddings) == len(scores)):
            means |= self.frechet(folder.name, embeddings)
        write_json(self.scores / f"{folder.name}.json", {"means": means, "samples": scores})
        print(f"{folder.name}: {json.dumps(means)}", flush=True)

    def decode(self, folder: Path) -> None:
        files = [file for file in sorted(folder.glob("*.npy")) if not file.with_suffix(".wav").exists()]
        for file in files if self.codec else []:
            try:
                decode.decode_files([file], self.codec)
            except UserError as error:  # the others can be heard
                print(f"warning: {error}", flush=True)

    def score(self, file: Path, embeddings: list) -> dict:
        """Scores of one sample, also added to the .json next to it. Its embeddings are appended to `embeddings`."""
        asked = {*self.measures, *(["caption"] if self.embedder and self.embedder.caption else [])}
        facts = read_facts(file.with_suffix(".json")) or {}
        try:
            if not file.is_file():
                raise UserError("no sound")
            scores = score.score(file, [self.args.run / path for path in self.args.references], self.measures)
            if self.embedder:
                windows = self.embedder.sound(score.read_mono(file, self.embedder.rate))
                embeddings.append(windows)
                if self.embedder.caption and facts.get("text"):
                    scores["caption"] = agreement(windows, self.embedder.caption(facts["text"]))
        except Exception as error:  # silence is a result too, and no sample may end the scoring of the others
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

    def frechet(self, name: str, embeddings: list) -> dict[str, float]:
        rows = np.concatenate(embeddings)
        if name == "recorded":
            self.recorded = rows
        elif self.recorded is None:  # scored by an earlier process
            self.recorded = np.concatenate([self.embed_recorded(sample) for sample in self.args.names])
        return {} if name == "recorded" else {"frechet": frechet(rows, self.recorded)}

    def embed_recorded(self, name: str):
        return self.embedder.sound(score.read_mono(self.samples / "recorded" / f"{name}.wav", self.embedder.rate))


def read_facts(file: Path) -> dict | None:
    """The JSON object in a file; None if it is not there, or not yet whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the GPUs belong to training
    run_command(main)
