"""report.html: one file, safe to open, whatever the run holds. test_report_browser.py looks at it in a browser."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common import report
from common.report import comparison_page, report_page, say_result
from common.report_charts import charts_of, compared, drawn
from common.report_samples import spectrogram
from common.report_words import duration, facts_in_words, number

EVIL = "</script><script>alert(1)</script>\"'&{{ 7 * 7 }}"
STEP = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-4, "tokens": 900, "padding": 0.1, "tokens_per_s": 450.0}
STEP |= {"data_wait_s": 0.1, "step_s": 2.0, "rss_gb": 1.5, "epoch": 0.5, "loss_channel_0": 2.0, "loss_channel_1": 3.0}
EVAL = {"event": "eval", "loss": 1.5, "text_gap": 0.25, "loss_channel_0": 1.0}
DONE = {"event": "done", "step": 2}


@pytest.fixture
def run(tmp_path):
    """run(records, name=, config=) -> a run folder."""

    def make(records, name="my <run>", **config) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"recipe": "dia_lora", **config}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make


def add_sample(run: Path, stage: str, name: str, seconds: float = 0.5, **facts) -> np.ndarray:
    """Writes a sample; returns its 16-bit values."""
    folder = run / "samples" / stage
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"name": name, **facts}))
    wave = (8000 * np.sin(np.arange(int(8000 * seconds)) / 5)).astype(np.int16)
    soundfile.write(folder / f"{name}.wav", wave, 8000, subtype="PCM_16")
    return wave


class Page(HTMLParser):
    """What a browser makes of the page: elements, sources, scripts and words."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.classes, self.sources, self.words = text, [], [], [], ""
        self.scripts, self.open, self.section, self.sections, self.policy = [], [], "", {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.open.append(tag)
        self.classes += (given.get("class") or "").split()
        self.sources += [given[name] for name in ("src", "href", "action") if name in given]
        self.section = given["id"] if tag in ("section", "header") and "id" in given else self.section
        self.policy = given["content"] if "http-equiv" in given else self.policy
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open[-1:]:
            self.words += data
            self.sections[self.section] = " ".join(f"{self.sections.get(self.section, '')} {data}".split())


def page_of(run) -> Page:
    return Page(report_page(run))


def series_of(records) -> dict[str, dict[str, list]]:
    """Chart -> curve -> values."""
    return {chart.id: {series.name: series.y for series in chart.series} for chart in charts_of(records)}


# ---- the page ----------------------------------------------------------------------------------------------------


def test_a_run_without_steps_evaluations_or_samples_has_a_report(run):
    folder = run([])
    page = page_of(folder)
    assert page.sections["samples"].startswith("Samples none") and "Configuration" in page.words
    assert "not finished" in page.sections["warnings"]
    (folder / "metrics.jsonl").unlink()  # it has just begun
    assert "not finished" in page_of(folder).sections["top"]


def test_results_are_those_of_the_export_and_their_change(run):
    evals = [EVAL | {"step": 0, "loss": 3.0, "text_gap": 0.5, "eos_recall": 0.25}]
    evals += [EVAL | {"step": 5, "loss": 2.25, "text_gap": 0.125, "eos_recall": 0.75}, EVAL | {"step": 9, "loss": 2.75}]
    folder = run([*evals, DONE])
    (folder / "export").mkdir()
    (folder / "export" / "training_config.json").write_text(json.dumps({"checkpoint": {"step": 5}}))
    words = page_of(folder).sections["results"]
    assert words.startswith("before after, step 5 change evaluation loss")
    assert "3 2.25 -0.75 better" in words and "0.5 0.125 -0.375 worse" in words
    assert "25.0 % 75.0 % +50.0 points better" in words
    (folder / "export" / "training_config.json").unlink()  # not exported: the last evaluation stands for the run
    assert "3 2.75 -0.25 better" in page_of(folder).sections["results"]


def test_without_an_evaluation_the_training_loss_is_the_result(run):
    records = [STEP | {"step": step, "loss": 5.0 - step / 10} for step in range(1, 41)]
    words = page_of(run(records)).sections["results"]
    assert (
        words.startswith("before after, step 40 change training loss") and "4.85 1.05 -3.8 better" in words
    )  # means of two steps


def test_scores_of_the_samples_are_part_of_their_evaluation(run):
    records = [EVAL | {"step": 0}, {"event": "scores", "step": 0, "wer": 0.5}]
    records += [EVAL | {"step": 4}, {"event": "scores", "step": 4, "wer": 0.25}]
    assert series_of(records)["eval-wer"]["model"] == [50.0, 25.0]
    words = page_of(run(records, config={"best_by": "text_gap"})).sections["results"]
    # What the run is judged by comes first.
    assert words.index("text gap") < words.index("word error rate") < words.index("evaluation loss")


def test_curves_hold_what_was_recorded():
    records = [
        EVAL | {"step": 0},
        STEP | {"step": 1},
        STEP | {"step": 2, "loss": 2.0},
        EVAL | {"step": 2, "loss": 1.25},
    ]
    loss = charts_of(records)[0]
    assert [(series.x, series.y) for series in loss.series] == [([1, 2], [2.5, 2.0]), ([0, 2], [1.5, 1.25])]
    series = series_of(records)
    assert series["codebooks"] == {"0": [2.0, 2.0], "1": [3.0, 3.0]}
    assert series["memory"] == {"process": [1.5, 1.5]} and series["padding"] == {"padding": [10.0, 10.0]}
    assert {"lr", "grad_norm", "speed", "time", "eval-text_gap"} <= set(series)


def test_terms_baselines_noisy_input_and_ceilings_are_drawn():
    records = [STEP | {"step": 1, "loss_ri": 0.5, "loss_gan": 0.25, "loss_d": 0.125}]
    records += [
        {"event": "baselines", "step": 0, "unigram": 4.0},
        {"event": "ceiling", "step": 0, "of": "original", "pesq": 4.5},
        EVAL | {"step": 1, "pesq": 2.0, "noisy_pesq": 1.25},
    ]
    series = series_of(records)
    assert series["terms"] == {"ri": [0.5], "gan": [0.25]} and series["gan"] == {"loss": [0.125]}
    assert series["loss"]["unigram model"] == [4.0, 4.0]
    assert series["eval-pesq"] == {"model": [2.0], "noisy input": [1.25, 1.25], "recordings": [4.5, 4.5]}


def test_the_page_of_a_long_run_stays_small_and_keeps_its_extremes():
    """20,000 steps of 18 codebooks."""
    many = {f"loss_channel_{k}": 1.2345678 for k in range(18)}
    records = [STEP | many | {"step": step, "loss": 3.0 + 0.001 * (step % 7)} for step in range(1, 20_001)]
    records[11_234]["loss"], records[14_000]["loss"], records[100]["loss"] = 99.0, -1.0, float("nan")
    curve = drawn(charts_of(records), live=True)["data"]["curve-0"]
    assert max(curve["y"]) == 99.0 and min(curve["y"]) == -1.0 and max(curve["smooth"]) < 10
    assert curve["smooth"][0] == pytest.approx(3.003, abs=0.01)
    assert curve["x"][curve["y"].index(99.0)] == 11_235 and curve["x"] == sorted(curve["x"])
    assert len(json.dumps(drawn(charts_of(records), live=False))) < 5_000_000


def test_text_from_data_is_escaped_everywhere(run):
    records = [
        {"event": "skip", "step": 1, "ids": [EVIL]},
        EVAL | {"step": 1, EVIL: 1.0},
        STEP | {"step": 1, f"loss_{EVIL}": 1.0},
        {"event": "alarm", "step": 1, "message": EVIL},
        {"event": "ceiling", "step": 0, "of": EVIL, "loss": 1.0},
    ]
    folder = run(records, config={"data": EVIL, "model": EVIL}, git_commit=EVIL, command=[EVIL])
    add_sample(folder, "recorded", "clip-0000", text=EVIL, speaker=EVIL)
    page, clean = page_of(folder), page_of(run([], name="plain"))
    assert len(page.scripts) == len(clean.scripts) == 3 and page.scripts[1:] == clean.scripts[1:]
    assert page.words.count(EVIL) >= 7 and "my <run>" in page.words and "run" not in page.tags
    assert EVIL[:40] in json.dumps(json.loads(page.scripts[0]), ensure_ascii=False).replace('\\"', '"')
    other = Page(comparison_page([folder, run(records, name=EVIL.replace("/", ""), config={"data": "b"})]))
    assert other.scripts[1:] == clean.scripts[1:] and EVIL in other.words


def test_the_page_needs_nothing_from_outside_and_runs_only_its_own_scripts(run):
    folder = run([STEP | {"step": 1}, EVAL | {"step": 1}])
    add_sample(folder, "recorded", "clip-0000", text="hello")
    page = page_of(folder)
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    assert not {"link", "iframe", "object", "form", "base"} & set(page.tags)
    own = page.text.replace(page.scripts[1], "")  # without bokeh
    assert not re.search(r"https?://|url\(|@import", own)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert page.policy.startswith("default-src 'none'") and "script-src 'unsafe" not in page.policy
    assert re.findall(r"sha256-([^']+)'", page.policy) == hashes


def test_values_that_are_not_finite_and_a_line_cut_by_a_kill_do_not_stop_it(run):
    folder = run([STEP | {"step": 1, "loss": float("nan")}, EVAL | {"step": 1, "loss": float("inf")}])
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('[]\n{"event": "eval"}\n{"step": 2, "lo')
    page = page_of(folder)
    assert "not finite at step 1" in page.sections["warnings"] and "not finite" in page.sections["results"]


def test_the_end_of_a_run_says_what_it_gained(run, capsys):
    scores = [{"event": "scores", "step": step, "wer": wer} for step, wer in ((0, 0.8), (2, 0.125))]
    evals = [EVAL | {"step": 0, "loss": 3.0}, STEP | {"step": 1}, EVAL | {"step": 2}]
    ceilings = [{"event": "ceiling", "step": 0, "of": "original", "wer": 0.05}]
    folder = run([*evals, *scores, *ceilings, DONE])
    say_result(folder, "adapter")
    lines = capsys.readouterr().out.splitlines()
    table = {line[:16].strip(): line[16:].split() for line in lines[2:6]}
    assert table["word error rate"] == ["80.0", "%", "12.5", "%", "5.0", "%"]
    assert table["evaluation loss"] == ["3", "1.5"] and table["text gap"] == ["0.25", "0.25"]
    assert f"adapter  {folder / 'export'}" in lines and f"report   {folder / 'report.html'}" in lines
    assert (folder / "report.html").read_text() and not list(folder.glob(".report*"))


def test_what_a_recipe_calls_never_fails_a_finished_run(run, capsys):
    folder = run([])
    (folder / "config.json").write_text("{")
    say_result(folder, "model")
    assert "warning: the report could not be written" in capsys.readouterr().out


# ---- warnings, skips, how to repeat it ---------------------------------------------------------------------------


def test_the_state_of_a_run_is_said(run):
    done = page_of(run([STEP | {"step": 2}, DONE], config={"steps": 2}))
    assert "finished · 2 steps" in done.sections["top"] and not done.sections["warnings"]
    stopped = page_of(run([STEP | {"step": 2}, {"event": "preempted", "step": 2}], config={"steps": 8}))
    assert "2 of 8 steps" in stopped.sections["top"] and "stopped by a signal" in stopped.sections["warnings"]
    resumed = run([{"event": "preempted", "step": 2}, {"event": "resume", "step": 2}, STEP | {"step": 3}])
    assert "not finished" in page_of(resumed).sections["warnings"]
    assert not Page(report_page(resumed, live=True)).sections["warnings"]  # someone watches it


def test_warnings_come_first_and_old_alarms_are_notes(run):
    records = [EVAL | {"step": 0}, {"event": "alarm", "step": 0, "message": "alarm: too loud"}, STEP | {"step": 1}]
    records += [STEP | {"step": 2, "data_wait_s": 1.5, "padding": 0.6}, EVAL | {"step": 2, "loss": 1.75}]
    records += [{"event": "alarm", "step": 2, "message": "warning: too quiet"}]
    records += [{"event": "export_check", "step": 2, "passed": False}, DONE]
    page = page_of(run(records))
    assert page.classes.count("warn") == 5
    for words in ("too quiet", "75% of the time", "60% of the computed positions", "worse", "export-refused/"):
        assert words in page.sections["warnings"], words
    assert "too loud" in page.sections["details"]


def test_what_was_skipped_is_listed_with_its_reason(run, tmp_path):
    (tmp_path / "tokens").mkdir()
    rejects = [{"id": "a", "reason": "too short"}, {"id": "b", "reason": "silent"}, {"id": "c", "reason": "silent"}]
    (tmp_path / "tokens" / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rejects))
    records = [{"event": "skip", "step": 3, "ids": [f"clip-{i}" for i in range(25)]}]
    records += [{"event": "pesq_missing", "step": 8, "ids": ["y"]}]
    page = page_of(run(records, config={"data": str(tmp_path / "tokens")}))
    words = page.sections["details"]
    assert "clip-19 and 5 more" in words and "clip-20" not in words and "no PESQ" in words
    assert words.index("2 clips left out") < words.index("1 clip left out")
    assert "1 step skipped" in page.sections["warnings"]


