"""The report of a sweep: one HTML file that needs nothing else.

Images are in it, nothing is loaded from elsewhere and no script runs: a content security policy says so to
the browser. All that comes from files or flags is escaped.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cafcor_jax.config import Config
from cafcor_jax.figures import Curve, Loaded, Results
from cafcor_jax.progress import duration

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --quiet: #5a5a5a; --rule: #d0d0d0;
  --band: #f3f5f7; --bad: #a63a00; --link: #00558a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --quiet: #a6a6a6;
  --rule: #3c4046; --band: #202429; --bad: #ff9a66; --link: #7cc0ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; padding-top: 0.6rem; border-top: 1px solid var(--rule); }
p { margin: 0.5rem 0; max-width: 48rem; }
a { color: var(--link); }
nav { font-size: 0.95rem; }
nav a { margin-right: 0.9rem; white-space: nowrap; }
.quiet { color: var(--quiet); font-size: 0.9rem; }
.bad { color: var(--bad); }
pre, code { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; font-size: 0.85rem; }
pre { background: var(--band); border: 1px solid var(--rule); border-radius: 4px; padding: 0.5rem 0.7rem;
  margin: 0.4rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; }
tbody th { font-weight: 600; }
tbody th, td { white-space: nowrap; }
.number { text-align: right; }
td small { display: block; color: var(--quiet); font-size: 0.78rem; }
td.free { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
tbody th.free { white-space: normal; overflow-wrap: anywhere; }
figure { margin: 0.6rem 0; }
img { display: block; max-width: min(100%, 60rem); height: auto; background: #ffffff;
  border: 1px solid var(--rule); border-radius: 4px; padding: 0.4rem; }
details { margin: 0.6rem 0; }
summary { cursor: pointer; font-weight: 600; }
.run { border-bottom: 1px solid var(--rule); padding: 0.5rem 0; }
@media (max-width: 40rem) { body { padding: 0.8rem 0.7rem 3rem; } th, td { padding: 0.25rem 0.45rem; }
  tbody th { white-space: normal; } }
@media print { body { max-width: none; } .wide { overflow: visible; } }
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_PLAN = {
    "threat_model": "threat model",
    "sigma_ind": "sigma_ind",
    "sigma_cor": "sigma_cor",
    "epsilon": "epsilon",
    "delta": "delta",
    "accountant": "accountant",
}
_STATES = {
    "done": "done",
    "missing": "not begun",
    "unfinished": "not finished",
    "failed": "failed",
    "corrupt": "cannot be read",
}


class Markup(str):
    """Text that is HTML already; `cell` escapes all other."""


def page(
    results: Results, *, command: str, figure: bytes, heat_maps: Mapping[str, bytes] | None = None
) -> str:
    """The whole report.

    Args:
      results: of a sweep.
      command: that makes the report.
      figure: the accuracy over rounds, as PNG.
      heat_maps: PNGs by dataset.

    Returns:
      An HTML document.
    """
    sweep, maps = results.sweep, heat_maps or {}
    sections = {
        "Accuracy": _image(figure, f"Test accuracy of {', '.join(results.labels)}") + _accuracies(results),
        "Worst case over attacks": "".join(
            _image(png, f"Worst-case accuracy over f and alpha on {dataset}") for dataset, png in maps.items()
        ),
        "Privacy plans": _plans(results),
        "Settings": _settings(results),
        "Time and software": _time(results) + _software(results),
        "Failures": _failures(results),
        "Runs": _runs(results),
    }
    sections = {title: content for title, content in sections.items() if content}
    names = {title: title.lower().replace(" ", "-") for title in sections}
    links = " ".join(f'<a href="#{names[title]}">{title}</a>' for title in sections)
    body = "".join(
        f'<section id="{names[title]}"><h2>{title}</h2>{content}</section>\n'
        for title, content in sections.items()
    )
    title = html.escape(f"Sweep {sweep.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask for an icon unless there is one.
        f'<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>\n<p>{_state(results)}</p>\n"
        f'<p class="quiet">The sweep, which goes on where it was:</p>\n'
        f"<pre>{html.escape(sweep.command)}</pre>\n"
        f'<p class="quiet">This report:</p>\n<pre>{html.escape(command)}</pre>\n'
        f"<nav>{links}</nav></header>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def run_command(config: Config) -> str:
    """The command line of one run, with the settings alone that are not at their defaults.

    Example:
      >>> run_command(Config(attack="sign_flip", num_byzantine=5, workdir="runs/a b"))
      "python scripts/train.py --num_byzantine=5 --attack=sign_flip '--workdir=runs/a b'"
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    # The default folder is named after the other settings.
    defaults["workdir"] = dataclasses.replace(config, workdir=str(defaults["workdir"])).workdir
    changed = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    return shlex.join(
        ["python", "scripts/train.py", *(f"--{name}={value}" for name, value in changed.items())]
    )


