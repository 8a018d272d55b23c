"""`scripts/plot.py`: what it writes and prints, and what it says to bad input."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cafcor_jax import cli, sweep
from tests.test_figures import accuracy_of, finish, partial_sweep, plan, rising

ROOT = Path(__file__).parents[1]
ALWAYS = ["figure.png", "figure.pdf", "report.html"]


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.plot")


@pytest.fixture
def call(script, capsys):
    """Runs the script in this process: its status, what it printed, and its errors."""

    def run(*arguments):
        status = cli.status(lambda: script.main(["scripts/plot.py", *map(str, arguments)]))
        return status, *capsys.readouterr()

    return run


def rejected(outcome, *words):
    """The script failed with one sentence that has these words."""
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.fixture
def whole(tmp_path):
    """The folder of a sweep whose runs are all done."""
    axes = {"aggregator": ["caf", "median"], "attack": ["alie", "foe"], "seed": [1, 2]}
    found = plan(tmp_path, axes=axes)
    for run in found.runs:
        finish(run, rising(50 + run.config.seed))
    return tmp_path / "sweep"


def test_files_and_lines(call, whole):
    status, out, err = call(f"--sweep_dir={whole}")
    folder = whole / "figures"
    assert (status, err) == (0, "")
    assert out.splitlines() == [str(folder / name) for name in ALWAYS]
    assert sorted(path.name for path in folder.iterdir()) == sorted(ALWAYS)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    page = (folder / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and f"python scripts/plot.py --sweep_dir={whole}" in page
    # Again, over the old ones, to the same bytes.
    before = {name: (folder / name).read_bytes() for name in ALWAYS}
    assert call(f"--sweep_dir={whole}") == (status, out, err)
    assert {name: (folder / name).read_bytes() for name in ALWAYS} == before


def test_every_flag_changes_the_figure(call, whole):
    seen = set()
    for flags in ([], ["--curves_by=attack"], ["--x=epsilon"], ["--x=seconds"], ["--columns=1"]):
        assert call(f"--sweep_dir={whole}", *flags)[0] == 0
        seen.add((whole / "figures" / "figure.png").read_bytes())
    assert len(seen) == 5


def test_heat_maps_are_drawn_where_they_can_be(call, tmp_path):
    axes = {"attack": ["alie", "foe"], "num_byzantine": [1, 3], "dataset": ["synthetic", "mnist"]}
    found = plan(tmp_path, axes=axes)
    for run in found.runs:
        finish(run, rising(accuracy_of(run.config)))
    names = [f"heatmap_{dataset}.{kind}" for dataset in axes["dataset"] for kind in ("png", "pdf")]
    folder = tmp_path / "sweep" / "figures"
    _, out, _ = call(f"--sweep_dir={tmp_path / 'sweep'}", "--noheatmap")
    assert out.splitlines() == [str(folder / name) for name in ALWAYS]
    assert (folder / "report.html").read_text().count("<img ") == 1
    status, out, err = call(f"--sweep_dir={tmp_path / 'sweep'}")
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(str(folder / name) for name in (*ALWAYS, *names))
    assert (folder / "report.html").read_text().count("<img ") == 3


def test_a_heat_map_that_cannot_be(call, whole):
    status, out, err = call(f"--sweep_dir={whole}", "--heatmap")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].endswith("on synthetic the sweep has one f and one partition only.")


def test_partial_results_are_drawn_and_said(call, tmp_path):
    found, runs, failed = partial_sweep(tmp_path)
    (tmp_path / "sweep" / "failures.json").write_text(json.dumps(failed))
    metrics = runs["caf", 1].folder / "metrics.csv"
    metrics.write_text("nothing\n")
    status, out, err = call(f"--sweep_dir={tmp_path / 'sweep'}")
    assert status == 0
    assert out.splitlines()[3:] == [
        "partial: 5 of 9 runs are missing (1 not finished, 1 failed, 1 cannot be read); the figures say so"
    ]
    assert err.startswith(f"warning: left out: {metrics} ") and err.count("\n") == 1
    page = (tmp_path / "sweep" / "figures" / "report.html").read_text()
    assert "2 of 3 seeds" in page and "The worker&#x27;s batch is too large." in page and str(metrics) in page


def test_no_finished_run(call, tmp_path):
    found = plan(tmp_path, axes={"seed": [1, 2]})
    rejected(call(f"--sweep_dir={tmp_path / 'sweep'}"), "no finished run", "2 planned", found.command)
    assert not (tmp_path / "sweep" / "figures").exists()


def test_only_corrupt_runs(call, tmp_path):
    found = plan(tmp_path, axes={"seed": [1, 2]})
    finish(found.runs[0], rising(50))
    (found.runs[0].folder / "metrics.csv").unlink()
    status, out, err = call(f"--sweep_dir={tmp_path / 'sweep'}")
    assert (status, out) == (2, "") and [line.split(":")[0] for line in err.splitlines()] == [
        "warning",
        "error",
    ]
    assert not (tmp_path / "sweep" / "figures").exists()


def test_bad_folders(call, tmp_path, whole):
    rejected(call(), "--sweep_dir is not given")
    rejected(call(f"--sweep_dir={tmp_path / 'nowhere'}"), str(tmp_path / "nowhere"), "does not exist")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "holiday.jpg").touch()
    rejected(call(f"--sweep_dir={tmp_path / 'other'}"), str(tmp_path / "other"), "no sweep")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["holiday.jpg"]
    for damage in ("", "[]", '{"name": 1}', "\x00\x01"):
        (whole / "sweep.json").write_text(damage)
        rejected(call(f"--sweep_dir={whole}"), str(whole / "sweep.json"), "damaged")
    assert not (whole / "figures").exists()


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--curves_by=colour", ("curves_by='colour'", "aggregator, seed")),
        ("--curves_by=rounds", ("curves_by='rounds'", "does not vary")),
        ("--x=time", ("time", "round")),
        ("--columns=0", ("columns", "positive")),
        ("--columns=two", ("columns", "two")),
        ("--colour=red", ("colour",)),
        ("figure1", ("figure1", "not a flag")),
    ],
)
def test_bad_flags(call, tmp_path, flag, words):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"], "seed": [1, 2]})
    finish(found.runs[0], rising(50))
    rejected(call(f"--sweep_dir={tmp_path / 'sweep'}", flag), *words)
    assert not (tmp_path / "sweep" / "figures").exists()


def test_a_folder_that_cannot_be_written(call, whole):
    (whole / "figures").write_text("a file")
    rejected(call(f"--sweep_dir={whole}"), str(whole / "figures"), "cannot be written")


def test_a_pool_that_moved_with_its_sweep(call, tmp_path, whole):
    (tmp_path / "elsewhere").mkdir()
    for name in ("pool", "sweep"):
        os.rename(tmp_path / name, tmp_path / "elsewhere" / name)
    status, out, err = call(f"--sweep_dir={tmp_path / 'elsewhere' / 'sweep'}")
    assert (status, err) == (0, "") and len(sweep.load(tmp_path / "elsewhere" / "sweep").runs) == 8


def test_as_a_program(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "plot.py")]
    done = subprocess.run(
        [*command, f"--sweep_dir={tmp_path / 'no'}"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_help(script, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(["plot.py", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--sweep_dir=", "--curves_by=", "--x=round", "--columns=2", "--heatmap"):
        assert flag in out
