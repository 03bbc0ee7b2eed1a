"""The report's curves: from the records of metrics.jsonl to bokeh figures."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from common.report_words import HEADLINES, measure_of

POINTS = 2000  # of one curve: a long run's page stays small
HEIGHT = 210
GREY = "#808892"  # can be read on a light and on a dark page
GROUPS = {"results": "Curves", "training": "Training in detail"}
CEILINGS = {"original": "recordings", "recorded": "recordings via codec"}

# Of the steps: id, title, unit, and what its curves are called, the first of which stands for a run in a comparison.
STEP_CHARTS = (
    ("grad_norm", "Gradient norm", "before clipping", {"grad_norm": "norm", "grad_norm_d": "discriminator"}),
    ("lr", "Learning rate", "", {"lr": "learning rate", "lr_d": "discriminator"}),
    ("gan", "Discriminator", "", {"loss_d": "loss", "gan_level": "weight of the GAN loss"}),
    ("speed", "Speed", "tokens per second, without padding", {"tokens_per_s": "speed"}),
    ("time", "Time per step", "seconds",
     {"step_s": "step", "data_wait_s": "waiting for data", "pesq_wait_s": "waiting for PESQ"}),
    ("memory", "Memory of the main rank", "GB", {"vram_gb": "GPU", "rss_gb": "process"}),
    ("padding", "Padding", "% of the positions", {"padding": "padding"}),
)  # fmt: skip


@dataclass
class Series:
    name: str
    kind: str  # "line" (per step), "marks" (per evaluation) or "level" (one value for the whole run)
    x: list[int]
    y: list[float]
    run: int | None = None  # in a comparison


@dataclass
class Chart:
    id: str
    group: str
    title: str
    note: str = ""
    series: list[Series] = field(default_factory=list)

    def add(self, name: str, kind: str, records: list[dict], key: str, factor: float = 1) -> None:
        """The finite values of `key`, if there are any."""
        points = [(record["step"], factor * record[key]) for record in records if is_number(record.get(key))]
        if points:
            self.series.append(Series(name, kind, [x for x, _ in points], [y for _, y in points]))

    def add_level(self, name: str, value: float) -> None:
        last = max((series.x[-1] for series in self.series), default=0)
        if is_number(value) and last:
            self.series.append(Series(name, "level", [0, last], [value, value]))


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def evaluations(records: list[dict]) -> list[dict]:
    """The evaluations in order, with the scores of the same step's samples."""
    scores = {record["step"]: record for record in records if record.get("event") == "scores"}
    return [record | scores.get(record["step"], {}) for record in records if record.get("event") == "eval"]


def fields_of(records: list[dict]) -> list[str]:
    """The names of all numbers in these records."""
    names = {name: None for record in records for name, value in record.items() if isinstance(value, (int, float))}
    return [name for name in names if name != "step"]


# ---- which charts ------------------------------------------------------------------------------------------------


def charts_of(records: list[dict]) -> list[Chart]:
    """The charts of one run."""
    steps = [record for record in records if "event" not in record]
    charts = [_loss(steps, records), *_quality(records), *_parts(steps)]
    for id_, title, note, names in STEP_CHARTS:
        chart = Chart(id_, "training", title, note)
        for key, name in names.items():
            chart.add(name, "line", steps, key, factor=100 if key == "padding" else 1)
        charts.append(chart)
    return [chart for chart in charts if chart.series]


def _loss(steps: list[dict], records: list[dict]) -> Chart:
    chart = Chart("loss", "results", "Loss")
    chart.add("training", "line", steps, "loss")
    chart.add("evaluation", "marks", evaluations(records), "loss")
    for record in records:
        if record.get("event") == "baselines":  # what trivial models reach
            for name in fields_of([record]):
                chart.add_level(f"{name} model", record[name])
    return chart


def _quality(records: list[dict]) -> list[Chart]:
    """A chart per headline metric, next to what the noisy input and recordings score."""
    charts, evals = [], evaluations(records)
    for name in HEADLINES:
        if name == "loss":
            continue
        measure = measure_of(name)
        factor = 100 if measure.unit == "%" else 1
        note = ", ".join(filter(None, [measure.unit, measure.note]))
        chart = Chart(f"eval-{name}", "results", measure.label[:1].upper() + measure.label[1:], note)
        chart.add("model", "marks", evals, name, factor)
        noisy = [record[f"noisy_{name}"] for record in evals if is_number(record.get(f"noisy_{name}"))]
        if noisy:
            chart.add_level("noisy input", factor * noisy[-1])
        for record in records:
            if record.get("event") == "ceiling" and is_number(record.get(name)):
                chart.add_level(CEILINGS.get(record["of"], str(record["of"])), factor * record[name])
        charts.append(chart)
    return charts


def _parts(steps: list[dict]) -> list[Chart]:
    """The training loss by codebook, or by term."""
    books = Chart("codebooks", "training", "Training loss by codebook")
    terms = Chart("terms", "training", "Training loss by term")
    for key in fields_of(steps):
        if key.startswith("loss_channel_"):
            books.add(key.removeprefix("loss_channel_"), "line", steps, key)
        elif key.startswith("loss_") and key != "loss_d":  # the discriminator's own
            terms.add(key.removeprefix("loss_"), "line", steps, key)
    return [books, terms]


