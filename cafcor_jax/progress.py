"""What a person sees while a run goes on: a live bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
)
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

# A log gets about this many lines for the rounds of one run, however long it is.
MAX_LINES = 50


class Progress(Protocol):
    """Where a run says what it does."""

    def log(self, text: str) -> None:
        """Shows lines that stay."""
        ...

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Shows that a step of the set-up, such as "compiling", is going on."""
        ...

    def training(self, done: int, total: int) -> AbstractContextManager[None]:
        """Opens the part in which `update` is called; `done` rounds were there before."""
        ...

    def update(self, round: int, *, loss: float, accuracy: float | None, epsilon: float) -> None:
        """Shows that `round` rounds are done; `accuracy` only where it was just measured."""
        ...


def automatic(stream: TextIO | None = None) -> Progress:
    """A live bar if the stream is a terminal, else plain lines.

    Args:
      stream: where to write; standard output unless told.

    Returns:
      The one that fits.
    """
    stream = stream or sys.stdout
    return Live(Console(file=stream)) if stream.isatty() else Plain(stream)


class Silent:
    """Shows nothing."""

    def log(self, text: str) -> None:
        """Shows nothing."""

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Shows nothing."""
        return contextlib.nullcontext()

    def training(self, done: int, total: int) -> AbstractContextManager[None]:
        """Shows nothing."""
        return contextlib.nullcontext()

    def update(self, round: int, *, loss: float, accuracy: float | None, epsilon: float) -> None:
        """Shows nothing."""


class Plain:
    """Lines without control characters, written at once: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._total = 1
        self._begin = (0, 0.0)
        self._next = 0.0

    def log(self, text: str) -> None:
        """Prints the lines."""
        print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Prints one line when the phase begins."""
        self.log(f"{text} ...")
        yield

    @contextlib.contextmanager
    def training(self, done: int, total: int) -> Iterator[None]:
        """Starts the clock."""
        self._total, self._begin, self._next = total, (done, time.monotonic()), 0.0
        yield

    def update(self, round: int, *, loss: float, accuracy: float | None, epsilon: float) -> None:
        """Prints a line if enough rounds came after the last one; twice as many without an evaluation."""
        spacing = self._total / MAX_LINES
        due = self._next if accuracy is not None else self._next + spacing
        if round < due and round < self._total:
            return
        self._next = round + spacing
        done, begin = self._begin
        speed = (round - done) / max(time.monotonic() - begin, 1e-9)
        self.log(
            f"round {round}/{self._total}  {_values(loss, accuracy, epsilon)}  {speed:.2f} rounds/s  "
            f"{duration((self._total - round) / speed)} left"
        )


class Live:
    """A moving line at the bottom of a terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._accuracy: float | None = None

    def log(self, text: str) -> None:
        """Prints above the moving line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Turns a spinner beside the text, and removes both afterwards."""
        with self._console.status(text):
            yield

    @contextlib.contextmanager
    def training(self, done: int, total: int) -> Iterator[None]:
        """Shows the bar."""
        columns = (SpinnerColumn(), BarColumn(bar_width=None), _Status(table_column=Column(no_wrap=True)))
        # Rounds may take 10 s and more: the speed is that of the last ten minutes.
        with Bar(*columns, console=self._console, expand=True, speed_estimate_period=600) as self._bar:
            self._task = self._bar.add_task("", total=total, completed=done, values="")
            yield
        self._bar = None

    def update(self, round: int, *, loss: float, accuracy: float | None, epsilon: float) -> None:
        """Moves the bar; it goes on showing the accuracy measured last."""
        if accuracy is not None:
            self._accuracy = accuracy
        if self._bar is not None:
            values = _values(loss, self._accuracy, epsilon, short=True)
            self._bar.update(self._task, completed=round, values=values)


class _Status(ProgressColumn):
    """Everything in numbers; one text, so that a narrow terminal cuts off its end and nothing else."""

    def render(self, task: Task) -> Text:
        parts = [f"{task.completed:.0f}/{task.total:.0f}"]
        speed = task.finished_speed or task.speed
        if speed:
            parts.append(f"{speed:.2f} rounds/s")
        if task.time_remaining is not None:
            parts.append(f"{duration(task.time_remaining)} left")
        return Text("  ".join(filter(None, [*parts, task.fields["values"]])))


