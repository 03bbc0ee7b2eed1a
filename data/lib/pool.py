"""The worker processes of data/encode.py: each has its own codec and reads, resamples and encodes clip by clip."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from common.errors import UserError
from lib.clips import Clip
from lib.codec import PUBLISHED, describe, load_codec
from lib.resume import Job, source_key
from lib.sources import content_stamp, read_content
from lib.waveform import Reject, bandwidth, prepare, read_codes, read_samples, set_loudness

NARROW = 0.4  # of the codec's highest frequency: sound that ends below it was recorded at a lower rate
CLIPS_PER_TASK = 16  # clips handed to a worker at once: neighbours often share a recording

Todo = list[tuple[Clip, str | None]]  # clips, each with the source it had when it was last encoded (None: never)

STATE: dict = {}  # of this process: job, worker number, codec, last recording read


def run_workers(todo: Todo, job: Job, workers: int) -> Iterator[list[dict]]:
    """Encode all clips and yield results as they are ready; with one worker, everything runs in this process."""
    size = max(1, min(CLIPS_PER_TASK, len(todo) // (4 * workers)))  # small tasks, so that all workers end together
    tasks = [todo[i : i + size] for i in range(0, len(todo), size)]
    if workers == 1:
        start_worker(job, None)
        yield from map(encode_task, tasks)
        return
    # glibc returns large blocks to the system at once, and asking for them again for every activation of the codec
    # takes a third of the time on a CPU. A process reads these variables when it starts, so they are set here.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(1 << 30))
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(workers):
        numbers.put(number)
    with ProcessPoolExecutor(workers, context, start_worker, (job, numbers)) as pool:
        try:
            running = set()
            while tasks or running:
                while tasks and len(running) < 3 * workers:
                    running.add(pool.submit(encode_task, tasks.pop(0)))
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, possibly out of memory; finished clips are kept: "
                "run the same command again with fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(job: Job, numbers) -> None:
    """Set up this process; `numbers` is None when it is the main process, which encodes itself."""
    STATE.update(job=job, number=None, codec=None, recording=(None, b"", ""))
    if numbers is not None:
        STATE["number"] = numbers.get()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then stops its workers
        threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """Exit as soon as the parent is gone: workers of a killed parent would wait forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_task(task: Todo) -> list[dict]:
    return [encode_clip(clip, last_source) for clip, last_source in task]


def encode_clip(clip: Clip, last_source: str | None) -> dict:
    """The result for one clip, as plain values that can be sent between processes."""
    result = {
        "id": clip.id,
        "recording": clip.recording,
        "stamp": content_stamp(clip),  # taken before reading, so that a change during the read is seen next time
        "sha256": "",
        "source": "",
        "codes": [],
        "frames": 0,
        "seconds": 0.0,
        "narrow": 0.0,
        "reject": "",
        "unchanged": False,
    }
    try:
        data, result["sha256"] = read_recording(clip)
        result["source"] = source_key(clip, result["sha256"])
        if result["source"] == last_source:
            return result | {"unchanged": True}
        codes, result["seconds"], result["narrow"] = encode_content(clip, data, STATE["job"])
        return result | {"codes": codes.reshape(-1), "frames": len(codes)}
    except Reject as reason:
        return result | {"reject": str(reason)}


def read_recording(clip: Clip) -> tuple[bytes, str]:
    """Bytes and SHA-256. The last recording is cached, because a long one comes as many clips in a row."""
    if STATE["recording"][0] != clip.recording:
        data = read_content(clip)
        STATE["recording"] = (clip.recording, data, hashlib.sha256(data).hexdigest())
    return STATE["recording"][1:]


def encode_content(clip: Clip, data: bytes, job: Job):
    """(T, C) int16 codes, the seconds of audio they stand for, and its bandwidth in Hz if that is far less than the
    codec can hold, else 0."""
    if clip.coded:
        format = describe(Path(job.path)) if job.path else PUBLISHED[job.codec]
        codes = read_codes(data, format["codebooks"], format["codebook_size"], job.stereo, clip.id)
        return codes, len(codes) * format["hop"] / format["sample_rate"], 0.0
    wave, rate = read_samples(data, clip.start, clip.end)
    codec = worker_codec()
    longest = min(job.max_seconds, codec.max_seconds)
    samples = prepare(wave, rate, codec.sample_rate, job.stereo, job.min_seconds, longest)
    if job.loudness is not None:
        samples = set_loudness(samples, codec.sample_rate, job.loudness)
    highest = bandwidth(wave, rate)
    narrow = highest if highest < NARROW * codec.sample_rate / 2 else 0.0
    return encode_samples(codec, samples, job.stereo), wave.shape[1] / rate, narrow


def worker_codec():
    """This process's codec, loaded for the first clip that needs it: unchanged files need none."""
    if STATE["codec"] is None:
        import torch

        if STATE["number"] is not None:
            torch.set_num_threads(1)  # one core per worker: more threads would only compete for the cores
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{(STATE['number'] or 0) % torch.cuda.device_count()}"
        STATE["codec"] = load_codec(Path(STATE["job"].path), device)
    return STATE["codec"]


def encode_samples(codec, samples, stereo: bool):
    """(T, C) int16 codes. With `stereo`, L and R side by side; a mono source gets L's codes twice."""
    import torch

    codes = [codec.encode(channel) for channel in samples]
    if stereo and len(codes) == 1:
        codes *= 2
    codes = torch.cat(codes, dim=1).numpy()
    assert 0 <= codes.min() and codes.max() < codec.codebook_size, "the codec returned a code outside its codebook"
    return codes.astype(np.int16)