def test_the_command_that_repeats_the_run_is_shown(run):
    folder = run([STEP | {"step": 1}], ranks=4, git_commit="abc123", command=["x.py", "--a b"])
    words = page_of(folder).sections["details"]
    assert f"./launch.sh dia_lora --ranks 4 --config '{folder}/config.json' --out NEW_FOLDER" in words
    assert "abc123" in words and "--a b" in words


# ---- samples -----------------------------------------------------------------------------------------------------


def stages(page: Page) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page.text)


def test_recording_base_and_tuned_stand_side_by_side_under_their_text(run):
    folder = run([EVAL | {"step": 10}])
    for stage in ("step-00000010", "reference", "step-00000000", "original", "recorded"):
        add_sample(folder, stage, "clip-0000", text="hello", duration_ratio=0.5, ended_by_eos=stage != "step-00000000")
    page = page_of(folder)
    assert stages(page) == ["reference voice", "recording", "recording via codec", "base, before training",
                            "tuned, step 10"]  # fmt: skip
    assert page.tags.count("audio") == 5 and page.sections["samples"].count("hello") == 1
    assert page.words.count("does not stop") == 1 and "0.50 times the expected length" in page.words
    (folder / "samples" / "step-00000010" / "clip-0000.wav").unlink()
    assert "no sound" in page_of(folder).words


