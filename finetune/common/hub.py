"""Models in the Hugging Face format, from a hub id or a local folder; a local path never uses the network.

data/fetch.py downloads, in a process of its own. Everything is then loaded from the folder that it names.
"""

import dataclasses
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.data_commands import DATA
from common.errors import UserError
from common.runtime import Process, Stopped, any_rank, gather_lists, stop_requested

_folders = {}  # hub id -> the folder of the revision that this process uses


def folder(path: str, flag: str = "--model", revision: str = "") -> Path:
    """The folder with a model's files. A hub id that `fetch` has not brought yet is downloaded now."""
    if path not in _folders and not Path(path).is_dir():
        fetch(path, None, revision, flag)
    return _folders.get(path, Path(path))


def fetch(path: str, process: Process | None, revision: str = "", flag: str = "--model") -> None:
    """Downloads a hub id once per machine, so that all ranks then load the same revision from disk. Does nothing for a
    folder. Every rank must call it; `process` None: there are no others.
    """
    if not path or Path(path).is_dir():
        if revision:
            raise UserError(f"--revision {revision} is for a model on the hub: {flag} {path} is a local folder.")
        return
    if Path(path).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise UserError(
            f"{flag} {path} is neither a folder in the Hugging Face format nor a hub id (owner/name).".strip()
        )
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        words = [path, "--revision", revision or "", "--result", result]
        command, child = [sys.executable, DATA / "fetch.py", *words], None
        if process is None:
            subprocess.run(command, check=False)
        else:
            child = subprocess.Popen(command) if process.local_rank == 0 else None
            while any_rank(child is not None and child.poll() is None, process):  # a sign of life for --hang-timeout
                if child and stop_requested():
                    child.terminate()
                time.sleep(0.2)
            if any_rank(stop_requested(), process):
                raise Stopped
        # Ranks of another machine may have another cache.
        mine = [(socket.gethostname(), _read(result))] if process is None or child else []
        found = mine if process is None else gather_lists(mine, process)
    problem = next((outcome["problem"] for _, outcome in found if "problem" in outcome), None)
    if problem:
        raise UserError(f"{flag} {problem}".strip())
    if len({Path(outcome["folder"]).name for _, outcome in found}) > 1:
        raise UserError(f"{flag} {path} has just changed on the hub: start again, or name a commit with --revision.")
    _folders[path] = Path(dict(found)[socket.gethostname()]["folder"])


def _read(result: Path) -> dict:
    try:
        return json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"problem": "was not downloaded: data/fetch.py failed, see its message above."}


def pin(config, process: Process):
    """Downloads --model, and returns the config with its commit as revision, so that resuming or repeating the run
    cannot silently train on other weights.

    Without --revision, a run that resumes keeps to the commit in its config.json. Every rank must call it.
    """
    if not hasattr(config, "revision"):  # the enhancers' models are files
        return config
    asked = config.revision
    if not asked and config.out and config.resume != "never":
        try:
            before = json.loads(Path(config.out, "config.json").read_text(encoding="utf-8"))["config"]
        except (OSError, ValueError, KeyError):
            before = {}
        asked = before.get("revision", "") if before.get("model") == config.model else ""
    fetch(config.model, process, asked)
    commit = _folders[config.model].name if config.model in _folders else ""
    return dataclasses.replace(config, revision=commit)


def find_file(path: str, name: str, revision: str = "") -> Path | None:
    """A file in a folder or in a hub repository; None if there is none."""
    file = folder(path, revision=revision) / name
    return file if file.is_file() else None


def load_pretrained(model_class, config_class, path: str, dtype, revision: str | None = None, **options):
    """The complete model. Another model type, a missing weight or a pickle is a UserError."""
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place = folder(path, revision=revision or "")
    try:
        config = config_class.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no usable config.json ({str(error).splitlines()[0]})") from None
    if config.model_type != config_class.model_type:
        raise UserError(f"--model {path} is a {config.model_type!r} model, not {config_class.model_type!r}.")
    try:
        model, info = model_class.from_pretrained(
            place,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {path}: {str(error).splitlines()[0]}") from None
    if info["missing_keys"]:  # transformers would only warn and leave them random
        raise UserError(
            f"--model {path} lacks {len(info['missing_keys'])} weights, such as {min(info['missing_keys'])}."
        )
    return model


def inference_dtype():
    """The precision to use a trained model in: bf16 on a GPU, where fp32 takes twice the memory; fp32 on a CPU."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32
