"""report.html: curves, samples to look at and listen to, config and warnings in one self-contained file.

./launch.sh report runs/NAME
"""

import base64
import html
import io
import json
import sys
from math import nan
from pathlib import Path

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%}td,th{padding:.3rem .6rem;text-align:left;border-bottom:1px solid #eee;
vertical-align:top}img{max-width:100%}pre{background:#f6f6f6;padding:1rem;overflow:auto}audio{width:14rem}
.warn{background:#fff3cd;padding:.5rem 1rem}
"""


def write_report(run: Path) -> Path:
    """Builds the report from what the run folder holds."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    records = read_records(run / "metrics.jsonl")
    steps = [record for record in records if "event" not in record]
    scores = {record["step"]: record for record in records if record.get("event") == "scores"}
    evals = [record | scores.get(record["step"], {}) for record in records if record.get("event") == "eval"]
    ceilings = [record for record in records if record.get("event") == "ceiling"]
    skips = [record for record in records if record.get("event") == "skip"]
    alarms = [record for record in records if record.get("event") == "alarm"]
    parts = [f"<h1>{html.escape(config['recipe'])}: {html.escape(run.name)}</h1>"]
    if skips:
        ids = sorted({name for record in skips for name in record["ids"]})
        parts.append(
            f"<p class=warn>{len(skips)} steps were skipped because loss or gradient was not finite or too high:"
            f" {html.escape(', '.join(ids[:20]))}</p>"
        )
    for alarm in alarms:
        parts.append(f"<p class=warn>step {alarm['step']}: {html.escape(alarm['message'])}</p>")
    if steps:
        parts += ["<h2>Training</h2>", _curves(steps, evals)]
    if evals:
        parts += ["<h2>Evaluation</h2>", _eval_table(evals, ceilings)]
    figures = sorted((run / "figures").glob("*.png"))
    if figures:
        parts += ["<h2>Figures</h2>", *(f"<h3>{html.escape(path.stem)}</h3>{_media(path)}" for path in figures)]
    parts += ["<h2>Samples</h2>", _samples(run / "samples"), "<h2>Configuration</h2>"]
    parts.append(f"<pre>{html.escape(json.dumps(config, indent=2))}</pre>")
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(run.name)}</title><style>{STYLE}</style>"
    draft, final = run / ".report.html.tmp", run / "report.html"
    draft.write_text(page + "\n".join(parts), encoding="utf-8")
    draft.replace(final)
    return final


def read_records(path: Path) -> list[dict]:
    """The records of metrics.jsonl, without a line that a kill cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _curves(steps: list[dict], evals: list[dict]) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    for axis, name in zip(axes, ("loss", "grad_norm", "lr"), strict=True):
        axis.plot([r["step"] for r in steps], [r[name] for r in steps], linewidth=1, label="training")
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("optimizer step")
    if evals:
        axes[0].plot([r["step"] for r in evals], [r["loss"] for r in evals], "o-", label="evaluation")
        axes[0].legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    plt.close(figure)
    return f"<img alt='training curves' src='{_data_uri(image.getvalue(), 'image/png')}'>"


def _eval_table(evals: list[dict], ceilings: list[dict]) -> str:
    """`ceilings`: what recordings and their codec resynthesis score."""
    names = [name for name in evals[-1] if name not in ("event", "step") and "_channel_" not in name]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["step", *names])
    lines = [[str(r["step"]), *(f"{r.get(name, nan):.4f}" for name in names)] for r in evals]
    if evals[0]["step"] == 0 and len(evals) > 1:  # what training changed, compared with the untrained base
        lines.append(["last - base", *(f"{evals[-1][name] - evals[0].get(name, nan):+.4f}" for name in names)])
    for ceiling in ceilings:
        cells = [f"{ceiling[name]:.4f}" if name in ceiling else "" for name in names]
        lines.append([html.escape(ceiling["of"]), *cells])
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _samples(folder: Path) -> str:
    """For each text the recording and, below it, what every stage of training made of it."""
    facts = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*.json"))}
    if not facts:
        return "<p>none</p>"
    rows = []
    for name in dict.fromkeys(fact["name"] for fact in facts.values()):
        mine = [path for path, fact in facts.items() if fact["name"] == name]
        rows.append(f"<tr><th colspan=4>{html.escape(facts[mine[0]]['text'])}</th></tr>")
        for path in mine:
            shown = {key: value for key, value in facts[path].items() if key not in ("name", "text", "index")}
            words = ", ".join(f"{key} {_short(value)}" for key, value in shown.items())
            rows.append(
                f"<tr><td>{html.escape(path.parent.name)}</td><td>{_media(path.with_suffix('.wav'))}</td>"
                f"<td>{_media(path.with_suffix('.png'))}</td><td>{html.escape(words)}</td></tr>"
            )
    return f"<table>{''.join(rows)}</table>"


def _short(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _media(path: Path) -> str:
    if not path.is_file():
        return "no sound"
    if path.suffix == ".wav":
        return f"<audio controls src='{_data_uri(path.read_bytes(), 'audio/wav')}'></audio>"
    return f"<img alt='spectrogram' src='{_data_uri(path.read_bytes(), 'image/png')}'>"


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1])))