def test_noisy_enhanced_and_clean_stand_side_by_side(run):
    folder = run([])
    for stage, pesq in (("clean", 4.64), ("step-00000004", 2.5), ("noisy", 1.25)):
        add_sample(folder, stage, "file-0000", text="p232", pesq=pesq)
    page = page_of(folder)
    assert stages(page) == ["noisy input", "tuned, step 4", "clean recording"]
    assert "PESQ 2.5" in page.words and "PESQ 1.25" in page.words and "4.64" not in page.words


def test_the_exported_step_is_the_tuned_one(run):
    folder = run([])
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text(json.dumps({"checkpoint": {"step": 30}}))
    for step in (10, 20, 40):
        add_sample(folder, f"step-{step:08d}", "clip-0000", text="hello")
    add_sample(folder, "broken", "clip-0000", text="another folder")
    assert stages(page_of(folder)) == ["tuned, step 40"]
    add_sample(folder, "step-00000030", "clip-0000", text="hello")
    assert stages(page_of(folder)) == ["tuned, step 30"]


def test_the_sound_on_the_page_is_the_sound_on_disk(run):
    folder = run([])
    wave = add_sample(folder, "recorded", "clip-0000", text="hello", seconds=0.75)
    [source] = [source for source in page_of(folder).sources if source.startswith("data:audio/flac;base64,")]
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(source.split(",")[1])), dtype="int16")
    assert rate == 8000 and np.array_equal(heard, wave)


