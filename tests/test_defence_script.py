"""`scripts/defence.py`, called in this process, at its smallest setting."""

import importlib

import numpy as np
import pytest

from cafcor_jax import cli
from cafcor_jax.aggregators import noise_law
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def defence():
    return importlib.import_module("scripts.defence")


@pytest.fixture
def run(defence, monkeypatch, capsys):
    monkeypatch.setattr(defence, "SETTINGS", ((10, 2, 200, 1.0, 0.0),))

    def call(*flags):
        status = cli.status(lambda: defence.main(["defence.py", *flags]))
        return status, capsys.readouterr()

    return call


def test_honest_rounds_raise_some_alarms_where_many_are_allowed_but_no_more_than_stated(run):
    """The limits are bounds, so there are fewer alarms than stated; with a large chance there are some."""
    status, printed = run("--part=alarms", "--rounds=290", "--false_alarm=0.5")
    assert status == 0
    row = next(line for line in printed.out.splitlines() if line.split()[:2] == ["10", "2"])
    in_a_round, in_runs = (int(row.split()[place]) for place in (5, 7))
    assert 0 < in_a_round <= 145 and 0 < in_runs <= 145


def test_the_longest_hidden_bias_in_sums_is_shorter_as_theory_says(run):
    def row(*flags):
        _, printed = run("--part=hidden", "--draws=6", "--clip_norm=0", *flags)
        row = next(line for line in printed.out.splitlines() if line.split()[:2] == ["10", "2"])
        return np.array([float(word) for word in row.split()[5:9]])

    one, summed = row(), row("--summed=29")
    variance, signal = noise_law.of_sum_of_momenta(0.85, 29)
    # Half of the chance of a false alarm in sums makes limits a little wider.
    np.testing.assert_allclose(one / summed, signal / np.sqrt(variance), rtol=0.08)


def test_a_matrix_is_the_mean_over_seeds_of_the_runs_that_are_done(run, tmp_path):
    table = tmp_path / "results.csv"
    table.write_text(
        "panel,curve,attack,seed,final_accuracy\n"
        "A,CAF,alie,1,0.5\nA,CAF,alie,2,0.7\nA,Mean,alie,1,0.1\nA,Mean,alie,2,\n"
        "A,CAF,foe,1,\nA,CAF,foe,2,\nA,Mean,foe,1,\nA,Mean,foe,2,\n"
        "B,CAF,foe,1,0.25\n"
    )
    status, printed = run("--part=matrix", f"--results={table}", f"--plot={tmp_path / 'matrix.png'}")
    assert status == 0
    lines = printed.out.splitlines()
    assert lines.index("| CAF | 60.0 +- 14.1 (2) |") == lines.index("| A | alie |") + 2
    assert "| Mean | 10.0 (1) |" in lines
    assert lines.index("| CAF | 25.0 (1) |") == lines.index("| B | foe |") + 2
    assert (tmp_path / "matrix.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--part is not given"),
        (["--part=nothing"], "nothing"),
        (["--part=matrix", "--results=missing.csv"], "results=missing.csv cannot be read"),
        (["--part=alarms", "--rounds=0"], "rounds"),
        (["--part=hidden", "--summed=-1"], "summed"),
    ],
)
def test_bad_input_is_one_sentence(run, flags, sentence):
    status, printed = run(*flags)
    assert status != 0
    assert sentence in printed.err and "Traceback" not in printed.err


def test_a_table_without_attacks_is_refused(run, tmp_path):
    table = tmp_path / "results.csv"
    table.write_text("panel,curve,seed,final_accuracy\nA,CAF,1,0.5\n")
    status, printed = run("--part=matrix", f"--results={table}")
    assert status != 0 and "has no column attack" in printed.err
