"""Recordings in, enhanced recordings out: a file or a folder, any sample rate, any number of channels.

A model only ever sees one channel at its own sample rate, from a temporary file, so that a recording of any length and
any container takes little memory. The enhanced channels go back to the recording's rate.
"""

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from common.errors import UserError
from common.runs import make_writable
from common.runtime import print_above, say
from common.speech_metrics import load_dnsmos

SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".snd", ".caf", ".w64")
SUFFIXES += (".rf64", ".voc", ".sph", ".nist")
UNREADABLE = (".m4a", ".m4b", ".mp4", ".aac", ".webm", ".mka", ".mkv", ".mov", ".wma", ".amr", ".ac3")
BLOCK_SECONDS = 20
LARGEST_WAV = 2**32 - 2**16  # bytes of samples: the header counts them with 32 bits
# The resampler: with 64 zero crossings to either side and this window, it passes 7.3 of 8 kHz and stops 80 dB at 8.
ZERO_CROSSINGS, CUTOFF, KAISER_BETA = 64, 0.96, 8.0


@dataclass(frozen=True)
class Source:
    """What to enhance, and how. Models hand it on without looking inside."""

    path: Path  # a recording, or a folder of them
    high_band: Literal["cut", "keep"] = "cut"  # what the model cannot hear, above half of its rate
    dnsmos: bool = False  # predict the quality before and after


def enhance_files(source: Source | Path, out: Path, rate: int, enhance: Callable) -> None:
    """Writes every recording, enhanced, as a .wav of 32-bit floats that cannot clip.

    `enhance(recording, power, write)` reads an open SoundFile of one channel at `rate`, whose mean square is `power`,
    passes the enhanced samples to `write`, and returns a note for the log line ("" for none).
    """
    source = source if isinstance(source, Source) else Source(source)
    predict = load_dnsmos() if source.dnsmos else None
    targets = find_targets(source.path, out)
    seconds = {path: checked_seconds(path) for path in targets}
    scores = []
    with progress(sum(seconds.values())) as advance:
        for path, target in targets.items():
            make_writable(target.parent)
            work = tempfile.TemporaryDirectory(prefix=f".{target.stem}.", suffix=".tmp", dir=target.parent)
            with work as folder, name_errors(path, target):
                note, score = enhance_one(path, Path(folder), target, rate, enhance, source, predict, advance)
            scores += [score] if predict else []
            say(f"{target}  {seconds[path]:.1f} s{note}")
    if len(scores) > 1:
        say(f"mean of {len(scores)} recordings: {describe_scores(np.mean(scores, axis=0))}")


def enhance_one(path, folder: Path, target: Path, rate: int, enhance: Callable, source: Source, predict, advance):
    """One recording; returns the note for its log line, and its predicted quality if `predict` is given."""
    import soundfile

    notes, scores = [], []
    with soundfile.SoundFile(path) as recording:
        channels, own_rate, frames = recording.channels, recording.samplerate, recording.frames
        for channel in range(channels):
            heard, made = folder / f"heard-{channel}.wav", folder / f"made-{channel}.wav"
            power = write_channel(recording, channel, heard, rate)
            if not np.isfinite(power):  # one such sample would spoil all that follow
                raise UserError(f"--source {path} holds samples that are not finite.")
            with soundfile.SoundFile(heard) as sound, open_wav(made, rate, 1, len(sound)) as written:

                def write(samples: np.ndarray, written=written) -> None:
                    written.write(samples)
                    advance(len(samples) / rate / channels)

                notes.append(enhance(sound, power, write))
            if predict:
                scores.append([predict(soundfile.read(file, dtype="float32")[0]) for file in (heard, made)])
        draft = folder / "out.wav"
        with open_wav(draft, own_rate, channels, frames) as written:
            for block in back_together(recording, folder, rate, source.high_band == "keep"):
                written.write(block)
    draft.replace(target)
    score = np.mean(scores, axis=0) if predict else None
    facts = [] if (own_rate, channels) == (rate, 1) else [f"{own_rate} Hz, {channels} channel{'s'[: channels - 1]}"]
    if own_rate > rate and source.high_band == "cut":
        facts.append(f"nothing above {rate / 2000:g} kHz (--high-band keep keeps it)")
    facts += [describe_scores(score)] if predict else []
    return "".join(dict.fromkeys(notes)) + "".join(f", {fact}" for fact in facts), score


def write_channel(recording, channel: int, path: Path, rate: int) -> float:
    """One channel at `rate` as a file; returns its mean square."""
    total = count = 0
    with open_wav(path, rate, 1, math.ceil(recording.frames * rate / recording.samplerate)) as written:
        for block in resampled(reader(recording, channel), recording.frames, recording.samplerate, rate):
            total, count = total + float(np.square(block, dtype=np.float64).sum()), count + len(block)
            written.write(block)
    return total / max(1, count)


def back_together(recording, folder: Path, rate: int, keep_high: bool) -> Iterator[np.ndarray]:
    """(samples, channels) blocks at the recording's own rate, as many samples as it has.

    With `keep_high`, what the way down to `rate` and back takes from the recording is added to what the model made.
    """
    import soundfile

    own_rate, frames = recording.samplerate, recording.frames
    keep_high = keep_high and own_rate > rate
    with contextlib.ExitStack() as stack:

        def upwards(name: str) -> list[Iterator[np.ndarray]]:
            files = [folder / f"{name}-{channel}.wav" for channel in range(recording.channels)]
            files = [stack.enter_context(soundfile.SoundFile(file)) for file in files]
            return [resampled(reader(file, 0), file.frames, rate, own_rate) for file in files]

        made = zip(*upwards("made"), strict=True)
        heard = zip(*upwards("heard"), strict=True) if keep_high else None
        place = 0
        for blocks in made:
            block = np.stack(blocks, axis=1)[: frames - place]
            if keep_high:
                recording.seek(place)
                whole = recording.read(len(block), dtype="float32", always_2d=True)
                block = block + whole - np.stack(next(heard), axis=1)[: len(block)]
            yield block
            place += len(block)


