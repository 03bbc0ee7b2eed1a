"""Look at a dataset before training on it.

    python data/check.py tokens/train tokens/eval
    python data/check.py tokens/train --listen 5 --codec-weights descript/dac_44khz

Prints hours, lengths, speakers, texts and everything that training would refuse (exit code 1). Several
datasets are also compared: the same sound in two splits is a leak. A picture of the lengths and the sounds
to listen to go to DIR.check.
"""

import argparse
import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from lib.errors import UsageError, run

CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")  # tabs and line ends become blanks, NUL is dropped
NAMED = 5  # how many ids a line names
CHARACTERS_PER_SECOND = (2, 40)  # outside: text and sound hardly belong together
TEXT_BYTES = {"dac": 1024}  # Dia's text encoder
FRAMES = {"dac": 3056}  # Dia's decoder inputs, 3072, less the longest delay and BOS


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("datasets", nargs="+", type=Path, metavar="DIR", help="datasets of encode.py or pairs.py")
    add("--listen", type=int, default=0, metavar="K", help="write K evenly spread items as wav (default: 0)")
    add("--codec-weights", metavar="PATH_OR_ID", help="codec for --listen (default: the one in dataset.json)")
    return parser.parse_args(argv)


def main() -> int:
    from lib import store

    args = parse_args()
    problems, seen = [], {}
    for folder in args.datasets:
        info = store.open_dataset(folder)
        print(f"{folder}")
        found = damaged_files(folder, info)
        if not found:  # what a damaged file holds is not worth a look
            look = look_at_pairs if info.get("kind") == "pairs" else look_at_tokens
            found = look(folder, info, seen)
            if args.listen:
                listen(folder, info, args.listen, args.codec_weights)
        for problem in found:
            print(f"  PROBLEM {problem}")
        problems += found
    print(f"{len(problems)} problems" if problems else "no problems")
    return 1 if problems else 0


def damaged_files(folder: Path, info: dict) -> list[str]:
    from lib import store

    problems = []
    for entry in info["files"]:
        file = folder / entry["name"]
        if not file.is_file():
            problems.append(f"{entry['name']} is missing")
        elif file.stat().st_size != entry["bytes"]:
            problems.append(f"{entry['name']} has {file.stat().st_size} bytes instead of {entry['bytes']}")
        elif store.hash_file(file) != entry["sha256"]:
            problems.append(f"{entry['name']} is damaged: its SHA-256 is not that of dataset.json")
    return problems


# ---------------------------------------------------------------- tokens


def look_at_tokens(folder: Path, info: dict, seen: dict) -> list[str]:
    from lib import store

    missing = {"codec", "sample_rate", "hop", "codebooks", "codebook_size", "channels", "rows"} - info.keys()
    missing |= {"id", "text", "codes", "frames"} - store.arrow_columns(folder, info).keys()
    if missing:
        return [f"dataset.json or the columns lack {', '.join(sorted(missing))}"]
    problems = defaultdict(list)  # what is wrong -> ids
    notes = defaultdict(list)  # what training takes all the same -> ids
    rate = info["sample_rate"] / info["hop"]
    seconds, ids, refs, splits = [], Counter(), {}, {}
    counts = {"speaker": Counter(), "lang": Counter(), "split": Counter()}
    low, high, text_bytes = 1 << 15, -1, 0
    for row in store.read_rows(folder, info):
        id, codes, frames, text = row["id"], row["codes"], row["frames"], row["text"] or ""
        ids[id] += 1
        splits[id] = row.get("split")
        refs[id] = row.get("ref")
        for name, counter in counts.items():
            if row.get(name):
                counter[row[name]] += 1
        if frames <= 0 or not len(codes):
            problems["without frames"].append(id)
            continue
        if len(codes) != frames * info["channels"]:
            problems[f"without {info['channels']} codes a frame"].append(id)
        low, high = min(low, codes.min()), max(high, codes.max())
        if codes.min() < 0 or codes.max() >= info["codebook_size"]:
            problems[f"with codes outside 0..{info['codebook_size'] - 1}"].append(id)
        length, size = frames / rate, len(unicodedata.normalize("NFC", text).encode())
        seconds.append(length)
        text_bytes = max(text_bytes, size)
        if size > TEXT_BYTES.get(info["codec"], size):
            problems[f"with a text over {TEXT_BYTES[info['codec']]} bytes"].append(id)
        if frames > FRAMES.get(info["codec"], frames):
            problems[f"longer than {FRAMES[info['codec']]} frames (trained on only with --over-long)"].append(id)
        if CONTROL.search(text):
            problems["with a control character in the text"].append(id)
        if not text:
            problems["without text (trained on only with --allow-empty-text)"].append(id)
        elif not CHARACTERS_PER_SECOND[0] <= len(text) / length <= CHARACTERS_PER_SECOND[1]:
            notes["outside {} to {} characters a second".format(*CHARACTERS_PER_SECOND)].append(id)
        remember_content(codes, (folder, id, row.get("split")), seen, problems, notes)
    problems["with an id that others have too"] = [id for id, count in ids.items() if count > 1]
    for id, ref in refs.items():
        if ref and (ref not in ids or ref == id or splits[ref] != splits[id]):
            problems["whose reference is missing, itself, or of another split"].append(id)
    weights = f"weights {info.get('weights')} ({(info.get('weights_sha256') or 'unknown')[:12]})"
    print(f"  codec {info['codec']}, {info['sample_rate']} Hz, {rate:.4g} frames/s, {info['channels']} channels")
    print(f"  {weights}")
    print(
        f"  {sum(ids.values())} clips, {sum(seconds) / 3600:.3f} h, codes {low} to {high}, texts to {text_bytes} bytes"
    )
    for name, counter in counts.items():
        if counter:
            most = ", ".join(f"{value} {count}" for value, count in counter.most_common(NAMED))
            more = ", ..." if len(counter) > NAMED else ""
            print(f"  {name}: {len(counter)} ({most}{more})")
    return report(folder, seconds, problems, notes, sum(ids.values()), info["rows"])


