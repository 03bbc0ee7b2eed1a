"""Check a dataset before training on it.

    python data/check.py tokens/train tokens/eval
    python data/check.py tokens/train --listen 5 --codec-weights descript/dac_44khz

Prints hours, lengths, speakers and texts, and every problem for which training would refuse the dataset (exit code 1).
Several datasets are also compared: the same id, group or audio in two splits is a leak. The clips of --listen are
written to DIR.check.
"""

import argparse
import hashlib
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from decode import decode_codes, write_wav

from common.codec import hash_weights
from common.errors import UserError, between, command_parser, run_command
from lib import store
from lib.clips import REFERENCES
from lib.codec import find_weights, load_codec

CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")  # not tabs and line ends (become blanks) or NUL (dropped)
MAX_NAMES = 5  # ids printed per line
CHARACTERS_PER_SECOND = (2, 40)  # outside this range, the text probably belongs to other audio
TEXT_BYTES = {"dac": 1024}  # Dia's text encoder
FRAMES = {"dac": 3056}  # Dia's decoder positions, 3072, minus the longest delay and BOS


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("datasets", nargs="+", type=Path, metavar="DIR", help="datasets made by encode.py or pairs.py")
    add(
        "--listen",
        type=between(int, 0),
        default=0,
        metavar="K",
        help="write K evenly spaced clips as .wav (default: 0)",
    )
    add("--codec-weights", metavar="PATH_OR_ID", help="codec for --listen (default: the one named in dataset.json)")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    problems, seen = [], Seen()
    for folder in args.datasets:
        info = store.open_dataset(folder)
        print(f"{folder}")
        dataset_problems = damaged_files(folder, info)
        if not dataset_problems:  # the rows of a damaged file are not worth checking
            check_rows = check_pairs if info.get("kind") == "pairs" else check_tokens
            dataset_problems = check_rows(folder, info, seen)
            if args.listen:
                listen(folder, info, args.listen, args.codec_weights)
        for problem in dataset_problems:
            print(f"  PROBLEM {problem}")
        problems += dataset_problems
    print(f"{len(problems)} problems" if problems else "no problems")
    return 1 if problems else 0


def damaged_files(folder: Path, info: dict) -> list[str]:
    problems = []
    for entry in info["files"]:
        file = folder / entry["name"]
        if not file.is_file():
            problems.append(f"{entry['name']} is missing")
        elif file.stat().st_size != entry["bytes"]:
            problems.append(f"{entry['name']} has {file.stat().st_size} bytes instead of {entry['bytes']}")
        elif store.hash_file(file) != entry["sha256"]:
            problems.append(f"{entry['name']} is damaged: its SHA-256 does not match dataset.json")
    return problems


# ---------------------------------------------------------------- tokens


