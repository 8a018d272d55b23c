"""Pictures of results. Figures are made without pyplot, so nothing global changes and no window opens."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# From the palette of Okabe and Ito, made to be told apart by the colour-blind.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"


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


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture as a PNG file.

    Args:
      figure: what to write.
      path: where to.
    """
    figure.savefig(path, format="png", dpi=150)


def _line(axes: Axes, rounds: np.ndarray, values: np.ndarray, colour: str, marker: str) -> None:
    shown = np.isfinite(values)  # A loss may have overflowed.
    # Markers help while there are few points, and hide the line when there are many.
    marker = marker if shown.sum() <= 60 else ""
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