# ---- sample rates ----------------------------------------------------------------------------------------------


def reader(file, channel: int) -> Callable:
    def read(start: int, count: int) -> np.ndarray:
        file.seek(start)
        return file.read(count, dtype="float32", always_2d=True)[:, channel]

    return read


def resampled(read: Callable, frames: int, rate: int, new_rate: int) -> Iterator[np.ndarray]:
    """The samples that `read(start, count)` gives, at another rate, in blocks that join without a trace."""
    from scipy.signal import resample_poly

    up, down = new_rate // math.gcd(rate, new_rate), rate // math.gcd(rate, new_rate)
    taps = low_pass(up, down) if up != down else None
    # Blocks and margins are multiples of `down`, so that every block starts at a whole sample of the new rate too.
    margin = down * math.ceil(len(taps) / 2 / up / down) if up != down else 0
    block = down * max(1, rate * BLOCK_SECONDS // down)
    for start in range(0, frames, block):
        end = min(frames, start + block)
        left, right = min(margin, start), min(margin, frames - end)
        samples = read(start - left, left + end - start + right)
        if up == down:
            yield samples
            continue
        wave = resample_poly(samples, up, down, window=taps).astype(np.float32)
        first = left * up // down
        yield wave[first : first + math.ceil((end - start) * up / down)]


def low_pass(up: int, down: int) -> np.ndarray:
    """The resampler's filter, at `up` times the rate of its input."""
    from scipy.signal import firwin

    larger = max(up, down)
    return firwin(2 * ZERO_CROSSINGS * larger + 1, CUTOFF / larger, window=("kaiser", KAISER_BETA)).astype(np.float32)


def open_wav(path: Path, rate: int, channels: int, frames: int):
    import soundfile

    container = "WAV" if 4 * channels * frames < LARGEST_WAV else "RF64"
    return soundfile.SoundFile(path, "w", rate, channels, subtype="FLOAT", format=container)


# ---- files -----------------------------------------------------------------------------------------------------


def find_targets(source: Path, out: Path) -> dict[Path, Path]:
    """Recording -> output file. Refuses what would overwrite a recording or another output.

    A single recording becomes `out` if that ends in .wav, otherwise a file of its own name in the folder `out`.
    """
    if source.is_file():
        target = out if out.suffix.lower() == ".wav" and not out.is_dir() else out / f"{source.stem}.wav"
        if target.resolve() == source.resolve():
            raise UserError(f"--out {out} would overwrite the recording {source}.")
        return {source: target}
    everything = sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = [path for path in everything if path.suffix.lower() in SUFFIXES]
    foreign = [path for path in everything if path.suffix.lower() in UNREADABLE]
    if foreign:
        say(f"left out, because libsndfile cannot read them: {len(foreign)}, such as {foreign[0]}")
    if not files:
        raise UserError(f"--source {source} is neither a recording nor a folder of them (.wav, .flac, .mp3, ...).")
    if source.resolve() == out.resolve():
        raise UserError("--source and --out are the same folder: the recordings would be overwritten.")
    targets = {path: (out / path.relative_to(source)).with_suffix(".wav") for path in files}
    taken = {}
    for path, target in targets.items():
        if target in taken:
            raise UserError(f"--source: {taken[target]} and {path} would both become {target}: rename one of them.")
        taken[target] = path
    return targets


def checked_seconds(path: Path) -> float:
    """The length of a recording. All are looked at before the first is enhanced, which may take hours."""
    import soundfile

    with name_errors(path):
        info = soundfile.info(path)
    if not info.frames:
        raise UserError(f"--source {path} has no samples.")
    return info.frames / info.samplerate


@contextlib.contextmanager
def name_errors(path: Path, target: Path | None = None) -> Iterator[None]:
    import soundfile

    try:
        yield
    except soundfile.LibsndfileError as error:
        where = f"{path} cannot be read" + (f", or {target} cannot be written" if target else "")
        raise UserError(f"--source {where}: {error}") from None


@contextlib.contextmanager
def progress(seconds: float) -> Iterator[Callable]:
    """A bar on a terminal, which counts seconds of sound; yields what moves it forward."""
    from tqdm import tqdm

    with tqdm(
        total=round(seconds, 1), unit="s", file=sys.stderr, dynamic_ncols=True, disable=not sys.stderr.isatty(),
        bar_format="{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s [{elapsed}<{remaining}]",
    ) as bar:  # fmt: skip
        print_above(None if bar.disable else bar)
        try:
            yield bar.update
        finally:
            print_above(None)


# ---- quality without a reference -------------------------------------------------------------------------------


def describe_scores(scores: np.ndarray) -> str:
    """`scores`: noisy and enhanced, each overall and P.808."""
    (noisy, noisy_808), (made, made_808) = scores
    return f"DNSMOS {noisy:.2f} -> {made:.2f}, P.808 {noisy_808:.2f} -> {made_808:.2f}"
