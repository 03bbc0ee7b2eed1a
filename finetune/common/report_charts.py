"""The report's curves: from the records of metrics.jsonl to what report_page/page.js draws.

A chart is {"id", "group", "title", "note", "unit", "log", "series"}, a series {"name", "kind", "main", "x", "y"}, in a
comparison also "run". Kinds: "line" (per step), "marks" (per evaluation) and "level" (one value for the whole run).
"log": the chart may be drawn on a logarithmic scale. Comparisons keep the series that are "main".
"""

import math

from common.report_words import HEADLINES, measure_of

POINTS = 100_000  # on one page, so that a long run's page stays small

EVENT_FIELDS = {"event", "step", "of"}
LOSS_BESIDE = {"loss_d"}  # losses of their own, not terms of the loss


def charts_of(records: list[dict]) -> list[dict]:
    """The charts of one run."""
    steps = [record for record in records if "event" not in record]
    evals = evaluations(records)
    return [*_loss(steps, evals, records), *_quality(evals, records), *_parts(steps, evals), *_steps(steps)]


def compared(runs: dict[str, list[dict]]) -> list[dict]:
    """The charts of several runs, overlaid."""
    merged = {}
    for number, (label, records) in enumerate(runs.items()):
        for chart in charts_of(records):
            target = merged.setdefault(chart["id"], chart | {"series": []})
            mains = [series for series in chart["series"] if series["main"] and series["kind"] != "level"]
            target["series"] += [
                series | {"run": number, "name": f"{label}: {series['name']}" if len(mains) > 1 else label}
                for series in mains
            ]
            levels = [series["name"] for series in target["series"] if series["kind"] == "level"]
            target["series"] += [
                series for series in chart["series"] if series["kind"] == "level" and series["name"] not in levels
            ]
    order = [chart for chart in merged.values() if chart["series"]]
    return sorted(order, key=lambda chart: list(GROUPS).index(chart["group"]))


def thinned(charts: list[dict]) -> list[dict]:
    """The same charts with at most POINTS points: of each stretch, the lowest and the highest value."""
    lines = [series for chart in charts for series in chart["series"]]
    limit = max(100, POINTS // max(1, len(lines)))
    for series in lines:
        series["x"], series["y"] = _thin(series["x"], series["y"], limit)
    return charts


def _thin(x: list, y: list, limit: int) -> tuple[list, list]:
    if len(x) <= limit:
        return x, y
    kept, stretches = [], limit // 2
    for i in range(stretches):
        stretch = range(i * len(x) // stretches, (i + 1) * len(x) // stretches)
        finite = [j for j in stretch if y[j] is not None]
        kept += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}) if finite else stretch[:1]
    return [x[j] for j in kept], [y[j] for j in kept]


GROUPS = {
    "curves": "Curves",
    "parts": "Loss in detail",
    "optimizer": "Optimizer",
    "speed": "Speed, memory and data",
    "more": "Other values",
}


def evaluations(records: list[dict]) -> list[dict]:
    """The evaluations in order, with the scores of the same step's samples."""
    scores = {record["step"]: record for record in records if record.get("event") == "scores"}
    return [record | scores.get(record["step"], {}) for record in records if record.get("event") == "eval"]


