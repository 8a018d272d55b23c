import io

import pytest
from rich.console import Console

from cafcor_jax import progress


def go(shown, rounds, every=1):
    with shown.phase("compiling"):
        pass
    shown.log("[bold]not markup[/bold]")
    with shown.training(0, rounds):
        for round in range(1, rounds + 1):
            accuracy = 0.5 if round % every == 0 or round == rounds else None
            shown.update(round, loss=1.25, accuracy=accuracy, epsilon=float(round))


@pytest.mark.parametrize(
    "rounds, every, lines", [(5, 1, 5), (10, 5, 10), (30, 30, 16), (400, 10, 40), (5000, 1, 51), (1, 1, 1)]
)
def test_a_log_has_few_lines(rounds, every, lines):
    stream = io.StringIO()
    go(progress.automatic(stream), rounds, every)
    text = stream.getvalue()
    shown = [line for line in text.splitlines() if line.startswith("round ")]
    assert abs(len(shown) - lines) <= 1 and len(shown) <= 60
    assert f"round {rounds}/{rounds}  loss 1.250  accuracy 50.0%  epsilon {rounds}.00" in shown[-1]
    assert "compiling ...\n[bold]not markup[/bold]\n" in text
    assert "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_gets_a_bar(width):
    stream = io.StringIO()
    go(progress.Live(Console(file=stream, force_terminal=True, width=width)), 3)
    text = stream.getvalue()
    assert "compiling" in text and "[bold]not markup[/bold]" in text
    assert "3/3" in text
    if width >= 80:
        assert "loss 1.250  acc 50.0%  eps 3.00" in text


def test_no_epsilon_without_privacy():
    stream = io.StringIO()
    shown = progress.Plain(stream)
    with shown.training(0, 1):
        shown.update(1, loss=1.0, accuracy=0.1, epsilon=float("inf"))
    assert "epsilon" not in stream.getvalue()


def test_silence(capsys):
    go(progress.Silent(), 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (61.4, "1:01"), (3599.6, "1:00:00"), (7384, "2:03:04")]
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


class Clock:
    """Stands still unless told."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def train(shown, rounds, before=0, total=10):
    with shown.training(before, total):
        for round in range(before + 1, before + rounds + 1):
            shown.update(round, loss=1.0, accuracy=None, epsilon=1.0)


def test_the_time_left_of_a_sweep_is_that_of_what_is_still_to_do(monkeypatch):
    clock, stream, done = Clock(monkeypatch), io.StringIO(), {"old"}
    with progress.SweepProgress(dict.fromkeys(["old", *"abcdef"], 5.0), done.__contains__, stream) as shown:

        def run(name, result, seconds, *, failed=False, finished=(), **options):
            rounds = shown.begin(name)
            clock.now += seconds
            done.update(finished)
            if failed or name in finished:
                train(rounds, 10 - options.get("before", 0), **options)
            shown.end(result, failed=failed)
            return stream.getvalue().splitlines()[-1]

        # Nothing has been timed: a run that failed says nothing about the others.
        assert run("a", "failed: no", 7, failed=True) == "2/7  a  failed: no  0:07"
        # Another process has it: it is still to do, and took no time.
        assert run("b", "elsewhere", 0) == "2/7  b  elsewhere  0:00"
        # Four are left at 60 s each, b among them.
        assert run("c", "90%", 60, finished="c") == "3/7  c  90%  1:00  4:00 left"
        # Meanwhile the other process has ended b: with two at work it is 40 s each, and two are left.
        assert run("d", "90%", 60, finished="bd") == "5/7  d  90%  1:00  1:20 left"
        # Half of e had been done before: 3.5 runs in 150 s.
        assert run("e", "90%", 30, finished="e", before=5) == "6/7  e  90%  0:30  0:43 left"
        assert run("f", "90%", 60, finished="f") == "7/7  f  90%  1:00  0:00 left"


def test_a_terminal_gets_a_bar_over_the_sweep(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = progress.SweepProgress({"a": 5.0, "b": 15.0}, lambda name: False, stream)
    train(shown.begin("a"), 0)
    clock.now += 10
    train(shown.begin("a"), 5)
    (task,) = shown._bar.tasks
    assert task.completed / task.total == pytest.approx(2.5 / 20)
    assert task.fields["text"] == "0/2 runs  1:10 left  a"