def best(panel_curves: Iterable[Curve]) -> list[str]:
    """The methods with the best mean final accuracy, equal to the digit that is shown.

    Args:
      panel_curves: of one panel.

    Returns:
      Their labels; none if nothing is finished.
    """
    means = {curve.label: f"{curve.final.mean():.1f}" for curve in panel_curves if len(curve.final)}
    top = max(map(float, means.values()), default=math.nan)
    return [label for label, mean in means.items() if float(mean) == top]


# Sections.


def _state(results: Results) -> str:
    counts = collections.Counter(run.status for run in results.runs)
    words = ", ".join(f"{counts[state]} {word}" for state, word in _STATES.items() if counts[state])
    text = f"{len(results.runs)} runs: {words}."
    if results.missing:
        text = f'<strong class="bad">Partial results.</strong> {text}'
    return text


def _accuracies(results: Results) -> str:
    rows = []
    for panel in results.panels:
        winners = best(panel.curves)
        row: list[Any] = [panel.label]
        for label in results.labels:
            curve = panel.curve(label)
            row.append("" if curve is None else _accuracy(curve, label in winners))
        rows.append(row)
    caption = (
        "Test accuracy (%) after the last round: mean \N{PLUS-MINUS SIGN} standard deviation over seeds; the "
        "best mean of a row in bold."
    )
    return table(["panel", *results.labels], rows, caption=caption, numbers=len(results.labels))


def _accuracy(curve: Curve, bold: bool) -> Markup:
    have, want = len(curve.final), len(curve.runs)
    if not have:
        return Markup(f'\N{EN DASH}<small class="bad">0 of {want} seeds</small>')
    text = f"{curve.final.mean():.1f}"
    if have > 1:
        text += f" \N{PLUS-MINUS SIGN} {curve.final.std(ddof=1):.1f}"
    text = f"<strong>{text}</strong>" if bold else text
    if have < want:
        return Markup(f'{text}<small class="bad">{have} of {want} seeds</small>')
    return Markup(f"{text}<small>{have} seed{'s' if have > 1 else ''}</small>")


def _plans(results: Results) -> str:
    """One row for each panel and curve; where its runs differ in a number, the least and the largest."""
    rows = []
    for panel in results.panels:
        for curve in panel.curves:
            records = [record for run in curve.runs if (record := _record(run))]
            plans = _parts(records, "plan")
            spent = _parts(records, "epsilon_by_accountant")
            names = dict.fromkeys(str(name) for one in spent for name in one)
            by = ", ".join(f"{_span(one.get(name) for one in spent)} {name}" for name in names)
            if plans:
                plan = [_span(one.get(key) for one in plans) for key in _PLAN]
                plan = ["not set" if cell == "inf" else cell for cell in plan]  # no privacy, or noise given
                rows.append([panel.label, curve.label, *plan, by or "\N{EN DASH}"])
    caption = (
        "Standard deviations of the noise in a message, and what a run spends: the budget that the noise is "
        "calibrated to (not set if the noise itself is), and the noise counted by each accountant."
    )
    head = ["panel", "method", *_PLAN.values(), "epsilon by accountant"]
    return table(head, rows, caption=caption) if rows else "<p>No plan can be read.</p>"


