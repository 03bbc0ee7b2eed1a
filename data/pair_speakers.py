"""Choose a reference clip by the same speaker for every clip, for voice cloning.

    python data/pair_speakers.py tokens/train --out tokens/train_pairs

Adds the column `ref`: the id of another clip by the same speaker in the same split, 3 to 15 s long, with different
audio. The choice depends only on --seed and the clip's own id. Clips without a reference are left out, unless they
are a reference themselves or --allow-no-ref is set (their `ref` is empty).
"""

import argparse
import hashlib
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

from pairs import keyed

from common.errors import UserError, between, command_parser, run_command
from lib import store
from lib.clips import REFERENCES


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("tokens", type=Path, help="token dataset whose clips have speakers")
    add("--out", required=True, type=Path, help="folder for the new token dataset")
    add("--min-seconds", type=between(float, 0), default=3.0, help="length of the shortest reference (default: 3)")
    add(
        "--max-seconds",
        type=between(float, 0, above=True),
        default=15.0,
        help="length of the longest reference (default: 15)",
    )
    add("--seed", type=int, default=0, help="random seed for the choice of references (default: 0)")
    add("--allow-no-ref", action="store_true", help="keep clips for which there is no reference")
    return parser.parse_args(argv)


def main() -> None:
    from datasets import load_from_disk

    args = parse_args()
    info = store.open_dataset(args.tokens)
    if "codec" not in info:
        raise UserError(f"{args.tokens} is not a token dataset")
    data = load_from_disk(args.tokens)
    if "speaker" not in data.column_names:
        raise UserError(
            f"{args.tokens} has no speakers: add them to the manifest and run data/encode.py again "
            "(no clip is encoded twice), or let data/cluster_speakers.py tell the voices apart"
        )
    store.refuse_existing(args.out)
    clips = [summary(row, info) for row in store.read_rows(args.tokens, info)]
    refs = choose_references(clips, args.min_seconds, args.max_seconds, args.seed)
    labels = data.select_columns([name for name in ("id", *REFERENCES) if name in data.column_names])
    voices = {row["id"]: [row.get(name) for name in REFERENCES] for row in labels if row.get("ref1")}
    refs |= {id: names[0] for id, names in voices.items()}  # a dialogue keeps its own references
    references = {ref for ref in [*refs.values(), *(name for names in voices.values() for name in names)] if ref}
    keep = {id for id, ref in refs.items() if ref or args.allow_no_ref or id in references}
    paired = sum(bool(ref) for ref in refs.values())
    if not paired:
        raise UserError(
            f"no clip in {args.tokens} has a reference: it must be another clip by the same speaker in the same split, "
            f"{args.min_seconds:g} to {args.max_seconds:g} s long (--min-seconds, --max-seconds)"
        )
    data = store.set_column(data, "ref", [refs[clip["id"]] for clip in clips])
    kept = [number for number, clip in enumerate(clips) if clip["id"] in keep]
    pairing = {"min_seconds": args.min_seconds, "max_seconds": args.max_seconds, "seed": args.seed}
    store.write_derived(args.out, info, data.select(kept, keep_in_memory=True), {"pairing": pairing})
    print(f"{paired} of {len(clips)} clips have a reference, {len(clips) - len(keep)} left out; wrote {args.out}")


def summary(row: dict, info: dict) -> dict:
    """What the choice of references needs to know about a clip."""
    return {
        "id": row["id"],
        "voice": (row["speaker"], row.get("split")) if row["speaker"] else None,
        "seconds": row["frames"] * info["hop"] / info["sample_rate"],
        "content": hashlib.sha256(row["codes"].tobytes()).digest(),
    }


def choose_references(clips: list[dict], shortest: float, longest: float, seed: int) -> dict[str, str | None]:
    """id -> id of its reference, or None; never the clip itself, never the same audio, never across splits."""
    candidates_by_voice = defaultdict(list)
    for clip in sorted(clips, key=lambda clip: clip["id"]):
        if clip["voice"] and shortest <= clip["seconds"] <= longest:
            candidates_by_voice[clip["voice"]].append(clip)
    refs = {}
    for clip in clips:
        candidates = candidates_by_voice.get(clip["voice"], [])
        start = keyed(seed, clip["id"], "ref", max(1, len(candidates)))
        ring = (candidates[(start + step) % len(candidates)] for step in range(len(candidates)))
        refs[clip["id"]] = next((other["id"] for other in ring if other["content"] != clip["content"]), None)
    return refs


if __name__ == "__main__":
    run_command(main)