@pytest.mark.parametrize("content", [b"", b"RIFF-no sound"])
def test_a_sound_that_cannot_be_read_is_no_sound(run, content):
    folder = run([])
    add_sample(folder, "recorded", "clip-0000", text="hello")
    (folder / "samples" / "recorded" / "clip-0000.wav").write_bytes(content)
    (folder / "samples" / "recorded" / "clip-0001.json").write_text('{"name": "clip-00')  # being written
    page = page_of(folder)
    assert "no sound" in page.sections["samples"] and "audio" not in page.tags


def test_a_spectrogram_shows_the_sound():
    from PIL import Image

    rate, seconds = 16000, np.arange(16000) / 16000
    wave = np.where(seconds < 0.5, 0.5, 0.1) * np.sin(2 * np.pi * 1000 * seconds)
    picture = np.asarray(Image.open(io.BytesIO(spectrogram(wave, rate))).convert("L"), dtype=float)
    expected = picture.shape[0] * (1 - 1000 / 8000)  # rows from the top
    assert abs(picture[:, 75].argmax() - expected) <= 1.5 and abs(picture[:, 225].argmax() - expected) <= 1.5
    assert picture[:, 75].max() > picture[:, 225].max() and np.median(picture[:, 75]) < 0.2 * picture[:, 75].max()
    assert spectrogram(np.zeros(10), rate) and spectrogram(np.zeros(16000), rate)


