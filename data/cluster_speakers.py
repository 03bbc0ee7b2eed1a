"""Find out which clips are by the same speaker, and label them.

    python data/cluster_speakers.py tokens/train --embedder resemblyzer --out tokens/train_speakers

Each clip's voice becomes an embedding, and clips are joined by average linkage while their mean cosine distance is at
most --threshold. Clips that have a speaker keep it; the others of their cluster get it too, or a name such as
speaker-0001. Prints the cluster sizes and, where speakers were known, the purity: the fraction of labelled clips that
are by the most frequent speaker of their cluster.

Uses the original recording if its file is still where data/encode.py read it, otherwise decodes the codes.
"""

import argparse
import hashlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "finetune"))  # for common/

import score
from score import RATE

from common.errors import UserError, between, command_parser, run_command
from lib import store
from lib.waveform import Reject, prepare, read_samples

# Clustering takes memory for all pairs of clips, 0.8 GB for these. Of more clips, a part is clustered and the others
# join the nearest cluster.
MOST_CLUSTERED = 10_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("tokens", type=Path, help="token dataset")
    add("--out", required=True, type=Path, help="folder for the new token dataset")
    add(
        "--embedder",
        required=True,
        metavar="NAME",
        help="resemblyzer; the folder of an x-vector model; or MODULE:FUNCTION of your own, a function from mono "
        "samples at 16 kHz to a vector",
    )
    add(
        "--threshold",
        type=between(float, 0, 2, above=True),
        default=0.4,
        help="largest cosine distance within a speaker (default: 0.4)",
    )
    return parser.parse_args(argv)


def main() -> None:
    from datasets import load_from_disk

    args = parse_args()
    info = store.open_dataset(args.tokens)
    if "codec" not in info:
        raise UserError(f"{args.tokens} is not a token dataset")
    store.refuse_existing(args.out)
    embed = load_embedder(args.embedder)
    ids, known, vectors = [], [], []
    listen = listener(args.tokens, info)
    for row in store.read_rows(args.tokens, info):
        wave = listen(row)
        try:
            vector = np.asarray(embed(wave), dtype=np.float64).ravel()
        except Exception as error:  # the user's own function
            raise UserError(f"--embedder {args.embedder} failed on clip {row['id']}: {error}") from None
        if not np.isfinite(vector).all() or not vector.any() or (vectors and len(vector) != len(vectors[0])):
            raise UserError(f"--embedder {args.embedder} gives no usable embedding of clip {row['id']}")
        ids.append(row["id"])
        known.append(row.get("speaker") or None)
        vectors.append(vector / np.linalg.norm(vector))
    clusters = cluster(np.array(vectors), ids, args.threshold)
    report = describe(clusters, known)
    data = store.set_column(load_from_disk(args.tokens), "speaker", name_speakers(clusters, known))
    settings = {"speakers": {"embedder": args.embedder, "threshold": args.threshold, **report}}
    store.write_derived(args.out, info, data, settings)
    print(f"{len(ids)} clips, {report['speakers']} speakers, of 1 clip each: {report['single']};"
          f" clips per speaker: {report['smallest']} to {report['largest']}, median {report['median']:g}")  # fmt: skip
    if report["unplaced"]:
        print(f"{report['unplaced']} clips are not near any cluster and have no speaker")
    if report["purity"] is not None:
        print(f"purity {report['purity']:.4f}, over {report['labelled']} clips whose speakers were known;"
              f" {report['split']} of these {report['known_speakers']} speakers are in several clusters")  # fmt: skip
    print(f"wrote {args.out}")


# ---------------------------------------------------------------- voices


def load_embedder(name: str) -> Callable:
    """A function from mono samples at 16 kHz to a speaker embedding."""
    if ":" in name:
        module, _, function = name.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UserError(f"--embedder {name} cannot be imported: {error}") from None
    try:
        return score.load_embedder(name)
    except UserError as error:
        raise UserError(str(error).replace("--similarity", "--embedder")) from None


