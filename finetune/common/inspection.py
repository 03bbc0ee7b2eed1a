"""What is shown of one clip: sections that are printed on a terminal and written as an HTML page.

No model is known here: models/<model>/show.py fills the sections in.
"""

import base64
import difflib
import html
import io
import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.arrow import ArrowDataset
from common.errors import UserError
from common.loss import IGNORE
from common.speech_metrics import sdr, si_sdr

WIDTH = 118  # of the terminal's text
SHOWN_TOKENS = 160  # on the terminal; the page has all
PAGE_MARGIN = 150  # rows next to a break that the page shows of a table
NOTHING = -1  # in Codes.inputs: no code is read here

# ---- sections --------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    text: str
    kind: str = ""  # class in the page: masked, right, wrong


@dataclass
class Table:
    """Only the rows within `margin` of a break are shown; breaks are numbers of rows. No breaks: all rows."""

    title: str
    header: list[str]
    rows: list[list[str | Cell]]
    note: str = ""
    breaks: list[int] = field(default_factory=list)
    margin: int = 0


@dataclass
class Tokens:
    title: str
    items: list[tuple[int, str]]  # id and piece
    note: str = ""


@dataclass
class Picture:
    title: str
    png: bytes


def facts(title: str, values: dict) -> Table:
    return Table(title, [], [[name, str(value)] for name, value in values.items()])


