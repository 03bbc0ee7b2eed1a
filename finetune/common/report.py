"""report.html: one self-contained page about a run, and comparison.html about several. ./launch.sh report RUN...

This file collects the facts; report_charts.py makes the curves, report_samples.py the sounds, report_words.py the
words; report_page/ holds the page itself. Jinja escapes everything that comes from data, and the page's security policy
allows only the scripts that it was written with, and nothing from outside.
"""

import base64
import functools
import hashlib
import json
import shlex
import statistics
import time
from pathlib import Path

from common.report_charts import CEILINGS, GROUPS, charts_of, compared, drawn, evaluations, fields_of, is_number
from common.report_samples import compared_cards, data_uri, sample_cards
from common.report_words import HEADLINES, duration, measure_of, number, plural
from common.runtime import say

PAGE = Path(__file__).parent / "report_page"
LISTED = 20  # ids of skipped clips, and reasons for rejected ones
WAITING = 0.2  # share of the time waiting for data that is worth a warning
PADDED = 0.3  # share of padding
UNCHANGED = 0.001  # relative difference that is neither better nor worse


def say_result(run: Path, artifact: str) -> None:
    """The end of a run: writes its report, prints its headline numbers before and after training, and where all is.

    A report that cannot be written does not make a failure of a finished run.
    """
    file = run / "report.html"
    try:
        lines = closing_table(run)
        write_page(report_page(run), file)
    except Exception as error:
        lines = [f"warning: the report could not be written: {error!r}; ./launch.sh report {run} tries again"]
    say("\n".join(["", *lines, ""]))
    say(f"{artifact:8} {run / 'export'}\nsamples  {run / 'samples'}\nreport   {file}")