def compared(runs: dict[str, list[dict]]) -> list[Chart]:
    """The charts of several runs, overlaid; of each run, the loss's two curves and the first one of other charts."""
    merged = {}
    for number, (label, records) in enumerate(runs.items()):
        for chart in charts_of(records):
            if chart.id in ("codebooks", "terms"):
                continue
            target = merged.setdefault(chart.id, replace(chart, series=[]))
            for series in chart.series[: 2 if chart.id == "loss" else 1]:
                name = f"{label}: {series.name}" if chart.id == "loss" else label
                target.series.append(replace(series, name=name, run=number))
    return sorted(merged.values(), key=lambda chart: list(GROUPS).index(chart.group))


# ---- how they are drawn ------------------------------------------------------------------------------------------


def drawn(charts: list[Chart], live: bool) -> dict:
    """The figures as a bokeh document, and the element of the page for each.

    For a `live` page also the points of each curve, with which it brings the figures of an earlier one up to date."""
    from bokeh.document import Document
    from bokeh.models import DataRange1d

    document, roots, data = Document(), {}, {}
    steps = DataRange1d(range_padding=0.02)  # all charts show the same steps
    for chart in charts:
        figure = _figure(chart, steps, data)
        document.add_root(figure)
        roots[figure.id] = f"chart-{chart.id}"
    return {"document": document.to_json(deferred=False), "roots": roots, "data": data if live else {}}


def _figure(chart: Chart, steps, data: dict[str, dict]):
    """Adds the points of its curves to `data`."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    names = [series.name[:40] for series in chart.series]
    columns = max(1, 50 // (6 + max(map(len, names))))  # of a legend that also fits on a phone
    rows = -(-len(names) // columns)
    plot = figure(
        height=HEIGHT + 18 * rows, sizing_mode="stretch_width", x_range=steps,
        tools="box_zoom,reset,save", background_fill_color=None, border_fill_color=None, outline_line_color=None,
    )  # fmt: skip
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    shown = []
    for i, series in enumerate(chart.series):
        name = f"curve-{len(data)}"
        data[name] = _points(series)
        source = ColumnDataSource(data[name], name=name)
        style = {"source": source, "color": colour_of(chart, i), "legend_label": names[i], "name": names[i]}
        if series.kind == "level":
            shown.append(plot.line("x", "y", line_dash="dashed", **style))
        elif series.kind == "marks":
            plot.line("x", "y", line_width=2, **style)
            shown.append(plot.scatter("x", "y", size=6, **style))
        else:
            shown.append(plot.line("x", "y", alpha=0.35, **style))
            plot.line("x", "smooth", line_width=2, **style)
    # Above all curves at once, unless their values would cover the chart.
    mode = "vline" if len(shown) <= 4 else "mouse"
    values = [("step", "@x{0}"), ("$name", "@y{%.5g}")]
    plot.add_tools(HoverTool(renderers=shown, tooltips=values, formatters={"@y": "printf"}, mode=mode))
    plot.axis.major_label_text_color = plot.axis.axis_line_color = plot.axis.major_tick_line_color = GREY
    plot.axis.minor_tick_line_color = None
    plot.xaxis.formatter.use_scientific = False
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = GREY, 0.25
    legend = plot.legend[0]
    legend.visible = len(chart.series) > 1 or chart.series[0].run is not None
    legend.click_policy, legend.orientation, legend.ncols = "hide", "horizontal", columns
    legend.background_fill_color = legend.border_line_color = None
    legend.label_text_color, legend.label_text_font_size = GREY, "12px"
    legend.padding, legend.margin, legend.location = 0, 0, "left"
    plot.add_layout(legend, "above")
    return plot


def colour_of(chart: Chart, index: int) -> str:
    from bokeh.palettes import Category10_10, turbo

    series = chart.series[index]
    if series.run is not None:
        return Category10_10[series.run % 10]
    if len(chart.series) > 10:  # codebooks, in order
        return turbo(len(chart.series))[index]
    return Category10_10[index]


def _points(series: Series) -> dict[str, list]:
    """Of each stretch of a long curve the lowest and the highest value, and their moving average."""
    x, y = np.array(series.x), np.array(series.y, dtype=float)
    if len(x) > POINTS:
        stretches = np.array_split(np.arange(len(x)), POINTS // 2)
        kept = sorted({stretch[find(y[stretch])] for stretch in stretches for find in (np.argmin, np.argmax)})
        x, y = x[kept], y[kept]
    window = max(1, len(y) // 30) | 1  # odd, so that it is centred
    weights = np.ones(window)
    smooth = np.convolve(y, weights, "full") / np.convolve(np.ones(len(y)), weights, "full")
    smooth = smooth[window // 2 : window // 2 + len(y)]
    return {"x": x.tolist(), "y": _short(y), "smooth": _short(smooth)}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
