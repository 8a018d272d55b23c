"""A run's metrics as TensorBoard event files.

`metrics.csv` and `weights.npy` are the truth, and event files a copy of them. So nothing of an old copy is
kept: a writer removes it, and whoever goes on with a run first adds the rounds that are done.

    scalars      the columns of `metrics.csv`, see `TAGS`; what is not a finite number is left out
    histograms   weights/honest and weights/malicious, of rules that give weights
    text         the settings

Events are written at once, by the calling thread. Writing needs the package `tensorboardX`, which comes with
the extra `cafcor_jax[tensorboard]`; looking at them needs TensorBoard itself: `tensorboard --logdir runs`.

Example:
    >>> import tempfile
    >>> rows = [{"round": 1, "loss": 2.3, "seconds": 0.1}, {"round": 2, "loss": 1.9, "seconds": 0.1}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with writer(folder, {"seed": 1}) as events:  # doctest: +SKIP
    ...         events.add(rows, np.full((2, 5), 0.2), num_honest=4)
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cafcor_jax.errors import UserError
from cafcor_jax.workdir import read_metrics, writing

#: Where the columns of metrics.csv are found in TensorBoard.
TAGS = {
    "loss": "train/loss",
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "epsilon": "privacy/epsilon",
    "gradient_norm": "gradient/norm",
    "clipped": "gradient/clipped",
    "deviation": "aggregation/deviation",
    "honest_weight": "aggregation/honest_weight",
    "separation": "aggregation/separation",
    "not_finite": "aggregation/not_finite",
    "flagged": "aggregation/flagged",
    "false_alarms": "aggregation/false_alarms",
    "law_fits": "aggregation/law_fits",
    "seconds": "time/seconds",
}

# TensorBoard takes every file with "tfevents" in its name, and reads a folder's in the order of their names.
_NAME = "events.out.tfevents.{seconds:010d}.{microseconds:06d}.cafcor_jax"
_OURS = "events.out.tfevents.*.cafcor_jax"
_BINS = 30


@dataclasses.dataclass(frozen=True)
class Writer:
    """Open event files; made by `writer`.

    Attributes:
      path: the file.
    """

    path: Path
    _records: Any
    _library: types.SimpleNamespace

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, rows: Sequence[Mapping[str, float | None]], weights: np.ndarray, num_honest: int) -> None:
        """Writes rounds, so that a reader sees them at once.

        The last round's time is now, and each earlier one's earlier by the seconds that came between.

        Args:
          rows: k rounds, by the columns of metrics.csv; None for what was not measured.
          weights: of all workers in the aggregate, [k, n], the honest ones first; NaN for rules without.
          num_honest: how many of the n are honest.

        Raises:
          ValueError: if the weights are not those of these rounds.
          UserError: if the file cannot be written.
        """
        weights = np.asarray(weights, np.float64)
        if weights.ndim != 2 or len(weights) != len(rows):
            raise ValueError(
                f"weights of shape {weights.shape} do not fit {len(rows)} rows: they must be [rows, workers]."
            )
        if not 0 <= num_honest <= weights.shape[1]:
            raise ValueError(f"num_honest={num_honest} must be from 0 to the {weights.shape[1]} workers.")
        with writing(self.path):
            for row, weight, moment in zip(rows, weights, _times(rows), strict=True):
                values = [*self._scalars(row), *self._histograms(weight, num_honest)]
                self._write(moment, int(row["round"] or 0), summary=self._library.Summary(value=values))
            self._records.flush()

    def close(self) -> None:
        """Closes the file; all of it is written."""
        with writing(self.path):
            self._records.close()

    def _scalars(self, row: Mapping[str, float | None]) -> Iterator[Any]:
        for column, tag in TAGS.items():
            value = row.get(column)
            if value is not None and math.isfinite(value):
                yield self._library.Summary.Value(tag=tag, simple_value=value)

    def _histograms(self, weights: np.ndarray, num_honest: int) -> Iterator[Any]:
        if not weights.size or not np.isfinite(weights).all():
            return
        # The same edges for both, to compare them by.
        edges = np.histogram_bin_edges(weights, _BINS, (min(0.0, weights.min()), weights.max() or 1.0))
        for group, values in (("honest", weights[:num_honest]), ("malicious", weights[num_honest:])):
            if values.size:
                histogram = self._library.HistogramProto(
                    min=values.min(),
                    max=values.max(),
                    num=values.size,
                    sum=values.sum(),
                    sum_squares=(values**2).sum(),
                    bucket_limit=edges[1:],
                    bucket=np.histogram(values, edges)[0],
                )
                yield self._library.Summary.Value(tag=f"weights/{group}", histo=histogram)

    def _write(self, moment: float, step: int, **what: Any) -> None:
        event = self._library.Event(wall_time=moment, step=step, **what)
        self._records.write(event.SerializeToString())


def writer(folder: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Writer:
    """Begins the event files of a folder anew.

    Event files that an earlier writer left there are removed, and nothing else is. A TensorBoard that is open
    then shows the new ones; with `--load_fast=false` only after it is started again.

    Args:
      folder: where to; made if it is missing.
      settings: what to show as text, by name.

    Returns:
      What rounds are added to; close it, or use it in a `with`.

    Raises:
      UserError: if tensorboardX is not installed, or the folder cannot be written.
    """
    library = _library()
    now = time.time_ns() // 1000
    path = Path(folder) / _NAME.format(seconds=now // 10**6, microseconds=now % 10**6)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(_OURS):
            old.unlink()
        # Not tensorboardX's SummaryWriter: on a full disk its thread dies, and its queue blocks for ever.
        result = Writer(path, library.RecordWriter(str(path)), library)
        result._write(now / 1e6, 0, file_version="brain.Event:2")
        if settings:
            result._write(now / 1e6, 0, summary=library.text("settings", _table(settings)))
        result._records.flush()
    return result


def export(run: str | os.PathLike[str], num_honest: int, settings: Mapping[str, Any] | None = None) -> Path:
    """Writes the event files of a run that is finished, from its metrics.csv and weights.npy.

    Args:
      run: the run's folder; the events go to its subfolder `tensorboard`.
      num_honest: how many of its workers are honest.
      settings: what to show as text, by name.

    Returns:
      The event file.

    Raises:
      UserError: if tensorboardX is not installed, or a file cannot be read or written.
    """
    check_installed()
    rows = rows_of(read_metrics(Path(run) / "metrics.csv"))
    try:
        weights = np.load(Path(run) / "weights.npy")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{Path(run) / 'weights.npy'} cannot be read: {error}.") from None
    if weights.ndim != 2 or len(weights) != len(rows):
        raise UserError(
            f"{Path(run) / 'weights.npy'} has the shape {weights.shape}, which does not fit the {len(rows)} "
            "rounds of metrics.csv: put the files of one run there."
        )
    with writer(Path(run) / "tensorboard", settings) as events:
        events.add(rows, weights, num_honest)
    return events.path


def rows_of(metrics: Mapping[str, np.ndarray]) -> list[dict[str, float | None]]:
    """Columns as rows, for `Writer.add`.

    Args:
      metrics: from `cafcor_jax.workdir.read_metrics`.

    Returns:
      One dictionary a round.

    Example:
        >>> rows_of({"round": np.array([1.0, 2.0]), "loss": np.array([2.5, 1.5])})
        [{'round': 1.0, 'loss': 2.5}, {'round': 2.0, 'loss': 1.5}]
    """
    columns = [values.tolist() for values in metrics.values()]
    return [dict(zip(metrics, row, strict=True)) for row in zip(*columns, strict=True)]


def check_installed() -> None:
    """Raises a UserError if event files cannot be written, to be told before a run and not after it."""
    _library()


def _times(rows: Sequence[Mapping[str, float | None]]) -> np.ndarray:
    """When the rounds ended, if the last one ended now."""
    seconds = np.array([row.get("seconds") or 0.0 for row in rows])
    after = np.cumsum(np.nan_to_num(seconds[::-1]))[::-1]
    return time.time() - np.append(after[1:], 0.0)[: len(rows)]


def _table(settings: Mapping[str, Any]) -> str:
    """A table in Markdown."""
    lines = ["| setting | value |", "|---|---|"]
    for name, value in settings.items():
        text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


def _library() -> types.SimpleNamespace:
    """What is used of the package `tensorboardX`, which is installed for event files only."""
    try:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary
        from tensorboardX.summary import text
    except ImportError as error:
        raise UserError(
            "TensorBoard event files need the package tensorboardX; install it with: "
            'pip install "cafcor_jax[tensorboard]".'
        ) from error
    return types.SimpleNamespace(
        RecordWriter=RecordWriter,
        Event=Event,
        HistogramProto=HistogramProto,
        Summary=Summary,
        text=text,
    )
