"""A folder of recordings in, a folder of enhanced ones out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.config import UserError
from common.runs import make_writable
from common.runtime import say


def enhance_files(source: Path, out: Path, rate: int, enhance: Callable) -> None:
    """Enhances every .wav and .flac below `source` to the same name below `out`, as 32-bit float that cannot clip.

    `enhance(recording, power, write)` reads an open SoundFile whose mean square is `power`, passes the enhanced samples
    to `write`, and returns a note for the log line ("" for none).
    """
    import soundfile

    targets = find_targets(source, out)
    for path, target in targets.items():
        make_writable(target.parent)
        draft = target.with_name(f".{target.name}.tmp")
        try:
            with soundfile.SoundFile(path) as recording:
                if recording.samplerate != rate or recording.channels != 1 or not recording.frames:
                    raise UserError(
                        f"--source {path} has {recording.samplerate} Hz, {recording.channels} channel(s) and"
                        f" {recording.frames} samples; the model takes {rate} Hz mono: convert it first."
                    )
                blocks = recording.blocks(blocksize=rate * 60, dtype="float64")
                power = sum(float(np.square(block).sum()) for block in blocks) / recording.frames
                if not np.isfinite(power):  # one such sample would spoil all that follow
                    raise UserError(f"--source {path} holds samples that are not finite.")
                recording.seek(0)
                with soundfile.SoundFile(draft, "w", rate, 1, subtype="FLOAT", format="WAV") as written:
                    note = enhance(recording, power, written.write)
                seconds = recording.frames / rate
            draft.replace(target)
        except soundfile.LibsndfileError as error:
            raise UserError(f"--source {path} cannot be read, or {target} cannot be written: {error}") from None
        finally:
            draft.unlink(missing_ok=True)
        say(f"{target}  {seconds:.1f} s{note}")


def find_targets(source: Path, out: Path) -> dict[Path, Path]:
    """Recording -> output file. Refuses what would overwrite a recording or another output."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".wav", ".flac"))
    if not files:
        raise UserError(f"--source {source} is not a folder with .wav or .flac files.")
    if source.resolve() == out.resolve():
        raise UserError("--source and --out are the same folder: the recordings would be overwritten.")
    targets = {path: (out / path.relative_to(source)).with_suffix(".wav") for path in files}
    if len(set(targets.values())) < len(targets):
        raise UserError(
            f"--source {source} holds a .wav and a .flac of one name, which would both become the same .wav."
        )
    return targets
