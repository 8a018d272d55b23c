"""Figures of a sweep: accuracy over rounds in the paper's layout, and heat maps of the worst attack.

`collect` turns the folders of a sweep into numbers: for every panel and curve the mean, the standard
deviation and the count over seeds. `curves` and `heat_map` draw such numbers and compute none. A method has
the same colour, marker and line style in all figures (`styles`). Accuracies are in percent throughout.

Example:
    >>> from cafcor_jax import figures
    >>> figures.styles(["CAF", "mean"])["CAF"] == figures.styles(["DSGD-CDP", "caf"])["caf"]
    True
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import math
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from cafcor_jax import sweep as sweep_lib
from cafcor_jax import workdir
from cafcor_jax.errors import UserError
from cafcor_jax.experiment import Summary
from cafcor_jax.plotting import BLUE, GREEN, VERMILION

# The rest of the palette of Okabe and Ito. Its yellow cannot be seen as a line on white, so it is left out.
BLACK, ORANGE, SKY, PURPLE, GREY = "#000000", "#E69F00", "#56B4E9", "#CC79A7", "#999999"

#: What the horizontal axis may be, and its words.
X = {
    "round": "Round",
    "epsilon": "Privacy spent (epsilon)",
    "seconds": "Seconds of training",
}

_CURVES_BY = ("aggregator", "threat_model", "attack")
# What a heat map has axes for, takes the worst or the mean of, or is drawn once for each of.
_HEAT_MAP_AXES = ("dataset", "num_byzantine", "partition", "alpha", "attack", "seed")
_MARKERS_A_LINE = 10
_FONTS: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType: printers and journals refuse the default
}
_MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.5", "hatch": "////"}
_LINE = 0.175  # inches a line of small text takes

Dashes = str | tuple[int, tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a method is drawn; any one of the three tells it from the others of a usual figure.

    Attributes:
      colour: as "#RRGGBB".
      marker: of matplotlib.
      dashes: its line style. Baselines are dashed ("--"), and nothing else is.
    """

    colour: str
    marker: str
    dashes: Dashes


_DASH_DOT, _DOTTED = "-.", ":"
_DENSE: Dashes = (0, (3.0, 1.2, 1.0, 1.2))
_DASH_DOT_DOT: Dashes = (0, (6.0, 1.5, 1.0, 1.5, 1.0, 1.5))
_LONG_DOT: Dashes = (0, (9.0, 2.0, 1.0, 2.0))
_LOOSE: Dashes = (0, (1.0, 3.0))
_TWO_DASHES: Dashes = (0, (5.0, 1.5, 5.0, 1.5, 1.0, 1.5))