def _parts(records: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [part for record in records if isinstance(part := record.get(name), dict)]


def _span(values: Iterable[Any]) -> str:
    """A number, or the least and the largest of several; texts are listed."""
    known = [value for value in values if value is not None]
    if not known:
        return "\N{EN DASH}"
    if all(isinstance(value, (int, float)) for value in known):
        low, high = f"{min(known):.4g}", f"{max(known):.4g}"
        return low if low == high else f"{low} to {high}"
    return ", ".join(dict.fromkeys(map(str, known)))


def _settings(results: Results) -> str:
    configs = [run.run.config for run in results.runs]
    varied = [
        [name, ", ".join(dict.fromkeys(_plain(getattr(config, name)) for config in configs))]
        for name in results.sweep.varied
    ]
    fields = [
        f for f in dataclasses.fields(Config) if f.metadata["result"] and f.name not in results.sweep.varied
    ]
    common = []
    for field in fields:
        value = getattr(configs[0], field.name)
        common.append([field.name, _plain(value), "" if value == field.default else _plain(field.default)])
    return (
        table(["setting", "values"], varied, caption="What varies between runs.", free=True)
        + "<details><summary>Settings that all runs share</summary>"
        + table(["setting", "value", "default, where it differs"], common, free=True)
        + "</details>"
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "not set" if value is None else str(value)


def _time(results: Results) -> str:
    seconds = [run.summary.seconds for run in results.runs if run.summary is not None]
    return (
        f"<p>Training and evaluation of the {len(seconds)} finished runs took {duration(sum(seconds))}: "
        f"{duration(float(np.median(seconds)))} for the median run, {duration(min(seconds))} to "
        f"{duration(max(seconds))} (minutes:seconds, or with hours). Set-up and compilation are not "
        "counted.</p>"
    )


def _software(results: Results) -> str:
    records = [record for run in results.runs if (record := _record(run))]
    versions = _parts(records, "versions")
    names = dict.fromkeys(str(name) for one in versions for name in one)
    rows = []
    for name in names:
        counts = collections.Counter(_plain(one.get(name)) for one in versions)
        several = [f"{value} (runs: {count})" for value, count in counts.most_common()]
        rows.append([name, ", ".join(several if len(counts) > 1 else counts)])
    return table(["software", "version"], rows, free=True) if rows else ""


def _failures(results: Results) -> str:
    rows = [
        [_name(run), _STATES.get(run.status, run.status), run.error or "No reason is known."]
        for run in results.runs
        if run.status in ("failed", "corrupt")
    ]
    return table(["run", "state", "why"], rows, free=True) if rows else ""


def _runs(results: Results) -> str:
    items = []
    for run in results.runs:
        state = _STATES.get(run.status, run.status)
        if run.summary is not None:
            state += f", {run.summary.final_accuracy:.2%}"
        about = ", ".join(
            f"{name} = {_plain(getattr(run.run.config, name))}" for name in results.sweep.varied
        )
        items.append(
            f'<div class="run"><strong>{html.escape(_name(run))}</strong>: {html.escape(state)}'
            f'<div class="quiet">{html.escape(about)}</div>'
            f"<pre>{html.escape(run_command(run.run.config))}</pre></div>"
        )
    heading = f"All {len(items)} runs, with the command of each"
    return f"<details><summary>{heading}</summary>{''.join(items)}</details>"


def _name(run: Loaded) -> str:
    labels = [run.run.panel, run.run.curve, f"seed {run.run.config.seed}"]
    return ", ".join(filter(None, labels)) + f" ({run.run.folder.name})"


def _record(run: Loaded) -> dict[str, Any] | None:
    """What config.json of a run says, if it has one that can be read."""
    try:
        record = json.loads((run.run.folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


# Pieces.


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str = "",
    numbers: int = 0,
    free: bool = False,
) -> Markup:
    """An HTML table; everything but `Markup` is escaped.

    Args:
      head: the names of the columns.
      rows: the first cell of each is its heading.
      caption: a sentence above it.
      numbers: how many of the last columns are numbers, to the right.
      free: whether long words may be broken.

    Returns:
      The table, in a box that scrolls where the screen is too narrow.

    Example:
      >>> print(table(["rule"], [["<b>"]]))
      <div class="wide"><table><thead><tr><th scope="col">rule</th></tr></thead>
      <tbody><tr><th scope="row">&lt;b&gt;</th></tr></tbody></table></div>
    """

    def kind(place: int) -> str:
        return ' class="number"' if place >= len(head) - numbers else ' class="free"' if free else ""

    columns = "".join(f'<th scope="col"{kind(place)}>{cell(name)}</th>' for place, name in enumerate(head))
    lines = [
        f'<tr><th scope="row"{kind(0)}>{cell(row[0])}</th>'
        + "".join(f"<td{kind(place)}>{cell(value)}</td>" for place, value in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    ]
    # Not in the table, where it would scroll with it.
    above = f'<p class="quiet">{html.escape(caption)}</p>' if caption else ""
    return Markup(
        f'{above}<div class="wide"><table><thead><tr>{columns}</tr></thead>\n'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def cell(value: Any) -> str:
    """The HTML of a value: as it is if it is `Markup`, escaped otherwise."""
    return value if isinstance(value, Markup) else html.escape(str(value))


def _image(png: bytes, alt: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}"></figure>\n'