def _values(loss: float, accuracy: float | None, epsilon: float, *, short: bool = False) -> str:
    parts = [f"loss {loss:.3f}"]
    if accuracy is not None:
        parts.append(f"{'acc' if short else 'accuracy'} {accuracy:.1%}")
    if math.isfinite(epsilon):
        parts.append(f"{'eps' if short else 'epsilon'} {epsilon:.2f}")
    return "  ".join(parts)


class SweepProgress:
    """Many runs one after the other: a bar over all of them on a terminal, a line a run in a log.

    The time left is that of the runs that are neither done nor failed, at the speed measured since the
    beginning. Runs that other processes finish meanwhile count in both.

    Args:
      work: what each run costs, by its name, in any unit: the bar and the time left go by it.
      is_done: whether the run of that name is done, whoever did it.
      stream: where to write; standard output unless told.
    """

    def __init__(
        self, work: Mapping[str, float], is_done: Callable[[str], bool], stream: TextIO | None = None
    ):
        self._work = dict(work)
        self._is_done = is_done
        self._failed: set[str] = set()
        # Which part of each run is done, and was before there was a clock.
        self._part = {name: float(is_done(name)) for name in work}
        self._before = dict(self._part)
        self._begin = time.monotonic()
        self._run = ("", 0.0)
        self._console = Console(file=stream or sys.stdout)
        self._bar = Bar(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            _SweepStatus(table_column=Column(no_wrap=True)),
            console=self._console,
            expand=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=sum(self._work.values()), text="")

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, name: str) -> Progress:
        """Says that a run begins, and returns whom it may tell of its rounds."""
        self._run = name, time.monotonic()
        self._failed.discard(name)
        self._show()

        def resume(part: float) -> None:
            self._before[name] = part

        def show(part: float) -> None:
            self._part[name] = part
            self._show()

        return _Rounds(resume, show)

    def end(self, result: str, *, failed: bool = False) -> None:
        """Says how the run ended: done, failed, or left to another process."""
        name, begin = self._run
        seconds = time.monotonic() - begin
        for one, part in self._part.items():
            if part < 1 or one == name:  # All rounds are not yet a result.
                self._part[one] = float(self._is_done(one))
        if failed:
            self._failed.add(name)
            self._begin += seconds  # It says nothing about the others.
        parts = [self._ended(), name, result, duration(seconds), self._show()]
        self._console.print("  ".join(filter(None, parts)), markup=False, highlight=False, soft_wrap=True)

    def _ended(self) -> str:
        return f"{len(self._failed) + sum(part == 1 for part in self._part.values())}/{len(self._work)}"

    def _show(self) -> str:
        """Moves the bar; returns the time that is left in words, which are none before anything was timed."""
        names = self._work.keys() - self._failed
        total, done, before = (
            math.fsum(self._work[name] * part[name] for name in names)
            for part in (dict.fromkeys(names, 1.0), self._part, self._before)
        )
        left = ""
        if done > before:
            seconds = time.monotonic() - self._begin
            left = f"{duration((total - done) * seconds / (done - before))} left"
        text = "  ".join(filter(None, [f"{self._ended()} runs", left, self._run[0]]))
        self._bar.update(self._task, total=total, completed=done, text=text)
        return left


class _Rounds(Silent):
    """Passes on which part of a run's rounds was done before, and is done."""

    def __init__(self, resume: Callable[[float], object], show: Callable[[float], object]):
        self._resume = resume
        self._show_part = show
        self._total = 1

    def training(self, done: int, total: int) -> AbstractContextManager[None]:
        """Keeps the number of rounds."""
        self._total = total
        self._resume(done / total)
        self._show_part(done / total)
        return super().training(done, total)

    def update(self, round: int, *, loss: float, accuracy: float | None, epsilon: float) -> None:
        """Shows the part that is done."""
        self._show_part(round / self._total)


class _SweepStatus(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["text"])


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds.

    Example:
      >>> duration(75), duration(3700)
      ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