def check_tokens(folder: Path, info: dict, seen: "Seen") -> list[str]:
    """Print what is in a token dataset and return its problems; `seen` holds the clips of earlier datasets."""
    missing = {"codec", "sample_rate", "hop", "codebooks", "codebook_size", "channels", "rows"} - info.keys()
    columns = store.read_arrow(folder / info["files"][0]["name"])[0].schema.names
    missing |= {"id", "text", "codes", "frames"} - set(columns)
    if missing:
        return [f"fields missing in dataset.json or columns missing in the files: {', '.join(sorted(missing))}"]
    problems = defaultdict(list)  # what training refuses -> ids
    notes = defaultdict(list)  # what is odd, but training accepts -> ids
    rate = info["sample_rate"] / info["hop"]
    seconds, ids, refs, splits = [], Counter(), {}, {}
    counts = {"speaker": Counter(), "lang": Counter(), "split": Counter()}
    low, high, text_bytes = 1 << 15, -1, 0
    for row in store.read_rows(folder, info):
        id, codes, frames, text = row["id"], row["codes"], row["frames"], row["text"] or ""
        ids[id] += 1
        splits[id] = row.get("split")
        refs[id] = [row.get(name) for name in REFERENCES]
        for name, counter in counts.items():
            if row.get(name):
                counter[row[name]] += 1
        if frames <= 0 or not len(codes):
            problems["without frames"].append(id)
            continue
        if len(codes) != frames * info["channels"]:
            problems[f"without {info['channels']} codes per frame"].append(id)
        low, high = min(low, codes.min()), max(high, codes.max())
        if codes.min() < 0 or codes.max() >= info["codebook_size"]:
            problems[f"with codes outside 0..{info['codebook_size'] - 1}"].append(id)
        length, texts = frames / rate, row.get("texts") or [text]
        size = max(len(unicodedata.normalize("NFC", each).encode()) for each in texts)
        seconds.append(length)
        text_bytes = max(text_bytes, size)
        if size > TEXT_BYTES.get(info["codec"], size):
            problems[f"with a text over {TEXT_BYTES[info['codec']]} bytes"].append(id)
        if frames > FRAMES.get(info["codec"], frames):
            problems[f"longer than {FRAMES[info['codec']]} frames (training needs --over-long)"].append(id)
        if any(CONTROL.search(each) for each in texts):
            problems["with a control character in the text"].append(id)
        if not text:
            problems["without text"].append(id)
        elif not CHARACTERS_PER_SECOND[0] <= len(text) / length <= CHARACTERS_PER_SECOND[1]:
            notes["outside {} to {} characters per second".format(*CHARACTERS_PER_SECOND)].append(id)
        seen.compare(codes, (folder, id, row.get("split")), problems, notes)
        for what in ("group", "speaker"):
            if row.get(what):
                seen.add_name(what, row[what], (folder, id, row.get("split")))
    problems["with a duplicate id"] = [id for id, count in ids.items() if count > 1]
    for id, named in refs.items():
        if any(ref and (ref not in ids or ref == id or splits[ref] != splits[id]) for ref in named):
            problems["whose reference is missing, the clip itself, or in another split"].append(id)
    weights = f"weights {info.get('weights')} ({(info.get('weights_sha256') or 'unknown')[:12]})"
    print(f"  codec {info['codec']}, {info['sample_rate']} Hz, {rate:.4g} frames/s, {info['channels']} channels")
    print(f"  {weights}")
    hours = sum(seconds) / 3600
    print(f"  {sum(ids.values())} clips, {hours:.3f} h, codes {low} to {high}, texts up to {text_bytes} bytes")
    for name, counter in counts.items():
        if counter:
            most = ", ".join(f"{value} {count}" for value, count in counter.most_common(MAX_NAMES))
            more = ", ..." if len(counter) > MAX_NAMES else ""
            print(f"  {name}: {len(counter)} ({most}{more})")
    problems["of a group that is also in another split"] = seen.shared_names("group", folder)
    notes["of a speaker who is also in another split, the first of each"] = seen.shared_names("speaker", folder)
    return report(seconds, problems, notes, sum(ids.values()), info["rows"])


class Seen:
    """The clips of all datasets so far. A split is a dataset's folder and the value in its column `split`."""

    def __init__(self):
        self.audio = {}  # hash of the audio -> (folder, id, split) of the first such clip
        self.ids = {}  # id -> folder of the first such clip
        self.names = {"group": {}, "speaker": {}}  # name -> split -> its first clip

    def compare(self, content: np.ndarray, clip: tuple, problems: dict, notes: dict) -> None:
        """Find duplicates: the same audio twice is a waste within one split, and a leak across two.

        `clip`: (dataset folder, id, split).
        """
        folder, id, split = clip
        if (first := self.ids.setdefault(id, folder)) != folder:
            problems["with the id of a clip in another dataset"].append(f"{id} in {first}")
        first_folder, first_id, first_split = self.audio.setdefault(hashlib.sha256(content.tobytes()).digest(), clip)
        if (first_folder, first_id) == (folder, id):
            return
        if (first_folder, first_split) == (folder, split):
            notes["with the same audio as another clip"].append(f"{id} = {first_id}")
        else:
            where = first_split or first_folder
            problems["with the same audio as a clip in another split"].append(f"{id} = {first_id} in {where}")

    def add_name(self, what: str, name: str, clip: tuple) -> None:
        folder, _, split = clip
        self.names[what].setdefault(name, {}).setdefault((folder, split), clip)

    def shared_names(self, what: str, folder: Path) -> list[str]:
        """The first clip of each group or speaker that is in this dataset and in another split."""
        lines = []
        for name, splits in self.names[what].items():
            *_, (last_folder, id, _) = splits.values()
            if len(splits) > 1 and last_folder == folder:
                first_folder, first_id, first_split = next(iter(splits.values()))
                lines.append(f"{id} ({name}, as {first_id} in {first_split or first_folder})")
        return lines


