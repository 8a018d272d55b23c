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
import itertools
import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend import Legend
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

_METHODS = {
    # Figure 1: CafCor by threat model, in the colours and markers of scripts/privacy.py, and the baselines.
    "dsgdcdp": Style(ORANGE, "v", "--"),
    "dsgdldp": Style(PURPLE, "X", "--"),
    "cafcorcdp": Style(BLACK, "D", _DASH_DOT),
    "cafcorldp": Style(VERMILION, "s", _DOTTED),
    "cafcorsecldp": Style(GREEN, "^", _DASH_DOT_DOT),
    "cafcorbyzldp": Style(BLUE, "o", "-"),
    "none": Style(GREY, "*", "--"),
    "dsgd": Style(GREY, "H", "--"),
    # Figure 2: rules.
    "mean": Style(BLACK, "*", "--"),
    "caf": Style(BLUE, "o", "-"),
    "smea": Style(VERMILION, "s", _DASH_DOT),
    "trimmedmean": Style(GREEN, "^", _DASH_DOT_DOT),
    "median": Style(ORANGE, "v", _DOTTED),
    "geometricmedian": Style(SKY, "D", _DENSE),
    "multikrum": Style(PURPLE, "P", _LONG_DOT),
    "meamed": Style(GREY, "X", _LOOSE),
    # The rules that the paper does not compare.
    "krum": Style(PURPLE, "<", _DOTTED),
    "mda": Style(VERMILION, ">", _DENSE),
    "monna": Style(GREEN, "p", _LONG_DOT),
    "centeredclipping": Style(SKY, "h", _DASH_DOT),
}
_ALIASES = {
    "cafcor": "caf",
    "cdp": "cafcorcdp",
    "ldp": "cafcorldp",
    "secldp": "cafcorsecldp",
    "byzldp": "cafcorbyzldp",
    "cwtm": "trimmedmean",
    "tm": "trimmedmean",
    "cwmed": "median",
    "gm": "geometricmedian",
    "mk": "multikrum",
    "average": "mean",
}
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
    found: dict[str, Style] = {}
    labels = list(dict.fromkeys(labels))
    for label in labels:
        plain = "".join(character for character in label.lower() if character.isalnum())
        plain = _ALIASES.get(plain, plain)
        if plain in _METHODS:
            found[label] = _METHODS[plain]
    taken = set(found.values())
    for label in sorted(set(labels) - set(found)):
        start = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") % len(_OTHERS)
        turn = _OTHERS[start:] + _OTHERS[:start]
        # Another colour first; when all colours are there, at least another marker or line.
        colours = {style.colour for style in taken}
        free = [style for style in turn if style not in taken]
        found[label] = next((s for s in free if s.colour not in colours), next(iter(free), turn[0]))
        taken.add(found[label])
    return {label: found[label] for label in labels}


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
        why = {
            "unfinished": "not finished",
            "failed": "failed",
            "corrupt": "cannot be read",
        }
        counts = [(sum(run.status == status for run in self.runs), words) for status, words in why.items()]
        details = ", ".join(f"{count} {words}" for count, words in counts if count)
        return f"partial: {self.missing} of {len(self.runs)} runs are missing" + (
            f" ({details})" if details else ""
        )

    def without_runs(self) -> list[tuple[str, str]]:
        """The curves that have no finished run, as (panel, method)."""
        return [
            (panel.label, curve.label)
            for panel in self.panels
            for curve in panel.curves
            if not len(curve.final)
        ]


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
        _check(metrics, run, outcome.summary)
    except UnicodeDecodeError:
        return Loaded(run, "corrupt", error=f"{path} is not a text file.")
    except UserError as error:
        return Loaded(run, "corrupt", error=str(error))
    return Loaded(run, "done", outcome.summary, metrics)