# By all names of a method, in small letters and digits alone.
_KNOWN = {
    # Figure 1: CafCor by threat model, in the colours and markers of scripts/privacy.py, and the baselines.
    "dsgdcdp": Style(ORANGE, "v", "--"),
    "dsgdldp": Style(PURPLE, "X", "--"),
    "cafcorcdp cdp": Style(BLACK, "D", _DASH_DOT),
    "cafcorldp ldp": Style(VERMILION, "s", _DOTTED),
    "cafcorsecldp secldp": Style(GREEN, "^", _DASH_DOT_DOT),
    "cafcorbyzldp byzldp": Style(BLUE, "o", "-"),
    "none": Style(GREY, "*", "--"),
    "dsgd": Style(GREY, "H", "--"),
    # Figure 2: rules.
    "mean average": Style(BLACK, "*", "--"),
    "caf cafcor": Style(BLUE, "o", "-"),
    "smea": Style(VERMILION, "s", _DASH_DOT),
    "trimmedmean cwtm tm": Style(GREEN, "^", _DASH_DOT_DOT),
    "median cwmed": Style(ORANGE, "v", _DOTTED),
    "geometricmedian gm": Style(SKY, "D", _DENSE),
    "multikrum mk": Style(PURPLE, "P", _LONG_DOT),
    "meamed": Style(GREY, "X", _LOOSE),
    # The rules that the paper does not compare.
    "krum": Style(PURPLE, "<", _DOTTED),
    "mda": Style(VERMILION, ">", _DENSE),
    "monna": Style(GREEN, "p", _LONG_DOT),
    "centeredclipping": Style(SKY, "h", _DASH_DOT),
}
_METHODS = {name: style for names, style in _KNOWN.items() for name in names.split()}
# For names that are not known; dashes of baselines are not among them.
_OTHERS = [
    Style(colour, marker, dashes)
    for marker, dashes in zip(
        "8Hd1234", (_TWO_DASHES, "-", _DASH_DOT, _DOTTED, _DENSE, _LOOSE, _LONG_DOT), strict=True
    )
    for colour in (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
]


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """One style for each method; no two of a figure's are the same unless they name the same method.

    Known methods have a fixed one, under the names of the settings ("trimmed_mean") and of the paper
    ("CWTM"). For any other name a hash of it says where in a list of further styles it begins to look for a
    free one, so that it usually keeps its own in other figures too.

    Args:
      labels: all methods of a figure.

    Returns:
      The style of each label.

    Example:
      >>> drawn = styles(["CWTM", "trimmed_mean", "my rule"])
      >>> drawn["CWTM"] == drawn["trimmed_mean"], drawn["my rule"] == styles(["my rule"])["my rule"]
      (True, True)
    """
    names = {label: "".join(filter(str.isalnum, label.lower())) for label in labels}
    found = {label: _METHODS[name] for label, name in names.items() if name in _METHODS}
    taken = set(found.values())
    for label in sorted(names.keys() - found.keys()):
        start = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") % len(_OTHERS)
        free = [s for s in _OTHERS[start:] + _OTHERS[:start] if s not in taken] or [_OTHERS[start]]
        # Another colour first; when all colours are there, at least another marker or line.
        colours = {style.colour for style in taken}
        found[label] = next((style for style in free if style.colour not in colours), free[0])
        taken.add(found[label])
    return {label: found[label] for label in names}


# Numbers.


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A run of the sweep and what its folder holds.

    Attributes:
      run: which one.
      status: "done", "failed", "unfinished", "missing", or "corrupt" if it says that it is done and cannot be
        read.
      summary: of a run that is done.
      metrics: its metrics.csv, of a run that is done.
      error: a sentence about a run that failed or is corrupt.
    """

    run: sweep_lib.Run
    status: str
    summary: Summary | None = None
    metrics: dict[str, np.ndarray] | None = None
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether its numbers can be used."""
        return self.status == "done"


@dataclasses.dataclass(frozen=True)
class Curve:
    """One method in one panel, over its seeds; r is the number of rounds at which any run was evaluated.

    Attributes:
      label: of the method.
      rounds: [r], increasing.
      epsilon: spent up to there, mean over seeds, [r].
      seconds: of training up to there, mean over seeds, [r].
      mean: test accuracy in percent, over the seeds that have this round, [r].
      std: its standard deviation with ddof = 1, [r]; NaN where fewer than two seeds have this round.
      count: seeds that have this round, [r].
      final: accuracy in percent after the last round of each run that is done, [seeds].
      runs: all that belong to it, done or not.
    """

    label: str
    rounds: np.ndarray
    epsilon: np.ndarray
    seconds: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    count: np.ndarray
    final: np.ndarray
    runs: tuple[Loaded, ...]

    @property
    def partial(self) -> bool:
        """Whether seeds are missing."""
        return len(self.final) < len(self.runs)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture of the grid: its label, and a curve for each method of the sweep that has runs in it."""

    label: str
    curves: tuple[Curve, ...]

    def curve(self, label: str) -> Curve | None:
        """The curve of a method, or None if the sweep has no run of it here."""
        return next((curve for curve in self.curves if curve.label == label), None)


@dataclasses.dataclass(frozen=True)
class Results:
    """The numbers of a sweep.

    Attributes:
      sweep: whose.
      runs: all of it, in its order, each once.
      panels: in the order of the sweep.
      labels: of the methods, in the order of the sweep.
      curves_by: the setting that makes the curves; empty if the sweep has labels of its own for them.
    """

    sweep: sweep_lib.Sweep
    runs: tuple[Loaded, ...]
    panels: tuple[Panel, ...]
    labels: tuple[str, ...]
    curves_by: str

    @property
    def missing(self) -> int:
        """Runs without numbers: never begun, not finished, failed or corrupt."""
        return sum(not run.done for run in self.runs)

    def partial(self) -> str:
        """How much is missing, in words; empty if nothing is."""
        if not self.missing:
            return ""
        words = {"unfinished": "not finished", "failed": "failed", "corrupt": "cannot be read"}
        counts = collections.Counter(run.status for run in self.runs)
        details = ", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status])
        text = f"partial: {self.missing} of {len(self.runs)} runs are missing"
        return f"{text} ({details})" if details else text

    def without_runs(self) -> list[tuple[str, str]]:
        """The curves that have no finished run, as (panel, method)."""
        return [(panel.label, c.label) for panel in self.panels for c in panel.curves if not len(c.final)]


def read(run: sweep_lib.Run, failed: Mapping[str, str] | None = None) -> Loaded:
    """Reads the folder of one run.

    Args:
      run: of a sweep.
      failed: why runs failed, from `sweep.failures`.

    Returns:
      What it holds. Nothing is raised: a run that cannot be read is "corrupt", with a sentence.
    """
    outcome = sweep_lib.outcome(run, failed)
    if outcome.status != "done" or outcome.summary is None:
        return Loaded(run, outcome.status, error=outcome.error)
    path = run.folder / "metrics.csv"
    try:
        metrics = workdir.read_metrics(path)
    except UnicodeDecodeError:
        return Loaded(run, "corrupt", error=f"{path} is not a text file.")
    except UserError as error:
        return Loaded(run, "corrupt", error=str(error))
    wrong = _not_whole(metrics, run, outcome.summary)
    if wrong:
        return Loaded(run, "corrupt", error=f"{path} {wrong}.")
    return Loaded(run, "done", outcome.summary, metrics)


def _not_whole(metrics: dict[str, np.ndarray], run: sweep_lib.Run, summary: Summary) -> str:
    """Why the metrics are not those of a whole run; empty if they are."""
    accuracy, final = metrics["test_accuracy"], summary.final_accuracy
    if not np.array_equal(metrics["round"], np.arange(1, run.config.rounds + 1)):
        return f"does not have the rounds 1 to {run.config.rounds}, each once"
    measured = accuracy[~np.isnan(accuracy)]
    if not ((measured >= 0) & (measured <= 1)).all():
        return "has a test accuracy that is not between 0 and 1"
    if not abs(accuracy[-1] - final) < 1e-6:  # Numbers in the table have nine digits.
        return f"ends with the test accuracy {accuracy[-1]:.6g}, and summary.json beside it says {final:.6g}"
    return ""


def collect(sweep: sweep_lib.Sweep, curves_by: str = "", failed: Mapping[str, str] | None = None) -> Results:
    """Reads a sweep and groups its runs: panels, in them curves, in them seeds.

    Curves are the sweep's own labels. Without any they are the values of one setting. Panels are the sweep's
    own labels, and any setting but the seed that would still differ inside a curve splits them further: a
    mean is over seeds alone. A curve that sets such a setting itself (a baseline without attack, in a sweep
    over attacks) is one run in several places, and stands in all of these panels.

    Args:
      sweep: which one.
      curves_by: a setting that varies, to make the curves. Empty: the sweep's labels if it has any, else the
        first of aggregator, threat_model and attack that varies, else the first that varies but the seed.
      failed: why runs failed, from `sweep.failures`.

    Returns:
      Its numbers.

    Raises:
      UserError: if `curves_by` does not vary in this sweep.
    """
    by = _curves_by(sweep, curves_by)
    loaded = {run.folder: read(run, failed) for run in sweep.distinct()}
    methods = [_method(run, by) for run in sweep.runs]
    groups: dict[tuple[str, str], dict[Path, Loaded]] = {}
    owner: dict[str, str | None] = {}
    for run, method, labels in zip(sweep.runs, methods, _panel_labels(sweep, methods, by), strict=True):
        for label in labels:
            owner.setdefault(label, run.panel)
            groups.setdefault((label, method), {})[run.folder] = loaded[run.folder]
    order = sorted(dict.fromkeys(methods), key=lambda method: _place(method, sweep.curves))
    panels = (
        Panel(label, tuple(_curve(c, list(groups[label, c].values())) for c in order if (label, c) in groups))
        for label in sorted(owner, key=lambda label: _place(owner[label], sweep.panels))
    )
    return Results(sweep, tuple(loaded.values()), tuple(panels), tuple(order), by)


def _place(label: str | None, order: Sequence[str]) -> int:
    return order.index(label) if label in order else len(order)


def _panel_labels(sweep: sweep_lib.Sweep, methods: Sequence[str], by: str) -> list[list[str]]:
    """The panels in which each run stands."""
    keys = [(run.panel, method) for run, method in zip(sweep.runs, methods, strict=True)]
    splitting = _differing(keys, sweep.runs, [name for name in sweep.varied if name not in (by, "seed")])
    own = [_join(run.panel, run, splitting) or sweep.name for run in sweep.runs]
    copies = collections.Counter((key, run.folder) for key, run in zip(keys, sweep.runs, strict=True))
    places = list(zip(sweep.runs, keys, own, strict=True))
    unique = [(run, label) for run, key, label in places if copies[key, run.folder] == 1]

    def labels(run: sweep_lib.Run, key: tuple[str | None, str], label: str) -> list[str]:
        if copies[key, run.folder] == 1:
            return [label]
        alike = [other for other, of, _ in places if of == key]
        fixed = [
            (name, getattr(run.config, name)) for name in _differing([key] * len(alike), alike, splitting)
        ]
        fits = [
            there
            for other, there in unique
            if other.panel == run.panel and all(getattr(other.config, name) == value for name, value in fixed)
        ]
        return list(dict.fromkeys(fits)) or [label]

    return [labels(*place) for place in places]


def _curves_by(sweep: sweep_lib.Sweep, asked: str) -> str:
    if asked:
        if asked not in sweep.varied:
            allowed = f"choose one of {', '.join(sweep.varied)}" if sweep.varied else "no setting does"
            raise UserError(f"curves_by={asked!r} does not vary in the sweep {sweep.name!r}: {allowed}.")
        return asked
    if sweep.curves:
        return ""
    usual = [name for name in _CURVES_BY if name in sweep.varied]
    return next(iter([*usual, *(name for name in sweep.varied if name != "seed")]), "")


def _method(run: sweep_lib.Run, by: str) -> str:
    if by:
        return _value(getattr(run.config, by))
    return run.curve or run.config.aggregator


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _join(label: str | None, run: sweep_lib.Run, names: Sequence[str]) -> str:
    settings = [f"{name} = {_value(getattr(run.config, name))}" for name in names]
    return ", ".join(filter(None, [label, *settings]))


def _differing(keys: Sequence[Hashable], runs: Sequence[sweep_lib.Run], names: Sequence[str]) -> list[str]:
    """The settings that have more than one value among runs with the same key."""

    def differs(name: str) -> bool:
        seen: dict[Hashable, Any] = {}
        values = [getattr(run.config, name) for run in runs]
        return any(seen.setdefault(key, value) != value for key, value in zip(keys, values, strict=True))

    return [name for name in names if differs(name)]


def _curve(label: str, runs: Sequence[Loaded]) -> Curve:
    metrics = [run.metrics for run in runs if run.metrics is not None]
    longest = max((len(one["round"]) for one in metrics), default=0)
    # Of accuracy, epsilon and seconds, [3, runs, rounds]; NaN after the end of a run that is shorter.
    values = np.full((3, len(metrics), longest), np.nan)
    for i, one in enumerate(metrics):
        columns = 100 * one["test_accuracy"], one["epsilon"], one["seconds"].cumsum()
        values[:, i, : len(one["round"])] = columns
    at = np.isfinite(values[0]).any(axis=0)
    values = values[:, :, at]
    measured = np.isfinite(values[0])
    count = measured.sum(axis=0)
    mean, epsilon, seconds = np.where(measured, values, 0).sum(axis=1) / count
    squares = np.where(measured, (values[0] - mean) ** 2, 0).sum(axis=0)
    return Curve(
        label=label,
        rounds=np.flatnonzero(at) + 1,
        epsilon=epsilon,
        seconds=seconds,
        mean=mean,
        std=np.sqrt(np.divide(squares, count - 1, out=np.full(len(count), np.nan), where=count > 1)),
        count=count,
        final=np.array([100 * run.summary.final_accuracy for run in runs if run.summary]),
        runs=tuple(runs),
    )


# Accuracy over rounds.


def curves(results: Results, *, x: str = "round", columns: int = 2) -> Figure:
    """Test accuracy over rounds: a grid of panels, mean and standard deviation over seeds, one legend.

    Seeds that are missing are said in the legend, runs that are missing and curves without any run below it.

    Args:
      results: of a sweep.
      x: the horizontal axis, one of `X`. A curve without a finite value of it (epsilon without privacy) is
        left out and named.
      columns: of the grid, at least 1.

    Returns:
      A figure made to be printed at 5.6 inches for two columns; at half of that it can still be read.
    """
    if x not in X:
        raise UserError(f"x={x!r} is not known: choose one of {', '.join(X)}.")
    if columns < 1:
        raise UserError(f"columns={columns} must be at least 1.")
    columns = min(columns, len(results.panels))
    width = max(2.8 * columns, 3.8)
    shown = [[c for c in panel.curves if not _why_not(c, x)] for panel in results.panels]
    drawn = [label for label in results.labels if any(c.label == label for cs in shown for c in cs)]
    style = styles(drawn)
    with matplotlib.rc_context(_FONTS):
        figure, _, grid = _layout(
            [panel.label + " (partial)" * any(c.partial for c in panel.curves) for panel in results.panels],
            columns=columns,
            panel=(width / columns, 2.05),
            size=(width, 0.0),
            axes=(X[x], "Test accuracy (%)"),
            legend={label + _seeds(results, label): Line2D([], [], **_line(style[label])) for label in drawn},
            notes=_notes(results, shown, x),
            sharey=True,
        )
        for axes, panel, inside in zip(grid.flat, results.panels, shown, strict=False):
            for curve in inside:
                shift = drawn.index(curve.label) / len(drawn)
                _draw(axes, _x(curve, x), curve, style[curve.label], shift)
            finished = any(len(curve.final) for curve in panel.curves)
            _finish(axes, whole=x == "round", empty=f"no finite {x}" if finished else "no finished run")
    return figure


def _x(curve: Curve, x: str) -> np.ndarray:
    return {"round": curve.rounds, "epsilon": curve.epsilon, "seconds": curve.seconds}[x]


def _why_not(curve: Curve, x: str) -> str:
    """Why a curve cannot be drawn; empty if it can."""
    if not len(curve.final):
        return "no finished run"
    return "" if np.isfinite(_x(curve, x)).all() else f"no finite {x}"


def _seeds(results: Results, label: str) -> str:
    """What the legend adds to a method with missing seeds; over all panels in which it is drawn."""
    found = [panel.curve(label) for panel in results.panels]
    counts = [(len(c.final), len(c.runs)) for c in found if c is not None and len(c.final)]
    if all(have == want for have, want in counts):
        return ""
    have, want = (
        f"{min(of)} to {max(of)}" if min(of) < max(of) else f"{min(of)}" for of in zip(*counts, strict=True)
    )
    return f" ({have} of {want} seeds)"


def _notes(results: Results, shown: Sequence[Sequence[Curve]], x: str) -> list[str]:
    """The sentences below the figure."""
    notes = []
    if any((curve.count > 1).any() for curves in shown for curve in curves):
        notes.append("Lines are means over seeds, bands one standard deviation.")
    notes += _partial(results)
    for why in ("no finished run", f"no finite {x}"):
        gone = [(p.label, c.label) for p in results.panels for c in p.curves if _why_not(c, x) == why]
        if gone:
            notes.append(f"Left out, {why}: {_listing(gone, len(results.panels))}.")
    return notes


def _partial(results: Results) -> list[str]:
    text = results.partial()
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def _listing(pairs: Sequence[tuple[str, str]], panels: int) -> str:
    """Pairs (panel, method), by method; long lists are only counted."""
    found: dict[str, list[str]] = {}
    for panel, method in pairs:
        found.setdefault(method, []).append(panel)
    return ", ".join(
        f"{method} ({'; '.join(where) if len(where) <= 2 else f'{len(where)} of {panels} panels'})"
        for method, where in found.items()
    )


def _line(style: Style) -> dict[str, Any]:
    # Markers like "1" are strokes, without a face, and an edge of white would hide them.
    stroke = style.marker in "1234"
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.dashes,
        "linewidth": 1.5,
        "markersize": 7 if stroke else 5.5,
        "markeredgecolor": style.colour if stroke else "white",
        "markeredgewidth": 1.2 if stroke else 0.5,
    }


def _draw(axes: Axes, x: np.ndarray, curve: Curve, style: Style, shift: float) -> None:
    every = math.ceil(len(x) / _MARKERS_A_LINE)
    # Lines that are close have their markers at different rounds, so that none hides the others.
    first = round(shift * every) % every
    # Above other lines' bands, and not cut at the axes.
    axes.plot(x, curve.mean, **_line(style), markevery=(first, every), clip_on=False, zorder=3)
    band = np.isfinite(curve.std)
    if band.any():
        low, high = np.clip(curve.mean - curve.std, 0, 100), np.clip(curve.mean + curve.std, 0, 100)
        axes.fill_between(x, low, high, where=band, color=style.colour, alpha=0.2, linewidth=0)


def _finish(axes: Axes, *, whole: bool, empty: str) -> None:
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20))
    right = max((float(np.max(line.get_xdata())) for line in axes.lines), default=1.0)
    axes.set_xlim(0, 1.03 * right)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=whole))
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.set_xticks([])
        axes.text(0.5, 0.5, empty, ha="center", va="center", transform=axes.transAxes, color="0.4")


def _layout(
    titles: Sequence[str],
    *,
    columns: int,
    panel: tuple[float, float],
    size: tuple[float, float],
    axes: tuple[str, str],
    legend: Mapping[str, Artist],
    notes: Sequence[str],
    **options: Any,
) -> tuple[Figure, SubFigure, np.ndarray]:
    """A figure with panels in a grid, and a legend (handles by label) and notes at its foot.

    A panel has a width and a height, without its title; the size is the figure's width, and what its height
    has beyond panels and foot. The words of the axes, x and y, stand at the edges of the grid. Returns the
    figure, the part of it above the foot, and the axes; those without a title are hidden.
    """
    width, more = size
    titles = [_wrap(title, panel[0], 10) for title in titles]
    rows = math.ceil(len(titles) / columns)
    height = rows * (panel[1] + max(title.count("\n") for title in titles) * _LINE) + more
    lines = [line for note in notes for line in _wrap(note, width, 8).split("\n")]
    legend_columns, legend_rows = _legend_grid(list(legend), width)
    foot = _LINE * (legend_rows + 0.8 * len(lines) + 0.7)
    figure = Figure(figsize=(width, height + foot), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, foot])
    top, bottom = parts
    if legend:
        box = bottom.legend(
            list(legend.values()),
            # The labels are set afterwards: a legend leaves out those that begin with "_".
            [f"{place}" for place in range(len(legend))],
            loc="upper center",
            ncols=legend_columns,
            fontsize=9,
            frameon=False,
            borderaxespad=0.0,
            borderpad=0.1,
            handlelength=3.2,
            columnspacing=1.2,
            labelspacing=0.35,
        )
        for text, label in zip(box.get_texts(), legend, strict=True):
            text.set(parse_math=False, text=label)
    if lines:
        style = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.3", "parse_math": False}
        bottom.text(0.5, 0.06 / foot, "\n".join(lines), **style)
    grid = top.subplots(rows, columns, squeeze=False, **options)
    for place, one in enumerate(grid.flat):
        one.set_visible(place < len(titles))
        one.set_title(titles[place] if place < len(titles) else "", parse_math=False)
        one.tick_params(labelleft=place % columns == 0)
        if place % columns == 0:
            one.set_ylabel(axes[1])
        if place + columns >= len(titles):
            one.set_xlabel(axes[0])
    return figure, top, grid


def _legend_grid(words: Sequence[str], width: float) -> tuple[int, int]:
    """Columns and rows of a legend that is no wider than the figure."""
    longest = max(map(len, words), default=1)
    columns = max(1, min(len(words), int((width - 0.1) / (0.68 + 0.073 * longest))))
    rows = math.ceil(len(words) / columns)
    return math.ceil(len(words) / max(rows, 1)) or 1, rows


def _wrap(text: str, width: float, size: float) -> str:
    """Breaks text into lines of at most so many inches."""
    return "\n".join(textwrap.wrap(text, max(12, int(0.92 * width * 72 / (0.56 * size))))) or text


# Heat maps.


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """The worst case over attacks of one method on one dataset.

    Attributes:
      rule: the method.
      f: numbers of malicious workers, of the rows.
      spread: how the data is spread, of the columns: "homogeneous", alphas from large to small, "extreme".
      worst: minimum over attacks of the mean over seeds of the final accuracy in percent, [rows, columns];
        NaN where no run is done.
      complete: whether all runs that the sweep has there are done. Where not, the worst case may be worse.
    """

    rule: str
    f: tuple[int, ...]
    spread: tuple[str, ...]
    worst: np.ndarray
    complete: np.ndarray


def why_no_heat_map(results: Results) -> str:
    """A sentence about what the sweep lacks for heat maps; empty if it has all."""
    lacks = {dataset: _lack(runs) for dataset, runs in _attacked(results).items()}
    if not all(lacks.values()):
        return ""
    return (
        "No heat map: it takes several attacks, and at least two values of f or two partitions or alphas; "
        f"{'; '.join(f'on {dataset} {lack}' for dataset, lack in lacks.items())}."
    )


def heat_maps(results: Results) -> dict[str, tuple[HeatMap, ...]]:
    """The worst case over attacks, for every dataset and method over (f, alpha).

    Args:
      results: of a sweep.

    Returns:
      The maps of each dataset that has several attacks and at least two f or two partitions or alphas; empty
      if none has (`why_no_heat_map` says why).
    """
    maps = {}
    for dataset, runs in _attacked(results).items():
        if not _lack(runs):
            rules: dict[str, list[Loaded]] = {}
            for rule, run in zip(_rules(results, runs), runs, strict=True):
                rules.setdefault(rule, []).append(run)
            f, spread = (sorted(set(of)) for of in zip(*map(_cell, runs), strict=True))
            maps[dataset] = tuple(_heat_map(rule, of_rule, f, spread) for rule, of_rule in rules.items())
    return maps


def _attacked(results: Results) -> dict[str, list[Loaded]]:
    """By dataset, the runs that have somebody to attack, in the order of the methods."""
    found: dict[str, list[Loaded]] = {run.run.config.dataset: [] for run in results.runs}
    for run in sorted(
        results.runs, key=lambda run: _place(_method(run.run, results.curves_by), results.labels)
    ):
        if run.run.config.num_byzantine:
            found[run.run.config.dataset].append(run)
    return found


def _lack(runs: Sequence[Loaded]) -> str:
    """What the attacked runs on a dataset lack for a heat map; empty if nothing."""
    attacks = {run.run.config.attack for run in runs}
    if not runs:
        return "no worker is malicious"
    if len(attacks) < 2:
        return f"the only attack is {attacks.pop()}"
    if len(set(map(_cell, runs))) < 2:
        return "the sweep has one f and one partition only"
    return "" if any(run.done for run in runs) else "no run is finished"


def _cell(run: Loaded) -> tuple[int, tuple[float, str]]:
    """Its row and column: f, and how the data is spread, ordered from equal workers to different ones."""
    config = run.run.config
    if config.partition == "dirichlet":
        return config.num_byzantine, (-config.alpha, f"{config.alpha:g}")
    order = {"homogeneous": -math.inf, "extreme": math.inf}
    return config.num_byzantine, (order[config.partition], config.partition)


def _rules(results: Results, runs: Sequence[Loaded]) -> list[str]:
    """The method of each run, with the settings added that would otherwise differ inside a cell."""
    by = results.curves_by
    methods = [run.run.config.aggregator if by in _HEAT_MAP_AXES else _method(run.run, by) for run in runs]
    keys = [(method, _cell(run), run.run.config.attack) for method, run in zip(methods, runs, strict=True)]
    others = [name for name in results.sweep.varied if name not in (by, *_HEAT_MAP_AXES)]
    splitting = _differing(keys, [run.run for run in runs], others)
    return [_join(method, run.run, splitting) for method, run in zip(methods, runs, strict=True)]


def _heat_map(
    rule: str, runs: Sequence[Loaded], f: Sequence[int], spread: Sequence[tuple[float, str]]
) -> HeatMap:
    worst = np.full((len(f), len(spread)), np.nan)
    complete = np.zeros(worst.shape, dtype=bool)
    for i, j in np.ndindex(*worst.shape):
        here = [run for run in runs if _cell(run) == (f[i], spread[j])]
        accuracies: dict[str, list[float]] = {}
        for run in here:
            if run.summary is not None:
                accuracies.setdefault(run.run.config.attack, []).append(100 * run.summary.final_accuracy)
        if accuracies:
            worst[i, j] = min(float(np.mean(values)) for values in accuracies.values())
            complete[i, j] = all(run.done for run in here)
    return HeatMap(rule, tuple(f), tuple(name for _, name in spread), worst, complete)


def heat_map(maps: Sequence[HeatMap], results: Results, title: str) -> Figure:
    """Draws the maps of one dataset side by side, on one scale from 0 to 100.

    Args:
      maps: of one dataset, from `heat_maps`.
      results: of the sweep, to say what is missing.
      title: of the figure.

    Returns:
      The figure.
    """
    columns = min(4, len(maps))
    each = max(1.7, 0.62 * len(maps[0].spread) + 0.5), max(1.3, 0.42 * len(maps[0].f) + 0.75)
    hatched = any(np.isnan(one.worst).any() for one in maps)
    notes = ["Worst case over attacks of the final test accuracy (%), mean over seeds."]
    if any((~one.complete & ~np.isnan(one.worst)).any() for one in maps):
        notes.append("\N{LESS-THAN OR EQUAL TO}: not all attacks have a finished run there.")
    with matplotlib.rc_context(_FONTS):
        figure, top, grid = _layout(
            [one.rule for one in maps],
            columns=columns,
            panel=each,
            size=(max(each[0] * columns + 1.1, 4.2), 0.3),
            axes=("alpha", "f"),
            legend={"missing": Patch(**_MISSING)} if hatched else {},
            notes=notes + _partial(results),
        )
        top.suptitle(title, fontsize=11, weight="bold", parse_math=False)
        for place, (axes, one) in enumerate(zip(grid.flat, maps, strict=False)):
            mesh = _draw_map(axes, one)
            axes.tick_params(labelbottom=place + columns >= len(maps))
            axes.yaxis.label.set(rotation=0, va="center")
            axes.yaxis.labelpad = 8
        bar = top.colorbar(mesh, ax=grid, shrink=0.9, aspect=25)
        bar.set_label("Worst-case accuracy (%)")
        bar.set_ticks(list(range(0, 101, 20)))
    return figure


def _draw_map(axes: Axes, one: HeatMap) -> Any:
    mesh = axes.pcolormesh(one.worst, cmap="cividis", vmin=0, vmax=100, edgecolors="white", linewidth=1)
    for i, j in np.ndindex(*one.worst.shape):
        if np.isnan(one.worst[i, j]):
            axes.add_patch(Rectangle((j, i), 1, 1, linewidth=0.5, **_MISSING))
            continue
        bound = "" if one.complete[i, j] else "\N{LESS-THAN OR EQUAL TO}"
        # cividis is dark below its middle.
        colour = "white" if one.worst[i, j] < 55 else "black"
        text = f"{bound}{one.worst[i, j]:.1f}"
        axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=colour, size=9)
    words = {"homogeneous": "homo-\ngeneous"}
    axes.set_xticks([j + 0.5 for j in range(len(one.spread))], [words.get(name, name) for name in one.spread])
    axes.set_yticks([i + 0.5 for i in range(len(one.f))], [str(f) for f in one.f])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return mesh


def render(figure: Figure, kind: str) -> bytes:
    """The file of a figure; the same figure always gives the same bytes.

    Args:
      figure: what to write.
      kind: "png" or "pdf".

    Returns:
      The content of the file.
    """
    undated: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    content = io.BytesIO()
    with matplotlib.rc_context(_FONTS):
        figure.savefig(content, format=kind, dpi=200, metadata=undated[kind])
    return content.getvalue()
