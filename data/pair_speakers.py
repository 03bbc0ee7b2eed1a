"""Voice cloning needs a reference for every target: choose one by speaker.

    python data/pair_speakers.py tokens/train --out tokens/train_pairs

Adds the column `ref`: the id of another clip of the same speaker and the same split, 3 to 15 s long, with
other sound than the target's. Which one depends on --seed and the target's id alone. Clips without a partner
are left out, unless they are somebody's reference or --allow-no-ref keeps them (their `ref` is empty).
"""

import argparse
import hashlib
import json
import shutil
from collections import defaultdict
from pathlib import Path

from lib.errors import UsageError, run


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("tokens", type=Path, help="a token dataset whose clips have speakers")
    add("--out", required=True, type=Path, help="folder of the new token dataset")
    add("--min-seconds", type=float, default=3.0, help="shortest reference (default: 3)")
    add("--max-seconds", type=float, default=15.0, help="longest reference (default: 15)")
    add("--seed", type=int, default=0)
    add("--allow-no-ref", action="store_true", help="keep clips that have no possible reference")
    return parser.parse_args(argv)


def main() -> None:
    from lib import store

    args = parse_args()
    info = store.open_dataset(args.tokens)
    if "codec" not in info:
        raise UsageError(f"{args.tokens} is not a token dataset")
    columns = store.arrow_columns(args.tokens, info)
    if "speaker" not in columns:
        raise UsageError(f"{args.tokens} has no speakers: give them in the manifest and encode again (takes no time)")
    out = args.out.absolute()
    if out.exists():
        raise UsageError(f"--out {out} exists: give another path or remove it")
    clips = [light(row, info) for row in store.read_rows(args.tokens, info)]
    refs = choose_references(clips, args.min_seconds, args.max_seconds, args.seed)
    used = {ref for ref in refs.values() if ref}
    keep = {id for id, ref in refs.items() if ref or args.allow_no_ref or id in used}
    paired = sum(bool(ref) for ref in refs.values())
    if not paired:
        raise UsageError(
            f"no clip of {args.tokens} has a reference: none shares its speaker and split with another clip of "
            f"{args.min_seconds:g} to {args.max_seconds:g} s"
        )
    work = out.with_name(out.name + ".work")
    with store.clear_disk_errors(out), store.locked(work / "lock"):
        shutil.rmtree(work / "dataset", ignore_errors=True)
        rows = (row | {"ref": refs[row["id"]]} for row in store.read_rows(args.tokens, info) if row["id"] in keep)
        files = store.write_dataset(work / "dataset", rows, columns | {"ref": "string"}, sums=("frames",))
        pairing = {"min_seconds": args.min_seconds, "max_seconds": args.max_seconds, "seed": args.seed}
        info |= {
            "rows": sum(entry["rows"] for entry in files),
            "frames": sum(entry["frames"] for entry in files),
            "settings": info["settings"] | {"pairing": pairing},
            "files": files,
        }
        for name in ("key", "clips"):  # encode.py must not take this for its own output
            info.pop(name, None)
        store.write_json(work / "dataset/dataset.json", info)
        store.publish(work / "dataset", out)
        shutil.rmtree(work)
    print(f"{paired} of {len(clips)} clips have a reference, {len(clips) - len(keep)} left out; wrote {out}")


def light(row: dict, info: dict) -> dict:
    """What the choice needs to know of a clip."""
    return {
        "id": row["id"],
        "voice": (row["speaker"], row.get("split")) if row["speaker"] else None,
        "seconds": row["frames"] * info["hop"] / info["sample_rate"],
        "content": hashlib.sha256(row["codes"].tobytes()).digest(),
    }


def choose_references(clips: list[dict], shortest: float, longest: float, seed: int) -> dict[str, str | None]:
    """id -> id of its reference, or None: never itself, never the same sound, never across splits."""
    suitable = defaultdict(list)
    for clip in sorted(clips, key=lambda clip: clip["id"]):
        if clip["voice"] and shortest <= clip["seconds"] <= longest:
            suitable[clip["voice"]].append(clip)
    refs = {}
    for clip in clips:
        voices = suitable.get(clip["voice"], [])
        digest = hashlib.blake2b(json.dumps([seed, clip["id"], "ref"]).encode(), digest_size=8).digest()
        first = int.from_bytes(digest, "big") % max(1, len(voices))
        ring = (voices[(first + step) % len(voices)] for step in range(len(voices)))
        refs[clip["id"]] = next((other["id"] for other in ring if other["content"] != clip["content"]), None)
    return refs


if __name__ == "__main__":
    run(main)