def numbers(record: dict) -> dict[str, float]:
    """The values of a record that are numbers, without its step."""
    return {
        name: value
        for name, value in record.items()
        if name not in EVENT_FIELDS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def fields_of(records: list[dict]) -> list[str]:
    """The names of all values that are numbers; records with the same fields are looked at once."""
    kinds = {tuple(record): record for record in records}.values()
    return list(dict.fromkeys(name for record in kinds for name in numbers(record)))


# ---- the charts of one run ---------------------------------------------------------------------------------------


def _loss(steps: list[dict], evals: list[dict], records: list[dict]) -> list[dict]:
    series = [_series("training", steps, "loss", "line"), _series("evaluation", evals, "loss", "marks")]
    for record in records:
        if record.get("event") == "baselines":  # what trivial models reach
            levels = numbers(record).items()
            series += [_level(f"{name} model", value, steps, main=False) for name, value in levels]
    return _chart("loss", "curves", "Loss", series, log=True)


def _quality(evals: list[dict], records: list[dict]) -> list[dict]:
    """A chart per metric: the best known first, next to what noisy input and recordings score."""
    names = [name for name in fields_of(evals) if name != "loss" and not _is_part(name)]
    known = [name for name in HEADLINES if name in names]
    charts = []
    for name in [*known, *(name for name in names if name not in known)]:
        measure = measure_of(name)
        if name.startswith("noisy_") and name.removeprefix("noisy_") in names:
            continue  # drawn with the metric itself
        series = [_series("model", evals, name, "marks")]
        noisy = [record[f"noisy_{name}"] for record in evals if f"noisy_{name}" in record]
        series += [_level("noisy input", noisy[-1], evals)] if noisy else []
        for record in records:
            if record.get("event") == "ceiling" and name in record:
                label = {"original": "recordings", "recorded": "recordings, through the codec"}
                series.append(_level(label.get(record["of"], str(record["of"])), record[name], evals))
        group = "curves" if name in known else "more"
        title = measure.label[:1].upper() + measure.label[1:]
        charts += _chart(f"eval-{name}", group, title, series, measure.note, measure.unit)
    return charts


def _parts(steps: list[dict], evals: list[dict]) -> list[dict]:
    """The loss by codebook or by term, and the shares of the terms."""
    charts = []
    for where, records, kind in (("training", steps, "line"), ("evaluation", evals, "marks")):
        names = [name for name in fields_of(records) if _is_part(name)]
        for prefix, title in (
            ("loss_channel_", "Loss by codebook"),
            ("loss_", "Loss by term"),
            ("grad_share_", "Fraction of the gradient by term"),
            ("share_", "Fraction of the loss by term"),
        ):
            mine = [name for name in names if name.startswith(prefix)]
            names = [name for name in names if name not in mine]
            label = "codebook {}" if prefix == "loss_channel_" else "{}"
            series = [
                _series(label.format(name.removeprefix(prefix)), records, name, kind, main=False) for name in mine
            ]
            is_loss = prefix.startswith("loss")
            charts += _chart(f"{where}-{prefix}", "parts", f"{title}, {where}", series, log=is_loss)
    return charts


def _is_part(name: str) -> bool:
    return name.startswith(("loss_", "share_", "grad_share_")) and name not in LOSS_BESIDE


# Of the step records: id of a chart, group, title, note, unit, whether it may be logarithmic, and its fields.
STEP_CHARTS = (
    ("grad_norm", "optimizer", "Gradient norm", "before clipping", "", True, {"grad_norm": "all", "grad_norm_d": "D"}),
    ("lr", "optimizer", "Learning rate", "", "", True, {"lr": "learning rate", "lr_d": "discriminator"}),
    ("loss_d", "optimizer", "Discriminator", "", "", True, {"loss_d": "loss", "gan_level": "weight of the GAN loss"}),
    ("speed", "speed", "Speed", "without padding", "tokens/s", False, {"tokens_per_s": "tokens per second"}),
    ("time", "speed", "Time per step", "", "s", True,
     {"step_s": "step", "data_wait_s": "waiting for data", "pesq_wait_s": "waiting for PESQ"}),
    ("memory", "speed", "Memory of the main rank", "", "GB", False, {"vram_gb": "GPU", "rss_gb": "process"}),
    ("padding", "speed", "Padding", "positions that hold no clip", "%", False, {"padding": "padding"}),
    ("tokens", "speed", "Tokens per step", "without padding", "", False, {"tokens": "tokens"}),
)  # fmt: skip


def _steps(steps: list[dict]) -> list[dict]:
    names = fields_of(steps)
    charts, used = [], {"loss", "epoch"}
    for id_, group, title, note, unit, log, fields in STEP_CHARTS:
        present = [name for name in fields if name in names]
        series = [_series(fields[name], steps, name, "line", main=name == present[0]) for name in present]
        used |= set(fields)
        if id_ == "grad_norm":
            groups = [name for name in names if name.startswith("grad_norm_") and name not in fields]
            used |= set(groups)
            series += [_series(name.removeprefix("grad_norm_"), steps, name, "line", main=False) for name in groups]
        charts += _chart(id_, group, title, series, note, unit, log)
    for name in names:
        if name not in used and not _is_part(name):
            charts += _chart(f"step-{name}", "more", measure_of(name).label, [_series(name, steps, name, "line")])
    return charts


# ---- chart and series --------------------------------------------------------------------------------------------


def _chart(id_: str, group: str, title: str, series: list, note: str = "", unit: str = "", log: bool = False) -> list:
    """A list with the chart, or an empty one if it would show nothing."""
    series = [one for one in series if any(value is not None for value in one["y"])]
    if not series:
        return []
    return [{"id": id_, "group": group, "title": title, "note": note, "unit": unit, "log": log, "series": series}]


def _series(name: str, records: list[dict], field: str, kind: str, main: bool = True) -> dict:
    points = [(record["step"], _finite(record[field])) for record in records if field in record]
    return {"name": name, "kind": kind, "main": main, "x": [x for x, _ in points], "y": [y for _, y in points]}


def _level(name: str, value: float, records: list[dict], main: bool = True) -> dict:
    ends = sorted({record["step"] for record in records} | {0})
    x = [ends[0], ends[-1]]
    return {"name": name, "kind": "level", "main": main, "x": x, "y": [_finite(value)] * 2}


def _finite(value) -> float | None:
    """Rounded to what can be seen; None where the curve has a hole."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