def visible(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def find_clip(dataset: ArrowDataset, rows: np.ndarray, name: str | None) -> int:
    """Which of the trained `rows` of a dataset is the clip of this id; the first if there is none."""
    if name is None:
        return 0
    import pyarrow.compute as pc

    names = dataset.table.column("id")
    [found] = np.flatnonzero(pc.equal(names, name).to_numpy())[:1].tolist() or [-1]
    if found < 0:
        near = difflib.get_close_matches(name, names.slice(0, 50_000).to_pylist(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"its first is {dataset.id(0)!r}."
        raise UserError(f"--clip {name}: {dataset.folder} has no such clip; {hint}")
    if found not in rows:
        raise UserError(f"--clip {name} is in {dataset.folder} but not trained on: it is held out, or was left out.")
    return int(np.flatnonzero(rows == found)[0])


# ---- the codes of one clip -------------------------------------------------------------------------------------


@dataclass
class Codes:
    """P positions. The label of a position is what the model has to predict there, in each of the label columns."""

    inputs: np.ndarray  # (P, input columns) ids, NOTHING where none is read
    reads: list[str]  # P words: what else a position reads
    labels: np.ndarray  # (P, columns) ids, IGNORE where masked
    masked: np.ndarray  # (P, columns) str: why it is masked, "" for a target
    columns: list[str]  # as the recipe's loss names its parts: channel_0, channel_1, ..., text
    weights: list[float]  # of the columns in the loss
    names: dict[int, str]  # of special ids
    breaks: list[int]
    margin: int
    why: dict[str, str]  # the reasons in `masked`, in words
    predicted: np.ndarray | None = None  # (P, columns) most likely ids, where there is a target
    losses: np.ndarray | None = None  # (P, columns)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)  # the recipe's loss: sums and counts


def code_sections(codes: Codes) -> list[Table]:
    """Inputs, labels, predictions and the loss."""

    def name(value: int, column: str = "") -> str:
        return str(value) if column == "text" else codes.names.get(int(value), str(value))

    def table(title: str, header: list[str], cells: list[list[str | Cell]], note: str = "") -> Table:
        rows = [[str(p), *row] for p, row in enumerate(cells)]
        return Table(title, ["position", *header], rows, note, codes.breaks, codes.margin)

    short = [column.removeprefix("channel_") for column in codes.columns]
    is_target = codes.labels != IGNORE
    has_words = any(codes.reads)
    words = [[word] if has_words else [] for word in codes.reads]
    inputs = [
        [*word, *("" if value == NOTHING else name(value) for value in row)]
        for word, row in zip(words, codes.inputs, strict=True)
    ]
    labels = [
        [
            Cell(name(value, column)) if target else Cell(f"-{reason}", "masked")
            for value, target, reason, column in zip(*row, codes.columns, strict=True)
        ]
        for row in zip(codes.labels, is_target, codes.masked, strict=True)
    ]
    used = [reason for reason in codes.why if (codes.masked[~is_target] == reason).any()]
    legend = "; ".join(f"-{reason} {codes.why[reason]}" for reason in used)
    sections = [
        table("Inputs", ["reads"] * has_words + [str(c) for c in range(codes.inputs.shape[1])], inputs),
        table("Labels", short, labels, f"masked: {legend}" if legend else ""),
    ]
    if codes.predicted is not None:
        predictions = []
        for p, (best, wanted, target) in enumerate(zip(codes.predicted, codes.labels, is_target, strict=True)):
            cells = [
                Cell(name(a, column) + "*" * bool(a == b), "right" if a == b else "wrong") if t else Cell("")
                for a, b, t, column in zip(best, wanted, target, codes.columns, strict=True)
            ]
            mean = codes.losses[p][target].mean() if target.any() else None
            predictions.append([*cells, "" if mean is None else f"{mean:.3f}"])
        note = "most likely ids, * where it is the label; loss: mean of the position"
        sections.append(table("Predictions", [*short, "loss"], predictions, note))
    return [*sections, loss_table(codes, used)]


def loss_table(codes: Codes, reasons: list[str]) -> Table:
    """A row per label column, with the recipe's own loss, and then the other parts of that loss."""
    is_target = codes.labels != IGNORE
    header = ["part", "weight", "targets", *(f"-{reason}" for reason in reasons)]
    header += ["loss", "right"] if codes.parts else []
    rows = []
    for c, column in enumerate(codes.columns):
        target = is_target[:, c]
        counts = [int((codes.masked[~target, c] == reason).sum()) for reason in reasons]
        row = [column, f"{codes.weights[c]:g}", str(target.sum()), *map(str, counts)]
        if codes.parts:
            total, count = codes.parts.get(column, (math.nan, 1))  # who edits the loss may leave a part out
            right = (codes.predicted[target, c] == codes.labels[target, c]).mean() if target.any() else 0.0
            row += [f"{total / max(count, 1):.4f}", f"{100 * right:.0f} %"]
        rows.append(row)
    for part, (total, count) in codes.parts.items():
        if part not in codes.columns:
            rows.append([part, "", f"{count:g}", *("" for _ in reasons), f"{total / max(count, 1):.4f}", ""])
    note = "computed by the recipe's compute_loss, as a mean over targets before weights" if codes.parts else ""
    return Table("Loss", header, rows, note)


# ---- the waves of one pair -------------------------------------------------------------------------------------


def level_table(waves: dict[str, np.ndarray]) -> Table:
    """Levels of a noisy/clean pair, of its noise and of what was made of it."""
    clean = waves["clean"].astype(np.float64)
    sounds = {"noisy": waves["noisy"], "clean": clean, "noise": waves["noisy"] - clean} | waves
    rows = []
    for name, wave in sounds.items():
        wave = wave.astype(np.float64)
        level = 10 * np.log10(max(np.square(wave).mean(), 1e-20))
        row = [name, f"{level:.2f}", f"{np.abs(wave).max():.4f}"]
        if name in ("clean", "noise"):
            rows.append([*row, "", ""])
        else:
            rows.append([*row, f"{sdr(clean, wave):.2f}", f"{si_sdr(clean, wave):.2f}"])
    return Table("Levels of the crop", ["sound", "RMS dBFS", "peak", "SNR dB", "SI-SDR dB"], rows)


# ---- terminal --------------------------------------------------------------------------------------------------


def to_text(sections: list) -> str:
    """Everything but the pictures, tables without what is far from their breaks."""
    blocks = []
    for section in sections:
        if isinstance(section, Tokens):
            blocks.append(_tokens_text(section))
        elif isinstance(section, Table):
            blocks.append(_table_text(section))
    return "\n\n".join(blocks)


def _tokens_text(tokens: Tokens) -> str:
    words = [f"{number}:{visible(piece)}".replace(" ", "_") for number, piece in tokens.items]
    if len(words) > SHOWN_TOKENS:
        half = SHOWN_TOKENS // 2
        words = [*words[:half], f"...{len(words) - 2 * half}_more...", *words[-half:]]
    lines = textwrap.wrap(" ".join(words), WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([_title(tokens), *(f"  {line}" for line in lines)])


def _table_text(table: Table) -> str:
    rows = [[visible(_text(cell)) for cell in row] for row in table.rows]
    near = [r for group in shown_rows(len(rows), table.breaks, table.margin) for r in group]
    shown = [r for r in near if not (table.breaks and _repeats(rows, r))]
    every = [rows[r] for r in shown] + ([table.header] if table.header else [])
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]

    def line(row: list[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        align = str.rjust if table.header else str.ljust  # facts have no header
        return "  ".join(["", str.ljust(*first), *(align(*cell) for cell in others)]).rstrip()

    lines, end = [_title(table)] + ([line(table.header)] if table.header else []), 0
    for r in [*shown, len(rows)]:
        if r > end:
            lines.append(f"  ... {r - end} more ...")
        if r < len(rows):
            lines.append(line(rows[r]))
        end = r + 1
    return "\n".join(lines)


def _repeats(rows: list[list[str]], r: int) -> bool:
    """Whether the row is in the middle of rows that are equal but for their number."""
    return 0 < r < len(rows) - 1 and rows[r - 1][1:] == rows[r][1:] == rows[r + 1][1:]


def _title(section) -> str:
    return textwrap.fill(f"{section.title}: {section.note}" if section.note else section.title, WIDTH)


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def shown_rows(count: int, breaks: list[int], margin: int) -> list[range]:
    """The rows within `margin` of a break, as ranges; gaps of a single row are shown too."""
    if not breaks:
        return [range(count)]
    shown = []
    for at in sorted(breaks):
        start, stop = max(0, at - margin), min(count, at + margin)
        if shown and start <= shown[-1].stop + 1:
            shown[-1] = range(shown[-1].start, max(stop, shown[-1].stop))
        elif stop > start:
            shown.append(range(start, stop))
    return shown


# ---- page ------------------------------------------------------------------------------------------------------

STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#222}h1{font-size:1.4rem}
h2{font-size:1.1rem;margin:1rem 0 .3rem}p{max-width:50rem;color:#555;margin:.3rem 0}img{max-width:100%}
section{display:inline-block;vertical-align:top;margin-right:2rem;max-width:100%}
table{border-collapse:collapse;font:12px/1.3 ui-monospace,monospace}
td,th{padding:.05rem .4rem;text-align:right;border-bottom:1px solid #eee;white-space:pre}
td:first-child,th:first-child{text-align:left}.facts td{text-align:left;white-space:pre-wrap}
.masked{color:#aaa}.right{background:#d8f0d8}.wrong{background:#fbe3e0}.gap td{text-align:center;color:#888}
.tokens{max-width:70rem}.tokens small{color:#888}
.tokens span{display:inline-block;border:1px solid #ddd;margin:1px;padding:0 3px;white-space:pre}
"""


def write_page(file: Path, title: str, sections: list) -> None:
    """A page that needs no other file. All text in it is escaped: some comes from the data."""
    render = {Table: _table_html, Tokens: _tokens_html, Picture: _picture_html}
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1>")
    for section in sections:
        note = f"<p>{html.escape(section.note)}</p>" if getattr(section, "note", "") else ""
        body = render[type(section)](section)
        parts.append(f"<section><h2>{html.escape(section.title)}</h2>{note}{body}</section>")
    try:
        file.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {file} cannot be written ({error.strerror}).") from None


def _table_html(table: Table) -> str:
    lines, end = [], 0
    for group in shown_rows(len(table.rows), table.breaks, max(table.margin, PAGE_MARGIN)):
        if group.start > end:
            lines.append(f"<tr class=gap><td colspan=99>... {group.start - end} rows ...</td></tr>")
        lines += [f"<tr>{''.join(map(_cell_html, table.rows[r]))}</tr>" for r in group]
        end = group.stop
    head = "".join(f"<th>{html.escape(word)}</th>" for word in table.header)
    kind = "" if table.header else " class=facts"
    return f"<table{kind}>{f'<tr>{head}</tr>' if head else ''}{''.join(lines)}</table>"


def _cell_html(cell: str | Cell) -> str:
    kind = f" class={cell.kind}" if isinstance(cell, Cell) and cell.kind else ""
    return f"<td{kind}>{html.escape(_text(cell))}</td>"


def _tokens_html(tokens: Tokens) -> str:
    spans = [f"<span>{html.escape(visible(piece))}<small> {number}</small></span>" for number, piece in tokens.items]
    return f"<div class=tokens>{''.join(spans)}</div>"


def _picture_html(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return f"<img alt='{html.escape(picture.title, quote=True)}' src='data:image/png;base64,{data}'>"


# ---- pictures --------------------------------------------------------------------------------------------------


def draw_waves(title: str, waves: dict[str, np.ndarray], rate: int, span: tuple[float, float] | None = None) -> Picture:
    """Waveforms below each other, with the same scale; `span`: seconds to mark."""
    figure, axes = _figure(len(waves), 1, height=1.2)
    top = max([1e-4, *(float(np.abs(wave).max()) for wave in waves.values())])
    for axis, (name, wave) in zip(axes, waves.items(), strict=True):
        axis.plot(np.arange(len(wave)) / rate, wave, linewidth=0.5)
        axis.set(ylim=(-top, top), ylabel=name, xlim=(0, len(wave) / rate))
        if span:
            axis.axvspan(*span, color="orange", alpha=0.3)
    axes[-1].set_xlabel("seconds")
    return Picture(title, _png(figure))


def draw_spectra(title: str, spectra: dict[str, np.ndarray], line: float | None = None) -> Picture:
    """Magnitudes (F, T) below each other, with the same colours; `line`: a frame to mark."""
    figure, axes = _figure(len(spectra), 1, height=1.8)
    top = max(float(values.max()) for values in spectra.values())
    for axis, (name, values) in zip(axes, spectra.items(), strict=True):
        axis.imshow(values, origin="lower", aspect="auto", vmin=0, vmax=top or 1, interpolation="nearest")
        axis.set(ylabel=name, yticks=[])
        if line is not None:
            axis.axvline(line - 0.5, color="white", linewidth=0.8)
    axes[-1].set_xlabel("frame")
    return Picture(title, _png(figure))


def _figure(rows: int, columns: int, height: float):
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(8, height * rows + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)[:, 0]


def _png(figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=90)
    return image.getvalue()
