"""report.html: one file, safe to open, whatever the run holds."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common.report import write_report

EVIL = "<script>alert(1)</script>\"'&"
STEP = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-4}
EVAL = {"event": "eval", "loss": 1.5, "text_gap": 0.25, "loss_channel_0": 1.0}


@pytest.fixture
def run(tmp_path):
    """run(records, config=) -> a run folder."""

    def make(records, **config) -> Path:
        folder = tmp_path / "my <run>"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"recipe": "dia_lora", **config}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make


def add_sample(run: Path, step: str, name: str, **facts):
    folder = run / "samples" / step
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"name": name, **facts}))
    (folder / f"{name}.wav").write_bytes(b"RIFF-sound")
    (folder / f"{name}.png").write_bytes(b"PNG-picture")


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.words = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words += data


def page_of(run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_a_run_without_steps_evaluations_or_samples_has_a_report(run):
    page = page_of(run([]))
    assert "none" in page.words and "Configuration" in page.words and "Evaluation" not in page.words


def test_curves_and_evaluation_are_shown(run):
    page = page_of(run([EVAL | {"step": 0}, STEP | {"step": 1}, STEP | {"step": 2}, EVAL | {"step": 2}]))
    assert page.tags.count("img") == 1 and "text_gap" in page.words and "1.5000" in page.words
    assert "loss_channel_0" not in page.words
    assert base64.b64decode(page.sources[0].split(",")[1]).startswith(b"\x89PNG")


def test_the_last_evaluation_is_set_against_the_base(run):
    evals = [EVAL | {"step": 0, "loss": 3.0}, EVAL | {"step": 5, "loss": 2.25, "stop_rate": 1.0}]
    words = page_of(run(evals)).words
    assert "last - base" in words and "-0.7500" in words and "nan" in words  # the base has no stop rate
    assert "last - base" not in page_of(run(evals[1:])).words


def test_samples_stand_under_their_text_with_sound_and_picture(run):
    folder = run([])
    add_sample(folder, "recorded", "clip-0000", text="hello", seconds=1.25)
    add_sample(folder, "step-00000010", "clip-0000", text="hello", seconds=1.5)
    add_sample(folder, "recorded", "clip-0001", text="bye")
    page = page_of(folder)
    assert page.tags.count("audio") == 3 and page.words.count("hello") == 1
    assert [base64.b64decode(s.split(",")[1]) for s in page.sources[:2]] == [b"RIFF-sound", b"PNG-picture"]
    (folder / "samples" / "recorded" / "clip-0000.wav").unlink()
    assert "no sound" in page_of(folder).words


def test_text_from_data_is_escaped_everywhere(run):
    folder = run([{"event": "skip", "step": 1, "ids": [EVIL]}, EVAL | {"step": 1, EVIL: 1.0}], data=EVIL)
    add_sample(folder, "recorded", "clip-0000", text=EVIL, speaker=EVIL)
    page = page_of(folder)
    assert "script" not in page.tags and page.words.count(EVIL) >= 4
    assert "my <run>" in page.words and "run" not in page.tags


def test_the_page_needs_nothing_from_outside(run):
    folder = run([STEP | {"step": 1}, EVAL | {"step": 1}])
    add_sample(folder, "recorded", "clip-0000", text="hello")
    page = page_of(folder)
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", (folder / "report.html").read_text())


def test_values_that_are_not_finite_and_a_line_cut_by_a_kill_do_not_stop_it(run):
    folder = run([STEP | {"step": 1, "loss": float("nan")}, EVAL | {"step": 1, "loss": float("inf")}])
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 2, "lo')
    assert "inf" in page_of(folder).words