def _check(metrics: dict[str, np.ndarray], run: sweep_lib.Run, summary: Summary) -> None:
    """Raises if the metrics are not those of a whole run."""
    path, rounds = run.folder / "metrics.csv", run.config.rounds
    accuracy = metrics["test_accuracy"]
    if not np.array_equal(metrics["round"], np.arange(1, rounds + 1)):
        raise UserError(f"{path} does not have the rounds 1 to {rounds}, each once.")
    measured = accuracy[~np.isnan(accuracy)]
    if not ((measured >= 0) & (measured <= 1)).all():
        raise UserError(f"{path} has a test accuracy that is not between 0 and 1.")
    # Numbers in the table have nine digits.
    if not abs(accuracy[-1] - summary.final_accuracy) < 1e-6:
        raise UserError(
            f"{path} ends with the test accuracy {accuracy[-1]:.6g}, and summary.json beside it says "
            f"{summary.final_accuracy:.6g}."
        )


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
    panels = sorted(owner, key=lambda label: _place(owner[label], sweep.panels))
    curves = sorted(dict.fromkeys(methods), key=lambda method: _place(method, sweep.curves))
    return Results(
        sweep=sweep,
        runs=tuple(loaded.values()),
        panels=tuple(
            Panel(
                panel,
                tuple(_curve(c, list(groups[panel, c].values())) for c in curves if (panel, c) in groups),
            )
            for panel in panels
        ),
        labels=tuple(curves),
        curves_by=by,
    )


def _place(label: str | None, order: Sequence[str]) -> int:
    return order.index(label) if label in order else len(order)