# ---------------------------------------------------------------- pairs


def check_pairs(folder: Path, info: dict, seen: Seen) -> list[str]:
    """Print what is in a dataset of noisy/clean pairs and return its problems."""
    problems, notes = defaultdict(list), defaultdict(list)
    seconds, ids, clipped = [], Counter(), 0
    for row in store.read_rows(folder, info):
        ids[row["id"]] += 1
        clean, noisy = row["clean"], row["noisy"]
        if not len(clean) or len(clean) != len(noisy) or len(clean) != row["samples"]:
            problems["that are empty or whose noisy and clean lengths differ"].append(row["id"])
            continue
        seconds.append(len(clean) / info["sample_rate"])
        clipped += bool(np.mean(np.abs(noisy.astype(np.int32)) >= 32767) > 0.001)
        if np.array_equal(clean, noisy):
            notes["whose noisy side equals the clean one"].append(row["id"])
        seen.compare(clean, (folder, row["id"], None), problems, notes)
    problems["with a duplicate id"] = [id for id, count in ids.items() if count > 1]
    print(f"  {len(ids)} pairs at {info['sample_rate']} Hz, {sum(seconds) / 3600:.3f} h, {clipped} clipped")
    return report(seconds, problems, notes, sum(ids.values()), info["rows"])


# ---------------------------------------------------------------- summary


def report(seconds: list[float], problems: dict, notes: dict, rows: int, expected: int) -> list[str]:
    """Print notes and lengths; returns the problems, one line each."""
    lines = [f"{len(ids)} clips {what}: {first_ids(ids)}" for what, ids in problems.items() if ids]
    if rows != expected:
        lines.append(f"dataset.json lists {expected} rows, but the files have {rows}")
    for what, ids in notes.items():
        if ids:
            print(f"  note: {len(ids)} clips {what}: {first_ids(ids)}")
    if seconds:
        show_lengths(np.asarray(seconds))
    return lines


def first_ids(ids: list[str]) -> str:
    return ", ".join(ids[:MAX_NAMES]) + (", ..." if len(ids) > MAX_NAMES else "")


def show_lengths(seconds: np.ndarray) -> None:
    """Print a histogram of the lengths."""
    counts, edges = np.histogram(seconds, bins=10)
    median, long = np.percentile(seconds, [50, 95])
    print(f"  seconds: {seconds.min():.2f} to {seconds.max():.2f}, median {median:.2f}, 95 % below {long:.2f}")
    for count, start, end in zip(counts, edges, edges[1:], strict=False):
        print(f"  {start:8.2f} to {end:8.2f} s {count:8d} {'#' * round(40 * count / counts.max())}")


def check_folder(folder: Path) -> Path:
    """DIR.check, next to the dataset."""
    path = folder.absolute().with_name(folder.absolute().name + ".check")
    path.mkdir(exist_ok=True)
    return path


def listen(folder: Path, info: dict, count: int, weights: str | None) -> None:
    """Write `count` evenly spaced clips as wav files."""
    numbers = set(np.linspace(0, info["rows"] - 1, min(count, info["rows"])).round().astype(int).tolist())
    codec = None
    if info.get("kind") != "pairs":
        if not (weights or info.get("weights")):
            raise UserError("--listen needs --codec-weights: dataset.json does not name the codec's weights")
        path = find_weights(weights) if weights else find_weights(info["weights"], info.get("weights_revision"))
        if info.get("weights_sha256") not in (None, hash_weights(path)):
            raise UserError(f"--codec-weights {weights or info['weights']} are not the weights that made {folder}")
        codec = load_codec(path)
    for number, row in enumerate(store.read_rows(folder, info)):
        if number in numbers:
            name = f"{number:06d}-" + "".join(c if c.isalnum() or c in "-_" else "_" for c in row["id"])[:80]
            if codec:
                wave = decode_codes(codec, row["codes"].reshape(-1, info["channels"]), row["id"])
            else:
                wave = np.stack([row["noisy"], row["clean"]]) / 32768  # left noisy, right clean
            write_wav(check_folder(folder) / f"{name}.wav", wave, info["sample_rate"])
            print(f"  {check_folder(folder) / name}.wav: {row.get('text', 'left noisy, right clean')}")


if __name__ == "__main__":
    run_command(main)
