"""What inspect prints of one clip: facts, tokens and tables.

No model is known here: models/<model>/show.py fills the sections in.
"""

import difflib
import math
import textwrap
from dataclasses import dataclass, field

import numpy as np

from common.arrow import ArrowDataset
from common.errors import UserError
from common.loss import IGNORE
from common.speech_metrics import sdr, si_sdr

NOTHING = -1  # in Codes.inputs: no code is read here


@dataclass
class Table:
    title: str
    header: list[str]  # empty for facts: a name and a value per row
    rows: list[list[str]]
    note: str = ""


@dataclass
class Tokens:
    title: str
    items: list[tuple[int, str]]  # id and piece
    note: str = ""


def facts(title: str, values: dict) -> Table:
    return Table(title, [], [[name, str(value)] for name, value in values.items()])


def find_clip(dataset: ArrowDataset, rows: np.ndarray, name: str | None) -> int:
    """Position in the trained `rows` of the clip with this id; the first clip if `name` is None."""
    if name is None:
        return 0
    import pyarrow.compute as pc

    names = dataset.table.column("id")
    found = np.flatnonzero(pc.equal(names, name).to_numpy())
    if not len(found):
        near = difflib.get_close_matches(name, names.slice(0, 50_000).to_pylist(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"its first is {dataset.id(0)!r}."
        raise UserError(f"--clip {name}: {dataset.folder} has no such clip; {hint}")
    if found[0] not in rows:
        raise UserError(f"--clip {name} is in {dataset.folder} but not trained on: it is held out, or was left out.")
    return int(np.flatnonzero(rows == found[0])[0])


# ---- the codes of one clip -------------------------------------------------------------------------------------


@dataclass
class Codes:
    """P positions. The label of a position is what the model has to predict there, in each of the label columns."""

    inputs: np.ndarray  # (P, input columns) ids, NOTHING where none is read
    reads: list[str]  # P words: what else a position reads; empty if nothing
    labels: np.ndarray  # (P, columns) ids, IGNORE where masked
    masked: np.ndarray  # (P, columns) str: why it is masked, "" for a target
    columns: list[str]  # as the recipe's loss names its parts: channel_0, channel_1, ..., text
    weights: list[float]  # of the columns in the loss
    names: dict[int, str]  # of special ids
    why: dict[str, str]  # the reasons in `masked`, in words
    predicted: np.ndarray | None = None  # (P, columns) most likely ids, where there is a target
    losses: np.ndarray | None = None  # (P, columns)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)  # the recipe's loss: sums and counts

    def name(self, number: int, column: str = "") -> str:
        """An id as it is shown. Ids of the text column are the tokenizer's, which have other names."""
        return str(number) if column == "text" else self.names.get(int(number), str(number))

    def used_reasons(self) -> list[str]:
        return [reason for reason in self.why if (self.masked == reason).any()]


def code_tables(codes: Codes) -> list[Table]:
    """Inputs, labels, predictions (with a model) and the loss, a row per position."""
    columns = [column.removeprefix("channel_") for column in codes.columns]
    legend = "; ".join(f"-{reason} {codes.why[reason]}" for reason in codes.used_reasons())
    labels = Table("Labels", ["position", *columns], [], f"masked: {legend}" if legend else "")
    labels.rows = [[str(p), *label_cells(codes, p)] for p in range(len(codes.labels))]
    tables = [input_table(codes), labels]
    if codes.predicted is not None:
        note = "most likely ids, * where it is the label; loss: mean of the position"
        rows = [[str(p), *predicted_cells(codes, p)] for p in range(len(codes.labels))]
        tables.append(Table("Predictions", ["position", *columns, "loss"], rows, note))
    return [*tables, loss_table(codes)]


def input_table(codes: Codes) -> Table:
    columns = [str(c) for c in range(codes.inputs.shape[1])]
    rows = []
    for p, numbers in enumerate(codes.inputs):
        cells = ["" if number == NOTHING else codes.name(number) for number in numbers]
        rows.append([str(p), codes.reads[p], *cells] if codes.reads else [str(p), *cells])
    return Table("Inputs", ["position", "reads", *columns] if codes.reads else ["position", *columns], rows)


def label_cells(codes: Codes, p: int) -> list[str]:
    cells = []
    for column, label, reason in zip(codes.columns, codes.labels[p], codes.masked[p], strict=True):
        cells.append(f"-{reason}" if label == IGNORE else codes.name(label, column))
    return cells


def predicted_cells(codes: Codes, p: int) -> list[str]:
    """The most likely id per column, and the mean loss of the position; empty where there is no target."""
    cells = []
    for column, best, label in zip(codes.columns, codes.predicted[p], codes.labels[p], strict=True):
        if label == IGNORE:
            cells.append("")
        elif best == label:
            cells.append(codes.name(best, column) + "*")
        else:
            cells.append(codes.name(best, column))
    is_target = codes.labels[p] != IGNORE
    cells.append(f"{codes.losses[p][is_target].mean():.3f}" if is_target.any() else "")
    return cells


def loss_table(codes: Codes) -> Table:
    """A row per label column, with the recipe's own loss, and then the other parts of that loss."""
    reasons = codes.used_reasons()
    header = ["part", "weight", "targets", *(f"-{reason}" for reason in reasons)]
    rows = []
    for c, column in enumerate(codes.columns):
        counts = [str((codes.masked[:, c] == reason).sum()) for reason in reasons]
        targets = (codes.labels[:, c] != IGNORE).sum()
        rows.append([column, f"{codes.weights[c]:g}", str(targets), *counts])
    if not codes.parts:  # without a model
        return Table("Loss", header, rows)
    for c, row in enumerate(rows):
        is_target = codes.labels[:, c] != IGNORE
        right = (codes.predicted[is_target, c] == codes.labels[is_target, c]).mean() if is_target.any() else 0.0
        # A recipe whose loss was edited may leave a part out.
        total, count = codes.parts.get(codes.columns[c], (math.nan, 1))
        row += [f"{total / max(count, 1):.4f}", f"{100 * right:.0f} %"]
    for part, (total, count) in codes.parts.items():
        if part not in codes.columns:
            rows.append([part, "", f"{count:g}", *("" for _ in reasons), f"{total / max(count, 1):.4f}", ""])
    note = "computed by the recipe's compute_loss, as a mean over targets before weights"
    return Table("Loss", [*header, "loss", "right"], rows, note)


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


def to_text(sections: list[Table | Tokens], width: int) -> str:
    """Prose is wrapped to `width`; rows of tables are cut there."""
    lines = []
    for section in sections:
        title = f"{section.title}: {section.note}" if section.note else section.title
        lines += ["", *textwrap.wrap(title, width)]
        if isinstance(section, Tokens):
            words = [f"{number}:{visible(piece)}".replace(" ", "_") for number, piece in section.items]
            lines += textwrap.wrap(" ".join(words), width, initial_indent="  ", subsequent_indent="  ")
        elif section.header:
            lines += [line[:width].rstrip() for line in table_lines([section.header, *section.rows])]
        else:
            lines += fact_lines(section.rows, width)
    return "\n".join(lines[1:])


def fact_lines(rows: list[list[str]], width: int) -> list[str]:
    longest = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        start = f"  {name:<{longest}}  "
        lines += textwrap.wrap(visible(value), width, initial_indent=start, subsequent_indent=" " * len(start))
    return lines


def table_lines(rows: list[list[str]]) -> list[str]:
    """The rows with aligned columns: the first to the left, the others to the right."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells))
    return lines


def visible(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
