"""Samples: shared by all ranks, and never the end of a training."""

import json
import threading

import numpy as np
import pytest

from common.runtime import Process
from common.samples import repeat_share, take_samples

PROMPTS = [{"name": f"clip-{i}", "text": f"text {i}"} for i in range(4)]


def rank(number, world=2):
    return Process(number, world, None)


def speaker(prompts):
    return [(np.full((3, 9), int(p["name"][-1]), dtype=np.int16), {"seconds": 0.1}) for p in prompts]


def test_two_ranks_share_the_work(tmp_path):
    """Ranks are threads here: all that matters is that they speak at the same time."""
    both, files = threading.Barrier(2, timeout=300), {}

    def speak(prompts):
        both.wait()
        return speaker(prompts)

    def work(number):
        files[number] = take_samples(PROMPTS, speak, tmp_path, rank(number), False)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert sorted(f.stem for f in files[0] + files[1]) == [p["name"] for p in PROMPTS]
    for prompt in PROMPTS:
        codes = np.load(tmp_path / f"{prompt['name']}.npy", allow_pickle=False)
        assert (codes == int(prompt["name"][-1])).all()
        facts = json.loads((tmp_path / f"{prompt['name']}.json").read_text())
        assert facts == prompt | {"seconds": 0.1}


def test_a_generator_that_raises_is_a_warning(tmp_path, capsys):
    def speak(prompts):
        raise RuntimeError("out of memory")

    assert take_samples(PROMPTS, speak, tmp_path, rank(1), False) == []
    assert "rank 1" in (said := capsys.readouterr().out) and "out of memory" in said


def test_a_disk_that_refuses_is_a_warning_too(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert take_samples(PROMPTS, speaker, tmp_path / "file", rank(0), False) == []
    assert "samples could not be written" in capsys.readouterr().out


@pytest.mark.parametrize("must_join", [True, False])
def test_a_rank_without_a_prompt_joins_only_where_the_model_is_sharded(tmp_path, must_join):
    calls = []

    def speak(prompts):
        calls.append(prompts)
        return speaker(prompts)

    assert take_samples(PROMPTS[:1], speak, tmp_path, rank(1), must_join) == []
    assert calls == ([PROMPTS[:1]] if must_join else []) and not list(tmp_path.iterdir())


def test_repeat_share_counts_equal_neighbours():
    codes = np.array([[1, 1], [1, 1], [1, 2], [1, 2], [1, 2]])
    assert repeat_share(codes) == 3 / 4
    assert repeat_share(codes[:1]) == repeat_share(codes[:0]) == 0.0
