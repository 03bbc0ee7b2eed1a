"""report.html: one self-contained page about a run, and comparison.html about several. ./launch.sh report RUN...

This file collects the facts; report_charts.py makes the curves, report_samples.py the sounds, report_words.py the
words; report_page/ holds the page itself, which draws the curves with bokeh. Jinja escapes everything that comes from
data, and the page's security policy allows only the scripts that it was written with, and nothing from outside.
"""

import base64
import functools
import hashlib
import json
import shlex
import statistics
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from common.report_charts import GROUPS, charts_of, compared, evaluations, fields_of, thinned
from common.report_samples import compared_cards, data_uri, sample_cards
from common.report_words import HEADLINES, duration, measure_of, number, plural
from common.runtime import say

PAGE = Path(__file__).parent / "report_page"
TILES = 6
ROWS = 8  # of the table at the end of a run
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
    """Lines of text: before training, after it, and what the recordings or the noisy input score, if that is known."""
    facts = read_run(run)
    after = shown_evaluation(facts)
    before = base_evaluation(facts)
    names = [name for name in headline_names(facts) if name in after][:ROWS]
    ceilings = {record.get("of"): record for record in events(facts, "ceiling")}
    noisy = {name: after.get(f"noisy_{name}") for name in names}
    columns = {
        "noisy input": noisy,
        "before": before,
        f"after, step {after['step']}" if after else "": after,
        "codec": ceilings.get("recorded", {}),
        "recording": ceilings.get("original", {}),
    }
    columns = {head: record for head, record in columns.items() if any(_is_number(record.get(name)) for name in names)}
    rows = [["", *columns]]
    for name in names:
        measure = measure_of(name)
        cells = [record.get(name) for record in columns.values()]
        rows.append([measure.label, *(number(cell, measure.unit) if _is_number(cell) else "" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows if names
    ]


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
        records += [record] if isinstance(record, dict) else []
    return records


# ---- pages -------------------------------------------------------------------------------------------------------


def report_page(run: Path, live: bool = False) -> str:
    """`live`: the page asks the server that it comes from for news."""
    facts = read_run(run)
    cards, on_disk = sample_cards(run, facts["shown_step"])
    figures = [
        {"title": path.stem.replace("-", " "), "name": path.stem, "picture": data_uri(path.read_bytes(), "image/png")}
        for path in sorted((run / "figures").glob("*.png"))
    ]
    return render(
        thinned(charts_of(facts["records"])),
        live,
        title=f"{facts['recipe']}: {facts['name']}",
        runs=[facts],
        warnings=warnings_of(facts, live),
        earlier_warnings=alarms_of(facts)[1],
        tiles=tiles_of(facts),
        table=evaluation_table(facts),
        data=data_facts(facts),
        skipped=skipped_of(facts),
        cards=cards,
        cards_left_out=on_disk - len(cards),
        figures=figures,
        repeat=repeat_facts(facts),
        config=json.dumps(facts["config"], indent=2),
        comparison=None,
    )


def comparison_page(runs: list[Path]) -> str:
    all_facts = [read_run(run) for run in runs]
    labels = labels_of(runs)
    warnings = [
        f"{label}: {text}" for label, facts in zip(labels, all_facts, strict=True) for text in warnings_of(facts)
    ]
    if len({facts["recipe"] for facts in all_facts}) > 1:
        warnings.insert(0, "These runs used different recipes: their losses cannot be compared.")
    shown = {label: (run, facts["shown_step"]) for label, run, facts in zip(labels, runs, all_facts, strict=True)}
    return render(
        thinned(compared({label: facts["records"] for label, facts in zip(labels, all_facts, strict=True)})),
        False,
        title=f"{len(runs)} runs compared",
        runs=all_facts,
        warnings=warnings,
        earlier_warnings=[],
        tiles=[],
        table=None,
        data=[],
        skipped=[],
        cards=compared_cards(shown),
        cards_left_out=0,
        figures=[],
        repeat=None,
        config="",
        comparison=comparison_of(labels, all_facts),
    )


def render(charts: list[dict], live: bool, **values) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    library, script = plot_library(), (PAGE / "page.js").read_text(encoding="utf-8")
    groups = [(id_, title) for id_, title in GROUPS.items() if any(chart["group"] == id_ for chart in charts)]
    return environment.get_template("page.html").render(
        style=(PAGE / "page.css").read_text(encoding="utf-8"),
        library=library,
        script=script,
        # Hashes instead of 'unsafe-inline': nothing else on the page can run, even if it were not escaped.
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; connect-src 'self'; "
        f"script-src {' '.join(_hash(text) for text in (library, script) if text)}",
        charts=_json(charts),
        groups=groups,
        live=live,
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        plural=plural,
        **values,
    )


@functools.cache
def plot_library() -> str:
    """bokeh's scripts, which pip installed; empty in an environment without them."""
    package = find_spec("bokeh")
    if not package:
        return ""
    folder = Path(package.submodule_search_locations[0], "server", "static", "js")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js"))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value) -> str:
    """JSON for a script element, which only "</" could end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- facts about one run -----------------------------------------------------------------------------------------


def read_run(run: Path) -> dict:
    """What the folder holds; a run that has just begun has no records yet."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    path = run / "metrics.jsonl"
    records = [record for record in (read_records(path) if path.is_file() else []) if "step" in record]
    evals = evaluations(records)
    steps = [record for record in records if "event" not in record]
    checkpoint = exported_checkpoint(run / "export")
    evaluated = [record["step"] for record in evals]
    facts = {
        "folder": run,
        "name": run.resolve().name,
        "recipe": config.get("recipe", "unknown recipe"),
        "config": config,
        "flags": config.get("config") or {},
        "model": _short_name((config.get("config") or {}).get("model") or ""),
        "records": records,
        "steps": steps,
        "evals": evals,
        "checkpoint": checkpoint,
        # The step whose numbers and samples stand for the run: of the export, else of the last evaluation.
        "shown_step": checkpoint.get("step", evaluated[-1] if evaluated else None),
    }
    return facts | {"status": status_of(facts, path)}


def _short_name(model: str) -> str:
    """A hub id as it is, of a folder only its name."""
    return Path(model).name if model.count("/") != 1 else model


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


def status_of(facts: dict, metrics: Path) -> dict:
    """Whether it finished, how far it came, and how long that took."""
    last = facts["steps"][-1]["step"] if facts["steps"] else 0
    planned = facts["flags"].get("steps") or 0
    ends = [record["event"] for record in facts["records"] if record.get("event") in ("done", "preempted", "resume")]
    if ends[-1:] == ["done"]:
        kind, word = "done", "finished"
    elif ends[-1:] == ["preempted"]:
        kind, word = "stopped", "stopped by a signal"
    else:
        kind, word = "open", "not finished"
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(metrics.stat().st_mtime)) if metrics.is_file() else ""
    seconds = sum(record.get("step_s") or 0.0 for record in facts["steps"])
    parts = [
        f"{last:,} of {planned:,} steps" if planned and planned != last else plural(last, "step"),
        f"{duration(seconds)} of training" if seconds else "",
        plural(facts["config"]["ranks"], "rank") if facts["config"].get("ranks") else "",
        (f"last record {written}" if written else "no records yet") if kind == "open" else "",
        f"step {facts['checkpoint']['step']:,} exported" if "step" in facts["checkpoint"] else "",
    ]
    return {"kind": kind, "word": word, "parts": [part for part in parts if part]}


def shown_evaluation(facts: dict) -> dict:
    evals = facts["evals"]
    return next((record for record in evals if record["step"] == facts["shown_step"]), evals[-1] if evals else {})


def base_evaluation(facts: dict) -> dict:
    """Before training; empty if that is all there is."""
    evals = facts["evals"]
    return evals[0] if evals and evals[0]["step"] == 0 and shown_evaluation(facts) is not evals[0] else {}


def tiles_of(facts: dict) -> list[dict]:
    """The headline numbers of the shown step, with their change against the base."""
    evals, shown, base = facts["evals"], shown_evaluation(facts), base_evaluation(facts)
    tiles = []
    for name in headline_names(facts)[:TILES]:
        if name not in shown:
            continue
        measure = measure_of(name)
        before = base.get(name)
        lines = []
        if f"noisy_{name}" in shown:
            lines.append(f"noisy input {number(shown[f'noisy_{name}'], measure.unit)}")
        tiles.append(
            {
                "label": measure.label,
                "value": number(shown[name], measure.unit),
                "change": change(before, shown[name], measure),
                "before": "" if before is None else f"before training {number(before, measure.unit)}",
                "lines": lines,
                "note": measure.note,
                "spark": sparkline([record.get(name) for record in evals]),
            }
        )
    if not tiles and facts["steps"]:  # no evaluation: the loss of training is all there is
        losses = [record["loss"] for record in facts["steps"] if _is_number(record.get("loss"))]
        few = max(1, len(losses) // 20)
        if losses:
            first, last = statistics.fmean(losses[:few]), statistics.fmean(losses[-few:])
            tiles.append(
                {
                    "label": "training loss",
                    "value": number(last),
                    "change": change(first, last, measure_of("loss")),
                    "before": f"at the start {number(first)}",
                    "lines": [],
                    "note": "no evaluation: --eval-data or --eval-split would show whether it generalises",
                    "spark": sparkline(losses),
                }
            )
    return tiles


def headline_names(facts: dict) -> list[str]:
    names = fields_of(facts["evals"])
    chosen = facts["flags"].get("best_by", "")
    return sorted((name for name in HEADLINES if name in names), key=lambda name: name != chosen)


def change(before: float | None, after: float, measure) -> dict | None:
    """How a number changed, and whether that is better; None if it cannot be said."""
    if not _is_number(before) or not _is_number(after):
        return None
    kind = "same"
    if abs(after - before) > UNCHANGED * max(abs(after), abs(before)) and measure.better:
        kind = "better" if (after < before) == (measure.better == "low") else "worse"
    difference = after - before
    text = f"{100 * difference:+.1f} points" if measure.unit == "%" else number(difference, measure.unit, sign=True)
    return {"text": text, "kind": kind, "word": kind if measure.better else ""}


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and abs(value) < float("inf")  # not NaN either


def sparkline(values: list) -> str:
    """An SVG path through the values, in a box from (0, 0) to (100, 20); empty without at least two."""
    values = [value for value in values if _is_number(value)]
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // 100)
    values = [*values[:-1:stride], values[-1]]
    low, high = min(values), max(values)
    points = [
        f"{100 * i / (len(values) - 1):.1f} {18 - 16 * (value - low) / ((high - low) or 1):.1f}"
        for i, value in enumerate(values)
    ]
    return f"M{' L'.join(points)}"


def evaluation_table(facts: dict) -> dict | None:
    """Every evaluation with every metric, the change against the base, and what recordings score."""
    evals = facts["evals"]
    if not evals:
        return None
    names = [name for name in fields_of(evals) if "_channel_" not in name]
    rows = [
        {"head": f"{record['step']:,}", "cells": _cells(record, names), "shown": record["step"] == facts["shown_step"]}
        for record in evals
    ]
    if evals[0]["step"] == 0 and len(evals) > 1:
        cells = [
            f"{evals[-1][name] - evals[0][name]:+.4g}" if all(_is_number(evals[i].get(name)) for i in (0, -1)) else ""
            for name in names
        ]
        rows.append({"head": "last - base", "cells": cells, "shown": False})
    for record in events(facts, "ceiling"):
        rows.append({"head": str(record.get("of")), "cells": _cells(record, names), "shown": False})
    for record in events(facts, "test"):
        rows.append({"head": "test set", "cells": _cells(record, names), "shown": False})
    return {"names": names, "rows": rows}


def _cells(record: dict, names: list[str]) -> list[str]:
    return [f"{record[name]:.4g}" if isinstance(record.get(name), (int, float)) else "" for name in names]


# ---- warnings, and what was left out -----------------------------------------------------------------------------


def warnings_of(facts: dict, live: bool = False) -> list[str]:
    """`live`: the run is being watched, so it is no surprise that it has not finished."""
    texts = []
    status, skips = facts["status"], events(facts, "skip")
    if status["kind"] == "open" and not live:
        texts.append("The run has not finished: the same command with the same --out continues it.")
    elif status["kind"] == "stopped":
        texts.append("The run was stopped by a signal, with everything saved: the same command continues it.")
    if skips:
        ids = list(dict.fromkeys(str(name) for record in skips for name in record.get("ids", [])))
        were = "was" if len(skips) == 1 else "were"
        texts.append(f"{plural(len(skips), 'step')} {were} skipped (see below): {_listed(ids)}")
    texts += alarms_of(facts)[0]
    for record in events(facts, "export_check")[-1:]:
        if not record.get("passed"):
            texts.append("The export's outputs differ from the training engine's; it was moved to export-refused/.")
    texts += [*_worse_than_base(facts), *_wasted(facts)]
    broken = [record["step"] for record in facts["evals"] if not _is_number(record.get("loss", 0.0))]
    if broken:
        texts.append(f"The evaluation loss is not finite at step {_listed(map(str, broken))}.")
    return texts


def alarms_of(facts: dict) -> tuple[list[str], list[str]]:
    """What the recipe raised at its last evaluation or later, and before that: what has passed since, perhaps."""
    last = facts["evals"][-1]["step"] if facts["evals"] else 0
    now, earlier = [], []
    for record in events(facts, "alarm"):
        message = str(record.get("message")).removeprefix("warning: ").removeprefix("alarm: ")
        (now if record["step"] >= last else earlier).append(f"Step {record['step']:,}: {message}")
    return now, earlier


def _worse_than_base(facts: dict) -> list[str]:
    worse = [tile for tile in tiles_of(facts)[:1] if tile["change"] and tile["change"]["kind"] == "worse"]
    return [
        f"The {tile['label']} is worse than it was at the start: {tile['value']}, {tile['before']}." for tile in worse
    ]


def _wasted(facts: dict) -> list[str]:
    texts, settled = [], facts["steps"][1:]  # the first step also warms up
    total = sum(record.get("step_s", 0.0) for record in settled)
    waited = sum(record.get("data_wait_s", 0.0) for record in settled) / total if total else 0.0
    if waited > WAITING:
        texts.append(f"{100 * waited:.0f} % of the time was spent waiting for data.")
    padding = [record["padding"] for record in settled if _is_number(record.get("padding"))]
    if padding and statistics.fmean(padding) > PADDED:
        texts.append(f"{100 * statistics.fmean(padding):.0f} % of the computed positions are padding.")
    return texts


def skipped_of(facts: dict) -> list[dict]:
    """What was not trained on, or not measured, and why."""
    rows = []
    for record in events(facts, "skip"):
        spike = record.get("grad_norm")
        why = "the loss or the gradient was not finite"
        if spike is not None:
            limit = facts["flags"].get("max_spike")
            why = f"the gradient norm {number(spike)} was over {limit} times its median (--max-spike)"
        ids = [str(name) for name in record.get("ids", [])]
        rows.append({"what": f"step {record['step']:,}", "why": why, "ids": _listed(ids)})
    for record in events(facts, "pesq_missing"):
        ids = [str(name) for name in record.get("ids", [])]
        rows.append({"what": f"labels of step {record['step']:,}", "why": "no PESQ value", "ids": _listed(ids)})
    for record in events(facts, "amp_fallback"):
        why = f"the loss was finite only in fp32, which was used until step {record.get('until')}"
        rows.append({"what": f"bf16 at step {record['step']:,}", "why": why, "ids": ""})
    for record in events(facts, "out_of_memory"):
        why = f"out of memory: {record.get('micro_batch')} per micro-batch, accumulation {record.get('accumulation')}"
        rows.append({"what": "larger micro-batches", "why": why, "ids": ""})
    for reason, ids in _rejected(facts["flags"].get("data") or ""):
        rows.append(
            {"what": f"{plural(len(ids), 'clip')}, when the data was prepared", "why": reason, "ids": _listed(ids)}
        )
    return rows


def _rejected(data: str) -> list[tuple[str, list[str]]]:
    """Why data/encode.py rejected clips, and which; the most frequent reasons first."""
    path = Path(data, "rejects.jsonl")
    by_reason = {}
    for line in read_records(path) if data and path.is_file() else []:
        by_reason.setdefault(str(line.get("reason")), []).append(str(line.get("id")))
    return sorted(by_reason.items(), key=lambda item: -len(item[1]))[:LISTED]


def _listed(words) -> str:
    words = list(words)
    return ", ".join(words[:LISTED]) + (f" and {len(words) - LISTED} more" if len(words) > LISTED else "")


# ---- data, and how to repeat it ----------------------------------------------------------------------------------


def data_facts(facts: dict) -> list[tuple[str, str]]:
    steps, flags = facts["steps"], facts["flags"]
    tokens = sum(record.get("tokens", 0) for record in steps)
    seconds = sum(record.get("step_s", 0.0) for record in steps)
    waited = sum(record.get("data_wait_s", 0.0) for record in steps)
    padding = [record["padding"] for record in steps if _is_number(record.get("padding"))]
    memory = [record.get("vram_gb", record.get("rss_gb", 0.0)) for record in steps]
    fingerprint = (facts["config"].get("identity") or {}).get("fingerprint") or {}
    rows = [
        ("training data", flags.get("data") or "the embedded demo"),
        ("evaluation data", _evaluated_on(flags)),
        ("data fingerprint", str(fingerprint.get("data", ""))),
        ("epochs", f"{steps[-1]['epoch']:.2f}" if steps and "epoch" in steps[-1] else ""),
        ("trained on", f"{tokens:,} tokens, without padding" if tokens else ""),
        ("padding", f"{100 * statistics.fmean(padding):.1f} %" if padding else ""),
        ("speed", f"{tokens / seconds:,.0f} tokens per second" if seconds else ""),
        ("waiting for data", f"{100 * waited / seconds:.1f} % of the time" if seconds else ""),
        ("peak memory of the main rank", f"{max(memory):.2f} GB" if any(memory) else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _evaluated_on(flags: dict) -> str:
    if flags.get("eval_data"):
        return flags["eval_data"]
    if flags.get("eval_split"):
        return f"{100 * flags['eval_split']:g} % of the training data, held out"
    return ""


def repeat_facts(facts: dict) -> dict:
    config, run = facts["config"], facts["folder"]
    ranks = f" --ranks {config['ranks']}" if config.get("ranks") else ""
    again = f"./launch.sh {facts['recipe']}{ranks} --config {shlex.quote(str(run / 'config.json'))} --out NEW_FOLDER"
    codec = config.get("codec") or {}
    rows = [
        ("git commit", config.get("git_commit", "")),
        ("started with", shlex.join(map(str, config.get("command", [])))),
        ("model", facts["flags"].get("model", "")),
        ("codec", ", ".join(f"{name} {value}" for name, value in codec.items())),
        ("packages", ", ".join(f"{name} {version}" for name, version in (config.get("versions") or {}).items())),
    ]
    return {"command": again, "rows": [(name, value) for name, value in rows if value]}


# ---- several runs ------------------------------------------------------------------------------------------------


def labels_of(runs: list[Path]) -> list[str]:
    """The folders' names, with the path where two are the same."""
    names = Counter(run.resolve().name for run in runs)
    return [run.resolve().name if names[run.resolve().name] == 1 else str(run) for run in runs]


def comparison_of(labels: list[str], all_facts: list[dict]) -> dict:
    """A table of headline numbers, the best of each marked, and the flags that differ."""
    shown = [
        next((record for record in facts["evals"] if record["step"] == facts["shown_step"]), {}) for facts in all_facts
    ]
    rows = [("state", [{"text": facts["status"]["word"], "best": False} for facts in all_facts])]
    rows.append(("steps", [{"text": facts["status"]["parts"][0], "best": False} for facts in all_facts]))
    comparable = len({facts["recipe"] for facts in all_facts}) == 1
    for name in [name for name in HEADLINES if any(name in record for record in shown)]:
        measure = measure_of(name)
        values = [record.get(name) for record in shown]
        finite = [value for value in values if _is_number(value)]
        is_race = comparable and measure.better and len(finite) > 1
        best = (min if measure.better == "low" else max)(finite) if is_race else None
        cells = [
            {"text": "" if value is None else number(value, measure.unit), "best": best is not None and value == best}
            for value in values
        ]
        rows.append((measure.label, cells))
    speeds = [dict(data_facts(facts)) for facts in all_facts]
    for name in ("speed", "peak memory of the main rank", "padding"):
        rows.append((name, [{"text": speed.get(name, ""), "best": False} for speed in speeds]))
    flags = [{"recipe": facts["recipe"], "ranks": facts["config"].get("ranks")} | facts["flags"] for facts in all_facts]
    keys = [key for key in flags[0] if key != "out" and all(key in one for one in flags)]
    different = [
        (key, [_flag(one[key]) for one in flags]) for key in keys if len({json.dumps(one[key]) for one in flags}) > 1
    ]
    return {"labels": labels, "rows": rows, "flags": different}


def _flag(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