def listener(folder: Path, info: dict) -> Callable[[dict], np.ndarray]:
    """A function from a row of the dataset to its mono samples at 16 kHz."""
    recordings = {sha256: Path(name) for name, _, sha256 in store.read_jsonl(folder / "sources.jsonl")}
    codec = None

    def listen(row: dict) -> np.ndarray:
        nonlocal codec
        heard = recorded(row, recordings)
        if heard is None:
            import torch

            codec = codec or load_codec(folder, info)
            codes = np.array(row["codes"]).reshape(-1, info["channels"])[:, : info["codebooks"]]
            heard = codec.decode(torch.from_numpy(codes).long()).reshape(1, -1).numpy(), codec.sample_rate
        try:
            return prepare(*heard, RATE)[0].numpy()
        except Reject as reason:
            raise UserError(f"clip {row['id']} cannot be heard: {reason}") from None

    return listen


def recorded(row: dict, recordings: dict[str, Path]) -> tuple[np.ndarray, int] | None:
    """Samples and rate of the clip's own recording; None if it is gone, has changed, or was never audio."""
    sha256, start, end = (row.get("source") or "::").rsplit(":", 2)
    file = recordings.get(sha256)
    data = file.read_bytes() if file and file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != sha256:
        return None
    try:
        return read_samples(data, *(None if at == "None" else float(at) for at in (start, end)))
    except Reject:
        return None


def load_codec(folder: Path, info: dict):
    from lib.codec import find_weights, load_codec

    if not info.get("weights"):
        raise UserError(f"{folder} names no codec, and the recordings of its clips are gone: no voice can be heard")
    return load_codec(find_weights(info["weights"], info.get("weights_revision")))


# ---------------------------------------------------------------- clusters


def cluster(vectors: np.ndarray, ids: list[str], threshold: float) -> np.ndarray:
    """A cluster number for each vector (of length 1); -1 if it is near no cluster."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    # By a hash of the id, so that the choice depends on no order.
    order = np.argsort([hashlib.blake2b(id.encode(), digest_size=8).hexdigest() for id in ids], kind="stable")
    first, others = order[:MOST_CLUSTERED], order[MOST_CLUSTERED:]
    numbers = np.full(len(vectors), -1)
    if len(first) == 1:
        numbers[first] = 0
        return numbers
    joined = linkage(pdist(vectors[first], "cosine"), "average")
    numbers[first] = fcluster(joined, threshold, "distance") - 1
    # The mean distance to a cluster's members is the distance to the mean of their vectors.
    means = np.stack([vectors[numbers == number].mean(axis=0) for number in range(numbers.max() + 1)])
    for i in others:
        distances = 1 - means @ vectors[i]
        if distances.min() <= threshold:
            numbers[i] = distances.argmin()
    return numbers


def name_speakers(clusters: np.ndarray, known: list[str | None]) -> list[str | None]:
    """A speaker for each clip: the known one, else its cluster's most frequent known one, else a new name."""
    names, new = {}, 0
    for number, _ in Counter(clusters[clusters >= 0].tolist()).most_common():
        members = Counter(name for name, own in zip(known, clusters, strict=True) if own == number and name)
        new += not members
        names[number] = members.most_common(1)[0][0] if members else f"speaker-{new:04d}"
    names[-1] = None
    return [name or names[number] for name, number in zip(known, clusters.tolist(), strict=True)]


def describe(clusters: np.ndarray, known: list[str | None]) -> dict:
    """Sizes of the clusters, and how well they agree with the speakers that were known."""
    sizes = np.bincount(clusters[clusters >= 0])
    counts = Counter((int(number), name) for number, name in zip(clusters, known, strict=True) if number >= 0 and name)
    labelled = sum(counts.values())
    best = Counter()
    for (number, _), count in counts.items():
        best[number] = max(best[number], count)
    clusters_of = Counter(name for _, name in counts)
    return {
        "speakers": len(sizes),
        "single": int((sizes == 1).sum()),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "unplaced": int((clusters < 0).sum()),
        "labelled": labelled,
        "known_speakers": len(clusters_of),
        "split": sum(count > 1 for count in clusters_of.values()),
        "purity": best.total() / labelled if labelled else None,
    }


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # embeddings are quick on a CPU
    run_command(main)
