"""The processes that encode: each has its own codec, reads, resamples and encodes clip by clip."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from lib.errors import UsageError
from lib.resume import Job, source_key
from lib.sources import Clip, content_stamp, read_content

CLIPS_PER_TASK = 16  # what a worker takes at once: clips that follow each other often share a file

Todo = list[tuple[Clip, str | None]]  # a clip, and the source it was last seen with

STATE: dict = {}  # of this process: job, number, codec, last content


def run_workers(todo: Todo, job: Job, workers: int) -> Iterator[list[dict]]:
    """Results in the order in which they get ready; one worker is this process itself."""
    size = max(1, min(CLIPS_PER_TASK, len(todo) // (4 * workers)))  # small enough that all end together
    tasks = [todo[i : i + size] for i in range(0, len(todo), size)]
    if workers == 1:
        start(job, None)
        yield from map(encode_task, tasks)
        return
    # glibc gives large blocks back to the system at once; taking them again for every activation of a codec is
    # a third of the time on a CPU. Read at the start of a process, hence here.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(1 << 30))
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(workers):
        numbers.put(number)
    with ProcessPoolExecutor(workers, context, start, (job, numbers)) as pool:
        try:
            running = set()
            while tasks or running:
                while tasks and len(running) < 3 * workers:
                    running.add(pool.submit(encode_task, tasks.pop(0)))
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield future.result()
        except BrokenProcessPool:
            raise UsageError(
                "a worker process died, perhaps for lack of memory; finished clips are kept: "
                "run the same command again, with fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def start(job: Job, numbers) -> None:
    STATE.update(job=job, number=None, codec=None, content=(None, b"", ""))
    if numbers is not None:
        STATE["number"] = numbers.get()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
        threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A parent that is killed says nothing to its workers, which would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def codec_of_worker():
    """Loaded by the first clip that needs it: a run that only finds unchanged files needs none."""
    if STATE["codec"] is None:
        import torch

        from lib.codec import load_codec

        if STATE["number"] is not None:
            torch.set_num_threads(1)  # one core a worker: threads of several codecs would only fight
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{(STATE['number'] or 0) % torch.cuda.device_count()}"
        STATE["codec"] = load_codec(Path(STATE["job"].path), device)
    return STATE["codec"]


def encode_task(task: Todo) -> list[dict]:
    return [encode_clip(clip, last_source) for clip, last_source in task]


def encode_clip(clip: Clip, last_source: str | None) -> dict:
    """What one clip became, as plain values that travel between processes."""
    from lib.waveform import Reject

    result = {
        "id": clip.id,
        "place": clip.place,
        "stamp": content_stamp(clip),  # before reading: a change while we read is a change next time
        "sha256": "",
        "source": "",
        "codes": [],
        "frames": 0,
        "seconds": 0.0,
        "reject": "",
        "unchanged": False,
    }
    try:
        data, result["sha256"] = content_of(clip)
        result["source"] = source_key(clip, result["sha256"])
        if result["source"] == last_source:
            return result | {"unchanged": True}
        codes, result["seconds"] = codes_of(clip, data, STATE["job"])
        return result | {"codes": codes.reshape(-1), "frames": len(codes)}
    except Reject as reason:
        return result | {"reject": str(reason)}


def content_of(clip: Clip) -> tuple[bytes, str]:
    """Bytes and SHA-256; the last content is kept, for a long recording comes as many clips in a row."""
    if STATE["content"][0] != clip.place:
        data = read_content(clip)
        STATE["content"] = (clip.place, data, hashlib.sha256(data).hexdigest())
    return STATE["content"][1:]


def codes_of(clip: Clip, data: bytes, job: Job):
    """(T, C) int16 and the seconds of sound they stand for."""
    from lib.waveform import prepare, read_codes, read_samples

    if clip.coded:
        from lib.codec import PUBLISHED, describe

        format = describe(Path(job.path)) if job.path else PUBLISHED[job.codec]
        codes = read_codes(data, format["codebooks"], format["codebook_size"], job.stereo, clip.id)
        return codes, len(codes) * format["hop"] / format["sample_rate"]
    wave, rate = read_samples(data, clip.start, clip.end)
    codec = codec_of_worker()
    longest = min(job.max_seconds, codec.max_seconds)
    samples = prepare(wave, rate, codec.sample_rate, job.stereo, job.min_seconds, longest)
    return encode_samples(codec, samples, job.stereo), wave.shape[1] / rate


def encode_samples(codec, samples, stereo: bool):
    """(T, C) int16; for a stereo job L and R side by side, R a copy of L's codes where the source is mono."""
    import numpy as np
    import torch

    codes = [codec.encode(channel) for channel in samples]
    if stereo and len(codes) == 1:
        codes *= 2
    codes = torch.cat(codes, dim=1).numpy()
    assert 0 <= codes.min() and codes.max() < codec.codebook_size, "the codec left its own range"
    return codes.astype(np.int16)
