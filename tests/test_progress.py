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
