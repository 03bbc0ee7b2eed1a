"""A folder of .npy codes of the first MoT trainer (pre_encoded_audio/) as training data: converted once, and reused."""

import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.arrow import note_places
from common.errors import UserError
from common.runtime import Process, on_main_for_long

ENCODER = Path(__file__).resolve().parents[3] / "data" / "encode.py"


def token_folder(path: str, process: Process) -> str:
    """`path` itself, or the token dataset made from it if it is a folder of .npy codes. Every rank must call it.

    data/encode.py does the work: it writes the dataset whole or not at all, converts again only what has changed, and
    lets one job at a time do so.
    """
    source = Path(path)
    if (source / "dataset.json").exists() or not any(source.glob("*.npy")):
        return path
    out = place_for(source)
    on_main_for_long(lambda tick: convert(source, out, tick), process)
    return str(out)


def place_for(source: Path) -> Path:
    """Beside the codes, or in the user's cache if nothing can be written there."""
    source = source.resolve()
    beside = source.with_name(f"{source.name}.tokens")
    return beside if os.access(source.parent, os.W_OK) else note_places(source, ".tokens")[1]


def convert(source: Path, out: Path, tick) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, ENCODER, "--codec", "encodec", "--format", "legacy-npy", "--source", source]
    command += ["--captions", find_captions(source), "--out", out]
    command += ["--max-reject", "1"]  # --min-coverage judges what is left
    with tempfile.TemporaryFile("w+") as said:
        worker = subprocess.Popen(command, stderr=said)
        while worker.poll() is None:
            tick()
            try:
                worker.wait(1)
            except subprocess.TimeoutExpired:
                continue
        if worker.returncode:
            said.seek(0)
            lines = said.read().strip().splitlines() or [f"exit code {worker.returncode}"]
            raise UserError(f"--data {source} cannot be converted: {lines[-1].removeprefix('error: ')}")


def find_captions(source: Path) -> Path:
    """The CSV with ytid and caption, in the folder or beside it; copies with the same content count as one."""
    found = {}
    for folder in (source, source.resolve().parent):
        for file in sorted(folder.glob("*.csv")):
            with open(file, newline="", encoding="utf-8-sig", errors="replace") as stream:
                header = next(csv.reader(stream), [])
            if {"ytid", "caption"} <= set(header):
                found.setdefault(hashlib.sha256(file.read_bytes()).hexdigest(), file)
    if len(found) != 1:
        problem = " and ".join(map(str, list(found.values())[:2])) or "no CSV with the columns ytid and caption"
        raise UserError(
            f"--data {source} holds codes without captions, and beside it there is {problem}: leave one (MusicCaps'"
            " musiccaps-public.csv), or use data/encode.py --format legacy-npy --captions CSV."
        )
    return next(iter(found.values()))
