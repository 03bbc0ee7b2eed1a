"""The commands of data/: --help is fast, and flags change only on purpose."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import support

ROOT = Path(__file__).parents[2]
FLAGS = {
    "encode": "codec codec-weights source format out prompts audio-root text-column captions musiccaps-split "
    "missing-text stereo min-seconds max-seconds max-reject workers shard merge",
    "decode": "codec-weights tensorboard step",
    "demo": "out model",
    "score": "references similarity wer",
    "check": "listen codec-weights",
    "pairs": "clean noisy noise dn-lm snr out sample-rate seed min-seconds max-reject workers",
    "pair_speakers": "out min-seconds max-seconds seed allow-no-ref",
}


@pytest.mark.parametrize("name", FLAGS)
def test_help(name):
    begin = support.child_seconds()
    command = [sys.executable, ROOT / f"data/{name}.py", "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert support.child_seconds() - begin < 2
    words = {word.strip("[],") for word in text.split("usage:")[1].split("\n\n")[0].split()}
    assert {word for word in words if word.startswith("--")} == {f"--{flag}" for flag in FLAGS[name].split()}
    assert f"python data/{name}.py" in text  # the docstring shows how to call it