def _panel_labels(sweep: sweep_lib.Sweep, methods: Sequence[str], by: str) -> list[list[str]]:
    """The panels in which each run stands."""
    keys = [(run.panel, method) for run, method in zip(sweep.runs, methods, strict=True)]
    others = [name for name in sweep.varied if name not in (by, "seed")]
    splitting = _differing(keys, sweep.runs, others)
    own = [_join(run.panel, run, splitting) or sweep.name for run in sweep.runs]
    copies = collections.Counter((key, run.folder) for key, run in zip(keys, sweep.runs, strict=True))
    inside = {
        key: _differing([key] * len(runs), runs, splitting)
        for key in dict.fromkeys(keys)
        if (runs := [run for run, of in zip(sweep.runs, keys, strict=True) if of == key])
    }

    def places(run: sweep_lib.Run, key: tuple[str | None, str], label: str) -> list[str]:
        if copies[key, run.folder] == 1:
            return [label]
        fits = [
            there
            for other, of, there in zip(sweep.runs, keys, own, strict=True)
            if copies[of, other.folder] == 1
            and other.panel == run.panel
            and all(getattr(other.config, name) == getattr(run.config, name) for name in inside[key])
        ]
        return list(dict.fromkeys(fits)) or [label]

    return list(map(places, sweep.runs, keys, own))


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

    def table(column: Callable[[dict[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        """[runs, rounds], NaN after the end of a run that is shorter than the others."""
        rows = np.full((len(metrics), longest), np.nan)
        for row, one in zip(rows, metrics, strict=True):
            row[: len(one["round"])] = column(one)
        return rows

    accuracy = table(lambda one: 100 * one["test_accuracy"])
    measured = np.isfinite(accuracy)
    at = measured.any(axis=0)
    accuracy, measured = accuracy[:, at], measured[:, at]
    count = measured.sum(axis=0)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.where(measured, values, 0).sum(axis=0) / count

    centre = mean(accuracy)
    squares = np.where(measured, (accuracy - centre) ** 2, 0).sum(axis=0)
    std = np.sqrt(np.divide(squares, count - 1, out=np.full(len(count), np.nan), where=count > 1))
    return Curve(
        label=label,
        rounds=np.flatnonzero(at) + 1,
        epsilon=mean(table(lambda one: one["epsilon"])[:, at]),
        seconds=mean(table(lambda one: one["seconds"].cumsum())[:, at]),
        mean=centre,
        std=std,
        count=count,
        final=np.array([100 * run.summary.final_accuracy for run in runs if run.done and run.summary]),
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
    shown = {
        panel.label: [c for c in panel.curves if len(c.final) and np.isfinite(_x(c, x)).all()]
        for panel in results.panels
    }
    drawn = [label for label in results.labels if any(c.label == label for cs in shown.values() for c in cs)]
    style = styles(drawn)
    notes = _notes(results, shown, x)
    with matplotlib.rc_context(_FONTS):
        handles = [_handle(style[label]) for label in drawn]
        words = [label + _seeds(results, label) for label in drawn]
        titles = [_wrap(_title(panel), width / columns, 10) for panel in results.panels]
        rows = math.ceil(len(results.panels) / columns)
        above = max(title.count("\n") for title in titles) * _LINE
        figure, top = _layout(width, rows * (2.05 + above), handles, words, notes)
        grid = top.subplots(rows, columns, squeeze=False, sharey=True)
        for place, axes in enumerate(grid.flat):
            if place >= len(results.panels):
                axes.set_visible(False)
                continue
            axes.set_title(titles[place], parse_math=False)
            for curve in shown[results.panels[place].label]:
                shift = drawn.index(curve.label) / len(drawn)
                _draw(axes, _x(curve, x), curve, style[curve.label], shift)
            finished = any(len(curve.final) for curve in results.panels[place].curves)
            _finish(axes, whole=x == "round", empty=f"no finite {x}" if finished else "no finished run")
            if place % columns == 0:
                axes.set_ylabel("Test accuracy (%)")
            if place + columns >= len(results.panels):
                axes.set_xlabel(X[x])
            axes.tick_params(labelleft=place % columns == 0)
    return figure


def _x(curve: Curve, x: str) -> np.ndarray:
    return {"round": curve.rounds, "epsilon": curve.epsilon, "seconds": curve.seconds}[x]


def _title(panel: Panel) -> str:
    return panel.label + (" (partial)" if any(curve.partial for curve in panel.curves) else "")


def _seeds(results: Results, label: str) -> str:
    """What the legend adds to a method with missing seeds; over all panels in which it is drawn."""
    found = [panel.curve(label) for panel in results.panels]
    counts = [(len(c.final), len(c.runs)) for c in found if c is not None and len(c.final)]
    if all(have == want for have, want in counts):
        return ""
    have, want = zip(*counts, strict=True)
    return f" ({_range(have)} of {_range(want)} seeds)"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _notes(results: Results, shown: dict[str, list[Curve]], x: str) -> list[str]:
    """The sentences below the figure."""
    curves = [curve for panel in shown.values() for curve in panel]
    notes = []
    if any((curve.count > 1).any() for curve in curves):
        notes.append("Lines are means over seeds, bands one standard deviation.")
    partial = results.partial()
    if partial:
        notes.append(f"{partial[0].upper()}{partial[1:]}.")
    gone = results.without_runs()
    if gone:
        notes.append(f"Left out, no finished run: {_listing(gone, len(results.panels))}.")
    endless = [
        (panel.label, curve.label)
        for panel in results.panels
        for curve in panel.curves
        if len(curve.final) and not np.isfinite(_x(curve, x)).all()
    ]
    if endless:
        notes.append(f"Left out, no finite {x}: {_listing(endless, len(results.panels))}.")
    return notes


def _listing(pairs: Sequence[tuple[str, str]], panels: int) -> str:
    """Pairs (panel, method), by method; long lists are only counted."""
    found: dict[str, list[str]] = {}
    for panel, method in pairs:
        found.setdefault(method, []).append(panel)
    words = {
        method: "; ".join(where) if len(where) <= 2 else f"{len(where)} of {panels} panels"
        for method, where in found.items()
    }
    return ", ".join(f"{method} ({where})" for method, where in words.items())


def _handle(style: Style) -> Line2D:
    return Line2D([], [], **_line_options(style))


def _line_options(style: Style) -> dict[str, Any]:
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
    axes.plot(x, curve.mean, **_line_options(style), markevery=(first, every), clip_on=False, zorder=3)
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
    width: float, height: float, handles: Sequence[Any], words: Sequence[str], notes: Sequence[str]
) -> tuple[Figure, SubFigure]:
    """A figure with a legend and notes at its foot, and the part above them."""
    lines = list(itertools.chain.from_iterable(_wrap(note, width, 8).split("\n") for note in notes))
    columns, rows = _legend_grid(words, width)
    foot = _LINE * (rows + 0.8 * len(lines) + 0.7)
    figure = Figure(figsize=(width, height + foot), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, foot])
    if handles:
        # The labels are set afterwards: a legend leaves out those that begin with "_".
        legend: Legend = parts[1].legend(
            handles,
            [f"{place}" for place in range(len(handles))],
            loc="upper center",
            ncols=columns,
            fontsize=9,
            frameon=False,
            borderaxespad=0.0,
            borderpad=0.1,
            handlelength=3.2,
            columnspacing=1.2,
            labelspacing=0.35,
        )
        for text, label in zip(legend.get_texts(), words, strict=True):
            text.set_parse_math(False)
            text.set_text(label)
    if lines:
        parts[1].text(
            0.5,
            0.06 / foot,
            "\n".join(lines),
            ha="center",
            va="bottom",
            fontsize=8,
            color="0.3",
            parse_math=False,
        )
    return figure, parts[0]


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
    reasons = []
    for dataset in _datasets(results):
        runs = _of(results, dataset)
        attacks = {run.run.config.attack for run in runs}
        f, spread = {run.run.config.num_byzantine for run in runs}, {_spread(run) for run in runs}
        if not attacks:
            reasons.append(f"on {dataset} no worker is malicious")
        elif len(attacks) < 2:
            reasons.append(f"on {dataset} the only attack is {attacks.pop()}")
        elif len(f) < 2 and len(spread) < 2:
            reasons.append(f"on {dataset} the sweep has one f and one partition only")
        elif not any(run.done for run in runs):
            reasons.append(f"on {dataset} no run is finished")
        else:
            return ""
    return (
        "No heat map: it takes several attacks, and at least two values of f or two partitions or alphas; "
        f"{'; '.join(reasons)}."
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
    for dataset in _datasets(results):
        runs = _of(results, dataset)
        f = tuple(sorted({run.run.config.num_byzantine for run in runs}))
        spread = tuple(sorted({_spread(run) for run in runs}, key=_heterogeneity))
        attacks = tuple(dict.fromkeys(run.run.config.attack for run in runs))
        if len(attacks) < 2 or len(f) * len(spread) < 2 or not any(run.done for run in runs):
            continue
        rules = _rules(results, runs)
        maps[dataset] = tuple(
            _heat_map(rule, [run for run, of in zip(runs, rules, strict=True) if of == rule], f, spread)
            for rule in dict.fromkeys(rules)
        )
    return maps


def _datasets(results: Results) -> list[str]:
    return list(dict.fromkeys(run.run.config.dataset for run in results.runs))


def _of(results: Results, dataset: str) -> list[Loaded]:
    """The runs on a dataset that have somebody to attack, in the order of the methods."""
    runs = [run for run in results.runs if run.run.config.dataset == dataset and run.run.config.num_byzantine]
    return sorted(runs, key=lambda run: _place(_method(run.run, results.curves_by), results.labels))


def _spread(run: Loaded) -> str:
    config = run.run.config
    return f"{config.alpha:g}" if config.partition == "dirichlet" else config.partition


def _heterogeneity(spread: str) -> float:
    """Orders columns from equal workers to different ones."""
    fixed = {"homogeneous": -math.inf, "extreme": math.inf}
    return fixed[spread] if spread in fixed else -float(spread)


def _rules(results: Results, runs: Sequence[Loaded]) -> list[str]:
    """The method of each run, with the settings added that would otherwise differ inside a cell."""
    by = results.curves_by
    methods = [run.run.config.aggregator if by in _HEAT_MAP_AXES else _method(run.run, by) for run in runs]
    keys = [
        (method, run.run.config.num_byzantine, _spread(run), run.run.config.attack)
        for method, run in zip(methods, runs, strict=True)
    ]
    others = [name for name in results.sweep.varied if name not in (by, *_HEAT_MAP_AXES)]
    splitting = _differing(keys, [run.run for run in runs], others)
    return [_join(method, run.run, splitting) for method, run in zip(methods, runs, strict=True)]


def _heat_map(rule: str, runs: Sequence[Loaded], f: tuple[int, ...], spread: tuple[str, ...]) -> HeatMap:
    worst = np.full((len(f), len(spread)), np.nan)
    complete = np.zeros(worst.shape, dtype=bool)
    for i, j in np.ndindex(*worst.shape):
        here = [run for run in runs if (run.run.config.num_byzantine, _spread(run)) == (f[i], spread[j])]
        accuracies: dict[str, list[float]] = {}
        for run in here:
            if run.done and run.summary is not None:
                accuracies.setdefault(run.run.config.attack, []).append(100 * run.summary.final_accuracy)
        if accuracies:
            worst[i, j] = min(float(np.mean(values)) for values in accuracies.values())
            complete[i, j] = all(run.done for run in here)
    return HeatMap(rule, f, spread, worst, complete)


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
    rows = math.ceil(len(maps) / columns)
    cells = len(maps[0].spread), len(maps[0].f)
    each = max(1.7, 0.62 * cells[0] + 0.5), max(1.3, 0.42 * cells[1] + 0.75)
    width = max(each[0] * columns + 1.1, 4.2)
    hatched = any(np.isnan(one.worst).any() for one in maps)
    notes = ["Worst case over attacks of the final test accuracy (%), mean over seeds."]
    if any((~one.complete & ~np.isnan(one.worst)).any() for one in maps):
        notes.append("\N{LESS-THAN OR EQUAL TO}: not all attacks have a finished run there.")
    partial = results.partial()
    if partial:
        notes.append(f"{partial[0].upper()}{partial[1:]}.")
    with matplotlib.rc_context(_FONTS):
        handles = [Patch(facecolor="white", edgecolor="0.5", hatch="////")] if hatched else []
        titles = [_wrap(one.rule, each[0], 10) for one in maps]
        lines = max(text.count("\n") for text in titles)
        words = ["missing"] if hatched else []
        figure, top = _layout(width, rows * (each[1] + lines * _LINE) + 0.3, handles, words, notes)
        top.suptitle(title, fontsize=11, weight="bold", parse_math=False)
        grid = top.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(maps):
                axes.set_visible(False)
                continue
            mesh = _draw_map(axes, maps[place])
            axes.set_title(titles[place], parse_math=False)
            if place % columns == 0:
                axes.set_ylabel("f", rotation=0, labelpad=8, va="center")
            else:
                axes.tick_params(labelleft=False)
            if place + columns >= len(maps):
                axes.set_xlabel("alpha")
            else:
                axes.tick_params(labelbottom=False)
        bar = top.colorbar(mesh, ax=grid, shrink=0.9, aspect=25)
        bar.set_label("Worst-case accuracy (%)")
        bar.set_ticks(list(range(0, 101, 20)))
    return figure


def _draw_map(axes: Axes, one: HeatMap) -> Any:
    mesh = axes.pcolormesh(one.worst, cmap="cividis", vmin=0, vmax=100, edgecolors="white", linewidth=1)
    for i, j in np.ndindex(*one.worst.shape):
        if np.isnan(one.worst[i, j]):
            axes.add_patch(
                Rectangle((j, i), 1, 1, facecolor="white", edgecolor="0.5", hatch="////", linewidth=0.5)
            )
            continue
        bound = "" if one.complete[i, j] else "\N{LESS-THAN OR EQUAL TO}"
        # cividis is dark below its middle.
        colour = "white" if one.worst[i, j] < 55 else "black"
        axes.text(
            j + 0.5, i + 0.5, f"{bound}{one.worst[i, j]:.1f}", ha="center", va="center", color=colour, size=9
        )
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
