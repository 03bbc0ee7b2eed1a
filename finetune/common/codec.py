"""Which codec the codes came from: the dataset tells it to the run and the export, and speaking finds it again.

An export holds it as codec.json: {"name", "place", "sample_rate", "hop", "sha256"}, where `place` is a path or a hub id
(then with its commit, "revision") and `sha256` the hash of the weights, as data/encode.py noted it.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from common import hub
from common.errors import UserError
from common.runtime import say

FILE = "codec.json"


def codec_identity(info: dict) -> dict:
    """The codec of a token dataset, from its dataset.json."""
    named = {"name": info["codec"], "place": info.get("weights")}
    if info.get("weights_revision"):
        named["revision"] = info["weights_revision"]
    return named | {"sample_rate": info["sample_rate"], "hop": info["hop"], "sha256": info.get("weights_sha256")}


def recorded_codec(path: Path) -> dict:
    """The codec of an export, a run or a checkpoint; empty if it names none."""
    for file, key in ((path / FILE, None), *((place / "config.json", "codec") for place in (path, *path.parents[:2]))):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        codec = content.get(key, {}) if key else content
        if isinstance(codec, dict) and "sha256" in codec:
            return codec
    return {}


# ---- on this machine -------------------------------------------------------------------------------------------


def local_codec(place: str | None, revision: str | None = None) -> Path | None:
    """A codec's file or folder; None if it is not on this machine. `place`: a path, or a hub id in the cache."""
    path = Path(place or "").expanduser()
    if place and path.exists():
        return path
    if not place or not re.fullmatch(r"[\w.-]+/[\w.-]+", place) or place.startswith("."):
        return None
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors"]
        found = Path(snapshot_download(place, revision=revision, allow_patterns=files, local_files_only=True))
    except Exception:  # many kinds: it was never downloaded, or not whole
        return None
    return found if list(found.glob("*.safetensors")) else None


def place_of_codec(info: dict) -> str | None:
    """Where data/decode.py finds the codec of a dataset: here, or on the hub."""
    path = local_codec(info.get("weights"), info.get("weights_revision"))
    return str(path) if path else info.get("weights")


def hash_weights(path: Path) -> str:
    """SHA-256 over the weight files in the order of their names; for a single file it is the file's own."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with open(file, "rb") as stream:
            while block := stream.read(2**24):
                digest.update(block)
    return digest.hexdigest()


# ---- the same codec --------------------------------------------------------------------------------------------


def refuse_other_codec(tokens, expected: dict, who: str) -> None:
    """Refuses a dataset whose codec differs from what `who` needs in rate, hop or weights, naming both values.

    Of `expected`, what is missing or None is not compared. Weights that are nowhere on this machine have no hash: then
    only a warning can be given, if their names differ.
    """
    own = codec_identity(tokens.info)
    for fact in ("name", "sample_rate", "hop"):
        if expected.get(fact) is not None and own[fact] != expected[fact]:
            raise UserError(
                f"{tokens.folder}: its codec has {fact} = {own[fact]!r} but {who} needs {expected[fact]!r}; encode the"
                " audio again with the same codec."
            )
    places = [codec.get("place") for codec in (own, expected)]
    hashes = [own["sha256"], expected.get("sha256")]
    if not hashes[1] and hashes[0] and (path := local_codec(places[1])):
        hashes[1] = hash_weights(path)
    # descript's .pth file and the Hugging Face folder of one codec differ in every byte.
    formats = {str(place).endswith(".pth") for place in places}
    if all(hashes) and hashes[0] != hashes[1] and len(formats) == 1:
        raise UserError(
            f"{tokens.folder} was encoded with other codec weights ({places[0]}, {hashes[0][:12]}) than those of {who}"
            f" ({places[1]}, {hashes[1][:12]}): encode the audio again with the same codec."
        )
    if hashes[0] != hashes[1] and all(places) and places[0] != places[1]:
        say(f"warning: {tokens.folder} was encoded with the codec {places[0]}, {who} names {places[1]}")


def find_codec(asked: str | None, recorded: dict) -> Path:
    """The codec to speak with: --codec, or the recorded one, which must not have changed."""
    place, digest = asked or recorded.get("place"), recorded.get("sha256")
    if not place:
        raise UserError("--codec is needed: the model does not name its codec.")
    revision = None if asked else recorded.get("revision")
    which = f"{place}" + (f" (SHA-256 {digest[:12]})" if digest and not asked else "")
    path = local_codec(place, revision)
    if path is None:
        try:
            path = hub.folder(place, "", revision or "")
        except UserError as error:
            raise UserError(f"the codec {which} is not on this machine; give it as --codec: {error}") from None
    if digest and hash_weights(path) != digest:
        if not asked:
            raise UserError(f"the codec {which} is no longer the one of the training data; give that one as --codec.")
        print(f"warning: --codec {asked} is not the file that the training data was encoded with", file=sys.stderr)
    return path
