"""The commands of data/ in a process of their own: no process with a model loads a codec, and none imports data/."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import UserError

DATA = Path(__file__).resolve().parents[2] / "data"


def require_folder_of(wav: Path) -> None:
    """Fail early if the folder of --wav is missing."""
    if not wav.parent.is_dir():
        raise UserError(f"--wav {wav}: the folder {wav.parent} does not exist.")


def run_data(script: str, *arguments) -> None:
    """Runs a command of data/ and passes its error message on."""
    command = [sys.executable, DATA / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"data/{script} failed: {''.join(reason).removeprefix('error: ')}")


def encode_recording(recording: Path, flag: str, codec: str, weights: Path, *options):
    """Codes (T, C) of a recording, as data/encode.py makes them for training; it refuses silent and broken files.

    `codec`: its kind, such as dac; `options`: more flags of the command.
    """
    import numpy as np

    from common.tokens import TokenDataset

    if not recording.is_file():
        raise UserError(f"{flag} {recording} does not exist.")
    recording = recording.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        manifest, out = Path(scratch, "recording.jsonl"), Path(scratch, "recording")
        manifest.write_text(json.dumps({"id": "recording", "audio": recording.name, "text": "x"}))
        paths = ["--source", manifest, "--audio-root", recording.parent, "--out", out, "--format", "jsonl"]
        run_data("encode.py", "--codec", codec, "--codec-weights", weights, *paths, *options)
        return np.array(TokenDataset(str(out)).codes(0))
