"""The commands of data/: --help is fast, and flags change only on purpose."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = {
    "encode": "codec codec-weights codec-revision source format out prompts audio-root source-revision text-column "
    "captions musiccaps-split strip-prefix missing-text stereo loudness min-seconds max-seconds max-reject "
    "workers shard merge",
    "decode": "codec-weights codec-revision",
    "fetch": "revision no-weights result",
    "demo": "out model",
    "score": "references similarity wer dnsmos",
    "check": "listen codec-weights",
    "pairs": "clean noisy noise voicebank source dn-lm split snr out sample-rate seed min-seconds max-reject workers",
    "cluster_speakers": "out embedder threshold",
    "pair_speakers": "out min-seconds max-seconds seed allow-no-ref",
}


@pytest.mark.parametrize("name", FLAGS)
def test_help(name):
    command = [sys.executable, "-X", "importtime", ROOT / f"data/{name}.py", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    text = done.stdout
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & {"torch", "transformers"}
    words = {word.strip("[],") for word in text.split("usage:")[1].split("\n\n")[0].split()}
    assert {word for word in words if word.startswith("--")} == {f"--{flag}" for flag in FLAGS[name].split()}
    assert f"python data/{name}.py" in text  # the docstring shows how to call it