# ---- comparison --------------------------------------------------------------------------------------------------


def test_several_runs_are_overlaid_and_their_numbers_compared(run):
    first = [STEP | {"step": 1}, EVAL | {"step": 1, "loss": 2.0, "text_gap": 0.5}, DONE]
    second = [STEP | {"step": 1}, EVAL | {"step": 1, "loss": 1.0, "text_gap": 0.25}, DONE]
    one = run(first, "one", config={"lr": 1e-4, "seed": 1, "out": "a"})
    two = run(second, "two", config={"lr": 3e-4, "seed": 1, "out": "b"})
    for folder, seconds in ((one, 0.5), (two, 1.0)):
        add_sample(folder, "recorded", "clip-0000", text="hello")
        add_sample(folder, "step-00000001", "clip-0000", text="hello", seconds=seconds)
    charts = {chart.id: chart for chart in compared({"one": first, "two": second})}
    assert [series.name for series in charts["loss"].series] == [
        "one: training", "one: evaluation", "two: training", "two: evaluation"]  # fmt: skip
    assert [series.run for series in charts["lr"].series] == [0, 1] and "codebooks" not in charts
    page = Page(comparison_page([one, two]))
    assert re.findall(r'class="best">(.*?)<', page.text) == ["1", "0.5"]  # the lowest loss, the highest gap
    assert "Flags that differ lr 0.0001 0.0003 Curves" in page.sections["results"]  # neither seed nor out
    assert stages(page) == ["recording via codec", "one: tuned, step 1", "two: tuned, step 1"]
    assert re.findall(r'class="drawn" style="width:([\d.]+)%"', page.text) == ["50.0", "50.0", "100.0"]


def test_runs_of_different_recipes_are_compared_without_a_winner(run):
    one, two = run([EVAL | {"step": 1}], "one"), run([EVAL | {"step": 1, "loss": 9.0}], "two")
    (two / "config.json").write_text(json.dumps({"recipe": "cmgan"}))
    page = Page(comparison_page([one, two]))
    assert "different recipes" in page.sections["warnings"] and "best" not in page.classes


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    same = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert report.labels_of(same) == list(map(str, same)) and report.labels_of(same[:1]) == ["run"]


# ---- words -------------------------------------------------------------------------------------------------------


def test_numbers_and_facts_in_words():
    assert [number(value) for value in (1.23456, 12345.6, 0.00012345, 0.0, float("nan"))] == [
        "1.235", "12,346", "0.000123", "0", "not finite"]  # fmt: skip
    assert number(0.1234, "%") == "12.3 %" and number(2.0, "dB", sign=True) == "+2 dB"
    assert [duration(value) for value in (4.21, 600, 7260)] == ["4.2 s", "10 min", "2 h 1 min"]
    facts = {"name": "a", "seconds": 1.5, "repeats": 0.25, "silent": 0.5, "longest_silence": 0.4, "clipped": 0.0}
    assert facts_in_words(facts | {"wer": 0.125, "odd_fact": 2}) == [
        "1.50 s long", "25% of its frames repeat the previous one", "50% silence", "word error rate 12.5 %",
        "odd fact 2"]  # fmt: skip
