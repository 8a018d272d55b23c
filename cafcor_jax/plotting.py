"""Pictures of results. Figures are made without pyplot, so nothing global changes and no window opens."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

# From the palette of Okabe and Ito, made to be told apart by the colour-blind.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"

# The scale of `filtering` ends at this many equal shares: as far above one share as 0 is below it.
_MAX_SHARES = 2.0
# Below this many shares a weight is what rounding leaves of 0.
_LEAST_SHARES = 1e-9
# Malicious workers get at least this part of the honest ones' height, to be seen when they are few.
_LEAST_HEIGHT = 0.25


def curves(metrics: Mapping[str, np.ndarray], title: str) -> Figure:
    """Test accuracy, training loss and epsilon spent, over the rounds of one run.

    Args:
      metrics: columns of `metrics.csv` (`cafcor_jax.workdir.read_metrics`); NaN where nothing was measured.
      title: what was run; may have several lines.

    Returns:
      A figure of two panels, or of three if the run has a privacy budget.
    """
    private = bool(np.isfinite(metrics["epsilon"]).any())
    figure = Figure(figsize=(11 if private else 8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, weight="bold")
    panels = figure.subplots(1, 3 if private else 2, width_ratios=[3, 3, 2] if private else [1, 1])

    accuracy = 100 * metrics["test_accuracy"]
    _line(panels[0], metrics["round"], accuracy, BLUE, "o")
    panels[0].set_title(f"Test accuracy (%): {accuracy[-1]:.1f} at the end", fontsize=10)
    panels[0].set_ylim(0, 100)

    _line(panels[1], metrics["round"], metrics["loss"], VERMILION, "s")
    panels[1].set_title("Training loss, mean over honest workers", fontsize=10)
    panels[1].set_ylim(bottom=0, top=1.05 * panels[1].get_ylim()[1])
    if private:
        _line(panels[2], metrics["round"], metrics["epsilon"], GREEN, "")
        panels[2].set_title("Privacy spent (epsilon)", fontsize=10)
        panels[2].set_ylim(bottom=0)
    return figure


def filtering(weights: np.ndarray, num_byzantine: int, title: str) -> Figure:
    """Who was filtered when: every worker's weight in every round, and what the malicious ones got together.

    A cell shows n w_i, the weight in equal shares 1/n: white is one share, orange less, blue more, and black
    is 0 (but for rounding). Malicious workers are above the line, stretched if they are few. The lower panel
    has their total weight in each round, beside f/n, their share of the workers.

    Args:
      weights: of all workers in the aggregate, [rounds, n], the honest ones first (`weights.npy`).
      num_byzantine: f, how many of the n are malicious. With f = 0 there is no line and no lower panel.
      title: what was run; may have several lines.

    Returns:
      A figure.

    Raises:
      ValueError: if the weights have another shape, or are not finite: a rule without weights (NaN) has
        nothing to show.

    Example:
        >>> figure = filtering(np.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]), 1, "a run")
        >>> figure.axes[1].lines[0].get_ydata().tolist()  # in percent
        [0.0, 25.0]
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 2 or not weights.size:
        raise ValueError(f"weights of shape {weights.shape} must be [rounds, workers], at least one of each.")
    if not np.isfinite(weights).all():
        raise ValueError("weights hold numbers that are not finite: the rule gives no weights to show.")
    rounds, n = weights.shape
    if not 0 <= num_byzantine < n:
        raise ValueError(f"num_byzantine={num_byzantine} must be at least 0 and less than the {n} workers.")

    height, below = float(np.clip(n / 25, 2.0, 4.0)), 1.2
    width = float(np.clip(rounds / 80, 8.0, 12.5))  # At least one pixel a round up to 1000.
    figure = Figure(figsize=(width, height + (below if num_byzantine else 0) + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, weight="bold")
    if num_byzantine:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[height, below])
        _malicious_weight(lower, weights[:, n - num_byzantine :].sum(1), num_byzantine / n)
    else:
        upper = lower = figure.subplots()
    _heat_map(upper, n * weights, num_byzantine)
    upper.set_xlim(0.5, rounds + 0.5)
    lower.set_xlabel("Round")
    lower.xaxis.set_major_locator(_whole_numbers())
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture as a PNG file.

    Args:
      figure: what to write.
      path: where to.
    """
    figure.savefig(path, format="png", dpi=150)


def _line(axes: Axes, rounds: np.ndarray, values: np.ndarray, colour: str, marker: str) -> None:
    shown = np.isfinite(values)  # A loss may have overflowed.
    # Markers help while there are few points, and hide the line when there are many. One point is no line.
    marker = (marker or "o") if shown.sum() == 1 else marker if shown.sum() <= 60 else ""
    axes.plot(
        rounds[shown],
        values[shown],
        color=colour,
        marker=marker,
        markersize=3.5,
        linewidth=1.6,
        clip_on=False,
    )
    axes.set_xlabel("Round")
    axes.set_xlim(0, rounds[-1] * 1.02)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _heat_map(axes: Axes, shares: np.ndarray, num_byzantine: int) -> None:
    """Weights in equal shares, rounds to the right and workers upwards, the malicious ones on top."""
    rounds, n = shares.shape
    honest = n - num_byzantine
    top = honest + max(num_byzantine, _LEAST_HEIGHT * honest)
    blocks = [("Honest", 0, honest, 0.0, float(honest))]
    if num_byzantine:
        blocks.append(("Malicious", honest, n, float(honest), top))
        axes.axhline(honest, color="white", linewidth=5)  # A black line alone is lost among zeros.
        axes.axhline(honest, color="black", linewidth=2)
    # The least weight is far from black also for those who see no red.
    scale = LinearSegmentedColormap.from_list("shares", [VERMILION, "white", BLUE])
    ticks = {}
    for name, first, end, low, high in blocks:
        cells = shares[:, first:end].T
        image = axes.imshow(
            np.ma.masked_where(np.abs(cells) < _LEAST_SHARES, cells),
            cmap=scale.with_extremes(bad="black"),
            vmin=0,
            vmax=_MAX_SHARES,
            origin="lower",
            aspect="auto",
            interpolation="nearest",  # Others mix weights of neighbours, and 0 with what is not.
            extent=(0.5, rounds + 0.5, low, high),
        )
        step = (high - low) / (end - first)
        for worker in _whole_numbers(5 if low == 0 else 2).tick_values(first, end - 1):
            if first <= worker < end:
                ticks[low + (worker - first + 0.5) * step] = f"{worker:.0f}"
        place = (-0.07, (low + high) / 2)
        axes.text(*place, name, transform=axes.get_yaxis_transform(), rotation=90, ha="right", va="center")
    axes.set_ylim(0, blocks[-1][-1])
    axes.set_yticks(list(ticks), list(ticks.values()))
    bar = axes.figure.colorbar(image, ax=axes, extend="max" if shares.max() > _MAX_SHARES else "neither")
    bar.set_label("in equal shares, 1/n")
    axes.set_title("Weight of each worker in the aggregate", fontsize=10, loc="left")
    axes.legend(
        handles=[Patch(color="black", label="weight 0")],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
        frameon=False,
        fontsize=9,
    )


def _malicious_weight(axes: Axes, total: np.ndarray, share: float) -> None:
    """The malicious workers' total weight over the rounds, and their share of the workers, in percent."""
    rounds = np.arange(1, len(total) + 1)
    _line(axes, rounds, 100 * total, VERMILION, "o")
    axes.axhline(100 * share, color="black", linestyle="--", linewidth=1.2)
    axes.set_title(
        f"Total weight of the malicious workers (%): {100 * total.mean():.1f} on average; "
        f"dashed: f/n = {100 * share:.1f}",
        fontsize=10,
        loc="left",
    )
    axes.set_ylim(0, 1.1 * 100 * max(total.max(), share))


def _whole_numbers(most: int = 9) -> MaxNLocator:
    """Ticks at whole numbers, and at one alone if there is no other."""
    return MaxNLocator(most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
