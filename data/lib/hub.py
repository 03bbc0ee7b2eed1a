"""Models and codecs from the Hugging Face hub. A download continues where it was interrupted, and every failure is one
sentence that says what to do.

The files are kept in the hub's own cache (HF_HOME), where every other program finds them too.
"""

import errno
import hashlib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import UserError

# What from_pretrained may ask for; not the same weights in other formats, nor the authors' own in subfolders.
FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
AT_ONCE = 4  # weight files that are downloaded at the same time
BLOCK = 2**24


def fetch(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """The folder with a model's files, downloaded unless they are here; it is named after the commit.

    `revision`: branch, tag or commit, default the newest. `weights` False: only the small files.
    """
    if Path(name).exists():
        raise UserError(f"{name} is already on this machine: there is nothing to fetch.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name} is neither a path on this machine nor a hub id, which has the form owner/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # what goes wrong is said once, below
    if not sys.stderr.isatty():
        disable_progress_bars()
    ignored = ["*/*"] + ([] if weights else ["*.safetensors"])
    try:
        if weights:
            fetch_weights(name, revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=ignored))
    except UserError:
        raise
    except Exception as error:  # many kinds: of the hub's library, of its HTTP library, of the disk
        raise UserError(explain(error, name, revision)) from None


# ---------------------------------------------------------------- weights


def fetch_weights(name: str, revision: str | None) -> None:
    """Downloads the weight files into the hub's cache. The hub's own library would begin each interrupted file anew.

    If the hub does not answer, nothing happens here: all may be in the cache already, and otherwise snapshot_download
    says what is wrong.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    try:
        commit = api.model_info(name, revision=revision).sha
        entries = list(api.list_repo_tree(name, revision=commit))
    except Exception:
        return
    files = [entry for entry in entries if isinstance(entry, RepoFile) and "/" not in entry.path and entry.lfs]
    wanted = [file for file in files if file.path.endswith(".safetensors")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda file: fetch_file(name, commit, file.path, file.lfs.sha256, file.size), wanted))


def fetch_file(name: str, commit: str, file: str, sha256: str, size: int) -> None:
    """Downloads one file as the blob that the hub's library looks for, under the lock that it takes."""
    from urllib.parse import urlparse

    from huggingface_hub import constants
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get, repo_folder_name
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    cache, repo = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type="model")
    blob, lock = cache / repo / "blobs" / sha256, cache / ".locks" / repo / f"{sha256}.lock"
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # another process was faster
            return
        part = blob.with_name(f"{sha256}.part")
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        says = f"continuing after {have / 1e6:.0f} of" if have else "downloading"
        print(f"{name}: {says} {size / 1e6:.0f} MB of {file}", file=sys.stderr, flush=True)
        url = hf_hub_url(name, file, revision=commit)
        place = get_hf_file_metadata(url).location
        # The token is for the hub, not for the store that it sends us to.
        headers = build_hf_headers() if urlparse(place).netloc == urlparse(url).netloc else {}
        with open(part, "ab") as stream:
            http_get(place, stream, resume_size=have, headers=headers, expected_size=size)
        if hash_file(part) != sha256:
            part.unlink()
            raise UserError(f"{name}: {file} arrived damaged and was deleted; run the same command again.")
        part.replace(blob)


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- what went wrong


def explain(error: Exception, name: str, revision: str | None) -> str:
    """One sentence with the cause and the way out."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, has_token = constants.ENDPOINT, bool(os.environ.get("HF_TOKEN"))
    elsewhere = f"or name a folder with its files, which ./launch.sh fetch {name} downloads where there is a network"
    cause = next((e for e in chain(error) if isinstance(e, HfHubHTTPError)), None)
    status = cause.response.status_code if cause is not None else 0
    if isinstance(cause, GatedRepoError):
        if has_token:
            return f"{name} is gated and HF_TOKEN has no access: ask for it at {hub}/{name}, then try again."
        return f"{name} is gated: ask for access at {hub}/{name}, then export HF_TOKEN with a token of yours."
    if isinstance(cause, RevisionNotFoundError):
        return f"{name} has no revision {revision}; its branches, tags and commits are listed at {hub}/{name}/commits."
    if status == 401 and has_token:
        return f"{name}: HF_TOKEN is not valid; export a new one, or unset it for a public model."
    if isinstance(cause, RepositoryNotFoundError):
        token = "and that HF_TOKEN may read it" if has_token else "and export HF_TOKEN if it is private"
        return f"{name} is neither a path on this machine nor on the hub: check the spelling, {token}."
    if status == 403:
        return f"{name}: the hub refuses access; check at {hub}/{name} what your token (HF_TOKEN) may do."
    if status == 429:
        return f"{name}: the hub asks to wait (too many requests); run the same command again in a few minutes."
    full = next((e for e in chain(error) if isinstance(e, OSError) and e.errno in DISK), None)
    if full is not None:
        return (
            f"{name} cannot be stored in {constants.HF_HOME} ({full.strerror}): set HF_HOME to a writable folder with"
            " enough space."
        )
    if constants.HF_HUB_OFFLINE:
        return f"{name} is not in the cache, and HF_HUB_OFFLINE forbids a download: unset it, {elsewhere}."
    kinds = (LocalEntryNotFoundError, ConnectionError, TimeoutError)
    if status >= 500 or any(isinstance(e, kinds) or type(e).__module__.startswith("http") for e in chain(error)):
        reason = f"HTTP {status}" if status else type(list(chain(error))[-1]).__name__
        return (
            f"{name} cannot be downloaded: {hub} does not answer ({reason}); run the same command again to continue,"
            f" {elsewhere}."
        )
    return f"{name} cannot be downloaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})."


DISK = tuple(getattr(errno, name) for name in "ENOSPC EDQUOT EFBIG EACCES EPERM EROFS ENOENT ENOTDIR".split())


def chain(error: BaseException | None):
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