def closing_table(run: Path) -> list[str]:
    """The results as lines of text."""
    results = results_of(read_run(run))
    rows = [["", *results["columns"]]] + [[row["label"], *row["cells"]] for row in results["rows"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return lines if results["rows"] else []


def write_page(page: str, file: Path) -> Path:
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(page, encoding="utf-8")
    draft.replace(file)
    return file


def read_records(path: Path) -> list[dict]:
    """The records of metrics.jsonl, without a line that a kill cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


# ---- pages -------------------------------------------------------------------------------------------------------


def report_page(run: Path, live: bool = False) -> str:
    """`live`: the page asks the server that it comes from for news."""
    facts = read_run(run)
    cards, on_disk = sample_cards(run, facts["shown_step"])
    figures = [
        {"name": path.stem, "picture": data_uri(path.read_bytes(), "image/png")}
        for path in sorted((run / "figures").glob("*.png"))
    ]
    return render(
        charts_of(facts["records"]),
        live,
        title=f"{facts['recipe']}: {facts['name']}",
        run=facts,
        warnings=warnings_of(facts, live),
        results=results_of(facts),
        evaluations=evaluation_table(facts),
        notes=notes_of(facts),
        cards=cards,
        cards_left_out=on_disk - len(cards),
        figures=figures,
        repeat=repeat_command(facts),
        config=json.dumps(facts["config"], indent=2),
    )


def comparison_page(runs: list[Path]) -> str:
    labels = labels_of(runs)
    all_facts = {label: read_run(run) for label, run in zip(labels, runs, strict=True)}
    warnings = [f"{label}: {text}" for label, facts in all_facts.items() for text in warnings_of(facts)]
    if len({facts["recipe"] for facts in all_facts.values()}) > 1:
        warnings.insert(0, "These runs used different recipes: their losses cannot be compared.")
    return render(
        compared({label: facts["records"] for label, facts in all_facts.items()}),
        False,
        title=f"{len(runs)} runs compared",
        warnings=warnings,
        comparison=comparison_of(all_facts),
        cards=compared_cards({label: (facts["folder"], facts["shown_step"]) for label, facts in all_facts.items()}),
    )


def render(charts: list, live: bool, **values) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    library, script = plot_library(), (PAGE / "page.js").read_text(encoding="utf-8")
    # Hashes instead of 'unsafe-inline': nothing else on the page can run, even if it were not escaped.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; connect-src 'self'; "
        f"script-src {_hash(library)} {_hash(script)}"
    )
    # In a script element, only "</" could end the JSON.
    points = json.dumps(drawn(charts, live), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return environment.get_template("page.html").render(
        style=(PAGE / "page.css").read_text(encoding="utf-8"),
        library=library,
        script=script,
        policy=policy,
        points=points,
        live=live,
        groups={title: [chart for chart in charts if chart.group == id_] for id_, title in GROUPS.items()},
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        **values,
    )


@functools.cache
def plot_library() -> str:
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# ---- facts about one run -----------------------------------------------------------------------------------------


def read_run(run: Path) -> dict:
    """What the folder holds; a run that has just begun has no records yet."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    path = run / "metrics.jsonl"
    records = [record for record in (read_records(path) if path.is_file() else []) if "step" in record]
    evals = evaluations(records)
    checkpoint = exported_checkpoint(run / "export")
    facts = {
        "folder": run,
        "name": run.resolve().name,
        "recipe": config.get("recipe", "unknown recipe"),
        "config": config,
        "flags": config.get("config") or {},
        "records": records,
        "steps": [record for record in records if "event" not in record],
        "evals": evals,
        "checkpoint": checkpoint,
        # The step whose numbers and samples stand for the run: of the export, else of the last evaluation.
        "shown_step": checkpoint.get("step", evals[-1]["step"] if evals else None),
    }
    return facts | {"status": status_of(facts)}


def exported_checkpoint(export: Path) -> dict:
    """Step and score of the exported checkpoint."""
    for name in ("training_config.json", "config.json", "adapter_config.json"):
        if (export / name).is_file():
            content = json.loads((export / name).read_text(encoding="utf-8"))
            if "checkpoint" in content:
                return content["checkpoint"]
    return {}


def events(facts: dict, name: str) -> list[dict]:
    return [record for record in facts["records"] if record.get("event") == name]


def status_of(facts: dict) -> dict:
    """Whether it finished, how far it came, and how long that took."""
    last = facts["steps"][-1]["step"] if facts["steps"] else 0
    planned = facts["flags"].get("steps") or 0
    ends = [record["event"] for record in facts["records"] if record.get("event") in ("done", "preempted", "resume")]
    words = {"done": "finished", "preempted": "stopped by a signal"}
    seconds = sum(record.get("step_s") or 0.0 for record in facts["steps"])
    parts = [f"{last:,} of {planned:,} steps" if planned and planned != last else plural(last, "step")]
    tokens = sum(record.get("tokens", 0) for record in facts["steps"])
    memory = max((record.get("vram_gb", record.get("rss_gb", 0.0)) for record in facts["steps"]), default=0.0)
    if seconds:
        parts += [f"{duration(seconds)} of training", f"{tokens / seconds:,.0f} tokens per second"]
    if memory:
        parts.append(f"{memory:.2f} GB on the main rank")
    if facts["config"].get("ranks"):
        parts.append(plural(facts["config"]["ranks"], "rank"))
    if "step" in facts["checkpoint"]:
        parts.append(f"step {facts['checkpoint']['step']:,} exported")
    return {"word": words.get(ends[-1] if ends else "", "not finished"), "parts": parts}


def before_and_after(facts: dict) -> tuple[dict, dict]:
    """The evaluations before training and at the shown step; without any, the first and the last training losses."""
    evals, steps = facts["evals"], facts["steps"]
    if evals:
        after = next((record for record in evals if record["step"] == facts["shown_step"]), evals[-1])
        before = evals[0] if evals[0]["step"] == 0 and evals[0] is not after else {}
        return before, after
    losses = [record["loss"] for record in steps if is_number(record.get("loss"))]
    if not losses:
        return {}, {}
    few = max(1, len(losses) // 20)
    before = {"loss": statistics.fmean(losses[:few])}
    after = {"loss": statistics.fmean(losses[-few:]), "step": steps[-1]["step"]}
    return before, after


def results_of(facts: dict) -> dict:
    """The headline numbers before and after training, and what recordings or the noisy input score: the names of the
    columns, and rows of cells."""
    before, after = before_and_after(facts)
    names = [name for name in HEADLINES if isinstance(after.get(name), (int, float))]
    chosen = facts["flags"].get("best_by")
    names.sort(key=lambda name: name != chosen)  # what the run is judged by comes first
    columns = {"noisy input": {name: after.get(f"noisy_{name}") for name in names}, "before": before}
    columns[f"after, step {after.get('step', 0):,}"] = after
    for record in events(facts, "ceiling"):
        columns[CEILINGS.get(record.get("of"), str(record.get("of")))] = record
    columns = {head: record for head, record in columns.items() if any(is_number(record.get(name)) for name in names)}
    rows = []
    for name in names:
        measure = measure_of(name)
        if not facts["evals"]:
            measure = measure._replace(label="training loss", note="--eval-data or --eval-split adds an evaluation")
        values = [record.get(name) for record in columns.values()]
        rows.append(
            {
                "label": measure.label,
                "note": measure.note,
                "cells": [number(value, measure.unit) if isinstance(value, (int, float)) else "" for value in values],
                "change": change(before.get(name), after[name], measure),
            }
        )
    return {"columns": list(columns), "rows": rows}


def change(before: float | None, after: float, measure) -> dict:
    """How a number changed, and whether that is better."""
    if not is_number(before) or not is_number(after):
        return {"text": "", "kind": ""}
    difference = after - before
    text = f"{100 * difference:+.1f} points" if measure.unit == "%" else number(difference, measure.unit, sign=True)
    if not measure.better or abs(difference) <= UNCHANGED * max(abs(after), abs(before)):
        return {"text": text, "kind": ""}
    return {"text": text, "kind": "better" if (difference < 0) == (measure.better == "low") else "worse"}


def evaluation_table(facts: dict) -> dict:
    """Every evaluation with every metric."""
    records = [(f"{record['step']:,}", record) for record in facts["evals"]]
    records += [("test set", record) for record in events(facts, "test")]
    names = [name for name in fields_of([record for _, record in records]) if "_channel_" not in name]
    return {"names": names, "rows": [(head, [_cell(record.get(name)) for name in names]) for head, record in records]}


def _cell(value) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""


# ---- warnings, and what was left out -----------------------------------------------------------------------------


def warnings_of(facts: dict, live: bool = False) -> list[str]:
    """`live`: the run is being watched, so it is no surprise that it has not finished."""
    texts = []
    word, skips = facts["status"]["word"], events(facts, "skip")
    if word != "finished" and not live:
        texts.append(f"The run is {word}: the same command with the same --out continues it.")
    if skips:
        ids = list(dict.fromkeys(name for record in skips for name in record.get("ids", [])))
        texts.append(f"{plural(len(skips), 'step')} skipped: {_listed(ids)}")
    texts += alarms_of(facts)[0]
    for record in events(facts, "export_check")[-1:]:
        if not record.get("passed"):
            texts.append("The export's outputs differ from the training engine's; it was moved to export-refused/.")
    for row in results_of(facts)["rows"][:1]:
        if row["change"]["kind"] == "worse":
            texts.append(f"The {row['label']} is worse than it was at the start ({row['change']['text']}).")
    broken = [f"{record['step']:,}" for record in facts["evals"] if not is_number(record.get("loss", 0.0))]
    if broken:
        texts.append(f"The evaluation loss is not finite at step {_listed(broken)}.")
    return texts + _wasted(facts)


def alarms_of(facts: dict) -> tuple[list[str], list[str]]:
    """What the recipe raised at its last evaluation or later, and before that: what has passed since, perhaps."""
    last = facts["evals"][-1]["step"] if facts["evals"] else 0
    now, earlier = [], []
    for record in events(facts, "alarm"):
        message = str(record.get("message")).removeprefix("warning: ").removeprefix("alarm: ")
        (now if record["step"] >= last else earlier).append(f"Step {record['step']:,}: {message}")
    return now, earlier


def _wasted(facts: dict) -> list[str]:
    texts, settled = [], facts["steps"][1:]  # the first step also warms up
    total = sum(record.get("step_s", 0.0) for record in settled)
    waited = sum(record.get("data_wait_s", 0.0) for record in settled)
    if waited > WAITING * total:
        texts.append(f"{waited / total:.0%} of the time was spent waiting for data.")
    padding = [record["padding"] for record in settled if is_number(record.get("padding"))]
    if padding and statistics.fmean(padding) > PADDED:
        texts.append(f"{statistics.fmean(padding):.0%} of the computed positions are padding.")
    return texts


def notes_of(facts: dict) -> list[tuple[str, str]]:
    """What was not trained on or not measured, with the clips' ids, and warnings that have passed."""
    rows = []
    for record in events(facts, "skip"):
        rows.append((f"step {record['step']:,} skipped: loss or gradient not finite", _listed(record.get("ids", []))))
    for record in events(facts, "pesq_missing"):
        rows.append((f"no PESQ for labels of step {record['step']:,}", _listed(record.get("ids", []))))
    rows += [("warning at an earlier evaluation", text) for text in alarms_of(facts)[1]]
    for reason, ids in _rejected(facts["flags"].get("data") or ""):
        rows.append((f"{plural(len(ids), 'clip')} left out when the data was prepared: {reason}", _listed(ids)))
    return rows


def _rejected(data: str) -> list[tuple[str, list[str]]]:
    """Why data/encode.py rejected clips, and which; the most frequent reasons first."""
    path = Path(data, "rejects.jsonl")
    by_reason = {}
    for line in read_records(path) if data and path.is_file() else []:
        by_reason.setdefault(str(line.get("reason")), []).append(line.get("id"))
    return sorted(by_reason.items(), key=lambda item: -len(item[1]))[:LISTED]


def _listed(words: list) -> str:
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return ", ".join(map(str, words[:LISTED])) + more


def repeat_command(facts: dict) -> str:
    config, place = facts["config"], shlex.quote(str(facts["folder"] / "config.json"))
    ranks = f" --ranks {config['ranks']}" if config.get("ranks") else ""
    return f"./launch.sh {facts['recipe']}{ranks} --config {place} --out NEW_FOLDER"


# ---- several runs ------------------------------------------------------------------------------------------------


def labels_of(runs: list[Path]) -> list[str]:
    """The folders' names, or their paths if two names are the same."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else list(map(str, runs))


def comparison_of(all_facts: dict[str, dict]) -> dict:
    """A table of headline numbers, the best of each marked, and the flags that differ."""
    runs = list(all_facts.values())
    comparable = len({facts["recipe"] for facts in runs}) == 1
    rows = [("state", [(", ".join([facts["status"]["word"], *facts["status"]["parts"]]), False) for facts in runs])]
    for name in HEADLINES:
        measure = measure_of(name)
        values = [before_and_after(facts)[1].get(name) for facts in runs]
        finite = [value for value in values if is_number(value)]
        if not finite:
            continue
        best = None
        if comparable and measure.better and len(finite) > 1:
            best = min(finite) if measure.better == "low" else max(finite)
        cells = [(number(v, measure.unit) if is_number(v) else "", best is not None and v == best) for v in values]
        rows.append((measure.label, cells))
    flags = [{"recipe": facts["recipe"], "ranks": facts["config"].get("ranks")} | facts["flags"] for facts in runs]
    different = []
    for key in flags[0]:
        values = [str(one.get(key, "")) for one in flags]
        if key != "out" and len(set(values)) > 1:
            different.append((key, values))
    return {"labels": list(all_facts), "rows": rows, "flags": different}