def remember_content(samples: np.ndarray, place: tuple, seen: dict, problems: dict, notes: dict) -> None:
    """The same sound twice is a waste within a split, and a leak between two."""
    folder, id, split = seen.setdefault(hashlib.sha256(samples.tobytes()).digest(), place)
    if (folder, id) == place[:2]:
        return
    if (folder, split) == (place[0], place[2]):
        notes["with the sound of another clip"].append(f"{place[1]} = {id}")
    else:
        problems["with the sound of a clip of another split"].append(f"{place[1]} = {id} of {split or folder}")


# ---------------------------------------------------------------- pairs


def look_at_pairs(folder: Path, info: dict, seen: dict) -> list[str]:
    from lib import store

    problems, notes = defaultdict(list), defaultdict(list)
    seconds, ids, clipped = [], Counter(), 0
    for row in store.read_rows(folder, info):
        ids[row["id"]] += 1
        clean, noisy = row["clean"], row["noisy"]
        if not len(clean) or len(clean) != len(noisy) or len(clean) != row["samples"]:
            problems["whose lengths do not fit"].append(row["id"])
            continue
        seconds.append(len(clean) / info["sample_rate"])
        clipped += bool(np.mean(np.abs(noisy.astype(np.int32)) >= 32767) > 0.001)
        if np.array_equal(clean, noisy):
            notes["whose noisy side is the clean one"].append(row["id"])
        remember_content(clean, (folder, row["id"], None), seen, problems, notes)
    problems["with an id that others have too"] = [id for id, count in ids.items() if count > 1]
    print(f"  pairs at {info['sample_rate']} Hz, {len(ids)} of them, {sum(seconds) / 3600:.3f} h, {clipped} clipped")
    return report(folder, seconds, problems, notes, sum(ids.values()), info["rows"])


# ---------------------------------------------------------------- what they share


def report(folder: Path, seconds: list[float], problems: dict, notes: dict, rows: int, expected: int) -> list[str]:
    lines = [f"{len(ids)} clips {what}: {named(ids)}" for what, ids in problems.items() if ids]
    if rows != expected:
        lines.append(f"dataset.json says {expected} rows, the files hold {rows}")
    for what, ids in notes.items():
        print(f"  note: {len(ids)} clips {what}: {named(ids)}")
    if seconds:
        histogram(folder, np.asarray(seconds))
    return lines


def named(ids: list[str]) -> str:
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")


def histogram(folder: Path, seconds: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts, edges = np.histogram(seconds, bins=10)
    middle, tail = np.percentile(seconds, [50, 95])
    print(f"  seconds: {seconds.min():.2f} to {seconds.max():.2f}, median {middle:.2f}, 95 % below {tail:.2f}")
    for count, start, end in zip(counts, edges, edges[1:], strict=False):
        print(f"  {start:8.2f} to {end:8.2f} s {count:8d} {'#' * round(40 * count / counts.max())}")
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.hist(seconds, bins=50)
    axes.set(xlabel="seconds", ylabel="clips", title=f"{folder.name}: {len(seconds)} clips")
    figure.savefig(side_folder(folder) / "lengths.png", dpi=100)
    pyplot.close(figure)


def side_folder(folder: Path) -> Path:
    path = folder.absolute().with_name(folder.absolute().name + ".check")
    path.mkdir(exist_ok=True)
    return path


def listen(folder: Path, info: dict, count: int, weights: str | None) -> None:
    from decode import decode_codes, write_wav

    from lib import store

    chosen = set(np.linspace(0, info["rows"] - 1, min(count, info["rows"])).round().astype(int).tolist())
    codec = None
    if info.get("kind") != "pairs":
        from lib.codec import find_weights, hash_weights, load_codec

        if not (weights or info.get("weights")):
            raise UsageError("--listen needs --codec-weights: the dataset does not know its codec's weights")
        path = find_weights(weights or info["weights"])
        if info.get("weights_sha256") not in (None, hash_weights(path)):
            raise UsageError(f"--codec-weights {weights or info['weights']} are not those that made {folder}")
        codec = load_codec(path)
    for number, row in enumerate(store.read_rows(folder, info)):
        if number in chosen:
            name = f"{number:06d}-" + "".join(c if c.isalnum() or c in "-_" else "_" for c in row["id"])[:80]
            if codec:
                wave = decode_codes(codec, row["codes"].reshape(-1, info["channels"]), row["id"])
            else:
                wave = np.stack([row["noisy"], row["clean"]]) / 32768  # left noisy, right clean
            write_wav(side_folder(folder) / f"{name}.wav", wave, info["sample_rate"])
            print(f"  {side_folder(folder) / name}.wav: {row.get('text', 'left noisy, right clean')}")


if __name__ == "__main__":
    run(main)
