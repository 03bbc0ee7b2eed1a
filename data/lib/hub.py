"""Models and codecs from the Hugging Face hub. Every failure is one sentence that says what to do.

The files are kept in the hub's own cache (HF_HOME), where every other program finds them too.
"""

import errno
import os
import re
import sys
from pathlib import Path

from common.errors import UserError

# What from_pretrained may ask for; not the same weights in other formats, nor the authors' own in subfolders.
FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder with a model's files, downloaded unless they are here; it is named after the commit.

    `revision`: branch, tag or commit, default the newest.
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
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # many kinds: of the hub's library, of its HTTP library, of the disk
        raise UserError(explain(error, name, revision)) from None


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
            f"{name} cannot be downloaded: {hub} does not answer ({reason}); run the same command again, {elsewhere}."
        )
    return f"{name} cannot be downloaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})."


DISK = tuple(getattr(errno, name) for name in "ENOSPC EDQUOT EFBIG EACCES EPERM EROFS ENOENT ENOTDIR".split())


def chain(error: BaseException | None):
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
